"""What carries out the steps of conversions, and one process that does so for all devices."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardspec.boxes import box_shape, slices_within
from shardspec.comm.transfers import Transfers
from shardspec.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Waiting(Protocol):
    """What goes on in the background."""

    def wait(self) -> None:
        """Return when it has ended; raise its error if there was one."""


class Communicator(ABC):
    """Runs steps on the shards of the devices that this process holds, the `addressable` ones.

    A simulated communicator holds every device of the mesh, one over `torch.distributed` its own
    rank. Every process of the mesh calls each method, in the same order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        """The devices among which data moves."""
        self.pending: Waiting | None = None
        """A save that goes on in the background; the next one waits for it."""

    @property
    @abstractmethod
    def addressable(self) -> tuple[int, ...]:
        """Physical ids whose shards live in this process."""

    @abstractmethod
    def run(
        self, transfers: Transfers, shards: Mapping[int, "torch.Tensor"]
    ) -> dict[int, "torch.Tensor"]:
        """Carry out one step on the addressable shards; returns new contiguous tensors."""

    @abstractmethod
    def on(self, mesh: DeviceMesh) -> "Communicator":
        """Return the communicator of the same kind for another mesh."""

    def conversion(
        self,
        content: bytes,  # noqa: ARG002
        device: str,
        meshes: Iterable[DeviceMesh] = (),  # noqa: ARG002
        values: Mapping[int, T] | None = None,
    ) -> AbstractContextManager[tuple[str, Mapping[int, T]]]:
        """Enter a conversion, in which steps are run.

        Yields the device type of all shards, and where `values` are given what `gather` returns of
        them, without another exchange where they are short.

        `content` is its `shardspec.comm.agreement.description`, `device` the type of this process's
        shards, empty where it holds none. Threads are told apart by the `meshes` that it is
        between, by default this one. It is an error on every process if one says something else or
        does not come, or if another thread is in a conversion between these meshes. One process
        always agrees with itself.
        """
        return nullcontext((device, values or {}))

    def telling(self, meshes: Iterable[DeviceMesh] = ()) -> AbstractContextManager[None]:  # noqa: ARG002
        """Let the other processes know of any error in what every process does now.

        They raise a CommunicatorError that names this one where they would have waited for it. Of
        such blocks inside each other the outermost counts.
        """
        return nullcontext()

    @abstractmethod
    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return the picklable value of each device of the mesh, in its order; also a barrier."""


class SimulatedCommunicator(Communicator):
    """A `Communicator` that holds every device's shard, for tests, notebooks and one-host work.

    Parameters
    ----------
    mesh
        The devices to simulate.

    Examples
    --------
    >>> import torch
    >>> from shardspec import DeviceMesh, DTensor
    >>> mesh = DeviceMesh(range(4), (2, 2))
    >>> t = DTensor(torch.arange(4), mesh, "[S0]", communicator=SimulatedCommunicator(mesh))
    >>> t.redistribute("[S1]").shards
    {0: tensor([0, 1]), 1: tensor([2, 3]), 2: tensor([0, 1]), 3: tensor([2, 3])}
    """

    @property
    def addressable(self) -> tuple[int, ...]:
        """Every device of the mesh."""
        return self.mesh.ids

    def run(
        self, transfers: Transfers, shards: Mapping[int, "torch.Tensor"]
    ) -> dict[int, "torch.Tensor"]:
        """Carry out one step; see `Communicator.run`."""
        from shardspec.comm.results import checked_result, combine_into

        results = {}
        for device in self.addressable:
            schedule = transfers.of(device)
            parts = [
                (box, shards[peer][slices_within(box, schedule.held[peer])])
                for peer, box in schedule.incoming
            ]
            result = shards[device].new_empty(box_shape(schedule.after))
            with checked_result(transfers.step, result):
                if parts and schedule.op is not None:
                    combine_into(result, [part for _, part in parts], schedule.op)
                else:
                    for box, part in parts:
                        result[slices_within(box, schedule.after)] = part
            results[device] = result
        return results

    def on(self, mesh: DeviceMesh) -> "SimulatedCommunicator":
        """Return the communicator that holds every device of another mesh."""
        return SimulatedCommunicator(mesh)

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return the values, which are all here already."""
        return {device: values[device] for device in self.mesh.ids}
