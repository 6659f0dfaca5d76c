"""LoRA adapters that peft saves, merged and resharded, and loaded by peft."""

import sys
from pathlib import Path

import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.tools.commands import shardspec
from tests.tools.language_models import CONFIGS, answers, model_of
from tests.tools.peft_merges import KINDS, compare
from tests.tools.table import Row, write_rows


def adapted(folder: Path) -> torch.Tensor:
    """Return what the base model answers with an adapter, of which nothing may be missing."""
    model = model_of(CONFIGS["llama"])
    bare = answers(model)
    wrapped = PeftModel.from_pretrained(model, str(folder))
    found = answers(wrapped.eval())
    assert not torch.allclose(found, bare, atol=1e-2)
    return found


def save(folder: Path, base: PreTrainedModel, **config: object) -> None:
    """Save an adapter whose matrices, of which half start as zeros, are random."""
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, **config))
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(str(folder))


def main(place: Path, rows_file: str) -> None:
    targets = ["q_proj", "down_proj"]
    kinds: dict[str, dict[str, object]] = {
        "two": {"target_modules": targets},
        "dora": {"target_modules": targets, "use_dora": True},
        "head": {"target_modules": targets, "modules_to_save": ["lm_head"]},
    }
    for kind, config in kinds.items():
        here = place / kind
        save(here / "saved", model_of(CONFIGS["llama"]), **config)
        wanted = adapted(here / "saved")
        shardspec("verify", here / "saved")
        shardspec("merge", here / "saved", "-o", f"{here}/merged/")
        cut = ("--mesh", "2", "--rule", "*lora_A.weight", "[R,S0]", "--rule", "*B.weight", "[S0,R]")
        shardspec("reshard", here / "saved", "-o", here / "own", *cut)
        shardspec("merge", here / "own", "-o", f"{here}/back/")
        for folder in (here / "merged", here / "back"):
            config_file = (folder / "adapter_config.json").read_text()
            assert config_file == (here / "saved" / "adapter_config.json").read_text()
            assert torch.equal(adapted(folder), wanted), folder
            print(kind, sorted(path.name for path in folder.iterdir()), file=sys.stderr)
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            assert compare(kind, place / "merges" / kind / str(dtype), dtype) > 0, kind
    rows = [
        Row(
            *("PEFT", peft.__version__, "LoRA adapters; with DoRA, with a whole matrix besides"),
            *("yes", "yes, by their outputs", "`--to huggingface`, whole and resharded"),
            "yes, the outputs are equal",
        ),
        Row(
            *("PEFT", peft.__version__, f"{len(KINDS)} kinds of adapters, `merge --lora`"),
            *("yes", "as `merge_and_unload`: 1e-6 in float32, one unit in bfloat16"),
            *("`--to safetensors`", "not tried"),
        ),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
