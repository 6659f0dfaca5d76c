"""Saves in the background: writes a copy of a state dict while training continues.

The saving threads of all ranks share a separate gloo group, whose connections break at once when a
rank is killed. The groups of the job are used only by the main threads.
"""

import atexit
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final, Never, TypeVar

from shardspec.checkpoint.state.rank_state import Described
from shardspec.comm.communicator import Communicator
from shardspec.errors import CommunicatorError
from shardspec.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_OPEN: Final[list["PendingSave"]] = []
"""Saves of this process since it last waited for all of them."""


class PendingSave:
    """A save in progress in the background.

    The process does not end before the save. `wait` raises the error of a failed save; if nobody
    waits, the next save of the process raises it. An error that was never raised is printed at
    exit, with exit code 1.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import digest, save_sharded
    >>> w = torch.ones(3)
    >>> path = tempfile.mkdtemp()
    >>> pending = save_sharded({"w": w}, path, asynchronous=True)
    >>> _ = w.zero_()  # the save has its own copy
    >>> pending.wait()
    >>> pending.done, digest(path) == digest({"w": torch.ones(3)})
    (True, True)
    """

    def __init__(self, save: Callable[[], None] | None = None, keep: object = None) -> None:
        self._error: BaseException | None = None
        self._heard, self._pid = False, os.getpid()
        self._keep = keep
        """Communicator whose connections stay open until the save has ended."""
        self._done = Event()
        if save is None:
            self._done.set()
            return
        _OPEN.append(self)
        # Not a daemon, so the process waits for it.
        Thread(target=self._run, args=(save,), name="shardspec save").start()

    def _run(self, save: Callable[[], None]) -> None:
        try:
            save()
        except BaseException as error:  # `wait` raises it
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """True if the save has succeeded or failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until all ranks have written and the save is complete; raise its error, if any."""
        self._done.wait()
        self._heard = True
        if self._error is not None:
            raise self._error

    @property
    def _unheard(self) -> BaseException | None:
        """Error of the save, if this process started it and has not raised the error; else None."""
        return None if self._heard or self._pid != os.getpid() else self._error


def wait_for_open() -> None:
    """Wait for all earlier saves of this process; raise the error of the first that failed."""
    saves = list(_OPEN)
    _OPEN.clear()
    for save in saves:
        save.wait()


@atexit.register
def _report_unheard() -> None:
    """Print errors that were never raised; if there are any, exit with code 1."""
    errors = [error for save in _OPEN if (error := save._unheard) is not None]
    for error in errors:
        print(f"shardspec: an asynchronous save has failed: {error}", file=sys.stderr)
    if errors:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an atexit function cannot set the exit code in another way


def copied(state: Described) -> Described:
    """Return a copy of a state dict in host memory."""
    import torch

    copies: dict[int, torch.Tensor] = {}

    def copy(shard: "torch.Tensor") -> "torch.Tensor":
        # A plain tensor is one object for all devices of this process.
        if id(shard) not in copies:
            new = torch.empty(shard.shape, dtype=shard.dtype)
            copies[id(shard)] = new.copy_(shard.detach())
        return copies[id(shard)]

    shards = {name: {d: copy(s) for d, s in of.items()} for name, of in state.shards.items()}
    flat = state.flat
    values = replace(flat, tensors={}, values=deepcopy(flat.values))
    return replace(state, flat=values, shards=shards)


class BackgroundCommunicator(Communicator):
    """Gathers values through a separate gloo group, created by the main threads of all ranks."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        super().__init__(communicator.mesh)
        (device,) = self._addressable = communicator.addressable
        store = _get_default_store()
        timeout = store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        self._ids = communicator.mesh.ids
        place = PrefixStore(f"shardspec/{name}", store)
        self._group: Any = dist.ProcessGroupGloo(
            place, self._ids.index(device), len(self._ids), timeout
        )

    @property
    def addressable(self) -> tuple[int, ...]:
        """Addressable devices of the main thread's communicator."""
        return self._addressable

    def gather(self, values: Mapping[int, T]) -> dict[int, T]:
        """Return the value of each device; see `Communicator.gather`."""
        import numpy as np
        import torch

        data = np.frombuffer(pickle.dumps(values[self._addressable[0]]), np.uint8)
        (sizes,) = self._all(torch.tensor([len(data)])).T.tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.from_numpy(data.copy())
        rows = self._all(padded).numpy()
        pairs = zip(self._ids, rows, sizes, strict=True)
        return {device: pickle.loads(row[:size].tobytes()) for device, row, size in pairs}

    def _all(self, value: "torch.Tensor") -> "torch.Tensor":
        """Gather a tensor from every rank; return all of them stacked in the order of ranks."""
        import torch

        out = [torch.empty_like(value) for _ in self._ids]
        try:
            self._group.allgather([out], [value]).wait()
        except RuntimeError as error:
            raise CommunicatorError(
                f"a rank ended during an asynchronous save, or did not answer in time "
                f"({str(error).splitlines()[0][:200]}); look at the errors of other ranks"
            ) from None
        return torch.stack(out)

    def run(self, *_: object, **__: object) -> Never:
        """Raise an error, since only the main thread moves tensors."""
        raise AssertionError("a save moves no tensors")

    def on(self, mesh: DeviceMesh) -> Never:  # noqa: ARG002
        """Raise an error, since a save uses one mesh."""
        raise AssertionError("a save has one mesh")
