"""Named links of well-known hardware, with the source and the validity of their numbers.

The numbers in ``presets.json`` are published or fitted to published ones; links measured on your
machines are better. Curves price the collectives with published times; latency, rate and start
price the rest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.comm.curves import Band, Curve, Link
from shardspec.errors import MeshError
from shardspec.mesh.device_mesh import DeviceMesh

Basis: TypeAlias = Literal["measured", "spec", "scaled", "arithmetic"]
Confidence: TypeAlias = Literal["high", "medium", "low", "exact"]


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """A link of well-known hardware, with the origin of its numbers."""

    name: str
    scope: str
    """What the link spans: node, rack, cross-node, torus axis, any."""
    devices: tuple[int, int | None]
    """The fewest and the most devices along the axis; None for any number."""
    gb_per_s: float
    """In one direction, per device, in 10^9 bytes a second."""
    latency_us: float
    basis: Basis
    """How the rate was obtained."""
    confidence: Confidence
    source: str
    valid_for: str
    """The conditions under which the numbers hold, and known deviations."""
    read_on: str
    """The date on which the source was read."""
    sizes: tuple[int, int] | None = None
    """The least and the most bytes of the whole buffer with published times."""
    start_us: float = 0.0
    port: Literal["device", "node"] | None = None
    memory_gb_per_s: float | None = None
    """The rate at which devices read or write their memory; None if unknown."""
    curves: tuple[Curve, ...] = ()
    between: str | None = None
    """For a link inside nodes: the preset between nodes of the vendor's systems, if known."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The presets that price groups of any size: inside a node, then between nodes."""
        return (self.name,) if self.between is None else (self.name, self.between)

    def as_dict(self) -> dict[str, object]:
        """Return plain values, ready for JSON."""
        values = {field: getattr(self, field) for field in (*self.__slots__, "tiers")}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return plain | {"curves": [curve.as_dict() for curve in self.curves]}


