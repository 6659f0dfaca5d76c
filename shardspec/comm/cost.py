"""Estimates the seconds of steps from measured collectives, or from formulas for rings.

>>> from shardspec.comm.steps import AllGather
>>> model = CostModel((2, 4), (Link(1e-5, 2e-11), Link(1e-6, 1e-12)))
>>> [f"{model.step_seconds(AllGather(0, (axis,)), 10**6) * 1e6:.1f} µs" for axis in (0, 1)]
['30.0 µs', '6.0 µs']

docs/plans.md has the formulas with sources. `shardspec.layout.routed` prices exchanges and
permutes. Two devices are as far apart as the slowest of the axes on which they differ. Prices
include the start of a step and the local copies that pack and unpack.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, combinations, product
from math import prod
from operator import gt
from pathlib import Path
from typing import TypeAlias

from shardspec.comm import curves, presets
from shardspec.comm.cluster import (
    Cluster,
    check_links,
    cluster_of_axes,
    joined_clusters,
    slowest_link,
)
from shardspec.comm.cluster_file import read_earlier_profile
from shardspec.comm.curves import (
    EXCHANGE_KIND,
    KINDS,
    PERMUTE_KIND,
    Curve,
    Line,
    Link,
    bytes_ratio,
    share,
)
from shardspec.comm.steps import Exchange, Permute, Step
from shardspec.errors import MeshError
from shardspec.mesh.device_ids import SECONDS_RULE, seconds, whole_numbers
from shardspec.mesh.device_mesh import DeviceMesh, LinkModel
from shardspec.text import shown

Links: TypeAlias = str | Sequence[str] | Cluster
"""The name of a preset, one name per axis, or a cluster."""
Tier: TypeAlias = tuple[tuple[Link, int], ...]
"""Links inside nodes, or between them, each with the number of devices along it in a group."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices of steps on one mesh shape.

    Parameters
    ----------
    mesh_shape, links
        Number of devices along each axis, and the link of each axis.
    link_model
        ``"ring"``: every group has dedicated links. ``"shared-bus"``: all devices share one bus,
        and a step costs the bytes that all of them receive together.
    copy_s
        Seconds in which a device copies one byte locally; 0 ignores local copies.
    cluster
        The links by device id, for prices of conversions between meshes; None if unknown.

    Raises
    ------
    MeshError
        If there is not one link per axis, or a number is out of range.

    Examples
    --------
    >>> from shardspec.comm.steps import AllGather
    >>> model = CostModel((2, 4), (Link(1e-5, 2e-11), Link(1e-6, 1e-12)))
    >>> round(model.step_seconds(AllGather(0, (1,)), 1_000_000) * 1e6, 3)
    6.0
    """

    mesh_shape: tuple[int, ...]
    links: tuple[Link, ...]
    link_model: LinkModel = "ring"
    copy_s: float = 0.0
    cluster: Cluster | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        shape = whole_numbers(self.mesh_shape)
        if shape is None or min(shape, default=1) < 1:
            raise MeshError(
                f"mesh_shape {shown(self.mesh_shape)}: give whole numbers from 1 on, as in (2, 4)"
            )
        object.__setattr__(self, "mesh_shape", shape)
        if len(self.links) != len(self.mesh_shape):
            raise MeshError(
                f"{len(self.links)} links for the {len(self.mesh_shape)} axes of a mesh of shape "
                f"{self.mesh_shape}; give one per axis"
            )
        for n, link in zip(self.mesh_shape, self.links, strict=True):
            if n % link.per_node:
                raise MeshError(
                    f"link {shown(link.name)} has per_node={link.per_node}, which does not divide "
                    f"the {n} devices of its axis; give a divisor as per_node"
                )
        copy_s = seconds(self.copy_s)
        if copy_s is None:
            raise MeshError(
                f"copy_s is {shown(self.copy_s)} s a byte; give a finite number from 0 on "
                f"({SECONDS_RULE})"
            )
        object.__setattr__(self, "copy_s", copy_s)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, links: Links | None = None) -> "CostModel":
        """Return the model of `links`; by default of the mesh's links, or of hosts of eight H100.

        Raises `MeshError` if links do not fit the mesh, for example if hosts cut an axis unevenly.

        >>> cluster = Cluster(Link(3e-6, 3e-12, "NVLink"), Link(1e-5, 2e-11, "network"), 8)
        >>> CostModel.of_mesh(DeviceMesh(range(16), (4, 4)), cluster).group([0])
        (2, 2)
        """
        return models_on([mesh], links)[mesh]

    @classmethod
    def from_presets(
        cls, mesh: DeviceMesh, names: Sequence[str], *, copies: bool | None = None
    ) -> "CostModel":
        """Return the model of presets, or of files of links: one per axis, or one for all.

        If a preset joins at most 8 devices and the mesh has 16, these fill two nodes in the order
        of their ids, joined by `LinkPreset.between`.

        `copies` adds the time of local copies; by default it is added if a preset has the memory
        rate of its devices. Raises `MeshError` for an unknown preset, rate, node size, or link
        between nodes, and `ProfileError` for a bad file.

        >>> mesh = DeviceMesh(range(16), (2, 8))
        >>> model = CostModel.from_presets(mesh, ["ib-ndr-per-gpu", "h100-nvswitch"])
        >>> [link.name for link in model.links]
        ['ib-ndr-per-gpu', 'h100-nvswitch']
        >>> by_nodes = CostModel.from_presets(DeviceMesh(range(16), (4, 4)), ["h100-nvswitch"])
        >>> by_nodes.group([0]), by_nodes.group([1]), by_nodes.group([0, 1])
        ((2, 2), (1, 4), (2, 8))
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        if len(names) not in (1, mesh.ndim):
            raise MeshError(
                f"{len(names)} presets for the {mesh.ndim} axes of mesh {mesh}; give one per axis, "
                "or one for all"
            )
        names *= mesh.ndim // len(names)
        links, cluster = presets.links_of(mesh, names)
        copy_s = 0.0 if copies is False else presets.memory_copy_s(names, required=bool(copies))
        cluster = replace(cluster, copy_s=copy_s)
        return cls(mesh.shape, links, mesh.link_model, copy_s=copy_s, cluster=cluster)

    @classmethod
    def from_profile(cls, path: str | Path) -> "CostModel":
        """Return the model of a profile in JSON, which earlier versions wrote, on its mesh.

        ``shardspec profile`` writes files of links now, for `links=` and any mesh. Raises
        `ProfileError` if the file is missing or damaged.
        """
        return cls(*read_earlier_profile(Path(path)))

    def step_seconds(self, step: Step, num_bytes: int) -> float:
        """Return the seconds of a collective, given the bytes of the largest shard before it."""
        return min(fixed + num_bytes * per_byte for fixed, per_byte in self.lines(step))

    def lines(self, step: Step) -> tuple[Line, ...]:
        """Return (seconds, seconds per byte of the largest shard) lines; the lowest applies."""
        assert not isinstance(step, Permute | Exchange), "priced by the layouts on both sides"
        kind, axes = curves.kind_of(step), self._long(step.axes)
        if kind is None or not axes:
            return ((0.0, 0.0),)
        copying = self.copy_s * curves.copies(step, self._count(axes))
        return tuple((fixed, slope + copying) for fixed, slope in self._lines(kind, axes))

    def group(self, axes: Iterable[int]) -> tuple[int, int]:
        """Return (nodes, devices per node) of a group of devices along some axes."""
        inside, across = self._tiers(self._long(axes))
        return prod(n for _, n in across), prod(n for _, n in inside)

    @property
    def known_error(self) -> str:
        """A sentence about the errors of the measured prices."""
        links = {link for link in self.links if link.error}
        links |= {link.within for link in self.links if link.within and link.within.error}
        if not links:
            return "not measured; 'shardspec profile' measures links"
        return f"{accuracy_text(links)}; other groups not measured"

    def links_text(self, labels: Sequence[str]) -> str:
        """Describe the link of each axis, axes with the same link together.

        >>> CostModel((2, 4), (Link(1e-5, 2e-11), Link(1e-5, 2e-11))).links_text(["dp", "tp"])
        'axes dp,tp given: 10 µs, 50 GB/s'
        """
        axes_of: dict[Link, list[str]] = {}
        for label, link in zip(labels, self.links, strict=True):
            axes_of.setdefault(link, []).append(label)
        texts = []
        for link, axes in axes_of.items():
            word = "axis" if len(axes) == 1 else "axes"
            text = f"{word} {','.join(axes)} {link}"
            if link.name.startswith(presets.ASSUMED):
                named = " and ".join(filter(None, (", ".join(axes[:-1]), axes[-1])))
                named = f"{word} {named}" if axes[0].isdigit() else named
                preset = link.name.removeprefix(presets.ASSUMED)
                name = f"no links given: assuming {preset} for {named}"
                text = str(replace(link, name=name))
            texts.append(text)
        nodes, per_node = self.group(range(len(self.links)))
        if nodes > 1 and len({*self.links}) > 1:
            texts.append(f"{nodes} hosts of {per_node} devices")
        if self.copy_s:
            texts.append(f"local copies at {1e-9 / self.copy_s:.4g} GB/s")
        return "; ".join(texts)

    def _long(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return the axes in `axes` that have more than one device, ascending."""
        return tuple(axis for axis in sorted(axes) if self.mesh_shape[axis] > 1)

    def _count(self, axes: Iterable[int]) -> int:
        return prod(self.mesh_shape[axis] for axis in axes)

    def _tiers(self, axes: Iterable[int]) -> tuple[Tier, Tier]:
        """Return (link, group size) pairs along axes: those inside nodes, then those between."""
        inside: list[tuple[Link, int]] = []
        across: list[tuple[Link, int]] = []
        for axis in axes:
            link, n = self.links[axis], self.mesh_shape[axis]
            (across if link.port else inside).append((link, n // link.per_node))
            if link.within is not None:
                inside.append((link.within, link.per_node))
        return tuple(inside), tuple(across)

    def _curve(self, kind: str, axes: Sequence[int]) -> Curve | None:
        """Return the measured curve of a collective along `axes`; None without a measurement."""
        inside, across = self._tiers(axes)
        if not across:
            return self._curve_inside(kind, inside, self._count(axes))
        # Over several hosts, only curves measured on the same numbers of hosts and devices.
        group = kind, self._count(axes), self.group(axes)[0]
        known = (curve for link, _ in across for curve in link.curves)
        return next((c for c in known if (c.kind, c.devices, c.nodes) == group), None)

    def _curve_inside(self, kind: str, tier: Tier, devices: int) -> Curve | None:
        of_links = {link.curves for link, _ in tier}
        if len(of_links) != 1 or self.link_model == "shared-bus":
            return None
        return curves.curve_between(of_links.pop(), kind, devices)

    def _lines(self, kind: str, axes: Sequence[int]) -> tuple[Line, ...]:
        curve = self._curve(kind, axes)
        if curve is not None:
            return curve.lines_by_shard()
        inside, across = self._tiers(axes)
        if not (inside and across) or self.link_model == "shared-bus":
            return (self._ring(kind, inside + across),)
        nodes, per_node = self.group(axes)
        known = (curve for link, _ in inside for curve in link.curves)
        numbers = {curve.devices for curve in known if curve.kind in KINDS}
        below = max((n for n in numbers if n <= per_node), default=per_node)
        above = min((n for n in numbers if n > per_node), default=below)
        if below == per_node or above == below:
            lines = self._over_nodes(kind, inside, across, nodes, per_node)
        else:
            # Unmeasured numbers of devices are interpolated over several nodes too.
            near, far = (self._over_nodes(kind, inside, across, nodes, n) for n in (below, above))
            lines = curves.lines_between(near, far, (per_node - below) / (above - below))
        # Several nodes are never faster than one node with all their devices, or a full one.
        room = min(link.room or 1 for link, _ in inside)
        alone = self._curve_inside(kind, inside, min(nodes * per_node, room))
        if alone is None:
            return lines
        pairs = product(lines, alone.lines_by_shard())
        return tuple((max(a, c), max(b, d)) for (a, b), (c, d) in pairs)

    def _over_nodes(
        self, kind: str, inside: Tier, across: Tier, nodes: int, per_node: int
    ) -> tuple[Line, ...]:
        """Price a collective over several nodes, as (seconds, seconds per byte) lines."""
        n, curve = nodes * per_node, self._curve_inside(kind, inside, per_node)
        latency, beta = (
            self._ring(kind, across)[0],
            max(_per_byte(self, link) for link, _ in across),
        )
        if curve is None and kind == "all-to-all":
            return (self._ring(kind, inside + across),)
        if curve is None:
            # The ring's other messages stay inside nodes.
            more = (n - nodes - (per_node - 1)) * max(link.latency_s for link, _ in inside)
            latency += more * (2 if kind == "all-reduce" else 1)
        lines = (self._ring(kind, inside),) if curve is None else curve.lines_by_shard()
        if kind == "all-to-all":
            # The shares of the bytes that stay in the node, and that leave by the device's port.
            grown, far = per_node / n, (n - per_node) / n * beta
        else:
            # One ring through all devices; the devices of a node forward it together.
            received = share(kind, n) * bytes_ratio(kind, n)
            grown = float(received / share(kind, per_node) / bytes_ratio(kind, per_node))
            far = float(received) * beta / per_node
        return tuple((fixed + latency, max(slope * grown, far)) for fixed, slope in lines)

    def _ring(self, kind: str, tier: Tier) -> Line:
        n = prod(n for _, n in tier)
        start = max(link.start_s for link, _ in tier)
        if kind == "all-to-all" and self.link_model == "ring":
            # Peers that differ on the same axes have the same price.
            fixed = per_byte = 0.0
            for differing in chain(*(combinations(tier, k + 1) for k in range(len(tier)))):
                peers = prod(n - 1 for _, n in differing)
                fixed += peers * max(link.latency_s for link, _ in differing)
                per_byte += peers / n * max(_per_byte(self, link) for link, _ in differing)
            return start + fixed, per_byte
        messages = (2 if kind == "all-reduce" else 1) * (n - 1)
        received = share(kind, n) * bytes_ratio(kind, n)
        if self.link_model == "shared-bus":
            received *= prod(self.mesh_shape)
        alpha = max(link.latency_s for link, _ in tier)
        beta = max(_per_byte(self, link) for link, _ in tier)
        return start + messages * alpha, float(received) * beta


def measured_link(model: CostModel, step: Step, num_bytes: int) -> Link | None:
    """Return the link with the measurements that price a step; None if there are none.

    >>> from shardspec.comm.steps import AllGather
    >>> model = CostModel.from_presets(DeviceMesh(range(72)), ["gb200-nvl72"])
    >>> measured_link(model, AllGather(0, (0,)), 1 << 20) is None  # curves: 2 and 4 devices
    True
    """
    kind, axes = curves.kind_of(step), model._long(step.axes or range(len(model.links)))
    inside, across = model._tiers(axes)
    links = [link for link, _ in across or inside]
    if kind is None:
        routed_kind = PERMUTE_KIND if isinstance(step, Permute) else EXCHANGE_KIND
        nodes, count = prod(n for _, n in across), model._count(axes)
        known = links and all(
            any(
                curve.kind == routed_kind
                and curve.nodes == nodes
                and (curve.devices == count or (nodes == 1 and curve.devices > count))
                for curve in link.curves
            )
            for link in links
        )
        return links[0] if known else None
    curve = model._curve(kind, axes)
    if curve is None:
        return None
    least, most = curve.sizes
    return links[0] if least <= num_bytes * bytes_ratio(kind, curve.devices) <= most else None


def slowest_costs(model: CostModel, axes: Iterable[int]) -> tuple[float, float]:
    """Return the largest latency and the largest seconds per byte among some axes.

    >>> model = CostModel((2, 4), (Link(1e-5, 1e-12), Link(1e-6, 2e-11)))
    >>> slowest_costs(model, [0, 1]), pair_line(model, 1), exchange_start(model)
    ((1e-05, 2e-11), (1e-06, 2e-11), 0.0)
    """
    each = [(model.links[axis].latency_s, _per_byte(model, model.links[axis])) for axis in axes]
    return max(alpha for alpha, _ in each), max(beta for _, beta in each)


def _per_byte(model: CostModel, link: Link) -> float:
    """Return a link's seconds per byte for one device: 8 times as many if 8 share the port."""
    each = zip(model.mesh_shape, model.links, strict=True)
    inside = prod(other.per_node if other.port else n for n, other in each)
    return link.seconds_per_byte * (inside if link.port == "node" else 1)


def pair_line(model: CostModel, axis: int) -> Line:
    """Price a device that sends to one neighbor along an axis and receives from another."""
    link = model.links[axis]
    known = link.curves if model.link_model == "ring" else ()
    for curve in sorted(known, key=lambda curve: curve.kind != PERMUTE_KIND):
        if curve.kind == PERMUTE_KIND or (curve.kind, curve.devices) == ("all-to-all", 2):
            # In a measured all-to-all of two devices, each sends half of its buffer.
            fixed, slope = min(curve.lines, key=lambda line: line[1])
            return fixed, slope * (1 if curve.kind == PERMUTE_KIND else 2)
    return link.start_s + link.latency_s, _per_byte(model, link)


def exchange_start(model: CostModel) -> float:
    """Return the seconds to start an exchange."""
    each = zip(model.mesh_shape, model.links, strict=True)
    return max((link.start_s for n, link in each if n > 1), default=0.0)


def slower_axes(model: CostModel, cut: Iterable[int]) -> tuple[int, ...]:
    """Return the axes with a slower link than some axis in `cut` has.

    In an exchange, replicas along these axes do not share the sending, because their links are
    slower than the others.

    >>> model = CostModel((2, 4), (Link(1e-5, 2e-11), Link(1e-6, 1e-12)))
    >>> slower_axes(model, [1]), slower_axes(model, [0])
    ((0,), ())
    """
    links = [slowest_costs(model, [axis]) for axis in range(len(model.links))]
    wide = [axis for axis, n in enumerate(model.mesh_shape) if n > 1]
    least = [min(of_axes) for of_axes in zip(*(links[a] for a in {*cut} & {*wide}), strict=True)]
    return tuple(axis for axis in wide if least and any(map(gt, links[axis], least)))


def model_on_axes(model: CostModel, axes: Sequence[int]) -> CostModel:
    """Return the model for some axes of the mesh; the other axes must have one device.

    >>> model_on_axes(CostModel((2, 1), (Link(1e-5, 0), Link(0, 0))), [0]).mesh_shape
    (2,)
    """
    shape, links = model.mesh_shape, model.links
    return replace(
        model,
        mesh_shape=tuple(shape[axis] for axis in axes),
        links=tuple(links[axis] for axis in axes),
    )


def accuracy_text(links: Iterable[Link]) -> str:
    """Return the errors of the curves of some links as text.

    >>> accuracy_text([Link(1e-5, 1e-11, "ib", error=(0.07, 0.2))])
    'ib is 7 % off at the median, 20 % at the 90th percentile'
    """
    return "; ".join(
        sorted(
            f"{link.name.removeprefix(presets.ASSUMED)} is {link.error[0] * 100:.0f} % off at the "
            f"median, {link.error[1] * 100:.0f} % at the 90th percentile"
            for link in set(links)
            if link.error
        )
    )


def models_on(
    meshes: Sequence[DeviceMesh], links: Links | None = None
) -> dict[DeviceMesh, CostModel]:
    """Return the cost model of each mesh; all of them share one cluster.

    With `links`, all meshes use these; otherwise each mesh uses its own, or those of another mesh
    if it has none. Raises `MeshError` if links do not fit a mesh, or contradict each other.

    >>> meshes = DeviceMesh(range(8)), DeviceMesh(range(8, 16))
    >>> first, second = models_on(meshes, "h100-nvswitch").values()
    >>> first.cluster == second.cluster
    True
    """
    return dict(_models_of(tuple(dict.fromkeys(meshes)), _hashable(links)))


def cluster_of(meshes: Sequence[DeviceMesh], links: Links | None = None) -> Cluster:
    """Return the cluster of some meshes: their links, and the devices of each host.

    >>> cluster = cluster_of([DeviceMesh(range(8)), DeviceMesh(range(8, 16))])
    >>> cluster.crosses(0, 7), cluster.crosses(7, 8), cluster.per_node
    (False, True, 8)
    """
    declared = {links if links is not None else mesh.links for mesh in meshes}
    only = next(iter(declared), None) if len(declared) == 1 else None
    if isinstance(only, Cluster):  # hosts may cut the axes of a mesh unevenly
        return only
    cluster = next(iter(models_on(meshes, links).values())).cluster
    assert cluster is not None, "every model of a mesh has one"
    return cluster


def _hashable(links: Links | None) -> str | tuple[str, ...] | Cluster | None:
    return links if links is None or isinstance(links, str | Cluster) else tuple(links)


@lru_cache(maxsize=256)
def _models_of(
    meshes: tuple[DeviceMesh, ...], links: str | tuple[str, ...] | Cluster | None
) -> tuple[tuple[DeviceMesh, CostModel], ...]:
    models: dict[DeviceMesh, CostModel] = {}
    declared = {mesh: links if links is not None else mesh.links for mesh in meshes}
    uniform = next((each for each in declared.values() if isinstance(each, str | Cluster)), None)
    axes = [mesh for mesh in meshes if declared[mesh] is None and mesh.mesh_alpha is not None]
    own = [tuple(map(Link, mesh.mesh_alpha or (), mesh.mesh_beta or ())) for mesh in axes]
    rings = [(m, each) for m, each in zip(axes, own, strict=True) if m.link_model == "ring"]
    shared = cluster_of_axes(*zip(*rings, strict=True)) if rings else None
    for mesh, of_mesh in zip(axes, own, strict=True):
        cluster = shared if mesh.link_model == "ring" else Cluster(slowest_link(of_mesh, "bus"))
        models[mesh] = CostModel(mesh.shape, of_mesh, mesh.link_model, cluster=cluster)
    for mesh in meshes:
        each = declared[mesh]
        if isinstance(each, tuple) and len(each) in (1, mesh.ndim):
            models[mesh] = CostModel.from_presets(mesh, each)
        elif isinstance(each, tuple):
            raise MeshError(
                f"{len(each)} links for the {mesh.ndim} axes of mesh {mesh}; give one per axis"
            )
        elif mesh not in models:
            models[mesh] = _on_cluster(mesh, each if each is not None else uniform)
    clusters = {mesh: model.cluster for mesh, model in models.items() if model.cluster}
    # A cluster has two links, so it has the exact link of each pair unless three were declared.
    exact = {mesh for mesh, each in zip(axes, own, strict=True) if len(set(each)) == 1}
    for mesh, each in declared.items():
        if isinstance(each, str | Cluster) or (isinstance(each, tuple) and len(set(each)) < 3):
            exact.add(mesh)
    check_links([(clusters[mesh], mesh.ids) for mesh in meshes if mesh in exact])
    cluster = joined_clusters([(each, mesh.ids) for mesh, each in clusters.items()])
    return tuple((mesh, replace(models[mesh], cluster=cluster)) for mesh in meshes)


def _on_cluster(mesh: DeviceMesh, links: object) -> CostModel:
    """Return the model of a mesh on a cluster or a preset, by default on the assumed cluster.

    If an axis spans hosts of the assumed cluster unevenly, all axes get the link between hosts.
    """
    if isinstance(links, Cluster):
        return _of_cluster(mesh, links)
    if isinstance(links, str):
        return CostModel.from_presets(mesh, [links])
    if links is not None:
        raise MeshError(f"links are {shown(links)}; give a preset, one per axis, or a Cluster")
    cluster = presets.assumed_cluster()
    if mesh.link_model == "shared-bus":  # the memory of such a machine is unknown
        cluster = Cluster(cluster.inside)
    elif cluster.axis_links(mesh) is None:
        assert cluster.between is not None
        between = (cluster.between,) * mesh.ndim
        return CostModel(mesh.shape, between, copy_s=cluster.copy_s, cluster=cluster)
    return _of_cluster(mesh, cluster)


def _of_cluster(mesh: DeviceMesh, cluster: Cluster) -> CostModel:
    """Return the model of a mesh whose devices are on the hosts of a cluster."""
    bus = mesh.link_model == "shared-bus"
    links = (cluster.inside,) * mesh.ndim if bus else cluster.axis_links(mesh)
    if links is None:
        raise MeshError(
            f"hosts of {cluster.per_node} consecutive ids split an axis of mesh {mesh} unevenly "
            f"(ids {min(mesh.ids)} to {max(mesh.ids)}); choose another per_node, or other ids"
        )
    return CostModel(mesh.shape, links, mesh.link_model, copy_s=cluster.copy_s, cluster=cluster)
