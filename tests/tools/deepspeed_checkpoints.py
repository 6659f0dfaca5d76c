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
RESUMED_RANKS = 3
UNIVERSAL = [(stage, kind) for stage, kind in RUNS if kind != "round_robin"]
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


def job(place: Path, *, resumed: bool) -> None:
    """Train two steps of AdamW with every stage, on each rank of the job, and save.

    Or load the Universal Checkpoints, DeepSpeed's and ours, and train and save a third.
    """
    import deepspeed

    # This op would be compiled for minutes, and gloo does the same; an earlier build that was
    # stopped leaves a lock for which it would wait without an end.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    if resumed:
        for stage, kind in UNIVERSAL:
            run = place / f"zero{stage}-{kind}"
            theirs, ours = (run.with_name(f"{run.name}-{at}") for at in ("uni", "written"))
            for home, tag, out in ((place, theirs.name, theirs), (ours, None, ours)):
                # Other weights, so that those of the checkpoint are seen to be loaded.
                engine = engine_of(stage, kind, seed=7, universal=True)
                assert engine.load_checkpoint(str(home), tag=tag)[0]
                assert engine.global_steps == 2
                train(engine, kind, [2])
                engine.save_checkpoint(str(out.with_name(f"{out.name}-resumed")), tag="last")
    else:
        for stage, kind in RUNS:
            engine = engine_of(stage, kind, seed=1)
            train(engine, kind, range(2))
            engine.save_checkpoint(str(place / f"zero{stage}-{kind}"))
    leave()


