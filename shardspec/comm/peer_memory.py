"""Reading the memory of peers on the same host, by `process_vm_readv` (Linux, man 2).

A device tells its readers where its shard lies; they copy what they want and say when they are
done. Processes first compare kernel and namespaces (`agreement.Address`) and try to read each
other: a process of the same user may, unless Yama or the filter of a container forbids it.
"""

import ctypes
import errno
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from shardspec.boxes import Box, box_shape, slices_within
from shardspec.comm.agreement import Address, Connection, Note, failed, ranks_text
from shardspec.comm.results import libc
from shardspec.comm.transfers import DeviceTransfers
from shardspec.errors import CommunicatorError

BUFFER_BYTES: Final = 1 << 20
"""The most that is staged at once, and half of the addends that are combined at once: about what
the cache of a core holds."""
MOST_BYTES: Final = 64 << 20
"""Bytes of an array in one call; the kernel stops at 2 GiB."""
_MOST_RUNS: Final = 1024
"""IOV_MAX: runs of bytes in one call."""
_RUN_BYTES: Final = 6 << 10
"""Fetching a run by itself takes as long as reading so many bytes in passing: 0.4 µs."""
_FEW_RUNS: Final = 128
"""Arrays of so few runs are read together in one call."""
_DTYPES: Final = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128)
_BY_WIDTH: Final = {dtype.itemsize: dtype for dtype in _DTYPES}

Ints: TypeAlias = npt.NDArray[np.int64]


class Region(NamedTuple):
    """Where an array lies in the memory of a process; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        """Return where a tensor lies."""
        item = tensor.element_size()
        strides = tuple(stride * item for stride in tensor.stride())
        return cls(tensor.data_ptr(), tuple(tensor.shape), strides, item)

    def tensor(self) -> torch.Tensor:
        """Return an array of this process, as whole numbers; it has to outlive the tensor."""
        memory = (ctypes.c_char * self.span).from_address(self.address)
        steps = [stride // self.item_bytes for stride in self.strides]
        flat = torch.frombuffer(memory, dtype=_BY_WIDTH[self.item_bytes])
        return flat.as_strided(self.shape, steps)

    def part(self, index: tuple[slice, ...]) -> "Region":
        """Return where a part of the array lies."""
        offset = sum(part.start * step for part, step in zip(index, self.strides, strict=True))
        shape = tuple(part.stop - part.start for part in index)
        return self._replace(address=self.address + offset, shape=shape)

    def halves(self) -> Iterator[tuple[slice, ...]]:
        """Yield the indices of two halves, cut along the dim that spans most memory."""
        dims = [dim for dim, size in enumerate(self.shape) if size > 1]
        widest = max(dims, key=lambda dim: self.strides[dim] * self.shape[dim])
        middle = self.shape[widest] // 2
        whole = tuple(slice(0, size) for size in self.shape)
        for half in (slice(0, middle), slice(middle, self.shape[widest])):
            yield (*whole[:widest], half, *whole[widest + 1 :])

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
        """Bytes before the first gap."""
        run = self.item_bytes
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != run:
                break
            run *= size
        return run

    def runs(self, run: int) -> Ints:
        """Return the address of every run of so many bytes, in the order of the elements."""
        starts: Ints = np.full(1, self.address, dtype=np.int64)
        inner, dims = self.item_bytes, list(zip(self.shape, self.strides, strict=True))
        # Inner dims without gaps count as one, which is cut into runs.
        while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
            inner *= dims.pop()[0]
        for size, stride in [*dims, (inner // run, run)]:
            if size > 1:
                starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).ravel()
        return starts


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of another process, of 2 GiB at most, to one here of the same shape.

    `OSError` says that the process has gone, may not be read, or has no such memory.
    """
    run = min(source.run_bytes, target.run_bytes)
    ours, theirs = (_rows(region.runs(run), run) for region in (target, source))
    _read_rows(pid, ours, theirs)


