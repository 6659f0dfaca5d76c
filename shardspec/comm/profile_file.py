"""The file of ``shardspec profile``: a mesh, and the links and curves fitted to what was measured."""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, get_args

from shardspec.comm.curves import KINDS, Band, Curve, Link
from shardspec.errors import InputFileError, MeshError, ProfileError
from shardspec.input_files import read_input_file
from shardspec.mesh import DeviceMesh, LinkModel
from shardspec.text import shown

FORMAT: Final = "shardspec profile"
VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20
_MOST_DEVICES: Final = 2**20


_Curves: TypeAlias = tuple[tuple[tuple[int, ...], tuple[Curve, ...]], ...]


class ProfileFile(NamedTuple):
    """What a profile says of a mesh, by which steps on it are priced."""

    mesh: DeviceMesh
    links: tuple[Link, ...]
    curves: _Curves
    """Of the collectives along some axes; none in a file of shardspec 0.1."""

    @property
    def model(self) -> tuple[tuple[int, ...], tuple[Link, ...], LinkModel, _Curves]:
        """The arguments of a `CostModel`."""
        return self.mesh.shape, self.links, self.mesh.link_model, self.curves


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e6  # type: ignore[operator]


def _is_list(of: Callable[[Any], bool], length: int | None = None) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and len(value) == (length or len(value)) and all(map(of, value))
    )


def _is_band(value: object) -> bool:
    return value is None or _is_list(_is_number, 2)(value)


_KEYS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "format": (lambda value: value == FORMAT, f"{FORMAT!r}"),
    "version": (lambda value: value == VERSION, f"{VERSION}, which this release reads"),
    "mesh_shape": (
        lambda value: _is_list(_is_size)(value) and 0 < prod(value) <= _MOST_DEVICES,
        "the sizes of a mesh",
    ),
    "axis_names": (
        lambda value: value is None or _is_list(lambda name: isinstance(name, str))(value),
        "a list of names, or null",
    ),
    "link_model": (lambda value: value in get_args(LinkModel), f"one of {get_args(LinkModel)}"),
    "fits": (lambda value: isinstance(value, dict), "an object"),
    "links": (lambda value: isinstance(value, list), "a list"),
    "latency_s": (_is_number, "seconds from 0"),
    "seconds_per_byte": (_is_number, "seconds from 0"),
    "curves": (lambda value: isinstance(value, list), "a list"),
    "axes": (_is_list(_is_size), "axes of the mesh"),
    "collective": (lambda value: value in KINDS, f"one of {', '.join(KINDS)}"),
    "devices": (_is_size, "a number of devices"),
    "lines": (
        lambda value: value != [] and _is_list(_is_list(_is_number, 2))(value),
        "pairs of seconds, and of seconds a byte",
    ),
    "sizes": (_is_list(_is_size, 2), "bytes from and to"),
    "errors": (_is_list(_is_band, 2), "two pairs of numbers, or null"),
}
"""What a key has to be: the check, and the words for it."""


def read_profile(path: Path | str) -> ProfileFile:
    """Read the file of a profile; `ProfileError` if it is none, or damaged."""
    path = Path(path)
    try:
        if not path.is_file():
            raise ProfileError("there is no such file")
        root = json.loads(read_input_file(path, _MOST_BYTES))
        for key in ("format", "version"):
            _get(root, key)
        names, model = _get(root, "axis_names"), _get(root, "link_model")
        shape = tuple(_get(root, "mesh_shape"))
        mesh = DeviceMesh(range(prod(shape)), shape, axis_names=names, link_model=model)
        links = tuple(
            Link(_get(link, "latency_s"), _get(link, "seconds_per_byte"), "measured")
            for link in _get(_get(_get(root, "fits"), model), "links")
        )
        if len(links) != mesh.ndim:
            raise ProfileError(f"{len(links)} links for the {mesh.ndim} axes of mesh {mesh}")
        curves: dict[tuple[int, ...], tuple[Curve, ...]] = {}
        for record in _get(root, "curves") if "curves" in root else ():
            axes = tuple(_get(record, "axes"))
            curves[axes] = (*curves.get(axes, ()), _curve(record, axes, mesh))
    except (ValueError, RecursionError) as error:  # all errors here, and those of JSON
        inside = isinstance(error, ProfileError | MeshError)
        why = str(error) if inside or isinstance(error, InputFileError) else f"is no JSON: {error}"
        raise ProfileError(
            f"{path}: is not a profile that can be used: {why.removeprefix(f'{path}: ')}; "
            "'shardspec profile' makes one"
        ) from None
    return ProfileFile(mesh, links, tuple(curves.items()))


def _get(record: Any, key: str) -> Any:  # noqa: ANN401  # parsed JSON
    """Return what stands under a key; `ProfileError` if that is not what it has to be."""
    value = record.get(key) if isinstance(record, dict) else None
    fits, due = _KEYS.get(key, _KEYS["fits"])
    if not fits(value):
        raise ProfileError(f"{key} is {shown(value, 24)}, but should be {due}")
    return value


def _curve(record: object, axes: tuple[int, ...], mesh: DeviceMesh) -> Curve:
    known = len(set(axes)) == len(axes) and all(axis < mesh.ndim for axis in axes)
    if not known or _get(record, "devices") != prod(mesh.shape[axis] for axis in axes):
        raise ProfileError(f"axes {list(axes)} of a curve are not those of mesh {mesh}")
    kind, devices, lines, sizes, errors = (
        _get(record, key) for key in ("collective", "devices", "lines", "sizes", "errors")
    )
    small, large = (band and Band(*band) for band in errors)
    return Curve(kind, devices, tuple(map(tuple, lines)), tuple(sizes), (small, large))
