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

from typing import Final, TypeAlias, get_args

from shardspec.comm.steps import ReduceOp
from shardspec.errors import SpecSyntaxError
from shardspec.mesh import Axis

__all__ = ["parse_spec"]

ParsedDim: TypeAlias = tuple[list[Axis], list[tuple[int, int]], int]
"""Axes, sizes and shares of parts, and the block."""
Parsed: TypeAlias = tuple[list[ParsedDim], dict[Axis, ReduceOp]]

_DIGITS: Final = "0123456789"
_MOST_DIGITS: Final = 9
"""Of an axis number: no mesh has more axes."""
_MOST_SIZE_DIGITS: Final = 18
"""Of the size of a part: no tensor is longer."""


def parse_spec(text: str) -> Parsed:
    """Return how every dim is cut, and what is pending; see `ShardingSpec.parse`.

    Examples
    --------
    >>> parse_spec("[S10,R|P(dp)]")
    ([([1, 0], [], 1), ([], [], 1)], {'dp': 'sum'})
    >>> parse_spec("[S0{8,2/1}*2]")
    ([([0], [(8, 0), (2, 1)], 2)], {})
    """
    return _Parser(text).spec()


class _Parser:
    """A cursor over the text. Each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def spec(self) -> Parsed:
        bracketed = self._take("[")
        dims: list[ParsedDim] = []
        partial: dict[Axis, ReduceOp] = {}
        if self._peek() not in ("]", "|") or not bracketed:
            dims.append(self._dim())
            while self._take(","):
                dims.append(self._dim())
        if self._take("|"):
            self._partial(partial)
            while self._take(","):
                self._partial(partial)
        if bracketed and not self._take("]"):
            raise self._error("expected ',' or '|' or ']'")
        if self._peek():
            raise self._error(
                "expected the end of the spec" if bracketed else "expected ',' or '|'"
            )
        return dims, partial

    def _dim(self) -> ParsedDim:
        if self._take("R"):
            return [], [], 1
        if not self._take("S"):
            raise self._error("expected R or S and its axes")
        axes = [axis for axis, _ in self._axes("S")]
        parts: list[tuple[int, int]] = []
        if self._take("{"):
            parts.append(self._part())
            while self._take(","):
                parts.append(self._part())
            if not self._take("}"):
                raise self._error("expected ',' or '}'")
        return axes, parts, self._size("the size of a block") if self._take("*") else 1

    def _part(self) -> tuple[int, int]:
        size = self._size("the size of a part")
        return size, self._size("a number of shares") if self._take("/") else 0

    def _size(self, what: str) -> int:
        self._peek()
        start = self._at
        while self._text[self._at : self._at + 1] in tuple(_DIGITS):
            self._at += 1
        word = self._text[start : self._at]
        if not word.isdecimal() or len(word) > _MOST_SIZE_DIGITS or not int(word):
            raise self._error(f"expected {what}: a whole number from 1", start)
        return int(word)

    def _partial(self, pending: dict[Axis, ReduceOp]) -> None:
        if not self._take("P"):
            raise self._error("expected P and its axes")
        op: ReduceOp = "sum"
        for word in get_args(ReduceOp):
            if self._take(word):
                op = word
                break
        for axis, at in self._axes(f"P{'' if op == 'sum' else op}"):
            if axis in pending:
                raise self._error(f"axis {axis} is already pending", at)
            pending[axis] = op

    def _axes(self, after: str) -> list[tuple[Axis, int]]:
        """Read axes, each with its position in the text."""
        if self._take("("):
            axes = [self._listed_axis()]
            while self._take(","):
                axes.append(self._listed_axis())
            if not self._take(")"):
                raise self._error("expected ',' or ')'")
            return axes
        digits: list[tuple[Axis, int]] = []
        while (char := self._peek()) and char in _DIGITS:
            digits.append((int(char), self._at))
            self._at += 1
        if not digits:
            raise self._error(f"expected axes after {after}: digits, or names in brackets")
        return digits

    def _listed_axis(self) -> tuple[Axis, int]:
        self._peek()
        start = self._at
        while self._at < len(self._text) and (
            self._text[self._at] == "_" or self._text[self._at].isalnum()
        ):
            self._at += 1
        word = self._text[start : self._at]
        if word.isdecimal() and word.isascii():
            if len(word) > _MOST_DIGITS:
                raise self._error(
                    f"an axis number has {_MOST_DIGITS} digits at most, this has {len(word)}", start
                )
            return int(word), start
        if word.isidentifier():
            return word, start
        raise self._error("expected an axis number or name", start)

    def _peek(self) -> str:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _take(self, word: str) -> bool:
        self._peek()
        if self._text.startswith(word, self._at):
            self._at += len(word)
            return True
        return False

    def _error(self, problem: str, at: int | None = None) -> SpecSyntaxError:
        return SpecSyntaxError(problem, self._text, self._at if at is None else at)