def _rows(addresses: Ints, length: int) -> Ints:
    """Return the kernel's ``iovec``: a row of address and length for each run."""
    rows: Ints = np.full((addresses.size, 2), length, dtype=np.int64)
    rows[:, 0] = addresses.ravel()
    return rows


def _read_rows(pid: int, ours: Ints, theirs: Ints) -> None:
    library, no_flags = libc(), ctypes.c_ulong(0)
    assert library is not None, "elsewhere processes have no addresses"
    library.process_vm_readv.restype = ctypes.c_ssize_t
    for first in range(0, len(ours), _MOST_RUNS):
        some = ours[first:][:_MOST_RUNS], theirs[first:][:_MOST_RUNS]
        here, there = (ctypes.c_void_p(rows.ctypes.data) for rows in some)
        count = ctypes.c_ulong(len(some[0]))
        got = library.process_vm_readv(pid, here, count, there, count, no_flags)
        if got != int(some[0][:, 1].sum()):
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))


def readable(addresses: Mapping[int, Address]) -> frozenset[int]:
    """Return which processes can be read, by reading the name that each says it has."""
    found = set()
    for peer, other in addresses.items():
        name = other.socket.encode()
        got = ctypes.create_string_buffer(len(name))
        target = Region(ctypes.addressof(got), (len(name),), (1,), 1)
        with suppress(OSError):
            read(other.pid, target._replace(address=other.probe), target)
            if got.raw == name:
                found.add(peer)
    return frozenset(found)


class Arrays(NamedTuple):
    """Arrays of one shape at a peer, and as many here: addresses count from the bases."""

    source: Region
    target: Region
    source_bases: Ints
    target_bases: Ints


