"""Provides `DTensor`, a torch tensor that is sharded over devices, and `distribute_tensor`.

Gradients follow the convention of `torch.distributed.tensor`: a program on shards stands for a
program on the global tensor, and the gradient at a device is that of its box. Devices that hold the
same box must receive the same gradient. They do if every rank computes the same loss from
`to_global`, or a loss from `to_local` with a ``grad_spec`` for partial gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from inspect import isdatadescriptor
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardspec.comm.communicator import Communicator, SimulatedCommunicator
from shardspec.comm.process_group import communicator_of
from shardspec.errors import CommunicatorError, LayoutError, ShardSpecError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout, SpecLike, checked_mesh, chosen_spec, spec_on
from shardspec.layout.plan import ConversionPlan
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_ids import id_list
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tensor.compiling import outside_graphs
from shardspec.tensor.for_modules import StandIn, stand_ins_are_wanted
from shardspec.tensor.operators.gradients import GOING_BACK, Differentiable, go_back
from shardspec.tensor.operators.rules import named
from shardspec.tensor.run import (
    convert,
    first_of_copies,
    telling,
    with_gradient_reduced,
)
from shardspec.tensor.shards import (
    added_up,
    check_dense,
    check_shards,
    communicator_for,
    copies_for,
    facts_of,
    new_layout,
    shards_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

_SHOWN_ELEMENTS: Final = 1000
"""Maximum elements printed, as in torch; of a larger tensor a shard is printed."""


class DTensor(Differentiable):
    """A tensor that is sharded over a mesh.

    In a job, torch's functions, methods and operators work on it, forward and backward: without a
    copy it becomes torch's own DTensor, which propagates layouts.

    Parameters
    ----------
    tensor
        The global tensor; in a job every rank of the mesh gives one of the same shape and dtype.
        A new DTensor is a leaf, so the tensor must be one too.
    device_mesh, sharding_spec, placements
        The devices, and a spec, its text, or torch's placements, under either name. By default the
        tensor is replicated.
    src_rank
        The rank whose tensor is sent to the others, as an index into ``device_mesh.ids``. With None
        nothing is sent: the tensor must be the same on every rank, which the environment variable
        ``SHARDSPEC_CHECK=1`` makes it check.
    src_data_rank
        The same rank in torch's way: its index along every axis of the mesh.
    communicator
        The communicator that moves shards; by default that of the running job, or without a job one
        that simulates all devices in this process.

    Raises
    ------
    LayoutError
        If this is not a dense tensor or no leaf, the spec does not fit it or has pending reductions
        (use `from_local`), or `src_rank` is out of range.
    AxisError
        If the mesh lacks an axis of the spec.
    CommunicatorError
        If the job lacks a device of the mesh, or its ranks give different shapes, dtypes or specs.

    Examples
    --------
    >>> a = torch.arange(6).reshape(2, 3)
    >>> t = DTensor(a, DeviceMesh(range(4), (2, 2)), "[R,S01]")
    >>> t.redistribute("[S1,R]").to_local(1)
    tensor([[3, 4, 5]])
    >>> bool((t.to_global() == a).all())
    True
    """

    __slots__ = ()

    @outside_graphs
    def __new__(
        cls,
        tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        sharding_spec: SpecLike | None = None,
        *,
        placements: SpecLike | None = None,
        src_rank: int | None = 0,
        src_data_rank: int | None = 0,
        communicator: Communicator | None = None,
    ) -> Self:
        """Shard a global tensor over a mesh; see the class."""
        chosen = communicator_for(communicator, device_mesh)
        with torch.no_grad(), chosen.telling():
            check_dense(tensor)
            if tensor.requires_grad and not tensor.is_leaf:
                raise LayoutError(
                    "a new DTensor is a leaf, and would cut off the gradient of a computed tensor; "
                    "give tensor.detach(), or its shards to DTensor.from_local"
                )
            spec = chosen_spec(sharding_spec, placements)
            spec = ShardingSpec(tensor.dim()) if spec is None else spec
            layout = new_layout(chosen.mesh, spec, tensor.shape, tensor.dtype)
            source = _source(src_rank, src_data_rank, chosen.mesh)
            shards = shards_of(tensor, layout, chosen, source)
        # Detached, so that autograd does not take them for views.
        shards = {
            device: shard.detach().requires_grad_(tensor.requires_grad)
            for device, shard in shards.items()
        }
        return cls._made(layout, chosen, shards)

    @classmethod
    @outside_graphs
    def from_shards(
        cls,
        shards: Mapping[int, torch.Tensor],
        layout: Layout,
        communicator: Communicator | None = None,
    ) -> Self:
        """Return a DTensor of this process's shards (device id -> shard), without a copy.

        It does not communicate. Raises `LayoutError` if a shard is missing, or its shape or dtype
        is not that of the layout.
        """
        if not isinstance(layout, Layout) or not isinstance(shards, Mapping):
            raise LayoutError(
                "from_shards takes a dict of shards by device id, then a Layout; got "
                f"{type(shards).__name__} and {type(layout).__name__}"
            )
        chosen = communicator_for(communicator, layout.mesh)
        devices = chosen.addressable
        check_shards(layout, {d: facts_of(shards[d]) if d in shards else None for d in devices})
        return cls._made(layout, chosen, {device: shards[device] for device in devices})

    @classmethod
    @outside_graphs
    def from_torch(cls, tensor: torch.Tensor, *, device_mesh: DeviceMesh | None = None) -> Self:
        """Convert torch's DTensor to shardspec's; both share storage, and gradients flow back.

        A rank outside the mesh gets a tensor without shards. `device_mesh` replaces the mesh by an
        equal one with links or names. Raises `LayoutError` if this is not a DTensor of torch or a
        placement has no counterpart in a spec, and `MeshError` if its mesh is of another job.
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
        check_shards(layout, {d: facts_of(shard) for d, shard in result.shards.items()})
        return result

    @classmethod
    @outside_graphs
    def from_local(
        cls,
        local: torch.Tensor | Mapping[int, torch.Tensor],
        device_mesh: DeviceMesh | None = None,
        sharding_spec: SpecLike | None = None,
        *,
        placements: SpecLike | None = None,
        global_shape: Sequence[int] | None = None,
        communicator: Communicator | None = None,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,  # noqa: ARG003  # shards keep their own
        grad_placements: SpecLike | None = None,
    ) -> "DTensor":
        """Return a DTensor of existing shards of the devices; every rank calls this.

        `local` is this rank's shard, or a dict of the shards of all addressable devices by physical
        id. Where one process holds all devices, one tensor is the shard of the first, and the
        others get copies of it. Other shards are not copied, and gradients flow back to them. Spec
        or placements are as for `DTensor`, except that reductions may be pending. The global shape
        is by default the sum of the shards' sizes. Raises `LayoutError`, on every rank, if the
        shape or dtype of any rank's shard is not that of the layout.

        torch's words: `shape` is `global_shape`. `stride` has no effect. `run_check` is refused,
        since shapes and dtypes are always compared, and no rank's values replace another's.
        `grad_placements` must be the placements of gradients: pending reductions are finished.

        Examples
        --------
        >>> mesh = DeviceMesh(range(2), (2,))
        >>> halves = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 4.0])}
        >>> DTensor.from_local(halves, mesh, "[S0]").to_global()
        tensor([1., 2., 3., 4.])
        >>> DTensor.from_local(halves, mesh, "[R|P0]").to_global()
        tensor([4., 6.])
        """
        chosen = communicator_for(communicator, device_mesh, "hold shards")
        mesh, devices = chosen.mesh, chosen.addressable
        with chosen.telling():
            if run_check:
                raise LayoutError(
                    "from_local: run_check=True would replace replicas by the first; omit it, or "
                    "use distribute_tensor"
                )
            if shape is not None and global_shape is not None:
                raise LayoutError("shape and global_shape mean the same; give one of the two")
            global_shape = shape if global_shape is None else global_shape
            shards = dict(local) if isinstance(local, Mapping) else copies_for(devices, local)
            if set(shards) != set(devices):
                raise LayoutError(
                    f"shards given for the devices {sorted(shards)}, but this process holds the "
                    f"devices {sorted(devices)}; give a dict with one shard for each"
                )
            # Every rank sees every rank's facts, so all raise the same error or none does.
            facts = chosen.gather({device: facts_of(shard) for device, shard in shards.items()})
        first_shape, dtype = facts[mesh.ids[0]]
        given = chosen_spec(sharding_spec, placements)
        given = ShardingSpec(len(first_shape)) if given is None else given
        dims = len(first_shape) if global_shape is None else global_shape
        spec = spec_on(mesh, given, dims)
        shape = added_up(mesh, spec, facts) if global_shape is None else global_shape
        layout = Layout(mesh, spec, shape, dtype)
        check_shards(layout, facts)
        with chosen.telling():
            arriving = layout.spec.without_partial()
            if grad_placements is not None and layout.with_spec(grad_placements).spec != arriving:
                raise LayoutError(
                    f"from_local: gradients of shards arrive as {arriving}; omit grad_placements"
                )
        result = cls._made(layout, chosen, {device: shards[device] for device in devices})
        result._is_given = True
        return result

    def _wrap(self, tensor: "TorchDTensor") -> Self:
        from shardspec.interop.torch_dtensor import is_strided, layout_of

        if is_strided(tensor):
            # torch splits uneven strided shards by a different rule.
            return self.from_torch(tensor, device_mesh=self.device_mesh)
        return self._of_torch(tensor, layout_of(tensor, self.device_mesh), self.communicator)

    @classmethod
    def _of_torch(cls, tensor: "TorchDTensor", layout: Layout, communicator: Communicator) -> Self:
        devices = communicator.addressable
        if not (tensor.requires_grad and torch.is_grad_enabled() and devices):
            return cls._made(layout, communicator, None, tensor)
        from shardspec.interop.torch_dtensor import local_of

        # Autograd tracks shards, so these get the history.
        shards = {device: local_of(tensor) for device in devices}
        if tensor.is_leaf:
            for shard in shards.values():
                shard.retain_grad()
        return cls._made(layout, communicator, shards)

    @classmethod
    @outside_graphs
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Carry out a torch function such as `torch.add` that was called with a DTensor."""
        if not all(issubclass(kind, torch.Tensor) for kind in types):
            return NotImplemented
        if torch._C._are_functorch_transforms_active():
            raise LayoutError(
                f"{named(function).shown}: transforms of torch.func do not see the shards of a "
                "DTensor; give them to_torch(), or a shard by to_local()"
            )
        own = _own_members(cls).get(function)
        if own is not None:
            return own(*args, **(kwargs or {}))
        if function in GOING_BACK:
            return go_back(function, args, kwargs or {})
        from shardspec.tensor.operators.apply import apply

        return apply(function, args, kwargs or {})

    # torch declares *args and **kwargs; here each argument has a name and a type.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: object, _types: object, args: Sequence[Any] = (), *_: object
    ) -> object:
        """Refuse operations of torch that bypass `__torch_function__`: there is no data here."""
        if operation is torch.ops.aten._local_scalar_dense.default:  # a number, as for torch.full
            return args[0].item()
        raise LayoutError(
            f"torch runs {operation} on a DTensor directly, which has no data of its own; pass "
            "to_torch(), or a shard by to_local()"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> "DTensor":
        make, arguments = self.__reduce_ex__(0)
        return make(*deepcopy(arguments, memo))

    def __reduce_ex__(self, _protocol: object) -> tuple[Callable[..., "DTensor"], tuple[Any, ...]]:
        # torch copies only leaves; of a parameter of torch the shards retain gradients.
        shards = {
            device: shard.detach().requires_grad_() if shard.retains_grad else shard
            for device, shard in self.shards.items()
        }
        layout, mesh = self.layout, self.layout.mesh
        numbers = (mesh.mesh_alpha, mesh.mesh_beta, mesh.axis_names, mesh.link_model, mesh.links)
        facts = (str(layout.spec), layout.global_shape, layout.dtype)
        return restored, (shards, (mesh.ids, mesh.shape, *numbers), *facts, self.is_simulated)

    # torch leaves this argument untyped, so that typing it counts as an override.
    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        head = f"DTensor({self.layout}"
        for pending in self.layout.spec.partials:
            head += f"; {pending.op} over axis {pending.axis} is pending"
        try:
            shards = self.shards
        except ShardSpecError as error:
            return f"{head}; {error})"
        if not shards:
            return f"{head}; no shards in this process)"
        mesh, spec = self.device_mesh, self.layout.spec
        if (
            set(shards) == set(mesh.ids)
            and not spec.partials
            and self.shape.numel() <= _SHOWN_ELEMENTS
        ):
            with torch.no_grad():
                return f"{head}; values:\n{self.to_global().detach()!r})"
        device = next(iter(shards))
        what = "addend" if spec.partials else "shard"
        return f"{head}; {what} of device {device}:\n{shards[device].detach()!r})"

    @outside_graphs
    def to_local(
        self,
        physical_id: int | None = None,
        *,
        grad_spec: SpecLike | None = None,
        grad_placements: SpecLike | None = None,
    ) -> torch.Tensor:
        """Return the shard of this rank, or of one of the devices of this process.

        `grad_spec`, or torch's word `grad_placements`, is the layout of a gradient that will arrive
        incomplete: the same dims with a sum or mean pending over the axes along which each device
        computes a part of the loss. Raises `CommunicatorError` if the shard is not in this process,
        or no device is named and the process holds several, and `LayoutError` if `grad_spec` shards
        the tensor in another way.
        """
        shards = self.shards
        grad_spec = chosen_spec(grad_spec, grad_placements)
        if not shards:
            raise CommunicatorError(
                f"this rank is not in mesh {self.device_mesh} with ids "
                f"{id_list(self.device_mesh.ids)}, so it has no shard; call to_local on its ranks"
            )
        device = next(iter(shards)) if physical_id is None and len(shards) == 1 else physical_id
        if device is None or device not in shards:
            remedy = f"name one, as in to_local({self.device_mesh.ids[0]})"
            raise CommunicatorError(
                f"this process holds the shards of {len(shards)} devices {tuple(shards)}"
                f"{f'; {remedy}' if device is None else f', not that of device {device}'}"
            )
        if grad_spec is None:
            return shards[device]
        arriving = self.layout.with_spec(grad_spec)
        if arriving.spec.dim_specs != self.layout.spec.dim_specs or any(
            p.op not in ("sum", "avg") for p in arriving.spec.partials
        ):
            raise LayoutError(
                f"grad_spec {arriving.spec} does not fit {self.layout.spec}; shard the dims as "
                "there, and leave only sums or means pending"
            )
        plan = LayoutConverter().plan(arriving, arriving.spec.without_partial())
        return with_gradient_reduced(plan, self.communicator, shards)[device]

    @outside_graphs
    def redistribute(
        self,
        sharding_spec: SpecLike | DeviceMesh | None = None,
        placements: SpecLike | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        async_op: bool = False,  # noqa: ARG002  # torch's word; every call waits
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> "DTensor":
        """Return the tensor converted to another spec by the cheapest plan; every rank calls this.

        The target is a spec, its text, or torch's placements, under either name. As in torch, a
        mesh may precede it: ``redistribute(mesh, [Replicate()])``.

        Differentiable any number of times, except through a pending min, max or prod, and to a mesh
        of other devices. If nothing moves, the result shares the shards.

        `device_mesh` may have the same devices in another shape or order, or other devices. Every
        rank of either mesh calls this, and other ranks may. A rank outside this mesh calls it on
        ``DTensor.from_shards({}, layout)``; one outside the other gets a tensor without shards.

        torch's words: with `async_op` too the result is complete when the call returns. The dtypes
        must be that of the tensor.

        Raises
        ------
        LayoutError
            If the spec is for another number of dims or has a pending reduction that the tensor
            lacks, or a gradient is tracked that cannot be computed.
        AxisError
            If the mesh lacks an axis of the spec.
        CommunicatorError
            If the ranks ask for different conversions, or one fails or does not answer.

        Examples
        --------
        >>> t = DTensor(torch.arange(4), DeviceMesh(range(2), (2,)), "[S0]")
        >>> t.redistribute("[S0]", device_mesh=DeviceMesh([1, 2], (2,))).shards
        {1: tensor([0, 1]), 2: tensor([2, 3])}
        """
        to: object = self.device_mesh if device_mesh is None else device_mesh
        if device_mesh is None and isinstance(sharding_spec, DeviceMesh | TorchMesh):
            sharding_spec, to = None, sharding_spec
        with telling(self.communicator, self.device_mesh, to):
            mesh = checked_mesh(to)
            if not {forward_dtype, backward_dtype} <= {None, self.dtype}:
                raise LayoutError(
                    f"redistribute: forward_dtype and backward_dtype must be {self.dtype}, the "
                    "tensor's; cast by to(dtype) before or after"
                )
            if isinstance(sharding_spec, DeviceMesh) or isinstance(placements, DeviceMesh):
                raise LayoutError("redistribute: give one mesh, before the placements or by name")
            spec = chosen_spec(sharding_spec, placements)
            if spec is None:
                raise LayoutError("redistribute: give a spec, as '[S0,R]', or placements")
            target = Layout(mesh, spec, self.shape, self.layout.dtype)
            return self.convert(LayoutConverter().plan(self.layout, target))

    @outside_graphs
    def convert(self, plan: ConversionPlan) -> "DTensor":
        """Return the tensor converted by a plan that starts at its layout; see `redistribute`."""
        with telling(self.communicator, self.device_mesh, plan.target.mesh):
            if plan.source != self.layout:
                raise LayoutError(f"the plan starts from {plan.source}, but this is {self.layout}")
            communicator = self.communicator.on(plan.target.mesh)
            tracked = torch.is_grad_enabled() and self.requires_grad
            shards = convert(plan, self.communicator, self.shards, tracked=tracked)
            result = DTensor.from_shards(shards, plan.target, communicator)
            if plan.source == plan.target:
                result._become_part_of(self)
            return result

    @outside_graphs
    def to_global(self) -> torch.Tensor:
        """Return the global tensor on every rank, with pending reductions finished.

        Differentiable; every rank must compute the same loss from the result. Raises
        `CommunicatorError` on a rank outside the mesh.
        """
        communicator_for(self.communicator, self.device_mesh, "can gather the tensor")
        return first_of_copies(self.redistribute(ShardingSpec(self.dim())).shards)

    @outside_graphs
    def full_tensor(self, *, grad_placements: SpecLike | None = None) -> torch.Tensor:
        """Return the global tensor; torch's name for `to_global`.

        `grad_placements` is the layout of a gradient that will arrive incomplete, as for
        `to_local`: with a pending sum, ranks have computed parts of the loss.
        """
        whole = self.layout.with_spec(ShardingSpec(self.dim()))
        if grad_placements is None or whole.with_spec(grad_placements) == whole:
            return self.to_global()
        return self.redistribute(whole.spec).to_local(grad_placements=grad_placements)


@cache
def _own_members(cls: type[DTensor]) -> Mapping[object, Callable[..., Any]]:
    """Return member of `torch.Tensor` -> the member of `cls` that replaces it."""
    members: dict[object, Callable[..., Any]] = {}
    for name in dir(torch.Tensor):
        theirs, own = getattr(torch.Tensor, name), getattr(cls, name)
        if theirs is own:
            continue
        if callable(theirs):
            members[theirs] = own
        elif isdatadescriptor(theirs):
            for access in ("__get__", "__set__"):
                members[getattr(theirs, access)] = getattr(own, access)
    return members


def restored(
    shards: Mapping[int, torch.Tensor],
    mesh: tuple[Any, ...],
    spec: str,
    shape: Sequence[int],
    dtype: str,
    is_simulated: bool,
) -> DTensor:
    """Return the DTensor of a pickle, from its shards and the plain values of its layout."""
    ids, mesh_shape, alpha, beta, names, link_model, links = mesh
    device_mesh = DeviceMesh(
        ids, mesh_shape, None, alpha, beta, axis_names=names, link_model=link_model, links=links
    )
    communicator = SimulatedCommunicator(device_mesh) if is_simulated else None
    return DTensor.from_shards(shards, Layout(device_mesh, spec, shape, dtype), communicator)


# torch.load takes files with DTensors then, without weights_only=False.
torch.serialization.add_safe_globals([restored])


def distribute_tensor(
    tensor: torch.Tensor | DTensor,
    device_mesh: DeviceMesh | None = None,
    sharding_spec: SpecLike | None = None,
    *,
    placements: SpecLike | None = None,
    src_rank: int | None = 0,
    src_data_rank: int | None = 0,
    communicator: Communicator | None = None,
) -> DTensor:
    """Return the first rank's global tensor, or another's, sharded over the mesh; see `DTensor`.

    A DTensor, of shardspec or of torch, that is already sharded in this way is returned unchanged.
    Within a ``partition_fn`` of `distribute_module` the result is a stand-in that
    `torch.nn.Parameter` accepts; see `shardspec.tensor.for_modules`. Raises what `DTensor` raises,
    and `LayoutError` for a DTensor that is sharded in another way.

    Examples
    --------
    >>> distribute_tensor(torch.ones(5), DeviceMesh(range(2), (2,)), "[S0]")
    DTensor([S0] of [5] float32 on 2; values:
    tensor([1., 1., 1., 1., 1.]))
    >>> from torch.distributed.tensor import Shard
    >>> distribute_tensor(torch.ones(5), DeviceMesh("cpu", [0, 1]), [Shard(0)]).to_local(1)
    tensor([1., 1.])
    """
    chosen = communicator_for(communicator, device_mesh)
    with chosen.telling():
        spec = chosen_spec(sharding_spec, placements)
        result = _already_distributed(tensor, chosen.mesh, spec)
        if result is None:
            given: Any = tensor  # not distributed yet, if it is a tensor at all
            result = DTensor(
                given,
                device_mesh,
                spec,
                src_rank=src_rank,
                src_data_rank=src_data_rank,
                communicator=chosen,
            )
    stand_in: Any = StandIn.of(result) if stand_ins_are_wanted() else result
    return stand_in  # type: ignore[no-any-return]  # it has the methods of a DTensor


def _source(src_rank: int | None, src_data_rank: int | None, mesh: DeviceMesh) -> int | None:
    """Return the source as an index into `mesh.ids`; None if every rank has the same tensor."""
    if src_data_rank == 0:
        return src_rank
    if src_rank != 0:
        raise LayoutError("src_rank and src_data_rank mean the same; give one of the two")
    if src_data_rank is None:
        return None
    if not isinstance(src_data_rank, int) or not 0 <= src_data_rank < min(mesh.shape):
        raise LayoutError(
            f"src_data_rank {src_data_rank!r} is no index along every axis of mesh {mesh}; give 0 "
            f"to {min(mesh.shape) - 1}, or None if every rank has the same tensor"
        )
    return mesh.ids.index(mesh.id_at([src_data_rank] * mesh.ndim))


def _already_distributed(tensor: object, mesh: DeviceMesh, spec: SpecLike | None) -> DTensor | None:
    """Return `tensor` if it is a DTensor with this mesh and spec, None if it is a plain tensor.

    Raises `LayoutError` for a DTensor of another layout.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return None
    from torch.distributed.tensor import DTensor as TorchDTensor

    if isinstance(tensor, StandIn):
        tensor = tensor.tensor
    elif isinstance(tensor, TorchDTensor):
        tensor = DTensor.from_torch(tensor)
    if not isinstance(tensor, DTensor):
        return None
    layout = tensor.layout
    wanted = layout.spec if spec is None else spec_on(mesh, spec, layout.global_shape)
    if (layout.mesh.ids, layout.mesh.shape, layout.spec) != (mesh.ids, mesh.shape, wanted):
        raise LayoutError(
            f"the tensor is distributed already, as {layout}; its redistribute method converts it"
        )
    return tensor
