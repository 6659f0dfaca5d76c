"""DTensor: local shards, the layout they follow, and the communicator that moves them.

Gradients follow the convention of `torch.distributed.tensor`: a program on shards stands for one
program on the global tensor, and the gradient at a device is that of its box. Devices that hold the
same box must receive the same gradient, which is so when every rank computes the same loss from
`to_global`, or a loss from `to_local` whose ``grad_spec`` says what is still to be summed.
"""

from collections.abc import Mapping, Sequence

import torch

from shardspec.boxes import slices_within
from shardspec.comm.communicator import Communicator
from shardspec.comm.default import communicator_of
from shardspec.dtypes import dtype_name
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.execution import agree_on, run_plan
from shardspec.gradients import Convert, GradientsBy, OneOfEqual, check_differentiable
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.plan import ConversionPlan
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["DTensor", "distribute_tensor"]


class DTensor:
    """A tensor that is cut over a mesh.

    Parameters
    ----------
    tensor
        The whole tensor, the same on every rank. Its gradient is not tracked through the cut: like
        torch's, a new DTensor is a leaf.
    device_mesh, sharding_spec
        Where, and how to cut; the spec may be given in its notation.
    communicator
        Who moves shards: by default the running job, or this process alone where there is none.

    Raises
    ------
    LayoutError
        If the spec does not fit the tensor, or has pending reductions (use `from_local`).
    AxisError
        If the mesh lacks an axis of the spec.
    CommunicatorError
        If the job is not initialised or lacks a device of the mesh.

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

    __slots__ = ("communicator", "layout", "shards")

    layout: Layout
    """Which box every device holds."""
    shards: dict[int, torch.Tensor]
    """The shard of every device that this process holds, by physical id."""
    communicator: Communicator
    """Who moves shards."""

    def __init__(
        self,
        tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        sharding_spec: SpecLike,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        layout = Layout(device_mesh, sharding_spec, tensor.shape, tensor.dtype)
        if layout.spec.partials:
            raise LayoutError(
                f"a whole tensor cannot be cut as {layout.spec}: a pending reduction has one "
                "addend per device; give each device's addend to DTensor.from_local"
            )
        self.layout = layout
        self.communicator = _checked(communicator, device_mesh)
        whole = tensor.detach()
        self.shards = {
            device: whole[_index(layout, device)]
            .clone(memory_format=torch.contiguous_format)
            .requires_grad_(tensor.requires_grad)
            for device in self.communicator.addressable
        }

    @classmethod
    def from_shards(
        cls,
        shards: Mapping[int, torch.Tensor],
        layout: Layout,
        communicator: Communicator | None = None,
    ) -> "DTensor":
        """Put shards under a layout without a check across ranks and without a copy.

        Parameters
        ----------
        shards
            The shard of every addressable device, by physical id.
        layout
            What they follow.
        communicator
            Who moves them; as for the constructor.

        Raises
        ------
        LayoutError
            If a shard is missing, or its shape or dtype is not that of the layout.
        """
        result = cls.__new__(cls)
        result.layout = layout
        result.communicator = _checked(communicator, layout.mesh)
        found = {device: _facts(shards[device]) for device in shards}
        _check_shards(layout, {d: found.get(d) for d in result.communicator.addressable})
        result.shards = {device: shards[device] for device in result.communicator.addressable}
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
            Where, and how it is cut; reductions may be pending.
        global_shape
            Sizes of the whole tensor; added up from the shards where it is not given.
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
        facts = chosen.gather({device: _facts(shard) for device, shard in shards.items()})
        _, dtype = facts[device_mesh.ids[0]]
        spec = ShardingSpec.of(sharding_spec)
        shape = _added_up(device_mesh, spec, facts) if global_shape is None else global_shape
        layout = Layout(device_mesh, spec, shape, dtype)
        _check_shards(layout, facts)
        return cls.from_shards(shards, layout, chosen)

    @property
    def shape(self) -> torch.Size:
        """Sizes of the whole tensor."""
        return torch.Size(self.layout.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        dtype = getattr(torch, self.layout.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def device_mesh(self) -> DeviceMesh:
        """The devices."""
        return self.layout.mesh

    @property
    def sharding_spec(self) -> ShardingSpec:
        """How the tensor is cut, axes by number."""
        return self.layout.spec

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are tracked for the shards."""
        return any(shard.requires_grad for shard in self.shards.values())

    @property
    def grad(self) -> "DTensor | None":
        """Gradients of the shards as a DTensor of the same cut, nothing pending; None if absent."""
        grads = {d: shard.grad for d, shard in self.shards.items() if shard.grad is not None}
        if len(grads) < len(self.shards) or not grads:
            return None
        layout = self.layout.with_spec(self.layout.spec.without_partial())
        return DTensor.from_shards(grads, layout, self.communicator)

    def dim(self) -> int:
        """Return the number of tensor dims."""
        return len(self.layout.global_shape)

    def __repr__(self) -> str:
        held = ", ".join(map(str, self.shards)) or "none"
        return f"DTensor({self.layout}; holds the shards of devices {held})"

    def to_local(
        self, physical_id: int | None = None, *, grad_spec: SpecLike | None = None
    ) -> torch.Tensor:
        """Return the shard of this rank, or of one of the devices that this process holds.

        Parameters
        ----------
        physical_id
            Which device; may be left out where the process holds one.
        grad_spec
            How the gradient that will arrive is laid out, where that differs from the tensor:
            the same cuts with a sum or mean pending over the axes whose devices each compute a
            part of the loss. By default the gradient is taken to be complete.

        Raises
        ------
        CommunicatorError
            If the device is not held here, or several are and none is named.
        LayoutError
            If `grad_spec` cuts the tensor in another way.
        """
        if physical_id is None:
            if len(self.shards) != 1:
                raise CommunicatorError(
                    f"this process holds the shards of {len(self.shards)} devices "
                    f"{tuple(self.shards)}; name one, as in to_local({self.device_mesh.ids[0]})"
                )
            (physical_id,) = self.shards
        if physical_id not in self.shards:
            raise CommunicatorError(
                f"the shard of device {physical_id} is not in this process, which holds "
                f"{tuple(self.shards)}"
            )
        if grad_spec is None:
            return self.shards[physical_id]
        arriving = self.layout.with_spec(grad_spec)
        if arriving.spec.dim_specs != self.layout.spec.dim_specs or any(
            p.op not in ("sum", "avg") for p in arriving.spec.partials
        ):
            raise LayoutError(
                f"grad_spec {arriving.spec} does not fit {self.layout.spec}: keep its cuts, and "
                "leave only sums or means pending"
            )
        plan = LayoutConverter().plan(arriving, arriving.spec.without_partial())
        shards: tuple[torch.Tensor, ...] = GradientsBy.apply(  # type: ignore[no-untyped-call]
            plan, self.communicator, *self.shards.values()
        )  # torch leaves Function.apply untyped
        return dict(zip(self.shards, shards, strict=True))[physical_id]

    def redistribute(
        self, sharding_spec: SpecLike, *, device_mesh: DeviceMesh | None = None
    ) -> "DTensor":
        """Return the same tensor cut another way, by the cheapest plan; every rank calls it.

        Differentiable, except through a pending min, max or prod, and except to a mesh of other
        devices. Where nothing moves the shards are shared, else they are new.

        Parameters
        ----------
        sharding_spec
            How it is to be cut.
        device_mesh
            Where it is to be; by default where it is. The devices may be the same in another
            shape or order, more, fewer or others. Every rank of either mesh calls this, other ranks
            may. A rank outside this mesh has a tensor without shards, which
            ``DTensor.from_shards({}, layout)`` makes; one outside the other mesh gets one.

        Raises
        ------
        LayoutError
            If the spec is for another number of dims, or wants a reduction pending that is not; or
            if a gradient is wanted that cannot be had.
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
        wanted = torch.is_grad_enabled() and self.requires_grad
        if wanted:
            check_differentiable(plan)
        same_mesh = plan.target.mesh == self.device_mesh
        if not plan.steps or (same_mesh and not self.shards):
            shards = self.shards
        elif set(plan.target.mesh.ids) != set(self.device_mesh.ids):
            # Ranks of one mesh only know nothing of a gradient, so none passes.
            if wanted:
                agree_on(plan, self.communicator, "wanted, which does not pass to other devices")
                raise LayoutError(
                    f"no gradient passes from mesh {self.device_mesh} to other devices; convert a "
                    "detached tensor, and bring its gradient back by another conversion"
                )
            shards = run_plan(plan, self.communicator, self.shards)
        else:
            results: tuple[torch.Tensor, ...] = Convert.apply(  # type: ignore[no-untyped-call]
                plan, self.communicator, *self.shards.values()
            )  # torch leaves Function.apply untyped
            shards = dict(zip(there.addressable, results, strict=True))
        return DTensor.from_shards(shards, plan.target, there)

    def to_global(self) -> torch.Tensor:
        """Return the whole tensor, on every rank; pending reductions are finished.

        Differentiable: every rank is taken to compute the same loss from the result.

        Raises
        ------
        CommunicatorError
            If this rank is not part of the mesh.
        """
        if not self.shards:
            raise CommunicatorError(
                f"this rank is not part of mesh {self.device_mesh} with ids "
                f"{self.device_mesh.ids}; only its ranks can gather the tensor"
            )
        whole = self.redistribute(ShardingSpec(self.dim()))
        result: torch.Tensor = OneOfEqual.apply(  # type: ignore[no-untyped-call]
            *whole.shards.values()
        )  # torch leaves Function.apply untyped
        return result


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike,
    *,
    communicator: Communicator | None = None,
) -> DTensor:
    """Cut a whole tensor, the same on every rank; see `DTensor`.

    Examples
    --------
    >>> distribute_tensor(torch.ones(5), DeviceMesh(range(2), (2,)), "[S0]")
    DTensor([S0] of [5] float32 on 2; holds the shards of devices 0, 1)
    """
    return DTensor(tensor, device_mesh, sharding_spec, communicator=communicator)


def _index(layout: Layout, device: int) -> tuple[slice, ...]:
    whole = tuple((0, size) for size in layout.global_shape)
    return slices_within(layout.box(device), whole)


def _checked(communicator: Communicator | None, mesh: DeviceMesh) -> Communicator:
    chosen = communicator_of(mesh) if communicator is None else communicator
    if chosen.mesh != mesh:
        raise LayoutError(
            f"the communicator is for mesh {chosen.mesh} with ids {chosen.mesh.ids}, the tensor on "
            f"mesh {mesh} with ids {mesh.ids}"
        )
    return chosen


_Facts = tuple[tuple[int, ...], str]


def _facts(shard: torch.Tensor) -> _Facts:
    return tuple(shard.shape), dtype_name(shard.dtype)


def _check_shards(layout: Layout, facts: Mapping[int, _Facts | None]) -> None:
    for device, found in facts.items():
        wanted = (layout.local_shape(device), layout.dtype)
        if found is None:
            raise LayoutError(f"the shard of device {device} is missing for {layout}")
        if found != wanted:
            raise LayoutError(
                f"device {device} has a shard of shape {found[0]} and dtype {found[1]}, but under "
                f"{layout} it holds shape {wanted[0]} and dtype {wanted[1]}; correct the shard, "
                "the spec or global_shape"
            )


def _added_up(mesh: DeviceMesh, spec: ShardingSpec, facts: Mapping[int, _Facts]) -> tuple[int, ...]:
    """Return the global shape whose parts, along the axes that cut a dim, are the given shards."""
    first = mesh.ids[0]
    for device in mesh.ids:
        if len(facts[device][0]) != spec.dims:
            raise LayoutError(
                f"device {device} has a shard of shape {facts[device][0]}, but spec {spec} is for "
                f"{spec.dims} dims"
            )
    return tuple(
        sum(facts[device][0][dim] for device in mesh.group(first, cut.axes))
        for dim, cut in enumerate(spec.dim_specs)
    )