class PeerMemory:
    """Moves boxes between processes that all can read each other, waiting for each `timeout_s`.

    A process says where its array is once that is readable, and each reader when it is done.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection], timeout_s: float) -> None:
        self._rank, self._connections, self._timeout_s = rank, connections, timeout_s
        self._pids = {rank: os.getpid(), **{peer: at.pid for peer, at in connections.items()}}
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    @contextmanager
    def session(
        self, schedule: DeviceTransfers, shard: torch.Tensor
    ) -> Iterator[Callable[[int, Box, torch.Tensor], None]]:
        """Let others read the shard in a step; yields what fills a tensor with a peer's box."""
        name, readers = str(schedule.step), {peer for peer, _ in schedule.outgoing}
        with self._serving(name, Region.of(shard), readers, schedule.peers) as region_of:

            def fetch(peer: int, box: Box, place: torch.Tensor) -> None:
                held = schedule.held[peer]
                there = region_of(peer, box_shape(held), shard.element_size())
                increment_version(place)  # torch does not see the writing
                self._fetch(peer, there.part(slices_within(box, held)), Region.of(place))

            yield fetch

    def fill(
        self,
        name: str,
        mine: Ints,
        readers: set[int],
        holders: set[int],
        arrays: Callable[[int, Ints], Iterable[Arrays]],
    ) -> None:
        """Fill many arrays here with arrays of holders, this process among them perhaps.

        `mine` is a table for those who read here; given a holder and its table, of the same shape,
        `arrays` returns what it has for this process.
        """
        where, here = Region.of(torch.from_numpy(mine)), self._rank
        readers, others = readers - {here}, (readers | holders) - {here}
        with self._serving(name, where, readers, others) as region_of:
            # Every device starts with another peer.
            for peer in sorted(holders, key=lambda peer: (peer < here, peer)):
                table = mine
                if peer != here:
                    table = np.empty_like(mine)
                    there = region_of(peer, mine.shape, mine.itemsize)
                    self._fetch(peer, there, Region.of(torch.from_numpy(table)))
                self._fill_from(peer, arrays(peer, table))

    def _fill_from(self, peer: int, found: Iterable[Arrays]) -> None:
        """Read arrays with few gaps all together, the others one by one."""
        nothing: Ints = np.zeros((0, 2), dtype=np.int64)
        ours, theirs = [nothing], [nothing]
        for source, target, source_bases, target_bases in found:
            run, size = min(source.run_bytes, target.run_bytes), source.num_bytes
            if size <= min(BUFFER_BYTES, _FEW_RUNS * run):
                theirs.append(_rows(np.add.outer(source_bases, source.runs(run)), run))
                ours.append(_rows(np.add.outer(target_bases, target.runs(run)), run))
                continue
            for there, here in zip(source_bases.tolist(), target_bases.tolist(), strict=True):
                moved = source._replace(address=source.address + there)
                self._fetch(peer, moved, target._replace(address=target.address + here))
        with _naming(peer):
            _read_rows(self._pids[peer], np.concatenate(ours), np.concatenate(theirs))

    @contextmanager
    def _serving(
        self, name: str, mine: Region, readers: Iterable[int], peers: Iterable[int]
    ) -> Iterator[Callable[[int, tuple[int, ...], int], Region]]:
        """Let some peers read an array until they are done; yields where a peer has its own.

        That waits until it may be read, and checks shape and bytes an item.
        """
        deadline, step = time.monotonic() + self._timeout_s, zlib.crc32(name.encode())
        there: dict[int, Region] = {}

        def expect(kind: str, peer: int) -> bytes:
            note = self._connections[peer].receive(deadline)
            if note.failure:
                raise failed(peer, note)
            if (note.kind, note.ids) != (kind, step):
                raise CommunicatorError(f"rank {peer} carries out another step")
            return note.content

        def region_of(peer: int, shape: tuple[int, ...], item_bytes: int) -> Region:
            if peer not in there:
                found = there[peer] = Region(*pickle.loads(expect("readable", peer)))
                if (found.shape, found.item_bytes) != (shape, item_bytes):
                    raise CommunicatorError(
                        f"rank {peer} holds a shard of shape {found.shape} and {found.item_bytes} "
                        f"bytes an element where {shape} and {item_bytes} are expected"
                    )
            return there[peer]

        try:
            for peer in readers:
                self._connections[peer].send(Note("readable", step, content=pickle.dumps((*mine,))))
            yield region_of
            for peer in there:
                # A peer that fails closes its connections before it lets go of its shard, so what
                # was read from one that has not closed them is right.
                if self._connections[peer].has_ended():
                    raise CommunicatorError(f"rank {peer} has ended or given up this step")
                self._connections[peer].send(Note("done", step))
            for peer in readers:
                expect("done", peer)
        except BaseException as error:
            ended = [peer for peer in peers if self._connections[peer].has_ended()]
            said = [at.last_words() for at in map(self._connections.__getitem__, peers)]
            for connection in self._connections.values():
                connection.close()
            if not isinstance(error, CommunicatorError):
                raise
            gone = f"; {ranks_text(ended)} have ended or given up" if len(ended) > 1 else ""
            # Another rank may have given up this step because of one that has failed.
            why = next(filter(None, said), f"{error}{gone}")
            raise CommunicatorError(
                f"{name} with {ranks_text(peers)} failed: {why}"
            ) from error.__cause__

    def _fetch(self, peer: int, source: Region, target: Region) -> None:
        """Read runs of bytes one by one, or, where they are short, whole stretches with gaps."""
        pid, runs = self._pids[peer], source.num_bytes // min(source.run_bytes, target.run_bytes)
        far_apart = runs == 1 or source.span >= runs * _RUN_BYTES
        most = MOST_BYTES if far_apart else BUFFER_BYTES
        if (source.num_bytes if far_apart else source.span) > most:
            for half in source.halves():
                self._fetch(peer, source.part(half), target.part(half))
            return
        with _naming(peer):
            if far_apart:
                read(pid, source, target)
            else:
                staged = self._buffer[: source.span]
                read(pid, Region(source.address, (source.span,), (1,), 1), Region.of(staged))
                target.tensor().copy_(source._replace(address=staged.data_ptr()).tensor())


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Say whose memory it is that cannot be read."""
    try:
        yield
    except OSError as error:
        why = "it has ended" if error.errno == errno.ESRCH else error.strerror
        raise CommunicatorError(f"the memory of rank {peer} cannot be read: {why}") from error
