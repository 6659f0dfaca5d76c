"""Named links of known hardware, each with where its numbers come from and how far they hold.

The numbers are published ones, read on `READ_ON`, or fitted to published ones; none was measured by
this project. A preset is a starting point: links measured on the machines themselves are better.

Of machines whose collectives were published, curves fitted to them are in
`shardspec.comm.curves`; these price the collectives. Latency, rate and start price what has no
curve: exchange, and steps on more devices than were measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from shardspec.comm.curves import Curve, Link, curves_of
from shardspec.errors import MeshError

__all__ = [
    "DEFAULT_LINK",
    "DEFAULT_PRESET",
    "PRESETS",
    "READ_ON",
    "Basis",
    "Confidence",
    "LinkPreset",
    "link_preset",
    "preset_copy_s",
]

Basis: TypeAlias = Literal["measured", "spec", "scaled", "arithmetic"]
Confidence: TypeAlias = Literal["high", "medium", "low", "exact"]

READ_ON: Final = "2026-11-20"
"""When the sources were read."""

_MIB: Final = 2**20
_GIB: Final = 2**30

_NCCL: Final = "latency: NCCL 2.30, src/graph/tuning.cc, Simple protocol"
_BOOK: Final = "ML Engineering Open Book, network/benchmarks (2026-08-22)"
_TABLES: Final = "ai-dynamo/aiconfigurator (095f58a)"
_SCALING: Final = "How To Scale Your Model, TPU and sharding chapters"
_TORUS: Final = (
    "where their ends are joined; halve the rate elsewhere. All-to-all over n devices takes about "
    "n/4 times as long as is priced"
)


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """A link of known hardware, and what is known about its numbers.

    Examples
    --------
    >>> str(PRESETS["ib-ndr-per-gpu"].link(4))
    'ib-ndr-per-gpu: 22.4 µs, 48 GB/s'
    """

    name: str
    """What it is called."""
    scope: str
    """What the devices have in common: node, rack, cross-node, torus axis, any."""
    devices: tuple[int, int | None]
    """The fewest and the most devices along the axis; None for any number."""
    gb_per_s: float
    """Rate in one direction, per device, in 10^9 bytes a second."""
    latency_us: float
    """Latency of one message, in microseconds."""
    basis: Basis
    """How the rate was found."""
    confidence: Confidence
    """How well it is known; exact where it is so by definition."""
    source: str
    """Where the numbers stand."""
    valid_for: str
    """What they were taken for, and where they are known to be off."""
    sizes: tuple[int, int] | None = None
    """Bytes of the whole buffer, from and to, for which times are published; None if none are."""
    start_us: float = 0.0
    """Time to start a step, in microseconds."""
    port: Literal["device", "node"] | None = None
    """Of links between nodes: whether each device has a port or a node's devices share one."""
    read_on: str = READ_ON
    """When the source was read, as year-month-day."""
    memory_gb_per_s: float | None = None
    """Rate of the devices' memory in 10^9 bytes a second, read or written; None if not known."""

    def link(self, devices: int | None = None) -> Link:
        """Return the link, its name saying so where an axis of `devices` is beyond the preset.

        Examples
        --------
        >>> str(PRESETS["h100-nvswitch"].link(16))
        'h100-nvswitch beyond its 8 devices: curves of 2, 4, 8 devices, else 23 µs, 249 GB/s'
        """
        most = self.devices[1]
        beyond = most is not None and devices is not None and devices > most
        name = f"{self.name} beyond its {most} devices" if beyond else self.name
        return Link(
            self.latency_us / 1e6,
            1 / (self.gb_per_s * 1e9),
            name,
            self.start_us / 1e6,
            self.curves,
            self.port,
        )

    @property
    def curves(self) -> tuple[Curve, ...]:
        """What collectives take on such links, where that was published."""
        return curves_of(self.name)

    def as_dict(self) -> dict[str, object]:
        """Return the record as plain values, ready for JSON; sizes and numbers of devices as lists.

        Examples
        --------
        >>> PRESETS["unit"].as_dict()["devices"]
        [1, None]
        """
        values = {field: getattr(self, field) for field in self.__slots__}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return plain | {"curves": [curve.as_dict() for curve in self.curves]}


