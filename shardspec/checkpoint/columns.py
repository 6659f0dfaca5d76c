"""Sequences of very many small values, which would take a hundred bytes each as objects."""

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import Any, TypeVar, overload

__all__ = ["Columns"]

_Row = TypeVar("_Row")


class Columns(Sequence[_Row]):
    """Rows that are kept by columns, and made when they are asked for, as there are many.

    Parameters
    ----------
    row
        Given the values of a row, makes it.
    columns
        Lists or arrays, of equal length.

    Examples
    --------
    >>> from array import array
    >>> rows = Columns(complex, array("d", [1.0]), array("d", [2.0]))
    >>> rows.append(3.0, 4.0)
    >>> rows[1], len(rows)
    ((3+4j), 2)
    """

    __slots__ = ("_columns", "_row")

    def __init__(self, row: Callable[..., _Row], *columns: MutableSequence[Any]) -> None:
        self._row = row
        self._columns = columns

    def append(self, *values: object) -> None:
        """Add a row."""
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[_Row, ...]: ...
    def __getitem__(self, index: int | slice) -> _Row | tuple[_Row, ...]:
        """Return a row, or some."""
        if isinstance(index, slice):
            return tuple(map(self._row, *(column[index] for column in self._columns)))
        return self._row(*[column[index] for column in self._columns])

    def __iter__(self) -> Iterator[_Row]:
        return map(self._row, *self._columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)
