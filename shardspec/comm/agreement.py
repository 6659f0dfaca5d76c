"""What ranks tell each other before anything moves, and whether they agree on it."""

import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shardspec.errors import CommunicatorError

__all__ = [
    "NOTE_BYTES",
    "NOTE_ROOM",
    "ORDER_RULE",
    "Address",
    "Note",
    "Unanswered",
    "check_agreement",
    "description",
    "ranks_text",
]

NOTE_BYTES: Final = 4096
NOTE_ROOM: Final = NOTE_BYTES - 512
"""Bytes of content that a note has room for."""
_MOST_OF_A_WORD: Final = 240
ORDER_RULE: Final = "every rank of the mesh must call the same conversions in the same order"


class Unanswered(CommunicatorError):
    """Some ranks did not answer; `why` says what was seen of them."""

    def __init__(self, peers: Iterable[int], why: str) -> None:
        self.peers, self.why = tuple(peers), why
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
    half = _MOST_OF_A_WORD // 2
    return word if len(word) <= 2 * half else f"{word[:half]} ... {word[-half:]}"


def check_agreement(notes: Mapping[int, Note]) -> str:
    """Return where the shards are, if all ranks are about to do the same.

    Parameters
    ----------
    notes
        Of all ranks of a mesh, in the order of its ids.

    Raises
    ------
    CommunicatorError
        If a rank says something else, naming it, both conversions and the first difference.
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
