"""DTensor: local shards, the layout they follow, and the communicator that moves them.

Gradients follow the convention of `torch.distributed.tensor`: a program on shards stands for one
program on the global tensor, and the gradient at a device is that of its box. Devices that hold the
same box must receive the same gradient. They do where every rank computes the same loss from
`to_global`, or a loss from `to_local` whose ``grad_spec`` says what is still to be summed.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from shardspec.comm.communicator import Communicator
from shardspec.comm.process_group import communicator_of
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.execution import (
    agree_on,
    check_differentiable,
    convert,
    first_of_copies,
    run_plan,
    with_gradient_reduced,
)
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.plan import ConversionPlan
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.operations.tensor import TensorLike
from shardspec.shards import added_up, check_dense, check_shards, facts_of, shards_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor


class DTensor(TensorLike):
    """A tensor that is sharded over a mesh.

    In a job, torch's functions, methods and operators work on it, forward and backward: layouts
    propagate by torch's own DTensor, which it becomes without a copy.

    Parameters
    ----------
    tensor
        The global tensor. In a job every rank of the mesh gives one of the same shape and dtype,
        and that of `src_rank` counts: its boxes are sent to the others. Its gradient is not
        tracked: like torch's, a new DTensor is a leaf.
    device_mesh, sharding_spec
        Where, and how to shard; the spec may be given in its notation.
    src_rank
        The rank whose tensor it is, as its place among ``device_mesh.ids``: 0, as torch has it, is
        the mesh's first device. None sends nothing and takes each rank's boxes from its own
        tensor, which is then the same on every rank; ``SHARDSPEC_CHECK=1`` in the environment
        checks that it is.
    communicator
        Who moves shards: by default the running job, or this process alone where there is none.

    Raises
    ------
    LayoutError
        If the tensor is none or is sparse, the spec does not fit it or has pending reductions (use
        `from_local`), or `src_rank` is none of the mesh's.
    AxisError
        If the mesh lacks an axis of the spec.
    CommunicatorError
        If the job is not initialised, lacks a device of the mesh, or its ranks give tensors of
        different shapes, dtypes or specs.

    Examples
    --------
    >>> a = torch.arange(6).reshape(2, 3)
    >>> t = DTensor(a, DeviceMesh(range(4), (2, 2)), "[R,S01]")
    >>> t.to_local(1)
    tensor([[1],
            [4]])
    >>> t.redistribute("[S1,R]").to_local(1)
    tensor([[3, 4, 5]])
    >>> bool((t.to_global() == a).all())
    True
    """

    __slots__ = ()

    def __init__(
        self,
        tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        sharding_spec: SpecLike,
        *,
        src_rank: int | None = 0,
        communicator: Communicator | None = None,
    ) -> None:
        check_dense(tensor)
        layout = Layout(device_mesh, sharding_spec, tensor.shape, tensor.dtype)
        if layout.spec.partials:
            raise LayoutError(
                f"a global tensor cannot be sharded as {layout.spec}: a pending reduction has one "
                "addend per device; give each device's addend to DTensor.from_local"
            )
        self.layout = layout
        self.communicator = _checked(communicator, device_mesh)
        self._torch = self._history = None
        with torch.no_grad():
            self._shards = shards_of(tensor, layout, self.communicator, src_rank)
        for shard in self._shards.values():
            shard.requires_grad_(tensor.requires_grad)

    @classmethod
    def from_shards(
        cls,
        shards: Mapping[int, torch.Tensor],
        layout: Layout,
        communicator: Communicator | None = None,
    ) -> "DTensor":
        """Put the shards of this process under a layout, without a copy or a word to other ranks.

        They are given by physical id. A `LayoutError` says that one is missing, or that its shape
        or dtype is not that of the layout.
        """
        result = cls.__new__(cls)
        result.layout, result.communicator = layout, _checked(communicator, layout.mesh)
        here = result.communicator.addressable
        check_shards(layout, {d: facts_of(shards[d]) if d in shards else None for d in here})
        result._torch = result._history = None
        result._shards = {device: shards[device] for device in here}
        return result

    @classmethod
    def from_torch(
        cls, tensor: torch.Tensor, *, device_mesh: DeviceMesh | None = None
    ) -> "DTensor":
        """Make a DTensor of torch's: the same storage, and gradients flow back.

        A rank outside the mesh gets a tensor without shards. `device_mesh` is the mesh it is on,
        where that has links or names that torch's mesh lacks.

        Raises
        ------
        LayoutError
            If the tensor is not one of torch's DTensors, or its shards are not boxes.
        LossyConversionError
            If a placement has no counterpart in a spec.
        MeshError
            If torch's mesh belongs to another job.
        """
        from torch.distributed.tensor import DTensor as TorchDTensor

        from shardspec.interop.torch_dtensor import layout_of

        if not isinstance(tensor, TorchDTensor):
            raise LayoutError(
                f"from_torch takes a DTensor of torch, not a {type(tensor).__name__}; use "
                "from_local for a shard, or distribute_tensor for a global tensor"
            )
        layout = layout_of(tensor, device_mesh)
        result = cls._of_torch(tensor, layout, communicator_of(layout.mesh))
        check_shards(result.layout, {d: facts_of(shard) for d, shard in result.shards.items()})
        return result

    @classmethod
    def _of_torch(
        cls, tensor: "TorchDTensor", layout: Layout, communicator: Communicator
    ) -> "DTensor":
        result = cls.__new__(cls)
        result.layout, result.communicator = layout, communicator
        result._torch, result._shards, result._history = tensor, None, None
        return result

    @classmethod
    def from_local(
        cls,
        local: torch.Tensor | Mapping[int, torch.Tensor],
        device_mesh: DeviceMesh,
        sharding_spec: SpecLike,
        *,
        global_shape: Sequence[int] | None = None,
        communicator: Communicator | None = None,
    ) -> "DTensor":
        """Make a DTensor of the shards that the devices already hold; every rank calls it.

        Parameters
        ----------
        local
            This rank's shard, or the shard of every addressable device by physical id. Kept, not
            copied; gradients flow back to it.
        device_mesh, sharding_spec
            Where, and how it is sharded; reductions may be pending.
        global_shape
            Sizes of the global tensor; by default added up from the shards.
        communicator
            As for the constructor.

        Raises
        ------
        LayoutError
            On every rank, if any rank's shard has another shape or dtype than the layout says.

        Examples
        --------
        >>> mesh = DeviceMesh(range(2), (2,))
        >>> halves = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 4.0])}
        >>> DTensor.from_local(halves, mesh, "[S0]").to_global()
        tensor([1., 2., 3., 4.])
        >>> DTensor.from_local(halves, mesh, "[R|P0]").to_global()
        tensor([4., 6.])
        """
        chosen = _checked(communicator, device_mesh)
        if not chosen.addressable:
            raise CommunicatorError(
                f"this rank is not part of mesh {device_mesh} with ids {device_mesh.ids}; only its "
                "ranks hold shards"
            )
        shards = dict(local) if isinstance(local, Mapping) else {chosen.addressable[0]: local}
        if set(shards) != set(chosen.addressable):
            raise LayoutError(
                f"shards given for the devices {sorted(shards)}, but this process holds the "
                f"devices {sorted(chosen.addressable)}; give a dict with one shard for each"
            )
        # Every rank sees every rank's facts, so all of them raise the same error or none does.
        facts = chosen.gather({device: facts_of(shard) for device, shard in shards.items()})
        _, dtype = facts[device_mesh.ids[0]]
        spec = ShardingSpec.of(sharding_spec)
        shape = added_up(device_mesh, spec, facts) if global_shape is None else global_shape
        layout = Layout(device_mesh, spec, shape, dtype)
        check_shards(layout, facts)
        return cls.from_shards(shards, layout, chosen)

    @classmethod
    def _wrapped(cls, tensor: "TorchDTensor", like: TensorLike) -> "DTensor":
        from shardspec.interop.torch_dtensor import is_strided, layout_of

        mesh = like.layout.mesh
        if is_strided(tensor):
            # torch splits strided shards by a rule of its own where they are uneven.
            return cls.from_torch(tensor, device_mesh=mesh)
        return cls._of_torch(tensor, layout_of(tensor, mesh), like.communicator)

    @property
    def grad(self) -> "DTensor | None":
        """Gradients of the shards as a DTensor with nothing pending; None if absent.

        Of a tensor that was made of torch's: its gradient, in torch's layout.
        """
        if self._own() is None:
            assert self._torch is not None, "it is made of the one or of the other"
            grad = self._torch.grad if self._torch.is_leaf or self._torch.retains_grad else None
            return None if grad is None else DTensor.from_torch(grad, device_mesh=self.device_mesh)
        collected = {d: s for d, s in self.shards.items() if s.is_leaf or s.retains_grad}
        grads = {d: shard.grad for d, shard in collected.items() if shard.grad is not None}
        if len(grads) < len(self.shards) or not grads:
            return None
        layout = self.layout.with_spec(self.layout.spec.without_partial())
        return DTensor.from_shards(grads, layout, self.communicator)

    def __reduce__(self) -> tuple[object, ...]:
        # Of a leaf that torch has, the shards are leaves too, so that they can be copied.
        leaf = self._own() is None and self._torch is not None and self._torch.is_leaf
        shards = {
            device: shard.detach().requires_grad_(shard.requires_grad) if leaf else shard
            for device, shard in self.shards.items()
        }
        return DTensor.from_shards, (shards, self.layout, self.communicator)

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.communicator.addressable)) or "none"
        return f"DTensor({self.layout}; holds the shards of devices {devices})"

    def to_local(
        self, physical_id: int | None = None, *, grad_spec: SpecLike | None = None
    ) -> torch.Tensor:
        """Return the shard of this rank, or of one of the devices that this process holds.

        Parameters
        ----------
        physical_id
            Which device; may be left out where the process holds one.
        grad_spec
            Layout of the gradient that will arrive, where it differs: the same dims with a sum or
            mean pending over the axes whose devices each compute a part of the loss. By default
            the gradient is taken to be complete.

        Raises
        ------
        CommunicatorError
            If its shard is not in this process, or several are and none is named.
        LayoutError
            If `grad_spec` shards the tensor in another way.
        """
        shards = self.shards
        if physical_id is None:
            if len(shards) != 1:
                raise CommunicatorError(
                    f"this process holds the shards of {len(shards)} devices "
                    f"{tuple(shards)}; name one, as in to_local({self.device_mesh.ids[0]})"
                )
            (physical_id,) = shards
        if physical_id not in shards:
            raise CommunicatorError(
                f"the shard of device {physical_id} is not in this process, which holds "
                f"{tuple(shards)}"
            )
        if grad_spec is None:
            return shards[physical_id]
        arriving = self.layout.with_spec(grad_spec)
        if arriving.spec.dim_specs != self.layout.spec.dim_specs or any(
            p.op not in ("sum", "avg") for p in arriving.spec.partials
        ):
            raise LayoutError(
                f"grad_spec {arriving.spec} does not fit {self.layout.spec}: keep its dims, and "
                "leave only sums or means pending"
            )
        plan = LayoutConverter().plan(arriving, arriving.spec.without_partial())
        return with_gradient_reduced(plan, self.communicator, shards)[physical_id]

    def redistribute(
        self, sharding_spec: SpecLike, *, device_mesh: DeviceMesh | None = None
    ) -> "DTensor":
        """Convert the tensor to another spec by the cheapest plan; every rank calls it.

        Differentiable any number of times, except through a pending min, max or prod, and except
        to a mesh of other devices. Where nothing moves the shards are shared, else they are new.

        Parameters
        ----------
        sharding_spec
            The spec of the result.
        device_mesh
            Its mesh; by default the same. The devices may be the same in another shape or order,
            more, fewer or others. Every rank of either mesh calls this, other ranks may. A rank
            outside this mesh has a tensor without shards, by ``DTensor.from_shards({}, layout)``;
            one outside the other mesh gets one.

        Raises
        ------
        LayoutError
            If the spec is for another number of dims or has a reduction pending that the tensor
            has not, or a gradient is tracked that cannot be computed.
        AxisError
            If the mesh lacks an axis of the spec.
        CommunicatorError
            If the ranks ask for different conversions, or one fails or does not come.

        Examples
        --------
        >>> t = DTensor(torch.arange(4), DeviceMesh(range(2), (2,)), "[S0]")
        >>> t.redistribute("[S0]", device_mesh=DeviceMesh([1, 2], (2,))).shards
        {1: tensor([0, 1]), 2: tensor([2, 3])}
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        target = Layout(mesh, sharding_spec, self.shape, self.layout.dtype)
        return self.convert(LayoutConverter().plan(self.layout, target))

    def convert(self, plan: ConversionPlan) -> "DTensor":
        """Carry out a plan that starts from this tensor's layout; raises as `redistribute` does.

        Every rank of the source's mesh and of the target's calls this.
        """
        if plan.source != self.layout:
            raise LayoutError(f"the plan starts from {plan.source}, but this is {self.layout}")
        there = self.communicator.on(plan.target.mesh)
        tracked = torch.is_grad_enabled() and self.requires_grad
        if tracked:
            check_differentiable(plan)
        same_mesh = plan.target.mesh == self.device_mesh
        shards = self.shards
        if not plan.steps or (same_mesh and not shards):
            pass
        elif set(plan.target.mesh.ids) != set(self.device_mesh.ids):
            # Ranks of one mesh only know nothing of a gradient, so none passes.
            if tracked:
                said = "wanted, which does not pass to other devices"
                agree_on(plan, self.communicator, shards, said)
                raise LayoutError(
                    f"no gradient passes from mesh {self.device_mesh} to other devices; convert a "
                    "detached tensor, and bring its gradient back by another conversion"
                )
            shards = run_plan(plan, self.communicator, shards)
        else:
            shards = convert(plan, self.communicator, shards)
        return DTensor.from_shards(shards, plan.target, there)

    def to_global(self) -> torch.Tensor:
        """Return the global tensor, on every rank; pending reductions are finished.

        Differentiable; every rank has to compute the same loss from the result.

        Raises
        ------
        CommunicatorError
            If this rank is not part of the mesh.
        """
        if not self.communicator.addressable:
            raise CommunicatorError(
                f"this rank is not part of mesh {self.device_mesh} with ids "
                f"{self.device_mesh.ids}; only its ranks can gather the tensor"
            )
        return first_of_copies(self.redistribute(ShardingSpec(self.dim())).shards)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike,
    *,
    src_rank: int | None = 0,
    communicator: Communicator | None = None,
) -> DTensor:
    """Shard the global tensor that the first rank of the mesh has; see `DTensor`.

    Examples
    --------
    >>> distribute_tensor(torch.ones(5), DeviceMesh(range(2), (2,)), "[S0]")
    DTensor([S0] of [5] float32 on 2; holds the shards of devices 0, 1)
    """
    return DTensor(tensor, device_mesh, sharding_spec, src_rank=src_rank, communicator=communicator)


def _checked(communicator: Communicator | None, mesh: DeviceMesh) -> Communicator:
    chosen = communicator_of(mesh) if communicator is None else communicator
    if chosen.mesh != mesh:
        raise LayoutError(
            f"the communicator is for mesh {chosen.mesh} with ids {chosen.mesh.ids}, the tensor on "
            f"mesh {mesh} with ids {mesh.ids}"
        )
    return chosen
