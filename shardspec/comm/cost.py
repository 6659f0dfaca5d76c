"""What a step costs: seconds from a latency-bandwidth model, and the bytes it moves.

With ``b`` the bytes a device holds before the step, ``n`` the devices along the step's axes, alpha
and beta the largest latency and cost a byte among those axes:

============== =====================================================================
step           seconds on rings, one per group
============== =====================================================================
all-gather     (n-1) alpha + b (n-1) beta
reduce-scatter (n-1) alpha + b (n-1)/n beta
all-reduce     2 (n-1) alpha + 2 b (n-1)/n beta
all-to-all     sum over the n-1 peers of (alpha_link + b/n beta_link)
permute        max over devices of (alpha_link + b beta_link)
exchange       max over devices of the larger of what it sends and what it receives, each
               a sum over peers of (alpha_link + bytes beta_link)
slice          0
============== =====================================================================

A link between two devices has the largest alpha and beta among the axes on which they differ. The
formulas are those of the nccl-tests manual (doc/PERFORMANCE.md) and of Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005. Arithmetic and local
copies are not counted. Such a model ranks plans; fitted to published curves it is typically 7 to
11 % off and 21 to 37 % at worst.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from math import ceil, prod
from typing import Final

from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceScatter,
    Slice,
    Step,
)
from shardspec.mesh import DeviceMesh, LinkModel

__all__ = [
    "DEFAULT_LINK",
    "FITTED_ERROR",
    "GIVEN_ERROR",
    "CostModel",
    "Link",
    "bytes_received",
]


@dataclass(frozen=True, slots=True)
class Link:
    """How fast data travels along one mesh axis.

    Examples
    --------
    >>> str(Link(latency_s=1e-5, seconds_per_byte=2e-11))
    'given: 10 µs, 50 GB/s'
    """

    latency_s: float
    """Start-up latency: seconds a message."""
    seconds_per_byte: float
    """Transfer cost: the inverse of the bandwidth in one direction."""
    name: str = "given"
    """Where the numbers come from."""

    def __str__(self) -> str:
        rate = f"{1e-9 / self.seconds_per_byte:.4g} GB/s" if self.seconds_per_byte else "free"
        return f"{self.name}: {self.latency_s * 1e6:.4g} µs, {rate}"


DEFAULT_LINK: Final = Link(3.4e-6, 1 / 362e9, "assumed h100-nvswitch")
"""One H100 node: NCCL's NVLink ring step and a measured all-gather rate (NCCL 2.30 tuning.cc; ML
Engineering Open Book, network benchmarks)."""


FITTED_ERROR: Final = (
    "typically 7 to 11 % off, 21 to 37 % at worst where links are fitted to all-reduce"
)
"""How far a latency and a rate, fitted to four published all-reduce curves, are from them.