def engine_of(stage: int, kind: str, seed: int, *, universal: bool = False) -> Any:
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
    if universal:
        # Where a rank has none of a group, DeepSpeed stops while it loads; with stage 3 it lets all
        # groups have one step, which each of them counts on.
        groups[1:] = [{"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
        groups = [{"params": trained}] if stage == 3 else groups
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": kind == "bf16"},
        "checkpoint": {"load_universal": universal},
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


def run_job(what: str, ranks: int, place: Path) -> None:
    """Run the job on some ranks."""
    call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    call += ["--standalone", "-m", "tests.tools.deepspeed_checkpoints", what, str(place)]
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

    shardspec("merge", universal, "-o", f"{universal}.safetensors")
    again = load_file(f"{universal}.safetensors")
    due = common | {name: found.float() for name, found in weights.items()}
    same({name: again[name].float() for name in due}, due)


def written(run: Path) -> None:
    """Write a Universal Checkpoint of a run; compare its files with those of ds_to_universal."""
    theirs, ours = (run.with_name(f"{run.name}-{at}") for at in ("uni", "written"))
    shardspec("reshard", run, "-o", ours, "--to", "deepspeed-universal")
    shardspec("verify", ours)
    found, due = (
        {str(path.relative_to(at)): path for path in at.glob("**/*.pt")} for at in (ours, theirs)
    )
    # Of stage 3 it drops the steps, which lie in optimizer_state.pt too.
    steps = {f"zero/{name}/step.pt" for name in TRAINED} if run.name.startswith("zero3") else set()
    assert found.keys() ^ due.keys() == steps, found.keys() ^ due.keys()
    for name, path in due.items():
        if name.endswith("_model_states.pt"):
            assert found[name].read_bytes() == path.read_bytes(), name
            continue
        one, other = (torch.load(at, weights_only=False) for at in (found[name], path))
        if name == "zero/optimizer_state.pt" and run.name.startswith("zero3"):
            # Nobody loads the flat tensors of rank 0 that it leaves there.
            del other["fp32_flat_groups"]
            for state in other["optimizer_state_dict"]["state"].values():
                del state["exp_avg"], state["exp_avg_sq"]
        if name == "zero/head.weight/fp32.pt":
            # It has the rounded values of the model; ours are the masters of what it is tied to.
            one["param"] = one["param"].to(torch.bfloat16 if "bf16" in run.name else None).float()
        assert plain(one) == plain(other), name


def plain(value: Any) -> object:  # of a pickle
    """Return a value of which parts are equal only if all their bits and types are."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous().reshape(-1).view(torch.uint8).tolist()
        return str(value.dtype), tuple(value.shape), bits
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(one) for one in value]
    if type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__"):
        return type(value), plain(vars(value))
    return type(value), value


def resumed_equally(run: Path) -> None:
    """Compare what engines have saved that went on from DeepSpeed's files and from ours."""
    theirs, ours = (run.with_name(f"{run.name}-{at}-resumed") / "last" for at in ("uni", "written"))
    names = sorted(path.name for path in theirs.glob("*.pt"))
    assert len([name for name in names if name.endswith("optim_states.pt")]) == RESUMED_RANKS
    assert names == sorted(path.name for path in ours.glob("*.pt"))
    for name in names:
        one, other = (torch.load(at / name, weights_only=False) for at in (ours, theirs))
        for held in (one, other):
            # Not trained, not loaded, and of stage 3 with memory behind them that nobody has set.
            held.pop("frozen_param_fragments", None)
        assert plain(one) == plain(other), name
    merged = []
    for at in (run, ours):
        shardspec("merge", at, "-o", f"{ours}.safetensors", "--overwrite")
        merged.append(load_file(f"{ours}.safetensors"))
    before, after = merged
    assert all(before[f"optimizer.step.{name}"] == 2 for name in TRAINED)
    assert all(after[f"optimizer.step.{name}"] == 3 for name in TRAINED)
    for name in TRAINED:
        # One step of AdamW from there, and not from the beginning.
        change = (after[name] - before[name]).abs().max()
        assert 0 < change < 0.02, (name, change)


def main(place: Path, rows_file: str) -> None:
    run_job("job", RANKS, place)
    for stage, kind in RUNS:
        compared(place / f"zero{stage}-{kind}")
        print(f"ZeRO {stage}, {kind}: equal", file=sys.stderr)
    for stage, kind in UNIVERSAL:
        written(place / f"zero{stage}-{kind}")
    for stage in (1, 2):
        # Where ds_to_universal goes wrong: the tensors are those of the run without it.
        ours, due = (place / f"zero{stage}-{kind}-written" for kind in ("round_robin", "fp32"))
        shardspec("reshard", place / f"zero{stage}-round_robin", "-o", ours, "--to",
                  "deepspeed-universal")  # fmt: skip
        same(read_universal(ours), read_universal(due))
    run_job("resume", RESUMED_RANKS, place)
    for stage, kind in UNIVERSAL:
        resumed_equally(place / f"zero{stage}-{kind}")
        print(f"ZeRO {stage}, {kind}: resumed equally", file=sys.stderr)
    tool = ("DeepSpeed", version("deepspeed"))
    what = "fp32, and bf16 with fp32 masters; three groups, frozen, buffer, tied"
    by = "weights: yes, by `zero_to_fp32.py`; moments: yes, by `ds_to_universal`"
    robin = (
        "yes, by `zero_to_fp32.py` and a run without it; `ds_to_universal` takes parameters from "
        "where they do not lie"
    )
    wrote = "`--to deepspeed-universal`: the tensors of a run without it"
    loaded = (
        "`--to deepspeed-universal`: the files of `ds_to_universal`",
        "yes, on 3 ranks; the next step is that from its own",
    )
    rows = [
        Row(*tool, f"ZeRO 1, 2, 3 on 2 ranks: {what}", "yes", by, "no", ""),
        Row(*tool, "ZeRO 1, 2 with `round_robin_gradients`", "yes", robin, wrote, ""),
        Row(*tool, "Universal Checkpoints of all stages", "yes", "yes, by its own files", *loaded),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    if sys.argv[1] in ("job", "resume"):
        job(Path(sys.argv[2]), resumed=sys.argv[1] == "resume")
    else:
        main(Path(sys.argv[1]), sys.argv[2])
