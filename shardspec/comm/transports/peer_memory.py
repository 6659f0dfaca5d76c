"""Moves boxes between processes of one host by reading each other's memory (Linux).

A process sends its peers the address of a table of its shards. They copy the boxes that they need
by `process_vm_readv`, and then signal that they are done. Signals go through pipes, which peers
open below ``/proc``. Linux allows this to processes of one user, unless Yama or a container's
filter forbids it, so processes first try to read each other.
"""

import ctypes
import errno
import os
import pickle
import secrets
import select
import struct
import sys
import time
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from shardspec.comm.results import libc
from shardspec.comm.transfers import Message
from shardspec.comm.transports.stage import Stage
from shardspec.errors import CommunicatorError

BUFFER_BYTES: Final = 1 << 20
"""The most bytes in the buffer for received boxes, and in each of two buffers for addends: about
the size of a core's cache."""
MOST_BYTES: Final = 64 << 20
"""The most bytes of an array per call; the limit of the kernel is 2 GiB."""
_MOST_RUNS: Final = 1024
"""The most runs of bytes per call: IOV_MAX."""
_RUN_BYTES: Final = 6 << 10
"""Bytes that are copied in the time that one more iovec takes, 0.4 µs."""
_FEW_RUNS: Final = 128
"""The most runs of an array that is read together with others in one call."""
_SIGNAL: Final = struct.Struct("<4Q")
"""Kind, checksum of the step, and address and bytes of a table."""
GIVEN_UP, _READABLE, _DONE = range(3)
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_INTS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BY_WIDTH: Final = {**_INTS, 16: torch.complex128}

Ints: TypeAlias = npt.NDArray[np.int64]
Table: TypeAlias = Mapping[int, tuple[int, int, tuple[int, ...]]]
"""Number of a shard -> its address, and its span and strides in bytes."""


class Region(NamedTuple):
    """An array in the memory of a process; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        """Return the address, shape and strides of a tensor's memory as a region."""
        item, steps = tensor.element_size(), tensor.stride()
        return cls(tensor.data_ptr(), tuple(tensor.shape), tuple(s * item for s in steps), item)

    def tensor(self) -> torch.Tensor:
        """Return a region of this process as a tensor of integers that shares its memory."""
        memory = (ctypes.c_char * self.span).from_address(self.address)
        steps = [stride // self.item_bytes for stride in self.strides]
        flat = torch.frombuffer(memory, dtype=_BY_WIDTH[self.item_bytes])
        return flat.as_strided(self.shape, steps)

    def part(self, dim: int, start: int, stop: int) -> "Region":
        """Return the region of the indices from `start` to `stop` of a dim."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return self.moved(start * self.strides[dim])._replace(shape=shape)

    def moved(self, offset: int) -> "Region":
        """Return the region shifted by a number of bytes."""
        return self._replace(address=self.address + offset)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.item_bytes

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one, gaps included."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return reach + self.item_bytes if prod(self.shape) else 0

    @property
    def run_bytes(self) -> int:
        """Bytes from the start of the array to the first gap in memory."""
        run = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != run:
                break
            run *= size
        return run

    def rows(self, run: int, bases: Sequence[int] = (0,)) -> Ints:
        """Return the kernel's ``iovec`` array: address and length of every run of `run` bytes.

        The address is relative to each of `bases`.
        """
        starts: Ints = np.array(bases, dtype=np.int64) + self.address
        inner, dims = self.item_bytes, list(zip(self.shape, self.strides, strict=True))
        # Inner dims without gaps are joined, then cut into runs.
        while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
            inner *= dims.pop()[0]
        for size, stride in [*dims, (inner // run, run)]:
            if size > 1:
                starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).ravel()
        return np.stack([starts, np.full_like(starts, run)], axis=1)


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of at most 2 GiB from another process to an array of the same shape here.

    Raises `OSError` if the process has ended, may not be read, or has no such memory.
    """
    run = min(source.run_bytes, target.run_bytes)
    read_rows(pid, target.rows(run), source.rows(run))


def read_rows(pid: int, ours: Ints, theirs: Ints) -> None:
    """Copy runs of bytes from another process, by rows of address and length; see `read`."""
    library, no_flags = libc(), ctypes.c_ulong(0)
    assert library is not None, "only Linux processes have addresses"
    library.process_vm_readv.restype = ctypes.c_ssize_t
    for first in range(0, len(ours), _MOST_RUNS):
        batch = ours[first:][:_MOST_RUNS], theirs[first:][:_MOST_RUNS]
        our_rows, their_rows = (ctypes.c_void_p(rows.ctypes.data) for rows in batch)
        count = ctypes.c_ulong(len(batch[0]))
        got = library.process_vm_readv(pid, our_rows, count, their_rows, count, no_flags)
        if got != int(batch[0][:, 1].sum()):
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))


