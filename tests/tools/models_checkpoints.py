"""Families of models: transformers' own models go to every place and back by one command each.

What ranks hold of a model that transformers shards is compared with the layout that says so.
"""

import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from shardspec import Layout, model_layouts
from shardspec.families.family import family_of
from tests.families.test_shapes import PUBLISHED as PUBLISHED_SIZES
from tests.families.test_shapes import SAMPLES, SEEN
from tests.families.test_shapes import model as model_of_config
from tests.tools.commands import in_process, leave
from tests.tools.language_models import answers, loaded
from tests.tools.table import (
    FUSED,
    HF_TP,
    PUBLISHED,
    THERE_AND_BACK,
    Cell,
    Row,
    write_rows,
)

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 112,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    **_COMMON,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "llama, tied": {**_COMMON, "tie_word_embeddings": True},
    "mistral": {**_COMMON, "head_dim": 16},
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 16},
    "qwen3_moe": {
        **_COMMON,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    },
    "glm4_moe": {**_EXPERTS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v3": _LATENT,
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None},
    "gpt_oss": {
        **_COMMON,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gemma3_text": {**_COMMON, "head_dim": 16},
    "phi3": _COMMON,
    "olmo2": _COMMON,
    "starcoder2": _COMMON,
    "mixtral": {**_COMMON, "num_local_experts": 4},
}


_NOTES = {
    ("gemma3_text", THERE_AND_BACK): "names of Megatron-Bridge's layers, read and not run",
    ("deepseek_v3", THERE_AND_BACK): "MTP layers: bits by Megatron-core alone",
    ("glm4_moe", THERE_AND_BACK): "MTP layers: bits by Megatron-core alone",
}


def type_of(label: str) -> str:
    """Return the model_type of a label of `MODELS`."""
    return label.partition(",")[0]


def saved_model(label: str, folder: Path) -> torch.Tensor:
    """Save a model of a family whose every number is random; return its logits."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(type_of(label), **MODELS[label])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.ndim:
                tensor.add_(torch.randn(tensor.shape) * 0.1)
    model.eval().save_pretrained(folder)
    return answers(loaded(folder))


def there_and_back(folder: Path, place: Path, wanted: torch.Tensor, ways: tuple[str, ...]) -> None:
    """Take a model to every place and back, where each number has to be the same bits."""
    first = load_file(folder / "model.safetensors")
    for names in ways:
        made, again = place / names, place / f"{names}-back"
        in_process("merge", folder, "-o", f"{made}/", "--model", folder, "--names", names)
        in_process("merge", made, "-o", f"{again}/", "--model", folder)
        back = load_file(again / "model.safetensors")
        assert back.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(back[name], tensor), name
        assert torch.equal(answers(loaded(again)), wanted)
    if "megatron" in ways:
        run, again = place / "run", place / "run-back"
        way = ("--names", "megatron", "--to", "dcp")
        in_process("reshard", folder, "-o", run, "--model", folder, *way)
        in_process("merge", run, "-o", f"{again}/", "--model", folder)
        assert torch.equal(answers(loaded(again)), wanted)


def held(place: Path, labels: list[str]) -> None:
    """Compare what each rank of transformers holds of all models with the layout."""
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for label in labels:
        folder = place / label / "hf"
        plan = DistributedConfig(tp_plan="auto", tp_size=world)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
        whole = loaded(folder)
        tied = {"lm_head.weight"} if whole.config.tie_word_embeddings else set()
        state = {name: t for name, t in model.state_dict().items() if name not in tied}
        layouts = model_layouts(folder, f"hf-tp:{world}")
        assert layouts.keys() == state.keys(), layouts.keys() ^ state.keys()
        for name, full in whole.state_dict().items():
            if name not in tied:
                tensor = state[name]
                part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                wanted = shard(full, layouts[name], rank)
                assert part.shape == wanted.shape, (label, name, part.shape, wanted.shape)
                assert torch.equal(part, wanted), (label, name)
    leave()


def shard(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Return what a rank has of a tensor."""
    for dim, sides in enumerate(layout.intervals(rank)):
        pieces = [tensor.narrow(dim, low, high - low) for low, high in sides]
        tensor = torch.cat(pieces, dim)
    return tensor


def published() -> list[Cell]:
    """Return what is counted of published configs."""
    cells = []
    for name, sample in PUBLISHED_SIZES.items():
        own = model_of_config(sample["config"])
        count = sum(map(prod, own.shapes().values()))
        assert count == sample["params"] + sample["buffers_saved"], name
        kind = "as published" if name in SEEN else "computed"
        cells.append(
            Cell(sample["config"]["model_type"], PUBLISHED, f"{name} {count / 1e9:.2f}B {kind}")
        )
    return cells


def main(place: Path, rows_file: str, labels: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    rows: list[Row | Cell] = []
    for label in labels:
        here, model_type = place / label, type_of(label)
        wanted = saved_model(label, here / "hf")
        ways = ("fused",) if label == "olmo2" else ("megatron", "fused")
        there_and_back(here / "hf", here, wanted, ways)
        print(f"{label}: the same bits by {', '.join(ways)}", file=sys.stderr)
        refused = family_of({"model_type": model_type}).refused.get("megatron")
        rows.append(
            Cell(model_type, THERE_AND_BACK, f"refused: {refused}" if refused else "bits, logits")
        )
        rows.append(Cell(model_type, FUSED, "bits, logits"))
        if any(
            sample["family"].partition("-")[0] == model_type for sample in SAMPLES["vllm"].values()
        ):
            rows.append(Cell(model_type, FUSED, "vLLM: shapes of each rank"))
    for ranks in (2, 4):
        call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        call += ["--standalone", "-m", "tests.tools.models_checkpoints", "job", str(place)]
        call += labels
        subprocess.run(call, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600, check=True)
        print(f"all: the bytes of {ranks} ranks of transformers", file=sys.stderr)
    rows += [Cell(type_of(label), HF_TP, "bytes of 2 and of 4 ranks") for label in labels]
    rows += [Cell(*key, text) for key, text in _NOTES.items()]
    write_rows(rows_file, [*rows, *published()])


if __name__ == "__main__":
    if sys.argv[1] == "job":
        held(Path(sys.argv[2]), sys.argv[3:])
    else:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:] or [*MODELS])
