"""Timing the steps of a job's own communicator along every mesh axis."""

import time
from collections.abc import Callable, Sequence
from itertools import combinations, product
from math import isqrt, prod
from statistics import median
from typing import Final

import torch

from shardspec.comm.communicator import Communicator
from shardspec.comm.curves import KINDS
from shardspec.comm.steps import AllReduce
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.profiling.fit import Measurement, step_of

_WARM_UPS: Final = 2
MOST_AT_ONCE: Final = 20
"""Repetitions of the shortest steps; longer ones are repeated less."""
_SECONDS_EACH: Final = 0.05
"""How long the repetitions of one step and size may take together, beyond the least number."""


def measure(
    communicator: Communicator,
    sizes: Sequence[int],
    repeats: int,
    *,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Measurement, ...]:
    """Time every kind of step along every group of axes, at every size; all processes call this.

    `sizes` are bytes of a shard before the step; what is measured is as near to it as a tensor can
    be. A step is repeated at least `repeats` times after warm-ups, short ones more often, and the
    median over repetitions of the slowest process's seconds counts. `progress` is called with how
    many steps and sizes are done, and how many there are.
    """
    mesh = communicator.mesh
    several = [axis for axis in range(mesh.ndim) if mesh.shape[axis] > 1]
    groups = (g for count in range(len(several)) for g in combinations(several, count + 1))
    tasks = list(product(groups, KINDS, sizes))
    results = []
    for axes, kind, num_bytes in tasks:
        layouts = _layouts(mesh, kind, axes, num_bytes)
        results.append(_time(communicator, kind, axes, layouts, repeats, device))
        if progress is not None:
            progress(len(results), len(tasks))
    return tuple(results)


def _layouts(
    mesh: DeviceMesh, kind: str, axes: tuple[int, ...], num_bytes: int
) -> tuple[Layout, Layout]:
    """Return a float32 matrix before and after a step, a shard having about so many bytes."""
    n = prod(mesh.shape[axis] for axis in axes)
    elements = max(1, num_bytes // 4)
    whole = elements * n if kind in ("all-gather", "all-to-all") else elements
    columns = max(1, isqrt(whole) // n) * n
    rows = max(1, round(whole / columns / n)) * n
    rest, pending = ShardingSpec(2), ShardingSpec(2, partial=dict.fromkeys(axes, "sum"))
    cut, across = ShardingSpec(2, {0: list(axes)}), ShardingSpec(2, {1: list(axes)})
    specs = {
        "all-gather": (cut, rest),
        "reduce-scatter": (pending, cut),
        "all-reduce": (pending, rest),
        "all-to-all": (cut, across),
    }[kind]
    before = Layout(mesh, specs[0], (rows, columns), "float32")
    return before, before.with_spec(specs[1])


def _time(
    communicator: Communicator,
    kind: str,
    axes: tuple[int, ...],
    layouts: tuple[Layout, Layout],
    repeats: int,
    device: torch.device,
) -> Measurement:
    step, (before, after) = step_of(kind, axes), layouts
    shards = {
        id_: torch.ones(before.local_shape(id_), device=device) for id_ in communicator.addressable
    }

    # A sum over all devices ends when all have begun; it costs less than gathering values.
    pending = ShardingSpec(0, partial=dict.fromkeys(range(before.mesh.ndim), "sum"))
    alone = Layout(before.mesh, pending, (), "float32")
    ones = {id_: torch.ones((), device=device) for id_ in communicator.addressable}
    together = AllReduce(tuple(range(before.mesh.ndim)), "sum")

    def once() -> float:
        communicator.run(together, ones, alone.box, alone.box)
        started = time.perf_counter()
        communicator.run(step, shards, before.box, after.box)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def slowest(seconds: list[float]) -> list[float]:
        gathered = communicator.gather(dict.fromkeys(communicator.addressable, seconds))
        return [max(each) for each in zip(*gathered.values(), strict=True)]

    warm = slowest([once() for _ in range(_WARM_UPS)])
    # Every process finds the same number, from what all of them have measured.
    more = int(_SECONDS_EACH / max(min(warm), 1e-9))
    times = slowest([once() for _ in range(max(repeats, min(more, MOST_AT_ONCE)))])
    return Measurement(kind, axes, before.max_local_bytes, median(times))
