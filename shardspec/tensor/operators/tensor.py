"""Defines the base class of `DTensor`: its shards, its layout, and the attributes torch reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

import torch
import torch.distributed as dist

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


class _SetByModules:
    """An attribute that modules set on parameters: torch's tensors have it, a DTensor does not."""

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError("only tensors of torch are parameters and buffers")

    def __set__(self, instance: object, value: object) -> None:
        raise LayoutError(
            "modules take parameters and buffers of torch: use nn.Parameter(tensor.to_torch()), "
            "or shardspec.distribute_module for all parameters of a module"
        )


@dataclass(frozen=True, slots=True)
class PartOf:
    """The tensor that a view was taken of, and its version at that time."""

    base: "TensorLike"
    version: int
    """The base's version."""
    is_tracked: bool
    """True if gradients were tracked for the base."""
    is_copy: bool
    """True if the view was gathered, so that its shards are not in the base's memory."""


def _refuse(_gradient: object) -> NoReturn:
    """Raise an error for a gradient that reaches the DTensor; gradients belong to its shards."""
    raise LayoutError(
        "a torch.autograd.Function loses the gradient of a DTensor; give it to_local() or "
        "to_torch(), and checkpoint with use_reentrant=False"
    )


_OF_TORCH: Final[Any] = torch._C.TensorBase
"""The members that `TensorLike` replaces."""
_REFUSED: Final = {0: _refuse}
"""The hooks of a DTensor for torch's own gradients."""


