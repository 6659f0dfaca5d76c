"""Operations that torch's DTensor gets wrong without an error: refused.

Found by comparing torch 2.13 with one process, over layouts of a mesh of two axes.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import is_strided

__all__ = ["RefuseStridedViews", "check_gradient"]

_MEANS: Final = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")
_EXTREMES: Final = ("amax", "amin")
_NORMS: Final = ("linalg_vector_norm", "norm")


def check_gradient(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise `LayoutError` if the gradient of this call on DTensors would be wrong.

    The gradient of a mean loss is divided by the size of the shard. That of a largest element is
    shared out shard by shard, and where several axes split one dim, ranks may wait for each other.

    Parameters
    ----------
    name, args, kwargs
        A function of torch and its arguments, where a gradient is wanted.

    Examples
    --------
    >>> check_gradient("amax", (torch.ones(2, 2), 0), {})
    """
    remedy = None
    if name in _MEANS and kwargs.get("reduction", "mean") == "mean":
        remedy = "take .mean() of its result with reduction='none'"
    elif name in _EXTREMES and len(args) < 2 and not kwargs.get("dim"):
        remedy = f"name the dims, as in {name}((0, 1))"
    elif name in _NORMS:
        order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
        if isinstance(order, float) and abs(order) == inf:
            remedy = "use .abs().amax() or .abs().amin() with the dims named"
    if remedy is not None:
        raise LayoutError(
            f"{name}: torch {torch.__version__} computes a wrong gradient of it on DTensors; "
            f"{remedy}, or detach its arguments"
        )


_VIEWS: Final = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
)


# torch leaves the methods of its class untyped.
class RefuseStridedViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse views of tensors that torch has as strided shards, as of S10.

    Where a dim after the first is split in descending order of axes, torch flattens it into
    another order than the tensor's, inside matrix products too. Sizes do not matter here, so that
    all ranks refuse alike.

    Parameters
    ----------
    name
        Of the function that is called.

    Raises
    ------
    LayoutError
        On every rank.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._name = name

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do one operation, unless it is such a view."""
        del types
        if func in _VIEWS and isinstance(args[0], TorchDTensor) and is_strided(args[0]):
            raise LayoutError(
                f"{self._name}: it takes a view of a tensor of shape {tuple(args[0].shape)} whose "
                "axes split a dim in descending order, as S10 does, and torch mixes up its parts; "
                "redistribute to ascending order first, as to S01"
            )
        return func(*args, **(kwargs or {}))
