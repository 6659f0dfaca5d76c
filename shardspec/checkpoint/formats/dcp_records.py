"""What a torch distributed checkpoint's metadata says of every chunk, in three kinds of records.

There are as many of each as there are chunks, so that they are most of the metadata. torch's
pickler writes all of a kind by the same instructions but for the numbers; where it does, a record
is read as a whole, which takes less than half the time. Source: ``ChunkStorageMetadata`` and
``MetadataIndex`` in torch/distributed/checkpoint/metadata.py, ``_StorageInfo`` in its
filesystem.py, and Lib/pickle.py of CPython.
"""

import re
from collections.abc import Sequence
from typing import Final

from shardspec.checkpoint.torch_files.pickles import Allowed, Global, Record, Shortcuts

__all__ = [
    "RECORD_NAMES",
    "RECORD_SHORTCUTS",
    "ChunkRecord",
    "IndexRecord",
    "InfoRecord",
    "InsideOfRecord",
]


class ChunkRecord(Record):
    """A `ChunkStorageMetadata`: where a chunk starts, and its sizes."""

    __slots__ = ("offsets", "sizes")

    def build(self, state: object) -> None:
        """Keep what is needed of a state."""
        members = _dict(state)
        self.offsets, self.sizes = members.get("offsets"), members.get("sizes")


class IndexRecord(Record):
    """A `MetadataIndex`: the name of a tensor, and where a chunk of it starts."""

    __slots__ = ("fqn", "offset")

    def build(self, state: object) -> None:
        """Keep what is needed of a state."""
        members = _dict(state)
        self.fqn, self.offset = members.get("fqn"), members.get("offset")


class InfoRecord(Record):
    """A `_StorageInfo`: where in which file something lies."""

    __slots__ = ("file", "length", "offset", "transforms")

    def build(self, state: object) -> None:
        """Keep what is needed of a state."""
        members = _dict(state)
        self.file, self.offset = members.get("relative_path"), members.get("offset")
        self.length = members.get("length")
        self.transforms = members.get("transform_descriptors")


def _dict(state: object) -> dict[object, object]:
    if not isinstance(state, dict):
        raise ValueError("it is no dict")
    return state


def _chunk(args: tuple[object, ...]) -> ChunkRecord:
    return ChunkRecord("chunk", args)


def _index(args: tuple[object, ...]) -> IndexRecord:
    return IndexRecord("index", args)


def _info(args: tuple[object, ...]) -> InfoRecord:
    return InfoRecord("info", args)


_HOME: Final = "torch.distributed.checkpoint.metadata"
_CHUNK: Final = f"{_HOME}.ChunkStorageMetadata"
_INDEX: Final = f"{_HOME}.MetadataIndex"
_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
RECORD_NAMES: Final[Allowed] = {_CHUNK: _chunk, _INDEX: _index, _INFO: _info}
"""What calls of the three make."""

# --- the instructions of a record, from NEWOBJ to BUILD

_GET: Final = rb"(h.|j....)"
_INT: Final = rb"(?:K.|M..|J...[\x00-\x7f])"
_LONG: Final = rb"(K.|M..|J...[\x00-\x7f]|\x8a\x05.{5}|\x8a\x06.{6})"
_SIZES: Final = (
    _GET
    + rb"(\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)\x94)" % (_INT, _INT, _INT, _INT)
    + rb"\x85\x94R\x94"
)
_TEXT: Final = rb"(?:(h.|j....)|\x8c(.)([\x00-\x7f]{0,255}?)\x94)"
_OPEN: Final = rb"\x81\x94}\x94\("
_CHUNK_CODE: Final = re.compile(_OPEN + _GET + _SIZES + _GET + _SIZES + b"ub", re.DOTALL)
_INDEX_CODE: Final = re.compile(
    _OPEN + _GET + _TEXT + _GET + b"(?:" + _INT + b"|N)" + _GET + _SIZES + b"ub", re.DOTALL
)
_INFO_CODE: Final = re.compile(
    _OPEN + _GET + _TEXT + _GET + _LONG + _GET + _LONG + b"(?:" + _GET + b"N)?ub", re.DOTALL
)
_SIZE: Final = Global("torch.Size")
_CHUNK_WORDS: Final = ("offsets", _SIZE, "sizes", _SIZE)
_INDEX_WORDS: Final = ("fqn", "index", "offset", _SIZE)
_INFO_WORDS: Final = ("relative_path", "offset", "length", "transform_descriptors")
_LONG1: Final = 0x8A
_WIDTHS: Final = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
_RECORD_BYTES: Final = 320
"""What one takes of memory, about, with a short text and without its numbers, which are kept once;
the instructions by themselves are charged no less."""
_MOST_KEPT: Final = 1 << 16


class InsideOfRecord:
    """Stands for what only the making of a record needs, should anything refer to it.

    A pickler has no reason to, and nothing takes it for a value. Errors name the class.
    """


_INNER: Final = InsideOfRecord()
_ONE_INNER: Final = (_INNER,)
_TWO_INNER: Final = (_INNER, _INNER)


