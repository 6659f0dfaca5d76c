"""The protocol between layouts and whatever carries out their steps."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardspec.comm.routes import BoxOf
from shardspec.comm.steps import Step
from shardspec.mesh import DeviceMesh

if TYPE_CHECKING:
    import torch

__all__ = ["Communicator"]

T = TypeVar("T")


class Communicator(Protocol):
    """Runs steps on the shards of the devices that this process holds.

    A simulated communicator holds every device of the mesh, one over `torch.distributed` holds its
    own rank. Callers never ask which: they work on all of `addressable`. Every process of the mesh
    calls each method, in the same order.
    """

    @property
    def mesh(self) -> DeviceMesh:
        """The devices among which data moves."""

    @property
    def addressable(self) -> tuple[int, ...]:
        """Physical ids whose shards live in this process."""

    def run(
        self, step: Step, shards: Mapping[int, "torch.Tensor"], before: BoxOf, after: BoxOf
    ) -> dict[int, "torch.Tensor"]:
        """Carry out one step.

        Parameters
        ----------
        step
            What moves along which axes.
        shards
            The shard of every addressable device, shaped as its box before the step; only read.
        before, after
            Which box each device of the mesh holds before and after the step.

        Returns
        -------
        dict
            The shard of every addressable device after the step: new contiguous tensors that share
            no memory with `shards`.
        """

    def on(self, mesh: DeviceMesh) -> "Communicator":
        """Return the communicator of the same kind for another mesh."""

    def conversion(self, content: bytes, device: str) -> AbstractContextManager[str]:
        """Enter a conversion, in which steps are run.

        Parameters
        ----------
        content
            What is to be done: `shardspec.comm.agreement.description` of it.
        device
            The kind of device that this process's shards are on; empty where it holds none.

        Returns
        -------
        context manager
            Of the kind of device that all shards are on, found from those who hold some.

        Raises
        ------
        CommunicatorError
            On every process, if one says something else, naming it and the difference, or if one
            does not come; and if another thread is in a conversion on this mesh.
        """

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return one small picklable value per device of the mesh, in its order; also a barrier.

        Parameters
        ----------
        values
            The value of every addressable device.
        """
