"""What DeepSpeed saves of ZeRO 1 to 3 on two ranks, merged beside its own conversions."""

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tools.commands import leave, shardspec
from tests.tools.table import Row, write_rows

RUNS = [
    *((stage, kind) for kind in ("fp32", "bf16") for stage in (1, 2, 3)),
    (1, "round_robin"),
    (2, "round_robin"),
]
RANKS = 2
TRAINED = {"embed.weight", "gain", "middle.bias", "middle.weight", "norm.bias", "norm.weight"}
MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


class Tiny(torch.nn.Module):
    """Odd sizes, a layer that is frozen, a buffer, and a matrix that two names share."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(7, 5, bias=False)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.middle = torch.nn.Linear(5, 7)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.norm = torch.nn.LayerNorm(7)
        self.head = torch.nn.Linear(7, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embed(x) * self.scale.to(x.dtype)))
        out: torch.Tensor = self.head(self.norm(self.middle(hidden) * self.gain))
        return out


def job(place: Path) -> None:
    """Train two steps of AdamW with every stage, on each rank of the job, and save."""
    import deepspeed

    # This op would be compiled for minutes, and gloo does the same; an earlier build that was
    # stopped leaves a lock for which it would wait without an end.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    for stage, kind in RUNS:
        engine = engine_of(stage, kind, seed=1)
        train(engine, kind, range(2))
        engine.save_checkpoint(str(place / f"zero{stage}-{kind}"))
    leave()


def engine_of(stage: int, kind: str, seed: int) -> Any:
    """Return an engine of DeepSpeed for the model, with AdamW."""
    import deepspeed

    torch.manual_seed(seed)
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2 and len(p) > 1], "weight_decay": 0.0},
        # So few elements that one rank has none.
        {"params": [model.gain], "weight_decay": 0.0},
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": kind == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_scatter": False,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "round_robin_gradients": kind == "round_robin",
        },
    }
    adam = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    return engine


def train(engine: Any, kind: str, steps: Iterable[int]) -> None:  # not typed
    """Take steps, each with a batch of its own and of this rank."""
    for step in steps:
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        x = torch.randn(2, 7, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        engine.backward(engine(x).float().square().mean())
        engine.step()


def environment() -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def run_job(place: Path) -> None:
    """Run the job on some ranks."""
    call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    call += ["--standalone", "-m", "tests.tools.deepspeed_checkpoints", "job", str(place)]
    subprocess.run(call, env=environment(), timeout=400, check=True)


def script(*arguments: str | Path) -> None:
    """Run a module of DeepSpeed."""
    call = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(
        call, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{' '.join(call)}\n{done.stdout}{done.stderr}"


def same(found: Tensors, due: Tensors) -> None:
    """Compare names, types and bits."""
    assert found.keys() == due.keys(), found.keys() ^ due.keys()
    for name, tensor in due.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def read_universal(place: Path) -> Tensors:
    """Return what lies in the files of a Universal Checkpoint, as torch loads them."""
    found = {}
    for path in sorted((place / "zero").glob("*/*.pt")):
        held = torch.load(path, weights_only=True)
        value = held["param"] if isinstance(held, dict) else held
        kind, name = path.stem, path.parent.name
        if isinstance(value, torch.Tensor):
            found[name if kind == "fp32" else f"optimizer.{kind}.{name}"] = value
    return found


def compared(run: Path) -> None:
    """Merge a run; compare with what DeepSpeed makes of it."""
    ours, theirs, universal = (run.with_name(f"{run.name}-{at}") for at in ("ours", "fp32", "uni"))
    shardspec("verify", run)
    shardspec("merge", run, "-o", f"{ours}.safetensors")
    merged = load_file(f"{ours}.safetensors")
    weights = {k: v for k, v in merged.items() if not k.startswith("optimizer.")}
    script("deepspeed.utils.zero_to_fp32", run, theirs)
    whole = torch.load(theirs / "pytorch_model.bin", weights_only=True)
    # It makes all fp32; of stage 1 it leaves out what is frozen, which lies in the model's file.
    if run.name.startswith("zero1"):
        torch.manual_seed(1)
        frozen = Tiny().to(torch.bfloat16 if run.name.endswith("bf16") else None).frozen
        whole |= {f"frozen.{name}": found.float() for name, found in frozen.state_dict().items()}
    same({name: found.float() for name, found in weights.items()}, whole)
    assert not torch.equal(whole["embed.weight"], torch.zeros(5, 7))

    if run.name.endswith("round_robin"):
        # Of these ds_to_universal reads parameters where they do not lie.
        same(merged, load_file(f"{run.parent}/{run.name[:5]}-fp32-ours.safetensors"))
        return
    convert = ("deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")
    workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
    to = ("--input_folder", run / "global_step2", "--output_folder", universal)
    script(*convert, *to, *workers)
    held = read_universal(universal)
    for kind in MOMENTS:
        names = {f"optimizer.{kind}.{name}" for name in TRAINED}
        assert {k for k in merged if k.startswith(f"optimizer.{kind}.")} == names
        assert names <= held.keys()
        assert all(held[name].any() for name in names)
    assert all(merged[f"optimizer.step.{name}"] == 2 for name in TRAINED)
    common = {
        # Those of stage 3 are flat.
        name: held[name].view(merged[name].shape)
        for name in held.keys() & merged.keys() - {"head.weight"}
    }
    assert common.keys() >= TRAINED
    # It makes fp32 of what is frozen.
    same({name: merged[name].float() for name in common}, common)


def main(place: Path, rows_file: str) -> None:
    run_job(place)
    for stage, kind in RUNS:
        compared(place / f"zero{stage}-{kind}")
        print(f"ZeRO {stage}, {kind}: equal", file=sys.stderr)
    tool = ("DeepSpeed", version("deepspeed"))
    what = "fp32, and bf16 with fp32 masters; three groups, frozen, buffer, tied"
    by = "weights: yes, by `zero_to_fp32.py`; moments: yes, by `ds_to_universal`"
    robin = (
        "yes, by `zero_to_fp32.py` and a run without it; `ds_to_universal` reads parameters from "
        "wrong places"
    )
    rows = [
        Row(*tool, f"ZeRO 1, 2, 3 on 2 ranks: {what}", "yes", by, "no", ""),
        Row(*tool, "ZeRO 1, 2 with `round_robin_gradients`", "yes", robin, "no", ""),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
