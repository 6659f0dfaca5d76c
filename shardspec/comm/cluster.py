"""Describes clusters: the speed of links inside and between hosts, and the ids on each host.

>>> cluster = Cluster(Link(3e-6, 1 / 362e9), Link(1e-5, 1 / 48e9), per_node=8)
>>> round(busiest_seconds([(0, 7, 10**9)], cluster.link) * 1e3, 1)  # milliseconds inside a host
2.8
>>> round(busiest_seconds([(0, 8, 10**9)], cluster.link) * 1e3, 1)  # and between hosts
20.8
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import gcd

import numpy as np
import numpy.typing as npt

from shardspec.comm.curves import Line, Link
from shardspec.errors import MeshError
from shardspec.mesh.device_ids import id_list, whole_number
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import shown


@dataclass(frozen=True, slots=True)
class Cluster:
    """The speed of the links inside and between hosts, and the host of each device id.

    Parameters
    ----------
    inside
        The link between devices of one host.
    between
        The link between devices of different hosts; None if there is a single host.
    per_node
        Number of devices per host: ids 0 to ``per_node - 1`` share one, and so on. None if all
        devices share one, or if `hosts` lists them.
    hosts
        The ids of each host, if not in order; every other device is a host by itself.
    copy_s
        Seconds per byte of a copy inside a device's memory; 0 ignores such copies.

    Raises
    ------
    MeshError
        If `per_node` is not a whole number from 1, or the link between hosts is missing.

    Examples
    --------
    >>> nvlink, network = Link(3e-6, 1 / 362e9, "NVLink"), Link(1e-5, 1 / 48e9, "network")
    >>> cluster = Cluster(nvlink, network, per_node=8)
    >>> cluster.host(7), cluster.host(8), cluster.crosses(7, 8), cluster.link(0, 7) == (
    ...     nvlink.latency_s, nvlink.seconds_per_byte)
    (0, 1, True, True)
    """

    inside: Link
    between: Link | None = None
    per_node: int | None = None
    hosts: tuple[tuple[int, ...], ...] = field(default=(), hash=False)
    copy_s: float = 0.0
    _host_of: Mapping[int, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        number = whole_number(self.per_node)
        if self.per_node is not None and (number is None or number < 1):
            raise MeshError(f"per_node is {shown(self.per_node)}; give a whole number from 1")
        if self.between is None and (number or self.hosts):
            raise MeshError("several hosts have no link between them; give between=")
        host_of = {device: number for number, ids in enumerate(self.hosts) for device in ids}
        object.__setattr__(self, "per_node", number)
        object.__setattr__(self, "_host_of", host_of)

    def host(self, device: int) -> int:
        """Return a number for the host of a device, equal for devices that share it."""
        if self.per_node is not None:
            return device // self.per_node
        # Devices that no host lists get negative numbers.
        return self._host_of.get(device, -1 - device) if self.hosts else 0

    def by_host(self, devices: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return the devices of every host, in the order of `devices`."""
        hosts: dict[int, list[int]] = defaultdict(list)
        for device in devices:
            hosts[self.host(device)].append(device)
        return {host: tuple(ids) for host, ids in hosts.items()}

    def crosses(self, a: int, b: int) -> bool:
        """Return True if two devices are on different hosts."""
        return self.host(a) != self.host(b)

    def link(self, a: int, b: int) -> Line:
        """Return the seconds per message and per byte between two devices."""
        return self.far if self.crosses(a, b) else self.near

    @property
    def near(self) -> Line:
        """Seconds per message and per byte inside a host."""
        return self.inside.latency_s, self.inside.seconds_per_byte

    @property
    def far(self) -> Line:
        """Seconds per message and per byte between hosts; the slower link limits the bytes."""
        if self.between is None:
            return self.near
        per_byte = max(self.between.seconds_per_byte, self.inside.seconds_per_byte)
        return self.between.latency_s, per_byte

    @property
    def shares_ports(self) -> bool:
        """True if the devices of a host share its port to other hosts."""
        return self.between is not None and self.between.port == "node"

    @property
    def start_s(self) -> float:
        """Seconds to start a step."""
        return max(link.start_s for link in (self.inside, self.between) if link is not None)

    def axis_links(self, mesh: DeviceMesh) -> tuple[Link, ...] | None:
        """Return the link of each axis of a mesh; None if an axis spans hosts unevenly.

        >>> one, two = Link(0.0, 1e-12, "one"), Link(0.0, 1e-11, "two", port="device")
        >>> links = Cluster(one, two, 8).axis_links(DeviceMesh(range(16), (4, 4)))
        >>> [(link.name, link.per_node) for link in links]
        [('two', 2), ('one', 1)]
        """
        hosts = np.array([self.host(device) for device in mesh.ids], dtype=np.int64)
        if self.between is None or not hosts.size or (hosts == hosts[0]).all():
            return (self.inside,) * mesh.ndim
        wide = [axis for axis, size in enumerate(mesh.shape) if size > 1]
        counts = _devices_per_host(hosts.reshape([mesh.shape[axis] for axis in wide]))
        if counts is None:
            return None
        far = replace(
            self.between,
            seconds_per_byte=max(self.between.seconds_per_byte, self.inside.seconds_per_byte),
            port=self.between.port or "device",
        )
        links = [self.inside] * mesh.ndim
        for axis, count in zip(wide, counts, strict=True):
            if count < mesh.shape[axis]:
                within = self.inside if count > 1 else None
                links[axis] = replace(far, per_node=count, within=within)
        return tuple(links)


