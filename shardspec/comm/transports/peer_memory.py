"""A transport that reads the memory of peers on one host, by `process_vm_readv` (Linux, man 2).

A device sends its readers the address of its shard; they copy what they need and answer when they
are done. Processes first compare kernel and namespaces (`agreement.Address`) and try to read each
other, which is allowed within one user unless Yama or a container's filter forbids it.
"""

import ctypes
import errno
import os
import pickle
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.autograd.graph import increment_version

from shardspec.comm.agreement import NOTE_ROOM, Address, Connection, Note, failed, ranks_text
from shardspec.comm.region import Ints, Region
from shardspec.comm.results import libc
from shardspec.comm.transfers import Message
from shardspec.comm.transports.stage import Stage
from shardspec.errors import CommunicatorError

BUFFER_BYTES: Final = 1 << 20
"""The most bytes staged at once, and half of the addends combined at once: about the size of a
core's cache."""
MOST_BYTES: Final = 64 << 20
"""The most bytes of an array per call; the kernel stops at 2 GiB."""
_MOST_RUNS: Final = 1024
"""The most runs of bytes per call: IOV_MAX."""
_RUN_BYTES: Final = 6 << 10
"""One extra iovec costs as much as copying this many bytes: 0.4 µs."""
_FEW_RUNS: Final = 128
"""Arrays of at most this many runs are read together in one call."""


def read(pid: int, source: Region, target: Region) -> None:
    """Copy an array of at most 2 GiB from another process to an array of the same shape here.

    Raises `OSError` if the process has ended, may not be read, or has no such memory.
    """
    run = min(source.run_bytes, target.run_bytes)
    ours, theirs = (_rows(region.runs(run), run) for region in (target, source))
    read_rows(pid, ours, theirs)


def _rows(addresses: Ints, length: int) -> Ints:
    """Return the kernel's ``iovec`` array: a row of address and length per run."""
    rows: Ints = np.full((addresses.size, 2), length, dtype=np.int64)
    rows[:, 0] = addresses.ravel()
    return rows


def read_rows(pid: int, ours: Ints, theirs: Ints) -> None:
    """Copy runs of bytes from another process, given rows of address and length on both sides.

    Raises `OSError`; see `read`.
    """
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


def readable(addresses: Mapping[int, Address]) -> frozenset[int]:
    """Return the peers whose memory can be read, as tried on the name of each one's socket."""
    peers = set()
    for peer, other in addresses.items():
        name = other.socket.encode()
        got = ctypes.create_string_buffer(len(name))
        target = Region(ctypes.addressof(got), (len(name),), (1,), 1)
        with suppress(OSError):
            read(other.pid, target._replace(address=other.probe), target)
            if got.raw == name:
                peers.add(peer)
    return frozenset(peers)


Table: TypeAlias = Mapping[int, tuple[int, int, tuple[int, ...]]]
"""By place, the address, span and strides of a shard, in bytes."""


class Arrays(NamedTuple):
    """Arrays of one shape at a peer, and their targets here; regions are relative to the bases."""

    source: Region
    target: Region
    source_bases: Sequence[int]
    target_bases: Sequence[int]