def link_preset(name: str, devices: int | None = None) -> Link:
    """Return the link of a preset.

    Parameters
    ----------
    name
        One of `PRESETS`.
    devices
        Devices along the axis; the link's name says so where the preset is not for as many.

    Raises
    ------
    MeshError
        If there is no such preset; the message names those there are.

    Examples
    --------
    >>> str(link_preset("b200-nvswitch"))
    'b200-nvswitch: curves of 2, 4, 8 devices, else 27.5 µs, 322 GB/s'
    """
    if name not in PRESETS:
        raise MeshError(f"no link preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name].link(devices)


def preset_copy_s(names: Sequence[str], *, required: bool = True) -> float:
    """Return the seconds in which a device of some presets copies a byte, once read, once written.

    Parameters
    ----------
    names
        Of presets; the slowest memory counts.
    required
        Whether it is an error if none of them has a rate; else 0 is returned.

    Examples
    --------
    >>> preset_copy_s(["ib-ndr-per-gpu", "h100-nvswitch"]) == 2 / 3.35e12
    True
    """
    known = [PRESETS[name].memory_gb_per_s for name in names]
    rates = [rate for rate in known if rate is not None]
    if rates:
        return 2 / (min(rates) * 1e9)
    if not required:
        return 0.0
    having = ", ".join(name for name in PRESETS if PRESETS[name].memory_gb_per_s)
    raise MeshError(
        f"no memory rate is known of {', '.join(names)}, so local copies have no price; known of: "
        f"{having}"
    )


def _nvswitch(
    name: str,
    gb_per_s: float,
    start_us: float,
    memory_gb_per_s: float,
    versions: str,
    scope: str = "node",
    most: int = 8,
) -> LinkPreset:
    return LinkPreset(
        name,
        scope,
        (2, most),
        gb_per_s,
        0.0,
        "measured",
        "high",
        f"curves of collectives fitted to nccl-tests, {versions}, {_TABLES}; start and rate: such "
        "that sending never costs less than the all-gather or all-to-all that sends as much; "
        "memory: the vendor's data sheet",
        f"collectives on {_devices(name)} devices of a node, and permutes, as all-to-alls of two; "
        "start and rate price exchange, of which nothing was published",
        (512, 512 * _MIB),
        start_us,
        memory_gb_per_s=memory_gb_per_s,
    )


def _devices(name: str) -> str:
    numbers = sorted({curve.devices for curve in curves_of(name)})
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _network(
    name: str,
    gb_per_s: float,
    basis: Basis,
    source: str,
    valid_for: str,
    *,
    latency_us: float = 14.0,
    port: Literal["device", "node"] = "device",
    sizes: tuple[int, int] | None = None,
) -> LinkPreset:
    owner = "each device has" if port == "device" else "all devices of a node share"
    return LinkPreset(
        name,
        "cross-node",
        (2, None),
        gb_per_s,
        latency_us,
        basis,
        "medium",
        source,
        f"axes that join nodes, where {owner} one port; {valid_for}",
        sizes,
        8.4,
        port,
    )


def _torus(name: str, gb_per_s: float, joined: str) -> LinkPreset:
    return LinkPreset(
        name,
        "torus axis",
        (2, None),
        gb_per_s,
        1.0,
        "spec",
        "medium",
        _SCALING,
        f"{joined} {_TORUS}",
    )


_ALL: Final = (
    _nvswitch("a100-nvswitch", 144, 40, 2039, "NCCL 2.27.3"),
    _nvswitch("h100-nvswitch", 249, 23, 3350, "NCCL 2.27.3"),
    _nvswitch("h200-nvswitch", 251, 22, 4800, "NCCL 2.26.2"),
    _nvswitch("b200-nvswitch", 322, 27.5, 8000, "NCCL 2.27.3"),
    _nvswitch("gb200-nvl72", 340, 20, 8000, "NCCL 2.23", "rack", 72),
    _network(
        "ib-hdr-per-gpu",
        24,
        "arithmetic",
        f"96 % of 200 Gb/s as in NCCL's NET_BW; line rate: {_BOOK}; {_NCCL}",
        "a rate of the wire, seen less by programs",
    ),
    _network(
        "ib-ndr-per-gpu",
        48,
        "arithmetic",
        f"96 % of 400 Gb/s as in NCCL's NET_BW; line rate: {_BOOK}; {_NCCL}",
        "collectives over 2 nodes of 8 H100 come within 6 % of this rate, one pair of devices "
        "alone reaches 36 GB/s",
    ),
    _network(
        "ib-ndr-per-node",
        48,
        "arithmetic",
        f"as ib-ndr-per-gpu, {_BOOK}; {_NCCL}",
        "a rate of the wire",
        port="node",
    ),
    _network(
        "efa-v4-per-gpu",
        47,
        "measured",
        f"all-reduce over 4 nodes of 8 B200 as one ring, {_BOOK}; latency fitted to the same",
        "one cluster; the rate is that from 4 GiB on, and at 256 MiB the price is a quarter low",
        latency_us=57.0,
        sizes=(_MIB, 16 * _GIB),
    ),
    _torus("tpu-v4", 90, "axes of a multiple of 4 devices"),
    _torus("tpu-v5e", 90, "axes of 16 devices"),
    _torus("tpu-v5p", 180, "axes of a multiple of 4 devices"),
    _torus("tpu-v6e", 180, "axes of 16 devices"),
    LinkPreset(
        "pcie5-x16",
        "node",
        (2, 8),
        40,
        5.7,
        "measured",
        "low",
        f"a vendor's blog (docs.alayanew.com, 2026-05-06); {_NCCL}",
        "nodes of 8 H100 PCIe, for which 35 to 45 GB/s are reported",
        start_us=8.4,
    ),
    LinkPreset(
        "unit",
        "any",
        (1, None),
        1,
        0.0,
        "arithmetic",
        "exact",
        "by definition",
        "ranking by bytes alone, and tests; no hardware",
    ),
)

PRESETS: Final[Mapping[str, LinkPreset]] = MappingProxyType({p.name: p for p in _ALL})
"""Every preset by its name."""

DEFAULT_PRESET: Final = "h100-nvswitch"
DEFAULT_LINK: Final = replace(link_preset(DEFAULT_PRESET), name=f"assumed {DEFAULT_PRESET}")
"""What is assumed where nothing is said: one node of H100."""
