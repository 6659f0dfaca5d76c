"""Boxes read straight out of the memory of peers on the same host.

A device tells those that want something of it where its shard lies; they read what they want into
its place with `process_vm_readv` (Linux, man 2) and say so. Whoever may trace a process may read
it: one of the same user, unless Yama or a container's filter says no. Nothing is taken for granted:
processes compare kernel and namespaces, and try it.
"""

import ctypes
import errno
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shardspec.boxes import Box, box_shape, box_size, slices_within
from shardspec.comm.agreement import ranks_text
from shardspec.comm.links import Address, Link
from shardspec.comm.messages import copy_own_part
from shardspec.comm.results import combine_into
from shardspec.comm.routes import Incoming, TransferSchedule, chunks
from shardspec.comm.steps import ReduceOp, Step
from shardspec.errors import CommunicatorError

__all__ = ["BUFFER_BYTES", "PeerMemory", "Region", "read", "readable"]

BUFFER_BYTES: Final = 1 << 20
"""The most that lies in a buffer at once. Of addends it is how much is combined at once: about what
a core's own cache holds; less costs more in calls than it saves."""
_RUN_BYTES: Final = 6 << 10
"""Fetching a run of bytes by itself costs as much time as reading so many in passing: 0.4 µs."""
_FEW_RUNS: Final = 128
"""Of an array: so many are read with those of other arrays in one call."""
_MOST_RUNS: Final = 1024
"""IOV_MAX: runs of bytes in one call."""
_MOST_BYTES: Final = 64 << 20
"""Bytes in one call; the kernel stops at 2 GiB."""

_Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Where an array lies in the memory of a process; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

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
        for half in (slice(0, middle), slice(middle, self.shape[widest])):
            yield tuple(
                half if dim == widest else slice(0, size) for dim, size in enumerate(self.shape)
            )

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

    def runs(self, run: int) -> _Addresses:
        """Return the address of every run of so many bytes, in the order of the elements."""
        starts: _Addresses = np.full(1, self.address, dtype=np.uint64)
        inner, dims = self.item_bytes, list(zip(self.shape, self.strides, strict=True))
        # Dims that lie within one stretch count as one; what is left of a stretch is cut into runs.
        while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
            inner *= dims.pop()[0]
        for size, stride in [*dims, (inner // run, run)]:
            steps: _Addresses = np.arange(size, dtype=np.uint64) * np.uint64(stride)
            starts = np.add.outer(starts, steps).ravel()
        return starts


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of another process to one here, of the same shape and element size.

    `OSError` says that the process has gone, may not be read, or has no such memory.
    """
    if source.num_bytes > _MOST_BYTES:
        for half in source.halves():
            read(pid, source.part(half), target.part(half))
        return
    run = min(source.run_bytes, target.run_bytes)
    theirs, ours = source.runs(run), target.runs(run)
    for first in range(0, len(ours), _MOST_RUNS):
        count = min(_MOST_RUNS, len(ours) - first)
        vectors: _Addresses = np.full((2, count, 2), run, dtype=np.uint64)
        vectors[0, :, 0], vectors[1, :, 0] = ours[first:][:count], theirs[first:][:count]
        _read_vectors(pid, vectors[0], vectors[1])


def _read_vectors(pid: int, ours: _Addresses, theirs: _Addresses) -> None:
    """Read at most `_MOST_RUNS` runs, given by rows of address and length."""
    ours, theirs = np.ascontiguousarray(ours), np.ascontiguousarray(theirs)
    here, there = (ctypes.c_void_p(vectors.ctypes.data) for vectors in (ours, theirs))
    length, no_flags = ctypes.c_ulong(len(ours)), ctypes.c_ulong(0)
    got = _libc().process_vm_readv(pid, here, length, there, length, no_flags)
    if got != int(ours[:, 1].sum()):
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


class PeerMemory:
    """Moves boxes between processes that all can read each other; a `Transport`.

    Parameters
    ----------
    links
        To the other processes, by rank.
    timeout_s
        How long to wait for one of them.
    """

    def __init__(self, links: Mapping[int, Link], timeout_s: float) -> None:
        self._links, self._timeout_s = links, timeout_s
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in, and let others read; see `Transport`."""
        with self._serving(schedule, shard) as deadline:
            copy_own_part(schedule, shard, result)
            for peer, parts in _by_peer(schedule).items():
                there = self._receive(schedule.step, parts[0], shard, deadline)
                for part in parts:
                    place = result[slices_within(part.box, schedule.after)]
                    self._fetch(peer, there.part(slices_within(part.box, part.source)), place)
                self._release(str(schedule.step), peer)

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with what the addends of all members come to; see `Transport`."""
        shares = result.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        with self._serving(schedule, shard) as deadline:
            there = {
                peer: self._receive(schedule.step, parts[0], shard, deadline)
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

    def exchange(
        self,
        name: str,
        outgoing: Mapping[int, Sequence[Region]],
        incoming: Mapping[int, Sequence[Region]],
        tensor_of: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Fill arrays here with arrays of peers; both ends list them in the same order.

        Parameters
        ----------
        name
            What is done, the same on all ranks.
        outgoing, incoming
            By peer, what it reads here, and what here is filled by what it has.
        tensor_of
            Given a peer and the number of an array, returns that as a tensor.
        """
        tables = {
            peer: np.array([n for one in regions for n in (one.address, *one.strides)], np.uint64)
            for peer, regions in outgoing.items()
        }
        where = {
            peer: pickle.dumps((table.ctypes.data, len(table))) for peer, table in tables.items()
        }
        peers = sorted({*outgoing, *incoming})
        with self._offering(name, where, peers) as deadline:
            for peer, places in incoming.items():
                address, length = pickle.loads(self._expect(_ready(name), peer, deadline))
                if length != sum(1 + len(place.strides) for place in places):
                    raise CommunicatorError(f"rank {peer} has other pieces for this rank")
                told = torch.empty(length, dtype=torch.int64)
                self._fetch(peer, Region(address, (length,), (8,), 8), told)
                self._fetch_all(peer, told.tolist(), places, tensor_of)
                self._release(name, peer)

    def _fetch_all(
        self,
        peer: int,
        told: list[int],
        places: Sequence[Region],
        tensor_of: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Read arrays of a peer: those with few gaps with one call for many."""
        ours: list[int] = []
        theirs: list[int] = []
        lengths: list[int] = []
        at = waiting = 0
        pid = self._links[peer].pid
        for number, place in enumerate(places):
            dims = len(place.shape)
            strides = tuple(told[at + 1 : at + 1 + dims])
            source = Region(told[at], place.shape, strides, place.item_bytes)
            at += 1 + dims
            run, size = min(source.run_bytes, place.run_bytes), place.num_bytes
            count = size // run
            if count > _FEW_RUNS or size > BUFFER_BYTES:
                self._fetch(peer, source, tensor_of(peer, number))
                continue
            if len(ours) + count > _MOST_RUNS or waiting + size > _MOST_BYTES:
                _read_runs(peer, pid, ours, theirs, lengths)
                ours, theirs, lengths, waiting = [], [], [], 0
            if count == 1:
                ours.append(place.address)
                theirs.append(source.address)
                lengths.append(size)
            else:
                ours += place.runs(run).tolist()
                theirs += source.runs(run).tolist()
                lengths += [run] * count
            waiting += size
        _read_runs(peer, pid, ours, theirs, lengths)

    def _serving(
        self, schedule: TransferSchedule, shard: torch.Tensor
    ) -> AbstractContextManager[float]:
        """Let others read the shard until they say that they have; yields when to give up."""
        region = _region(shard)
        where = pickle.dumps((region.address, region.shape, region.strides, region.item_bytes))
        readers = {peer: where for peer, _ in schedule.outgoing}
        return self._offering(str(schedule.step), readers, sorted(schedule.peers))

    @contextmanager
    def _offering(
        self, name: str, where: Mapping[int, bytes], peers: Sequence[int]
    ) -> Iterator[float]:
        """Tell readers where to read, and wait until they have; yields when to give up."""
        deadline = time.monotonic() + self._timeout_s
        try:
            for peer, told in where.items():
                self._links[peer].send(_ready(name) + told)
            yield deadline
            for peer in where:
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

    def _expect(self, start: bytes, peer: int, deadline: float) -> bytes:
        """Return what follows in the next message of a peer, which is to start so."""
        message = self._links[peer].receive(deadline)
        if not message.startswith(start):
            raise CommunicatorError(f"rank {peer} carries out another step")
        return message[len(start) :]

    def _receive(self, step: Step, part: Incoming, shard: torch.Tensor, deadline: float) -> Region:
        """Return where a peer's shard lies, once it is ready."""
        there = Region(*pickle.loads(self._expect(_ready(str(step)), part.peer, deadline)))
        expected = (box_shape(part.source), shard.element_size())
        if (there.shape, there.item_bytes) != expected:
            raise CommunicatorError(
                f"rank {part.peer} holds a shard of shape {there.shape} and {there.item_bytes} "
                f"bytes an element where {expected[0]} and {expected[1]} are expected"
            )
        return there

    def _release(self, name: str, peer: int) -> None:
        """Tell a peer that all has been read; until then it is there, if all is well."""
        # A peer that fails hangs up before it lets go of its shard. So what has been read from one
        # that has not hung up is right.
        if self._links[peer].has_ended():
            raise CommunicatorError(f"rank {peer} has ended or given up this step")
        self._links[peer].send(_done(name))

    def _fetch(self, peer: int, source: Region, place: torch.Tensor) -> None:
        """Read runs of bytes one by one, or, where they are short, whole stretches with gaps."""
        pid, target = self._links[peer].pid, _region(place)
        runs = source.num_bytes // min(source.run_bytes, target.run_bytes)
        try:
            if runs == 1 or source.span >= runs * _RUN_BYTES:
                read(pid, source, target)
            elif source.span > BUFFER_BYTES and place.numel() > 1:
                for half in source.halves():
                    self._fetch(peer, source.part(half), place[half])
            else:
                buffer = self._buffer[: source.span]
                read(pid, Region(source.address, (source.span,), (1,), 1), _region(buffer))
                steps = [stride // source.item_bytes for stride in source.strides]
                place.copy_(buffer.view(place.dtype).as_strided(source.shape, steps))
        except OSError as error:
            raise _unread(peer, error) from error


def _by_peer(schedule: TransferSchedule) -> dict[int, list[Incoming]]:
    """Sort what comes in by peer; every device starts with another peer."""
    order = {peer: at for at, peer in enumerate(schedule.members)}
    own = order.get(schedule.device, 0)
    found: dict[int, list[Incoming]] = {}
    for part in sorted(schedule.incoming, key=lambda p: (order[p.peer] - own) % len(order)):
        if part.peer != schedule.device:
            found.setdefault(part.peer, []).append(part)
    return found


def _region(tensor: torch.Tensor) -> Region:
    item = tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    return Region(tensor.data_ptr(), tuple(tensor.shape), strides, item)


def _read_runs(peer: int, pid: int, ours: list[int], theirs: list[int], lengths: list[int]) -> None:
    if not ours:
        return
    here, there = (np.array([at, lengths], dtype=np.uint64).T for at in (ours, theirs))
    try:
        _read_vectors(pid, here, there)
    except OSError as error:
        raise _unread(peer, error) from error


def _ready(name: str) -> bytes:
    """Return how the message starts that something may be read in a step."""
    return b"R" + zlib.crc32(name.encode()).to_bytes(4, "little")


def _done(name: str) -> bytes:
    """Return the message that it has been read."""
    return b"D" + zlib.crc32(name.encode()).to_bytes(4, "little")


def _unread(peer: int, error: OSError) -> CommunicatorError:
    why = "it has ended" if error.errno == errno.ESRCH else error.strerror
    return CommunicatorError(f"the memory of rank {peer} cannot be read: {why}")
