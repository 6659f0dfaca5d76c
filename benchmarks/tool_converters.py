"""Checkpoints of 1 GiB made into whole files: shardspec beside the tools' own converters.

``.venv-tools/bin/python -m benchmarks.tool_converters FOLDER`` makes the checkpoints in a folder,
best one in memory such as /dev/shm, and lets the converters take turns, each in a process of its
own, imports included. The times are medians; memory is the most that any run had resident.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardspec.text import bytes_text, table_text

__all__ = ["main"]

RANKS, LAYERS, WIDTH = 4, 32, 2048


@dataclass(frozen=True, slots=True)
class Converter:
    """One kind of checkpoint, and two programs that make whole tensors of it."""

    name: str
    make: Callable[[Path], None]
    tool: str
    """Python that has `source` and `out`."""
    options: tuple[str, ...]
    """Command of ``shardspec``, and its options."""
    kept: str
    """File of the output, or folder of it, whose tensors are compared, by either."""


def _weights() -> dict[str, torch.Tensor]:
    """Return float32 weights of half a GiB."""
    torch.manual_seed(0)
    return {
        f"model.layers.{layer}.{name}.weight": torch.randn(WIDTH, WIDTH // 2)
        for layer in range(LAYERS)
        for name in ("q", "o")
    }


def _save_rank(rank: int, store: str, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in _weights().items()
    }
    moments = {f"optim.{name}": tensor for name, tensor in state.items()}
    save({"model": {**state, **moments}}, checkpoint_id=place)
    dist.destroy_process_group()


def make_dcp(place: Path) -> None:
    """As FSDP2 of four ranks saves."""
    with tempfile.TemporaryDirectory() as store:
        spawn = mp.get_context("spawn")
        ranks = [
            spawn.Process(target=_save_rank, args=(rank, f"{store}/store", str(place)))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


class _Model(torch.nn.Module):
    """Weights of 1 GiB of float32 divided by 3."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Linear(WIDTH // 3, WIDTH, bias=False) for _ in range(2 * LAYERS))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()


def _train(place: Path) -> None:
    """Be one rank of a run with ZeRO-2 that takes one step and saves."""
    import deepspeed

    # This op would be compiled for minutes, and gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = _Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_scatter": False, "overlap_comm": False},
    }
    adam = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    engine.backward(engine(torch.ones(WIDTH // 3, dtype=torch.bfloat16)))
    engine.step()
    engine.save_checkpoint(str(place))
    dist.destroy_process_group()


def make_zero2(place: Path) -> None:
    """As DeepSpeed saves ZeRO-2 of four ranks: masters and both moments, a third of it each."""
    call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    call += ["-m", "benchmarks.tool_converters", str(place), "--train"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(call, env=environment, check=True, stdout=subprocess.DEVNULL)


CONVERTERS = (
    Converter(
        "FSDP2 (DCP), `accelerate merge-weights`",
        make_dcp,
        "from accelerate.utils import merge_fsdp_weights; merge_fsdp_weights(source, out)",
        ("merge", "--to", "huggingface", "--rename", "^model[.]", ""),
        "model.safetensors",
    ),
    Converter(
        "DeepSpeed ZeRO-2, `zero_to_fp32.py`",
        make_zero2,
        "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as to;"
        " to(source, out, safe_serialization=True, max_shard_size='100GB')",
        ("merge", "--to", "huggingface", "--exclude", "optimizer.*"),
        "model.safetensors",
    ),
)


_MEASURED = """
import resource, subprocess, sys, time
started = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(done.returncode, time.perf_counter() - started, used * 1024)
"""


def _run(command: list[str]) -> tuple[float, int]:
    """Run a program; return its seconds, and the most memory that it had.

    A small process starts it: what a process had before it became another program counts as its.
    """
    measured = [sys.executable, "-c", _MEASURED, *command]
    said = subprocess.run(measured, capture_output=True, text=True, check=True).stdout.split()
    if said[0] != "0":
        raise SystemExit(f"failed: {' '.join(command)}")
    return float(said[1]), int(said[2])


def _same(ours: Path, theirs: Path) -> None:
    if ours.is_dir():
        mine, due = ({p.relative_to(at) for p in at.glob("*/*.pt")} for at in (ours, theirs))
        assert mine == due, "both have the same files"
        for path in mine:
            one, other = (torch.load(at / path, weights_only=True) for at in (ours, theirs))
            if isinstance(one, dict):
                one, other = one["param"], other["param"]
            assert torch.equal(one, other), path
        return
    with safe_open(ours, "pt") as one, safe_open(theirs, "pt") as other:
        assert set(one.keys()) == set(other.keys()), "both have the same tensors"
        for name in one.keys():  # noqa: SIM118  # no mapping
            assert torch.equal(one.get_tensor(name), other.get_tensor(name)), name


def main() -> None:
    """Measure, and print the table of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        _train(given.folder)
        return
    rows = []
    for converter in CONVERTERS:
        with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
            source, out = Path(temporary, "source"), Path(temporary, "out")
            converter.make(source)
            size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
            tool = f"source, out = {str(source)!r}, {str(out)!r}; {converter.tool}"
            command, *options = converter.options
            merge = ["-m", "shardspec", command, str(source), "-o", str(out), *options]
            found: dict[str, list[tuple[float, int]]] = {"tool": [], "ours": []}
            for _ in range(given.times):
                for name, args in (("tool", ["-c", tool]), ("ours", merge)):
                    shutil.rmtree(out, ignore_errors=True)
                    found[name].append(_run([sys.executable, *args]))
                    kept = Path(temporary, name)
                    shutil.rmtree(kept, ignore_errors=True)
                    kept.unlink(missing_ok=True)
                    (out / converter.kept).rename(kept)
            _same(Path(temporary, "ours"), Path(temporary, "tool"))
            theirs, ours = (
                (statistics.median(t for t, _ in runs), max(m for _, m in runs))
                for runs in (found["tool"], found["ours"])
            )
            rows.append(
                (
                    converter.name,
                    bytes_text(size),
                    f"{theirs[0]:.1f} s, {bytes_text(theirs[1])}",
                    f"{ours[0]:.2f} s, {bytes_text(ours[1])}",
                    f"{theirs[0] / ours[0]:.1f} ×, {theirs[1] / ours[1]:.0f} ×",
                )
            )
    print(table_text(("checkpoint, tool", "size", "tool", "shardspec", "tool ÷ shardspec"), rows))


if __name__ == "__main__":
    main()
