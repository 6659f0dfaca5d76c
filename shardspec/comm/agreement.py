"""What ranks tell each other before anything moves, and whether they agree on it.

Processes of one host are connected by Unix sockets, which the system closes when a process ends.
The process id is watched too, so peers notice the end at once. The same sockets coordinate the
reading of memory.
"""

import ctypes
import hashlib
import json
import os
import pickle
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from shardspec.errors import CommunicatorError, ShardSpecError
from shardspec.text import first_of

E = TypeVar("E", bound=BaseException)

NOTE_BYTES: Final = 4096
NOTE_ROOM: Final = NOTE_BYTES - 512
"""Bytes of content that a note has room for."""
ORDER_RULE: Final = "every rank of the mesh must call the same conversions in the same order"
_HALF: Final = 120
"""Of the characters of a long word that are shown."""
_ON_ALL_RANKS: Final = "_shardspec_on_all_ranks"
_LATE: Final = "did not come in time (the timeout is that of the process group)"


def ranks_text(peers: Iterable[int]) -> str:
    """Name some ranks.

    >>> ranks_text([3, 1, 3]), ranks_text([4]), ranks_text(range(20))
    ('ranks 1, 3', 'rank 4', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    found = sorted(set(peers))
    return f"rank{'' if len(found) == 1 else 's'} {first_of([*map(str, found)], 8)}"


class Address(NamedTuple):
    """How other processes of the same host find a process."""

    host: str
    """The kernel and its namespaces."""
    pid: int
    socket: str
    probe: int
    """Where the name of the socket lies in its memory; 0 if it is not to be read."""


class Note(NamedTuple):
    """What a rank tells all others of a mesh before it goes on, or a peer within a step."""

    kind: str
    """"conversion", "value" for one that is gathered, "failed"; of a step "readable", "done"."""
    ids: int
    """Checksum of the ranks that are told, or of the step."""
    number: int = 0
    """How many notes these ranks have exchanged before."""
    device: str = ""
    """Device type of the rank's shards; empty where it holds none."""
    content: bytes = b""
    """What `description` returns, or an error; with the value `NOTE_ROOM` bytes at most."""
    value: bytes = b""
    """The start of a pickled value, which may differ from rank to rank."""
    length: int = 0
    """Bytes of the whole value."""
    address: Address | None = None
    """Set while the ranks of a mesh are not connected yet."""

    def pack(self) -> bytes:
        """Return the note in at most `NOTE_BYTES`."""
        return pickle.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> "Note":
        """Read a packed note, which may be padded."""
        return cls(*pickle.loads(data))

    @property
    def failure(self) -> str:
        """What the rank has to say if it has failed."""
        return self.content.decode(errors="replace") if self.kind == "failed" else ""

    def __str__(self) -> str:
        if self.kind != "conversion":
            return f"gathers value {self.number}" if self.kind == "value" else "carries out a step"
        words = json.loads(self.content)
        said = ", ".join(f"{name} {word}" for name, word in words.items() if name != "digest")
        return f"asks for conversion {self.number} ({said})"


def description(words: Mapping[str, str]) -> bytes:
    """Return what a note says of a conversion: a digest of all words, and long words shortened."""
    digest = hashlib.sha256(json.dumps(dict(words)).encode()).hexdigest()
    short = {
        name: word if len(word) <= 2 * _HALF else f"{word[:_HALF]} ... {word[-_HALF:]}"
        for name, word in words.items()
    }
    text = json.dumps({"digest": digest, **short})
    assert len(text) <= NOTE_ROOM, "there are few words"
    return text.encode()


def failure_text(error: BaseException) -> str:
    """Return what other ranks are told of an error: ours by its text, others by their type too."""
    kind = "" if isinstance(error, ShardSpecError) else type(error).__name__
    try:
        return ": ".join(filter(None, [kind, str(error)]))
    except Exception:  # one of the user's that cannot be made a text
        return kind


def on_all_ranks(error: E) -> E:
    """Mark an error that all ranks of the mesh raise, or have been told of; return it."""
    vars(error)[_ON_ALL_RANKS] = True
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    """Say whether the other ranks know of an error, so that none of them waits.

    That is forgotten then: the same object may be raised once more, by something else.
    """
    return bool(vars(error).pop(_ON_ALL_RANKS, False))


def check_agreement(notes: Mapping[int, Note]) -> str:
    """Return the device type of the shards if all ranks of a mesh are about to do the same.

    The error otherwise names a rank, both conversions and the first difference; or the rank that
    has failed, and its error.
    """
    first, mine = next(iter(notes.items()))
    for peer, note in notes.items():
        if note.failure:
            raise on_all_ranks(failed(peer, note))
    for peer, note in notes.items():
        if note.content != mine.content or note[:3] != mine[:3]:
            said = _difference(first, mine, peer, note)
            raise on_all_ranks(CommunicatorError(f"{said}; {ORDER_RULE}"))
    holders = {note.device: rank for rank, note in notes.items() if note.device}
    if len(holders) > 1:
        said = ", ".join(f"rank {rank} on {device}" for device, rank in holders.items())
        raise on_all_ranks(
            CommunicatorError(
                f"shards are on different kinds of devices: {said}; move them to one kind first"
            )
        )
    return next(iter(holders), "")


