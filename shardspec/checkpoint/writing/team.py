"""Processes that work on one output together, and talk through a place beside it.

They need a file system or an object store that all of them see, and nothing else: no process group,
no torch. The first of them clears the place; the others introduce themselves there by a word that
only they know, so that nothing that an earlier run has left is mistaken for an answer.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shardspec.checkpoint.store import RemotePath
from shardspec.checkpoint.writing.board import Board, DirectoryBoard, StoreBoard
from shardspec.checkpoint.writing.claim import claimed_beside
from shardspec.checkpoint.writing.member import Member
from shardspec.errors import CheckpointError, ShardSpecError

__all__ = ["Team", "failing_together", "together"]

_PAUSE_S: Final = 0.02
"""How long to wait before looking again, at first."""
_PATIENCE_S: Final = 600.0
"""How long the others may take to appear, and to end."""
_FAREWELL_S: Final = 5.0
"""How long they may take to hear of a failure."""


class Team:
    """The processes, once all have met; made by `together`.

    Parameters
    ----------
    member
        Which one this is.
    place, board
        Where they talk.
    token
        A word that all of them know, and no other run.
    """

    def __init__(self, member: Member, place: Path, board: Board, token: str) -> None:
        self.member = member
        self.token = token
        self._place = place
        self._board = board

    def say(self, what: str, value: object) -> None:
        """Tell the others something, once."""
        self._board.put(f"{self.token}.{what}.{self.member.rank}", json.dumps(value))

    def hear(self, what: str, rank: int) -> object:
        """Wait for what another one says.

        Raises
        ------
        CheckpointError
            If it says that it has failed, or the first one has gone.
        """
        return self._hear(what, rank, rank)

    def gather(self, what: str) -> list[object]:
        """Return what every one says, in the order of their ranks; raise if any has failed."""
        return [self._hear(what, rank, None) for rank in range(self.member.size)]

    def _hear(self, what: str, rank: int, failing: int | None) -> object:
        pauses = _pauses(self._board)
        while True:
            text = self._board.get(f"{self.token}.{what}.{rank}")
            if text is not None:
                return json.loads(text)
            self.listen(failing)
            time.sleep(next(pauses))

    def said(self, what: str) -> list[object]:
        """Return what was said so far, without waiting."""
        texts = (self._board.get(f"{self.token}.{what}.{r}") for r in range(self.member.size))
        return [json.loads(text) for text in texts if text is not None]

    def listen(self, failing: int | None = None) -> None:
        """Go on only if all is well.

        Parameters
        ----------
        failing
            Whose failure counts; that of any process unless stated.

        Raises
        ------
        CheckpointError
            If it says that it has failed, or the first process has gone.
        """
        names = self._board.names()
        failed = self._failed(names, failing)
        if failed is not None:
            raise CheckpointError(failed)
        if f"{self.token}.{_WELCOME}" not in names:
            raise CheckpointError(
                f"{self._place}: the first of the {self.member.size} processes has ended, or "
                "another run has begun; see what it says"
            )

    def has_failed(self, rank: int) -> bool:
        """Return whether a process says that it has failed."""
        return self._failed(self._board.names(), rank) is not None

    def _failed(self, names: set[str], rank: int | None = None) -> str | None:
        """Return what one has said that failed, or a certain one, if any."""
        ranks = range(self.member.size) if rank is None else (rank,)
        for name in (f"{self.token}.failed.{rank}" for rank in ranks):
            text = self._board.get(name) if name in names else None
            if text is not None:
                return str(json.loads(text))
        return None

    def tell_failure(self, error: ShardSpecError | None) -> str:
        """Tell the others that something has gone wrong here; return what has, first of all.

        What failed first is the cause; that others find their files gone is not.
        """
        said = f"rank {self.member.rank} was interrupted"
        # Where nobody can be told any more, nobody waits.
        with suppress(OSError, ShardSpecError):
            if error is not None:
                said = str(error)
                said = said if said.startswith("rank ") else f"rank {self.member.rank}: {said}"
                said = self._failed(self._board.names()) or said
            self.say("failed", said)
            if self.member.rank == 0:
                self.wait_for_goodbyes(_FAREWELL_S)
            else:
                self.say("bye", None)
        return said

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Wait until all others have ended, or for so long."""
        deadline = time.monotonic() + seconds
        others = {f"{self.token}.bye.{rank}" for rank in range(1, self.member.size)}
        pauses = _pauses(self._board)
        while not others <= self._board.names() and time.monotonic() < deadline:
            time.sleep(next(pauses))