Known links are not fitted: their rates are those of large messages on a ring. So they can be
further off, as for small messages over a network and for reductions in a switch."""

GIVEN_ERROR: Final = "not known, since the links were given; 'shardspec profile' measures them"


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices steps on one mesh shape.

    Parameters
    ----------
    mesh_shape
        Devices along each axis.
    links
        One link per axis.
    link_model
        ``"ring"``: every group has links of its own. ``"shared-bus"``: all devices share one bus,
        and a step costs the bytes that all of them receive together.

    Examples
    --------
    >>> model = CostModel((2, 4), (Link(1e-5, 2e-11), Link(1e-6, 1e-12)))
    >>> round(model.step_seconds(AllGather(0, (1,)), 1_000_000) * 1e6, 3)
    6.0
    """

    mesh_shape: tuple[int, ...]
    links: tuple[Link, ...]
    link_model: LinkModel = "ring"
    known_error: str = field(default=GIVEN_ERROR, compare=False)
    """How far such prices are from measured times, as text."""

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> "CostModel":
        """Return the model of a mesh's own links, or of `DEFAULT_LINK` where it has none.

        Examples
        --------
        >>> str(CostModel.of_mesh(DeviceMesh(range(2), (2,))).links[0])
        'assumed h100-nvswitch: 3.4 µs, 362 GB/s'
        """
        if mesh.mesh_alpha is None or mesh.mesh_beta is None:
            assumed = (DEFAULT_LINK,) * mesh.ndim
            return cls(mesh.shape, assumed, mesh.link_model, FITTED_ERROR)
        links = tuple(map(Link, mesh.mesh_alpha, mesh.mesh_beta))
        return cls(mesh.shape, links, mesh.link_model)

    def step_seconds(self, step: Step, num_bytes: int) -> float:
        """Return the seconds of a collective or a slice.

        Parameters
        ----------
        step
            What moves; permute and exchange depend on both layouts, see
            `shardspec.layout.routed_cost`.
        num_bytes
            Bytes of the largest shard before the step.
        """
        fixed, per_byte = self.coefficients(step)
        return fixed + num_bytes * per_byte

    def coefficients(self, step: Step) -> tuple[float, float]:
        """Return the seconds a step takes whatever its size, and those it takes per byte held.

        Examples
        --------
        >>> model = CostModel((2, 4), (Link(1e-5, 2e-11), Link(1e-6, 1e-12)))
        >>> model.coefficients(AllGather(0, (1,))) == (3 * 1e-6, 3 * 1e-12)
        True
        """
        assert not isinstance(step, Permute | Exchange), "priced by the layouts on both sides"
        n = prod(self.mesh_shape[axis] for axis in step.axes)
        if isinstance(step, Slice):
            return 0.0, 0.0
        if self.link_model == "shared-bus":
            alpha, beta = self.slowest(step.axes)
            messages = 2 * (n - 1) if isinstance(step, AllReduce) else n - 1
            return messages * alpha, float(prod(self.mesh_shape) * _received_share(step, n)) * beta
        if isinstance(step, AllToAll):
            return self._all_to_all_coefficients(sorted(step.axes), n)
        alpha, beta = self.slowest(step.axes)
        match step:
            case AllGather():
                return (n - 1) * alpha, (n - 1) * beta
            case ReduceScatter():
                return (n - 1) * alpha, (n - 1) / n * beta
            case AllReduce():
                return 2 * (n - 1) * alpha, 2 * (n - 1) / n * beta

    def links_text(self, labels: Sequence[str]) -> str:
        """Say what the links are, axes with the same link together.

        Parameters
        ----------
        labels
            The name of every axis.

        Examples
        --------
        >>> model = CostModel((2, 4), (Link(1e-5, 2e-11), Link(1e-5, 2e-11)))
        >>> model.links_text(["dp", "tp"])
        'axes dp,tp given: 10 µs, 50 GB/s'
        """
        axes_of: dict[Link, list[str]] = {}
        for label, link in zip(labels, self.links, strict=True):
            axes_of.setdefault(link, []).append(label)
        return "; ".join(
            f"{'axis' if len(axes) == 1 else 'axes'} {','.join(axes)} {link}"
            for link, axes in axes_of.items()
        )

    def _all_to_all_coefficients(self, axes: Sequence[int], n: int) -> tuple[float, float]:
        """Add up the links to all peers: those that differ on the same axes cost the same."""
        fixed = per_byte = 0.0
        for count in range(1, len(axes) + 1):
            for differing in combinations(axes, count):
                alpha, beta = self.slowest(differing)
                peers = prod(self.mesh_shape[axis] - 1 for axis in differing)
                fixed += peers * alpha
                per_byte += peers / n * beta
        return fixed, per_byte

    def slowest(self, axes: Sequence[int]) -> tuple[float, float]:
        """Return the largest latency and the largest cost a byte among some axes."""
        return (
            max(self.links[axis].latency_s for axis in axes),
            max(self.links[axis].seconds_per_byte for axis in axes),
        )


def bytes_received(step: Step, mesh_shape: Sequence[int], num_bytes: int) -> int:
    """Return the bytes that a device receives in a step, by a bandwidth-optimal algorithm.

    Parameters
    ----------
    step
        What moves.
    mesh_shape
        Devices along each axis.
    num_bytes
        Bytes of the largest shard before the step.

    Examples
    --------
    >>> bytes_received(AllGather(0, (1,)), (2, 4), 100)
    300
    >>> bytes_received(AllReduce((1,), "sum"), (2, 4), 100)
    150
    """
    n = prod(mesh_shape[axis] for axis in step.axes)
    return ceil(num_bytes * _received_share(step, n))


def _received_share(step: Step, n: int) -> Fraction:
    """Return the bytes a device receives per byte it holds before a collective or slice."""
    match step:
        case Slice():
            return Fraction(0)
        case AllGather():
            return Fraction(n - 1)
        case AllToAll() | ReduceScatter():
            return Fraction(n - 1, n)
        case AllReduce():
            return Fraction(2 * (n - 1), n)
        case Permute() | Exchange():
            raise AssertionError("counted from the layouts on both sides")
