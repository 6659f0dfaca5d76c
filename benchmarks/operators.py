"""A product of 64 x 64 matrices on our DTensor, as a multiple of torch's, in one job.

``torchrun --nproc_per_node 2 -m benchmarks.operators``. The left matrix is sharded by rows, so that
nothing moves: what is measured is the time that a call takes beside its arithmetic.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardspec import DTensor, init_device_mesh

__all__ = ["main"]


def _best(run: Callable[[], object], calls: int = 200, rounds: int = 9) -> float:
    """Return the seconds of a call, in the best of some rounds."""
    found = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - started) / calls)
    return min(found[1:])


def main() -> None:
    """Measure and print, on the first rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    left, right = DTensor(torch.rand(64, 64), mesh, "[S0,R]"), DTensor(torch.rand(64, 64), mesh)
    theirs = left.to_torch(), right.to_torch()
    ours_s, torch_s = _best(lambda: left @ right), _best(lambda: theirs[0] @ theirs[1])
    if dist.get_rank() == 0:
        print(
            f"64x64 @ 64x64: {ours_s * 1e6:.0f} us, torch's DTensor {torch_s * 1e6:.0f} us, "
            f"ratio {ours_s / torch_s:.1f}"
        )


if __name__ == "__main__":
    main()
