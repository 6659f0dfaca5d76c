"""The base of DTensor: its shards, torch's DTensor of them, operators and methods."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.overrides import handle_torch_function

from shardspec.comm.communicator import Communicator
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.interop.notations import to_placements
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tensor.compiling import outside_graphs
from shardspec.tensor.shards import torch_dtype

# Importing torch's DTensor takes as long as the rest of torch, so it is imported when needed.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor import Placement


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    @outside_graphs
    def call(self: "TensorLike", *args: object) -> Any:  # noqa: ANN401
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


class TensorLike:
    """Shards with torch's functions, methods and operators, by `tensor.operators.apply`.

    Methods that are not defined here are looked up in `torch.Tensor`. Autograd tracks either the
    shards, from which torch's DTensor is then derived when operators need it; or torch's DTensor,
    from which shards are then derived, if this was made from one or that has a newer history.
    `nodes` returns the tracked tensors; gradients are always requested there.
    """

    __slots__ = (
        "_history",
        "_made_of",
        "_shards",
        "_torch",
        "communicator",
        "is_copied_part",
        "layout",
    )

    layout: Layout
    """The layout of the tensor."""
    communicator: Communicator
    """The communicator that moves shards between devices."""
    is_copied_part: bool
    """Whether it is a view whose shards torch has copied, so that writes do not reach the base."""
    _shards: dict[int, torch.Tensor] | str | None
    """The shards it was made from; None if made from torch's DTensor; an error text if unusable."""
    _torch: "TorchDTensor | None"
    """torch's DTensor of the same storage, once it was needed."""
    _history: object
    """The ``grad_fn`` of torch's DTensor when it was made from the shards."""
    _made_of: object
    """The state of the shards in autograd at that time."""
    _is_param = _SetByModules()
    persistent = _SetByModules()

    def __init__(
        self,
        layout: Layout,
        communicator: Communicator,
        shards: dict[int, torch.Tensor] | None,
        tensor: "TorchDTensor | None" = None,
    ) -> None:
        self.layout, self.communicator, self.is_copied_part = layout, communicator, False
        self._shards, self._torch = shards, tensor
        self._history = self._made_of = None

    def _wrap(self, tensor: "TorchDTensor") -> Self:
        """Return torch's DTensor as an instance of this class, on this tensor's mesh."""
        raise NotImplementedError

    @classmethod
    def _made(
        cls,
        layout: Layout,
        communicator: Communicator,
        shards: dict[int, torch.Tensor] | None,
        tensor: "TorchDTensor | None" = None,
    ) -> Self:
        result = cls.__new__(cls)
        TensorLike.__init__(result, layout, communicator, shards, tensor)
        return result

    @outside_graphs
    def _call(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Call a torch function on this tensor and further arguments."""
        return handle_torch_function(function, (self,), self, *args, **kwargs)

    @property
    def shape(self) -> torch.Size:
        """Sizes of the global tensor."""
        return torch.Size(self.layout.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return torch_dtype(self.layout.dtype)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The devices."""
        return self.layout.mesh

    @property
    def sharding_spec(self) -> ShardingSpec:
        """The sharding spec of the tensor, with axes by number."""
        return self.layout.spec

    @property
    def placements(self) -> "tuple[Placement, ...]":
        """The sharding as torch's placements, one per mesh axis.

        Raises `LossyConversionError` for blocks and uneven parts, which torch cannot express.
        """
        return to_placements(self.layout.spec, self.device_mesh)

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.layout.global_shape)

    def dim(self) -> int:
        """Return the number of tensor dims."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401
        """Return the sizes of the global tensor, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        if not self.layout.global_shape:
            raise TypeError("len() of a tensor without dims")
        return self.layout.global_shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._call(torch.Tensor.unbind, 0))

    @outside_graphs
    def nodes(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that autograd tracks for this one; see the class."""
        own = self._own()
        return (self.to_torch(),) if own is None else tuple(own.values())

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are tracked for the shards."""
        return any(node.requires_grad for node in self.nodes())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Start or stop tracking gradients; return the tensor itself."""
        for node in self.nodes():
            node.requires_grad_(requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether gradients are collected here, or none are tracked."""
        return all(node.is_leaf for node in self.nodes())

    @property
    def grad_fn(self) -> object:
        """The autograd node that computed the tensor; None for a leaf."""
        return next((node.grad_fn for node in self.nodes()), None)

    @property
    def output_nr(self) -> int:
        """Which result of ``grad_fn`` this is."""
        return next((node.output_nr for node in self.nodes()), 0)

    def is_leaf_with_gradient(self) -> bool:
        """Whether gradients are collected at its shards, or at the shards that it is a view of."""
        from shardspec.interop.torch_dtensor import is_of_leaf

        return any(map(is_of_leaf, self.nodes()))

    def mark_unusable(self, why: str) -> None:
        """Drop shards that were half written when a rank failed; later use raises."""
        self._torch, self._shards = None, why

    @property
    @outside_graphs
    def shards(self) -> dict[int, torch.Tensor]:
        """The shard of every device that this process holds, by physical id."""
        own = self._own()
        if own is not None:
            return own
        from shardspec.interop.torch_dtensor import local_of

        return {device: local_of(self.to_torch()) for device in self.communicator.addressable}

    @outside_graphs
    def to_torch(self) -> "TorchDTensor":
        """Return the tensor as torch's: the same storage, and gradients flow back.

        It is the same object each time. Every rank of the mesh calls this. Raises
        `CommunicatorError` if this process simulates the mesh, and `MeshError` or
        `LossyConversionError` if torch has no such mesh or no such mixture of pending reductions.
        """
        own = self._own()
        tracked = torch.is_grad_enabled() and any(s.requires_grad for s in (own or {}).values())
        seen: list[object] = [torch.is_inference_mode_enabled()]
        seen += [(shard.requires_grad, shard.grad_fn) for shard in (own or {}).values()]
        if self._torch is None or (
            own is not None
            and (self._made_of != seen or (tracked and not self._torch.requires_grad))
        ):
            assert own is not None, "it has shards, a DTensor of torch, or both"
            if self.is_simulated:
                raise CommunicatorError(
                    f"this process simulates mesh {self.device_mesh}, but torch's DTensor needs "
                    "one process per device; start the program with torchrun, or hand on "
                    "to_global()"
                )
            from shardspec.interop.torch_dtensor import torch_dtensor

            outside = torch.empty(0, dtype=self.dtype)
            self._torch = torch_dtensor(next(iter(own.values()), outside), self.layout)
            self._history, self._made_of = self._torch.grad_fn, seen
        return self._torch

    @property
    def is_simulated(self) -> bool:
        """Whether this process simulates the mesh: it holds all shards outside a job."""
        devices = self.communicator.addressable
        return devices == self.layout.mesh.ids and not (
            dist.is_initialized() and devices == (dist.get_rank(),)
        )

    def adopt(self, layout: Layout, shards: dict[int, torch.Tensor]) -> None:
        """Replace layout and shards after a write that changed the layout; the storage stays."""
        self.layout, self._shards = layout, shards

    def follow(self, tensor: "TorchDTensor") -> None:
        """Adopt the layout and storage of this tensor's torch counterpart after a write to that."""
        from shardspec.interop.torch_dtensor import layout_of

        layout = layout_of(tensor, self.device_mesh)
        with torch.no_grad():
            place = tensor.to_local().data_ptr()
        own = self._own() or {}
        if layout != self.layout or any(shard.data_ptr() != place for shard in own.values()):
            self.layout, self._shards = layout, None

    def _own(self) -> dict[int, torch.Tensor] | None:
        """Return the shards this was made of; None once torch's tensor has a newer history."""
        if isinstance(self._shards, str):
            raise CommunicatorError(self._shards)
        if self._shards and self._torch is not None and self._torch.grad_fn is not self._history:
            if any(shard.retains_grad for shard in self._shards.values()):
                self._torch.retain_grad()
            self._shards = None
        return self._shards

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        attribute = None if name.startswith("_") else getattr(torch.Tensor, name, None)
        if attribute is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return (
            partial(self._call, attribute) if callable(attribute) else self._call(attribute.__get__)
        )

    __hash__ = object.__hash__
    __bool__, __float__, __int__ = map(_operator, ("__bool__", "__float__", "__int__"))
    __getitem__, __setitem__ = map(_operator, ("__getitem__", "__setitem__"))
    __neg__, __pos__ = map(_operator, ("__neg__", "__pos__"))
    __abs__, __invert__ = map(_operator, ("__abs__", "__invert__"))
    __eq__, __ne__ = map(_operator, ("__eq__", "__ne__"))
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("__lt__", "__le__", "__gt__", "__ge__"))
    __add__, __radd__, __iadd__ = map(_operator, ("__add__", "__radd__", "__iadd__"))
    __sub__, __rsub__, __isub__ = map(_operator, ("__sub__", "__rsub__", "__isub__"))
    __mul__, __rmul__, __imul__ = map(_operator, ("__mul__", "__rmul__", "__imul__"))
    __mod__, __rmod__, __imod__ = map(_operator, ("__mod__", "__rmod__", "__imod__"))
    __pow__, __rpow__, __ipow__ = map(_operator, ("__pow__", "__rpow__", "__ipow__"))
    __matmul__, __rmatmul__ = map(_operator, ("__matmul__", "__rmatmul__"))
    __truediv__, __rtruediv__ = map(_operator, ("__truediv__", "__rtruediv__"))
    __floordiv__, __rfloordiv__ = map(_operator, ("__floordiv__", "__rfloordiv__"))
    __itruediv__, __ifloordiv__ = map(_operator, ("__itruediv__", "__ifloordiv__"))
    __and__, __iand__ = map(_operator, ("__and__", "__iand__"))
    __or__, __ior__ = map(_operator, ("__or__", "__ior__"))
    __xor__, __ixor__ = map(_operator, ("__xor__", "__ixor__"))
