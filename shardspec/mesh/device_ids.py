"""Checks the arguments of meshes: numbers, device ids, axes, names and links.

>>> grid_of([[0, 1], [2, 3]], None, None, {})
((0, 1, 2, 3), (2, 2), None)
>>> whole_number(3), whole_number(3.0), whole_numbers([2, 4]), seconds("1e-6"), seconds(1e-6)
(3, None, (2, 4), None, 1e-06)
>>> by_number("partial", {"0": "sum"}), checked_axis("tp"), id_list(range(9))
({0: 'sum'}, 'tp', '(0, 1, 2, 3, 4, 5, 6, 7, … 9 in all)')
>>> checked_names(["dp", "tp"], (2, 4)), checked_links("mesh_alpha", [1e-5, 3e-6], (2, 4))
(('dp', 'tp'), (1e-05, 3e-06))
"""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypedDict, cast

from shardspec.errors import AxisError, LayoutError, MeshError
from shardspec.text import counted, shown


class _HasToList(Protocol):
    """A torch tensor or a numpy array."""

    def tolist(self) -> object: ...


Ids: TypeAlias = _HasToList | Iterable[object]


class TorchArguments(TypedDict, total=False):
    """Arguments of a mesh under torch's names."""

    device_type: str | None
    mesh: Ids | None
    mesh_dim_names: Sequence[str] | None
    backend_override: None


SECONDS: Final = (1e-100, 1e9)
"""Accepted range of seconds per message or byte; 0 is accepted too."""
SECONDS_RULE: Final = "0, or from 1e-100 to 1e9"
_SHOWN: Final = 8
_MAX_DEPTH: Final = 64
"""Maximum nesting of ids; a list may contain itself."""


def whole_number(value: Any) -> int | None:  # noqa: ANN401  # any argument
    """Return an integer of any integer type as an int; None for others, such as 3.0 or True."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def seconds(value: Any) -> float | None:  # noqa: ANN401
    """Return seconds as a float; None unless they are 0 or within `SECONDS`.

    In this range sums and quotients of prices do not overflow.
    """
    if isinstance(value, bool | str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    least, most = SECONDS
    return (number or 0.0) if number == 0 or least <= number <= most else None


def bound_of_bytes(value: Any) -> int | None:  # noqa: ANN401
    """Return a limit in bytes as an int, or None for no limit; raises `LayoutError` for others."""
    number = whole_number(value)
    if isinstance(value, float) and value.is_integer():
        number = int(value)
    if value is not None and (number is None or number < 0):
        raise LayoutError(f"max_bytes is {shown(value)}; give a whole number of bytes, or omit it")
    return None if number is None else min(number, 2**63 - 1)


def id_list(ids: Sequence[int]) -> str:
    """Return the ids as text; for more than 8, the first ones and the count."""
    first = ", ".join(map(str, ids[:_SHOWN]))
    return f"({first}, … {len(ids)} in all)" if len(ids) > _SHOWN else f"({first})"


def whole_numbers(values: object) -> tuple[int, ...] | None:
    """Return a sequence of integers as ints; None for other values."""
    items = tuple(values) if isinstance(values, Iterable) else (None,)
    if {*map(type, items)} <= {int}:
        return cast(tuple[int, ...], items)
    numbers = tuple(number for item in items if (number := whole_number(item)) is not None)
    return numbers if len(numbers) == len(items) else None


def checked_axis(axis: object) -> int | str:
    """Return the number or name of a mesh axis; raises `AxisError` if it is neither."""
    if isinstance(axis, str):
        if not axis.isidentifier():
            raise AxisError(f"axis name {shown(axis)}: use letters, digits and '_', a letter first")
        return axis
    number = whole_number(axis)
    if number is None or number < 0:
        raise AxisError(f"axis {shown(axis)}: give a number from 0 or a name")
    return number


def by_number(label: str, mapping: object) -> dict[Any, Any]:
    """Return a mapping whose numeric keys, such as "0", are ints; other keys are unchanged."""
    if not isinstance(mapping, Mapping | None):
        raise AxisError(f"{label} is a {type(mapping).__name__}; give a dict, as in {{0: [0]}}")
    result: dict[Any, Any] = {}
    for key, value in (mapping or {}).items():
        number = whole_number(key)
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10:
            number = int(key)
        if number in result and number is not None:
            raise AxisError(
                f"{label} has the key {number} twice, as a number and as text; give one"
            )
        result[key if number is None else number] = value
    return result


def _ids_and_shape(ids: Ids) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids in row-major order, and the shape of their nested lists.

    Raises `MeshError` if rows differ in length, or ids repeat or are not integers from 0.
    """
    shape: list[int] = []
    level = [_plain(ids)]
    from_tensor = level[0] is not ids
    while level and all(isinstance(item, Iterable) and not isinstance(item, str) for item in level):
        rows = [list(cast(Iterable[object], item)) for item in level]
        if len({len(row) for row in rows}) != 1:
            raise MeshError("the device ids form no grid: rows differ in length")
        shape.append(len(rows[0]))
        if len(shape) > _MAX_DEPTH:
            raise MeshError(f"the device ids are nested more than {_MAX_DEPTH} deep")
        level = [_plain(item) for row in rows for item in row]
    if from_tensor:  # torch's default dtype is a float
        level = [
            int(item) if isinstance(item, float) and item.is_integer() else item for item in level
        ]
    plain_ids = whole_numbers(level)
    if plain_ids is None:
        invalid = next(item for item in level if whole_number(item) is None)
        raise MeshError(f"device id {shown(invalid)} is not a whole number")
    if plain_ids and min(plain_ids) < 0:
        raise MeshError(
            f"device id {min(plain_ids)} is negative; ids are global rank numbers from 0"
        )
    if len(set(plain_ids)) != len(plain_ids):
        ((repeated, _),) = Counter(plain_ids).most_common(1)
        raise MeshError(f"device id {repeated} appears more than once; every id must be distinct")
    return plain_ids, tuple(shape)


