"""Chooses the layout of each tensor of an output: by name rules, or as in another checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

from shardspec.checkpoint.catalog import Catalog, OutputTensor
from shardspec.errors import CheckpointError, LayoutError, ShardSpecError
from shardspec.layout.common_mesh import on_common_mesh
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.rules import match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import Argument

ON_ONE_DEVICE: Final = DeviceMesh((0,), (1,))


def layouts_by_rules(
    mesh: DeviceMesh,
    rules: Mapping[str, SpecLike],
    tensors: Sequence[OutputTensor],
    otherwise: Callable[[OutputTensor], ShardingSpec] | None = None,
) -> dict[str, Layout]:
    """Return each tensor's layout: by its last matching rule, else `otherwise`, else replicated.

    >>> tensor = OutputTensor("w", "w", (4, 3), "int8")
    >>> layouts_by_rules(DeviceMesh(range(2), (2,)), {"w": "[S0,R]"}, [tensor])["w"].spec
    ShardingSpec.parse('[S0,R]')
    """
    specs = match_rules(rules, {tensor.name: tensor.shape for tensor in tensors}, mesh)
    layouts = {}
    layout = lru_cache(None)(partial(Layout, mesh))
    for tensor in tensors:
        spec = specs.get(tensor.name)
        if spec is None:
            spec = ShardingSpec(len(tensor.shape)) if otherwise is None else otherwise(tensor)
        if spec.partials:
            raise LayoutError(
                f"tensor {tensor.name!r}: spec {spec} has pending reductions, but written and "
                "loaded tensors have none; remove them from the spec"
            )
        try:
            layouts[tensor.name] = layout(spec, tensor.shape, tensor.dtype)
        except ShardSpecError as error:
            raise LayoutError(f"cannot shard tensor {tensor.name!r}: {error}") from None
    return layouts


_MESH_AND_RULES: Final = (Argument("device_mesh"), " and ", Argument("rules"))


def layouts_like(
    other: Catalog, tensors: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of another checkpoint, and each tensor's layout there, found by its name."""
    if other.mesh is None:
        raise CheckpointError(
            f"{other.directory}: a checkpoint in the format of {other.format} does not record its "
            "mesh and specs; give ",
            *_MESH_AND_RULES,
        )
    names = frozenset(other.names)

    def spec_of(tensor: OutputTensor) -> ShardingSpec:
        if tensor.name not in names:
            raise CheckpointError(
                f"{other.directory}: has no tensor {tensor.name!r} with a spec to use; rename the "
                "tensor, exclude it, or give ",
                *_MESH_AND_RULES,
            )
        spec = other.outline(tensor.name).spec
        if spec is None or spec.dims != len(tensor.shape):
            problem = "does not record its spec" if spec is None else f"shards it by {spec}"
            raise CheckpointError(
                f"{other.directory}: {problem}, but tensor {tensor.name!r} has {len(tensor.shape)} "
                "dims; give ",
                *_MESH_AND_RULES,
            )
        return spec.without_partial()

    return other.mesh, layouts_by_rules(other.mesh, {}, tensors, spec_of)


def layouts_given(
    explicit: Mapping[str, Layout], tensors: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh and the layouts that the caller listed, without pending reductions."""
    layouts = {}
    for tensor in tensors:
        layout = explicit.get(tensor.name)
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