class _Reader:
    """What the three readers have in common; one of a kind reads one pickle."""

    __slots__ = ("_kept", "_right")

    def __init__(self) -> None:
        self._kept: dict[bytes, tuple[int, ...]] = {}
        self._right: tuple[bytes | None, ...] = ()
        """References that were found to be to the right words."""

    def _refer(
        self, references: tuple[bytes | None, ...], words: Sequence[object], memo: list[object]
    ) -> bool:
        """Return whether references are to the words; what has a number keeps it."""
        for reference, word in zip(references, words, strict=True):
            if reference is not None and _referred(reference, memo) != word:
                return False
        self._right = references
        return True

    def _sizes(self, code: bytes) -> tuple[int, ...]:
        """Return the numbers of a tuple, and keep them: the same few come again and again."""
        found = _numbers(code)
        if len(self._kept) < _MOST_KEPT:
            self._kept[code] = found
        return found


class _ChunkReader(_Reader):
    """Reads the instructions of a `ChunkRecord`."""

    __slots__ = ()

    def __call__(
        self, data: bytes, at: int, memo: list[object]
    ) -> tuple[ChunkRecord, int, int] | None:
        match = _CHUNK_CODE.match(data, at)
        if match is None:
            return None
        offsets_key, size, offsets, sizes_key, again, sizes = match.groups()
        references = offsets_key, size, sizes_key, again
        if references != self._right and not self._refer(references, _CHUNK_WORDS, memo):
            return None
        made = ChunkRecord("chunk", ())
        made.offsets = start = self._kept.get(offsets) or self._sizes(offsets)
        made.sizes = shape = self._kept.get(sizes) or self._sizes(sizes)
        memo += (made, _INNER, *_inside(offsets), start, *_inside(sizes), shape)
        return made, match.end(), _RECORD_BYTES


class _IndexReader(_Reader):
    """Reads the instructions of an `IndexRecord`."""

    __slots__ = ()

    def __call__(
        self, data: bytes, at: int, memo: list[object]
    ) -> tuple[IndexRecord, int, int] | None:
        match = _INDEX_CODE.match(data, at)
        if match is None:
            return None
        fqn_key, fqn, length, text, index_key, offset_key, size, offset = match.groups()
        if fqn is None and len(text) != length[0]:
            return None
        references = fqn_key, index_key, offset_key, size
        if references != self._right and not self._refer(references, _INDEX_WORDS, memo):
            return None
        made = IndexRecord("index", ())
        made.offset = start = self._kept.get(offset) or self._sizes(offset)
        made.fqn, numbered = _text(fqn, text, memo)
        memo += (made, _INNER, *numbered, *_inside(offset), start)
        return made, match.end(), _RECORD_BYTES


class _InfoReader(_Reader):
    """Reads the instructions of an `InfoRecord`."""

    __slots__ = ()

    def __call__(
        self, data: bytes, at: int, memo: list[object]
    ) -> tuple[InfoRecord, int, int] | None:
        match = _INFO_CODE.match(data, at)
        if match is None:
            return None
        path_key, path, path_bytes, text, start_key, start, length_key, length, none_key = (
            match.groups()
        )
        if path is None and len(text) != path_bytes[0]:
            return None
        references = path_key, start_key, length_key, none_key
        if references != self._right and not self._refer(references, _INFO_WORDS, memo):
            return None
        made = InfoRecord("info", ())
        made.offset, made.length, made.transforms = _number(start), _number(length), None
        made.file, numbered = _text(path, text, memo)
        memo += (made, _INNER, *numbered)
        return made, match.end(), _RECORD_BYTES


RECORD_SHORTCUTS: Final[Shortcuts] = {
    _CHUNK: _ChunkReader,
    _INDEX: _IndexReader,
    _INFO: _InfoReader,
}
"""What reads each of them as a whole."""


def _referred(reference: bytes, memo: list[object]) -> object:
    """Return what BINGET or LONG_BINGET takes up again."""
    return memo[int.from_bytes(reference[1:], "little")]


def _text(
    reference: bytes | None, text: bytes, memo: list[object]
) -> tuple[object, tuple[object, ...]]:
    """Return a text that is taken up again or stated, and what is numbered for it."""
    if reference is not None:
        return _referred(reference, memo), ()
    stated = text.decode("ascii")
    return stated, (stated,)


def _number(code: bytes) -> int:
    """Return what BININT1, BININT2, BININT or LONG1 states."""
    if code[0] == _LONG1:
        return int.from_bytes(code[2:], "little", signed=True)
    return int.from_bytes(code[1:], "little")


def _numbers(code: bytes) -> tuple[int, ...]:
    """Return the numbers of a tuple, which ends with its instruction and MEMOIZE if it has any."""
    at, end, numbers = int(code[:1] == b"("), len(code) - 2, []
    while at < end:
        after = at + 1 + _WIDTHS[code[at]]
        numbers.append(int.from_bytes(code[at + 1 : after], "little"))
        at = after
    return tuple(numbers)


def _inside(code: bytes) -> tuple[InsideOfRecord, ...]:
    """Return what the making of a `torch.Size` numbers before itself: its tuple and arguments."""
    # The empty tuple has an instruction of its own, and no number.
    return _ONE_INNER if code == b")" else _TWO_INNER
