r"""The text form of a sharding spec, read by recursive descent.

::

    layout  := "[" dim {"," dim} ["|" partial {"," partial}] "]"
    dim     := "R" | "S" axes ["{" part {"," part} "}"] ["*" INT]
    part    := INT ["/" INT]
    axes    := DIGIT+ | "(" (INT | NAME) {"," (INT | NAME)} ")"
    partial := "P" ["sum" | "avg" | "min" | "max" | "prod"] axes

Brackets and blanks are optional on input. Bare digits are always one axis each; axis ten is
``S(10)``. A scalar is ``[]``. Parts in braces are cut each by itself, ``1024/2`` into two shares
that neighbouring devices have copies of; ``*128`` cuts at multiples of 128 only.
"""

import re
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar, get_args

from shardspec.comm.steps import ReduceOp
from shardspec.errors import SpecSyntaxError
from shardspec.mesh import Axis

T = TypeVar("T")
ParsedDim: TypeAlias = tuple[list[Axis], list[tuple[int, int]], int]
"""Axes, sizes and shares of parts, and the block."""
Parsed: TypeAlias = tuple[list[ParsedDim], dict[Axis, ReduceOp]]

_DIGITS, _WORD = re.compile("[0-9]*"), re.compile(r"\w*")
_MOST_DIGITS: Final = 9
"""Of an axis number: no mesh has more axes."""
_MOST_SIZE_DIGITS: Final = 18
"""Of the size of a part: no tensor is longer."""


def parse_spec(text: str) -> Parsed:
    """Return how every dim is cut, and what is pending; see `ShardingSpec.parse`.

    Examples
    --------
    >>> parse_spec("[S0{8,2/1}*2,R|P(dp)]")
    ([([0], [(8, 0), (2, 1)], 2), ([], [], 1)], {'dp': 'sum'})
    """
    return _Parser(text).spec()


class _Parser:
    """A cursor over the text. Each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._pending: dict[Axis, ReduceOp] = {}

    def spec(self) -> Parsed:
        bracketed = self._take("[")
        dims: list[ParsedDim] = []
        if not bracketed or self._peek() not in ("]", "|"):
            dims = self._listed(self._dim)
        if self._take("|"):
            self._listed(self._partial)
        if bracketed and not self._take("]"):
            raise self._error("expected ',' or '|' or ']'")
        if self._peek():
            raise self._error(
                "expected the end of the spec" if bracketed else "expected ',' or '|'"
            )
        return dims, self._pending

    def _dim(self) -> ParsedDim:
        if self._take("R"):
            return [], [], 1
        if not self._take("S"):
            raise self._error("expected R or S and its axes")
        axes = [axis for axis, _ in self._axes("S")]
        parts = self._listed(self._part, until="}") if self._take("{") else []
        return axes, parts, self._size("the size of a block") if self._take("*") else 1

    def _part(self) -> tuple[int, int]:
        size = self._size("the size of a part")
        return size, self._size("a number of shares") if self._take("/") else 0

    def _size(self, what: str) -> int:
        word, start = self._match(_DIGITS)
        if not word or len(word) > _MOST_SIZE_DIGITS or not int(word):
            raise self._error(f"expected {what}: a whole number from 1", start)
        return int(word)

    def _partial(self) -> None:
        if not self._take("P"):
            raise self._error("expected P and its axes")
        op: ReduceOp = next((word for word in get_args(ReduceOp) if self._take(word)), "sum")
        for axis, at in self._axes(f"P{'' if op == 'sum' else op}"):
            if axis in self._pending:
                raise self._error(f"axis {axis} is already pending", at)
            self._pending[axis] = op

    def _axes(self, after: str) -> list[tuple[Axis, int]]:
        """Read axes, each with its position in the text."""
        if self._take("("):
            return self._listed(self._listed_axis, until=")")
        digits: list[tuple[Axis, int]] = []
        while (char := self._peek()) and char in "0123456789":
            digits.append((int(char), self._at))
            self._at += 1
        if not digits:
            raise self._error(f"expected axes after {after}: digits, or names in brackets")
        return digits

    def _listed_axis(self) -> tuple[Axis, int]:
        word, start = self._match(_WORD)
        if word.isdecimal() and word.isascii():
            if len(word) > _MOST_DIGITS:
                raise self._error(
                    f"an axis number has {_MOST_DIGITS} digits at most, this has {len(word)}", start
                )
            return int(word), start
        if word.isidentifier():
            return word, start
        raise self._error("expected an axis number or name", start)

    def _listed(self, item: Callable[[], T], until: str = "") -> list[T]:
        """Read items with commas between them, up to a closing bracket where there is one."""
        found = [item()]
        while self._take(","):
            found.append(item())
        if until and not self._take(until):
            raise self._error(f"expected ',' or '{until}'")
        return found

    def _peek(self) -> str:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _take(self, word: str) -> bool:
        self._peek()
        found = self._text.startswith(word, self._at)
        self._at += len(word) * found
        return found

    def _match(self, pattern: re.Pattern[str]) -> tuple[str, int]:
        """Read what matches, after blanks; return it and where it starts."""
        self._peek()
        match = pattern.match(self._text, self._at)
        assert match is not None, "patterns match nothing too"
        self._at = match.end()
        return match[0], match.start()

    def _error(self, problem: str, at: int | None = None) -> SpecSyntaxError:
        return SpecSyntaxError(problem, self._text, self._at if at is None else at)
