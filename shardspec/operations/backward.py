"""The way back of torch's operations on cut tensors: refusals there, in our words.

Gradients are computed by torch's autograd, out of sight of `shardspec.operations.apply`. A dispatch
mode of torch sees every operation that it does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardspec.comm.torch_mesh import from_torch
from shardspec.errors import ShardSpecError
from shardspec.operations.accepted import REFUSALS, refusal

__all__ = ["ExplainedRefusals", "goes_back"]

_BACKWARD: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def goes_back(function: Callable[..., Any]) -> bool:
    """Whether a function computes gradients."""
    return function in _BACKWARD


# torch leaves the methods of its class untyped.
class ExplainedRefusals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where torch refuses an operation on cut tensors, say which layouts it would take.

    ``backward()`` of a `DTensor` does so by itself. Where the loss is a plain tensor, made by
    `DTensor.to_local` or `DTensor.to_global`, the call goes into this context. Plain tensors that
    torch makes on the way are taken to be whole everywhere.

    Raises
    ------
    LayoutError
        In place of torch's error, if other layouts are possible.

    Examples
    --------
    ::

        with ExplainedRefusals():
            loss.to_global().backward()
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do one operation."""
        del types
        given = kwargs or {}
        try:
            with implicit_replication():
                return func(*args, **given)
        except REFUSALS as error:
            found = _explained(func, args, given, error)
            if found is None:
                raise
            raise found from None


def _explained(
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: Exception,
) -> ShardSpecError | None:
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    cut = [leaf for leaf in leaves if isinstance(leaf, TorchDTensor)]
    if isinstance(error, ShardSpecError) or len({tensor.device_mesh for tensor in cut}) != 1:
        return None
    try:
        mesh = from_torch(cut[0].device_mesh)
        name = f"{str(function).removeprefix('aten.').split('.')[0]} on the way back"
        return refusal(name, function, args, kwargs, mesh, error)
    except ShardSpecError:
        return None  # torch's layouts are none of ours, and torch's error says what it can
