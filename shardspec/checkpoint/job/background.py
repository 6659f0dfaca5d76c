"""Saves that go on in the background: a copy of a state dict is written while training goes on.

The threads of all ranks talk through the job's store, which they only ask and never wait in: the
process groups, and the store's clients, are the main threads'.
"""

import pickle
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import count
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final, Never, TypeVar

from shardspec.checkpoint.state.rank_state import Described
from shardspec.comm.communicator import Communicator
from shardspec.errors import CommunicatorError
from shardspec.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_PAUSE_S: Final = 0.01


class PendingSave:
    """A save that goes on in the background.

    The process does not end before it. An error of it is raised by `wait`, and by the next save of
    the same communicator.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import digest, save_sharded
    >>> w = torch.ones(3)
    >>> path = tempfile.mkdtemp()
    >>> pending = save_sharded({"w": w}, path, asynchronous=True)
    >>> _ = w.zero_()  # what is saved was copied
    >>> pending.wait()
    >>> pending.done, digest(path) == digest({"w": torch.ones(3)})
    (True, True)
    """

    def __init__(self, save: Callable[[], None] = lambda: None) -> None:
        self._error: BaseException | None = None
        self._done = Event()

        def run() -> None:
            try:
                save()
            except BaseException as error:  # raised where somebody waits
                self._error = error
            finally:
                self._done.set()

        # No daemon: the process ends after it.
        Thread(target=run, name="shardspec save").start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when all ranks have written, and the save counts; raise its error otherwise."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def copied(what: Described) -> Described:
    """Return a state dict in memory of its own, on the host."""
    import torch

    copies: dict[int, torch.Tensor] = {}

    def copy(shard: "torch.Tensor") -> "torch.Tensor":
        # A plain tensor is one object for all devices of this process.
        if id(shard) not in copies:
            new = torch.empty(shard.shape, dtype=shard.dtype)
            copies[id(shard)] = new.copy_(shard.detach())
        return copies[id(shard)]

    shards = {name: {d: copy(s) for d, s in of.items()} for name, of in what.shards.items()}
    flat = what.flat
    kept = replace(flat, tensors={}, values=deepcopy(flat.values))
    return replace(what, flat=kept, shards=shards)


class StoreCommunicator(Communicator):
    """Gathers values through the store of a job, for a thread that must not use its groups."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        super().__init__(communicator.mesh)
        self._addressable = communicator.addressable
        self._name, self._numbers = name, count()

    @property
    def addressable(self) -> tuple[int, ...]:
        """Those of the communicator of the main thread."""
        return self._addressable

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return the value of each device; see `Communicator.gather`."""
        from torch.distributed.distributed_c10d import _get_default_store

        store, number = _get_default_store(), next(self._numbers)
        keys = {device: f"shardspec/{self._name}/{number}/{device}" for device in self.mesh.ids}
        for device in self._addressable:
            store.set(keys[device], b64encode(pickle.dumps(values[device])).decode())
            if number > 1:  # all have read what they had to before they came to the last one
                store.delete_key(f"shardspec/{self._name}/{number - 2}/{device}")
        return {device: self._read(store, key, device) for device, key in keys.items()}

    def _read(self, store: "Store", key: str, device: int) -> Any:  # noqa: ANN401
        timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]  # torch's stubs lack it
        end = time.monotonic() + timeout
        while not store.check([key]):
            if time.monotonic() > end:
                raise CommunicatorError(
                    f"rank {device} did not join an asynchronous save within {timeout:g} s; it "
                    "has ended, or is slower than the timeout of init_process_group"
                )
            time.sleep(_PAUSE_S)
        return pickle.loads(b64decode(store.get(key)))

    def run(self, *_: object, **__: object) -> Never:
        """Move no tensors: that is for the main thread."""
        raise AssertionError("a save moves no tensors")

    def on(self, mesh: DeviceMesh) -> Never:  # noqa: ARG002
        """Serve no other mesh."""
        raise AssertionError("a save is of one mesh")
