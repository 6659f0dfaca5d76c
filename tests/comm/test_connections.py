"""Links, made by threads that stand for processes: the sockets are the same."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from shardspec.comm.agreement import NOTE_ROOM, Connection, Listener, Note
from shardspec.comm.transports.peer_memory import readable
from shardspec.errors import CommunicatorError


def soon(seconds: float = 10) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def linked():
    """Rank 2's link to rank 5, and rank 5's to rank 2."""
    made: dict[int, dict[int, Connection]] = {}
    with Listener() as two, Listener() as five:

        def connect() -> None:
            made[5] = five.connect(5, {2: two.address}, soon())

        thread = threading.Thread(target=connect)
        thread.start()
        made[2] = two.connect(2, {5: five.address}, soon())
        thread.join()
    to_five, to_two = made[2][5], made[5][2]
    yield to_five, to_two
    to_five.close()
    to_two.close()


def test_notes_arrive_whole_and_in_order(linked):
    to_five, to_two = linked
    assert (to_five.peer, to_two.peer) == (5, 2)
    assert to_five.pid == to_two.pid == os.getpid()
    notes = [Note("done", 1), Note("value", 2, 3, content=b"x" * NOTE_ROOM), Note("done", 4)]
    for note in notes:
        to_five.send(note)
    to_two.send(Note("done", 5))
    assert [to_two.receive(soon()) for _ in range(3)] == notes
    assert to_five.receive(soon()) == Note("done", 5)


def test_a_peer_that_does_not_come(linked):
    to_five, _ = linked
    start = time.monotonic()
    with pytest.raises(CommunicatorError, match="rank 5 did not come in time"):
        to_five.receive(soon(0.05))
    assert 0.04 < time.monotonic() - start < 5
    with pytest.raises(CommunicatorError, match="rank 5 did not come in time"):
        to_five.receive(soon(-1))


def test_a_peer_that_ends(linked):
    to_five, to_two = linked
    assert not to_five.has_ended()
    to_two.send(Note("done", 1))
    to_two.close()
    assert to_two.has_ended()
    assert to_five.has_ended()  # though there is still something to read
    assert to_five.receive(soon()) == Note("done", 1)
    to_five.send(Note("done", 2))
    with pytest.raises(CommunicatorError, match="rank 5 has ended or given up"):
        to_five.receive(soon())


def test_a_link_that_is_dropped_is_closed():
    there, here = socket.socketpair()
    link = Connection(1, os.getpid(), here)
    assert not link.has_ended()
    del link
    assert there.recv(1) == b""
    there.close()


def test_nobody_else_can_take_the_place_of_a_rank():
    with Listener() as listener:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + listener.address.socket)
        others = {3: listener.address._replace(pid=2**22 + 1), 7: listener.address._replace(pid=1)}
        with pytest.raises(CommunicatorError, match="ranks 3, 7 did not come in time"):
            listener.connect(1, others, soon(0.1))
        assert stranger.recv(1) == b""
        stranger.close()
    with pytest.raises(CommunicatorError, match="rank 0 cannot be reached on this host"):
        listener.connect(1, {0: listener.address}, soon())


def test_a_caller_that_has_ended_before_it_is_answered():
    call = "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(chr(0) + sys.argv[1])"
    with Listener() as listener:
        command = [sys.executable, "-c", f"import socket, sys; {call}", listener.address.socket]
        with subprocess.Popen(command) as caller:
            assert caller.wait() == 0
        other = listener.address._replace(pid=caller.pid)
        with pytest.raises(CommunicatorError, match="rank 3 cannot be reached on this host: No su"):
            listener.connect(1, {3: other}, soon())


def test_who_can_be_read():
    with Listener() as listener:
        mine = listener.address
        assert mine.host
        assert mine.pid == os.getpid()
        with Listener(is_read=False) as apart:
            assert apart.address.host == mine.host
            assert readable({4: apart.address, 5: mine}) == {5}
        assert readable({5: mine}) == {5}
        assert readable({5: mine._replace(socket="something else")}) == frozenset()
        assert ctypes.string_at(mine.probe).decode() == mine.socket
