"""Boxes read straight out of the memory of peers on the same host.

A device tells those that want something of it where its shard lies; they read what they want into
its place and say so. Nothing is taken for granted: processes compare kernel and namespaces, and try
whether they can read each other.
"""

import errno
import pickle
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch

from shardspec.boxes import Box, box_shape, box_size, slices_within
from shardspec.comm.agreement import ranks_text
from shardspec.comm.links import Link
from shardspec.comm.messages import copy_own_part
from shardspec.comm.process_memory import (
    MOST_BYTES,
    MOST_RUNS,
    Addresses,
    Region,
    read,
    read_vectors,
)
from shardspec.comm.results import combine_into
from shardspec.comm.routes import Incoming, TransferSchedule, chunks
from shardspec.comm.steps import ReduceOp, Step
from shardspec.errors import CommunicatorError

__all__ = ["BUFFER_BYTES", "PeerMemory"]

BUFFER_BYTES: Final = 1 << 20
"""The most that lies in a buffer at once. Of addends it is how much is combined at once: about what
a core's own cache holds; less costs more in calls than it saves."""
_RUN_BYTES: Final = 6 << 10
"""Fetching a run of bytes by itself costs as much time as reading so many in passing: 0.4 µs."""
_FEW_RUNS: Final = 128
"""Of an array: so many are read with those of other arrays in one call."""
_MOST_PREPARED: Final = 4
"""Exchanges whose reads are kept for the next time."""

_Regions: TypeAlias = Mapping[int, Sequence[Region]]
"""By peer."""


@dataclass(frozen=True, slots=True)
class _Reads:
    """How arrays of a peer are read: those with few gaps with one call for many."""

    runs: list[tuple[Addresses, Addresses]]
    """For each call, addresses and lengths here and there."""
    single: list[tuple[Region, int]]
    """Where the others lie, and their numbers."""


class _Exchange:
    """An exchange that may come again: tables that peers read, and how theirs were read last."""

    __slots__ = ("places", "reads", "tables")

    def __init__(self, outgoing: _Regions, incoming: _Regions) -> None:
        self.tables = {
            peer: np.array([n for one in regions for n in (one.address, *one.strides)], np.uint64)
            for peer, regions in outgoing.items()
        }
        self.places = incoming
        self.reads: dict[int, tuple[torch.Tensor, _Reads]] = {}


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
        self._prepared: OrderedDict[Hashable, _Exchange] = OrderedDict()
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
        key: Hashable,
        arrays: Callable[[], tuple[_Regions, _Regions]],
        tensor_of: Callable[[int, int], torch.Tensor],
    ) -> None:
        """Fill arrays here with arrays of peers; both ends list them in the same order.

        Parameters
        ----------
        name
            What is done, the same on all ranks.
        key
            What tells the arrays from others: as long as it is the same, they lie where they lay.
        arrays
            Returns by peer what it reads here, and what here is filled by what it has.
        tensor_of
            Given a peer and the number of an array, returns that as a tensor.
        """
        if (name, key) not in self._prepared:
            while len(self._prepared) >= _MOST_PREPARED:
                self._prepared.popitem(last=False)
            self._prepared[name, key] = _Exchange(*arrays())
        known = self._prepared[name, key]
        self._prepared.move_to_end((name, key))
        where = {
            peer: pickle.dumps((table.ctypes.data, len(table)))
            for peer, table in known.tables.items()
        }
        peers = sorted({*where, *known.places})
        with self._offering(name, where, peers) as deadline:
            for peer, places in known.places.items():
                address, length = pickle.loads(self._expect(_ready(name), peer, deadline))
                if length != sum(1 + len(place.strides) for place in places):
                    raise CommunicatorError(f"rank {peer} has other pieces for this rank")
                told = torch.empty(length, dtype=torch.int64)
                self._fetch(peer, Region(address, (length,), (8,), 8), told)
                before, reads = known.reads.get(peer, (None, None))
                if reads is None or before is None or not torch.equal(told, before):
                    reads = _reads(told.tolist(), places)
                    known.reads[peer] = told, reads
                try:
                    for here, there in reads.runs:
                        read_vectors(self._links[peer].pid, here, there)
                except OSError as error:
                    raise _unread(peer, error) from error
                for source, number in reads.single:
                    self._fetch(peer, source, tensor_of(peer, number))
                self._release(name, peer)

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


def _reads(told: Sequence[int], places: Sequence[Region]) -> _Reads:
    """Return how to read arrays of a peer, which has told address and strides of each."""
    found = _Reads([], [])
    ours: list[int] = []
    theirs: list[int] = []
    lengths: list[int] = []
    at = waiting = 0

    def end_call() -> None:
        if ours:
            here, there = (np.array([at, lengths], dtype=np.uint64).T for at in (ours, theirs))
            found.runs.append((np.ascontiguousarray(here), np.ascontiguousarray(there)))
        for values in (ours, theirs, lengths):
            values.clear()

    for number, place in enumerate(places):
        dims = len(place.shape)
        strides = tuple(told[at + 1 : at + 1 + dims])
        source = Region(told[at], place.shape, strides, place.item_bytes)
        at += 1 + dims
        run, size = min(source.run_bytes, place.run_bytes), place.num_bytes
        count = size // run
        if count > _FEW_RUNS or size > BUFFER_BYTES:
            found.single.append((source, number))
            continue
        if len(ours) + count > MOST_RUNS or waiting + size > MOST_BYTES:
            end_call()
            waiting = 0
        if count == 1:
            ours.append(place.address)
            theirs.append(source.address)
            lengths.append(size)
        else:
            ours += place.runs(run).tolist()
            theirs += source.runs(run).tolist()
            lengths += [run] * count
        waiting += size
    end_call()
    return found


def _ready(name: str) -> bytes:
    """Return how the message starts that something may be read in a step."""
    return b"R" + zlib.crc32(name.encode()).to_bytes(4, "little")


def _done(name: str) -> bytes:
    """Return the message that it has been read."""
    return b"D" + zlib.crc32(name.encode()).to_bytes(4, "little")


def _unread(peer: int, error: OSError) -> CommunicatorError:
    why = "it has ended" if error.errno == errno.ESRCH else error.strerror
    return CommunicatorError(f"the memory of rank {peer} cannot be read: {why}")