def failed(rank: int, note: Note) -> CommunicatorError:
    """Return the error on the other ranks where one has failed."""
    return CommunicatorError(
        f"rank {rank} has failed, so the call ends on all ranks of the mesh: {note.failure}"
    )


def _difference(first: int, mine: Note, other: int, note: Note) -> str:
    if mine.kind != "conversion" or note.kind != mine.kind or note.content == mine.content:
        return f"rank {other} {note}, but rank {first} {mine}"
    here, there = json.loads(mine.content), json.loads(note.content)
    what = "; ".join(
        f"{name} {there.get(name)} where rank {first} has {word}"
        for name, word in here.items()
        if name != "digest" and word != there.get(name)
    )
    return (
        f"rank {other} asks for another conversion than rank {first}: "
        f"{what or 'they differ in a part too long to show'}; rank {first} {mine}, rank {other} "
        f"{note}"
    )


class Connection:
    """A socket to one process of this host, whose end is noticed at once."""

    def __init__(self, peer: int, pid: int, connected: socket.socket) -> None:
        self.peer, self.pid, self._socket = peer, pid, connected
        # A forked child of the peer keeps the socket open, but not the process id.
        process = os.pidfd_open(pid)
        self._inbox, self._ended = select.poll(), select.poll()
        for poll, event in ((self._inbox, select.POLLIN), (self._ended, select.POLLRDHUP)):
            poll.register(connected, event)
            poll.register(process, select.POLLIN)
        self.close = weakref.finalize(self, _close, connected, process, os.getpid())

    def send(self, note: Note) -> None:
        """Hand over a note without waiting; a peer that has ended is noticed in `receive`."""
        with suppress(OSError):
            self._socket.send(note.pack())

    def receive(self, deadline: float) -> Note:
        """Return the next note of the peer, until a time on the clock `time.monotonic`."""
        message = b""
        if self.close.alive:
            if not self._inbox.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise CommunicatorError(f"rank {self.peer} {_LATE}")
            with suppress(OSError):  # nothing is left to read, but the process has ended
                message = self._socket.recv(NOTE_BYTES, socket.MSG_DONTWAIT)
        if not message:
            raise CommunicatorError(f"rank {self.peer} has ended or given up an earlier step")
        return Note.unpack(message)

    def last_words(self) -> str:
        """Return why the peer has failed, if it has said so and has not been heard yet."""
        with suppress(CommunicatorError):
            while True:
                note = self.receive(0.0)
                if note.failure:
                    return str(failed(self.peer, note))
        return ""

    def has_ended(self) -> bool:
        """Say whether the peer has ended or given up, even if messages of it are left."""
        return not self.close.alive or bool(self._ended.poll(0))


def _close(connected: socket.socket, process: int, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):  # closing alone is not enough: a forked child keeps it open
            connected.shutdown(socket.SHUT_RDWR)
    connected.close()
    os.close(process)


class Listener:
    """Where a process waits for others of its host to connect, and to try to read its memory."""

    def __init__(self, *, is_read: bool = True) -> None:
        name = f"shardspec-{os.getpid()}-{secrets.token_hex(8)}"
        self._name = ctypes.create_string_buffer(name.encode())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + name)  # the zero: an abstract name, without a file
        self._socket.listen(1024)
        probe = ctypes.addressof(self._name) if is_read else 0
        self.address = Address(this_host(), os.getpid(), name, probe)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def connect(
        self, me: int, peers: Mapping[int, Address], deadline: float
    ) -> dict[int, Connection]:
        """Connect to some ranks of this host, all of which call this too."""
        earlier = {peer: at for peer, at in peers.items() if peer < me}
        made = {peer: _reached(peer, at.pid, calling=at.socket) for peer, at in earlier.items()}
        waiting = {at.pid: peer for peer, at in peers.items() if peer > me}
        while waiting:
            self._socket.settimeout(max(1e-6, deadline - time.monotonic()))
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                raise CommunicatorError(f"{ranks_text(waiting.values())} {_LATE}") from None
            # The kernel says who called, so no other process can take a rank's place.
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, _, _ = struct.unpack("3i", credentials)
            if pid in waiting:
                peer = waiting.pop(pid)
                made[peer] = _reached(peer, pid, connected)
            else:
                connected.close()
        return made


def _reached(
    peer: int, pid: int, connected: socket.socket | None = None, *, calling: str = ""
) -> Connection:
    """Return the connection to a process that has called, or that is called by its name."""
    connected = connected or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if calling:
            connected.connect("\0" + calling)
        return Connection(peer, pid, connected)
    except OSError as error:  # it may have ended since
        connected.close()
        raise CommunicatorError(
            f"rank {peer} cannot be reached on this host: {error.strerror}"
        ) from error


def this_host() -> str:
    """Name the kernel and the namespaces of process ids and sockets; empty where none listens."""
    if sys.platform != "linux":
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])
    except OSError:
        return ""
