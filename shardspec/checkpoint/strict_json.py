"""JSON from files that are not trusted: nothing is guessed, and errors name file, key and value."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Never, TypeVar

from shardspec.errors import CheckpointError
from shardspec.text import shown

__all__ = [
    "as_list",
    "as_object",
    "as_size",
    "as_sizes",
    "as_text",
    "field",
    "member",
    "parse_json",
    "parse_members",
]

_T = TypeVar("_T")

_WINDOW: Final = 4 << 20
"""Bytes of JSON that are parsed at once; the values in them take 30 times as much at most."""
_BLANKS: Final = re.compile(r"[ \t\n\r]*")


class _BadJSONError(ValueError):
    """What is wrong with a text."""


def parse_json(data: bytes, file: Path, what: str) -> object:
    """Return the value that bytes hold as strict JSON; `what` they are is for errors."""
    with _clear_errors(file, what):
        text: object = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_repeats, parse_constant=_no_constant
        )
    return text


def parse_members(
    read: Callable[[int, int], bytes], num_bytes: int, file: Path, what: str
) -> Iterator[tuple[str, object]]:
    """Yield the members of a JSON object that may be long, in memory that does not grow with it.

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
    >>> text = b'{"a": 1, "b": [2]}'
    >>> read = lambda at, count: text[at : at + count]
    >>> dict(parse_members(read, len(text), Path("file"), "header"))
    {'a': 1, 'b': [2]}
    """
    parse = json.JSONDecoder(object_pairs_hook=_no_repeats, parse_constant=_no_constant).raw_decode
    seen: set[str] = set()
    with _clear_errors(file, what):
        window = _Window(read, num_bytes)
        try:
            mark = window.skip("{")
            while mark != "}":
                if not seen and window.text[window.at : window.at + 1] == "}":
                    window.at += 1
                    break
                key, window.at = parse(window.text, window.at)
                if not isinstance(key, str):
                    raise _BadJSONError(f"has the key {shown(key)}, which is no string")
                if key in seen:
                    raise _BadJSONError(f"has the key {shown(key)} twice")
                seen.add(key)
                window.skip(":")
                value, window.at = parse(window.text, window.at)
                _check_text(key, file, f"the {what}")
                yield key, value
                mark = window.skip(",}")
                window.fill()
            window.end()
        except json.JSONDecodeError as error:
            long = f", or has a member of more than {_WINDOW} bytes" if num_bytes > _WINDOW else ""
            raise _BadJSONError(
                f"is not JSON{long}: {error.msg} at character {window.before + error.pos}"
            ) from None


class _Window:
    """A part of a long text: at least `_WINDOW` characters from `at` on, if there are so many."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int) -> None:
        self._read, self._num_bytes = read, num_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._taken = 0
        self.before = 0
        """Characters of the text that are no longer here."""
        self.text = ""
        self.at = 0
        self.fill()

    def fill(self) -> None:
        """Read on where it has become short."""
        while len(self.text) - self.at < _WINDOW and self._taken < self._num_bytes:
            piece = self._read(self._taken, min(_WINDOW, self._num_bytes - self._taken))
            self._taken += len(piece)
            self.before += self.at
            try:
                more = self._decode(piece, self._taken == self._num_bytes)
            except UnicodeDecodeError as error:
                # The decoder may have kept back some bytes of the piece before.
                raise _BadJSONError(_no_utf8(error, self._taken - len(error.object))) from None
            self.text, self.at = self.text[self.at :] + more, 0

    def skip(self, expected: str) -> str:
        """Pass blanks, one of the characters expected, and blanks; return the character."""
        at = self._blanks(self.at)
        found = self.text[at : at + 1]
        if not found or found not in expected:
            raise json.JSONDecodeError(f"Expecting {' or '.join(expected)}", self.text, at)
        self.at = self._blanks(at + 1)
        return found

    def _blanks(self, at: int) -> int:
        match = _BLANKS.match(self.text, at)
        assert match is not None, "no blanks are blanks too"
        return match.end()

    def end(self) -> None:
        """Pass blanks, after which nothing may follow."""
        self.at = self._blanks(self.at)
        while self.at == len(self.text) and self._taken < self._num_bytes:
            self.fill()
            self.at = self._blanks(self.at)
        if self.at < len(self.text):
            raise json.JSONDecodeError("Extra data", self.text, self.at)


@contextmanager
def _clear_errors(file: Path, what: str) -> Iterator[None]:
    """Turn what a parser raises into one line."""
    try:
        yield
        return
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        problem = _no_utf8(error, 0)
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at character {error.pos}"
    except _BadJSONError as error:
        problem = str(error)
    except RecursionError:
        problem = "nests too deep"
    except ValueError:
        # The one other thing that the parser raises: its limit on the digits of a number.
        problem = "holds a number of thousands of digits"
    raise CheckpointError(f"{file}: the {what} {problem}; the file is damaged, restore it")


def _no_utf8(error: UnicodeDecodeError, before: int) -> str:
    byte = error.object[error.start]
    return f"is not UTF-8 (byte {before + error.start} is {byte:#04x})"


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
