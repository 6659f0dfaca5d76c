"""Connections between the processes of one host, over sockets of the system.

A process that ends closes them, and its end is seen by its process id too, so that its peers notice
at once. Notes of the ranks go over them, and what is said while memory is read.
"""

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardspec.comm.agreement import Address, ranks_text
from shardspec.errors import CommunicatorError

__all__ = ["Link", "Listener"]

_MOST_BYTES: Final = 1 << 16
"""Of one message."""
_LATE: Final = "did not come in time (the timeout is that of the process group)"


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
                message = self._connection.recv(_MOST_BYTES, socket.MSG_DONTWAIT)
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

    Parameters
    ----------
    is_read
        If not, no other process finds anything to read in the memory of this one.
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

        Raises
        ------
        CommunicatorError
            If one of them does not come until the deadline, on the clock `time.monotonic`.
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
