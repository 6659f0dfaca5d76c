"""Short notes between the ranks of a mesh, and what they agree on before anything moves.

Processes of one host have sockets of the system for this. A process that ends closes them, and its
end is seen by its process id too, so its peers notice at once. Elsewhere notes are messages of
`torch.distributed`.
"""

import ctypes
import hashlib
import json
import os
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

__all__ = [
    "NOTE_BYTES",
    "NOTE_ROOM",
    "ORDER_RULE",
    "Address",
    "Link",
    "Listener",
    "Note",
    "Unanswered",
    "check_agreement",
    "description",
    "ranks_text",
]

_HEAD: Final = struct.Struct("<cIQ8sI")
NOTE_BYTES: Final = 4096
NOTE_ROOM: Final = NOTE_BYTES - _HEAD.size
"""Bytes of content that a note has room for."""
_MOST_OF_A_WORD: Final = 240
ORDER_RULE: Final = "every rank of the mesh must call the same conversions in the same order"


class Unanswered(CommunicatorError):
    """Some ranks did not answer; `why` says what was seen of them."""

    def __init__(self, peers: Iterable[int], why: str) -> None:
        self.peers = tuple(peers)
        self.why = why
        super().__init__(f"{ranks_text(self.peers)} did not answer: {why}")


def ranks_text(peers: Iterable[int]) -> str:
    """Name some ranks.

    Examples
    --------
    >>> ranks_text([3, 1, 3]), ranks_text([4]), ranks_text(range(20))
    ('ranks 1, 3', 'rank 4', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    found = sorted(set(peers))
    shown = ", ".join(map(str, found[:8]))
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"rank{'' if len(found) == 1 else 's'} {shown}{more}"


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank tells all others of a mesh before it goes on."""

    kind: bytes
    """``b"C"`` before a conversion, ``b"G"`` for a value that is gathered."""
    ids: int
    """Checksum of the ranks that are told."""
    number: int
    """How many notes these ranks have told each other before."""
    device: str
    """Where the rank's shards are, as ``"cpu"``; empty where it holds none."""
    length: int
    """Bytes of the content."""
    content: bytes
    """As much of it as there is room for: of a conversion all of what `description` returns."""

    def pack(self) -> bytes:
        """Return the note as bytes, `NOTE_BYTES` at most."""
        head = _HEAD.pack(self.kind, self.ids, self.number, self.device.encode(), self.length)
        return head + self.content[:NOTE_ROOM]

    @classmethod
    def unpack(cls, data: bytes) -> "Note":
        """Read what `pack` has written."""
        kind, ids, number, device, length = _HEAD.unpack_from(data)
        text = device.rstrip(b"\0").decode()
        return cls(kind, ids, number, text, length, data[_HEAD.size : _HEAD.size + length])

    def __str__(self) -> str:
        if self.kind != b"C":
            return "gathers a value"
        words = json.loads(self.content)
        said = ", ".join(f"{name} {word}" for name, word in words.items() if name != "digest")
        return f"asks for conversion {self.number} ({said})"


def description(words: Mapping[str, str]) -> bytes:
    """Return what a note says of a conversion: the digest of all words, then long ones cut.

    Parameters
    ----------
    words
        What is to be done, by what each word is about.
    """
    digest = hashlib.sha256(json.dumps(dict(words)).encode()).hexdigest()
    text = json.dumps({"digest": digest, **{name: _cut(word) for name, word in words.items()}})
    assert len(text) <= NOTE_ROOM, "there are few words"
    return text.encode()


def _cut(word: str) -> str:
    if len(word) <= _MOST_OF_A_WORD:
        return word
    half = _MOST_OF_A_WORD // 2
    return f"{word[:half]} ... {word[-half:]}"


def check_agreement(told: Mapping[int, Note]) -> str:
    """Return where the shards are, if all ranks are about to do the same.

    Parameters
    ----------
    told
        The notes of all ranks of a mesh, in the order of its ids.

    Raises
    ------
    CommunicatorError
        If a rank says something else, naming it, both conversions and the first difference.
    """
    first, *others = told
    mine = told[first]
    for peer in others:
        note = told[peer]
        same = note.content == mine.content or mine.kind == b"G"  # values may differ
        if (note.kind, note.ids) != (mine.kind, mine.ids) or not same:
            raise CommunicatorError(_difference(first, mine, peer, note))
        if note.number != mine.number:
            raise CommunicatorError(
                f"rank {peer} {note}, but rank {first} is at number {mine.number}; {ORDER_RULE}"
            )
    holders = {note.device: rank for rank, note in told.items() if note.device}
    if len(holders) > 1:
        said = ", ".join(f"rank {rank} on {device}" for device, rank in holders.items())
        raise CommunicatorError(
            f"shards are on different kinds of devices: {said}; move them to one kind first"
        )
    return next(iter(holders), "")


