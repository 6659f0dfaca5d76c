"""Specs as Colossal-AI's `dim_partition_dict`, and back.

Colossal-AI writes a dim as R, S0, S1 or S01; its tables of distances
(``colossalai/tensor/d_tensor/sharding_spec.py``) know no other order and no third axis, and
its specs have no pending reductions.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from shardspec.errors import LossyConversionError
from shardspec.layout.layout import SpecLike, resolve_axes
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

__all__ = ["from_colossal", "to_colossal"]

_KNOWN: Final[tuple[list[int], ...]] = ([], [0], [1], [0, 1])


def to_colossal(spec: SpecLike, mesh: DeviceMesh) -> dict[int, list[int]]:
    """Return Colossal-AI's dict from dim to the mesh axes that shard it.

    Raises
    ------
    LossyConversionError
        If a dim is sharded otherwise than as R, S0, S1 or S01, or a reduction is pending.
    AxisError
        If the mesh lacks an axis of the spec.

    Examples
    --------
    >>> to_colossal("[S01,R]", DeviceMesh(range(4), (2, 2)))
    {0: [0, 1]}
    """
    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    resolved.check_plain("Colossal-AI")
    if resolved.partials:
        raise LossyConversionError(
            f"spec {spec}: Colossal-AI has no pending reductions in a spec; finish them first"
        )
    by_dim = {d: [int(axis) for axis in axes] for d, axes in resolved.dim_partition_dict.items()}
    for dim, axes in by_dim.items():
        if axes not in _KNOWN:
            raise LossyConversionError(
                f"spec {spec}: Colossal-AI knows dims as R, S0, S1 and S01 only, and dim {dim} is "
                f"sharded over axes {axes}"
            )
    return by_dim


def from_colossal(dim_partition_dict: Mapping[int, Sequence[int]], dims: int) -> ShardingSpec:
    """Return the spec that Colossal-AI's dict from dim to mesh axes, major first, describes.

    A dim that does not exist, or an axis used twice, is an `AxisError`.

    Examples
    --------
    >>> str(from_colossal({0: [0, 1]}, 2))
    '[S01,R]'
    """
    by_dim: dict[int, list[Axis]] = {dim: list(axes) for dim, axes in dim_partition_dict.items()}
    return ShardingSpec(dims, by_dim)