def busiest_seconds(
    messages: Iterable[tuple[int, int, float]],
    link: Callable[[int, int], Line],
    cluster: Cluster | None = None,
    files: Set[int] = frozenset(),
) -> float:
    """Return the seconds of some messages: those of the busiest device or shared host port.

    `messages` are tuples of sender, receiver and bytes; `link` gives the seconds per message and
    per byte between two ids. Ids in `files` stand for files, which take no time and have no host.

    >>> cluster = Cluster(Link(0.0, 1.0), Link(0.0, 5.0, port="node"), per_node=2)
    >>> busiest_seconds([(0, 1, 4), (0, 2, 1), (1, 3, 1)], cluster.link, cluster)
    10.0
    """
    busy: defaultdict[tuple[int, int], float] = defaultdict(float)
    ports: dict[tuple[int, int], float] = {}
    shared = cluster if cluster is not None and cluster.shares_ports else None
    for sender, receiver, num_bytes in messages:
        latency, per_byte = link(sender, receiver)
        far = shared and (sender in files or shared.crosses(sender, receiver))
        for end, device in enumerate((sender, receiver)):
            if device not in files:
                busy[end, device] += latency + per_byte * num_bytes
                if shared and far:
                    port = end, shared.host(device)
                    ports[port] = ports.get(port, latency) + per_byte * num_bytes
    return max((*busy.values(), *ports.values()), default=0.0)


def _devices_per_host(hosts: npt.NDArray[np.int64]) -> tuple[int, ...] | None:
    """Return the number of devices per host along each axis; `hosts` has the host of each device.

    None if hosts split an axis unevenly. In the example, hosts of 8 devices split a 4x4 mesh.

    >>> _devices_per_host(np.arange(16).reshape(4, 4) // 8), _devices_per_host(np.arange(12) // 8)
    ((2, 4), (4,))
    >>> _devices_per_host(np.arange(8) // 3) is None
    True
    """
    shares = []
    for axis, size in enumerate(hosts.shape):
        lines = np.sort(np.moveaxis(hosts, axis, -1).reshape(-1, size), axis=1)
        begins = np.insert(lines[:, 1:] != lines[:, :-1], 0, True, axis=1)
        counts = set(np.diff(np.append(np.flatnonzero(begins), lines.size)).tolist())
        shares.append(gcd(*counts))
        if shares[-1] < min(counts) or shares[-1] == 1 < max(counts):
            return None
    return tuple(shares)


def slowest_link(links: Iterable[Link], name: str) -> Link:
    """Return a link as slow as the slowest of several in latency, bandwidth and start.

    >>> str(slowest_link([Link(1e-5, 1e-11), Link(1e-6, 1e-9)], "both"))
    'both: 10 µs, 1 GB/s'
    """
    links = list(links)
    return Link(
        max(link.latency_s for link in links),
        max(link.seconds_per_byte for link in links),
        name,
        max(link.start_s for link in links),
    )


def check_links(parts: Sequence[tuple[Cluster, Sequence[int]]]) -> None:
    """Raise `MeshError` if two clusters disagree about the link between two shared devices.

    Each part is a cluster and its device ids.

    >>> fast, slow = Cluster(Link(0.0, 1e-12, "fast")), Cluster(Link(0.0, 1e-11, "slow"))
    >>> check_links([(fast, range(4)), (slow, range(3, 6))])  # share one device, so no pair
    >>> check_links([(fast, range(4)), (slow, range(2, 6))])
    Traceback (most recent call last):
    shardspec.errors.MeshError: devices 2 and 3 differ in links between two meshes (one: 0 µs, \
1000 GB/s; other: 0 µs, 100 GB/s); give links= for both
    """
    for (one, ids), (other, other_ids) in combinations(parts, 2):
        if one == other:
            continue
        shared = sorted(set(ids).intersection(other_ids))
        hosts = one.by_host(shared).values()
        # A pair inside a host, and a pair of two hosts, stand for all.
        pairs = [host[:2] for host in hosts if len(host) > 1][:1]
        pairs += [tuple(host[0] for host in hosts)[:2]] if len(hosts) > 1 else []
        for a, b in pairs:
            if one.link(a, b) != other.link(a, b):
                links = (
                    Link(*cluster.link(a, b), name)
                    for cluster, name in ((one, "one"), (other, "other"))
                )
                raise MeshError(
                    f"devices {a} and {b} differ in links between two meshes "
                    f"({'; '.join(map(str, links))}); give links= for both"
                )


