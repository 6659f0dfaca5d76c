"""What ranks tell each other before anything moves, and whether they agree on it.

Those of one host do so over sockets of the system, which a process that ends closes; its end is
seen by its process id too, so that its peers notice at once. What is said while memory is read goes
over them as well.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardspec.errors import CommunicatorError

NOTE_BYTES: Final = 4096
NOTE_ROOM: Final = NOTE_BYTES - 512
"""Bytes of content that a note has room for."""
_MOST_OF_A_WORD: Final = 240
ORDER_RULE: Final = "every rank of the mesh must call the same conversions in the same order"
_MESSAGE_BYTES: Final = 1 << 16
"""Of one message."""
_LATE: Final = "did not come in time (the timeout is that of the process group)"


class Unanswered(CommunicatorError):
    """Some ranks did not answer; `why` says what was seen of them."""

    def __init__(self, peers: Iterable[int], why: str) -> None:
        self.peers, self.why = tuple(peers), why
        super().__init__(f"{ranks_text(self.peers)} did not answer: {why}")


def ranks_text(peers: Iterable[int]) -> str:
    """Name some ranks.

    >>> ranks_text([3, 1, 3]), ranks_text([4]), ranks_text(range(20))
    ('ranks 1, 3', 'rank 4', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    found = sorted(set(peers))
    shown = ", ".join(map(str, found[:8]))
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"rank{'' if len(found) == 1 else 's'} {shown}{more}"


@dataclass(frozen=True, slots=True)
class Address:
    """How a process is found by others of its host."""

    host: str
    """Equal for processes that share a kernel, its process ids and its network; empty where the
    system has no such sockets."""
    pid: int
    socket: str
    """Name of its socket."""
    probe: int
    """Where something known lies in its memory."""
    content: bytes
    """What lies there."""


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank tells all others of a mesh before it goes on."""

    kind: str
    """"conversion", "value" for one that is gathered, "step" for a message of a step."""
    ids: int
    """Checksum of the ranks that are told."""
    number: int
    """How many notes these ranks have told each other before."""
    device: str = ""
    """Where the rank's shards are, as ``"cpu"``; empty where it holds none."""
    length: int = 0
    """Bytes of the content."""
    content: bytes = b""
    """As much of it as there is room for: of a conversion all of what `description` returns."""

    address: Address | None = None
    """Where processes of the same host find the rank, when it looks for them."""

    def pack(self) -> bytes:
        """Return the note as bytes, `NOTE_BYTES` at most."""
        short = self.content[:NOTE_ROOM]
        facts = (self.kind, self.ids, self.number, self.device, self.length, short)
        return pickle.dumps((*facts, self.address))

    @classmethod
    def unpack(cls, data: bytes) -> "Note":
        """Read what `pack` has written; whatever else came is part of a step."""
        return cls(*pickle.loads(data)) if data[:1] == pickle.PROTO else cls("step", 0, 0)

    def __str__(self) -> str:
        if self.kind != "conversion":
            return "gathers a value" if self.kind == "value" else "carries out a step"
        words = json.loads(self.content)
        said = ", ".join(f"{name} {word}" for name, word in words.items() if name != "digest")
        return f"asks for conversion {self.number} ({said})"


def description(words: Mapping[str, str]) -> bytes:
    """Return what a note says of a conversion: the digest of all words, then long ones cut."""
    digest = hashlib.sha256(json.dumps(dict(words)).encode()).hexdigest()
    text = json.dumps({"digest": digest, **{name: _cut(word) for name, word in words.items()}})
    assert len(text) <= NOTE_ROOM, "there are few words"
    return text.encode()


def _cut(word: str) -> str:
    half = _MOST_OF_A_WORD // 2
    return word if len(word) <= 2 * half else f"{word[:half]} ... {word[-half:]}"


def check_agreement(notes: Mapping[int, Note]) -> str:
    """Return where the shards are, if all ranks of a mesh are about to do the same.

    Else it is a `CommunicatorError` that names a rank, both conversions and the first difference.
    """
    first = next(iter(notes))
    mine = notes[first]
    for peer, note in notes.items():
        same = note.content == mine.content or mine.kind == "value"  # values may differ
        if (note.kind, note.ids) != (mine.kind, mine.ids) or not same:
            raise CommunicatorError(f"{_difference(first, mine, peer, note)}; {ORDER_RULE}")
        if note.number != mine.number:
            raise CommunicatorError(
                f"rank {peer} {note}, but rank {first} is at number {mine.number}; {ORDER_RULE}"
            )
    holders = {note.device: rank for rank, note in notes.items() if note.device}
    if len(holders) > 1:
        said = ", ".join(f"rank {rank} on {device}" for device, rank in holders.items())
        raise CommunicatorError(
            f"shards are on different kinds of devices: {said}; move them to one kind first"
        )
    return next(iter(holders), "")


def _difference(first: int, mine: Note, other: int, note: Note) -> str:
    if (mine.kind, note.kind) != ("conversion", "conversion"):
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


class Link:
    """A connection to one process of this host, whose end is noticed at once."""

    def __init__(self, peer: int, pid: int, connection: socket.socket) -> None:
        self.peer, self.pid, self._connection = peer, pid, connection
        # The end of a process is seen by its id too: a forked child of it keeps the socket open.
        process = os.pidfd_open(pid)
        self._inbox, self._ended = select.poll(), select.poll()
        self._inbox.register(connection, select.POLLIN)
        self._ended.register(connection, select.POLLRDHUP)
        for poll in (self._inbox, self._ended):
            poll.register(process, select.POLLIN)
        # Closed with the link, also where nobody says so.
        self.close = weakref.finalize(self, _close, connection, process, os.getpid())

    def send(self, message: bytes) -> None:
        """Hand a message over; the peer need not wait for it."""
        try:
            self._connection.send(message)
        except OSError:
            raise self._gone() from None

    def receive(self, deadline: float) -> bytes:
        """Return the next message of the peer, or raise `CommunicatorError` if none comes in time.

        The deadline is on the clock `time.monotonic`.
        """
        message = b""
        if self.close.alive:
            if not self._inbox.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise CommunicatorError(f"rank {self.peer} {_LATE}")
            with suppress(OSError):  # nothing is left to read, but the process has ended
                message = self._connection.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        if not message:
            raise self._gone()
        return message

    def has_ended(self) -> bool:
        """Say whether the peer has ended or given up, whatever it has sent before."""
        return not self.close.alive or bool(self._ended.poll(0))

    def _gone(self) -> CommunicatorError:
        return CommunicatorError(f"rank {self.peer} has ended or given up an earlier step")


def _close(connection: socket.socket, process: int, owner: int) -> None:
    if os.getpid() == owner:
        # Not closed alone: a forked child of this process keeps the socket open.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    os.close(process)


class Listener:
    """Where a process waits for links from others of its host; a context manager.

    If it is not to be read, no other process finds anything to read in its memory.
    """

    def __init__(self, *, is_read: bool = True) -> None:
        self._content = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        self._socket: socket.socket | None = None
        host, name = _host(), f"shardspec-{os.getpid()}-{secrets.token_hex(8)}"
        if host:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            # The leading zero: a name of the kernel's own, without a file that could be left.
            self._socket.bind("\0" + name)
            self._socket.listen(1024)
        probe = ctypes.addressof(self._content) if is_read else 0
        self.address = Address(host, os.getpid(), name, probe, self._content.raw)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def connect(self, me: int, peers: Mapping[int, Address], deadline: float) -> dict[int, Link]:
        """Make a link to each of some ranks of this host, all of which call this too.

        The deadline is on the clock `time.monotonic`; `CommunicatorError` says who has not come.
        """
        links = {peer: _call(peer, at) for peer, at in peers.items() if peer < me}
        waiting = {other.pid: peer for peer, other in peers.items() if peer > me}
        while waiting:
            assert self._socket is not None, "a process without a socket reaches nobody"
            self._socket.settimeout(max(1e-6, deadline - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                raise CommunicatorError(f"{ranks_text(waiting.values())} {_LATE}") from None
            # The kernel says who is at the other end, so nobody else can take a rank's place.
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, _, _ = struct.unpack("3i", credentials)
            if pid in waiting:
                peer = waiting.pop(pid)
                links[peer] = Link(peer, pid, connection)
            else:
                connection.close()
        return links


def _call(peer: int, other: Address) -> Link:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect("\0" + other.socket)
        return Link(peer, other.pid, connection)
    except OSError as error:
        connection.close()
        raise CommunicatorError(
            f"rank {peer} cannot be reached on this host: {error.strerror}"
        ) from error


def _host() -> str:
    """Name the kernel, and the spaces of process ids and of sockets; nothing where it cannot be."""
    if sys.platform != "linux":
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net"))])
    except OSError:
        return ""
