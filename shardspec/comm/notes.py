"""Exchanges notes (short texts) between ranks before data moves, to agree or to report an error.

A rank that fails sends the error in place of a note. It also writes the error to the store of the
process group, from which other ranks read it after a timeout. Threads convert one at a time.
"""

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist

from shardspec.comm.agreement import (
    NOTE_BYTES,
    NOTE_ROOM,
    ORDER_RULE,
    Note,
    failure_text,
    on_all_ranks,
)
from shardspec.comm.transports.messages import cause_of
from shardspec.comm.transports.stage import Transport
from shardspec.errors import CommunicatorError
from shardspec.mesh.job import Job, job_store
from shardspec.text import ranks_text

_NOTE_TAG: Final = 0x5AD0
_VALUE_TAG: Final = 0x5AD1
"""The tag of values too long for a note."""
_PATIENCE_S: Final = 1.0
"""Seconds for which a failing rank waits for other ranks' errors in the store."""


@dataclass(slots=True, eq=False)
class Notes:
    """The notes of one process of a job, and the thread that converts."""

    job: Job
    rank: int
    is_telling: bool = False
    """True while the thread that converts sends its errors to other ranks."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _owner: int | None = None
    """The thread that converts."""
    _refused: deque[tuple[Note, Sequence[int]]] = field(default_factory=deque)
    """Unsent errors of refused threads, each with the ranks to send it to."""
    _inbox: dict[int, tuple[torch.Tensor, dist.Work]] = field(default_factory=dict)
    """The next note of each peer; its receive is posted early, to save time."""
    _skipped: Counter[int] = field(default_factory=Counter)
    """Stale notes to skip, by peer: answers to calls that failed on this rank."""
    _leaving: list[tuple[torch.Tensor, dist.Work]] = field(default_factory=list)
    """Pending sends of notes, kept alive until they complete."""
    _group: dist.ProcessGroup | None = None
    _note_bytes: int = field(default_factory=lambda: NOTE_BYTES + dist.get_world_size() // 8)
    _has_spoken: bool = False
    """True once this rank has written to the store."""
    _given_up: str = ""
    """The error after which this rank refuses conversions."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group for notes; raises `CommunicatorError` if there is none."""
        if self._group is None:
            group = self.job.gloo or dist.group.WORLD
            if group is None or "gloo" not in dist.get_backend_config(group):
                raise CommunicatorError(
                    "this job has no gloo group for notes between its ranks; make a mesh of all "
                    "ranks first, by init_device_mesh"
                )
            self._group = group
        return self._group

    @property
    def timeout_s(self) -> float:
        """The timeout of the process group."""
        options = self.group._get_backend(torch.device("cpu")).options
        seconds: float = options._timeout.total_seconds()
        return seconds

    @property
    def is_mine(self) -> bool:
        """True if the calling thread is the one that converts."""
        return self._owner == threading.get_ident()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Reserve conversions for this thread; `CommunicatorError` if another thread has them."""
        if os.getpid() != self.job.pid:
            raise CommunicatorError(
                f"this process is a forked child of rank {self.rank}, not a rank of the job; "
                "convert in the rank itself"
            )
        if self.is_mine:
            yield
            return
        if not self._lock.acquire(blocking=False):
            raise CommunicatorError(
                "another thread of this process is converting; convert in one thread at a time"
            )
        self._owner = threading.get_ident()
        try:
            if self._given_up:
                raise CommunicatorError(
                    f"rank {self.rank} gave up an earlier conversion, so the job cannot go on: "
                    f"{self._given_up}"
                )
            yield
            if self._refused:
                # Notes of the refused thread may have reached other ranks instead.
                raise on_all_ranks(
                    CommunicatorError(
                        "two threads of this process converted at the same time, so their results "
                        "may be mixed up; convert in one thread at a time"
                    )
                )
        finally:
            self._owner = None
            self._lock.release()
            self._send_refused()

    def exchange(self, mine: Note, peers: Sequence[int]) -> dict[int, Note]:
        """Exchange notes with some ranks, which all call this; return their notes by rank.

        Stops at the first note that differs from `mine`. Raises `CommunicatorError` if a rank does
        not answer within the timeout.
        """
        notes: dict[int, Note] = {}
        try:
            for peer in peers:
                self._await(peer)
            sent = self._send(mine, peers)
            for peer in peers:
                for _ in range(self._skipped.pop(peer, 0)):
                    self._next(peer)
                notes[peer] = self._next(peer)
                if notes[peer].failure or not notes[peer].is_like(mine):
                    break
            else:
                for _, work in sent:
                    work.wait()
                self._forget()
                return notes
        except RuntimeError as error:
            silent = [peer for peer in peers if peer not in notes]
            raise self._unanswered(mine, silent or peers, error) from error
        self._leaving += sent
        self._skipped.update(peer for peer in peers if peer not in notes)
        return notes

    def exchange_values(
        self, mine: Note, content: bytes, lengths: Mapping[int, int]
    ) -> dict[int, bytes]:
        """Send `content` to the ranks in `lengths`; return the bytes that each of them sends."""
        received = {
            peer: torch.empty(length, dtype=torch.uint8) for peer, length in lengths.items()
        }
        sent = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)
        try:
            works = [
                self.group.recv([to], peer, _VALUE_TAG) for peer, to in received.items() if len(to)
            ]
            if content:
                works += [self.group.send([sent], peer, _VALUE_TAG) for peer in lengths]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._unanswered(mine, lengths, error) from error
        return {peer: data.numpy().tobytes() for peer, data in received.items()}

    def fail(self, error: BaseException, mine: Note, peers: Sequence[int]) -> None:
        """Report an error: to some ranks in place of the next note, and to the store."""
        text = failure_text(error)
        content = text.encode(errors="replace")[:NOTE_ROOM]
        self._speak(f"has failed: {text}", failed=True)
        self._refused.append((mine._replace(kind="failed", content=content), peers))
        self._send_refused()

    def fail_for(self, error: BaseException, mine: Note, notes: Iterable[Note]) -> None:
        """Send an error to ranks that wait for this rank, but not on the mesh of `mine`."""
        waiting = {rank for note in notes if self.rank in note.ranks for rank in note.ranks}
        if waiting - mine.ranks:
            self.fail(error, mine, sorted(waiting - mine.ranks))

    def _send_refused(self) -> None:
        """Send errors of refused threads now, or let the thread that converts do it later."""
        while self._refused and (self.is_mine or self._lock.acquire(blocking=False)):
            try:
                note, peers = self._refused.popleft()
                self._leaving += self._send(note, peers)
                self._skipped.update(peers)
            finally:
                if not self.is_mine:
                    self._lock.release()

    def _send(self, note: Note, peers: Sequence[int]) -> list[tuple[torch.Tensor, dist.Work]]:
        data = note.pack().ljust(self._note_bytes)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sent = []
        for peer in peers:
            with suppress(RuntimeError):  # if the peer has ended, the wait for its note fails too
                sent.append((tensor, self.group.send([tensor], peer, _NOTE_TAG)))
        return sent

    def _await(self, peer: int) -> None:
        if peer not in self._inbox:
            buffer = torch.empty(self._note_bytes, dtype=torch.uint8)
            self._inbox[peer] = buffer, self.group.recv([buffer], peer, _NOTE_TAG)

    def _next(self, peer: int) -> Note:
        """Return the next note of a peer, and post the receive of the one after it."""
        self._await(peer)
        buffer, work = self._inbox.pop(peer)
        work.wait()
        with suppress(RuntimeError):  # a rank may end after its last note
            self._await(peer)
        return Note.unpack(buffer.numpy().tobytes())

    def _speak(self, text: str, *, failed: bool = False) -> None:
        """Write this rank's state to the store; other ranks quote it after a timeout."""
        with suppress(RuntimeError):  # the store's server may have ended
            job_store().set(f"shardspec/{self.rank}", json.dumps([failed, text]))
            self._has_spoken = True

    def _forget(self) -> None:
        """Delete this rank's entry in the store, since ranks have agreed."""
        if self._has_spoken:
            self._has_spoken = False
            with suppress(RuntimeError):
                job_store().delete_key(f"shardspec/{self.rank}")

    @contextmanager
    def moving(self, transport: Transport, peers: Iterable[int]) -> Iterator[None]:
        """Wrap the movement of data: an error quotes other ranks, and ends all later conversions.

        Otherwise the next conversion would receive data of this one.
        """
        try:
            yield
        except CommunicatorError as error:
            transport.close()
            heard = self._give_up(str(error), peers)
            raise CommunicatorError(f"{error}{heard}; the job cannot go on") from error.__cause__
        except BaseException as error:
            transport.close()
            self._given_up = failure_text(error)
            self._speak(f"has failed: {self._given_up}", failed=True)
            raise

    def _unanswered(self, mine: Note, silent: Iterable[int], why: RuntimeError) -> BaseException:
        """Return the error for peers `silent`, which did not answer `mine`; `why` is the cause."""
        text = f"{ranks_text(silent)} did not answer: {cause_of(why)}; rank {self.rank} {mine}"
        heard = self._give_up(text, silent, str(mine))
        return on_all_ranks(CommunicatorError(f"{text}{heard}; {ORDER_RULE}"))

    def _give_up(self, error: str, peers: Iterable[int], words: str = "") -> str:
        """Make this rank refuse later conversions; return the errors of `peers` as text."""
        self._given_up = error
        self._speak(words or f"gave up: {error}")
        end, states = time.monotonic() + _PATIENCE_S, dict[int, str]()
        with suppress(RuntimeError):
            while True:
                for peer in peers:
                    key = f"shardspec/{peer}"
                    if job_store().check([key]):
                        failed, states[peer] = json.loads(job_store().get(key))
                        if failed:
                            return f"; rank {peer} {states[peer]}"
                if time.monotonic() > end:
                    break
                time.sleep(_PATIENCE_S / 50)
        return "".join(f"; rank {peer} {words}" for peer, words in [*states.items()][:2])
