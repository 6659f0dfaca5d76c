"""Named links of known hardware, each with where its numbers come from and how far they hold.

The numbers are published ones, read on `READ_ON`; none was measured by this project. A preset is a
starting point: links measured on the machines themselves are better.

A link knows one latency and one rate. What a preset knows beyond that, the time to start a call
and the rates of all-reduce and all-to-all where these differ, is kept in its record, and is not
used to price steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from shardspec.comm.cost import Link
from shardspec.errors import MeshError

__all__ = ["PRESETS", "READ_ON", "Basis", "Confidence", "LinkPreset", "link_preset"]

Basis: TypeAlias = Literal["measured", "spec", "scaled", "arithmetic"]
Confidence: TypeAlias = Literal["high", "medium", "low", "exact"]

READ_ON: Final = "2026-11-20"
"""When the sources were read."""

_MIB: Final = 2**20
_GIB: Final = 2**30
_CURVE: Final = (32 * 2**10, 16 * _GIB)

_NCCL: Final = "latency: NCCL 2.30, src/graph/tuning.cc, Simple protocol"
_BOOK: Final = "ML Engineering Open Book, network/benchmarks (2026-08-22)"
_AUTOPARALLEL: Final = "AutoParallel, nccl_cost_model.py (a54c252)"
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
    'ib-ndr-per-gpu: 14 µs, 48 GB/s'
    """

    name: str
    """What it is called."""
    scope: str
    """What the devices have in common: node, rack, cross-node, torus axis, any."""
    devices: tuple[int, int | None]
    """The fewest and the most devices along the axis; None for any number."""
    gb_per_s: float
    """Rate of a ring in one direction, per device, in 10^9 bytes a second."""
    latency_us: float
    """Latency of one step of a ring, in microseconds."""
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
    base_us: float = 0.0
    """Time to start a call, in microseconds; not used in pricing."""
    all_reduce_gb_per_s: float | None = None
    """Rate of all-reduce where switches add up; not used in pricing."""
    all_to_all_gb_per_s: float | None = None
    """Rate of all-to-all where it differs; not used in pricing. Measured on H100, from 32 MB; taken
    over from it or scaled for the others, and little known there."""
    read_on: str = READ_ON
    """When the source was read, as year-month-day."""

    def link(self, devices: int | None = None) -> Link:
        """Return the link, its name saying so where an axis of `devices` is beyond the preset.

        Examples
        --------
        >>> str(PRESETS["h100-nvswitch"].link(16))
        'h100-nvswitch beyond its 8 devices: 3.4 µs, 362 GB/s'
        """
        most = self.devices[1]
        beyond = most is not None and devices is not None and devices > most
        name = f"{self.name} beyond its {most} devices" if beyond else self.name
        return Link(self.latency_us / 1e6, 1 / (self.gb_per_s * 1e9), name)

    def as_dict(self) -> dict[str, object]:
        """Return the record as plain values, ready for JSON; sizes and numbers of devices as lists.

        Examples
        --------
        >>> PRESETS["unit"].as_dict()["devices"]
        [1, None]
        """
        values = {field: getattr(self, field) for field in self.__slots__}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


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
    'b200-nvswitch: 3.4 µs, 682 GB/s'
    """
    if name not in PRESETS:
        raise MeshError(f"no link preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name].link(devices)


def _nvswitch(
    name: str,
    gb_per_s: float,
    source: str,
    valid_for: str,
    *,
    all_reduce: float | None,
    all_to_all: float,
    sizes: tuple[int, int],
) -> LinkPreset:
    return LinkPreset(
        name,
        "node",
        (2, 8),
        gb_per_s,
        3.4,
        "measured",
        "high",
        f"{source}; {_NCCL}",
        valid_for,
        sizes,
        base_us=8.4,
        all_reduce_gb_per_s=all_reduce,
        all_to_all_gb_per_s=all_to_all,
    )


def _network(
    name: str,
    gb_per_s: float,
    basis: Basis,
    source: str,
    valid_for: str,
    sizes: tuple[int, int] | None = None,
) -> LinkPreset:
    return LinkPreset(
        name,
        "cross-node",
        (2, None),
        gb_per_s,
        14.0,
        basis,
        "medium",
        f"{source}; {_NCCL}",
        f"one device per node on this axis, each with a port of its own; {valid_for}",
        sizes,
        base_us=8.4,
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
    _nvswitch(
        "a100-nvswitch",
        235,
        f"ring at 16 GiB, {_BOOK}",
        "groups of 8",
        all_reduce=None,
        all_to_all=165,
        sizes=_CURVE,
    ),
    _nvswitch(
        "h100-nvswitch",
        362,
        f"all-gather at 16 GiB on H200, which has the same links, {_BOOK}; 345 at 1 GiB on H100, "
        f"{_AUTOPARALLEL}",
        "groups of 8; all-gather of 2 and 4 devices reaches 268 and 325 GB/s; all-reduce of more "
        "than 4 is faster, in the switch",
        all_reduce=475,
        all_to_all=380,
        sizes=(_GIB, _GIB),
    ),
    _nvswitch(
        "h200-nvswitch",
        362,
        f"all-gather at 16 GiB, {_BOOK}",
        "groups of 8; all-reduce of more than 4 is faster, in the switch",
        all_reduce=475,
        all_to_all=380,
        sizes=_CURVE,
    ),
    _nvswitch(
        "b200-nvswitch",
        682,
        f"ring at 8 GiB, {_BOOK}",
        "groups of 8; all-reduce of more than 5 is faster, in the switch",
        all_reduce=838,
        all_to_all=675,
        sizes=_CURVE,
    ),
    LinkPreset(
        "gb200-nvl72",
        "rack",
        (2, 72),
        680,
        3.4,
        "measured",
        "low",
        f"a vendor's slide (GTC25 S72583), {_BOOK}; {_NCCL}",
        "one rack; seen by one vendor, all-reduce of 8 also by one other; all-to-all is scaled",
        base_us=8.4,
        all_reduce_gb_per_s=850,
        all_to_all_gb_per_s=675,
    ),
    _network(
        "ib-hdr-per-gpu",
        24,
        "arithmetic",
        f"96 % of 200 Gb/s as in NCCL's NET_BW; line rate: {_BOOK}",
        "a rate of the wire, seen less by programs",
    ),
    _network(
        "ib-ndr-per-gpu",
        48,
        "arithmetic",
        f"96 % of 400 Gb/s as in NCCL's NET_BW; line rate: {_BOOK}",
        "a rate of the wire; an equally fast port gave 37 GB/s in all-reduce over 4 nodes",
    ),
    _network(
        "efa-v4-per-gpu",
        37,
        "measured",
        f"all-reduce at 16 GiB over 4 nodes of 8 B200, {_BOOK}",
        "one cluster; 35 GB/s at 1 GiB, 22 at 256 MiB, 6.2 at 16 MiB",
        (16 * _MIB, 16 * _GIB),
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
        base_us=8.4,
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
        base_us=1.0,
    ),
)

PRESETS: Final[Mapping[str, LinkPreset]] = MappingProxyType({p.name: p for p in _ALL})
"""Every preset by its name."""
