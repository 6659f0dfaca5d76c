"""Links between processes of one host that can read each other's memory.

Two processes share a socket of the operating system, over which they tell each other where a
tensor lies and that it has been read. A process that ends closes its sockets, so its peers notice
at once.
"""

import ctypes
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardspec.comm.failures import ranks
from shardspec.comm.host_memory import can_read
from shardspec.errors import CommunicatorError

__all__ = ["Address", "HostLink", "Listener", "readable"]

_LONGEST: Final = 1024
"""Bytes of a note."""


@dataclass(frozen=True, slots=True)
class Address:
    """How a process is found by others of its host."""

    host: str
    """Equal for processes that share a kernel, its process ids and its network."""
    pid: int
    """Process id."""
    socket: str
    """Name of its socket; nothing where it takes no part."""
    probe: int
    """Where something known lies in its memory."""
    content: bytes
    """What lies there."""


class HostLink:
    """A connection to one process of this host."""

    def __init__(self, peer: int, pid: int, connection: socket.socket) -> None:
        self.peer = peer
        self.pid = pid
        self._connection = connection
        # Closed with the link, also where nobody says so.
        self.close = weakref.finalize(self, connection.close)

    def send(self, note: bytes) -> None:
        """Hand a note over; the peer need not wait for it."""
        try:
            self._connection.send(note)
        except OSError:
            raise self._gone() from None

    def receive(self, deadline: float) -> bytes:
        """Return the next note of the peer.

        Parameters
        ----------
        deadline
            When to give up, on the clock `time.monotonic`.

        Raises
        ------
        CommunicatorError
            If the peer has ended, or sends nothing in time.
        """
        try:
            self._connection.settimeout(max(0.0, deadline - time.monotonic()) or 1e-6)
            note = self._connection.recv(_LONGEST)
        except TimeoutError:
            raise CommunicatorError(
                f"rank {self.peer} did not come in time (the timeout is that of the process group)"
            ) from None
        except OSError:
            raise self._gone() from None
        if not note:
            raise self._gone()
        return note

    def has_ended(self) -> bool:
        """Say whether the peer has ended or given up, whatever it has sent before."""
        if not self.close.alive:
            return True
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _gone(self) -> CommunicatorError:
        return CommunicatorError(f"rank {self.peer} has ended or given up an earlier step")


class Listener:
    """Where a process waits for links from others of its host; a context manager.

    Parameters
    ----------
    takes_part
        If not, nobody reaches this process.
    """

    def __init__(self, *, takes_part: bool = True) -> None:
        self._content = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        self._socket: socket.socket | None = None
        host = _host()
        name = f"shardspec-{os.getpid()}-{secrets.token_hex(8)}" if takes_part and host else ""
        try:
            if name:
                # The leading zero: a name of the kernel's own, without a file that could be left.
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._socket.bind("\0" + name)
                self._socket.listen(1024)
        except OSError:
            name = ""
        self.address = Address(
            host,
            os.getpid(),
            name,
            ctypes.addressof(self._content),
            self._content.raw,
        )

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def reachable(self, others: Mapping[int, Address]) -> set[int]:
        """Return which of the others run on this host, by what both ends know."""
        mine = self.address
        return {
            peer
            for peer, other in others.items()
            if mine.socket and other.socket and other.host == mine.host and other.pid != mine.pid
        }

    def connect(self, me: int, others: Mapping[int, Address], deadline: float) -> list[HostLink]:
        """Make a link to each of some processes, all of which call this too.

        Parameters
        ----------
        me
            The rank of this process.
        others
            Reachable processes by rank.
        deadline
            When to give up, on the clock `time.monotonic`.

        Raises
        ------
        CommunicatorError
            If one of them does not come.
        """
        links = [self._call(me, peer, other) for peer, other in sorted(others.items()) if peer < me]
        waiting = {peer: other for peer, other in others.items() if peer > me}
        while waiting:
            links.append(self._accept(waiting, deadline))
            del waiting[links[-1].peer]
        return links

    def _call(self, me: int, peer: int, other: Address) -> HostLink:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + other.socket)
            connection.send(struct.pack("<q", me))
        except OSError as error:
            connection.close()
            raise CommunicatorError(
                f"rank {peer} cannot be reached on this host: {error.strerror}"
            ) from error
        return HostLink(peer, other.pid, connection)

    def _accept(self, waiting: Mapping[int, Address], deadline: float) -> HostLink:
        assert self._socket is not None, "a process without a socket reaches nobody"
        while True:
            try:
                self._socket.settimeout(max(0.0, deadline - time.monotonic()) or 1e-6)
                connection, _ = self._socket.accept()
            except TimeoutError:
                raise CommunicatorError(
                    f"{ranks(waiting)} did not come in time (the timeout is that of the process "
                    "group)"
                ) from None
            # The kernel says who is at the other end, so nobody else can take a rank's place.
            pid, _, _ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            peer = next((rank for rank, other in waiting.items() if other.pid == pid), None)
            if peer is None:
                connection.close()
                continue
            link = HostLink(peer, pid, connection)
            link.receive(deadline)
            return link


def readable(links: Iterable[HostLink], addresses: Mapping[int, Address]) -> frozenset[int]:
    """Return the peers whose memory this process can read."""
    return frozenset(
        link.peer
        for link in links
        if can_read(link.pid, addresses[link.peer].probe, addresses[link.peer].content)
    )


def _host() -> str:
    """Name the kernel, and the spaces of process ids and of sockets that this process is in."""
    facts: list[Callable[[], str]] = [
        Path("/proc/sys/kernel/random/boot_id").read_text,
        lambda: os.readlink("/proc/self/ns/pid"),
        lambda: os.readlink("/proc/self/ns/net"),
    ]
    try:
        return " ".join(fact().strip() for fact in facts)
    except OSError:
        return ""
