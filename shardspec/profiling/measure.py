"""Times the steps of a job's communicator along every mesh axis."""

import time
from collections.abc import Callable, Sequence
from itertools import combinations, product
from math import isqrt, prod
from statistics import median
from typing import Final

import numpy as np
import torch

from shardspec.comm.communicator import Communicator
from shardspec.comm.curves import EXCHANGE_KIND, KINDS, PERMUTE_KIND, bytes_ratio
from shardspec.comm.steps import AllReduce, Exchange
from shardspec.layout.layout import Layout
from shardspec.layout.moving import transfers_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.profiling.fit import Timing, step_of

_WARM_UPS: Final = 2
MOST_AT_ONCE: Final = 20
"""Repetitions of the shortest steps; longer steps are repeated less."""
_SECONDS_EACH: Final = 0.05
"""Time limit for the repetitions of one step and size beyond `repeats`."""


def measure(
    communicator: Communicator,
    sizes: Sequence[int],
    repeats: int,
    *,
    device: torch.device,
    per_node: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Timing]:
    """Return the times of every kind of step along every group of axes, at every size.

    All processes call this. `sizes` are approximate bytes of a shard before the step. Each step is
    repeated at least `repeats` times. `per_node` devices with consecutive ids share a host; by
    default all do. `progress` is called with the number of measurements so far and in total.
    """
    mesh = communicator.mesh
    several = [axis for axis in range(mesh.ndim) if mesh.shape[axis] > 1]
    groups = [g for count in range(len(several)) for g in combinations(several, count + 1)]
    tasks = list(product(groups, (*KINDS, PERMUTE_KIND, EXCHANGE_KIND)))
    runs = []
    for number, (axes, kind) in enumerate(tasks, 1):
        ids = mesh.group(mesh.ids[0], axes)
        nodes = len({device // (per_node or mesh.size()) for device in ids}) if per_node else 1
        times = {}
        for size in sizes:
            num_bytes, seconds = _time(communicator, kind, axes, size, repeats, device)
            times[num_bytes * bytes_ratio(kind, len(ids))] = seconds
        if len(ids) % nodes == 0:
            runs.append(Timing(kind, len(ids), nodes, times))
        if progress is not None:
            progress(number, len(tasks))
    return runs


def _matrix(mesh: DeviceMesh, kind: str, axes: tuple[int, ...], num_bytes: int) -> Layout:
    """Return the layout of a float32 matrix before a step, with shards of about `num_bytes`."""
    n = prod(mesh.shape[axis] for axis in axes)
    elements = max(1, num_bytes // 4)
    spec = ShardingSpec(2, partial=dict.fromkeys(axes, "sum"))
    if "reduce" not in kind:
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
) -> tuple[int, float]:
    """Return the bytes of a shard before a step, and the step's seconds."""
    addressable = communicator.addressable
    before = _matrix(communicator.mesh, kind, axes, num_bytes)
    cut_dim = {"reduce-scatter": 0, "all-to-all": 1, EXCHANGE_KIND: 1}.get(kind)
    after = before.with_spec(ShardingSpec(2, {} if cut_dim is None else {cut_dim: list(axes)}))
    if kind == PERMUTE_KIND:  # every device sends its shard to the next one along each axis
        grid = np.roll(np.reshape(before.mesh.ids, before.mesh.shape), (1,) * len(axes), axes)
        rolled = DeviceMesh(grid.ravel().tolist(), before.mesh.shape)
        after = Layout(rolled, before.spec, before.global_shape, before.dtype)
    step = Exchange(axes) if kind in (PERMUTE_KIND, EXCHANGE_KIND) else step_of(kind, axes)
    shards = {id_: torch.ones(before.local_shape(id_), device=device) for id_ in addressable}
    # A sum over all devices synchronizes them; it costs less than gathering values.
    every = range(before.mesh.ndim)
    alone = Layout(before.mesh, ShardingSpec(0, partial=dict.fromkeys(every, "sum")), (), "float32")
    ones = {id_: torch.ones((), device=device) for id_ in addressable}

    synchronize = transfers_of(AllReduce(tuple(every), "sum"), alone, alone)
    transfers = transfers_of(step, before, after)

    def once() -> float:
        communicator.run(synchronize, ones)
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
    return before.max_local_bytes, median(times)
