"""Reads and writes files of links: TOML with the speed of the links of a cluster."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeGuard, get_args

from shardspec.comm.curves import EXCHANGE_KIND, KINDS, PERMUTE_KIND, Curve, Link, exchange_floor
from shardspec.errors import ProfileError, ShardSpecError
from shardspec.input_files import MAX_JSON_BYTES, MAX_TOML_BYTES, parse_toml, read_input_file
from shardspec.mesh.device_ids import SECONDS_RULE, seconds, whole_number
from shardspec.text import shown

LINKS_FORMAT: Final = "shardspec links"
Basis: TypeAlias = Literal["measured", "spec", "scaled", "arithmetic"]
Confidence: TypeAlias = Literal["high", "medium", "low", "exact"]


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """The contents of a file of links: the links of a cluster, and the origin of their numbers.

    >>> gather = Curve("all-gather", 2, ((1e-5, 3e-12),), sizes=(1, 9))
    >>> link = Link(1e-6, 1e-11, "own", curves=(gather,))
    >>> print(LinkPreset("own", link, "ib-ndr-per-gpu", per_node=8).text())
    format = "shardspec links"
    version = 1
    per_node = 8
    between = "ib-ndr-per-gpu"
    <BLANKLINE>
    [inside]
    latency_us = 1
    gb_per_s = 100
    start_us = 0
    sizes = [1, 9]
    curves = [
        {collective = "all-gather", devices = 2, lines = [[10, 3]]},
    ]
    <BLANKLINE>
    """

    name: str
    inside: Link | None
    """The link between devices of a host; None in a file of a link between hosts."""
    between: Link | str | None = None
    """The link between hosts, or the name of its preset; None if unknown."""
    per_node: int | None = None
    """The most devices of a host; None if unlimited."""
    memory_gb_per_s: float | None = None
    """The rate at which devices read or write their memory; None if unknown."""
    scope: str = "cluster"
    """The devices that the link joins: node, rack, cross-node, torus axis, any."""
    basis: Basis = "measured"
    """The method by which the numbers were obtained."""
    confidence: Confidence = "medium"
    source: str = ""
    valid_for: str = ""
    """Hardware and software for which the numbers are valid, and known deviations."""
    read_on: str = ""
    """The date on which the source was read."""

    @property
    def link(self) -> Link:
        """The link inside hosts; in a file without one, the link between hosts."""
        link = self.inside or self.between
        assert isinstance(link, Link), "a file has at least one link"
        return link

    def as_dict(self) -> dict[str, object]:
        """Return the fields as a dict of plain values, ready for JSON."""
        joining = self.between
        tables = {
            key: _record(link)
            for key, link in (("inside", self.inside), ("between", joining))
            if isinstance(link, Link)
        }
        named = {"between": joining} if isinstance(joining, str) else {}
        keys = ("name", "per_node", "memory_gb_per_s", *_ABOUT)
        return {key: getattr(self, key) for key in keys} | named | tables

    def text(self) -> str:
        """Return the text of the file."""
        lines = [f'format = "{LINKS_FORMAT}"', "version = 1"]
        lines += [f"{key} = {_toml(getattr(self, key))}" for key in _KEYS if self._is_plain(key)]
        for title, link in (("inside", self.inside), ("between", self.between)):
            if isinstance(link, Link):
                *numbers, curves = _record(link).items()
                lines += ["", f"[{title}]", *(f"{key} = {_toml(value)}" for key, value in numbers)]
                rows = [f"    {_toml(record)}," for record in curves[1]]
                lines += ["curves = [", *rows, "]"] if rows else []
        about = [f"{key} = {_toml(getattr(self, key))}" for key in _ABOUT if getattr(self, key)]
        return "\n".join([*lines, *(["", "[about]", *about] if self.source else []), ""])

    def _is_plain(self, key: str) -> bool:
        return getattr(self, key) is not None and not isinstance(getattr(self, key), Link)


_KEYS: Final = ("per_node", "memory_gb_per_s", "between")
_LINK_KEYS: Final = {
    *("latency_us", "gb_per_s", "start_us", "port", "error_percent", "sizes", "curves")
}
_ABOUT: Final = ("scope", "basis", "confidence", "source", "valid_for", "read_on")


def read_links(path: Path) -> LinkPreset:
    """Return the contents of a file of links; raises `ProfileError` if the file is invalid."""
    try:
        return _parse(parse_toml(read_input_file(path, MAX_TOML_BYTES).decode()), path.stem)
    except ShardSpecError as error:
        why = str(error).removeprefix(f"{path}: ")
    except KeyError as error:
        why = f"{error} is missing"
    except (TypeError, ValueError, AttributeError) as error:
        why = str(error).splitlines()[0]
    raise ProfileError(f"{path}: is not a file of links: {why}; 'shardspec links import' makes one")


def _parse(root: Mapping[str, Any], name: str) -> LinkPreset:
    if (root["format"], root["version"]) != (LINKS_FORMAT, 1):
        got = f"{shown(root['format'])}, version {shown(root['version'])}"
        raise ProfileError(f"unsupported format {got}")
    if unknown := set(root) - {*_KEYS, "format", "version", "inside", "about"}:
        raise ProfileError(f"unknown key {shown(min(unknown))}")
    room, memory = root.get("per_node"), root.get("memory_gb_per_s")
    if room is not None and (whole_number(room) or 0) < 1:
        raise ProfileError(f"per_node is {shown(room)}; give a whole number from 1")
    if memory is not None:
        _rate("memory_gb_per_s", memory)
    joining, inside = root.get("between"), None
    if joining is not None and not isinstance(joining, str):
        joining_name = f"{name} between hosts" if "inside" in root else name
        joining = link_of_record(joining, joining_name, joining.get("port", "device"))
    if "inside" in root or joining is None:
        inside = replace(link_of_record(root["inside"], name), room=room)
    about = {key: root["about"][key] for key in _ABOUT if key in root.get("about", {})}
    if about.get("basis", "spec") not in get_args(Basis) or not all(
        isinstance(value, str) for value in about.values()
    ):
        bases = "/".join(get_args(Basis))
        raise ProfileError(f"[about] is {shown(about)}; give text, and as basis one of {bases}")
    return LinkPreset(name, inside, joining, room, memory, **about)


def link_of_record(record: Mapping[str, Any], name: str, port: Any = None) -> Link:  # noqa: ANN401
    """Return the `Link` that a TOML table describes; raises `ProfileError` for a bad value.

    >>> str(link_of_record({"latency_us": 3, "gb_per_s": 50, "start_us": 0}, "own"))
    'own: 3 µs, 50 GB/s'
    """
    if unknown := set(record) - _LINK_KEYS:
        raise ProfileError(
            f"unknown key {shown(min(unknown))} of a link; use {', '.join(sorted(_LINK_KEYS))}"
        )
    if port not in (None, "device", "node"):
        raise ProfileError(f"port is {shown(port)}; give 'device' or 'node'")
    latency, start = (_scaled(key, record[key], 1e6) for key in ("latency_us", "start_us"))
    error = record.get("error_percent")
    if error is not None:
        median, most = (_scaled("error_percent", each, 100) for each in error)
        error = median, most
    sizes = record.get("sizes")
    curves = tuple(_curve(each, sizes) for each in record.get("curves", ()))
    per_byte = _rate("gb_per_s", record["gb_per_s"])
    return Link(latency, per_byte, name, start, curves, port, error=error)


def _curve(record: Mapping[str, Any], sizes: object) -> Curve:
    kind, lines = record["collective"], record["lines"]
    devices, nodes, *size_range = (
        whole_number(value)
        for value in (record["devices"], record.get("nodes", 1), *record.get("sizes", sizes))
    )
    if kind not in (*KINDS, PERMUTE_KIND, EXCHANGE_KIND) or not lines:
        raise ProfileError(f"a curve of {shown(kind)} has {len(lines)} lines; use one of {KINDS}")
    if devices is None or nodes is None or devices < 2 or nodes < 1 or devices % nodes:
        raise ProfileError(f"{kind} has {shown(record['devices'])} devices on {shown(nodes)} nodes")
    if len(size_range) != 2 or None in size_range:
        raise ProfileError(f"sizes of {kind} are {shown(size_range)}; give two numbers of bytes")
    plain = tuple((_scaled("lines", a, 1e6), _scaled("lines", b, 1e12)) for a, b in lines)
    return Curve(kind, devices, plain, (size_range[0] or 0, size_range[1] or 0), nodes)


def _scaled(key: str, value: object, unit: float) -> float:
    """Return `value` in seconds, where `unit` is the number of its units in a second."""
    number = seconds(value / unit) if _is_number(value) else None
    if number is None:
        raise ProfileError(f"{key} is {shown(value)}; in seconds, give {SECONDS_RULE}")
    return number


def _rate(key: str, value: object) -> float:
    """Return the seconds per byte of a rate in GB/s (10^9 bytes per second)."""
    per_byte = seconds(1 / (value * 1e9)) if _is_number(value) and value > 0 else None
    if per_byte is None:
        raise ProfileError(f"{key} is {shown(value)}; give a rate above 0 in 10^9 bytes per second")
    return per_byte


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float)


def _record(link: Link) -> dict[str, Any]:
    """Return the TOML table that describes a link, its curves last."""
    rate = 1e-9 / link.seconds_per_byte if link.seconds_per_byte else float("inf")
    numbers = {"latency_us": link.latency_s * 1e6, "gb_per_s": rate, "start_us": link.start_s * 1e6}
    record: dict[str, Any] = {key: _short(number) for key, number in numbers.items()}
    if link.port == "node":
        record["port"] = link.port
    if link.error is not None:
        record["error_percent"] = [_short(part * 100) for part in link.error]
    sizes = {curve.sizes for curve in link.curves}
    if len(sizes) == 1:
        record["sizes"] = list(*sizes)
    curves = [_curve_record(curve, same_sizes=len(sizes) == 1) for curve in link.curves]
    return record | {"curves": curves}


def _curve_record(curve: Curve, *, same_sizes: bool) -> dict[str, object]:
    lines = [[_short(fixed * 1e6), _short(slope * 1e12)] for fixed, slope in curve.lines]
    record: dict[str, object] = {"collective": curve.kind, "devices": curve.devices}
    record |= {"nodes": curve.nodes} if curve.nodes > 1 else {}
    return record | {"lines": lines} | ({} if same_sizes else {"sizes": list(curve.sizes)})


def _short(number: float) -> float:
    """Return a number rounded to six digits; no measurement has more."""
    return float(f"{number:.6g}")


def _toml(value: object) -> str:
    """Return a plain value as TOML text."""
    match value:
        case str():
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{quoted}"'
        case Mapping():
            return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
        case Sequence():
            return f"[{', '.join(map(_toml, value))}]"
        case float():
            return f"{value:g}" if value.is_integer() and value < 1e15 else repr(value)
        case _:
            return str(value)


def read_earlier_profile(path: Path) -> tuple[tuple[int, ...], tuple[Link, ...], Any]:
    """Return the mesh shape, the link of each axis, and the link model of a profile in JSON.

    Raises `ProfileError` if the file is missing or not a profile.
    """
    try:
        root = json.loads(read_input_file(path, MAX_JSON_BYTES))
        if (root["format"], root["version"]) != ("shardspec profile", 1):
            raise ProfileError(f"unsupported format {shown(root['format'])}")
        return _parse_earlier(root)
    except ShardSpecError as error:
        why = str(error).removeprefix(f"{path}: ")
    except KeyError as error:
        why = f"{error} is missing"
    except (TypeError, ValueError, AttributeError, RecursionError, ArithmeticError) as error:
        why = str(error).splitlines()[0]
    raise ProfileError(f"{path}: is not a profile: {why}; 'shardspec profile' makes one")


def _parse_earlier(root: Any) -> tuple[tuple[int, ...], tuple[Link, ...], Any]:  # noqa: ANN401
    shape, model = tuple(root["mesh_shape"]), root["link_model"]
    if model not in ("ring", "shared-bus"):
        raise ProfileError(f"link_model is {shown(model)}; known are 'ring' and 'shared-bus'")
    links = []
    for axis, fit in enumerate(root["fits"][model]["links"]):
        # The bytes of all devices share the bus.
        sharing = prod(shape) if model == "shared-bus" else 1
        curves = [
            {
                **{key: curve[key] for key in ("collective", "devices", "sizes")},
                "lines": [[fixed * 1e6, slope * 1e12] for fixed, slope in curve["lines"]],
            }
            for curve in root.get("curves", ())
            if axis in curve["axes"]
        ]
        rate = 1e-9 / fit["seconds_per_byte"] if fit["seconds_per_byte"] else float("inf")
        record = {"latency_us": fit["latency_s"] * 1e6, "gb_per_s": rate, "start_us": 0.0}
        link = link_of_record({**record, "curves": curves}, "measured")
        start, per_byte = exchange_floor(link.curves)
        slower = max(link.seconds_per_byte, per_byte / sharing)
        links.append(replace(link, start_s=start, seconds_per_byte=slower))
    return shape, tuple(links), model
