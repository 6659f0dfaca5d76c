"""Processes that work on one output together, and talk through a directory beside it.

They need a file system that all of them see, and nothing else: no process group, no torch. The
first of them makes the directory; the others introduce themselves in it by a word that only this
run knows, so that nothing that an earlier run has left is mistaken for an answer.
"""

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardspec.checkpoint.claim import claimed_beside
from shardspec.errors import CheckpointError, ShardSpecError

__all__ = ["Member", "Team", "failing_together", "together"]

_PAUSE_S: Final = 0.02
_PATIENCE_S: Final = 600.0
"""How long the others may take to appear, and to end."""
_FAREWELL_S: Final = 5.0
"""How long they may take to hear of a failure."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of the processes."""

    rank: int
    size: int

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Member | None":
        """Return which of the processes of torchrun this is; None if it is alone.

        Examples
        --------
        >>> Member.of_environment({"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "4"})
        Member(rank=1, size=4)
        """
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
        return cls(rank, size) if size > 1 else None


class Team:
    """The processes, once all have met; made by `together`."""

    def __init__(self, member: Member, directory: Path) -> None:
        self.member = member
        self.directory = directory
        self.token = secrets.token_hex(8)
        """A word that all of them know, and no other run."""

    def say(self, what: str, value: object) -> None:
        """Tell the others something, once."""
        name = f"{what}.{self.member.rank}"
        temporary = self.directory / f"{name}.tmp"
        temporary.write_text(json.dumps(value), "utf-8")
        temporary.rename(self.directory / name)

    def hear(self, what: str, rank: int) -> object:
        """Wait for what another one says.

        Raises
        ------
        CheckpointError
            If it says that it has failed, or the first one has gone.
        """
        while True:
            for name in (f"{what}.{rank}", f"failed.{rank}"):
                with suppress(FileNotFoundError):
                    value = json.loads((self.directory / name).read_text("utf-8"))
                    if name.startswith("failed"):
                        raise CheckpointError(value)
                    return value
            if not self.directory.exists():
                raise CheckpointError(
                    f"{self.directory}: the first of the {self.member.size} processes has ended; "
                    "see what it says"
                )
            time.sleep(_PAUSE_S)

    def gather(self, what: str) -> list[object]:
        """Return what every one says, in the order of their ranks."""
        return [self.hear(what, rank) for rank in range(self.member.size)]


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
    place = path.with_name(f".{path.name}.shardspec-team")
    team = Team(member, place)
    if member.rank == 0:
        with claimed_beside(place, path):
            _welcome(team, place)
            with failing_together(team):
                yield team
            _wait_for_goodbyes(team, place, _PATIENCE_S)
    else:
        team.token = _introduce(member, place)
        with failing_together(team):
            yield team
        team.say("bye", None)


@contextmanager
def failing_together(team: Team) -> Iterator[None]:
    """Tell the others when something goes wrong."""
    try:
        yield
    except ShardSpecError as error:
        text = str(error)
        # What failed first is the cause; that others find their files gone is not.
        said = _said_before(team)
        if said is None:
            said = text if text.startswith("rank ") else f"rank {team.member.rank}: {text}"
        _say_failure(team, said)
        if said == text:
            raise
        raise type(error)(said) from None
    except BaseException:
        _say_failure(team, f"rank {team.member.rank} was interrupted")
        raise


def _said_before(team: Team) -> str | None:
    """Return what another one has said that failed."""
    with suppress(OSError):
        for name in sorted(os.listdir(team.directory)):
            if name.startswith("failed.") and not name.endswith(".tmp"):
                return str(json.loads((team.directory / name).read_text("utf-8")))
    return None


def _say_failure(team: Team, text: str) -> None:
    # Where nobody can be told any more, nobody waits.
    with suppress(OSError):
        team.say("failed", text)
        if team.member.rank == 0:
            _wait_for_goodbyes(team, team.directory, _FAREWELL_S)
        else:
            team.say("bye", None)


def _welcome(team: Team, place: Path) -> None:
    """Wait until everybody has come, and let them know."""
    words: dict[int, str] = {}
    deadline = time.monotonic() + _PATIENCE_S
    while len(words) < team.member.size - 1:
        for name in os.listdir(place):
            kind, _, rest = name.partition(".")
            if kind == "hello":
                rank, _, word = rest.partition(".")
                words[int(rank)] = word
        _pause(deadline, f"{place}: only {len(words) + 1} of {team.member.size} processes came")
    team.say("welcome", {"words": words, "token": team.token})


def _introduce(member: Member, place: Path) -> str:
    """Say hello until the first process has heard it; return the word that all share."""
    word = secrets.token_hex(8)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        # What was there may have been cleared away since.
        with suppress(OSError):
            (place / f"hello.{member.rank}.{word}").touch()
            heard = json.loads((place / "welcome.0").read_text("utf-8"))
            if heard["words"].get(str(member.rank)) == word:
                return str(heard["token"])
        _pause(deadline, f"{place}: the first of {member.size} processes did not come")


def _wait_for_goodbyes(team: Team, place: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    others = {f"bye.{rank}" for rank in range(1, team.member.size)}
    while not others <= set(os.listdir(place)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


def _pause(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise CheckpointError(
            f"{problem} within {_PATIENCE_S:.0f} s; give all of them the same output on a file "
            "system that they share"
        )
    time.sleep(_PAUSE_S)