def grid_of(
    physical_mesh_id: Ids | None,
    mesh_shape: Ids | None,
    logical_mesh_id: Ids | None,
    arguments: TorchArguments,
) -> tuple[tuple[int, ...], tuple[int, ...], str | None]:
    """Return the ids, the shape and the device type in the arguments of a mesh.

    The order is that of `DeviceMesh` or torch's, with the device type first. Raises `MeshError` if
    arguments contradict each other, and `TypeError` for unknown keywords.
    """
    if unknown := arguments.keys() - TorchArguments.__annotations__.keys():
        raise TypeError(f"DeviceMesh() has no argument {min(unknown)!r}")
    if arguments.get("backend_override") is not None:
        raise MeshError(
            "backend_override: make torch's mesh with it, and give that to DeviceMesh.from_torch"
        )
    device_type, mesh = arguments.get("device_type"), arguments.get("mesh")
    if isinstance(physical_mesh_id, str):
        torch_ids = [ids for ids in (mesh_shape, mesh) if ids is not None]
        if device_type is not None or logical_mesh_id is not None or len(torch_ids) != 1:
            raise MeshError(
                f"DeviceMesh({shown(physical_mesh_id)}, ...): give nested ids after the device "
                "type, as in DeviceMesh('cuda', [[0, 1], [2, 3]])"
            )
        device_type, physical_mesh_id, mesh_shape = physical_mesh_id, torch_ids[0], None
    elif mesh is not None and physical_mesh_id is None:
        physical_mesh_id = mesh
    elif mesh is not None or physical_mesh_id is None:
        raise MeshError("give the device ids once, as in DeviceMesh([[0, 1], [2, 3]])")
    if device_type is not None and not (
        isinstance(device_type, str) and device_type.isalnum() and device_type[0].isalpha()
    ):
        raise MeshError(
            f"device type {shown(device_type)}: give a name without an index, 'cpu' or 'cuda'"
        )
    ids, shape = physical, _ = _ids_and_shape(physical_mesh_id)
    if logical_mesh_id is not None:
        ids, shape = _ids_and_shape(logical_mesh_id)
        if set(ids) != set(physical):
            raise MeshError(
                f"logical_mesh_id has the ids {id_list(sorted(ids))} but physical_mesh_id "
                f"has {id_list(sorted(physical))}; give the same ids in both"
            )
    if mesh_shape is not None:
        sizes = whole_numbers(mesh_shape)
        if sizes is None:
            raise MeshError(
                f"mesh_shape {shown(mesh_shape)}: give a sequence of whole numbers, as in (2, 4)"
            )
        if logical_mesh_id is not None and sizes != shape:
            raise MeshError(
                f"mesh_shape {sizes} differs from the shape {shape} of logical_mesh_id; give "
                "one of the two"
            )
        shape = sizes
    if not shape or min(shape) < 1:
        raise MeshError(
            f"mesh shape {shown(shape)}: give at least one axis, each of at least 1 device"
        )
    if math.prod(shape) != len(ids):
        raise MeshError(
            f"mesh shape {'x'.join(map(shown, shape))} needs {shown(math.prod(shape))} device ids, "
            f"but {len(ids)} were given"
        )
    return ids, shape, device_type


def _per_axis(
    label: str, values_of_axes: object, shape: tuple[int, ...], example: str
) -> tuple[Any, ...] | None:
    """Return one value per axis, None if there are no values; `MeshError` for a wrong number."""
    if values_of_axes is None:
        return None
    if not isinstance(values_of_axes, Iterable):
        raise MeshError(f"{label}s {shown(values_of_axes)}: give {example}")
    values = tuple(values_of_axes)
    if len(values) != len(shape):
        raise MeshError(
            f"{counted(len(values), label)} given for a mesh with "
            f"{counted(len(shape), 'axis', 'axes')}"
        )
    return values


def checked_names(names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the axis names of a mesh; raises `MeshError` if they do not fit it."""
    checked = _per_axis("axis name", names, shape, "a sequence, as in ('dp', 'tp')")
    for name in checked or ():
        if not (isinstance(name, str) and name.isidentifier()):
            raise MeshError(f"axis name {shown(name)}: use letters, digits and '_', a letter first")
    if checked and len(set(checked)) != len(checked):
        raise MeshError(f"axis names {checked} repeat; every name must be distinct")
    return checked


def checked_links(
    label: str, links: Sequence[float] | None, shape: tuple[int, ...]
) -> tuple[float, ...] | None:
    """Return the seconds per message or byte of every axis; raises `MeshError` if invalid."""
    values = _per_axis(f"{label} value", links, shape, "one number per axis, as in (1e-5, 3e-6)")
    if values is None:
        return None
    numbers = [number for value in values if (number := seconds(value)) is not None]
    if len(numbers) == len(values):
        return tuple(numbers)
    rule = "a finite number, not negative"
    if all(isinstance(value, int | float) and 0 <= value < math.inf for value in values):
        rule = f"{SECONDS_RULE} s"
    raise MeshError(f"{label} {shown(values)}: each value must be {rule}")


def _plain(ids: object) -> object:
    """Return a tensor or array as nested lists or a number; other values unchanged."""
    return cast(_HasToList, ids).tolist() if callable(getattr(ids, "tolist", None)) else ids
