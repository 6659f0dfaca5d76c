"""Files of links: a cluster as TOML, written by ``shardspec links import``."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardspec.comm.cluster import Cluster
from shardspec.comm.curves import KINDS, Band, Curve, Link
from shardspec.errors import ProfileError, ShardSpecError
from shardspec.input_files import read_input_file
from shardspec.mesh.device_ids import SECONDS_RULE, seconds, whole_number
from shardspec.text import shown

LINKS_FORMAT: Final = "shardspec links"
_MOST_BYTES: Final = 16 << 20


def cluster_text(cluster: Cluster) -> str:
    """Return the text of a file of links.

    >>> print(cluster_text(Cluster(Link(1e-6, 1e-11, "NVLink"))))
    format = "shardspec links"
    version = 1
    <BLANKLINE>
    [inside]
    latency_s = 1e-06
    seconds_per_byte = 1e-11
    start_s = 0.0
    <BLANKLINE>
    """
    lines = [f'format = "{LINKS_FORMAT}"', "version = 1"]
    if cluster.per_node is not None:
        lines.append(f"per_node = {cluster.per_node}")
    if cluster.copy_s:
        lines.append(f"copy_s = {cluster.copy_s!r}")
    for title, link in (("inside", cluster.inside), ("between", cluster.between)):
        if link is None:
            continue
        lines += ["", f"[{title}]"]
        for key in ("latency_s", "seconds_per_byte", "start_s"):
            lines.append(f"{key} = {getattr(link, key)!r}")
        for curve in link.curves:
            lines += [
                "",
                f"[[{title}.curves]]",
                f'collective = "{curve.kind}"',
                f"devices = {curve.devices}",
                f"nodes = {curve.nodes}",
                f"lines = {[list(line) for line in curve.lines]}",
                f"sizes = {list(curve.sizes)}",
                f"errors = {[[band.median, band.most] if band else [] for band in curve.errors]}",
            ]
    return "\n".join([*lines, ""])


def read_cluster(path: Path | str) -> Cluster:
    """Return the cluster of a file of links; raises `ProfileError` if it is not a valid one."""
    try:
        root = tomllib.loads(read_input_file(Path(path), _MOST_BYTES).decode("utf-8"))
        return _parse(root, Path(path).stem)
    except ShardSpecError as error:
        why = str(error).removeprefix(f"{path}: ")
    except KeyError as error:
        why = f"{error} is missing"
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        why = str(error).splitlines()[0]
    raise ProfileError(f"{path}: is not a file of links: {why}; 'shardspec links import' makes one")


def _parse(root: Mapping[str, Any], name: str) -> Cluster:
    if (root["format"], root["version"]) != (LINKS_FORMAT, 1):
        raise ProfileError(f"format is {shown(root['format'])}, version {shown(root['version'])}")
    inside = _link(root["inside"], name)
    between = _link(root["between"], f"{name} between hosts") if "between" in root else None
    if between is not None:
        between = replace(between, port="device")
    copy_s = _seconds("copy_s", root.get("copy_s", 0.0))
    return (
        Cluster(
            replace(inside, room=root.get("per_node")), between, root.get("per_node"), copy_s=copy_s
        )
        if between
        else Cluster(inside, copy_s=copy_s)
    )


def _link(record: Mapping[str, Any], name: str) -> Link:
    keys = ("latency_s", "seconds_per_byte", "start_s")
    latency, per_byte, start = (_seconds(key, record[key]) for key in keys)
    return Link(latency, per_byte, name, start, tuple(map(_curve, record.get("curves", ()))))


def _curve(record: Mapping[str, Any]) -> Curve:
    kind, lines = record["collective"], record["lines"]
    devices, nodes, *sizes = (
        whole_number(value) for value in (record["devices"], record["nodes"], *record["sizes"])
    )
    if kind not in KINDS or not lines:
        raise ProfileError(f"collective {shown(kind)} with {len(lines)} lines: give {KINDS}")
    if devices is None or nodes is None or devices < 2 or nodes < 1 or devices % nodes:
        raise ProfileError(f"{kind} of {shown(record['devices'])} devices on {shown(nodes)} nodes")
    if len(sizes) != 2 or None in sizes:
        raise ProfileError(f"sizes of {kind} are {shown(record['sizes'])}; give two numbers")
    plain = tuple((_seconds("lines", a), _seconds("lines", b)) for a, b in lines)
    small, large = (Band(*map(float, band)) if band else None for band in record["errors"])
    return Curve(kind, devices, plain, (sizes[0] or 0, sizes[1] or 0), (small, large), nodes=nodes)


def _seconds(key: str, value: object) -> float:
    number = seconds(value)
    if number is None:
        raise ProfileError(f"{key} is {shown(value)}, but should be {SECONDS_RULE} s")
    return number
