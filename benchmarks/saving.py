"""Saving a state dict to a disk, beside what torch and safetensors have for it.

python -m benchmarks.saving --at /tmp/bench

One process saves the same tensors by each in turns, every turn in an order of its own, and flushes
what it wrote to the disk, where that is not done for it.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from benchmarks.checkpoint_timing import empty, shuffled, touch
from shardspec import save_sharded
from shardspec.text import table_text

__all__ = ["main"]

_CALL_BYTES: Final = 128 << 10
State: TypeAlias = dict[str, torch.Tensor]
Save: TypeAlias = Callable[[State, Path], object]


def flush(place: Path) -> None:
    """Flush a file to the disk."""
    fd = os.open(place, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save_with_safetensors(state: State, place: Path) -> None:
    """Save one file, without a digest."""
    save_file(state, place / "model.safetensors")
    flush(place / "model.safetensors")


def save_with_torch(state: State, place: Path) -> None:
    """Save one file; its zip has a CRC-32 of every tensor."""
    torch.save(state, place / "model.pt")
    flush(place / "model.pt")


def save_with_dcp(state: State, place: Path) -> None:
    """Save a DCP directory, which is flushed."""
    with warnings.catch_warnings():
        # It warns that it is alone, which no_dist asks for.
        warnings.simplefilter("ignore", UserWarning)
        save_dcp(state, checkpoint_id=place / "dcp", no_dist=True)


def write_only(state: State, place: Path) -> None:
    """Do nothing but write the bytes, and flush them."""
    with (place / "bare").open("wb", buffering=0) as file:
        for tensor in state.values():
            data = tensor.view(torch.uint8).numpy().data
            at = 0
            while at < len(data):
                at += file.write(data[at : at + _CALL_BYTES])
        os.fsync(file.fileno())


SAVES: Final[Mapping[str, Save]] = {
    "write and flush, no more": write_only,
    "shardspec, save_sharded": save_sharded,
    "safetensors, save_file": save_with_safetensors,
    "torch.save": save_with_torch,
    "torch DCP, dcp.save": save_with_dcp,
}


def measure(state: State, at: Path, memory: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every turn but the first, which is slower for whoever comes first."""
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    taken: dict[str, list[float]] = {name: [] for name in SAVES}
    for turn in range(1 + rounds):
        for name, save in shuffled(SAVES):
            place = at / "save"
            empty(place)
            place.mkdir()
            os.sync()
            touch(memory, 5 * num_bytes // 4)
            started = time.perf_counter()
            save(state, place)
            if turn:
                taken[name].append(time.perf_counter() - started)
    empty(at / "save")
    return taken


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, required=True, help="folder on the disk to save to")
    room = "a tmpfs to touch, with room for as much on every core"
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help=room)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--tensor-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    chosen.at.mkdir(parents=True, exist_ok=True)
    tensor_bytes = chosen.tensor_mib << 20
    count = max(1, round(chosen.gib * 2**30 / tensor_bytes))
    numbers = torch.Generator().manual_seed(0)
    state = {
        f"layers.{at}.weight": torch.randn(tensor_bytes // 4, generator=numbers)
        for at in range(count)
    }
    with (
        tempfile.TemporaryDirectory(dir=chosen.at) as disk,
        tempfile.TemporaryDirectory(dir=chosen.memory) as memory,
    ):
        taken = measure(state, Path(disk), Path(memory), chosen.rounds)
    best = median(taken["shardspec, save_sharded"])
    rows = [
        (
            name,
            f"{median(times):.2f}",
            f"{min(times):.2f}",
            f"{max(times):.2f}",
            f"{median(times) / best:.2f}",
        )
        for name, times in taken.items()
    ]
    print(f"{count * tensor_bytes / 2**30:.3f} GiB in {count} tensors, {chosen.rounds} turns, s")
    print(table_text(("", "median", "least", "most", "÷ shardspec"), rows))


if __name__ == "__main__":
    main()
