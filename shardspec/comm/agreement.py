"""Notes that ranks exchange before data moves, and the check that they agree.

Processes of one host are connected by Unix sockets, which the system closes when a process ends.
The process id is watched too, so that peers notice at once. The same sockets coordinate reads of
peers' memory.
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
"""The most bytes of content in a note."""
ORDER_RULE: Final = "every rank of the mesh must call the same conversions in the same order"
_HALF: Final = 120
"""Characters shown of each end of a long word."""
_ON_ALL_RANKS: Final = "_shardspec_on_all_ranks"
_LATE: Final = "did not come in time (the timeout is that of the process group)"


def ranks_text(peers: Iterable[int]) -> str:
    """Return the names of some ranks, shortened if there are many.

    >>> ranks_text([3, 1, 3]), ranks_text([4]), ranks_text(range(20))
    ('ranks 1, 3', 'rank 4', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    ranks = sorted(set(peers))
    return f"rank{'' if len(ranks) == 1 else 's'} {first_of([*map(str, ranks)], 8)}"


class Address(NamedTuple):
    """Where other processes of the same host can reach a process."""

    host: str
    """An identifier of the kernel and its namespaces."""
    pid: int
    socket: str
    probe: int
    """The address of the socket's name in its memory; 0 if its memory must not be read."""


class Note(NamedTuple):
    """A message to all other ranks of a mesh before a conversion, or to a peer within a step."""

    kind: str
    """"conversion", "value" (to be gathered) or "failed"; in a step "readable" or "done"."""
    ids: int
    """Checksum of the ranks that exchange notes, or of the step."""
    number: int = 0
    """How many notes these ranks have exchanged before."""
    device: str = ""
    """Device type of the rank's shards; empty if it has none."""
    content: bytes = b""
    """A `description` or an error; at most `NOTE_ROOM` bytes together with the value."""
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
        """The rank's error if it has failed, else an empty text."""
        return self.content.decode(errors="replace") if self.kind == "failed" else ""

    def __str__(self) -> str:
        if self.kind != "conversion":
            return f"gathers value {self.number}" if self.kind == "value" else "carries out a step"
        words = json.loads(self.content)
        text = ", ".join(f"{name} {word}" for name, word in words.items() if name != "digest")
        return f"asks for conversion {self.number} ({text})"


def description(words: Mapping[str, str]) -> bytes:
    """Return the content of a conversion's note: a digest of all words, and shortened words."""
    digest = hashlib.sha256(json.dumps(dict(words)).encode()).hexdigest()
    short = {
        name: word if len(word) <= 2 * _HALF else f"{word[:_HALF]} ... {word[-_HALF:]}"
        for name, word in words.items()
    }
    text = json.dumps({"digest": digest, **short})
    assert len(text) <= NOTE_ROOM, "there are few words"
    return text.encode()


def failure_text(error: BaseException) -> str:
    """Return an error as text for other ranks, with its type unless it is a `ShardSpecError`."""
    kind = "" if isinstance(error, ShardSpecError) else type(error).__name__
    try:
        return ": ".join(filter(None, [kind, str(error)]))
    except Exception:  # a user's error whose __str__ fails
        return kind


def on_all_ranks(error: E) -> E:
    """Mark an error as known to all ranks of the mesh, and return it."""
    vars(error)[_ON_ALL_RANKS] = True
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    """Return whether the other ranks know of an error, so that none of them waits; clear the mark.

    The mark is cleared because the same object may be raised again by something else.
    """
    return bool(vars(error).pop(_ON_ALL_RANKS, False))


def check_agreement(notes: Mapping[int, Note]) -> str:
    """Return the device type of the shards, given the notes of all ranks of a mesh.

    Raises `CommunicatorError` if they are not about to do the same, which names a rank, both
    conversions and the first difference; or if a rank has failed, with its error.
    """
    first, mine = next(iter(notes.items()))
    for peer, note in notes.items():
        if note.failure:
            raise on_all_ranks(failed(peer, note))
    for peer, note in notes.items():
        if note.content != mine.content or note[:3] != mine[:3]:
            difference = _difference(first, mine, peer, note)
            raise on_all_ranks(CommunicatorError(f"{difference}; {ORDER_RULE}"))
    holders = {note.device: rank for rank, note in notes.items() if note.device}
    if len(holders) > 1:
        places = ", ".join(f"rank {rank} on {device}" for device, rank in holders.items())
        raise on_all_ranks(
            CommunicatorError(
                f"shards are on different kinds of devices: {places}; move them to one kind first"
            )
        )
    return next(iter(holders), "")


def failed(rank: int, note: Note) -> CommunicatorError:
    """Return the error to raise on the other ranks when one has failed."""
    return CommunicatorError(
        f"rank {rank} has failed, so the call ends on all ranks of the mesh: {note.failure}"
    )


def _difference(first: int, mine: Note, other: int, note: Note) -> str:
    if mine.kind != "conversion" or note.kind != mine.kind or note.content == mine.content:
        return f"rank {other} {note}, but rank {first} {mine}"
    own_words, other_words = json.loads(mine.content), json.loads(note.content)
    differing = "; ".join(
        f"{name} {other_words.get(name)} where rank {first} has {word}"
        for name, word in own_words.items()
        if name != "digest" and word != other_words.get(name)
    )
    return (
        f"rank {other} asks for another conversion than rank {first}: "
        f"{differing or 'they differ in a part too long to show'}; rank {first} {mine}, rank "
        f"{other} {note}"
    )


class Connection:
    """A socket to a process of this host that detects the end of the process at once."""

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
        """Send a note without waiting; if the peer has ended, `receive` raises that."""
        with suppress(OSError):
            self._socket.send(note.pack())

    def receive(self, deadline: float) -> Note:
        """Return the next note of the peer, waiting until `deadline` (of `time.monotonic`).

        Raises `CommunicatorError` if none comes in time, or the peer has ended.
        """
        message = b""
        if self.close.alive:
            if not self._inbox.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise CommunicatorError(f"rank {self.peer} {_LATE}")
            with suppress(OSError):  # the process has ended and nothing is left to read
                message = self._socket.recv(NOTE_BYTES, socket.MSG_DONTWAIT)
        if not message:
            raise CommunicatorError(f"rank {self.peer} has ended or given up an earlier step")
        return Note.unpack(message)

    def last_words(self) -> str:
        """Return the error of a peer that has sent one not yet received, else an empty text."""
        with suppress(CommunicatorError):
            while True:
                note = self.receive(0.0)
                if note.failure:
                    return str(failed(self.peer, note))
        return ""

    def has_ended(self) -> bool:
        """Return whether the peer has ended or given up, even if it left unread messages."""
        return not self.close.alive or bool(self._ended.poll(0))


def _close(connected: socket.socket, process: int, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):  # closing alone is not enough: a forked child keeps it open
            connected.shutdown(socket.SHUT_RDWR)
    connected.close()
    os.close(process)


class Listener:
    """A socket on which other processes of this host connect, and a probe of readable memory."""

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
        """Return connections to some ranks of this host, all of which call this too."""
        earlier = {peer: at for peer, at in peers.items() if peer < me}
        made = {peer: _reached(peer, at.pid, calling=at.socket) for peer, at in earlier.items()}
        waiting = {at.pid: peer for peer, at in peers.items() if peer > me}
        while waiting:
            self._socket.settimeout(max(1e-6, deadline - time.monotonic()))
            try:
                connected, _ = self._socket.accept()
            except TimeoutError:
                raise CommunicatorError(f"{ranks_text(waiting.values())} {_LATE}") from None
            # The kernel identifies the caller, so no other process can pose as a rank.
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
    """Return a connection to a process, over an accepted socket or by its socket's name.

    Raises `CommunicatorError` if the process cannot be reached.
    """
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
    """Return an identifier of the kernel and its pid and network namespaces; empty off Linux."""
    if sys.platform != "linux":
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])
    except OSError:
        return ""
