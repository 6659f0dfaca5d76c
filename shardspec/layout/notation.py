r"""Parses the text form of sharding specs, such as ``[S01,R|P2]``.

The notation is that of Alpa and Colossal-AI, extended by pending reductions and axis names::

    layout  := "[" dim {"," dim} ["|" partial {"," partial}] "]"
    dim     := "R" | "S" axes ["{" part {"," part} "}"] ["*" INT]
    part    := INT ["/" INT]
    axes    := DIGIT+ | "(" (INT | NAME) {"," (INT | NAME)} ")"
    partial := "P" ["sum" | "avg" | "min" | "max" | "prod"] axes

In rules one dim may be ``...``. Brackets and blanks are optional on input. Each bare digit is one
axis; axis ten is ``S(10)``. A scalar is ``[]``. Parts in braces are sharded separately: a part
``1024/2`` has two shares, so of four devices the first two have copies of the first share. With
``*128`` all shard boundaries are multiples of 128.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, NamedTuple, TypeAlias, TypeVar, get_args

from shardspec.comm.steps import ReduceOp
from shardspec.errors import SpecSyntaxError
from shardspec.mesh.device_mesh import Axis
from shardspec.text import shown

_T = TypeVar("_T")
OPS: Final[tuple[ReduceOp, ...]] = get_args(ReduceOp)
"""Operations of pending reductions, in the order of the text of a spec."""
DimFields: TypeAlias = Mapping[str, object]
"""The fields of a `DimSpec`."""


class Notation(NamedTuple):
    """The parsed text of a spec."""

    dims: list[DimFields]
    pending: Mapping[Axis, ReduceOp]
    ellipsis: int | None
    """Number of dims before ``...``; None without an ellipsis."""


def read_notation(text: object, *, for_rule: bool = False) -> Notation:
    """Parse a spec; ``...`` is accepted only with `for_rule`.

    Raises `SpecSyntaxError` if the text does not follow the grammar.

    >>> read_notation("R,S0|P1").dims, read_notation("...", for_rule=True).ellipsis
    ([{'axes': ()}, {'axes': (0,), 'parts': [], 'block': 1}], 0)
    """
    if not isinstance(text, str):
        kind = type(text).__name__
        raise SpecSyntaxError(f"a spec is text such as '[S0,R]', not a {kind}", shown(text), 0)
    return _Parser(text, for_rule=for_rule).notation()


@cache
def _after_blanks(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\s*({pattern}|)")


class _Parser:
    """Reads a text from left to right; each method parses one rule of the grammar."""

    def __init__(self, text: str, *, for_rule: bool) -> None:
        self._text = text
        self._start = self._end = 0
        """Start and end of the last token."""
        self._pending: dict[Axis, ReduceOp] = {}
        self._for_rule = for_rule
        self._dims = 0
        self._ellipsis: int | None = None

    def notation(self) -> Notation:
        bracketed = self._take(r"\[")
        empty = bracketed and self._text[self._end :].lstrip().startswith(("]", "|"))
        dims = [] if empty else [cut for cut in self._listed(self._dim) if cut is not None]
        if self._take(r"\|"):
            self._listed(self._partial)
        if bracketed and not self._take("]"):
            raise self._error("expected ',' or '|' or ']'")
        if self._take("."):
            end = "the end of the spec" if bracketed else "',' or '|'"
            raise self._error(f"expected {end}")
        return Notation(dims, self._pending, self._ellipsis)

    def _dim(self) -> DimFields | None:
        """Read a dim; return None for an ellipsis."""
        if self._take(r"\.\.\."):
            if not self._for_rule:
                raise self._error("'...' stands for dims only in rules; write R for each")
            if self._ellipsis is not None:
                raise self._error("'...' may stand once in a spec; write R for the other dims")
            self._ellipsis = self._dims
            return None
        self._dims += 1
        if self._take("R"):
            return {"axes": ()}
        if not self._take("S"):
            raise self._error("expected R or S and its axes")
        axes = tuple(axis for axis, _ in self._axes("S"))
        parts = self._listed(self._part, until="}") if self._take("{") else []
        block = self._size("the size of a block") if self._take(r"\*") else 1
        return {"axes": axes, "parts": parts, "block": block}

    def _part(self) -> tuple[int, int]:
        size = self._size("the size of a part")
        return size, self._size("a number of shares") if self._take("/") else 0

    def _size(self, label: str) -> int:
        word = self._take("[0-9]+")
        if not word or len(word) > 18 or not int(word):  # no tensor has more elements
            raise self._error(f"expected {label}: a whole number from 1")
        return int(word)

    def _partial(self) -> None:
        if not self._take("P"):
            raise self._error("expected P and its axes")
        op: ReduceOp = next((word for word in OPS if self._take(word)), "sum")
        for axis, at in self._axes(f"P{'' if op == 'sum' else op}"):
            if axis in self._pending:
                raise self._error(f"axis {axis} is already pending", at)
            self._pending[axis] = op

    def _axes(self, after: str) -> list[tuple[Axis, int]]:
        """Read axes, each with its position in the text."""
        if self._take(r"\("):
            return self._listed(self._axis, until=r"\)")
        digits: list[tuple[Axis, int]] = []
        while digit := self._take("[0-9]"):
            digits.append((int(digit), self._start))
        if not digits:
            raise self._error(f"expected axes after {after}: digits, or names in brackets")
        return digits

    def _axis(self) -> tuple[Axis, int]:
        word = self._take(r"\w+")
        if word.isdecimal() and word.isascii():
            if len(word) > 9:  # no mesh has more axes
                raise self._error(f"an axis number has 9 digits at most, this has {len(word)}")
            return int(word), self._start
        if word.isidentifier():
            return word, self._start
        raise self._error("expected an axis number or name")

    def _listed(self, item: Callable[[], _T], until: str = "") -> list[_T]:
        """Read items separated by commas, and the closing bracket `until` if not empty."""
        items = [item()]
        while self._take(","):
            items.append(item())
        if until and not self._take(until):
            raise self._error(f"expected ',' or '{until[-1]}'")
        return items

    def _take(self, pattern: str) -> str:
        """Skip blanks and read a match of the pattern; return it, or "" for no match."""
        match = _after_blanks(pattern).match(self._text, self._end)
        assert match is not None, "the pattern matches empty text"
        self._start, self._end = match.span(1)
        return match[1]

    def _error(self, problem: str, at: int | None = None) -> SpecSyntaxError:
        return SpecSyntaxError(problem, self._text, self._start if at is None else at)
