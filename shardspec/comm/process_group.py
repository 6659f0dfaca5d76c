"""Steps over `torch.distributed`: gloo on CPU, NCCL where CUDA is, by the same code.

A step is the same boxes on every backend; how they travel is chosen here. Processes of one host
read each other's memory (`shardspec.comm.direct`). Otherwise boxes are messages in bounded chunks
(`shardspec.comm.messages`), which need no group but the job's own. Where a mesh has all ranks of
the job, each axis has groups too: over these, sums of the common dtypes use the backend's
all-reduce, and NCCL's other collectives serve where boxes are such as they need
(`shardspec.comm.native`). Every way takes all dtypes, uneven shards and any order of device ids.
"""

import os
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from shardspec.boxes import box_shape
from shardspec.comm.agreement import check_agreement
from shardspec.comm.all_reduce import all_reduce
from shardspec.comm.carrier import Carrier
from shardspec.comm.communicator import BoxOf
from shardspec.comm.direct import Direct, join_host
from shardspec.comm.failures import failing
from shardspec.comm.fresh import fresh
from shardspec.comm.job import check_members, current_job
from shardspec.comm.messages import Messages, exchange
from shardspec.comm.native import Native, fits
from shardspec.comm.reduce import combine
from shardspec.comm.role import Role, role_of
from shardspec.comm.steps import AllReduce, ReduceScatter, Step
from shardspec.errors import CommunicatorError
from shardspec.mesh import DeviceMesh

__all__ = ["ProcessGroupCommunicator"]

T = TypeVar("T")

_NATIVE_SUM: Final = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes whose sum every backend has, with the rounding of the dtype itself."""
_NATIVE_MOVE: Final = frozenset({*_NATIVE_SUM, torch.bfloat16, torch.float16})
"""Dtypes that every backend's collectives carry."""


