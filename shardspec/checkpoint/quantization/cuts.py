"""Casts and cuts that quantised tensors do not stand are refused, before anything is written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import lcm

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.quantization.detect import (
    Quantised,
    Shape,
    Stated,
    quantised,
    sections,
    stated_by,
)
from shardspec.checkpoint.select.mapped import MappedCatalog, boxes_in_source, mapped
from shardspec.dtypes import dtype_name
from shardspec.errors import DTypeError, LayoutError, QuantisedError, ShardSpecError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import DimSpec, Part, ShardingSpec
from shardspec.resharding.name_map import Names
from shardspec.resharding.plan import ReshardPlan
from shardspec.text import Argument, TextPart


def _unmapped(source: Catalog) -> Catalog:
    while isinstance(source, MappedCatalog):
        source = source.base
    return source


def quantised_in(source: Catalog) -> Quantised:
    """Return which tensors of a checkpoint are quantised; of a mapped one, of what is mapped."""
    source = _unmapped(source)
    outlines = map(source.outline, source.names)
    tensors = {outline.name: (outline.shape, outline.dtype) for outline in outlines}
    section = source.quantization
    stated = list(sections(source.home)) if section is None else [section] if section else []
    return quantised(tensors, stated_by(stated, source.file_metadata.values))


def refuse_casts(source: Catalog, names: Iterable[str], dtype: str) -> None:
    """Refuse to cast a choice of tensors in which some are quantised.

    Also where only others would change: what is asked for is a model of one dtype, which codes are
    not.
    """
    why = quantised_in(source).why
    for name in names if why else ():
        if name in source.keeps_dtype:
            continue
        _refuse_cast(source, name, why, dtype, "exclude these tensors")


def _refuse_cast(
    source: Catalog | None, name: str, why: Mapping[str, str], dtype: str, remedy: str
) -> None:
    origins = [name] if source is None else [origin for origin, _ in _origins(source, name, ())]
    for origin in origins:
        if origin in why:
            raise DTypeError(
                f"cannot cast to {dtype}: tensor {origin!r} is quantised ({why[origin]}), and "
                "codes and scales mean something only as they are; leave out ",
                Argument("dtype"),
                f", {remedy}, or dequantise first with the tool that wrote them",
            )


def refuse_quantised(why: Mapping[str, str], names: Iterable[str], *remedy: TextPart) -> None:
    """Refuse to quantise what is quantised already; `why` maps such tensors to what shows it."""
    if again := why.keys() & {*names}:
        name = min(again)
        raise QuantisedError(f"tensor {name!r} is quantised already ({why[name]}); ", *remedy)


def _check_casts(
    plan: ReshardPlan, why: Mapping[str, str], dtype: object, source: Catalog | None = None
) -> None:
    """Refuse a plan that casts quantised tensors; or all tensors, where some are quantised."""
    for move in plan.moves:
        after = move.target.dtype
        if dtype is not None or move.source.dtype != after:
            wanted = after if dtype is None else dtype_name(dtype)
            _refuse_cast(source, move.source_name, why, wanted, "give these their own dtypes")


def check_blocks(
    source: Catalog, layouts: Mapping[str, Layout], quantized: Quantised | None = None
) -> None:
    """Refuse layouts, by name in a checkpoint, that cut a tensor inside a block.

    A scale is also refused if its cut leaves a device without the scales of its codes. Devices that
    hold no scale at all are allowed: they gather before they compute.
    """
    blocks = (quantized or quantised_in(source)).blocks
    if not blocks:
        return
    flaw_of, scales_flaw_of = lru_cache(1024)(_flaw), lru_cache(1024)(_scales_flaw)
    stored = _unmapped(source)
    for name, layout in layouts.items():
        if stored is source:
            if name in blocks:
                _refuse(name, layout, flaw_of(layout, blocks[name].sides))
                for other, sides in blocks[name].scales:
                    if other in layouts and (flaw := scales_flaw_of(layout, layouts[other], sides)):
                        _refuse_scales(name, layout, other, layouts[other].spec, flaw)
            continue
        origins = {origin for origin, _ in _origins(source, name, ())} & blocks.keys()
        for device in layout.mesh.ids if origins else ():
            parts = [box for box in layout.local_boxes(device) if all(a < b for a, b in box)]
            for origin, boxes in _origins(source, name, parts):
                if origin in origins:
                    shape, sides = stored.outline(origin).shape, blocks[origin].sides
                    _refuse(name, layout, _flaw_of_boxes(boxes, shape, sides), origin)


def grid_layout(layout: Layout, sides: Shape, dtype: str = "float32") -> Layout | None:
    """Return how scales lie, cut as what they belong to is; None if that is cut inside of blocks.

    Blocks have sides along the last dims.

    >>> from shardspec import DeviceMesh
    >>> weight = Layout(DeviceMesh(range(2)), "[R,S0]", (300, 512), "bfloat16")
    >>> grid_layout(weight, (128, 128)).local_shape(1)
    (3, 2)
    """
    shape, cuts = list(layout.global_shape), {}
    every = (*(1 for _ in shape[len(sides) :]), *sides)
    for dim, side in enumerate(every):
        shape[dim] = -(-shape[dim] // side)
        cut = layout.spec.dim_specs[dim]
        if cut.axes and side > 1:
            parts = tuple(Part(-(-part.size // side), part.shares) for part in cut.parts)
            cuts[dim] = DimSpec(cut.axes, parts, max(1, cut.block // side))
    try:
        grid = Layout(layout.mesh, layout.spec.with_dims(cuts), shape, dtype)
    except ShardSpecError:
        return None
    for device in layout.mesh.ids:
        pairs = zip(layout.intervals(device), grid.intervals(device), strict=True)
        for (intervals, scales), size, side in zip(pairs, layout.global_shape, every, strict=True):
            filled = [(lo, hi) for lo, hi in intervals if lo < hi]
            same = [(lo // side, -(-hi // side)) for lo, hi in filled]
            if _flaw_of_side(filled, size, side) or same != [
                interval for interval in scales if interval[0] < interval[1]
            ]:
                return None
    return grid


def _refuse(
    name: str, layout: Layout, flaw: tuple[int, int, int, int] | None, origin: str = ""
) -> None:
    if flaw is None:
        return
    dim, lo, hi, side = flaw
    what = f"a block of {side} elements that share a scale"
    remedy = "cut another dim, or over fewer devices"
    if not origin and side >= layout.global_shape[dim]:
        what = "codes that share a scale, or whose order is not known, all along the dim"
        remedy = "cut another dim, or replicate it"
    better = None if origin else _in_blocks(layout, dim, side)
    if better is not None:
        remedy = f"cut at multiples of {side}, as {better}"
    where = f"dim {dim} at {lo}:{hi}" + (f" of {origin!r}" if origin else "")
    raise LayoutError(f"tensor {name!r}: spec {layout.spec} cuts {where}, inside {what}; {remedy}")


def _in_blocks(layout: Layout, dim: int, side: int) -> str | None:
    """Return a spec that cuts a dim at blocks, if each device gets some then."""
    cut = layout.spec.dim_specs[dim]
    blocks = DimSpec(cut.axes, cut.parts, lcm(cut.block, side))
    other = layout.with_spec(layout.spec.with_dims({dim: blocks}))
    intervals = [other.intervals(device)[dim] for device in layout.mesh.ids]
    if any(lo == hi for some in intervals for lo, hi in some):
        return None
    flaws = (_flaw_of_side(some, layout.global_shape[dim], side) for some in intervals)
    return None if any(flaws) else str(other.labelled_spec)


def _flaw(layout: Layout, sides: Shape) -> tuple[int, int, int, int] | None:
    """Return the first cut inside a block: its dim, the interval, and the side of the block."""
    for dim, (size, side) in enumerate(zip(layout.global_shape, sides, strict=True)):
        if side > 1 and layout.spec.dim_specs[dim].axes:
            for intervals in {layout.intervals(device)[dim]: None for device in layout.mesh.ids}:
                if flaw := _flaw_of_side(intervals, size, side):
                    return dim, *flaw, side
    return None


def _flaw_of_side(
    intervals: Sequence[tuple[int, int]], size: int, side: int
) -> tuple[int, int] | None:
    for lo, hi in intervals:
        if lo < hi and (lo % side or (hi % side and hi != size)):
            return lo, hi
    return None


def _flaw_of_boxes(
    boxes: Iterable[Box], shape: Shape, sides: Shape
) -> tuple[int, int, int, int] | None:
    for box in _joined(boxes):
        for dim, (interval, size, side) in enumerate(zip(box, shape, sides, strict=True)):
            if flaw := _flaw_of_side([interval], size, side):
                return dim, *flaw, side
    return None


def _joined(boxes: Iterable[Box]) -> list[Box]:
    """Join boxes that differ along one dim, where they meet."""
    result = list(boxes)
    for dim in range(len(result[0]) if result else 0):

        def rest(box: Box, dim: int = dim) -> Box:
            return (*box[:dim], *box[dim + 1 :])

        joined: list[Box] = []
        for _, alike in groupby(sorted(result, key=lambda box: (rest(box), box[dim])), key=rest):
            start = len(joined)
            for box in alike:
                if len(joined) > start and joined[-1][dim][1] >= box[dim][0]:
                    (lo, hi), (_, end) = joined.pop()[dim], box[dim]
                    box = (*box[:dim], (lo, max(hi, end)), *box[dim + 1 :])
                joined.append(box)
        result = joined
    return result


def _origins(
    source: Catalog, name: str, boxes: Sequence[Box]
) -> Iterator[tuple[str, Sequence[Box]]]:
    """Yield the stored tensors that a mapped one is made from, each with the boxes it gives."""
    if not isinstance(source, MappedCatalog):
        yield name, boxes
        return
    for equation in source.equations(name):
        inner = [part for box in boxes for part in boxes_in_source(equation.view, box)]
        yield from _origins(source.base, equation.source, inner)


def origins(source: Catalog, names: Iterable[str]) -> set[str]:
    """Return the names of the stored tensors that some of a mapped checkpoint are made from."""
    return {origin for name in names for origin, _ in _origins(source, name, ())}


def _scales_flaw(layout: Layout, scales: Layout, sides: Shape) -> tuple[int, ...] | None:
    """Return the first device that lacks scales of its codes but has others: where, and which."""
    if not any(cut.axes for cut in scales.spec.dim_specs):
        return None
    for device in layout.mesh.ids:
        held_scales = scales.intervals(device) if device in scales.mesh else ()
        if not held_scales or any(lo == hi for side in held_scales for lo, hi in side):
            continue
        for dim, codes in enumerate(layout.intervals(device)):
            size, count = layout.global_shape[dim], scales.global_shape[dim]
            finer = max(1, count // max(1, size))
            for lo, hi in codes if count > 1 else ():
                start, end = lo * finer // sides[dim], -(-hi * finer // sides[dim])
                if lo < hi and not any(a <= start and end <= b for a, b in held_scales[dim]):
                    return device, dim, lo, hi, start, end
    return None


def _refuse_scales(
    name: str, layout: Layout, other: str, spec: ShardingSpec, flaw: tuple[int, ...]
) -> None:
    device, dim, lo, hi, start, end = flaw
    raise LayoutError(
        f"tensor {name!r}: spec {layout.spec} gives device {device} {lo}:{hi} of dim {dim}, whose "
        f"numbers in {other!r} are {start}:{end}, but {spec} gives it others of these; cut both "
        f"alike, or replicate {other!r}"
    )


def check_stored_plan(
    source: Catalog, plan: ReshardPlan, names: Names | None, dtype: object
) -> None:
    """Refuse a plan that reads a checkpoint and does quantised tensors harm."""
    quantized = quantised_in(source)
    if not quantized.why:
        return
    _check_casts(plan, quantized.why, dtype, source)
    layouts = {move.target_name: move.target for move in plan.moves}
    check_blocks(mapped(source, names, dropped=plan.dropped), layouts, quantized)


def check_plan(plan: ReshardPlan, dtype: object) -> None:
    """Refuse a plan between layouts in memory that does quantised tensors harm.

    Where the source is cut inside a block, whoever has the parts gathers before it computes.
    """
    moves = {move.source_name: move for move in plan.moves}
    tensors = {name: (move.source.global_shape, move.source.dtype) for name, move in moves.items()}
    quantized = quantised(tensors, Stated())
    _check_casts(plan, quantized.why, dtype)
    for move in plan.moves:
        blocks = quantized.blocks.get(move.source_name)
        if blocks and move.view is None and _flaw(move.source, blocks.sides) is None:
            _refuse(move.target_name, move.target, _flaw(move.target, blocks.sides))
