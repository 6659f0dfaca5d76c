"""Boxes read straight out of the memory of peers on the same host.

A device tells those that want something of it where its shard lies; they read what they want into
its place with `process_vm_readv` (Linux, man 2) and say so. These notes go over sockets of the
system; nothing else is sent and there are no copies on the way. Whoever may trace a process may
read it: one of the same user, unless Yama or a container's filter says no. Nothing is taken for
granted: processes compare kernel and namespaces, and try it.
"""

import ctypes
import errno
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shardspec.boxes import Box, box_shape, box_size, slices_within
from shardspec.comm.control import Address, Link, ranks_text
from shardspec.comm.results import combine_into
from shardspec.comm.routes import Incoming, TransferSchedule, chunks
from shardspec.comm.steps import ReduceOp, Step
from shardspec.comm.transport import copy_own_part
from shardspec.errors import CommunicatorError

__all__ = ["BUFFER_BYTES", "PeerMemory", "Region", "read", "readable"]

BUFFER_BYTES: Final = 1 << 20
"""The most that lies in a buffer at once. Of addends it is how much is combined at once: about what
a core's own cache holds; less costs more in calls than it saves."""
_RUN_BYTES: Final = 6 << 10
"""Fetching a run of bytes by itself costs as much time as reading so many in passing: 0.4 µs."""
_MOST_RUNS: Final = 1024
"""IOV_MAX: runs of bytes in one call."""
_MOST_BYTES: Final = 64 << 20
"""Bytes in one call; the kernel stops at 2 GiB."""
_READY: Final = b"R"
_DONE: Final = b"D"
_WHERE: Final = struct.Struct("<QI")
"""Address and bytes of an element; shape and strides follow."""

