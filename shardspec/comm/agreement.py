"""Compares notes (short messages) of all ranks, to check that they run the same conversion."""

import hashlib
import json
import pickle
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

from shardspec.errors import CommunicatorError, ShardSpecError
from shardspec.text import ranks_text

E = TypeVar("E", bound=BaseException)

NOTE_BYTES: Final = 4096
NOTE_ROOM: Final = NOTE_BYTES - 512
"""Maximum bytes of a note's content."""
ORDER_RULE: Final = "every rank of the mesh must call the same conversions in the same order"
_HALF: Final = 120
"""Characters shown from the start and from the end of a long word."""
_ON_ALL_RANKS: Final = "_shardspec_on_all_ranks"


class Note(NamedTuple):
    """A message to all other ranks of a mesh before a conversion or a gather."""

    kind: str
    """"conversion", "value" (to be gathered) or "failed"."""
    members: int
    """Bit set of the ranks that exchange notes."""
    device: str = ""
    """Device type of the rank's shards; empty if it has none."""
    content: bytes = b""
    """A `description` or an error; at most `NOTE_ROOM` bytes together with the value."""
    value: bytes = b""
    """The start of a pickled value, which may differ from rank to rank."""
    length: int = 0
    """Bytes of the complete value."""

    def pack(self) -> bytes:
        """Return the note as bytes: at most `NOTE_BYTES`, plus a bit for each rank of the job."""
        return pickle.dumps(tuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> "Note":
        """Return the note in bytes of `pack`, which may be padded."""
        return cls(*pickle.loads(data))

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that exchange this note, from the bits of `members`."""
        bits = range(self.members.bit_length())
        return frozenset(rank for rank in bits if self.members >> rank & 1)

    @property
    def failure(self) -> str:
        """The rank's error if it has failed, else an empty text."""
        return self.content.decode(errors="replace") if self.kind == "failed" else ""

    def is_like(self, other: "Note") -> bool:
        """Return True if two ranks are about to run the same conversion or gather."""
        return self[:2] == other[:2] and self.content == other.content

    def __str__(self) -> str:
        if self.kind != "conversion":
            return f"gathers a value of {ranks_text(self.ranks)}"
        words = json.loads(self.content)
        text = ", ".join(f"{name} {word}" for name, word in words.items() if name != "digest")
        return f"asks for a conversion ({text})"


def description(words: Mapping[str, str]) -> bytes:
    """Return the content of a conversion's note: long words shortened, and a digest of all words.

    >>> json.loads(description({"target": "[S0]"}))["target"]
    '[S0]'
    """
    digest = hashlib.sha256(json.dumps(dict(words)).encode()).hexdigest()
    short = {
        name: word if len(word) <= 2 * _HALF else f"{word[:_HALF]} ... {word[-_HALF:]}"
        for name, word in words.items()
    }
    text = json.dumps({"digest": digest, **short})
    assert len(text) <= NOTE_ROOM, "there are few words"
    return text.encode()


def failure_text(error: BaseException) -> str:
    """Return an error as text for other ranks, with its type unless it is a `ShardSpecError`.

    >>> failure_text(ValueError("no room")), failure_text(CommunicatorError("no room"))
    ('ValueError: no room', 'no room')
    """
    kind = "" if isinstance(error, ShardSpecError) else type(error).__name__
    try:
        return ": ".join(filter(None, [kind, str(error)]))
    except Exception:  # __str__ of a user's error may raise anything
        return kind


def on_all_ranks(error: E) -> E:
    """Mark an error as known to all ranks of the mesh, and return it.

    >>> error = on_all_ranks(ValueError("x"))
    >>> is_on_all_ranks(error), is_on_all_ranks(error)
    (True, False)
    """
    vars(error)[_ON_ALL_RANKS] = True
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    """Return True if `on_all_ranks` has marked an error, so that no other rank waits.

    Removes the mark, because other code may raise the same object again.
    """
    return bool(vars(error).pop(_ON_ALL_RANKS, False))


def check_agreement(notes: Mapping[int, Note]) -> str:
    """Check that the notes of all ranks agree; return the device type of the shards.

    Raises `CommunicatorError` if two notes differ (the message names rank and difference), or if
    a rank has failed (the message has its error).

    >>> check_agreement({0: Note("value", 3, "cpu"), 1: Note("value", 3)})
    'cpu'
    """
    first, mine = next(iter(notes.items()))
    for peer, note in notes.items():
        if note.failure:
            raise on_all_ranks(failed(peer, note))
    for peer, note in notes.items():
        if not note.is_like(mine):
            difference = _difference(first, mine, peer, note)
            raise on_all_ranks(CommunicatorError(f"{difference}; {ORDER_RULE}"))
    holders = {note.device: rank for rank, note in notes.items() if note.device}
    if len(holders) > 1:
        places = ", ".join(f"rank {rank} on {device}" for device, rank in holders.items())
        raise on_all_ranks(
            CommunicatorError(
                f"shards are on different device types: {places}; move them to one type first"
            )
        )
    return next(iter(holders), "")


def failed(rank: int, note: Note) -> CommunicatorError:
    """Return the error to raise on the other ranks after one has failed."""
    return CommunicatorError(
        f"rank {rank} has failed, so the call ends on all ranks of the mesh: {note.failure}"
    )


def _difference(first: int, mine: Note, peer: int, note: Note) -> str:
    if mine.kind != "conversion" or note.kind != mine.kind or note.content == mine.content:
        return f"rank {peer} {note}, but rank {first} {mine}"
    own_words, other_words = json.loads(mine.content), json.loads(note.content)
    differing = "; ".join(
        f"{name} {other_words.get(name)} where rank {first} has {word}"
        for name, word in own_words.items()
        if name != "digest" and word != other_words.get(name)
    )
    return (
        f"rank {peer} asks for another conversion than rank {first}: "
        f"{differing or 'they differ in a part too long to show'}; rank {first} {mine}, rank "
        f"{peer} {note}"
    )
