"""Searches for the cheapest plan between two layouts, and makes the naive plan to compare with.

>>> from shardspec import DeviceMesh
>>> source = Layout(DeviceMesh(range(4), (2, 2)), "[S0,R]", (4096, 4096), "f32")
>>> target, model = source.with_spec("[R,S0]"), CostModel.of_mesh(source.mesh)
>>> [str(layout.spec) for layout in cheapest_plan(source, target, model, None, None).layouts]
['[S0,R]', '[R,S0]']
>>> [str(layout.spec) for layout in naive_plan(source, target, model).layouts]
['[S0,R]', '[R,R]', '[R,S0]']
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from math import inf
from typing import Final

import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import AllGather, AllReduce, Permute, Slice, Step
from shardspec.errors import LayoutError
from shardspec.layout import graph
from shardspec.layout.cross import cheapest_crossing, exchange_to
from shardspec.layout.graph import state_of
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan, Move, plan_of_moves
from shardspec.layout.pricing import (
    changed_axes,
    exchange_between,
    pair_prices,
    prices_to_search,
    states_of,
    step_lines,
)
from shardspec.layout.spec import ShardingSpec

_MAX_EDGES: Final = 100_000
"""The most steps that one search through a large graph examines; about a second."""
_MAX_DIMS: Final = 8
"""Dims to which this search moves axes, unless more are sharded in the source or target."""


@lru_cache(maxsize=1024)
def cheapest_plan(
    source: Layout,
    target: Layout,
    model: CostModel,
    target_model: CostModel | None,
    max_bytes: int | None,
) -> ConversionPlan:
    """Return the cheapest plan; see `LayoutConverter.plan`.

    `target_model` has the prices on the target's mesh if that differs from the source's.
    """
    if max_bytes is not None and target_model is not None:
        raise LayoutError(
            f"max_bytes is for conversions on one mesh, but {target} is on another mesh than "
            f"{source}; omit it, or bound the buckets of plan_reshard(max_bytes=)"
        )
    if not (source.spec.is_plain and target.spec.is_plain):
        moves = _moves_without_search(source, target, model, target_model)
        plan = plan_of_moves(source, moves, model, target_model)
        if max_bytes is not None and plan.peak_bytes > max_bytes:
            raise _too_large(source, target, max_bytes, plan.peak_bytes)
        return plan
    if target_model is not None:
        models = model, target_model
        before, after = cheapest_crossing(source, target, models)
        moves = [] if before == source else _moves_on_mesh(source, before, model, None)
        moves.append((exchange_to(before, after, *models), after))
        if after != target:
            moves += _moves_on_mesh(after, target, target_model, None)
    else:
        moves = _moves_on_mesh(source, target, model, max_bytes)
    return plan_of_moves(source, _with_slices_joined(moves), model, target_model)


def _moves_on_mesh(
    source: Layout, target: Layout, model: CostModel, max_bytes: int | None
) -> list[Move]:
    if states_of(source) <= graph.MAX_STATES:
        return _moves_by_matrix(source, target, model, max_bytes)
    if max_bytes is None:
        return _moves_by_graph(source, target, model)
    raise too_many("max_bytes", source, "omit it")


def _too_large(source: Layout, target: Layout, max_bytes: int, least: float) -> LayoutError:
    return LayoutError(
        f"every plan from {source.spec} to {target.spec} needs more than {max_bytes} bytes on a "
        f"device; give at least {int(least)}"
    )


def too_many(what: str, source: Layout, remedy: str) -> LayoutError:
    """Return the error of a search that needs all layouts at once, if they are too many."""
    return LayoutError(
        f"{what}: {states_of(source)} layouts (mesh {source.mesh}, {source.spec.dims} dims) are "
        f"too many for this search, whose limit is {graph.MAX_STATES}; {remedy}"
    )


def _moves_by_matrix(
    source: Layout, target: Layout, model: CostModel, max_bytes: int | None
) -> list[Move]:
    """Return the cheapest moves, found in the matrix with the prices of all moves."""
    prices, move = prices_to_search(source, model, max_bytes, target)
    start, goal = prices.state(source), prices.state(target)
    walk = graph.shortest_walk(move, start, goal)
    if walk is None:
        assert max_bytes is not None, "without a bound there is always a path"
        least = graph.distances(prices.live_bytes, [start], np.maximum)[0, goal]
        raise _too_large(source, target, max_bytes, least)
    return [prices.move(source, *states) for states in pairwise(walk)]


def _moves_by_graph(source: Layout, target: Layout, model: CostModel) -> list[Move]:
    """Return the cheapest moves found in a graph that is too large for a matrix.

    To bound the search, axes that neither spec uses stay unused, and at most 8 dims are sharded on
    the way: those that a spec shards, then the longest. If `_MAX_EDGES` steps find no better path,
    the result is that of `_moves_without_search`, or the naive moves.
    """
    ways = (
        _moves_without_search(source, target, model),
        list(naive_moves(source, target.spec, model)),
    )
    plans = [plan_of_moves(source, moves, model).cost_seconds for moves in ways]
    seconds, sure = min(plans), list(ways[plans[1] < plans[0]])
    start, goal = graph.state_of(source.spec), graph.state_of(target.spec)
    axes = {int(axis) for axis in (*source.spec.axes, *target.spec.axes)}
    cut = [any(cuts) for cuts in zip(start[0], goal[0], strict=True)]
    dims = sorted(range(len(cut)), key=lambda dim: (not cut[dim], -source.global_shape[dim]))
    dims = sorted(dims[: max(sum(cut), _MAX_DIMS)])
    edges = partial(graph.successors, axes_to_use=sorted(axes), dims=dims)

    lines = step_lines(model)

    @cache
    def shard_bytes(cuts: graph.Cuts) -> int:
        return source.with_spec(graph.spec_of((cuts, ()))).max_local_bytes

    def price(step: Step, state: graph.SpecState) -> float:
        num_bytes = shard_bytes(state[0])
        return min(fixed + num_bytes * slope for fixed, slope in lines(step)) + graph.TIE_SECONDS

    bound = seconds + graph.TIE_SECONDS * len(sure)
    path = graph.cheapest_path(edges, start, goal, price, bound, _MAX_EDGES)
    if not path:
        return sure
    return [(step, source.with_spec(graph.spec_of(state))) for step, state in path]


def _moves_without_search(
    source: Layout, target: Layout, model: CostModel, target_model: CostModel | None = None
) -> list[Move]:
    """Return moves that finish reductions, then slice, permute or exchange; else naive moves.

    All conversions of specs with parts or blocks are planned here.
    """
    moves = list(finishing_moves(source, target.spec))
    finished = moves[-1][1] if moves else source
    if finished == target:
        return moves
    if not (finished.spec.is_plain and target.spec.is_plain):
        return [*moves, (exchange_to(finished, target, model, target_model), target)]
    if finished.spec.partials:
        return list(naive_moves(source, target.spec, model))
    both_cuts = graph.state_of(finished.spec)[0], graph.state_of(target.spec)[0]
    added = [(dim, a, b) for dim, (a, b) in enumerate(zip(*both_cuts, strict=True)) if a != b]
    if all(b[: len(a)] == a for _, a, b in added):
        layout = finished
        for dim, before, after in added:
            layout = layout.with_spec(layout.spec.with_dims({dim: after}))
            moves.append((Slice(dim, after[len(before) :]), layout))
        return moves
    permute, exchange = pair_prices(finished, target, model)
    if min(permute, exchange) == inf:  # every device has its target box, but no slice gives it
        return [*moves, *naive_moves(finished, target.spec, model)]
    if permute <= exchange:
        return [*moves, (Permute(changed_axes(*both_cuts)), target)]
    return [*moves, (exchange_between(*both_cuts, model), target)]


def _with_slices_joined(moves: Sequence[Move]) -> list[Move]:
    """Return the moves with consecutive slices of one dim joined into one."""
    joined: list[Move] = []
    for step, layout in moves:
        last = joined[-1][0] if joined else None
        if isinstance(step, Slice) and isinstance(last, Slice) and step.dim == last.dim:
            joined[-1] = Slice(step.dim, last.axes + step.axes), layout
        else:
            joined.append((step, layout))
    return joined


def naive_plan(
    source: Layout, target: Layout, model: CostModel, target_model: CostModel | None = None
) -> ConversionPlan:
    """Return the plan that all-reduces, all-gathers every sharded dim, and slices to the target.

    Between two meshes, the gathered tensor is sent and then sliced on the target's mesh.
    Reductions that are pending in the target too stay pending.
    """
    moves: list[Move] = []
    if source.mesh != target.mesh:
        replicated = ShardingSpec(source.spec.dims)
        gathered = target.with_spec(replicated)
        moves += naive_moves(source, replicated, model)
        moves.append((exchange_to(source, gathered, model, target_model), gathered))
        moves += naive_moves(gathered, target.spec, target_model or model)
    elif source != target:
        moves += naive_moves(source, target.spec, model)
    return plan_of_moves(source, moves, model, target_model)


def naive_moves(source: Layout, target: ShardingSpec, model: CostModel) -> Iterator[Move]:
    """Yield moves that finish reductions, gather every sharded dim and slice to the target."""
    for step, layout in finishing_moves(source, target):
        yield step, layout
        source = layout
    spec = source.spec
    if not (spec.is_plain and target.is_plain):
        for after in (ShardingSpec(spec.dims, partial=spec.partial), target):
            if after != spec:
                reached = source.with_spec(after)
                yield exchange_to(source, reached, model), reached
                spec = after
        return
    for dim, cut in enumerate(state_of(spec)[0]):
        if cut:
            spec = spec.with_dims({dim: ()})
            yield AllGather(dim, cut), source.with_spec(spec)
    for dim, cut in enumerate(state_of(target)[0]):
        if cut:
            spec = spec.with_dims({dim: cut})
            yield Slice(dim, cut), source.with_spec(spec)


def finishing_moves(source: Layout, target: ShardingSpec) -> Iterator[Move]:
    """Yield moves that finish reductions which are pending in the source but not in the target.

    >>> from shardspec import DeviceMesh
    >>> source = Layout(DeviceMesh(range(4), (2, 2)), "[R|P01]", (8,), "f32")
    >>> [(step, str(after.spec)) for step, after in finishing_moves(source, ShardingSpec(1))]
    [(AllReduce(axes=(0, 1), op='sum'), '[R]')]
    """
    spec = source.spec
    ending = [pending for pending in spec.partials if pending not in target.partials]
    for op in sorted({pending.op for pending in ending}):
        axes = tuple(int(pending.axis) for pending in ending if pending.op == op)
        spec = spec.without_partial(axes)
        yield AllReduce(axes, op), source.with_spec(spec)
