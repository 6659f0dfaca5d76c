"""Specs as OneFlow's SBP signatures, as text.

An SBP has one word per mesh axis: ``S(dim)``, ``B`` (broadcast) or ``P`` (partial sum). Axes that
split one dim do so from left to right, so another order has no SBP.
"""

from shardspec.errors import LossyConversionError
from shardspec.layout.layout import SpecLike, resolve_axes
from shardspec.layout.placements import PartialPlacement, Placement, Split, Whole, placements_of
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["sbp_text"]


def sbp_text(spec: SpecLike, mesh: DeviceMesh) -> str:
    """Write a spec as an SBP signature.

    Raises
    ------
    LossyConversionError
        If the axes of a dim are in another order than from left to right, or another reduction
        than a sum is pending.
    AxisError
        If the mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2))
    >>> sbp_text("[S0,R]", mesh), sbp_text("[S0,R|P1]", mesh)
    ('(S(0),B)', '(S(0),P)')
    """
    resolved = resolve_axes(ShardingSpec.of(spec), mesh)
    resolved.check_plain("OneFlow")
    for dim, axes in resolved.dim_partition_dict.items():
        if axes != sorted(axes, key=int):
            raise LossyConversionError(
                f"spec {spec}: OneFlow splits dim {dim} over axes {sorted(axes, key=int)} from "
                f"left to right only, not over {axes}"
            )

    def word(placement: Placement) -> str:
        match placement:
            case Whole():
                return "B"
            case Split(dim, _):
                return f"S({dim})"
            case PartialPlacement("sum"):
                return "P"
            case PartialPlacement(op):
                raise LossyConversionError(
                    f"spec {spec}: OneFlow has no pending {op}, only sums; finish it first"
                )

    words = map(word, placements_of(resolved, mesh.shape))
    return f"({','.join(words)})"