_Runs = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Region:
    """Where an array lies in the memory of a process; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    def part(self, starts: Sequence[int], shape: Sequence[int]) -> "Region":
        """Return where a part of the array lies."""
        offset = sum(at * stride for at, stride in zip(starts, self.strides, strict=True))
        return Region(self.address + offset, tuple(shape), self.strides, self.item_bytes)

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


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of another process to one here, of the same shape and element size.

    `OSError` says that the process has gone, may not be read, or has no such memory.
    """
    run = min(source.run_bytes, target.run_bytes)
    theirs, ours = _starts(source, run), _starts(target, run)
    if run > _MOST_BYTES:
        for first in range(0, run, _MOST_BYTES):
            at = np.uint64(first)
            for there, here in zip(theirs + at, ours + at, strict=True):
                _call(pid, [there], [here], min(_MOST_BYTES, run - first))
        return
    at_once = max(1, min(_MOST_RUNS, _MOST_BYTES // run))
    for first in range(0, len(theirs), at_once):
        _call(pid, theirs[first : first + at_once], ours[first : first + at_once], run)


def _starts(region: Region, run: int) -> _Runs:
    """Return the address of every run of so many bytes, in the order of the elements."""
    starts: _Runs = np.full(1, region.address, dtype=np.uint64)
    inner = region.item_bytes
    dims = list(zip(region.shape, region.strides, strict=True))
    # Dims that lie within one stretch count as one; what is left of a stretch is cut into runs.
    while dims and (dims[-1][0] == 1 or dims[-1][1] == inner):
        inner *= dims.pop()[0]
    if inner > run:
        dims.append((inner // run, run))
    for size, stride in dims:
        steps: _Runs = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        starts = np.add.outer(starts, steps).ravel()
    return starts


def _call(
    pid: int, theirs: _Runs | list[np.uint64], ours: _Runs | list[np.uint64], run: int
) -> None:
    vectors: _Runs = np.empty((2, len(ours), 2), dtype=np.uint64)
    vectors[0, :, 0], vectors[1, :, 0], vectors[:, :, 1] = ours, theirs, run
    here, there = (ctypes.c_void_p(vectors[side].ctypes.data) for side in (0, 1))
    count, no_flags = ctypes.c_ulong(len(ours)), ctypes.c_ulong(0)
    got = _libc().process_vm_readv(pid, here, count, there, count, no_flags)
    if got != len(ours) * run:
        code = ctypes.get_errno() if got < 0 else errno.EFAULT
        raise OSError(code, os.strerror(code))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def readable(others: Mapping[int, Address]) -> frozenset[int]:
    """Return which of some processes can be read, by reading what each says to have somewhere."""
    found = set()
    for peer, other in others.items():
        got, size = ctypes.create_string_buffer(len(other.content)), (len(other.content),)
        target = Region(ctypes.addressof(got), size, (1,), 1)
        with suppress(OSError):
            read(other.pid, Region(other.probe, size, (1,), 1), target)
            if got.raw == other.content:
                found.add(peer)
    return frozenset(found)


class PeerMemory:
    """Moves boxes between processes that can read each other; a `Transport`.

    It has links to the processes that are reached, knows for every rank of the mesh which others it
    can read, and waits for a peer so many seconds at most.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        readable: Mapping[int, frozenset[int]],
        timeout_s: float,
    ) -> None:
        self._links, self._readable, self._timeout_s = links, readable, timeout_s
        self._joined: dict[tuple[int, ...], bool] = {}

    def joins(self, members: tuple[int, ...]) -> bool:
        """Say whether each of some ranks can read each other one; all of them say the same."""
        if members not in self._joined:
            self._joined[members] = all(
                a in self._readable[b] and b in self._readable[a]
                for a, b in combinations(members, 2)
            )
        return self._joined[members]

    def move(self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor) -> None:
        """Fill the result with what comes in, and let others read; see `Transport`."""
        with self._serving(schedule, shard) as deadline:
            copy_own_part(schedule, shard, result)
            for peer, parts in _by_peer(schedule).items():
                there = self._receive(schedule.step, peer, parts[0], shard, deadline)
                for part in parts:
                    place = result[slices_within(part.box, schedule.after)]
                    self._fetch(peer, _part_of(there, part), place)
                self._release(schedule.step, peer)

    def reduce(
        self, schedule: TransferSchedule, shard: torch.Tensor, result: torch.Tensor, op: ReduceOp
    ) -> None:
        """Fill the result with what the addends of all members come to; see `Transport`."""
        shares = result.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        with self._serving(schedule, shard) as deadline:
            there = {
                peer: self._receive(schedule.step, peer, parts[0], shard, deadline)
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
                self._release(schedule.step, peer)

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
                source = _part_of(there[part.peer], Incoming(part.peer, box, part.held))
                self._fetch(part.peer, source, into)
                yield into

    @contextmanager
    def _serving(self, schedule: TransferSchedule, shard: torch.Tensor) -> Iterator[float]:
        """Let others read the shard until they say that they have; yields when to give up."""
        deadline = time.monotonic() + self._timeout_s
        sources = [part.peer for part in schedule.incoming if part.peer != schedule.device]
        readers = dict.fromkeys(peer for peer, _ in schedule.outgoing)
        try:
            for peer in readers:
                self._links[peer].send(_kind(_READY, schedule.step) + _where(shard))
            yield deadline
            for peer in readers:
                self._expect(_kind(_DONE, schedule.step), peer, deadline)
        except BaseException as error:
            peers = {*sources, *readers}
            ended = [peer for peer in peers if self._links[peer].has_ended()]
            for link in self._links.values():
                link.close()
            if not isinstance(error, CommunicatorError):
                raise
            gone = f"; {ranks_text(ended)} have ended or given up" if len(ended) > 1 else ""
            raise CommunicatorError(
                f"{schedule.step} with {ranks_text(peers)} failed: {error}{gone}"
            ) from error.__cause__

    def _expect(self, kind: bytes, peer: int, deadline: float) -> bytes:
        """Return what follows in the next note of a peer, which is to be of one kind."""
        note = self._links[peer].receive(deadline)
        if not note.startswith(kind):
            raise CommunicatorError(f"rank {peer} carries out another step")
        return note[len(kind) :]

    def _receive(
        self, step: Step, peer: int, part: Incoming, shard: torch.Tensor, deadline: float
    ) -> Region:
        """Return where a peer's shard lies, once it is ready."""
        said = self._expect(_kind(_READY, step), peer, deadline)
        dims, expected = len(part.held), (*box_shape(part.held), shard.element_size())
        numbers = struct.unpack(f"<{(len(said) - _WHERE.size) // 8}q", said[_WHERE.size :])
        address, item_bytes = _WHERE.unpack_from(said)
        if (*numbers[:dims], item_bytes) != expected or len(numbers) != 2 * dims:
            raise CommunicatorError(
                f"rank {peer} holds a shard of shape {numbers[:dims]} and {item_bytes} bytes an "
                f"element where {expected[:-1]} and {expected[-1]} are expected"
            )
        return Region(address, numbers[:dims], numbers[dims:], item_bytes)

    def _release(self, step: Step, peer: int) -> None:
        """Tell a peer that all has been read; until then it is there, if all is well."""
        # A peer that fails hangs up before it lets go of its shard. So what has been read from one
        # that has not hung up is right.
        if self._links[peer].has_ended():
            raise CommunicatorError(f"rank {peer} has ended or given up this step")
        self._links[peer].send(_kind(_DONE, step))

    def _fetch(self, peer: int, source: Region, place: torch.Tensor) -> None:
        target = _region(place)
        runs = prod(source.shape) * source.item_bytes // min(source.run_bytes, target.run_bytes)
        try:
            if runs == 1 or source.span >= runs * _RUN_BYTES:
                read(self._links[peer].pid, source, target)
            else:
                self._fetch_span(peer, source, place)
        except OSError as error:
            why = "it has ended" if error.errno == errno.ESRCH else error.strerror
            raise CommunicatorError(f"the memory of rank {peer} cannot be read: {why}") from error

    def _fetch_span(self, peer: int, source: Region, place: torch.Tensor) -> None:
        """Read the whole stretch in which short rows lie, so much at a time as fits the buffer."""
        if source.span > BUFFER_BYTES and place.numel() > 1:
            dims = [dim for dim, size in enumerate(source.shape) if size > 1]
            widest = max(dims, key=lambda dim: source.strides[dim])
            size = source.shape[widest]
            for start, stop in ((0, size // 2), (size // 2, size)):
                starts, shape = [0] * place.dim(), list(source.shape)
                starts[widest], shape[widest] = start, stop - start
                part = place.narrow(widest, start, stop - start)
                self._fetch_span(peer, source.part(starts, shape), part)
            return
        buffer = torch.empty(source.span, dtype=torch.uint8)
        stretch = Region(source.address, (source.span,), (1,), 1)
        read(self._links[peer].pid, stretch, _region(buffer))
        steps = [stride // source.item_bytes for stride in source.strides]
        place.copy_(buffer.view(place.dtype).as_strided(source.shape, steps))


def _by_peer(schedule: TransferSchedule) -> dict[int, list[Incoming]]:
    """Sort what comes in by peer; every device starts with another peer."""
    order = {peer: at for at, peer in enumerate(schedule.members)}
    own = order.get(schedule.device, 0)
    found: dict[int, list[Incoming]] = {}
    others = [part for part in schedule.incoming if part.peer != schedule.device]
    for part in sorted(others, key=lambda p: (order[p.peer] - own) % len(order)):
        found.setdefault(part.peer, []).append(part)
    return found


def _region(tensor: torch.Tensor) -> Region:
    item = tensor.element_size()
    strides = tuple(stride * item for stride in tensor.stride())
    return Region(tensor.data_ptr(), tuple(tensor.shape), strides, item)


def _part_of(held: Region, part: Incoming) -> Region:
    starts = [lo - held_lo for (lo, _), (held_lo, _) in zip(part.box, part.held, strict=True)]
    return held.part(starts, box_shape(part.box))


def _kind(kind: bytes, step: Step) -> bytes:
    """Return how a note begins: what it is, and of which step."""
    return kind + zlib.crc32(str(step).encode()).to_bytes(4, "little")


def _where(shard: torch.Tensor) -> bytes:
    region = _region(shard)
    numbers = (*region.shape, *region.strides)
    return _WHERE.pack(region.address, region.item_bytes) + struct.pack(
        f"<{len(numbers)}q", *numbers
    )
