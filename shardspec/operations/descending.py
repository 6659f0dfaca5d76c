"""Views of dims that are cut in a descending order of axes, which torch's rules get wrong.

Where a dim after the first is cut as by S10, torch 2.13 flattens it into an order that is not the
tensor's. So views of such tensors are refused, inside products too, whatever the sizes: then all
ranks refuse alike. A dispatch mode of torch sees the views.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import is_strided

__all__ = ["NoViewsOfDescending"]

_VIEWS: Final = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
)


# torch leaves the methods of its class untyped.
class NoViewsOfDescending(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse views of tensors that torch has as strided shards.

    Parameters
    ----------
    name
        Of the function that does it.

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