@contextmanager
def together(member: Member, path: Path) -> Iterator[Team]:
    """Meet the other processes beside an output; what fails in one fails in all.

    Parameters
    ----------
    member
        Which one this is.
    path
        The output, the same for all.

    Raises
    ------
    CheckpointError
        In every process, if one of them fails, or does not appear in time.
    """
    if isinstance(path, RemotePath) and len(path.parts) < 3:
        raise CheckpointError(f"{path}: is a bucket; name a file or a directory in it")
    place = path.with_name(f".{path.name}.shardspec-team")
    if member.rank:
        board: Board = _board(place)
        team = Team(member, place, board, _introduce(member, place, board))
        with failing_together(team):
            yield team
        team.say("bye", None)
        return
    token = os.urandom(8).hex()
    with _cleared(place, path, (f"{token}.", f"hello.{member.job}.")) as board:
        team = Team(member, place, board, token)
        _welcome(team, place, board)
        with failing_together(team):
            yield team
        team.wait_for_goodbyes(_PATIENCE_S)


def _board(place: Path) -> StoreBoard | DirectoryBoard:
    return StoreBoard(place) if isinstance(place, RemotePath) else DirectoryBoard(place)


@contextmanager
def _cleared(place: Path, path: Path, own: tuple[str, ...]) -> Iterator[Board]:
    """Make an empty place to talk, and in the end remove what starts with words of this run."""
    board = _board(place)
    if isinstance(board, DirectoryBoard):
        with claimed_beside(place, path):
            yield board
        return
    # Stores have no locks: of two runs at one output the later one goes on.
    board.clear(board.names())
    try:
        yield board
    finally:
        with suppress(ShardSpecError):
            board.clear({name for name in board.names() if name.startswith(own)})


@contextmanager
def failing_together(team: Team) -> Iterator[None]:
    """Tell the others when something goes wrong."""
    try:
        yield
    except ShardSpecError as error:
        said = team.tell_failure(error)
        if said == str(error):
            raise
        raise type(error)(said) from None
    except BaseException:
        team.tell_failure(None)
        raise


_WELCOME: Final = "welcome"


def _welcome(team: Team, place: Path, board: Board) -> None:
    """Wait until everybody has come, and let them know."""
    words: dict[int, str] = {}
    deadline = time.monotonic() + _PATIENCE_S
    pauses = _pauses(board)
    while True:
        for name in board.names():
            kind, _, rest = name.partition(".")
            if kind == "hello":
                job, rank, word = rest.split(".")
                if job == team.member.job:
                    words[int(rank)] = word
        if len(words) == team.member.size - 1:
            break
        _pause(pauses, deadline, f"{place}: only {len(words) + 1} of {team.member.size} came")
    board.put(f"{team.token}.{_WELCOME}", json.dumps({"words": words}))


def _introduce(member: Member, place: Path, board: Board) -> str:
    """Say hello until the first process has heard it; return the word that all share."""
    word = os.urandom(8).hex()
    deadline = time.monotonic() + _PATIENCE_S
    pauses = _pauses(board)
    while True:
        # What was there may have been cleared away since.
        with suppress(OSError):
            names = board.names()
            hello = f"hello.{member.job}.{member.rank}.{word}"
            if hello not in names:
                board.put(hello, "")
            for name in names:
                token, _, kind = name.partition(".")
                if kind == _WELCOME:
                    heard = json.loads(board.get(name) or "{}").get("words", {})
                    if heard.get(str(member.rank)) == word:
                        return token
        _pause(pauses, deadline, f"{place}: the first of {member.size} processes did not come")


def _pauses(board: Board) -> Iterator[float]:
    """Yield how long to wait before looking again, each time longer."""
    pause = _PAUSE_S
    while True:
        yield pause
        pause = min(pause * 1.5, board.longest_pause_s)


def _pause(pauses: Iterator[float], deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise CheckpointError(
            f"{problem} within {_PATIENCE_S:.0f} s; give all of them the same output on a file "
            "system or in a store that they share"
        )
    time.sleep(next(pauses))
