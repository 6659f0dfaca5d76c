"""Times the steps of a job's communicator along every mesh axis."""

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
from shardspec.layout.moving import transfers_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.profiling.fit import Measurement, step_of

_WARM_UPS: Final = 2
MOST_AT_ONCE: Final = 20
"""Repetitions of the shortest steps; longer ones are repeated less."""
_SECONDS_EACH: Final = 0.05
"""The time limit for repetitions of one step and size beyond the least number."""


def measure(
    communicator: Communicator,
    sizes: Sequence[int],
    repeats: int,
    *,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Measurement, ...]:
    """Return the times of every kind of step along every group of axes, at every size.

    All processes call this. `sizes` are approximate bytes of a shard before the step. Each step is
    repeated at least `repeats` times. `progress` is called with the number of measurements so far
    and in total.
    """
    mesh = communicator.mesh
    several = [axis for axis in range(mesh.ndim) if mesh.shape[axis] > 1]
    groups = (g for count in range(len(several)) for g in combinations(several, count + 1))
    tasks = list(product(groups, KINDS, sizes))
    results = []
    for axes, kind, num_bytes in tasks:
        results.append(_time(communicator, kind, axes, num_bytes, repeats, device))
        if progress is not None:
            progress(len(results), len(tasks))
    return tuple(results)


def _matrix(mesh: DeviceMesh, kind: str, axes: tuple[int, ...], num_bytes: int) -> Layout:
    """Return the layout of a float32 matrix before a step, with shards of about `num_bytes`."""
    n = prod(mesh.shape[axis] for axis in axes)
    elements = max(1, num_bytes // 4)
    spec = ShardingSpec(2, partial=dict.fromkeys(axes, "sum"))
    if kind in ("all-gather", "all-to-all"):
        elements, spec = elements * n, ShardingSpec(2, {0: list(axes)})
    columns = max(1, isqrt(elements) // n) * n
    rows = max(1, round(elements / columns / n)) * n
    return Layout(mesh, spec, (rows, columns), "float32")


def _time(
    communicator: Communicator,
    kind: str,
    axes: tuple[int, ...],
    num_bytes: int,
    repeats: int,
    device: torch.device,
) -> Measurement:
    step, addressable = step_of(kind, axes), communicator.addressable
    before = _matrix(communicator.mesh, kind, axes, num_bytes)
    cut_dim = {"reduce-scatter": 0, "all-to-all": 1}.get(kind)
    after = before.with_spec(ShardingSpec(2, {} if cut_dim is None else {cut_dim: list(axes)}))
    shards = {id_: torch.ones(before.local_shape(id_), device=device) for id_ in addressable}
    # A sum over all devices synchronizes them; it costs less than gathering values.
    every = range(before.mesh.ndim)
    alone = Layout(before.mesh, ShardingSpec(0, partial=dict.fromkeys(every, "sum")), (), "float32")
    ones = {id_: torch.ones((), device=device) for id_ in addressable}

    together = transfers_of(AllReduce(tuple(every), "sum"), alone, alone)
    transfers = transfers_of(step, before, after)

    def once() -> float:
        communicator.run(together, ones)
        started = time.perf_counter()
        communicator.run(transfers, shards)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def slowest(times: int) -> list[float]:
        seconds = [once() for _ in range(times)]
        gathered = communicator.gather(dict.fromkeys(addressable, seconds))
        return [max(each) for each in zip(*gathered.values(), strict=True)]

    # All processes compute the same number of repetitions from the gathered times.
    more = int(_SECONDS_EACH / max(min(slowest(_WARM_UPS)), 1e-9))
    times = slowest(max(repeats, min(more, MOST_AT_ONCE)))
    return Measurement(kind, axes, before.max_local_bytes, median(times))