def read_bytes(pid: int, address: int, length: int) -> bytes:
    """Return bytes from the memory of another process; raises what `read` raises."""
    got = np.empty(length, dtype=np.uint8)
    read_rows(pid, np.array([[got.ctypes.data, length]]), np.array([[address, length]]))
    return got.tobytes()


class Offer(NamedTuple):
    """A message of a process to its peers, with which they can try to read its memory."""

    host: str
    """An identifier of the kernel and its namespaces."""
    pid: int
    probe: int
    """The address of `token` in memory."""
    token: bytes
    pipes: Mapping[int, int]
    """File descriptors, by rank, to which that rank writes signals."""

    def is_readable(self) -> bool:
        """Return True if this process can read the memory of the process that made the offer."""
        try:
            return read_bytes(self.pid, self.probe, len(self.token)) == self.token
        except OSError:
            return False


class Connection:
    """A pair of pipes between two processes, which also shows the end of the other process."""

    def __init__(self, peer: int, pid: int, inbox: int, outbox: int) -> None:
        self.peer, self.pid, self._inbox, self._outbox = peer, pid, inbox, outbox
        process = os.pidfd_open(pid)  # a forked child keeps the pipes open, but not this
        self._pending: deque[tuple[int, ...]] = deque()
        self._has_ended = False
        self._poll = select.poll()
        for descriptor in (inbox, process):
            self._poll.register(descriptor, select.POLLIN)
        self._free = weakref.finalize(self, _close, inbox, outbox, process)

    def send(self, kind: int, step: int = 0, address: int = 0, length: int = 0) -> None:
        """Send a signal without waiting; if the peer has ended, only `receive` raises an error."""
        with suppress(OSError):
            os.write(self._outbox, _SIGNAL.pack(kind, step, address, length))

    def receive(self, kind: int, step: int, deadline: float) -> tuple[int, ...]:
        """Return (address, bytes) of the next signal before `deadline` (of `time.monotonic`).

        Raises `CommunicatorError` at the deadline, or if the peer has ended or is in another step.
        """
        if not self._pending:
            self._take(max(0.0, deadline - time.monotonic()))
        if not self._pending:
            self.check()
            raise CommunicatorError(
                f"rank {self.peer} did not answer within the process group's timeout"
            )
        signal = self._pending.popleft()
        if signal[:2] != (kind, step):
            raise CommunicatorError(f"rank {self.peer} executes another step")
        return signal[2:]

    def check(self) -> None:
        """Raise `CommunicatorError` if the peer has ended or given up.

        A failing peer signals it before it frees its memory, so data read before this is valid.
        """
        self._take(0.0)
        if self._has_ended:
            raise CommunicatorError(f"rank {self.peer} has ended or given up this step")

    def _take(self, seconds: float) -> None:
        """Read the signals that have arrived; wait up to `seconds` for the first one."""
        while not self._has_ended and self._poll.poll(seconds * 1e3):
            signal = b""
            with suppress(BlockingIOError):  # the process has ended, and nothing is left to read
                signal = os.read(self._inbox, _SIGNAL.size)
            self._has_ended = not signal or _SIGNAL.unpack(signal)[0] == GIVEN_UP
            if not self._has_ended:
                self._pending.append(_SIGNAL.unpack(signal))
            seconds = 0.0


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def this_host() -> str:
    """Return an identifier of the kernel and its namespaces; "" on systems other than Linux."""
    if sys.platform != "linux":
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])
    except OSError:
        return ""


