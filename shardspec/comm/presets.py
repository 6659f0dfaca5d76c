"""Gives the links of well-known hardware by name, as in ``links="h100-nvswitch"``.

Each preset is a TOML file beside this module, as ``shardspec profile`` writes them. Its numbers are
published or fitted to published ones; links measured on your machines are better. Curves price
collectives with published times; latency and bandwidth price the other steps.

>>> links, cluster = links_of(DeviceMesh(range(16), (2, 8)), ["ib-ndr-per-gpu", "h100-nvswitch"])
>>> [link.name for link in links], cluster.per_node, preset_cluster("h100-nvswitch").per_node
(['ib-ndr-per-gpu', 'h100-nvswitch'], 8, 8)
>>> link_between(link_preset("h100-nvswitch")).name, "tpu-v4" in preset_names()
('ib-ndr-per-gpu', True)
>>> assumed_cluster().inside.name, f"{memory_copy_s(['h100-nvswitch']):.2g}"
('assumed h100-nvswitch', '6e-13')
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from shardspec.comm.cluster import Cluster, slowest_link
from shardspec.comm.cluster_file import LinkPreset, read_links
from shardspec.comm.curves import Link
from shardspec.errors import MeshError, ProfileError
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import first_of

_FOLDER: Final = Path(__file__).with_name("links")
ASSUMED: Final = "assumed "
"""Prefix of the names of links that are assumed by default."""
DEFAULT_PRESET: Final = "h100-nvswitch"
"""The preset for nodes that is assumed by default."""


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def link_preset(name: str) -> LinkPreset:
    """Return a preset, or the contents of a user's file whose name ends in ``.toml``.

    Raises `MeshError` for an unknown name, and `ProfileError` for a bad file.

    >>> link_preset("h100-nvswitch").per_node, link_preset("h100-nvswitch").between
    (8, 'ib-ndr-per-gpu')
    """
    return read_links(Path(name)) if name.endswith(".toml") else _preset(name)


@lru_cache(maxsize=64)
def _preset(name: str) -> LinkPreset:
    if name not in preset_names():
        if Path(name).suffix:
            raise MeshError(f"{name} is not a TOML file of links; 'shardspec profile' writes one")
        known = first_of(preset_names(), 5)
        raise MeshError(f"no link preset {name!r}; 'shardspec links list' prints them: {known}")
    return read_links(_FOLDER / f"{name}.toml")


def link_between(preset: LinkPreset) -> Link | None:
    """Return the link between the hosts of a preset; None if it is unknown.

    Raises `ProfileError` if the file names no preset of such a link.
    """
    joining = preset.between
    if not isinstance(joining, str):
        return joining
    try:
        link = link_preset(joining).link
    except MeshError as error:
        raise ProfileError(f"{preset.name}: the link between hosts is wrong: {error}") from None
    if link.port is None:
        raise ProfileError(f"{preset.name}: between={joining} does not join hosts; name another")
    return link


def links_of(mesh: DeviceMesh, names: Sequence[str]) -> tuple[tuple[Link, ...], Cluster]:
    """Return the link of each axis of a mesh, and the cluster, given the names of presets.

    If the axes inside hosts have more devices than a host, they fill several hosts in the order of
    their ids. Raises `MeshError` if hosts split an axis unevenly, or no link between them is known.
    """
    chosen = {name: link_preset(name) for name in names}
    links = [chosen[name].link for name in names]
    inner = [axis for axis, link in enumerate(links) if not link.port]
    joining = next((link for link in links if link.port), None)
    if not inner:
        return tuple(links), Cluster(links[0], joining, per_node=1)
    near = slowest_link([links[axis] for axis in inner], "slowest inside hosts")
    room = min(filter(None, (links[axis].room for axis in inner)), default=0)
    part = mesh.submesh({axis: 0 for axis, link in enumerate(links) if link.port})
    hosts = mesh.groups(inner)
    first = chosen[names[inner[0]]]
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
        joining = joining or link_between(first)
        cluster = Cluster(near, joining, room if joining else None)
        axis_links = cluster.axis_links(part)
        if axis_links is None or (joining is None and part.size() > room):
            raise _unknown_hosts(mesh, first)
        for axis, link in zip(inner, axis_links, strict=True):
            if link.port:
                within = links[axis] if link.within is not None else None
                links[axis] = replace(link, within=within)
    # Data sent to another host also passes the device's link inside the host.
    slowest = near.seconds_per_byte
    through = (
        replace(link, seconds_per_byte=max(link.seconds_per_byte, slowest)) if link.port else link
        for link in links
    )
    return tuple(through), cluster


def _unknown_hosts(mesh: DeviceMesh, preset: LinkPreset) -> MeshError:
    """Return the error for a mesh whose devices cannot be assigned to hosts."""
    return MeshError(
        f"mesh {mesh} has ids {min(mesh.ids)} to {max(mesh.ids)}, but a node of {preset.name} has "
        f"{preset.per_node} devices, and "
        + ("its axes do not fill nodes evenly" if preset.between else "no link joins its nodes")
        + f"; have an axis across nodes and name both links, as in ib-ndr-per-gpu,{preset.name}"
    )


def preset_cluster(
    preset: LinkPreset | str, between: str | None = None, per_node: int | None = None
) -> Cluster:
    """Return the cluster of a preset or file of links.

    `between` and `per_node` replace `LinkPreset.between` and `LinkPreset.per_node`.
    """
    preset = link_preset(preset) if isinstance(preset, str) else preset
    name, memory = preset.name, preset.memory_gb_per_s
    inside, joining = preset.link, link_between(preset)
    if between is not None:
        joining = link_preset(between).link
    copy_s = 2 / (memory * 1e9) if memory else 0.0
    if inside.port:
        if between is not None or (per_node or 1) != 1:
            raise MeshError(f"{name} is a link between hosts; name the link inside a host first")
        return Cluster(inside, inside, 1, copy_s=copy_s)
    number = per_node or inside.room
    if per_node is not None and inside.room is not None and per_node > inside.room:
        raise MeshError(f"per_node is {per_node}, but {name} joins at most {inside.room} devices")
    if joining is None and per_node is None:
        return Cluster(inside, copy_s=copy_s)
    if joining is None or not number:
        raise MeshError(f"the hosts of {name} are unknown; give both between= and per_node=")
    return Cluster(inside, joining, number, copy_s=copy_s)


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


def memory_copy_s(names: Sequence[str], *, required: bool = True) -> float:
    """Return the seconds per byte of a local copy, by the slowest memory of some presets.

    If no preset has a memory rate, raises `MeshError` if `required`, else returns 0.
    """
    rates = [rate for name in names if (rate := link_preset(name).memory_gb_per_s) is not None]
    if rates or not required:
        return 2 / (min(rates) * 1e9) if rates else 0.0
    having = ", ".join(name for name in preset_names() if link_preset(name).memory_gb_per_s)
    raise MeshError(
        f"no memory rate is known for {', '.join(names)}, so local copies have no price; known "
        f"for: {having}"
    )