class ProcessGroupCommunicator:
    """A `Communicator` that holds the shard of one rank.

    Physical ids are global ranks. Use `create` or `of` rather than the constructor, so that a mesh
    has one communicator per job.

    Parameters
    ----------
    mesh
        Devices. If these are all ranks of the job, each of them constructs this at the same point
        of the program; otherwise the ranks outside need not.
    reads_peers
        Whether processes of one host may read each other's memory, where the system allows it. If
        not, or on any of the ranks not, all bytes go through the backend.

    Raises
    ------
    CommunicatorError
        If `torch.distributed` is not initialised, or the mesh has ids that the job lacks.

    Examples
    --------
    In a job of four, started by torchrun::

        mesh = DeviceMesh(range(4), (2, 2), init_process_group=True)
        ProcessGroupCommunicator.of(mesh).addressable  # this rank's own id, alone
    """

    def __init__(self, mesh: DeviceMesh, *, reads_peers: bool = True) -> None:
        check_members(mesh)
        self._mesh = mesh
        self._rank = dist.get_rank()
        self._agreed: set[Hashable] = set()
        self._messages = Messages()
        self._may_read_peers = reads_peers
        self._joined = False
        self._direct: Direct | None = None
        self._job = current_job()
        self._links = self._job.links
        if mesh.size == dist.get_world_size():
            for axis in range(mesh.ndim):
                for members in mesh.groups([axis]):
                    if len(members) > 1:
                        self._job.make_group(members)

    @classmethod
    def create(cls, mesh: DeviceMesh, device_type: str | None = None) -> "ProcessGroupCommunicator":
        """Initialise `torch.distributed` if that is still to be done, and return `of` the mesh.

        Under torchrun every rank calls this; gloo serves CPU tensors and NCCL CUDA tensors, where
        there is CUDA and `device_type` is not ``"cpu"``.

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
            if device_type != "cpu" and torch.cuda.is_available():
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
        made = current_job().communicators
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

    @property
    def reads_peers(self) -> bool:
        """Whether all ranks of the mesh read each other's memory; found out in the first step."""
        return self._direct is not None and self._direct.joins(self._mesh.ids)

    def run(
        self, step: Step, shards: Mapping[int, torch.Tensor], before: BoxOf, after: BoxOf
    ) -> dict[int, torch.Tensor]:
        """Carry out one step; see `Communicator.run`.

        Raises
        ------
        CommunicatorError
            If a peer has gone, or does not come within the timeout of the process group.
        """
        if not self.addressable:
            return {}
        # What lies in memory is to be the values: no conjugation that is still to be done.
        shard = shards[self._rank].detach().resolve_conj().resolve_neg()
        if shard.device.type == "cpu" and not self._joined:
            self._join_host()  # whatever the step: here all ranks of the mesh are together
        role = role_of(step, self._mesh, self._rank, before, after)
        if isinstance(step, AllReduce):
            return {self._rank: self._all_reduce(step, role, shard)}
        result = fresh(shard, box_shape(role.wanted))
        carrier = self._carrier(step, role, shard)
        if isinstance(step, ReduceScatter):
            carrier.reduce(step, role, shard, result, step.op)
        else:
            carrier.move(step, role, shard, result)
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
        return self._gather(values[self._rank])

    def _gather(self, mine: T) -> dict[int, T]:
        if self._mesh.size < dist.get_world_size():
            return self._gather_among_members(mine)
        gathered: list[T] = [mine] * self._mesh.size
        others = [peer for peer in self._mesh.ids if peer != self._rank]
        with failing("gathering a value of every rank", others):
            dist.all_gather_object(gathered, mine)
        return {device: gathered[device] for device in self._mesh.ids}

    def _gather_among_members(self, mine: T) -> dict[int, T]:
        """Collect values where other ranks of the job take no part: lengths first, then content."""
        others = [device for device in self._mesh.ids if device != self._rank]
        device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
        what = "gathering a value of every rank of the mesh"
        content = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
        length = torch.tensor([content.numel()], device=device)
        lengths = {peer: torch.empty_like(length) for peer in others}
        exchange(what, [(peer, length) for peer in others], list(lengths.items()))
        contents = {
            peer: torch.empty(int(lengths[peer]), dtype=torch.uint8, device=device)
            for peer in others
        }
        exchange(what, [(peer, content) for peer in others], list(contents.items()))
        loaded = {peer: pickle.loads(c.cpu().numpy().tobytes()) for peer, c in contents.items()}
        loaded[self._rank] = mine
        return {peer: loaded[peer] for peer in self._mesh.ids}

    def _carrier(self, step: Step, role: Role, shard: torch.Tensor) -> Carrier:
        """Choose how boxes travel; every member of the step chooses the same.

        Processes of one host read each other's memory. NCCL's own collectives take the shortest
        way over several links, where the boxes are such as they need.
        """
        if shard.device.type == "cpu":
            if self._direct is not None and self._direct.joins(role.members):
                return self._direct
        elif fits(step, role) and self._has_group(role.members):
            summed = not isinstance(step, ReduceScatter) or shard.dtype in _NATIVE_SUM
            if summed and shard.dtype in _NATIVE_MOVE:
                return Native(self._group(role.members))
        return self._messages

    def _join_host(self) -> None:
        """Link the ranks of the mesh that share a host; every rank of it is here."""
        if self._mesh.size > 1 and "cpu:gloo" in dist.get_backend_config():
            self._direct = join_host(
                self._rank,
                self._gather,
                self._gather,
                self._links,
                _timeout_s(),
                takes_part=self._may_read_peers,
            )
        self._joined = True

    def _all_reduce(self, step: AllReduce, role: Role, shard: torch.Tensor) -> torch.Tensor:
        if len(role.members) == 1 or shard.numel() == 0:
            return combine([shard], step.op)
        carrier = self._carrier(step, role, shard)
        summed = step.op in ("sum", "avg") and shard.dtype in _NATIVE_SUM
        if carrier is self._messages and summed and self._has_group(role.members):
            result = shard.clone(memory_format=torch.contiguous_format)
            with failing(step, [peer for peer in role.members if peer != self._rank]):
                dist.all_reduce(result, group=self._group(role.members))
            return result.div_(len(role.members)) if step.op == "avg" else result
        return all_reduce(carrier, step, role.members, self._rank, shard)

    def _has_group(self, members: tuple[int, ...]) -> bool:
        """Say whether some ranks have a group of their own, or are the whole job."""
        return self._job.group(members) is not None

    def _group(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of some ranks that have one."""
        return self._job.group(members)


def _timeout_s() -> float:
    """Return the timeout of the job's group for tensors on the CPU."""
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    backend = world._get_backend(torch.device("cpu"))
    seconds: float = backend.options._timeout.total_seconds()
    return seconds
