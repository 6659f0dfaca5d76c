"""What accelerate saves with FSDP2 on two ranks, merged beside its own command."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.tools.commands import Measured, leave, measured, shardspec
from tests.tools.language_models import CONFIGS, TOKENS, answers, loaded, model_of
from tests.tools.table import Row, write_rows

_MODEL, _ADAM = "pytorch_model_fsdp_0", "optimizer_0"
_WIDE, _DEEP = 4096, 16
"""Sixteen square matrices of float32: 1 GiB."""


def job(place: Path, what: str) -> None:
    """Save with accelerate after a step of AdamW, or go on from there; or save a large model."""
    from accelerate import (
        Accelerator,
        DistributedType,
        FullyShardedDataParallelPlugin,
        PartialState,
    )

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="no_wrap" if what == "large" else "transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True)
    # It makes FSDP of several accelerators only; all that follows does as well on CPUs.
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if what == "large":
        torch.manual_seed(3)
        layers = (torch.nn.Linear(_WIDE, _WIDE, bias=False) for _ in range(_DEEP))
        large = torch.nn.Sequential(*layers)
        accelerator.prepare(large, torch.optim.SGD(large.parameters()))
        accelerator.save_state(str(place))
        return
    model = model_of(CONFIGS["llama"], seed=1 if what == "save" else 9)
    model, adam = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step() -> torch.Tensor:
        accelerator.backward(model(TOKENS).logits.square().mean())
        adam.step()
        adam.zero_grad()
        logits = model(TOKENS).logits.detach()
        assert isinstance(logits, torch.Tensor)
        return logits

    if what == "save":
        logits = step()
        accelerator.save_state(str(place))
        if accelerator.is_main_process:
            torch.save({"saved": logits, "next": step()}, place / "logits.pt")
            model.config.save_pretrained(place / _MODEL)
        else:
            step()
        return
    step()
    wanted = torch.load(place / "logits.pt")
    accelerator.load_state(str(place))
    assert torch.equal(model(TOKENS).logits, wanted["saved"])
    assert torch.equal(step(), wanted["next"])


def run_job(place: Path, what: str) -> None:
    """Run the job on two ranks."""
    call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    call += ["--standalone", "-m", "tests.tools.accelerate_checkpoints"]
    call += ["job", str(place), what]
    subprocess.run(call, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600, check=True)


def _said(one: Measured) -> str:
    return f"{one.seconds:.2f} s, {one.peak_bytes / 2**20:.0f} MiB"


def merged_by_both(checkpoint: Path, place: Path) -> None:
    """Compare the merges to the bit, and print what they took."""
    ours, theirs = place / "ours.safetensors", place / "theirs"
    command = str(Path(sys.executable).with_name("accelerate"))
    one = measured([command, "merge-weights", str(checkpoint), str(theirs)])
    call = [sys.executable, "-m", "shardspec", "merge", str(checkpoint), "-o", str(ours)]
    call += ["--rename", "^model[.]", ""]
    two = measured(call)
    print(f"accelerate merge-weights: {_said(one)}; shardspec merge: {_said(two)}", file=sys.stderr)
    first, second = load_file(ours), load_file(theirs / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def resumed(place: Path) -> None:
    """Let accelerate go on from what is resharded for three ranks: model and optimizer."""
    again = place.with_name("again")
    shutil.copytree(place, again)
    for part in (_MODEL, _ADAM):
        found = json.loads(shardspec("inspect", place / part, "--json"))
        cut = (t["name"] for t in found["tensors"] if len(t["shape"]) == 2)
        rules = place.with_name(f"{part}.toml")
        rules.write_text("".join(f'"{name}" = "[R,S0]"\n' for name in cut))
        shutil.rmtree(again / part)
        by = ("--mesh", "3", "--rules", rules, "--to", "dcp")
        shardspec("reshard", place / part, "-o", again / part, *by)
        shardspec("diff", again / part, place / part)
    run_job(again, "resume")


def main(place: Path, rows_file: str) -> None:
    small = place / "small"
    run_job(small, "save")
    merged_by_both(small / _MODEL, place)
    wanted = torch.load(small / "logits.pt")["saved"]
    shardspec("merge", small / _MODEL, "-o", f"{place}/hf/", "--rename", "^model[.]", "")
    assert torch.allclose(answers(loaded(place / "hf")), wanted, atol=1e-5)
    resumed(small)
    run_job(place / "large", "large")
    merged_by_both(place / "large" / _MODEL, place / "large")
    tool = ("accelerate", version("accelerate"))
    rows = [
        Row(
            *(*tool, "FSDP2, `SHARDED_STATE_DICT`, 2 ranks: LLaMA, and 1 GiB of matrices"),
            *("yes", "yes, by `accelerate merge-weights`", "`--to dcp`, `--to huggingface`"),
            "yes, and the next step of AdamW is the same; transformers: equal logits",
        ),
        Row(
            *(*tool, "FSDP2, `optimizer_0` beside it"),
            *("yes", "yes, by the next step", "`--to dcp`", "yes, as above"),
        ),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(Path(sys.argv[2]), sys.argv[3])
        leave()
    else:
        main(Path(sys.argv[1]), sys.argv[2])