class PeerMemory:
    """A `Transport` between processes that can all read each other's memory.

    A process sends the address of its table when its tensors may be read. Every reader answers
    when it has finished. Waiting for a peer ends after `timeout_s`.
    """

    name: ClassVar[str] = "memory"

    def __init__(self, rank: int, connections: Mapping[int, Connection], timeout_s: float) -> None:
        self._rank, self._connections, self._timeout_s = rank, connections, timeout_s
        self._pids = {rank: os.getpid(), **{peer: at.pid for peer, at in connections.items()}}
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    @classmethod
    def connect(
        cls,
        rank: int,
        peers: Sequence[int],
        gather: Callable[[Any], Mapping[int, Any]],
        known: dict[int, Connection],
        timeout_s: float,
        *,
        allowed: bool,
    ) -> "PeerMemory | None":
        """Return the transport if all ranks share a host, allow it and can read each other.

        All ranks of a mesh call this. `gather` returns the values of all ranks. New connections of
        this process are added to `known`.
        """
        host, token = this_host() if allowed else "", np.frombuffer(secrets.token_bytes(16), "u1")
        pipes = {peer: os.pipe2(_FLAGS) for peer in peers if host and peer not in known}
        new: dict[int, Connection] = {}
        try:
            fds = {peer: write for peer, (_, write) in pipes.items()}
            offers = gather(Offer(host, os.getpid(), token.ctypes.data, token.tobytes(), fds))
            share_host = bool(host) and all(offer.host == host for offer in offers.values())
            for peer in pipes if share_host else ():
                offer, (inbox, _) = offers[peer], pipes[peer]
                with suppress(OSError):
                    path = f"/proc/{offer.pid}/fd/{offer.pipes[rank]}"
                    outbox = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                    new[peer] = Connection(peer, offer.pid, os.dup(inbox), outbox)
            joined = new.keys() == pipes.keys() and all(offers[p].is_readable() for p in peers)
            # The pipes close only after all ranks have tried to open and to read.
            if not share_host or not all(gather(joined).values()):
                return None
        finally:
            _close(*(end for pipe in pipes.values() for end in pipe))
        known |= new
        return cls(rank, {peer: known[peer] for peer in peers}, timeout_s)

    def close(self) -> None:
        """Tell all peers that this rank gives up."""
        for connection in self._connections.values():
            connection.send(GIVEN_UP)

    def reserve(self, first: Callable[[], tuple[int, int]], like: torch.Tensor) -> bool:  # noqa: ARG002
        """Return False: no buffers are needed; see `Transport.reserve`."""
        return False

    def move(self, stages: Iterable[Stage]) -> None:
        """Fill the targets of stages from peers' memory; see `Transport.move`."""
        for stage in stages:
            try:
                self._move(stage)
            except CommunicatorError as error:
                raise stage.failed(error) from error.__cause__

    def _move(self, stage: Stage) -> None:
        rank, deadline = self._rank, time.monotonic() + self._timeout_s
        step = zlib.crc32(stage.name.encode())
        regions = {place: Region.of(shard) for place, shard in stage.source.items()}
        tables = {rank: {place: (r.address, r.span, r.strides) for place, r in regions.items()}}
        served = np.frombuffer(pickle.dumps(tables[rank]), dtype=np.uint8)
        for peer in stage.readers:
            self._connections[peer].send(_READABLE, step, served.ctypes.data, len(served))
        for wave in stage.waves(2 * BUFFER_BYTES if stage.is_combined else None):
            # torch does not notice these writes.
            increment_version(list(stage.target.values()))
            # Devices start with different peers, to spread the load.
            for peer in sorted(wave.receives, key=lambda peer: (peer < rank, peer)):
                try:
                    if peer not in tables:
                        place = self._connections[peer].receive(_READABLE, step, deadline)
                        table = read_bytes(self._pids[peer], *place)
                        self._connections[peer].check()
                        tables[peer] = pickle.loads(table)
                    self._fill(stage, wave.receives[peer], peer, tables[peer])
                except OSError as error:
                    why = "it has ended" if error.errno == errno.ESRCH else error.strerror
                    raise CommunicatorError(
                        f"the memory of rank {peer} cannot be read: {why}"
                    ) from error
        for peer in tables.keys() - {rank}:
            self._connections[peer].check()
            self._connections[peer].send(_DONE, step)
        for peer in stage.readers:
            self._connections[peer].receive(_DONE, step, deadline)

    def _fill(self, stage: Stage, message: Message, peer: int, theirs: Table) -> None:
        """Read a message from a peer, with shards at `theirs`; arrays of few pieces all at once."""
        nothing: Ints = np.zeros((0, 2), dtype=np.int64)
        ours, their_rows = [nothing], [nothing]
        for copy in message:
            item = stage.dtype_of(copy).itemsize
            bases: defaultdict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]]
            bases = defaultdict(list)
            for place in copy.places:
                (address, span, strides), shard = theirs[place], stage.target[place]
                bases[strides, shard.stride()].append((address, shard.data_ptr(), span))
            for (strides, own_strides), arrays in bases.items():
                own_steps = tuple(stride * item for stride in own_strides)
                shape, steps, at = stage.source_region(copy, strides, peer)
                source = Region(at, shape, steps, item)
                shape, steps, at = stage.target_region(copy, own_steps, stage.device)
                target = Region(at, shape, steps, item)
                source_bases, target_bases, spans = zip(*arrays, strict=True)
                if min(spans) < source.address + source.span:
                    raise CommunicatorError(f"rank {peer} has smaller shards than expected")
                run, size = min(source.run_bytes, target.run_bytes), source.num_bytes
                if size <= min(BUFFER_BYTES, _FEW_RUNS * run):
                    their_rows.append(source.rows(run, source_bases))
                    ours.append(target.rows(run, target_bases))
                    continue
                for moved, placed, _ in arrays:
                    regions = source.moved(moved), target.moved(placed)
                    if peer == self._rank:
                        regions[1].tensor().copy_(regions[0].tensor())
                    else:
                        self.fetch(peer, *regions)
        read_rows(self._pids[peer], np.concatenate(ours), np.concatenate(their_rows))

    def fetch(self, peer: int, source: Region, target: Region) -> None:
        """Copy an array of a peer: run by run, or in one piece with its gaps if runs are short."""
        pid, runs = self._pids[peer], source.num_bytes // min(source.run_bytes, target.run_bytes)
        far_apart = runs == 1 or source.span >= runs * _RUN_BYTES
        most = MOST_BYTES if far_apart else BUFFER_BYTES
        if (source.num_bytes if far_apart else source.span) > most:
            widest = int(np.argmax(np.multiply(np.subtract(source.shape, 1), source.strides)))
            size = source.shape[widest]
            for bounds in ((0, size // 2), (size // 2, size)):
                self.fetch(peer, source.part(widest, *bounds), target.part(widest, *bounds))
        elif far_apart:
            read(pid, source, target)
        else:
            staged = self._buffer[: source.span]
            read(pid, Region(source.address, (source.span,), (1,), 1), Region.of(staged))
            target.tensor().copy_(source._replace(address=staged.data_ptr()).tensor())
