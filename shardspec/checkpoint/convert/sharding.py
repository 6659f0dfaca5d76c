"""Chooses how the tensors of an output, or of a load, are sharded over a mesh."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.convert.options import WriteOptions
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.quantization.cuts import check_blocks, grid_layout, quantized_in
from shardspec.checkpoint.targets import OutputTensor
from shardspec.errors import CheckpointError, LayoutError, ShardSpecError
from shardspec.layout.common_mesh import on_common_mesh
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.rules import Rules, match_rules, winning_patterns
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import Argument, TextPart

ON_ONE_DEVICE: Final = DeviceMesh((0,), (1,))


def layouts_by_rules(
    mesh: DeviceMesh,
    rules: Mapping[str, SpecLike],
    wanted: Sequence[OutputTensor],
    otherwise: Callable[[OutputTensor], ShardingSpec] | None = None,
) -> dict[str, Layout]:
    """Return the layout of each tensor: by the rule for it, else `otherwise`, else replicated."""
    specs = match_rules(rules, {tensor.name: tensor.shape for tensor in wanted}, mesh)
    layouts = {}
    layout = lru_cache(None)(partial(Layout, mesh))
    for tensor in wanted:
        spec = specs.get(tensor.name)
        if spec is None:
            spec = ShardingSpec(len(tensor.shape)) if otherwise is None else otherwise(tensor)
        if spec.partials:
            raise LayoutError(
                f"tensor {tensor.name!r}: spec {spec} has pending reductions, but what is written "
                "or loaded has none; leave them out"
            )
        try:
            layouts[tensor.name] = layout(spec, tensor.shape, tensor.dtype)
        except ShardSpecError as error:
            raise LayoutError(f"tensor {tensor.name!r}: {error}") from None
    return layouts


_MESH_AND_RULES: Final = (Argument("device_mesh"), " and ", Argument("rules"))


def layouts_like(
    other: Catalog, wanted: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of another checkpoint, and its layout of each tensor for these shapes."""
    if other.mesh is None:
        raise CheckpointError(
            f"{other.directory}: a checkpoint in the format of {other.format} does not say its "
            "mesh and specs; give ",
            *_MESH_AND_RULES,
        )
    names = frozenset(other.names)

    def spec_of(tensor: OutputTensor) -> ShardingSpec:
        if tensor.name not in names:
            raise CheckpointError(
                f"{other.directory}: has no tensor {tensor.name!r} that says how to shard it; "
                "rename it, exclude it, or give ",
                *_MESH_AND_RULES,
            )
        spec = other.outline(tensor.name).spec
        if spec is None or spec.dims != len(tensor.shape):
            problem = "does not say how it is sharded" if spec is None else f"shards it by {spec}"
            raise CheckpointError(
                f"{other.directory}: {problem}, but tensor {tensor.name!r} has {len(tensor.shape)} "
                "dims; give ",
                *_MESH_AND_RULES,
            )
        return spec.without_partial()

    return other.mesh, layouts_by_rules(other.mesh, {}, wanted, spec_of)


def layouts_given(
    given: Mapping[str, Layout], wanted: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of given layouts, and those of the tensors; nothing is pending."""
    layouts = {}
    for tensor in wanted:
        layout = given.get(tensor.name)
        if layout is None or layout.global_shape != tensor.shape:
            problem = (
                "no layout is" if layout is None else f"the layout of {layout.global_shape} is"
            )
            raise CheckpointError(
                f"{problem} for tensor {tensor.name!r} of shape {tensor.shape}; give one, or "
                "exclude the tensor"
            )
        spec = layout.spec.without_partial()
        layouts[tensor.name] = Layout(layout.mesh, spec, tensor.shape, tensor.dtype)
    return on_common_mesh(layouts) if layouts else (ON_ONE_DEVICE, {})


# --- of an output


def check_sharding(options: WriteOptions) -> None:
    """Check that either a mesh or a checkpoint to shard like is given."""
    mesh: object = options.device_mesh
    rules, like = options.rules, options.like
    problem: tuple[TextPart, ...] = ()
    if like is not None and (mesh is not None or rules is not None):
        problem = ("give either a checkpoint to shard like, or a mesh and rules",)
    elif not isinstance(mesh, DeviceMesh | None):
        problem = (
            f"a {type(mesh).__name__} is not a mesh to shard for; give a DeviceMesh, as of "
            "DeviceMesh(range(8), (2, 4))",
        )
    elif mesh is None and like is None:
        problem = (
            "give the mesh to shard for, ",
            Argument("device_mesh"),
            ", or a checkpoint to shard like",
        )
    if problem:
        raise CheckpointError(*problem)


def _of_scales(
    source: Catalog,
    rules: Rules,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
) -> dict[str, Layout]:
    """Return the layouts of scales that no rule names: they are cut as their codes are."""
    winners = winning_patterns(list(rules), layouts)
    new = {tensor.source: tensor.name for tensor in tensors}
    grids: dict[str, Layout] = {}
    for codes, blocks in quantized_in(source).blocks.items():
        scales = blocks.scales
        if {codes, scales} <= new.keys() and new[scales] not in winners:
            grid = grid_layout(layouts[new[codes]], blocks.sides, layouts[new[scales]].dtype)
            grids |= {} if grid is None else {new[scales]: grid}
    return grids


def sharding_of(
    source: Catalog, options: WriteOptions, tensors: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of an output whose format has shards, and the layouts of its tensors."""
    if isinstance(options.like, Mapping):
        mesh, layouts = layouts_given(options.like, tensors)
    elif options.like is not None:
        mesh, layouts = layouts_like(as_catalog(options.like), tensors)
    else:
        mesh = options.device_mesh or ON_ONE_DEVICE
        layouts = layouts_by_rules(mesh, options.rules or {}, tensors)
        if source.facts.quantization:
            layouts |= _of_scales(source, options.rules or {}, tensors, layouts)
    if options.way == "sharded":
        check_blocks(source, {tensor.source: layouts[tensor.name] for tensor in tensors})
    return mesh, layouts
