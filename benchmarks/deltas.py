"""Deltas and digests of a checkpoint in memory, beside copying it with cat.

python -m benchmarks.deltas --gib 2

Prints the size of each delta and the seconds of making and applying it over those of ``cat``,
medians of turns in any order, by density of changed elements, and those of digesting it; and the
most resident memory. One of the tensors is half of all.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.checkpoint_timing import Run, cat_command, empty, python, run, shuffled, touch

if TYPE_CHECKING:
    import torch

__all__ = ["main"]

_DENSITIES: Final = (0.0, 0.01, 0.03, 0.10, 1.0)


def make(folder: Path, num_bytes: int) -> None:
    """Write a base, and a new version for each density."""
    import torch
    from safetensors.torch import save_file

    numbers = torch.Generator().manual_seed(0)
    sizes = [num_bytes // 4, *[num_bytes // 64] * 16]
    state = {
        f"layers.{at}.weight": (
            0.02 * torch.randn(size // 1024, 1024, generator=numbers)
        ).bfloat16()
        for at, size in enumerate(sizes)
    }
    save_file(state, folder / "base.safetensors")
    for density in _DENSITIES:
        save_file(
            {name: stepped(tensor, density, numbers) for name, tensor in state.items()},
            folder / f"new-{density:g}.safetensors",
        )


def stepped(tensor: "torch.Tensor", density: float, numbers: "torch.Generator") -> "torch.Tensor":
    """Return a tensor with some elements moved by one unit in the last place."""
    import torch

    bits = tensor.view(torch.int16).clone()
    for rows in torch.split(bits, 1 << 14):
        which = torch.rand(rows.shape, generator=numbers) < density
        rows += torch.where(which, 1, 0).to(torch.int16)
    return bits.view(torch.bfloat16)


def work(words: list[str]) -> None:
    """Do one piece of work, and print the seconds that it took as JSON."""
    from shardspec import apply_delta, delta, digest

    action, *paths = words
    started = time.perf_counter()
    if action == "delta":
        base, new, out, version = paths
        delta(base, new, out, version=int(version))
    elif action == "apply":
        base, out, *deltas = paths
        apply_delta(base, deltas, out)
    else:
        digest(paths[0])
    print(json.dumps({"seconds": time.perf_counter() - started}))


def turns(commands: Mapping[str, list[str]], out: Path, rounds: int) -> dict[str, list[Run]]:
    """Run commands by turns, each time in another order; the first turn does not count."""
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for turn in range(1 + rounds):
        for name, command in shuffled(commands):
            empty(out)
            result = run(command)
            if turn:
                runs[name].append(result)
    empty(out)
    return runs


def seconds(runs: list[Run]) -> float:
    """Return the median seconds of work, without starting and importing where it says so."""
    return median(each.seconds if each.inside is None else each.inside for each in runs)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    num_bytes = round(chosen.gib * 2**30)
    if chosen.work:
        work(chosen.work)
        return
    if chosen.make:
        make(chosen.make, num_bytes)
        return

    def child(*words: object) -> list[str]:
        return python("benchmarks.deltas", "--gib", chosen.gib, *words)

    with tempfile.TemporaryDirectory(dir=chosen.memory) as place:
        folder, out = Path(place), Path(place) / "out.safetensors"
        run(child("--make", folder))
        base = folder / "base.safetensors"
        touch(folder, num_bytes)
        size = base.stat().st_size
        print(f"{size / 2**30:.2f} GiB bf16, one tensor of {num_bytes / 2**31:.2f} GiB; ÷ cat")
        cat = seconds(turns({"cat": cat_command([base], out)}, out, chosen.rounds)["cat"])
        print(f"cat {cat:.3f} s")
        for density in _DENSITIES:
            new, d = folder / f"new-{density:g}.safetensors", folder / f"delta-{density:g}"
            first = run(child("--work", "delta", base, new, d, 1))
            written = sum(path.stat().st_size for path in d.iterdir())
            commands = {
                "cat": cat_command([base], out),
                "make": child("--work", "delta", base, new, out, 1),
                "apply": child("--work", "apply", base, out, d),
                "digest": child("--work", "digest", new),
            }
            taken = turns(commands, out, chosen.rounds)
            cat = seconds(taken["cat"])
            ratios = ", ".join(
                f"{name} {seconds(runs) / cat:.2f}" for name, runs in taken.items() if name != "cat"
            )
            peak = max(each.peak_mib for runs in taken.values() for each in (*runs, first))
            print(f"{density:6.0%}: {written / size:7.2%} of the bytes; {ratios}; {peak:.0f} MiB")


if __name__ == "__main__":
    main()
