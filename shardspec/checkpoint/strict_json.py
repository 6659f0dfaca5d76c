"""JSON from files that are not trusted: nothing is guessed, and errors name file, key and value."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Never, TypeVar

from shardspec.errors import CheckpointError
from shardspec.text import shown

__all__ = [
    "JSONStream",
    "as_list",
    "as_object",
    "as_size",
    "as_sizes",
    "as_text",
    "field",
    "member",
    "parse_json",
]

_T = TypeVar("_T")

_CHUNK: Final = 256 << 10
"""Bytes of a long text that are read at once."""
_MOST_MEMBER: Final = 4 << 20
"""Characters of one value in a long text; what is parsed takes 30 times as much at most."""
_MOST_LISTS: Final = 1 << 17
"""Lists in the first quarter of a value that is as long as a value may be."""
_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_KEY: Final = re.compile(r'"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
"""A key without escapes, as most are."""


class _BadJSONError(ValueError):
    """What is wrong with a text."""


def parse_json(data: bytes, file: Path, what: str) -> object:
    """Return the value that bytes hold as strict JSON; `what` they are is for errors."""
    try:
        text: object = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_repeats, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise _damaged(file, what, error) from None
    return text


class JSONStream:
    """Reads JSON that may be long, in memory that does not grow with it.

    Objects and lists are gone through with `members` and `items`. After each key or index that
    these yield, its value has to be taken: by `value`, or by going through it in turn.

    Parameters
    ----------
    read
        Returns bytes of the text, given the position of the first and how many.
    num_bytes
        Length of the text.
    file, what
        As for `parse_json`.

    Examples
    --------
    >>> text = b'{"a": 1, "b": [2, [3]]}'
    >>> stream = JSONStream(lambda at, n: text[at : at + n], len(text), Path("file"), "header")
    >>> for key in stream.members():
    ...     print(key, stream.value() if key == "a" else [stream.value() for _ in stream.items()])
    a 1
    b [2, [3]]
    >>> stream.end()
    """

    def __init__(
        self, read: Callable[[int, int], bytes], num_bytes: int, file: Path, what: str
    ) -> None:
        self._read, self._num_bytes, self._file, self._what = read, num_bytes, file, what
        self._parse = json.JSONDecoder(
            object_pairs_hook=_no_repeats, parse_constant=_no_constant
        ).raw_decode
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._taken = 0
        self._before = 0
        """Characters that are no longer in `_text`."""
        self._text = ""
        self._at = 0
        self._skip_blanks()

    def members(self, name: str = "") -> Iterator[str]:
        """Yield the keys of the object that comes next; `name` is its own, for errors."""
        if name and self._next() != "{":
            as_object(self.value(), self._file, name)
        self._pass("{")
        seen: set[str] = set()
        mark = "}" if self._next() == "}" and self._pass("}") else ","
        while mark == ",":
            key = self._key()
            if key in seen:
                self._fail(f"has the key {shown(key)} twice")
            seen.add(key)
            yield key
            mark = self._pass(",}")

    def items(self, name: str = "") -> Iterator[int]:
        """Yield the indices of the list that comes next; `name` is its own, for errors."""
        if name and self._next() != "[":
            as_list(self.value(), self._file, name)
        self._pass("[")
        mark = "]" if self._next() == "]" and self._pass("]") else ","
        index = 0
        while mark == ",":
            yield index
            index += 1
            mark = self._pass(",]")

    def value(self) -> object:
        """Return the value that comes next."""
        while True:
            try:
                found, end = self._parse(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, _BadJSONError) or not self._read_on():
                    raise self._damaged(error) from None
                continue
            # At the end of what was read, a number may go on.
            if end < len(self._text) or not self._read_on():
                self._at = end
                return found

    def end(self) -> None:
        """Check that nothing follows."""
        if self._next():
            raise self._damaged(json.JSONDecodeError("Extra data", self._text, self._at))

    def _key(self) -> str:
        match = _KEY.match(self._text, self._at)
        if match is not None and match.end() < len(self._text):
            self._at = match.end()
            key = match[1]
        else:
            found = self.value()
            if not isinstance(found, str):
                self._fail(f"has the key {shown(found)}, which is no string")
            self._pass(":")
            key = found
        if not key.isascii():
            _check_text(key, self._file, f"the {self._what}")
        return key

    def _pass(self, expected: str) -> str:
        """Pass blanks, one of the characters expected, and blanks; return the character."""
        found = self._next()
        if not found or found not in expected:
            message = f"Expecting {' or '.join(expected)}"
            raise self._damaged(json.JSONDecodeError(message, self._text, self._at))
        self._at += 1
        self._skip_blanks()
        return found

    def _next(self) -> str:
        """Pass blanks and return the character that comes next; nothing at the end."""
        found = self._text[self._at : self._at + 1]
        if not found or found in " \t\n\r":
            self._skip_blanks()
            found = self._text[self._at : self._at + 1]
        return found

    def _skip_blanks(self) -> None:
        while True:
            match = _BLANKS.match(self._text, self._at)
            assert match is not None, "no blanks are blanks too"
            self._at = match.end()
            if self._at < len(self._text) or not self._read_on():
                return

    def _read_on(self) -> bool:
        """Read more of the text, if there is more and a value may be longer than what is there."""
        rest = len(self._text) - self._at
        if self._taken == self._num_bytes or rest >= _MOST_MEMBER:
            return False
        # Empty lists take 30 times as much memory as their text.
        if rest >= _MOST_MEMBER // 4 and self._text.count("[", self._at) > _MOST_LISTS:
            return False
        piece = self._read(self._taken, min(max(_CHUNK, rest), self._num_bytes - self._taken))
        self._taken += len(piece)
        self._before += self._at
        try:
            more = self._decode(piece, self._taken == self._num_bytes)
        except UnicodeDecodeError as error:
            # The decoder may have kept back some bytes of the piece before.
            raise self._damaged(error, self._taken - len(error.object)) from None
        self._text, self._at = self._text[self._at :] + more, 0
        return True

    def _fail(self, problem: str) -> Never:
        raise self._damaged(_BadJSONError(problem))

    def _damaged(self, error: Exception, byte: int = 0) -> CheckpointError:
        if isinstance(error, json.JSONDecodeError):
            long = self._num_bytes > _MOST_MEMBER
            size = f", or has a member of more than {_MOST_MEMBER} bytes" if long else ""
            at = self._before + error.pos
            error = _BadJSONError(f"is not JSON{size}: {error.msg} at character {at}")
        return _damaged(self._file, self._what, error, byte)


def _damaged(file: Path, what: str, error: Exception, before: int = 0) -> CheckpointError:
    """Return in one line what a parser has raised, so many bytes behind `before`."""
    match error:
        case UnicodeDecodeError():
            byte = error.object[error.start]
            problem = f"is not UTF-8 (byte {before + error.start} is {byte:#04x})"
        case json.JSONDecodeError():
            problem = f"is not JSON: {error.msg} at character {error.pos}"
        case _BadJSONError():
            problem = str(error)
        case RecursionError():
            problem = "nests too deep"
        case _:
            # The one other thing that the parser raises: its limit on the digits of a number.
            problem = "holds a number of thousands of digits"
    return CheckpointError(f"{file}: the {what} {problem}; the file is damaged, restore it")


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadJSONError(f"has the key {shown(key)} twice")
            seen.add(key)
    return found


def _no_constant(text: str) -> Never:
    raise _BadJSONError(f"holds {text}, which is not JSON")


def _fail(value: object, file: Path, key: str, expected: str) -> Never:
    raise CheckpointError(f"{file}: {key} should be {expected} but is {shown(value, 60)}")


def member(parent: dict[str, object], name: str, file: Path, key: str) -> object:
    """Return one value of an object; `key` is the full name of the value for errors."""
    if name not in parent:
        raise CheckpointError(f"{file}: {key} is missing")
    return parent[name]


def field(
    parent: dict[str, object],
    name: str,
    kind: Callable[[object, Path, str], _T],
    file: Path,
    at: str,
) -> _T:
    """Return one value of an object, read as a kind such as `as_text`; `at` is where it stands."""
    key = f"{at}.{name}" if at else name
    return kind(member(parent, name, file, key), file, key)


def as_object(value: object, file: Path, key: str) -> dict[str, object]:
    """Return a JSON object whose keys can be written as UTF-8."""
    if not isinstance(value, dict):
        _fail(value, file, key, "an object")
    for name in value:
        if not name.isascii():
            _check_text(name, file, key)
    return value


def as_list(value: object, file: Path, key: str) -> list[object]:
    """Return a JSON list."""
    return value if isinstance(value, list) else _fail(value, file, key, "a list")


def as_text(value: object, file: Path, key: str) -> str:
    """Return a JSON string that can be written as UTF-8."""
    if not isinstance(value, str):
        _fail(value, file, key, "a string")
    _check_text(value, file, key)
    return value


def as_size(value: object, file: Path, key: str) -> int:
    """Return a whole number from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        _fail(value, file, key, "a whole number from 0 to 2**63 - 1")
    return value


def as_sizes(value: object, file: Path, key: str) -> tuple[int, ...]:
    """Return a list of whole numbers from 0 to 2**63 - 1 as a tuple."""
    if type(value) is not list:
        _fail(value, file, key, "a list of whole numbers")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:
            _fail(value, file, key, "a list of whole numbers from 0 to 2**63 - 1")
    return tuple(value)


def _check_text(text: str, file: Path, key: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        _fail(text, file, key, "text without lone surrogates")
