"""The protocol between layouts and whatever carries out their steps."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

from shardspec.comm.routes import BoxOf
from shardspec.comm.steps import Step
from shardspec.mesh import DeviceMesh

if TYPE_CHECKING:
    import torch

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
        """Carry out one step, between the boxes that each device of the mesh holds.

        `shards` has those of all addressable devices, shaped as their boxes before the step, and
        is only read. What they hold after it is returned: new contiguous tensors that share no
        memory with `shards`.
        """

    def on(self, mesh: DeviceMesh) -> "Communicator":
        """Return the communicator of the same kind for another mesh."""

    def conversion(self, content: bytes, device: str) -> AbstractContextManager[str]:
        """Enter a conversion, in which steps are run; yields the kind of device of all shards.

        `content` is the `shardspec.comm.agreement.description` of what is to be done, `device` the
        kind of device that this process's shards are on, empty where it holds none. It is a
        `CommunicatorError` on every process if one says something else, or does not come; and if
        another thread is in a conversion on this mesh.
        """

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return one small picklable value per device of the mesh, in its order; also a barrier.

        `values` has those of all addressable devices.
        """