class TensorLike(torch.Tensor):
    """A tensor without memory of its own: it has shards, and torch's functions act on these.

    Autograd tracks the shards. A `torch.autograd.Function` would look for history at the tensor
    itself and lose the gradient. So the tensor has the flag ``requires_grad`` of its shards, and
    raises an error for results and gradients of such a Function.
    """

    __slots__ = (
        *("_is_checked", "_is_given", "_part_of", "_shards", "_torch", "_writes"),
        *("communicator", "layout"),
    )

    # torch's stubs declare these members as writable, and `layout` as a kind of memory.
    layout: Layout  # type: ignore[assignment]
    """The layout of the tensor."""
    communicator: Communicator
    """The communicator that moves shards between devices."""
    _part_of: PartOf | None
    """The tensor that this is a view of; None if it is no view."""
    _is_checked: bool
    """True if no `torch.autograd.Function` has returned the tensor."""
    _is_given: bool
    """True if the caller passed the shards, so that the tensor is no leaf even if they are."""
    _writes: int
    """Number of times that functions have written to the tensor."""
    _shards: dict[int, torch.Tensor] | str | None
    """The shards of this process; None until they are needed; an error text if unusable."""
    _torch: "TorchDTensor | None"
    """torch's DTensor of the same storage, once it was needed."""
    redistribute: Callable[..., Self]
    to_global: Callable[..., torch.Tensor]
    _is_param = _SetByModules()  # type: ignore[assignment]
    persistent = _SetByModules()

    def _wrap(self, tensor: "TorchDTensor") -> Self:
        """Return a DTensor of torch as one of this class, on this tensor's mesh."""
        raise NotImplementedError

    @classmethod
    def _made(
        cls,
        layout: Layout,
        communicator: Communicator,
        shards: dict[int, torch.Tensor] | None,
        tensor: "TorchDTensor | None" = None,
    ) -> Self:
        memory = list(shards.values()) if shards is not None else [] if tensor is None else [tensor]
        result: Self = cls._make_wrapper_subclass(
            cls,
            layout.global_shape,
            dtype=torch_dtype(layout.dtype),
            device=memory[0].device if memory else None,
        )
        result.layout, result.communicator = layout, communicator
        result._torch, result._shards = tensor, shards
        result._part_of, result._is_given, result._writes = None, False, 0
        result._is_checked = False
        if any(each.requires_grad for each in memory):
            result._show_tracking(True)
        return result

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Sizes of the global tensor."""
        return torch.Size(self.layout.global_shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the elements."""
        return torch_dtype(self.layout.dtype)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the devices that have the shards."""
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

    def _nodes(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that autograd tracks instead of this one: its shards."""
        return tuple(self.shards.values())

    @property
    def requires_grad(self) -> bool:
        """True if gradients are tracked for the shards."""
        if self._shards is None and self._torch is not None:
            return self._torch.requires_grad
        return any(node.requires_grad for node in self._nodes())

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Start or stop tracking gradients; return the tensor itself."""
        for node in self._nodes():
            node.requires_grad_(requires_grad)
        self._show_tracking(requires_grad)
        return self

    def _show_tracking(self, tracked: bool) -> None:
        """Set the tensor's own ``requires_grad``, so that `torch.autograd.Function` is refused."""
        with torch._C.DisableTorchFunctionSubclass():
            _OF_TORCH.requires_grad.__set__(self, tracked)
            if tracked:
                _OF_TORCH._backward_hooks.__set__(self, _REFUSED)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True if `backward` collects gradients in this tensor, or none are tracked."""
        return all(node.is_leaf for node in self._nodes())

    @property
    def grad_fn(self) -> object:  # type: ignore[override]
        """The autograd node that computed the tensor; None for a leaf."""
        return next((node.grad_fn for node in self._nodes()), None)

    @property
    def output_nr(self) -> int:  # type: ignore[override]
        """Index of this tensor among the results of ``grad_fn``."""
        return next((node.output_nr for node in self._nodes()), 0)

    def _is_leaf_with_gradient(self) -> bool:
        """Return True if `backward` collects gradients in this tensor's own shards."""
        return self.requires_grad and self.is_leaf and not self._is_given

    def _mark_unusable(self, why: str) -> None:
        """Drop shards that a failing rank left half written; later use raises an error."""
        self._torch, self._shards = None, why

    @property
    def shards(self) -> dict[int, torch.Tensor]:
        """The shards of this process, by physical id of the device."""
        self._check_current()
        if isinstance(self._shards, str):
            raise CommunicatorError(self._shards)
        if self._shards is None:
            from shardspec.interop.torch_dtensor import local_of

            assert self._torch is not None, "it is made of shards or of a DTensor of torch"
            devices = self.communicator.addressable
            self._shards = {device: local_of(self._torch) for device in devices}
        return self._shards

    @outside_graphs
    def to_torch(self) -> "TorchDTensor":
        """Return torch's DTensor of this tensor: the same storage, and gradients flow back.

        Every rank of the mesh calls this. Raises `CommunicatorError` if this process simulates the
        mesh, `MeshError` if torch has no such mesh, and `LossyConversionError` if it has no such
        mixture of pending reductions, or takes uneven shards for others, as those of 9 rows by
        ``[S10]`` on a mesh of (4, 2).
        """
        self._check_current()
        if isinstance(self._shards, str):
            raise CommunicatorError(self._shards)
        tracked = torch.is_grad_enabled() and self.requires_grad
        kept = self._torch
        inference = torch.is_inference_mode_enabled()
        if kept is None or (
            self._shards is not None
            and (kept.requires_grad, kept.is_inference()) != (tracked, inference)
        ):
            if self.is_simulated:
                raise CommunicatorError(
                    f"this process simulates mesh {self.device_mesh}, but torch's DTensor needs "
                    "one process per device; start the program with torchrun, or hand on "
                    "to_global()"
                )
            from shardspec.interop.torch_dtensor import torch_dtensor

            outside = torch.empty(0, dtype=self.dtype)
            kept = torch_dtensor(next(iter(self.shards.values()), outside), self.layout)
            if tracked or not self.requires_grad:
                self._torch = kept
        return kept

    @property
    def is_simulated(self) -> bool:
        """True if this process simulates the mesh: it has all shards, outside a job."""
        devices = self.communicator.addressable
        return devices == self.layout.mesh.ids and not (
            dist.is_initialized() and devices == (dist.get_rank(),)
        )

    def _memory(self) -> list[torch.Tensor]:
        """Return the tensors with the elements: the shards, or else torch's DTensor."""
        if isinstance(self._shards, dict):
            return list(self._shards.values())
        return [] if self._torch is None else [self._torch]

    @property
    def _version(self) -> int:  # type: ignore[override]
        """A number that grows with each write to this tensor's memory."""
        versions = (0 if each.is_inference() else each._version for each in self._memory())
        return self._writes + sum(versions)

    def _is_tracked(self) -> bool:
        return any(each.requires_grad for each in self._memory())

    def _become_part_of(self, base: "TensorLike") -> None:
        """Record that this is a view of `base`, to notice later writes to it."""
        mine, theirs = list(self.shards.values()), list(base.shards.values())
        is_copy = any(
            one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
            for one, other in zip(mine, theirs, strict=True)
        )
        self._part_of = PartOf(base, base._version, base._is_tracked(), is_copy)

    def _check_current(self) -> None:
        """Raise `LayoutError` if this tensor's values or gradients can no longer be right.

        This happens to a view without memory of its base after a write to the base, and to the
        result of a `torch.autograd.Function`.
        """
        # A Function runs without gradients, and marks its result when it ends.
        if not self._is_checked and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                if _OF_TORCH.grad_fn.__get__(self) is not None:
                    _refuse(None)
            self._is_checked = True
        part = self._part_of
        if part is None:
            return
        part.base._check_current()
        gained_history = part.base._is_tracked() and not part.is_tracked
        if part.version != part.base._version and (
            part.is_copy or self._is_tracked() or gained_history
        ):
            raise LayoutError(
                f"a view of shape {tuple(self.shape)} is out of date, since its tensor of layout "
                f"{part.base.layout} was written to; take the view again"
            )

    def _write(self, shards: Mapping[int, torch.Tensor]) -> None:
        """Copy values into this tensor's shards; its gradients then flow to `shards`.

        If `shards` is empty, torch has written the values already, and the write is only counted.
        """
        from shardspec.tensor.run import written

        own = self.shards
        with torch.no_grad():
            for device, new in shards.items():
                shard = own[device]
                if new.data_ptr() != shard.data_ptr():
                    shard.copy_(new)
                elif not shard.is_inference():
                    torch.autograd.graph.increment_version(shard)
        self._writes += 1
        if torch.is_grad_enabled() and any(new.requires_grad for new in shards.values()):
            self._shards = {device: written(own[device], shards[device]) for device in own}
            self._torch = None
            self._show_tracking(True)

    __hash__, __format__, __dir__ = object.__hash__, object.__format__, object.__dir__
