"""Memory of peers on the same host, read without their help: `process_vm_readv` (Linux, man 2).

A device tells those that want something of it where that lies; they read it into its place and say
so. Nothing is taken for granted: processes compare kernel and namespaces (`shardspec.comm.links`),
and try whether they can read each other. Whoever may trace a process may read it: one of the same
user, unless Yama or a container's filter says no.
"""

import ctypes
import errno
import os
import pickle
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardspec.boxes import Box, box_shape, box_size, slices_within
from shardspec.comm.agreement import Address, ranks_text
from shardspec.comm.links import Link
from shardspec.comm.messages import copy_own_part
from shardspec.comm.results import combine_into
from shardspec.comm.routes import Incoming, TransferSchedule, chunks
from shardspec.comm.steps import ReduceOp
from shardspec.errors import CommunicatorError

__all__ = ["BUFFER_BYTES", "MOST_BYTES", "Arrays", "PeerMemory", "Region", "read", "readable"]

BUFFER_BYTES: Final = 1 << 20
"""The most that lies in a buffer at once. Of addends it is how much is combined at once: about what
a core's own cache holds; less costs more in calls than it saves."""
MOST_BYTES: Final = 64 << 20
"""Bytes of an array in one call; the kernel stops at 2 GiB."""
_MOST_RUNS: Final = 1024
"""IOV_MAX: runs of bytes in one call."""
_RUN_BYTES: Final = 6 << 10
"""Fetching a run of bytes by itself costs as much time as reading so many in passing: 0.4 µs."""
_FEW_RUNS: Final = 128
"""Of an array: so many are read with those of other arrays in one call."""
_MOST_KNOWN: Final = 4
"""Exchanges whose reads are kept for the next time."""
_BY_WIDTH: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
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
        """Return the array, which is in this process and outlives the tensor, as whole numbers."""
        memory = (ctypes.c_char * self.span).from_address(self.address)
        steps = [stride // self.item_bytes for stride in self.strides]
        flat = torch.frombuffer(memory, dtype=_BY_WIDTH[self.item_bytes])
        return flat.as_strided(self.shape, steps)

    def moved(self, num_bytes: int) -> "Region":
        """Return the array that lies so many bytes behind."""
        return Region(self.address + num_bytes, self.shape, self.strides, self.item_bytes)

    def part(self, index: tuple[slice, ...]) -> "Region":
        """Return where a part of the array lies."""
        offset = sum(part.start * step for part, step in zip(index, self.strides, strict=True))
        shape = tuple(part.stop - part.start for part in index)
        return Region(self.address + offset, shape, self.strides, self.item_bytes)

    def halves(self) -> Iterator[tuple[slice, ...]]:
        """Yield two parts of an array of several elements, cut where it reaches farthest."""
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
        """Bytes from the first element to behind the last one, gaps included."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return reach + self.item_bytes if prod(self.shape) else 0

    @property
    def run_bytes(self) -> int:
        """Bytes that lie next to each other before the first gap."""
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
        # Dims that lie within one stretch count as one; what is left of a stretch is cut into runs.
        while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
            inner *= dims.pop()[0]
        for size, stride in [*dims, (inner // run, run)]:
            if size > 1:
                starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).ravel()
        return starts


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of another process to one here, of the same shape and element size.

    `OSError` says that the process has gone, may not be read, or has no such memory.
    """
    if source.num_bytes > MOST_BYTES:
        for half in source.halves():
            read(pid, source.part(half), target.part(half))
        return
    run = min(source.run_bytes, target.run_bytes)
    ours, theirs = (_rows(region.runs(run), run) for region in (target, source))
    _read_rows(pid, ours, theirs)


def _rows(addresses: Ints, length: int) -> Ints:
    """Return what the kernel takes: a row of address and length for each run."""
    rows: Ints = np.full((addresses.size, 2), length, dtype=np.int64)
    rows[:, 0] = addresses.ravel()
    return rows


def _read_rows(pid: int, ours: Ints, theirs: Ints) -> None:
    no_flags = ctypes.c_ulong(0)
    for first in range(0, len(ours), _MOST_RUNS):
        some = ours[first:][:_MOST_RUNS], theirs[first:][:_MOST_RUNS]
        here, there = (ctypes.c_void_p(rows.ctypes.data) for rows in some)
        count = ctypes.c_ulong(len(some[0]))
        got = _libc().process_vm_readv(pid, here, count, there, count, no_flags)
        if got != int(some[0][:, 1].sum()):
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, os.strerror(code))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def readable(addresses: Mapping[int, Address]) -> frozenset[int]:
    """Return which of some processes can be read, by reading what each says to have somewhere."""
    found = set()
    for peer, other in addresses.items():
        got, size = ctypes.create_string_buffer(len(other.content)), (len(other.content),)
        target = Region(ctypes.addressof(got), size, (1,), 1)
        with suppress(OSError):
            read(other.pid, Region(other.probe, size, (1,), 1), target)
            if got.raw == other.content:
                found.add(peer)
    return frozenset(found)


