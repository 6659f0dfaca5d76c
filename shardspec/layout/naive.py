"""The naive plan: finish reductions, gather everything, then slice."""

from collections.abc import Iterator

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import AllGather, AllReduce, Slice
from shardspec.layout.cross import exchange_to
from shardspec.layout.graph import state_of
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan, Move, plan_of_moves
from shardspec.layout.spec import ShardingSpec


def naive_plan(
    source: Layout, target: Layout, model: CostModel, target_model: CostModel | None = None
) -> ConversionPlan:
    """Return the plan that all-reduces, all-gathers every sharded dim, and slices to the target.

    To another mesh, the gathered tensor crosses whole and is sliced on the target's mesh.
    Reductions that are pending in the target too stay pending.
    """
    moves: list[Move] = []
    if source.mesh != target.mesh:
        whole = ShardingSpec(source.spec.dims)
        gathered = target.with_spec(whole)
        moves += naive_moves(source, whole, model)
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
    """Yield moves that all-reduce what is pending in the source but not in the target."""
    spec = source.spec
    ending = [partial for partial in spec.partials if partial not in target.partials]
    for op in sorted({partial.op for partial in ending}):
        axes = tuple(int(partial.axis) for partial in ending if partial.op == op)
        spec = spec.without_partial(axes)
        yield AllReduce(axes, op), source.with_spec(spec)
