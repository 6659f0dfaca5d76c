"""Rejects casts and shardings that would corrupt quantized tensors, before anything is written."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import lcm

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.convert.select import MappedCatalog, mapped
from shardspec.checkpoint.quantization.detect import Blocks, Quantized, find_quantized, sections
from shardspec.checkpoint.quantization.schemes import Shape
from shardspec.dtypes import dtype_name
from shardspec.errors import DTypeError, LayoutError, QuantizedError, ShardSpecError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import DimSpec, Part
from shardspec.resharding.name_map import Names
from shardspec.resharding.plan import ReshardPlan
from shardspec.text import Argument, TextPart


def quantized_in(source: Catalog) -> Quantized:
    """Return the quantized tensors of a checkpoint; of a mapped checkpoint, those of the source."""
    while isinstance(source, MappedCatalog):
        source = source.base
    outlines = map(source.outline, source.names)
    section = source.facts.quantization
    configs = sections(source.home) if section is None else [section] if section else ()
    return find_quantized({each.name: (each.shape, each.dtype) for each in outlines}, configs)


def origins(source: Catalog, names: Iterable[str]) -> set[str]:
    """Return the names of the stored tensors from which a map makes the named tensors."""
    if not isinstance(source, MappedCatalog):
        return {*names}
    equations = (equation for name in names for equation in source.equations(name))
    return origins(source.base, (equation.source for equation in equations))


def refuse_casts(source: Catalog, names: Iterable[str], dtype: str) -> None:
    """Raise DTypeError if a cast would include quantized tensors."""
    refuse_codes(dtype)
    why = quantized_in(source).why
    for name in names if why else ():
        if name not in source.facts.keeps_dtype:
            _refuse_cast(origins(source, [name]), why, dtype, "exclude these tensors")


def refuse_codes(dtype: str) -> None:
    """Raise DTypeError for a cast to a dtype of codes such as FP8, since a cast has no scales."""
    if dtype.startswith(("float8", "float4")):
        raise DTypeError(
            f"a cast to {dtype} would write codes without scales; quantize with ",
            *(Argument("quantize"), " of a merge, or cast to bf16"),
        )


def _refuse_cast(names: Iterable[str], why: Mapping[str, str], dtype: str, remedy: str) -> None:
    for name in sorted(why.keys() & {*names}):
        raise DTypeError(
            f"cannot cast to {dtype}: tensor {name!r} is quantized ({why[name]}), and a cast would "
            "corrupt codes and scales; omit ",
            Argument("dtype"),
            f", {remedy}, or dequantize first with the tool that wrote them",
        )


def refuse_quantized(why: Mapping[str, str], names: Iterable[str], *remedy: TextPart) -> None:
    """Raise QuantizedError if a tensor is quantized already; `why` has the evidence by name."""
    for name in sorted(why.keys() & {*names}):
        raise QuantizedError(f"tensor {name!r} is quantized already ({why[name]}); ", *remedy)


def check_blocks(
    source: Catalog, layouts: Mapping[str, Layout], quantized: Quantized | None = None
) -> None:
    """Raise LayoutError for layouts that split blocks of codes, or shard scales differently.

    If a map does more than rename codes, these may not be split at all.
    """
    blocks = (quantized or quantized_in(source)).blocks
    renamed = {_origin(source, name): layout for name, layout in layouts.items()} if blocks else {}
    for name, layout in layouts.items() if blocks else ():
        origin = _origin(source, name)
        if origin in blocks:
            _refuse_cuts(name, layout, blocks[origin], renamed)
        elif not origin and origins(source, [name]) & blocks.keys():
            _refuse_cuts(name, layout, Blocks(layout.global_shape), {})


def _origin(source: Catalog, name: str) -> str:
    """Return the name under which a tensor is stored; "" if a map computes it from others."""
    while isinstance(source, MappedCatalog):
        (equation, *more) = source.equations(name)
        if more or equation.view.source != equation.view.target:
            return ""
        source, name = source.base, equation.source
    return name


def _refuse_cuts(name: str, layout: Layout, blocks: Blocks, layouts: Mapping[str, Layout]) -> None:
    for dim, (size, side) in enumerate(zip(layout.global_shape, blocks.sides, strict=True)):
        for lo, hi in _cuts(layout, dim) if side > 1 else ():
            if lo % side or (hi % side and hi != size):
                place, remedy = "codes that cannot be split along this dim", "replicate it"
                if side < size:
                    place = f"a block of {side} elements that share a scale"
                    remedy = f"split at multiples of {side}, as {_in_blocks(layout, dim, side)}"
                raise LayoutError(
                    f"tensor {name!r}: spec {layout.spec} splits dim {dim} at {lo}:{hi}, inside "
                    f"{place}; shard another dim, or {remedy}"
                )
    scales = layouts.get(blocks.scales)
    if scales is not None and not _same_cuts(layout, scales, blocks.sides):
        raise LayoutError(
            f"tensor {name!r}: spec {layout.spec} does not match {scales.spec} of its scales "
            f"{blocks.scales!r}; shard both in the same way, or replicate the scales"
        )


def _in_blocks(layout: Layout, dim: int, side: int) -> str:
    """Return the layout's spec as text, changed to split `dim` at multiples of `side`."""
    cut = layout.spec.dim_specs[dim]
    blocks = DimSpec(cut.axes, cut.parts, lcm(cut.block, side))
    return str(layout.spec.with_dims({dim: blocks}))