def link_preset(name: str) -> Link:
    """Return the link of one of `PRESETS`; raises `MeshError` for an unknown name."""
    if name not in PRESETS:
        raise MeshError(f"no link preset {name!r}; known: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    latency, start = preset.latency_us / 1e6, preset.start_us / 1e6
    seconds_per_byte = 1 / (preset.gb_per_s * 1e9)
    room = None if preset.port else preset.devices[1]
    return Link(latency, seconds_per_byte, name, start, preset.curves, preset.port, room=room)


def links_of(mesh: DeviceMesh, names: Sequence[str]) -> tuple[Link, ...]:
    """Return the link of each axis of a mesh, by the names of presets.

    If axes inside nodes have more devices together than a node, they fill several nodes in the
    order of their ids. Raises `MeshError` if nodes do not cut every axis evenly, or if the link
    between them is unknown.
    """
    links = _links_by_node(mesh, tuple(names))
    if links is not None:
        return links
    name = next(name for name in names if PRESETS[name].between or not PRESETS[name].port)
    raise MeshError(
        f"the nodes of mesh {mesh} are unknown: ids {min(mesh.ids)} to {max(mesh.ids)} are not in "
        f"one node of {PRESETS[name].devices[1]} by {name}, and "
        + ("do not fill nodes evenly" if PRESETS[name].between else "nothing joins such nodes")
        + f"; have an axis for each tier and name both, as in ib-ndr-per-gpu,{name}"
    )


@lru_cache(maxsize=256)
def assumed_links(mesh: DeviceMesh) -> tuple[Link, ...]:
    """Return the links assumed by default: those of H100 nodes, joined by InfiniBand.

    If ids do not fill nodes evenly, every axis has the link between nodes.
    """
    links = _links_by_node(mesh, (DEFAULT_PRESET,) * mesh.ndim)
    if links is None:
        links = (link_preset(str(PRESETS[DEFAULT_PRESET].between)),) * mesh.ndim
    return tuple(replace(link, name=ASSUMED + link.name) for link in links)


def _links_by_node(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[Link, ...] | None:
    """Return the links of axes; None if it is unknown which devices are in one node.

    A shared bus is always within one node.
    """
    links = list(map(link_preset, names))
    if mesh.link_model == "shared-bus":
        return tuple(links)
    limits = [link.room for link in links]
    room = min(filter(None, limits), default=0)
    joining = next((link for link in links if link.port), None)
    # One group of the devices that differ only along axes inside nodes; axes of one device join
    # none, and may be more than an array has dims.
    wide = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    block = np.array(mesh.ids).reshape([mesh.shape[axis] for axis in wide])
    block = block[tuple(slice(None) if limits[axis] else slice(1) for axis in wide)]
    named = joining is not None and block.size <= room
    if room and not named and np.ptp(block) >= room:
        per_node = _devices_per_node(block, room)
        for place, axis in enumerate(wide):
            if not limits[axis] or (per_node and per_node[place] == mesh.shape[axis]):
                continue
            between = PRESETS[names[axis]].between
            if per_node is None or (joining is None and between is None):
                return None
            within, count = links[axis], per_node[place]
            joined = joining or link_preset(str(between))
            links[axis] = replace(joined, per_node=count, within=within if count > 1 else None)
    # Data that leaves a node also passes the device's link inside the node.
    inside = max(
        (link_preset(n).seconds_per_byte for n, x in zip(names, limits, strict=True) if x),
        default=0.0,
    )
    return tuple(
        replace(link, seconds_per_byte=max(link.seconds_per_byte, inside)) if link.port else link
        for link in links
    )


def _devices_per_node(ids: npt.NDArray[np.int64], room: int) -> tuple[int, ...] | None:
    """Return the number of devices of a node along each axis; None if nodes differ in that.

    Nodes are counted from id 0, or else from the smallest id.

    >>> _devices_per_node(np.arange(16).reshape(4, 4), 8), _devices_per_node(np.arange(12), 8)
    ((2, 4), None)
    """
    for first in (0, int(ids.min())):
        nodes = np.unique((ids - first) // room, return_inverse=True)[1].reshape(ids.shape)
        along = [np.moveaxis(nodes, a, 0).reshape(n, -1)[:, 0] for a, n in enumerate(ids.shape)]
        each = [np.unique(line, return_inverse=True, return_counts=True) for line in along]
        places, counts = [place for _, place, _ in each], [count for *_, count in each]
        labels = np.ravel_multi_index(np.ix_(*places), tuple(map(len, counts)))
        pairs = np.unique(nodes * labels.size + labels).size
        even = all((count == count[0]).all() for count in counts)
        if even and pairs == nodes.max() + 1 == prod(map(len, counts)):
            return tuple(int(count[0]) for count in counts)
    return None


def preset_copy_s(names: Sequence[str], *, required: bool = True) -> float:
    """Return the seconds in which the slowest of some presets reads and writes one byte.

    If no preset has a memory rate, raises `MeshError`, or returns 0 if not `required`.
    """
    rates = [rate for name in names if (rate := PRESETS[name].memory_gb_per_s) is not None]
    if rates or not required:
        return 2 / (min(rates) * 1e9) if rates else 0.0
    having = ", ".join(name for name in PRESETS if PRESETS[name].memory_gb_per_s)
    raise MeshError(
        f"no memory rate is known of {', '.join(names)}, so local copies have no price; known of: "
        f"{having}"
    )


def _curve(row: Sequence[str], sizes: tuple[int, int]) -> Curve:
    """Return the curve of a row in ``presets.json``, which documents its columns."""
    _, kind, devices, *numbers = row
    pairs = numbers[:2], numbers[2:4]
    lines = tuple((float(fixed) / 1e6, float(slope) / 1e12) for fixed, slope in pairs)
    bands = [
        None if text == "-" else Band(*(float(part) / 100 for part in text.split(",")))
        for text in numbers[4:]
    ]
    return Curve(kind, int(devices), lines, sizes, (bands[0], bands[1]), (bands[2], bands[3]))


def _presets() -> dict[str, LinkPreset]:
    data = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    rows = [row.split() for row in data["curves"]]
    presets: dict[str, LinkPreset] = {}
    for record in data["presets"]:
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record.items()
        }
        curves = tuple(_curve(row, plain["sizes"]) for row in rows if row[0] == plain["name"])
        presets[plain["name"]] = LinkPreset(**plain, curves=curves)
    return presets


PRESETS: Final[Mapping[str, LinkPreset]] = MappingProxyType(_presets())

ASSUMED: Final = "assumed "
"""The prefix of names of links that are assumed rather than given."""
DEFAULT_PRESET: Final = "h100-nvswitch"
"""The preset of nodes that is assumed by default."""