class PeerMemory:
    """A `Transport` between processes that can all read each other's memory.

    A process sends the addresses of its tensors once they are readable, and every reader answers
    when it is done. Waiting for a peer ends after `timeout_s`.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection], timeout_s: float) -> None:
        self._rank, self._connections, self._timeout_s = rank, connections, timeout_s
        self._pids = {rank: os.getpid(), **{peer: at.pid for peer, at in connections.items()}}
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    def move(self, stages: Iterable[Stage]) -> None:
        """Fill targets; see `Transport.move`. Only addends need buffers."""
        rank = self._rank
        for stage in stages:
            regions = {place: Region.of(shard) for place, shard in stage.source.items()}
            mine = {place: (at.address, at.span, at.strides) for place, at in regions.items()}
            with self._serving(stage, mine) as table_of:
                for wave in stage.waves(2 * BUFFER_BYTES if stage.is_combined else None):
                    # torch does not notice these writes by itself.
                    increment_version(list(stage.target.values()))
                    # Devices start with different peers, to spread the load.
                    for peer in sorted(wave.receives, key=lambda peer: (peer < rank, peer)):
                        theirs = mine if peer == rank else table_of(peer)
                        self._fill_from(peer, _arrays(stage, wave.receives[peer], peer, theirs))

    def _fill_from(self, peer: int, arrays: Iterable[Arrays]) -> None:
        """Read arrays of few runs in one call, and others one at a time."""
        nothing: Ints = np.zeros((0, 2), dtype=np.int64)
        ours, theirs = [nothing], [nothing]
        for source, target, source_bases, target_bases in arrays:
            run, size = min(source.run_bytes, target.run_bytes), source.num_bytes
            if size <= min(BUFFER_BYTES, _FEW_RUNS * run):
                theirs.append(_rows(np.add.outer(source_bases, source.runs(run)), run))
                ours.append(_rows(np.add.outer(target_bases, target.runs(run)), run))
                continue
            for source_base, target_base in zip(source_bases, target_bases, strict=True):
                moved = source._replace(address=source.address + source_base)
                place = target._replace(address=target.address + target_base)
                if peer == self._rank:
                    place.tensor().copy_(moved.tensor())
                else:
                    self.fetch(peer, moved, place)
        with _naming(peer):
            read_rows(self._pids[peer], np.concatenate(ours), np.concatenate(theirs))

    def reserve(self, first: Callable[[], tuple[int, int]], like: torch.Tensor) -> bool:  # noqa: ARG002
        """Return False: no buffers are needed; see `Transport.reserve`."""
        return False

    @contextmanager
    def _serving(self, stage: Stage, mine: Table) -> Iterator[Callable[[int], Table]]:
        """Let others read until they are done; yield a function that returns a peer's table.

        The function waits until the peer's memory may be read.
        """
        name, readers, peers = stage.name, stage.readers, stage.readers | stage.senders
        deadline, step = time.monotonic() + self._timeout_s, zlib.crc32(name.encode())
        tables: dict[int, Table] = {}

        def expect(kind: str, peer: int) -> bytes:
            note = self._connections[peer].receive(deadline)
            if note.failure:
                raise failed(peer, note)
            if (note.kind, note.ids) != (kind, step):
                raise CommunicatorError(f"rank {peer} carries out another step")
            return note.content

        def table_of(peer: int) -> Table:
            if peer not in tables:
                table = pickle.loads(expect("readable", peer))
                if isinstance(table, Region):
                    pickled = torch.empty(table.shape, dtype=torch.uint8)
                    self.fetch(peer, table, Region.of(pickled))
                    check_serving(peer)
                    table = pickle.loads(pickled.numpy().tobytes())
                tables[peer] = table
            return tables[peer]

        def check_serving(peer: int) -> None:
            # A failing peer closes its connections before it frees its memory, so data read from a
            # peer with open connections is valid.
            if self._connections[peer].has_ended():
                raise CommunicatorError(f"rank {peer} has ended or given up this step")

        try:
            content = pickle.dumps(mine)
            memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if len(content) > NOTE_ROOM // 2:  # only a short table travels in the note
                content = pickle.dumps(Region.of(memory))
            note = Note("readable", step, content=content)
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
            failures = [at.last_words() for at in map(self._connections.__getitem__, peers)]
            for connection in self._connections.values():
                connection.close()
            if not isinstance(error, CommunicatorError):
                raise
            gone = f"; {ranks_text(ended)} have ended or given up" if len(ended) > 1 else ""
            # Prefer the error of a failed rank to that of ranks that gave up because of it.
            why = next(filter(None, failures), f"{error}{gone}")
            raise CommunicatorError(
                f"{name} with {ranks_text(peers)} failed: {why}"
            ) from error.__cause__

    def fetch(self, peer: int, source: Region, target: Region) -> None:
        """Copy an array of a peer, run by run, or whole stretches with gaps if runs are short."""
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


def _arrays(stage: Stage, pieces: Message, peer: int, theirs: Table) -> Iterator[Arrays]:
    """Yield the arrays of a message at a peer, by its table, with their targets here."""
    for piece in pieces:
        item = stage.dtype_of(piece).itemsize
        alike: defaultdict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = defaultdict(list)
        for place in piece.places:
            (address, span, strides), shard = theirs[place], stage.target[place]
            alike[strides, shard.stride()].append((address, shard.data_ptr(), span))
        for (strides, own_strides), places in alike.items():
            own_steps = tuple(stride * item for stride in own_strides)
            ends = (
                stage.source_region(piece, strides, peer),
                stage.target_region(piece, own_steps, stage.device),
            )
            source, target = (Region(at, shape, steps, item) for shape, steps, at in ends)
            source_bases, target_bases, spans = zip(*places, strict=True)
            if min(spans) < source.address + source.span:
                raise CommunicatorError(f"rank {peer} holds smaller shards than are expected")
            yield Arrays(source, target, source_bases, target_bases)


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Turn an `OSError` into a `CommunicatorError` that names the rank that cannot be read."""
    try:
        yield
    except OSError as error:
        why = "it has ended" if error.errno == errno.ESRCH else error.strerror
        raise CommunicatorError(f"the memory of rank {peer} cannot be read: {why}") from error
