"""Replaces DTensors in modules by stand-ins while a ``partition_fn`` runs.

`torch.nn.Module` accepts only torch tensors, and ``Module._apply`` swaps the parameter with its
replacement, which torch's own DTensor does not allow. So a tensor without data takes the place of
the DTensor until ``partition_fn`` returns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from shardspec.tensor.operators.tensor import TensorLike

_IN_PARTITION: Final[ContextVar[bool]] = ContextVar("shardspec partition_fn", default=False)


class StandIn(torch.Tensor):
    """A meta tensor that a module holds in place of a DTensor; it has the DTensor's methods."""

    tensor: "TensorLike"

    @staticmethod
    def of(tensor: "TensorLike") -> "StandIn":
        """Return the stand-in for a DTensor."""
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        made: StandIn = torch.Tensor._make_subclass(StandIn, like, tensor.requires_grad)
        made.tensor = tensor
        return made

    def detach(self) -> "StandIn":
        """Return another stand-in, from which `torch.nn.Parameter` is made."""
        return StandIn.of(self.tensor)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "tensor" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Return the stand-in where ``Module._apply`` would copy data, as it has none."""
        if function is torch._has_compatible_shallow_copy_type:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


@contextmanager
def stand_ins() -> Iterator[None]:
    """Make `distribute_tensor` return stand-ins within the block."""
    token = _IN_PARTITION.set(True)
    try:
        yield
    finally:
        _IN_PARTITION.reset(token)


def stand_ins_are_wanted() -> bool:
    """Return True while a ``partition_fn`` runs; modules then get stand-ins for DTensors."""
    return _IN_PARTITION.get()
