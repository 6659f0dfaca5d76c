"""JSON from files that are not trusted: nothing is guessed, and errors name file, key and value."""

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Never, TypeVar

from shardspec.errors import CheckpointError
from shardspec.text import shown

_Kind = TypeVar("_Kind")

_CHUNK: Final = 256 << 10
"""Bytes of a long text that are read at once."""
_MOST_VALUE: Final = 4 << 20
"""Characters of one value in a text; what is parsed takes 30 times as much at most."""
_MOST_LISTS: Final = 1 << 17
"""Lists in the first quarter of a value that is as long as a value may be."""
_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_SURROGATES: Final = re.compile(r"[\ud800-\udfff]")
_EXPECTED: Final[dict[type, str]] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number from 0 to 2**63 - 1",
    tuple: "a list of whole numbers from 0 to 2**63 - 1",
}


def parse_json(data: bytes, file: Path, what: str) -> object:
    """Return the one value that bytes hold as strict JSON; `what` they are is for errors."""
    stream = JSONStream(lambda at, count: data[at : at + count], len(data), file, what)
    value = stream.value()
    stream.end()
    return value


class JSONStream:
    """Reads JSON of any length, in memory that does not grow with it.

    `read` returns bytes of the text, given the position of the first and how many. Objects and
    lists are gone through with `members` and `items`. After each key or index that these yield, its
    value has to be taken: by `value`, or by going through it in turn.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], num_bytes: int, file: Path, what: str
    ) -> None:
        self._read, self._num_bytes, self._file, self._what = read, num_bytes, file, what
        self._parse = json.JSONDecoder(
            object_pairs_hook=self._without_repeats, parse_constant=self._refuse_constant
        ).raw_decode
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._taken = 0
        self._before = 0
        """Characters that are no longer in `_text`."""
        self._text = ""
        self._at = 0

    def members(self, name: str = "") -> Iterator[str]:
        """Yield the keys of the object that comes next; `name` is its own, for errors."""
        seen: set[str] = set()
        for _ in self._inside("{}", dict, name):
            key = self.value()
            if not isinstance(key, str):
                self._fail(f"has the key {shown(key)}, which is no string")
            if key in seen:
                self._fail(f"has the key {shown(key)} twice")
            seen.add(key)
            self._pass(":")
            yield checked(key, str, self._file, f"the {self._what}")

    def items(self, name: str = "") -> Iterator[int]:
        """Yield the indices of the list that comes next; `name` is its own, for errors."""
        for index, _ in enumerate(self._inside("[]", list, name)):
            yield index

    def _inside(self, brackets: str, kind: type, name: str) -> Iterator[None]:
        if name and self._next() != brackets[0]:
            checked(self.value(), kind, self._file, name)
        self._pass(brackets[0])
        if self._next() == brackets[1]:
            self._pass(brackets[1])
            return
        yield
        while self._pass(f",{brackets[1]}") == ",":
            yield

    def value(self) -> object:
        """Return the value that comes next."""
        self._next()
        while True:
            try:
                found, end = self._parse(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._read_on():
                    self._fail_at(error.msg, error.pos)
                continue
            except RecursionError:
                self._fail("nests too deep")
            except ValueError as error:
                if isinstance(error, CheckpointError):
                    raise
                # The one other thing that the parser raises: its limit on the digits of a number.
                self._fail("holds a number of thousands of digits")
            # At the end of what was read, a number may go on.
            if end < len(self._text) or not self._read_on():
                self._at = end
                return found

    def end(self) -> None:
        """Check that nothing follows."""
        if self._next():
            self._fail_at("Extra data", self._at)

    def _pass(self, expected: str) -> str:
        """Pass one of the characters expected, and return it."""
        found = self._next()
        if not found or found not in expected:
            self._fail_at(f"Expecting {' or '.join(expected)}", self._at)
        self._at += 1
        return found

    def _next(self) -> str:
        """Pass blanks and return the character that comes next; nothing at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            assert blanks is not None, "no blanks are blanks too"
            self._at = blanks.end()
            if self._at < len(self._text) or not self._read_on():
                return self._text[self._at : self._at + 1]

    def _read_on(self) -> bool:
        """Read more of the text, if there is more and a value may be longer than what is there."""
        rest = len(self._text) - self._at
        if self._taken == self._num_bytes or rest >= _MOST_VALUE:
            return False
        # Empty lists take 30 times as much memory as their text.
        if rest >= _MOST_VALUE // 4 and self._text.count("[", self._at) > _MOST_LISTS:
            return False
        piece = self._read(self._taken, min(max(_CHUNK, rest), self._num_bytes - self._taken))
        self._taken += len(piece)
        self._before += self._at
        try:
            more = self._decode(piece, self._taken == self._num_bytes)
        except UnicodeDecodeError as error:
            # The decoder may have kept back some bytes of the piece before.
            at = self._taken - len(error.object) + error.start
            self._fail(f"is not UTF-8 (byte {at} is {error.object[error.start]:#04x})")
        self._text, self._at = self._text[self._at :] + more, 0
        return True

    def _without_repeats(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            self._fail(f"has the key {shown(twice)} twice")
        return found

    def _refuse_constant(self, text: str) -> Never:
        self._fail(f"holds {text}, which is not JSON")

    def _fail_at(self, message: str, at: int) -> Never:
        long = self._num_bytes > _MOST_VALUE
        size = f", or has a member of more than {_MOST_VALUE} bytes" if long else ""
        self._fail(f"is not JSON{size}: {message} at character {self._before + at}")

    def _fail(self, problem: str) -> Never:
        text = f"the {self._what} {problem}; the file is damaged, restore it"
        raise CheckpointError(f"{self._file}: {text}") from None


def checked(value: object, kind: type[_Kind], file: Path, key: str) -> _Kind:
    """Return a JSON value that is to be of a kind; `key` is its full name for errors.

    Kinds are dict, list, str, int for a size, and tuple for a list of sizes. Text is such as UTF-8
    can express, sizes are from 0 to 2**63 - 1.
    """
    found = value
    if kind is tuple and isinstance(value, list) and all(map(_is_size, value)):
        found = tuple(value)
    if not isinstance(found, kind) or (kind is int and not _is_size(found)):
        raise CheckpointError(
            f"{file}: {key} should be {_EXPECTED[kind]} but is {shown(value, 60)}"
        )
    texts = (found,) if isinstance(found, str) else found if isinstance(found, dict) else ()
    for text in texts:
        if _SURROGATES.search(text):
            raise CheckpointError(
                f"{file}: {key} should be text without lone surrogates but is {shown(text, 60)}"
            )
    return found


def field(parent: dict[str, object], name: str, kind: type[_Kind], file: Path, at: str) -> _Kind:
    """Return one value of an object, as `checked` does; `at` is where the object stands."""
    key = f"{at}.{name}" if at else name
    if name not in parent:
        raise CheckpointError(f"{file}: {key} is missing")
    return checked(parent[name], kind, file, key)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
