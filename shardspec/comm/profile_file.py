"""The file of ``shardspec profile``: a mesh, and the links and curves fitted to measured times."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

from shardspec.comm.curves import KINDS, Band, Curve, Line, Link, Measured, exchange_floor
from shardspec.errors import ProfileError, ShardSpecError
from shardspec.input_files import read_input_file
from shardspec.mesh.device_ids import SECONDS_RULE, seconds
from shardspec.mesh.device_mesh import DeviceMesh, LinkModel
from shardspec.text import shown

PROFILE_FORMAT: Final = "shardspec profile"
PROFILE_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20
_MOST_DEVICES: Final = 2**20
Profiled: TypeAlias = tuple[
    DeviceMesh, tuple[tuple[int, ...], tuple[Link, ...], LinkModel, Measured]
]
"""The mesh, and the arguments of a `CostModel`; a file of shardspec 0.1 has no curves."""


def read_profile(path: Path | str) -> Profiled:
    """Return the contents of a profile's file; raises `ProfileError` if it is not a valid one."""
    path = Path(path)
    if not path.is_file():
        raise ProfileError(f"{path}: there is no such file; 'shardspec profile' makes one")
    try:
        return _parse(json.loads(read_input_file(path, _MOST_BYTES)))
    except ShardSpecError as error:
        why = str(error).removeprefix(f"{path}: ")
    except KeyError as error:
        why = f"{error} is missing"
    except (TypeError, ValueError, RecursionError) as error:  # not JSON, or of another structure
        why = str(error)
    raise ProfileError(f"{path}: is not a profile: {why}; 'shardspec profile' makes one")


def _parse(root: Any) -> Profiled:  # noqa: ANN401  # parsed JSON
    _check("format", root["format"], [PROFILE_FORMAT])
    _check("version", root["version"], [PROFILE_VERSION])
    shape, names = tuple(_numbers("mesh_shape", root["mesh_shape"], int)), root["axis_names"]
    if prod(shape) > _MOST_DEVICES:
        raise ProfileError(f"mesh_shape is {shown(shape)}, more than {_MOST_DEVICES:,} devices")
    model = _check("link_model", root["link_model"], get_args(LinkModel))
    mesh = DeviceMesh(range(prod(shape)), shape, axis_names=names, link_model=model)
    links = tuple(
        Link(*_pair(_numbers("links", [link["latency_s"], link["seconds_per_byte"]])), "measured")
        for link in root["fits"][model]["links"]
    )
    if len(links) != mesh.ndim:
        raise ProfileError(f"{len(links)} links for the {mesh.ndim} axes of mesh {mesh}")
    curves: dict[tuple[int, ...], tuple[Curve, ...]] = {}
    for record in root.get("curves", []):
        axes = tuple(_numbers("axes", record["axes"], int))
        devices = prod(mesh.shape[_check("axis", axis, range(mesh.ndim))] for axis in axes)
        lines = tuple(_line(_numbers("lines", line)) for line in record["lines"])
        curve = Curve(
            _check("collective", record["collective"], KINDS),
            _check("devices", record["devices"], [devices]),
            lines or _check("lines", lines, ["one or more"]),
            _pair(_numbers("sizes", record["sizes"], int)),
            _pair(band and Band(*_numbers("errors", band)) for band in record["errors"]),
        )
        curves[axes] = (*curves.get(axes, ()), curve)
    measured = tuple(curves.items())
    return mesh, (shape, floored(links, mesh, measured), mesh.link_model, measured)


def floored(links: Sequence[Link], mesh: DeviceMesh, measured: Measured) -> tuple[Link, ...]:
    """Return links by which no exchange takes less than the measured collective that sends as much.

    `exchange_floor` has the rule; on a bus the bytes of all devices count.
    """
    found = []
    for axis, link in enumerate(links):
        along = [curve for axes, group in measured if axis in axes for curve in group]
        start, per_byte = exchange_floor(along)
        per_byte /= mesh.size() if mesh.link_model == "shared-bus" else 1
        slower = max(link.seconds_per_byte, per_byte)
        found.append(replace(link, start_s=max(link.start_s, start), seconds_per_byte=slower))
    return tuple(found)


def _check(key: str, value: Any, accepted: Iterable[Any]) -> Any:  # noqa: ANN401  # parsed JSON
    if value not in accepted:
        expected = " or ".join(map(repr, accepted))
        raise ProfileError(f"{key} is {shown(value, 24)}, but this release reads {expected}")
    return value


def _numbers(key: str, values: Any, kind: type = float) -> list[Any]:  # noqa: ANN401
    """Return a list of numbers from 0, whole ones if `kind` is int."""
    kinds = (int,) if kind is int else (int, float)
    if not isinstance(values, list) or not all(
        type(value) in kinds and 0 <= value < 2**63 for value in values
    ):
        raise ProfileError(f"{key} is {shown(values, 24)}, but should be numbers from 0")
    return values


def _line(values: list[Any]) -> Line:
    fixed, slope = map(seconds, values)
    if fixed is None or slope is None:
        raise ProfileError(f"lines has {shown(values, 24)}, but should be {SECONDS_RULE} s")
    return fixed, slope


def _pair(values: Iterable[Any]) -> tuple[Any, Any]:
    first, second = values
    return first, second
