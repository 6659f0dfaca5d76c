"""Device ids as they are given: tensors, arrays or nested sequences, read into plain tuples."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias, cast

from shardspec.errors import MeshError

__all__ = ["Ids", "as_shape", "check_ids", "flatten", "some"]


class _HasToList(Protocol):
    """What torch tensors and numpy arrays have in common here."""

    def tolist(self) -> object: ...


Ids: TypeAlias = _HasToList | Iterable[object]

_SHOWN: Final = 8


def some(ids: Sequence[int]) -> str:
    """List ids, the middle of a long list left out."""
    shown = ", ".join(map(str, ids[:_SHOWN]))
    return f"({shown}, … {len(ids)} in all)" if len(ids) > _SHOWN else f"({shown})"


def as_shape(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return a mesh shape as plain numbers."""
    try:
        return tuple(operator.index(n) for n in mesh_shape)
    except TypeError:
        raise MeshError(
            f"mesh_shape {mesh_shape!r}: give a sequence of whole numbers, as in (2, 4)"
        ) from None


def flatten(ids: Ids) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ids in row-major order, and the shape they came in."""
    shape: list[int] = []
    level = [_plain(ids)]
    while level and all(isinstance(item, Iterable) and not isinstance(item, str) for item in level):
        rows = [list(cast(Iterable[object], item)) for item in level]
        if len({len(row) for row in rows}) != 1:
            raise MeshError("the device ids form no grid: rows differ in length")
        shape.append(len(rows[0]))
        level = [_plain(item) for row in rows for item in row]
    return tuple(_as_id(item) for item in level), tuple(shape)


def _plain(ids: object) -> object:
    """Turn a tensor or array, also one with a single number, into plain lists and numbers."""
    return cast(_HasToList, ids).tolist() if callable(getattr(ids, "tolist", None)) else ids


def _as_id(item: object) -> int:
    if isinstance(item, bool) or not isinstance(item, int):
        raise MeshError(f"device id {item!r} is not a whole number")
    return item


def check_ids(ids: Sequence[int]) -> None:
    """Raise `MeshError` if an id is negative or repeats."""
    if ids and min(ids) < 0:
        raise MeshError(f"device id {min(ids)} is negative; ids are global rank numbers from 0")
    if len(set(ids)) != len(ids):
        repeated = next(iter(_repeats(ids)))
        raise MeshError(f"device id {repeated} appears more than once; every id must be distinct")


def _repeats(ids: Sequence[int]) -> Iterator[int]:
    seen: set[int] = set()
    for id_ in ids:
        if id_ in seen:
            yield id_
        seen.add(id_)
