"""What makes a cut tensor look like a tensor: operators and methods, all torch's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardspec.comm.communicator import Communicator
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

__all__ = ["TensorMethods"]


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def call(self: "TensorMethods", *args: object) -> Any:  # noqa: ANN401
        return self._call(method, *args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Apply torch's ``Tensor.{name}``."
    return call


class _SetByModules:
    """An attribute that `torch.nn.Parameter` and `torch.nn.Buffer` set: tensors of torch only."""

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError("only tensors of torch are parameters and buffers")

    def __set__(self, instance: object, value: object) -> None:
        raise LayoutError(
            "modules and optimizers take DTensors of torch: use nn.Parameter(tensor.to_torch()), "
            "or shardspec.distribute_module for all parameters of a module"
        )


class TensorMethods:
    """Every function, method and operator of torch, by `shardspec.operations.apply`.

    torch asks ``__torch_function__`` of whatever it is given. What is not defined here or by the
    class itself is looked up in `torch.Tensor`.
    """

    __slots__ = ()

    layout: Layout
    communicator: Communicator
    _is_param = _SetByModules()
    persistent = _SetByModules()

    def to_torch(self) -> "TorchDTensor":
        """Return the tensor as torch's."""
        raise NotImplementedError

    def follow(self, tensor: "TorchDTensor") -> None:
        """Take note that torch's tensor may have been written to."""
        raise NotImplementedError

    def is_leaf_with_gradient(self) -> bool:
        """Whether gradients are collected at the shards."""
        raise NotImplementedError

    @classmethod
    def _wrapped(cls, tensor: "TorchDTensor", like: "TensorMethods") -> "TensorMethods":
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Carry out a torch function that has met a cut tensor."""
        if not all(issubclass(kind, TensorMethods | torch.Tensor) for kind in types):
            return NotImplemented
        from shardspec.operations.apply import apply

        return apply(function, args, kwargs or {}, TensorMethods, cls._wrapped)

    def _call(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        return type(self).__torch_function__(function, (type(self),), (self, *args), kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if found is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if callable(found):
            return partial(self._call, found)
        return self._call(found.__get__)

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.layout.global_shape)

    def numel(self) -> int:
        """Return how many elements the whole tensor has."""
        return torch.Size(self.layout.global_shape).numel()

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401
        """Return the sizes of the whole tensor, or one of them."""
        shape = torch.Size(self.layout.global_shape)
        return shape if dim is None else shape[dim]

    def __len__(self) -> int:
        if not self.layout.global_shape:
            raise TypeError("len() of a tensor without dims")
        return self.layout.global_shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._call(torch.Tensor.unbind, 0))

    __hash__ = object.__hash__

    __bool__ = _operator("__bool__")
    __float__ = _operator("__float__")
    __int__ = _operator("__int__")
    __getitem__ = _operator("__getitem__")
    __setitem__ = _operator("__setitem__")
    __neg__ = _operator("__neg__")
    __pos__ = _operator("__pos__")
    __abs__ = _operator("__abs__")
    __invert__ = _operator("__invert__")
    __eq__ = _operator("__eq__")
    __ne__ = _operator("__ne__")
    __lt__ = _operator("__lt__")
    __le__ = _operator("__le__")
    __gt__ = _operator("__gt__")
    __ge__ = _operator("__ge__")
    __add__ = _operator("__add__")
    __sub__ = _operator("__sub__")
    __mul__ = _operator("__mul__")
    __truediv__ = _operator("__truediv__")
    __floordiv__ = _operator("__floordiv__")
    __mod__ = _operator("__mod__")
    __pow__ = _operator("__pow__")
    __matmul__ = _operator("__matmul__")
    __and__ = _operator("__and__")
    __or__ = _operator("__or__")
    __xor__ = _operator("__xor__")
    __radd__ = _operator("__radd__")
    __rsub__ = _operator("__rsub__")
    __rmul__ = _operator("__rmul__")
    __rtruediv__ = _operator("__rtruediv__")
    __rfloordiv__ = _operator("__rfloordiv__")
    __rmod__ = _operator("__rmod__")
    __rpow__ = _operator("__rpow__")
    __rmatmul__ = _operator("__rmatmul__")
    __iadd__ = _operator("__iadd__")
    __isub__ = _operator("__isub__")
    __imul__ = _operator("__imul__")
    __itruediv__ = _operator("__itruediv__")
    __ifloordiv__ = _operator("__ifloordiv__")
    __imod__ = _operator("__imod__")
    __ipow__ = _operator("__ipow__")
    __iand__ = _operator("__iand__")
    __ior__ = _operator("__ior__")
    __ixor__ = _operator("__ixor__")
