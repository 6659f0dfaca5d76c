"""Named links of well-known hardware, with the source and the validity of their numbers.

The numbers in ``presets.json`` are published or fitted to published ones; links measured on your
machines are better. Curves price the collectives with published times; latency, rate and start
price the rest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from shardspec.comm.cluster import Cluster, slowest_link
from shardspec.comm.curves import Band, Curve, Link
from shardspec.errors import MeshError
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import first_of

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
        known = first_of([*PRESETS], 5)
        raise MeshError(f"no link preset {name!r}; 'shardspec links list' prints them: {known}")
    preset = PRESETS[name]
    latency, start = preset.latency_us / 1e6, preset.start_us / 1e6
    seconds_per_byte = 1 / (preset.gb_per_s * 1e9)
    room = None if preset.port else preset.devices[1]
    return Link(latency, seconds_per_byte, name, start, preset.curves, preset.port, room=room)


def links_of(mesh: DeviceMesh, names: Sequence[str]) -> tuple[tuple[Link, ...], Cluster]:
    """Return the link of each axis of a mesh, by the names of presets, and the hosts they imply.

    If axes inside hosts have more devices together than a host, they fill several hosts in the
    order of their ids. Raises `MeshError` if hosts do not cut every axis evenly, or if the link
    between them is unknown.
    """
    links = list(map(link_preset, names))
    inner = [axis for axis, link in enumerate(links) if not link.port]
    joining = next((link for link in links if link.port), None)
    if not inner:
        return tuple(links), Cluster(links[0], joining, per_node=1)
    near = slowest_link([links[axis] for axis in inner], "slowest inside hosts")
    room = min(filter(None, (links[axis].room for axis in inner)), default=0)
    part = mesh.slice_with(mesh.ids[0], inner)
    hosts = mesh.groups(inner)
    between = PRESETS[names[inner[0]]].between
    if mesh.link_model == "shared-bus" or (not room and joining is None):
        return tuple(links), Cluster(near)
    if joining is not None and (not room or part.size() <= room):
        by_ids = max(map(len, hosts))
        aligned = len({device // by_ids for device in mesh.ids}) == len(hosts) and all(
            len({device // by_ids for device in host}) == 1 for host in hosts
        )
        numbered = (by_ids, ()) if aligned else (None, hosts)
        cluster = Cluster(near, joining, *numbered)
    else:
        joining = joining or (link_preset(between) if between else None)
        cluster = Cluster(near, joining, room if joining else None)
        found = cluster.axis_links(part)
        if found is None or (joining is None and part.size() > room):
            raise _unknown_hosts(mesh, names[inner[0]])
        for axis, link in zip(inner, found, strict=True):
            if link.port:
                within = links[axis] if link.within is not None else None
                links[axis] = replace(link, within=within)
    # Data that leaves a host also passes the device's link inside the host.
    slowest = near.seconds_per_byte
    through = (
        replace(link, seconds_per_byte=max(link.seconds_per_byte, slowest)) if link.port else link
        for link in links
    )
    return tuple(through), cluster


def _unknown_hosts(mesh: DeviceMesh, name: str) -> MeshError:
    """Return the error of a mesh that is not in one host and fills several unevenly."""
    return MeshError(
        f"the nodes of mesh {mesh} are unknown: ids {min(mesh.ids)} to {max(mesh.ids)} are not in "
        f"one node of {PRESETS[name].devices[1]} by {name}, and "
        + ("do not fill nodes evenly" if PRESETS[name].between else "nothing joins such nodes")
        + f"; have an axis for each tier and name both, as in ib-ndr-per-gpu,{name}"
    )


@lru_cache(maxsize=64)
def preset_cluster(name: str, between: str | None = None, per_node: int | None = None) -> Cluster:
    """Return the cluster of a preset inside hosts, and of another between them.

    By default the vendor's: `LinkPreset.between`, and as many devices a host as the preset allows.
    """
    inside = link_preset(name)
    joining = between or PRESETS[name].between
    copy_s = preset_copy_s([name], required=False)
    if inside.port:
        if between is not None or (per_node or 1) != 1:
            raise MeshError(f"{name} joins hosts; name the links inside a host first")
        return Cluster(inside, inside, 1, copy_s=copy_s)
    number = per_node or inside.room
    if per_node is not None and inside.room is not None and per_node > inside.room:
        raise MeshError(f"per_node is {per_node}, but {name} joins at most {inside.room} devices")
    if joining is None and per_node is None:
        return Cluster(inside, copy_s=copy_s)
    if joining is None or not number:
        raise MeshError(f"the hosts of {name} are unknown; give both between= and per_node=")
    return Cluster(inside, link_preset(joining), number, copy_s=copy_s)


@lru_cache(maxsize=1)
def assumed_cluster() -> Cluster:
    """Return the cluster assumed by default: hosts of eight H100, joined by InfiniBand."""
    cluster = preset_cluster(DEFAULT_PRESET)
    inside, between = (
        replace(link, name=ASSUMED + link.name)
        for link in (cluster.inside, cluster.between)
        if link
    )
    return replace(cluster, inside=inside, between=between)


def preset_copy_s(names: Sequence[str], *, required: bool = True) -> float:
    """Return the seconds in which the slowest of some presets reads and writes one byte.

    If no preset has a memory rate, raises `MeshError`, or returns 0 if not `required`.
    """
    known = [PRESETS[name].memory_gb_per_s for name in names if name in PRESETS]
    rates = [rate for rate in known if rate is not None]
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
