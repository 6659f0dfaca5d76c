"""Named links of known hardware, each with where its numbers come from and how far they hold.

The numbers, in ``presets.json``, are published ones, or fitted to published ones; links measured on
the machines themselves are better. Curves price the collectives whose times were published, and
latency, rate and start the rest.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from shardspec.comm.curves import Band, Curve, Link
from shardspec.errors import MeshError

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

    def as_dict(self) -> dict[str, object]:
        """Return plain values, ready for JSON."""
        values = {field: getattr(self, field) for field in self.__slots__}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return plain | {"curves": [curve.as_dict() for curve in self.curves]}


def link_preset(name: str, devices: int = 0) -> Link:
    """Return the link of one of `PRESETS`; its name says if so many devices are beyond it."""
    if name not in PRESETS:
        raise MeshError(f"no link preset {name!r}; known: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    most = preset.devices[1]
    shown = name if most is None or devices <= most else f"{name} beyond its {most} devices"
    latency, start = preset.latency_us / 1e6, preset.start_us / 1e6
    seconds_per_byte = 1 / (preset.gb_per_s * 1e9)
    return Link(latency, seconds_per_byte, shown, start, preset.curves, preset.port)


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

DEFAULT_PRESET: Final = "h100-nvswitch"
DEFAULT_LINK: Final = replace(link_preset(DEFAULT_PRESET), name=f"assumed {DEFAULT_PRESET}")
"""What is assumed where nothing is said: one node of H100."""
