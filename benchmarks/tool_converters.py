"""Checkpoints of 1 GiB made into whole files: shardspec beside the tools' own converters.

``.venv-tools/bin/python -m benchmarks.tool_converters FOLDER`` makes the checkpoints in a folder,
best one in memory such as /dev/shm, and lets the converters take turns, each in a process of its
own, imports included. The times are medians; memory is the most that any run had resident.
"""

import argparse
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
_VERSION = "0.19.8"


@dataclass(frozen=True, slots=True)
class Converter:
    """One kind of checkpoint, and two programs that make whole tensors of it."""

    name: str
    make: Callable[[Path], None]
    tool: str
    """Python that has `source` and `out`."""
    options: tuple[str, ...]
    """Of ``shardspec merge``."""
    kept: str
    """File of the output whose tensors are compared, by either."""


def _weights(share: int) -> dict[str, torch.Tensor]:
    """Return float32 weights of 1 GiB, divided by `share`."""
    torch.manual_seed(0)
    width = WIDTH // share
    return {
        f"model.layers.{layer}.{name}.weight": torch.randn(WIDTH, width)
        for layer in range(LAYERS)
        for name in ("q", "o")
    }


def _save_rank(rank: int, store: str, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in _weights(2).items()
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


def make_zero2(place: Path) -> None:
    """As ZeRO-2 of four ranks saves: masters and both moments, a third of the bytes each."""
    whole = _weights(3)
    flat = torch.cat([tensor.reshape(-1) for tensor in whole.values()])
    flat = torch.cat([flat, torch.zeros(-len(flat) % (2 * RANKS))])
    tag = place / "global_step1"
    tag.mkdir(parents=True)
    (place / "latest").write_text("global_step1")
    model = {
        "module": {name: tensor.bfloat16() for name, tensor in whole.items()},
        "buffer_names": [],
        "param_shapes": [{name: tensor.shape for name, tensor in whole.items()}],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "dp_world_size": RANKS,
        "ds_version": _VERSION,
    }
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(flat.chunk(RANKS)):
        moments = {"step": torch.tensor(1.0), "exp_avg": part * 2, "exp_avg_sq": part * 3}
        optimizer = {
            "zero_stage": 2,
            "partition_count": [RANKS],
            "single_partition_of_fp32_groups": [part.clone()],
            "base_optimizer_state": {"state": {0: moments}},
        }
        path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": _VERSION}, path)


CONVERTERS = (
    Converter(
        "FSDP2 (DCP), `accelerate merge-weights`",
        make_dcp,
        "from accelerate.utils import merge_fsdp_weights; merge_fsdp_weights(source, out)",
        ("--to", "huggingface", "--rename", "^model[.]", ""),
        "model.safetensors",
    ),
    Converter(
        "DeepSpeed ZeRO-2, `zero_to_fp32.py`",
        make_zero2,
        "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as to;"
        " to(source, out, safe_serialization=True, max_shard_size='100GB')",
        ("--to", "huggingface", "--exclude", "optimizer.*"),
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
    with safe_open(ours, "pt") as one, safe_open(theirs, "pt") as other:
        assert set(one.keys()) == set(other.keys()), "both have the same tensors"
        for name in one.keys():  # noqa: SIM118  # no mapping
            assert torch.equal(one.get_tensor(name), other.get_tensor(name)), name


def main() -> None:
    """Measure, and print the table of docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    rows = []
    for converter in CONVERTERS:
        with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
            source, out = Path(temporary, "source"), Path(temporary, "out")
            converter.make(source)
            size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
            tool = f"source, out = {str(source)!r}, {str(out)!r}; {converter.tool}"
            merge = ["-m", "shardspec", "merge", str(source), "-o", str(out), *converter.options]
            found: dict[str, list[tuple[float, int]]] = {"tool": [], "ours": []}
            for _ in range(given.times):
                for name, args in (("tool", ["-c", tool]), ("ours", merge)):
                    shutil.rmtree(out, ignore_errors=True)
                    found[name].append(_run([sys.executable, *args]))
                    kept = Path(temporary, f"{name}.safetensors")
                    kept.unlink(missing_ok=True)
                    (out / converter.kept).rename(kept)
            _same(Path(temporary, "ours.safetensors"), Path(temporary, "tool.safetensors"))
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
