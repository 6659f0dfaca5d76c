"""Named links of known hardware, each with where its numbers come from and how far they hold.

The numbers, in ``presets.json``, are published ones, or fitted to published ones; links measured on
the machines themselves are better. Curves price the collectives whose times were published, and
latency, rate and start the rest.
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
    """A link of known hardware, and what is known about its numbers."""

    name: str
    scope: str
    """What the devices have in common: node, rack, cross-node, torus axis, any."""
    devices: tuple[int, int | None]
    """The fewest and the most devices along the axis; None for any number."""
    gb_per_s: float
    """In one direction, per device, in 10^9 bytes a second."""
    latency_us: float
    basis: Basis
    """How the rate was found."""
    confidence: Confidence
    source: str
    valid_for: str
    """What the numbers were taken for, and where they are known to be off."""
    sizes: tuple[int, int] | None = None
    """Bytes of the whole buffer, from and to, for which times are published."""
    start_us: float = 0.0
    port: Literal["device", "node"] | None = None
    read_on: str = "2026-11-20"
    memory_gb_per_s: float | None = None
    """Rate of the devices' memory, read or written, where it is known."""
    curves: tuple[Curve, ...] = ()
    between: str | None = None
    """Of a link inside a node: the preset that joins nodes of the vendor's systems, if known."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """The presets that price groups of any size, inside a node and then between nodes."""
        return (self.name,) if self.between is None else (self.name, self.between)

    def as_dict(self) -> dict[str, object]:
        """Return plain values, ready for JSON."""
        values = {field: getattr(self, field) for field in (*self.__slots__, "tiers")}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return plain | {"curves": [curve.as_dict() for curve in self.curves]}


def link_preset(name: str) -> Link:
    """Return the link of one of `PRESETS`; `MeshError` if there is none of this name."""
    if name not in PRESETS:
        raise MeshError(f"no link preset {name!r}; known: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    latency, start = preset.latency_us / 1e6, preset.start_us / 1e6
    seconds_per_byte = 1 / (preset.gb_per_s * 1e9)
    return Link(latency, seconds_per_byte, name, start, preset.curves, preset.port)


def links_of(mesh: DeviceMesh, names: Sequence[str]) -> tuple[Link, ...]:
    """Return the link of each axis of a mesh, by the names of presets.

    Where axes inside nodes have more devices together than a node, they are in several nodes, in
    the order of their ids. It is a `MeshError` if nodes do not cut every axis evenly, or if it is
    not known what joins them.
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
    """Return the links of a mesh of which nothing is known: of H100 in nodes, joined by InfiniBand.

    All axes join nodes where ids do not fill nodes evenly.
    """
    links = _links_by_node(mesh, (DEFAULT_PRESET,) * mesh.ndim)
    if links is None:
        links = (link_preset(str(PRESETS[DEFAULT_PRESET].between)),) * mesh.ndim
    return tuple(replace(link, name=ASSUMED + link.name) for link in links)


def _links_by_node(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[Link, ...] | None:
    """Return the links of axes; None where it is not known which devices are in one node.

    A shared bus is in one node.
    """
    links = list(map(link_preset, names))
    if mesh.link_model == "shared-bus":
        return tuple(links)
    limits = [None if PRESETS[name].port else PRESETS[name].devices[1] for name in names]
    room = min(filter(None, limits), default=0)
    joining = next((link for link in links if link.port), None)
    # Devices that differ only along axes inside nodes.
    block = np.array(mesh.ids).reshape(mesh.shape)
    block = block[tuple(slice(None) if limit else slice(1) for limit in limits)]
    named = joining is not None and block.size <= room
    if room and not named and np.ptp(block) >= room:
        per_node = _devices_per_node(block, room)
        for axis, (name, limit) in enumerate(zip(names, limits, strict=True)):
            if not limit or (per_node and per_node[axis] == mesh.shape[axis]):
                continue
            between = PRESETS[name].between
            if per_node is None or (joining is None and between is None):
                return None
            within, count = links[axis], per_node[axis]
            joined = joining or link_preset(str(between))
            links[axis] = replace(joined, per_node=count, within=within if count > 1 else None)
    # What leaves a node goes over the link that its device has inside, too.
    inside = max(
        (link_preset(n).seconds_per_byte for n, x in zip(names, limits, strict=True) if x),
        default=0.0,
    )
    return tuple(
        replace(link, seconds_per_byte=max(link.seconds_per_byte, inside)) if link.port else link
        for link in links
    )


def _devices_per_node(ids: npt.NDArray[np.int64], room: int) -> tuple[int, ...] | None:
    """Return how many devices of each axis a node has, None where that is not the same for all.

    Nodes have the ids from 0 on, or from the first id on.

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
    """Return the seconds in which the slowest of some presets copies a byte: one read, one write.

    Where no rate of memory is known it is a `MeshError`, or 0 if none is required.
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
    """Read a row of the curves in ``presets.json``, which says what its columns are."""
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
    found: dict[str, LinkPreset] = {}
    for record in data["presets"]:
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in record.items()
        }
        curves = tuple(_curve(row, plain["sizes"]) for row in rows if row[0] == plain["name"])
        found[plain["name"]] = LinkPreset(**plain, curves=curves)
    return found


PRESETS: Final[Mapping[str, LinkPreset]] = MappingProxyType(_presets())

ASSUMED: Final = "assumed "
"""What names of links begin with that nobody gave."""
DEFAULT_PRESET: Final = "h100-nvswitch"
"""What is assumed where nothing is said: nodes of it."""
DEFAULT_LINK: Final = replace(link_preset(DEFAULT_PRESET), name=ASSUMED + DEFAULT_PRESET)
