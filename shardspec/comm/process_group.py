"""Steps over `torch.distributed`: gloo on CPU, NCCL where CUDA is, by the same code.

Boxes travel as bytes in one batch of sends and receives per step, so every dtype, uneven shards and
any order of device ids work alike, and a shard that lands in one piece lands in its place without a
copy. They need no group but the job's own. Where a mesh has all ranks of the job, each axis has
groups too, and sums of the common dtypes over one axis, or over all, use the backend's all-reduce.
"""

import os
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardspec.boxes import box_shape, slices_within, split_interval
from shardspec.comm.agreement import check_agreement
from shardspec.comm.communicator import BoxOf
from shardspec.comm.reduce import combine
from shardspec.comm.steps import AllReduce, ReduceOp, ReduceScatter, Step
from shardspec.comm.transfers import Transfers
from shardspec.errors import CommunicatorError
from shardspec.mesh import DeviceMesh

__all__ = ["ProcessGroupCommunicator"]

T = TypeVar("T")

_NATIVE_SUM: Final = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes whose sum every backend has, with the rounding of the dtype itself."""


class ProcessGroupCommunicator:
    """A `Communicator` that holds the shard of one rank.

    Physical ids are global ranks. Use `create` or `of` rather than the constructor, so that a mesh
    has one communicator per job.

    Parameters
    ----------
    mesh
        Devices. If these are all ranks of the job, each of them constructs this at the same point
        of the program; otherwise the ranks outside need not.

    Raises
    ------
    CommunicatorError
        If `torch.distributed` is not initialised, or the mesh has ids that the job lacks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if not dist.is_initialized():
            raise CommunicatorError(
                "torch.distributed is not initialised; start the program with torchrun and make "
                "the mesh with init_process_group=True"
            )
        world = dist.get_world_size()
        missing = [id_ for id_ in mesh.ids if id_ >= world]
        if missing:
            raise CommunicatorError(
                f"device {missing[0]} of mesh {mesh} is no rank of this job, which has {world} "
                "ranks numbered from 0"
            )
        self._mesh = mesh
        self._rank = dist.get_rank()
        self._agreed: set[Hashable] = set()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if mesh.size == world:
            for axis in range(mesh.ndim):
                for members in mesh.groups([axis]):
                    self._make_group(members)

    @classmethod
    def create(cls, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Initialise `torch.distributed` if that is still to be done, and return `of` the mesh.

        Under torchrun every rank calls this; gloo serves CPU tensors and NCCL CUDA tensors.

        Raises
        ------
        CommunicatorError
            If the program was not started by torchrun and no process group exists.
        """
        if not dist.is_initialized():
            if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
                raise CommunicatorError(
                    "init_process_group=True needs a job: start the program with "
                    f"'torchrun --nproc_per_node {mesh.size} PROGRAM', or leave it out to hold "
                    "the whole mesh in this process"
                )
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
                dist.init_process_group("cpu:gloo,cuda:nccl")
            else:
                dist.init_process_group("gloo")
        return cls.of(mesh)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of a mesh in the running job, made on the first call.

        Raises
        ------
        CommunicatorError
            If `torch.distributed` is not initialised, or the mesh has ids that the job lacks.
        """
        if not dist.is_initialized():
            return cls(mesh)
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        made = _COMMUNICATORS.setdefault(world, {})
        if mesh not in made:
            made[mesh] = cls(mesh)
        return made[mesh]

    @property
    def mesh(self) -> DeviceMesh:
        """The devices among which data moves."""
        return self._mesh

    @property
    def addressable(self) -> tuple[int, ...]:
        """The rank of this process, or nothing where it is not part of the mesh."""
        return (self._rank,) if self._rank in self._mesh else ()

    def run(
        self, step: Step, shards: Mapping[int, torch.Tensor], before: BoxOf, after: BoxOf
    ) -> dict[int, torch.Tensor]:
        """Carry out one step; see `Communicator.run`."""
        if not self.addressable:
            return {}
        shard = shards[self._rank]
        match step:
            case AllReduce(axes, op):
                result = self._all_reduce(shard, axes, op)
            case ReduceScatter(op=op):
                result = self._reduce_scatter(step, op, shard, before, after)
            case _:
                result = self._move(step, shard, before, after)
        return {self._rank: result}

    def on(self, mesh: DeviceMesh) -> "ProcessGroupCommunicator":
        """Return the communicator of another mesh of this job; see `of`."""
        return self if mesh == self._mesh else ProcessGroupCommunicator.of(mesh)

    def agree(self, on: Hashable, words: Callable[[], Mapping[str, str]]) -> None:
        """Compare with the other ranks what is to be done; see `Communicator.agree`."""
        if on not in self._agreed and self.addressable:
            check_agreement(self._rank, self._mesh.ids, words())
            self._agreed.add(on)

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Collect one value per device; see `Communicator.gather`."""
        if not self.addressable:
            return {}
        mine = values[self._rank]
        if self._mesh.size == dist.get_world_size():
            gathered: list[T] = [mine] * self._mesh.size
            dist.all_gather_object(gathered, mine)
            return {device: gathered[device] for device in self._mesh.ids}
        return self._gather_among_members(mine)

    def _gather_among_members(self, mine: T) -> dict[int, T]:
        """Collect values where other ranks of the job take no part: lengths first, then content."""
        others = [device for device in self._mesh.ids if device != self._rank]
        device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
        content = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
        length = torch.tensor([content.numel()], device=device)
        lengths = {peer: torch.empty_like(length) for peer in others}
        self._exchange([(peer, length) for peer in others], list(lengths.items()))
        contents = {
            peer: torch.empty(int(lengths[peer]), dtype=torch.uint8, device=device)
            for peer in others
        }
        self._exchange([(peer, content) for peer in others], list(contents.items()))
        loaded = {peer: pickle.loads(c.cpu().numpy().tobytes()) for peer, c in contents.items()}
        loaded[self._rank] = mine
        return {peer: loaded[peer] for peer in self._mesh.ids}

    def _move(self, step: Step, shard: torch.Tensor, before: BoxOf, after: BoxOf) -> torch.Tensor:
        """Put the boxes that this device gets side by side."""
        me = self._rank
        held, wanted = before(me), after(me)
        transfers = Transfers(step, self._mesh, before, after)
        result = shard.new_empty(box_shape(wanted))
        sends, receives, late = [], [], []
        for peer, box in transfers.outgoing(me):
            part = shard[slices_within(box, held)]
            if peer == me:
                result[slices_within(box, wanted)] = part
            else:
                sends.append((peer, part.contiguous()))
        for peer, box in transfers.incoming(me):
            if peer == me:
                continue
            place = result[slices_within(box, wanted)]
            if place.is_contiguous():
                receives.append((peer, place))
            else:
                staged = torch.empty_like(place, memory_format=torch.contiguous_format)
                receives.append((peer, staged))
                late.append((place, staged))
        self._exchange(sends, receives)
        for place, staged in late:
            place.copy_(staged)
        return result

    def _reduce_scatter(
        self, step: Step, op: ReduceOp, shard: torch.Tensor, before: BoxOf, after: BoxOf
    ) -> torch.Tensor:
        """Send every peer its part of this device's addend; combine what arrives."""
        me = self._rank
        held, wanted = before(me), after(me)
        transfers = Transfers(step, self._mesh, before, after)
        sends, receives, addends = [], [], []
        for peer, box in transfers.outgoing(me):
            if peer != me:
                sends.append((peer, shard[slices_within(box, held)].contiguous()))
        for peer, box in transfers.incoming(me):
            if peer == me:
                addends.append(shard[slices_within(box, held)])
            else:
                addends.append(shard.new_empty(box_shape(box)))
                receives.append((peer, addends[-1]))
        self._exchange(sends, receives)
        if not addends:
            return shard.new_empty(box_shape(wanted))
        return combine(addends, op).contiguous()

    def _all_reduce(self, shard: torch.Tensor, axes: tuple[int, ...], op: ReduceOp) -> torch.Tensor:
        members = self._mesh.group(self._rank, sorted(axes))
        if len(members) == 1 or shard.numel() == 0:
            return combine([shard], op).contiguous()
        group = self._group(members)
        if group is not None and op in ("sum", "avg") and shard.dtype in _NATIVE_SUM:
            result = shard.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(result, group=group)
            return result.div_(len(members)) if op == "avg" else result
        # Reduce a part each, then share the parts: as many bytes as a ring, any dtype and op.
        flat = shard.contiguous().view(-1)
        result = torch.empty_like(flat)
        me = members.index(self._rank)
        parts = [split_interval(0, flat.numel(), len(members), i) for i in range(len(members))]
        mine = slice(*parts[me])
        addends = [
            flat[mine] if peer == self._rank else torch.empty_like(flat[mine]) for peer in members
        ]
        others = [i for i in range(len(members)) if i != me]
        self._exchange(
            [(members[i], flat[slice(*parts[i])]) for i in others],
            [(members[i], addends[i]) for i in others],
        )
        result[mine] = combine(addends, op)
        self._exchange(
            [(members[i], result[mine]) for i in others],
            [(members[i], result[slice(*parts[i])]) for i in others],
        )
        return result.view(shard.shape)

    def _exchange(
        self,
        sends: list[tuple[int, torch.Tensor]],
        receives: list[tuple[int, torch.Tensor]],
    ) -> None:
        """Send and receive contiguous tensors as bytes, all at once; empty ones do not travel."""
        ops = [
            dist.P2POp(dist.irecv, _as_bytes(tensor), peer)
            for peer, tensor in receives
            if tensor.numel()
        ]
        ops += [
            dist.P2POp(dist.isend, _as_bytes(tensor), peer)
            for peer, tensor in sends
            if tensor.numel()
        ]
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def _make_group(self, members: tuple[int, ...]) -> None:
        """Make a group; every rank of the job does so for every group, in the same order.

        Groups that only their members make would be named by what else those have made before, and
        hang where that differs.
        """
        ranks = tuple(sorted(members))
        if 1 < len(ranks) < dist.get_world_size() and ranks not in self._groups:
            group = dist.new_group(list(ranks))
            if self._rank in ranks:
                assert group is not None, "this rank is a member"
                self._groups[ranks] = group

    def _group(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of some ranks, or None where none was made for them."""
        ranks = tuple(sorted(members))
        return dist.group.WORLD if len(ranks) == dist.get_world_size() else self._groups.get(ranks)


_COMMUNICATORS: Final[
    WeakKeyDictionary[dist.ProcessGroup, dict[DeviceMesh, ProcessGroupCommunicator]]
] = WeakKeyDictionary()
"""What belongs to a job, kept as long as torch keeps the job's own group.

torch holds the process groups of a job in globals of its own; this is the part of that state that
is ours. It makes two meshes of equal content share their groups.
"""


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Strides are set, not kept: a single element counts as contiguous whatever its stride, but
    # only stride 1 can be seen as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