@lru_cache(1024)
def _cuts(layout: Layout, dim: int) -> list[tuple[int, int]]:
    """Return the distinct nonempty intervals into which devices divide a dim."""
    if not layout.spec.dim_specs[dim].axes:
        return []
    every = {each for device in layout.mesh.ids for each in layout.intervals(device)[dim]}
    return sorted((lo, hi) for lo, hi in every if lo < hi)


@lru_cache(1024)
def _same_cuts(layout: Layout, scales: Layout, sides: Shape) -> bool:
    """Return True if every device that has codes also has their scales."""
    dims = len(sides) if len(scales.global_shape) == len(sides) else 0
    for dim in range(dims):
        if scales.spec.dim_specs[dim].axes and scales.global_shape[dim] > 1:
            side = sides[dim]
            for device in layout.mesh.ids:
                own = [(lo // side, -(-hi // side)) for lo, hi in layout.intervals(device)[dim]]
                of_scales = scales.intervals(device)[dim] if device in scales.mesh else ()
                if _non_empty(own) != _non_empty(of_scales):
                    return False
    return True


def _non_empty(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(lo, hi) for lo, hi in intervals if lo < hi]


def grid_layout(layout: Layout, sides: Shape, dtype: str = "float32") -> Layout | None:
    """Return the layout of scales that matches the layout of codes; None if it splits blocks.

    `sides` are the sizes of a block along the last dims.

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
        pairs = zip(layout.intervals(device), grid.intervals(device), every, strict=True)
        for own, scales, side in pairs:
            # A cut inside of a block gives a fraction, which equals no interval of the grid.
            if [(lo / side, -(-hi // side)) for lo, hi in _non_empty(own)] != _non_empty(scales):
                return None
    return grid


def check_stored_plan(
    source: Catalog, plan: ReshardPlan, names: Names | None, dtype: object
) -> None:
    """Raise an error if a plan that reads a checkpoint would corrupt quantized tensors."""
    if dtype is not None:
        refuse_codes(dtype_name(dtype))
    quantized = quantized_in(source)
    if not quantized.why:
        return
    _check_casts(plan, quantized.why, dtype, source)
    layouts = {move.target_name: move.target for move in plan.moves}
    check_blocks(mapped(source, names, dropped=plan.dropped), layouts, quantized)


def check_plan(plan: ReshardPlan, dtype: object) -> None:
    """Raise an error if a plan between layouts in memory would corrupt quantized tensors."""
    if dtype is not None:
        refuse_codes(dtype_name(dtype))
    moves = {move.source_name: move for move in plan.moves}
    tensors = {name: (move.source.global_shape, move.source.dtype) for name, move in moves.items()}
    quantized = find_quantized(tensors)
    _check_casts(plan, quantized.why, dtype)
    for move in plan.moves:
        # Where the source is cut inside blocks, devices gather before they compute.
        blocks = quantized.blocks.get(move.source_name)
        if blocks and move.view is None and grid_layout(move.source, blocks.sides) is not None:
            _refuse_cuts(move.target_name, move.target, blocks, {})


def _check_casts(
    plan: ReshardPlan, why: Mapping[str, str], dtype: object, source: Catalog | None = None
) -> None:
    """Raise DTypeError if `dtype` or the plan's target casts a quantized tensor, a key of `why`."""
    for move in plan.moves:
        after = move.target.dtype
        if dtype is not None or move.source.dtype != after:
            names = {move.source_name} if source is None else origins(source, [move.source_name])
            target = after if dtype is None else dtype_name(dtype)
            _refuse_cast(names, why, target, "give these their own dtypes")
