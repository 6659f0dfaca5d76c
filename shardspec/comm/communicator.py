"""Communicators run the steps of a plan: in a job, or with all devices simulated in one process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from shardspec.boxes import box_shape, slices_within
from shardspec.comm.transfers import Transfers
from shardspec.errors import MeshError
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import shown

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Communicator(ABC):
    """Runs steps on the shards of this process.

    A simulated communicator has the shards of all devices; one over `torch.distributed` has those
    of its own rank. All processes of the mesh must call the methods in the same order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise MeshError(f"{shown(mesh)} is not a mesh; give a DeviceMesh")
        self.mesh = mesh
        """The devices of the communicator."""

    @property
    @abstractmethod
    def addressable(self) -> tuple[int, ...]:
        """Physical ids of the devices whose shards are in this process."""

    @abstractmethod
    def run(
        self, transfers: Transfers, shards: Mapping[int, "torch.Tensor"]
    ) -> dict[int, "torch.Tensor"]:
        """Execute one step on the addressable shards; return new contiguous tensors."""

    @abstractmethod
    def on(self, mesh: DeviceMesh) -> "Communicator":
        """Return the communicator of the same kind for another mesh."""

    def conversion(
        self,
        content: bytes,  # noqa: ARG002
        device: str,
        values: Mapping[int, T] | None = None,
    ) -> AbstractContextManager[tuple[str, Mapping[int, T]]]:
        """Enter a conversion once all processes agree on it; steps run inside.

        Yields the device type of all shards, and what `gather` returns for `values`; short values
        travel in the notes.

        `content` is a `shardspec.comm.agreement.description` of the conversion, and `device` the
        device type of this process's shards, empty if it has none. Every process raises
        `CommunicatorError` if one passes different content or does not answer, and a process does
        if another of its threads is in a conversion. A single process always agrees.
        """
        return nullcontext((device, values or {}))

    def telling(self) -> AbstractContextManager[None]:
        """Send any error raised within the block to the other processes.

        Instead of waiting for this process they raise a `CommunicatorError` that names it. In
        nested blocks only the outermost has an effect.
        """
        return nullcontext()

    @abstractmethod
    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return the values of all devices in the order of the mesh, given those of this process.

        All processes wait for each other. Values must be picklable.
        """


class SimulatedCommunicator(Communicator):
    """A `Communicator` with the shards of all devices, for tests, notebooks and one-host work.

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

    def __reduce__(self) -> tuple[type["SimulatedCommunicator"], tuple[DeviceMesh]]:
        return SimulatedCommunicator, (self.mesh,)

    @property
    def addressable(self) -> tuple[int, ...]:
        """Every device of the mesh."""
        return self.mesh.ids

    def run(
        self, transfers: Transfers, shards: Mapping[int, "torch.Tensor"]
    ) -> dict[int, "torch.Tensor"]:
        """Execute one step; see `Communicator.run`."""
        from shardspec.comm.results import checked_result, combine_into

        results = {}
        for device in self.addressable:
            schedule = transfers.of(device)
            before = schedule.boxes_before
            parts = [
                (copy.box, shards[copy.sender][slices_within(copy.box, before[copy.sender])])
                for copy in schedule.incoming
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
        """Return the simulated communicator of another mesh."""
        return SimulatedCommunicator(mesh)

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return the values in the order of the mesh."""
        return {device: values[device] for device in self.mesh.ids}