def joined_clusters(parts: Sequence[tuple[Cluster, Sequence[int]]]) -> Cluster:
    """Merge clusters, each with its device ids, into one that has the slowest of their links.

    Raises `MeshError` if two devices share a host in one cluster but not in another.
    """
    clusters = list(dict.fromkeys(cluster for cluster, _ in parts))
    if len(clusters) == 1 and (clusters[0].per_node or not clusters[0].hosts):
        return clusters[0]
    for (cluster_a, ids), (cluster_b, ids_b) in combinations(parts, 2):
        shared = [device for device in ids if device in set(ids_b)]
        pairs = {(cluster_a.host(device), cluster_b.host(device)): device for device in shared}
        for side in (0, 1):
            device_of: dict[int, int] = {}
            for pair, device in pairs.items():
                if (first := device_of.setdefault(pair[side], device)) != device:
                    raise MeshError(
                        f"devices {first} and {device} share a host in one mesh but not in "
                        "another; give links= for both meshes"
                    )
    host_of: dict[int, int] = {}
    for cluster, ids in parts:
        for devices in cluster.by_host(ids).values():
            known = next((host_of[each] for each in devices if each in host_of), min(devices))
            host_of |= dict.fromkeys(devices, known)
    groups: dict[int, list[int]] = defaultdict(list)
    for device, host in sorted(host_of.items()):
        groups[host].append(device)
    hosts = tuple(map(tuple, groups.values()))
    between = [cluster.between or cluster.inside for cluster in clusters]
    return Cluster(
        slowest_link([cluster.inside for cluster in clusters], "slowest of all meshes"),
        slowest_link(between, "slowest of all meshes"),
        hosts=hosts,
        copy_s=max(cluster.copy_s for cluster in clusters),
    )


def cluster_of_axes(meshes: Sequence[DeviceMesh], links: Sequence[Sequence[Link]]) -> Cluster:
    """Return the cluster of meshes with one link per axis.

    Devices are on one host if only axes faster than the slowest one separate them. Raises
    `MeshError` if the same devices have different links on two meshes.

    >>> links = Link(1e-5, 1e-10), Link(1e-6, 1e-11)
    >>> cluster_of_axes([DeviceMesh(range(4), (2, 2))], [links]).hosts
    ((0, 1), (2, 3))
    """
    each = [
        (link, mesh, axis)
        for mesh, of_mesh in zip(meshes, links, strict=True)
        for axis, link in enumerate(of_mesh)
    ]
    _check_groups(meshes, each)
    every = slowest_link([link for link, *_ in each], "slowest of all axes")
    fast = [item for item in each if item[0].seconds_per_byte < every.seconds_per_byte]
    if not fast:
        return Cluster(every)
    from networkx.utils import UnionFind  # merges of checkpoints need none

    joined = UnionFind([device for mesh in meshes for device in mesh.ids])
    for mesh in meshes:
        for group in mesh.groups([axis for _, owner, axis in fast if owner is mesh]):
            joined.union(*group)
    near = slowest_link([link for link, *_ in fast], "slowest inside hosts")
    hosts = sorted(tuple(sorted(host)) for host in joined.to_sets())
    return Cluster(near, every, hosts=tuple(hosts))


def _check_groups(
    meshes: Iterable[DeviceMesh], each: Iterable[tuple[Link, DeviceMesh, int]]
) -> None:
    """Raise `MeshError` if axes of two meshes connect the same devices by different links."""
    number_of = Counter(device for mesh in meshes for device in mesh.ids)
    shared = {device for device, number in number_of.items() if number > 1}
    speeds: dict[frozenset[int], Line] = {}
    for link, mesh, axis in each:
        numbers = link.latency_s, link.seconds_per_byte
        if mesh.shape[axis] == 1 or shared.isdisjoint(mesh.ids):
            continue
        for group in mesh.groups([axis]):
            if shared.issuperset(group) and (
                speeds.setdefault(frozenset(group), numbers) != numbers
            ):
                raise MeshError(
                    f"devices {id_list(group)} have different links in two meshes; give equal links"
                )