class Arrays(NamedTuple):
    """Arrays of one shape at a peer, and as many here: addresses count from the bases."""

    source: Region
    target: Region
    source_bases: Ints
    target_bases: Ints


class _Reads(NamedTuple):
    """How arrays of a peer are read: all with few gaps together, the others one by one."""

    ours: Ints
    theirs: Ints
    single: list[tuple[Region, Region]]


def _reads(arrays: Iterable[Arrays]) -> _Reads:
    nothing: Ints = np.zeros((0, 2), dtype=np.int64)
    ours, theirs = [nothing], [nothing]
    single: list[tuple[Region, Region]] = []
    for source, target, source_bases, target_bases in arrays:
        run, size = min(source.run_bytes, target.run_bytes), source.num_bytes
        if size > min(BUFFER_BYTES, _FEW_RUNS * run):
            for there, here in zip(source_bases.tolist(), target_bases.tolist(), strict=True):
                single.append((source.moved(there), target.moved(here)))
        elif size:
            theirs.append(_rows(np.add.outer(source_bases, source.runs(run)), run))
            ours.append(_rows(np.add.outer(target_bases, target.runs(run)), run))
    return _Reads(np.concatenate(ours), np.concatenate(theirs), single)


@dataclass(slots=True)
class _Known:
    """An exchange that may come again: who takes part, and how peers were read last."""

    readers: set[int]
    holders: set[int]
    reads: dict[int, tuple[Ints, _Reads]]


