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
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import increment_version

from shardspec.comm.agreement import NOTE_ROOM, Address, Connection, Note, failed, ranks_text
from shardspec.comm.region import Ints, Region
from shardspec.comm.results import libc
from shardspec.comm.transfers import Message
from shardspec.comm.transports.stage import ShardsByPlace, Stage
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


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of another process, of 2 GiB at most, to one here of the same shape.

    `OSError` says that the process has gone, may not be read, or has no such memory.
    """
    run = min(source.run_bytes, target.run_bytes)
    ours, theirs = (_rows(region.runs(run), run) for region in (target, source))
    read_rows(pid, ours, theirs)


def _rows(addresses: Ints, length: int) -> Ints:
    """Return the kernel's ``iovec``: a row of address and length for each run."""
    rows: Ints = np.full((addresses.size, 2), length, dtype=np.int64)
    rows[:, 0] = addresses.ravel()
    return rows


def read_rows(pid: int, ours: Ints, theirs: Ints) -> None:
    """Copy runs of bytes of another process, a row of address and length for each."""
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
    """A `Transport` between processes that all can read each other, waiting for each `timeout_s`.

    A process says where its tensors are once they are readable, and each reader when it is done.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection], timeout_s: float) -> None:
        self._rank, self._connections, self._timeout_s = rank, connections, timeout_s
        self._pids = {rank: os.getpid(), **{peer: at.pid for peer, at in connections.items()}}
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    def move(self, stages: Iterable[Stage]) -> None:
        """Fill targets; see `Transport.move`. What is only moved needs no buffers."""
        here = self._rank
        for stage in stages:
            mine = _table(stage, stage.source)
            with self._serving(stage, mine) as table_of:
                filled = _table(stage, stage.target)
                for wave in stage.waves(2 * BUFFER_BYTES if stage.is_combined else None):
                    if stage.is_combined:
                        filled = _table(stage, stage.target)
                    # torch does not see the writing.
                    increment_version(list(stage.target.values()))
                    # Every device starts with another peer.
                    for peer in sorted(wave.receives, key=lambda peer: (peer < here, peer)):
                        theirs = mine if peer == here else table_of(peer)
                        pieces = wave.receives[peer]
                        self._fill_from(peer, _arrays(stage, pieces, peer, theirs, filled))

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
                place = target._replace(address=target.address + here)
                if peer == self._rank:
                    place.tensor().copy_(moved.tensor())
                else:
                    self.fetch(peer, moved, place)
        with _naming(peer):
            read_rows(self._pids[peer], np.concatenate(ours), np.concatenate(theirs))

    def reserve(self, first: Callable[[], tuple[int, int]], like: torch.Tensor) -> bool:  # noqa: ARG002
        """Make nothing; see `Transport.reserve`."""
        return False

    @contextmanager
    def _serving(self, stage: Stage, mine: Ints) -> Iterator[Callable[[int], Ints]]:
        """Let others read until they are done; yields what returns the table of a peer.

        That waits until it may be read.
        """
        name, readers, peers = stage.name, stage.readers, stage.readers | stage.senders
        deadline, step = time.monotonic() + self._timeout_s, zlib.crc32(name.encode())
        tables: dict[int, Ints] = {}

        def expect(kind: str, peer: int) -> bytes:
            note = self._connections[peer].receive(deadline)
            if note.failure:
                raise failed(peer, note)
            if (note.kind, note.ids) != (kind, step):
                raise CommunicatorError(f"rank {peer} carries out another step")
            return note.content

        def table_of(peer: int) -> Ints:
            if peer not in tables:
                shape, content = pickle.loads(expect("readable", peer))
                if shape != mine.shape:
                    raise CommunicatorError(f"rank {peer} has tensors of other dims")
                if isinstance(content, bytes):
                    tables[peer] = np.frombuffer(content, np.int64).reshape(shape)
                else:
                    there, tables[peer] = Region(*content), np.empty_like(mine)
                    self.fetch(peer, there, Region.of(torch.from_numpy(tables[peer])))
                    check_serving(peer)
            return tables[peer]

        def check_serving(peer: int) -> None:
            # A peer that fails closes its connections before it lets go of its memory, so what was
            # read from one that has not closed them is right.
            if self._connections[peer].has_ended():
                raise CommunicatorError(f"rank {peer} has ended or given up this step")

        try:
            # A short table goes with the note.
            short = mine.nbytes <= NOTE_ROOM // 2
            where = mine.tobytes() if short else tuple(Region.of(torch.from_numpy(mine)))
            note = Note("readable", step, content=pickle.dumps((mine.shape, where)))
            for peer in readers:
                self._connections[peer].send(note)
            yield table_of
            for peer in tables:
                check_serving(peer)
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

    def fetch(self, peer: int, source: Region, target: Region) -> None:
        """Read runs of bytes one by one, or, where they are short, whole stretches with gaps."""
        pid, runs = self._pids[peer], source.num_bytes // min(source.run_bytes, target.run_bytes)
        far_apart = runs == 1 or source.span >= runs * _RUN_BYTES
        most = MOST_BYTES if far_apart else BUFFER_BYTES
        if (source.num_bytes if far_apart else source.span) > most:
            for half in source.halves():
                self.fetch(peer, source.part(half), target.part(half))
            return
        with _naming(peer):
            if far_apart:
                read(pid, source, target)
            else:
                staged = self._buffer[: source.span]
                read(pid, Region(source.address, (source.span,), (1,), 1), Region.of(staged))
                target.tensor().copy_(source._replace(address=staged.data_ptr()).tensor())


def _table(stage: Stage, shards: ShardsByPlace) -> Ints:
    """Return by place where shards lie: address, bytes that they span, and strides in bytes."""
    width = 2 + stage.num_dims
    rows = [[0] * width for _ in range(stage.num_places)]
    for place, shard in shards.items():
        item = shard.element_size()
        strides = [stride * item for stride in shard.stride()]
        row = [shard.data_ptr(), Region.of(shard).span, *strides]
        rows[place][: len(row)] = row
    return np.array(rows, dtype=np.int64).reshape(stage.num_places, width)


def _arrays(stage: Stage, pieces: Message, peer: int, theirs: Ints, ours: Ints) -> Iterator[Arrays]:
    """Yield where boxes lie at a peer, and where they belong here, by both's tables."""
    for piece in pieces:
        tables = [table[np.asarray(piece.places)] for table in (theirs, ours)]
        strides = np.stack([table[:, 2:] for table in tables], axis=1)
        same = len(strides) == 1 or not (strides != strides[0]).any()
        for row in strides[:1] if same else np.unique(strides, axis=0):
            alike = slice(None) if same else (strides == row).all(axis=(1, 2))
            source_strides, target_strides = (tuple(side) for side in row.tolist())
            ends = (
                stage.source_region(piece, source_strides, peer),
                stage.target_region(piece, target_strides, stage.device),
            )
            item = stage.dtype_of(piece).itemsize
            source, target = (Region(at, shape, steps, item) for shape, steps, at in ends)
            if (tables[0][alike, 1] < source.address + source.span).any():
                raise CommunicatorError(f"rank {peer} holds smaller shards than are expected")
            yield Arrays(source, target, tables[0][alike, 0], tables[1][alike, 0])


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Say whose memory it is that cannot be read."""
    try:
        yield
    except OSError as error:
        why = "it has ended" if error.errno == errno.ESRCH else error.strerror
        raise CommunicatorError(f"the memory of rank {peer} cannot be read: {why}") from error
