"""The naive plan: finish reductions, gather everything, then cut. What better plans avoid."""

from collections.abc import Iterator
from fractions import Fraction

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import AllGather, AllReduce, ReduceOp, Slice, Step
from shardspec.layout.cross import exchange_to
from shardspec.layout.graph import state_of
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan
from shardspec.layout.spec import ShardingSpec

__all__ = ["difference_text", "finishing_moves", "naive_moves", "naive_plan"]


def naive_plan(
    source: Layout, target: Layout, model: CostModel, target_model: CostModel | None = None
) -> ConversionPlan:
    """Return the plan that all-reduces, all-gathers every cut dim, and slices to the target.

    To another mesh the gathered tensor crosses whole, and is sliced there.

    Parameters
    ----------
    source, target
        Both ends. What is pending at the target as well stays pending.
    model, target_model
        Prices of steps on the source's mesh, and on the target's where that is another one.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> source = Layout(DeviceMesh(range(4), (2, 2)), "[S0,R|P1]", (8, 8), "f32")
    >>> plan = naive_plan(source, source.with_spec("[R,S01]"), CostModel.of_mesh(source.mesh))
    >>> [str(layout.spec) for layout in plan.layouts]
    ['[S0,R|P1]', '[S0,R]', '[R,R]', '[R,S01]']
    """
    moves: list[tuple[Step, Layout]] = []
    if source.mesh != target.mesh:
        whole = ShardingSpec(source.spec.dims)
        there = target.with_spec(whole)
        moves += naive_moves(source, whole, model)
        moves.append((exchange_to(source, there, model, target_model), there))
        moves += naive_moves(there, target.spec, target_model or model)
    elif source != target:
        moves += naive_moves(source, target.spec, model)
    steps, layouts = [step for step, _ in moves], [layout for _, layout in moves]
    return ConversionPlan(tuple(steps), (source, *layouts), model, target_model)


def naive_moves(
    source: Layout, target: ShardingSpec, model: CostModel
) -> Iterator[tuple[Step, Layout]]:
    """Yield the steps that finish reductions, gather everything and cut, with where they lead."""
    for step, layout in finishing_moves(source, target):
        yield step, layout
        source = layout
    spec = source.spec
    if not (spec.is_plain and target.is_plain):
        whole = ShardingSpec(spec.dims, partial=spec.partial)
        for after in (whole, target):
            if after != spec:
                there = source.with_spec(after)
                yield exchange_to(source, there, model), there
                spec = after
        return
    held, wanted = state_of(spec), state_of(target)
    for dim, cut in enumerate(held[0]):
        if cut:
            spec = spec.with_dims({dim: ()})
            yield AllGather(dim, cut), source.with_spec(spec)
    for dim, cut in enumerate(wanted[0]):
        if cut:
            spec = spec.with_dims({dim: cut})
            yield Slice(dim, cut), source.with_spec(spec)


def finishing_moves(source: Layout, target: ShardingSpec) -> Iterator[tuple[Step, Layout]]:
    """Yield the all-reduces of what is pending at the source and not at the target."""
    spec = source.spec
    ending: dict[ReduceOp, list[int]] = {}
    for partial in sorted(spec.partials, key=lambda partial: int(partial.axis)):
        if partial not in target.partials:
            ending.setdefault(partial.op, []).append(int(partial.axis))
    for op, axes in sorted(ending.items()):
        spec = spec.without_partial(axes)
        yield AllReduce(tuple(axes), op), source.with_spec(spec)


def difference_text(plan: ConversionPlan, naive: ConversionPlan) -> str:
    """Say in a sentence what a plan avoids, and how much of it.

    Examples
    --------
    >>> from shardspec import DeviceMesh, LayoutConverter
    >>> source = Layout(DeviceMesh(range(8), (2, 4)), "[S01,R]", (4096, 4096), "bf16")
    >>> plan = LayoutConverter().plan(source, "[R,S01]")
    >>> difference_text(plan, naive_plan(source, plan.target, plan.model)).split(": ")[1]
    '3.96× faster, receives 1/8 of the bytes, holds 2/9 at its peak'
    """
    if not plan.steps:
        return "nothing to do, and nothing to avoid"
    if plan.communicating == naive.communicating:
        return "this is the naive plan: here no other is cheaper"
    whole = any(layout.spec.dim_partition_dict == {} for layout in plan.layouts)
    lead = "takes another way" if whole else "avoids gathering the whole tensor"
    return (
        f"{lead}: {_speed(plan.cost_seconds, naive.cost_seconds)}, "
        f"receives {_share(plan.bytes_received, naive.bytes_received, 'of the bytes')}, "
        f"holds {_share(plan.peak_bytes, naive.peak_bytes, 'at its peak')}"
    )


def _speed(seconds: float, naive: float) -> str:
    if abs(seconds - naive) < 0.005 * naive:
        return "about as fast"
    if seconds == 0:
        return "free"
    if seconds < naive:
        return f"{naive / seconds:.3g}× faster"
    return f"{seconds / naive:.3g}× slower" if naive else "slower, for the naive plan is free"


def _share(amount: int, naive: int, of_what: str) -> str:
    """Return a part in words: a small fraction where it is close to one, else in per cent."""
    if amount == naive:
        return "as many bytes" if of_what == "of the bytes" else "as much at its peak"
    if amount == 0:
        return "nothing"
    if amount > naive:
        return f"{amount / naive:.3g}× {of_what.replace('of ', '')}" if naive else "more"
    share = Fraction(amount, naive)
    close = share.limit_denominator(64)
    if close and abs(close - share) <= share / 200 and close.numerator <= 9 and close < 1:
        return f"{close} {of_what}"
    return f"{float(share):.0%} {of_what}".replace("%", " %")