def _difference(first: int, mine: Note, other: int, note: Note) -> str:
    if (mine.kind, note.kind) != (b"C", b"C"):
        return f"rank {other} {note}, but rank {first} {mine}; {ORDER_RULE}"
    here, there = json.loads(mine.content), json.loads(note.content)
    names = [name for name in here if name != "digest" and here[name] != there.get(name)]
    what = "; ".join(
        f"{name} {there.get(name)} where rank {first} has {here[name]}" for name in names
    )
    return (
        f"rank {other} asks for another conversion than rank {first}: "
        f"{what or 'they differ in a part too long to show'}; rank {first} {mine}, rank {other} "
        f"{note}; {ORDER_RULE}"
    )


@dataclass(frozen=True, slots=True)
class Address:
    """How a process is found by others of its host."""

    host: str
    """Equal for processes that share a kernel, its process ids and its network."""
    pid: int
    socket: str
    """Name of its socket; empty where the system has none of the kind."""
    probe: int
    """Where something known lies in its memory."""
    content: bytes
    """What lies there."""


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

    def send(self, note: bytes) -> None:
        """Hand a note over; the peer need not wait for it."""
        try:
            self._connection.send(note)
        except OSError:
            raise self._gone() from None

    def receive(self, deadline: float) -> bytes:
        """Return the next note of the peer, or raise `CommunicatorError` if none comes in time.

        The deadline is on the clock `time.monotonic`.
        """
        note = b""
        if self.close.alive:
            if not self._inbox.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise CommunicatorError(
                    f"rank {self.peer} did not come in time (the timeout is that of the process "
                    "group)"
                )
            try:
                note = self._connection.recv(2 * NOTE_BYTES, socket.MSG_DONTWAIT)
            except OSError:  # nothing is left to read, but the process has ended
                note = b""
        if not note:
            raise self._gone()
        return note

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

    Parameters
    ----------
    is_read
        If not, no other process finds anything to read in the memory of this one.
    """

    def __init__(self, *, is_read: bool = True) -> None:
        self._content = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        self._socket: socket.socket | None = None
        host, name = _host(), ""
        if host:
            name = f"shardspec-{os.getpid()}-{secrets.token_hex(8)}"
            # The leading zero: a name of the kernel's own, without a file that could be left.
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.bind("\0" + name)
            self._socket.listen(1024)
        probe = ctypes.addressof(self._content) if is_read else 0
        self.address = Address(host, os.getpid(), name, probe, self._content.raw)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def reachable(self, others: Mapping[int, Address]) -> dict[int, Address]:
        """Return those of the others that run on this host, by what both ends know."""
        mine = self.address
        return {
            peer: other
            for peer, other in others.items()
            if mine.socket and other.socket and other.host == mine.host and other.pid != mine.pid
        }

    def connect(self, me: int, others: Mapping[int, Address], deadline: float) -> dict[int, Link]:
        """Make a link to each of some reachable ranks, all of which call this too.

        Raises
        ------
        CommunicatorError
            If one of them does not come until the deadline, on the clock `time.monotonic`.
        """
        links = {peer: self._call(me, peer, at) for peer, at in others.items() if peer < me}
        waiting = {peer: other.pid for peer, other in others.items() if peer > me}
        while waiting:
            link = self._accept(waiting, deadline)
            links[link.peer] = link
            del waiting[link.peer]
        return links

    def _call(self, me: int, peer: int, other: Address) -> Link:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + other.socket)
            connection.send(struct.pack("<q", me))
            return Link(peer, other.pid, connection)
        except OSError as error:
            connection.close()
            raise CommunicatorError(
                f"rank {peer} cannot be reached on this host: {error.strerror}"
            ) from error

    def _accept(self, waiting: Mapping[int, int], deadline: float) -> Link:
        assert self._socket is not None, "a process without a socket reaches nobody"
        while True:
            try:
                self._socket.settimeout(max(0.0, deadline - time.monotonic()) or 1e-6)
                connection, _ = self._socket.accept()
            except TimeoutError:
                raise CommunicatorError(
                    f"{ranks_text(waiting)} did not come in time (the timeout is that of the "
                    "process group)"
                ) from None
            # The kernel says who is at the other end, so nobody else can take a rank's place.
            pid, _, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            peer = next((rank for rank, theirs in waiting.items() if theirs == pid), None)
            if peer is None:
                connection.close()
                continue
            link = Link(peer, pid, connection)
            link.receive(deadline)
            return link


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