class PeerMemory:
    """Moves boxes between processes that all can read each other; a `Transport`.

    `links` lead to the other processes, by rank; for `timeout_s` one of them is waited for.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], timeout_s: float) -> None:
        self._rank, self._links, self._timeout_s = rank, links, timeout_s
        self._known: OrderedDict[tuple[str, bytes], _Known] = OrderedDict()
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in, and let others read; see `Transport`."""
        with self._serving_step(schedule, shard) as deadline:
            copy_own_part(schedule, shard, result)
            for peer, parts in _by_peer(schedule).items():
                there = self._receive_shard(schedule, parts[0], shard, deadline)
                for part in parts:
                    place = result[slices_within(part.box, schedule.after)]
                    self._fetch(peer, there.part(slices_within(part.box, part.source)), place)
                self._release(str(schedule.step), peer)

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with what the addends of all members come to; see `Transport`."""
        shares = result.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        with self._serving_step(schedule, shard) as deadline:
            there = {
                peer: self._receive_shard(schedule, parts[0], shard, deadline)
                for peer, parts in _by_peer(schedule).items()
            }
            most = max(1, min(box_size(schedule.after), BUFFER_BYTES // shard.element_size()))
            buffer, copy = shard.new_empty(most), shard.new_empty(most if shares else 0)
            for box in chunks(schedule.after, most):
                place = result[slices_within(box, schedule.after)]
                own = shard[slices_within(box, schedule.before)]
                if shares:  # the result takes its place, and it may not be the first
                    own = copy[: own.numel()].view(own.shape).copy_(own)
                into = buffer[: place.numel()].view(place.shape)
                combine_into(place, self._addends(schedule, there, box, own, place, into), op)
            for peer in there:
                self._release(str(schedule.step), peer)

    def _addends(
        self,
        schedule: TransferSchedule,
        there: Mapping[int, Region],
        box: Box,
        own: torch.Tensor,
        place: torch.Tensor,
        buffer: torch.Tensor,
    ) -> Iterator[torch.Tensor]:
        """Yield every member's addend of a box in their order: the first in its place."""
        for at, part in enumerate(schedule.incoming):
            if part.peer == schedule.device:
                yield own
            else:
                into = buffer if at else place
                source = there[part.peer].part(slices_within(box, part.source))
                self._fetch(part.peer, source, into)
                yield into

    def fill(
        self,
        name: str,
        tables: tuple[Ints, Ints],
        ends: Callable[[], tuple[set[int], set[int]]],
        arrays: Callable[[int, Ints], Iterable[Arrays]],
    ) -> None:
        """Fill many arrays here with arrays of peers, and with some of this process.

        Parameters
        ----------
        name
            What is done, the same on all ranks.
        tables
            Where arrays lie that peers read, and those that are filled: as long as both are the
            same, nothing is worked out anew. That of a peer has the shape of the first.
        ends
            Returns who reads here, and of whom this process reads.
        arrays
            Given a peer and its first table, returns what it has for this process.
        """
        key = name, b"".join(table.tobytes() for table in tables)
        if key not in self._known:
            while len(self._known) >= _MOST_KNOWN:
                self._known.popitem(last=False)
            self._known[key] = _Known(*ends(), {})
        known, mine = self._known[key], tables[0]
        self._known.move_to_end(key)
        where = Region(mine.ctypes.data, mine.shape, mine.strides, mine.itemsize)
        peers = (known.readers | known.holders) - {self._rank}
        with self._serving(name, where, known.readers - {self._rank}, peers) as deadline:
            # Every device starts with another peer.
            for peer in sorted(known.holders, key=lambda peer: (peer < self._rank, peer)):
                told, pid = mine, os.getpid()
                if peer != self._rank:
                    there = self._receive(name, peer, (mine.shape, mine.itemsize), deadline)
                    told, pid = np.empty_like(mine), self._links[peer].pid
                    self._fetch(peer, there, torch.from_numpy(told))
                before, reads = known.reads.get(peer, (None, None))
                if reads is None or before is None or not np.array_equal(told, before):
                    reads = _reads(arrays(peer, told))
                    known.reads[peer] = told, reads
                with _naming(peer):
                    _read_rows(pid, reads.ours, reads.theirs)
                for source, target in reads.single:
                    if peer == self._rank:
                        target.tensor().copy_(source.tensor())
                    else:
                        self._fetch(peer, source, target.tensor())
                if peer != self._rank:
                    self._release(name, peer)

    @contextmanager
    def _serving(
        self, name: str, where: Region, readers: Iterable[int], peers: Iterable[int]
    ) -> Iterator[float]:
        """Let some peers read an array until they say that they have; yields when to give up."""
        deadline = time.monotonic() + self._timeout_s
        told = pickle.dumps((where.address, where.shape, where.strides, where.item_bytes))
        try:
            for peer in readers:
                self._links[peer].send(_ready(name) + told)
            yield deadline
            for peer in readers:
                self._expect(_done(name), peer, deadline)
        except BaseException as error:
            ended = [peer for peer in peers if self._links[peer].has_ended()]
            for link in self._links.values():
                link.close()
            if not isinstance(error, CommunicatorError):
                raise
            gone = f"; {ranks_text(ended)} have ended or given up" if len(ended) > 1 else ""
            raise CommunicatorError(
                f"{name} with {ranks_text(peers)} failed: {error}{gone}"
            ) from error.__cause__

    def _serving_step(
        self, schedule: TransferSchedule, shard: torch.Tensor
    ) -> AbstractContextManager[float]:
        readers = dict.fromkeys(peer for peer, _ in schedule.outgoing)
        return self._serving(str(schedule.step), Region.of(shard), readers, schedule.peers)

    def _expect(self, start: bytes, peer: int, deadline: float) -> bytes:
        """Return what follows in the next message of a peer, which is to start so."""
        message = self._links[peer].receive(deadline)
        if not message.startswith(start):
            raise CommunicatorError(f"rank {peer} carries out another step")
        return message[len(start) :]

    def _receive(
        self, name: str, peer: int, due: tuple[tuple[int, ...], int], deadline: float
    ) -> Region:
        """Return where a peer's array lies, of the shape and bytes an element due, once ready."""
        there = Region(*pickle.loads(self._expect(_ready(name), peer, deadline)))
        if (there.shape, there.item_bytes) != due:
            raise CommunicatorError(
                f"rank {peer} holds a shard of shape {there.shape} and {there.item_bytes} "
                f"bytes an element where {due[0]} and {due[1]} are expected"
            )
        return there

    def _receive_shard(
        self, schedule: TransferSchedule, part: Incoming, shard: torch.Tensor, deadline: float
    ) -> Region:
        due = box_shape(part.source), shard.element_size()
        return self._receive(str(schedule.step), part.peer, due, deadline)

    def _release(self, name: str, peer: int) -> None:
        """Tell a peer that all has been read; until then it is there, if all is well."""
        # A peer that fails hangs up before it lets go of its shard. So what has been read from one
        # that has not hung up is right.
        if self._links[peer].has_ended():
            raise CommunicatorError(f"rank {peer} has ended or given up this step")
        self._links[peer].send(_done(name))

    def _fetch(self, peer: int, source: Region, place: torch.Tensor) -> None:
        """Read runs of bytes one by one, or, where they are short, whole stretches with gaps."""
        pid, target = self._links[peer].pid, Region.of(place)
        runs = source.num_bytes // min(source.run_bytes, target.run_bytes)
        with _naming(peer):
            if runs == 1 or source.span >= runs * _RUN_BYTES:
                read(pid, source, target)
            elif source.span > BUFFER_BYTES and place.numel() > 1:
                for half in source.halves():
                    self._fetch(peer, source.part(half), place[half])
            else:
                buffer = self._buffer[: source.span]
                read(pid, Region(source.address, (source.span,), (1,), 1), Region.of(buffer))
                steps = [stride // source.item_bytes for stride in source.strides]
                place.copy_(buffer.view(place.dtype).as_strided(source.shape, steps))


def _by_peer(schedule: TransferSchedule) -> dict[int, list[Incoming]]:
    """Sort what comes in by peer; every device starts with another peer."""
    order = {peer: at for at, peer in enumerate(schedule.members)}
    own = order.get(schedule.device, 0)
    found: dict[int, list[Incoming]] = {}
    for part in sorted(schedule.incoming, key=lambda p: (order[p.peer] - own) % len(order)):
        if part.peer != schedule.device:
            found.setdefault(part.peer, []).append(part)
    return found


def _ready(name: str) -> bytes:
    """Return how the message starts that something may be read in a step."""
    return b"R" + zlib.crc32(name.encode()).to_bytes(4, "little")


def _done(name: str) -> bytes:
    """Return the message that it has been read."""
    return b"D" + zlib.crc32(name.encode()).to_bytes(4, "little")


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Say whose memory it is that cannot be read."""
    try:
        yield
    except OSError as error:
        why = "it has ended" if error.errno == errno.ESRCH else error.strerror
        raise CommunicatorError(f"the memory of rank {peer} cannot be read: {why}") from error
