"""Copies that change the layouts of a whole state dict, as plain data."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

from shardspec.boxes import Box
from shardspec.comm.cluster import Cluster
from shardspec.comm.cost import Links, cluster_of
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.stages import (
    MAX_PEERS,
    MoveKind,
    PlanStage,
    Schedule,
    StateCopy,
    copies_of_kinds,
    schedule_of,
    staged,
)
from shardspec.resharding.views import View
from shardspec.text import bytes_text, counted, seconds_text, table_text

MAX_BYTES: Final = 256 << 20
"""What buckets of a device hold by default: so much for sending and so much for receiving."""
_MOST_ROWS: Final = 32
"""Devices in a table."""


@dataclass(frozen=True, slots=True, init=False)
class StoredLayout(Layout):
    """The boxes of a tensor in the files of a checkpoint, which are numbered as devices are."""

    stored: tuple[tuple[int, tuple[Box, ...]], ...]
    """The boxes of each file."""

    def __init__(
        self,
        files: DeviceMesh,
        stored: Mapping[int, Sequence[Box]],
        global_shape: Sequence[int],
        dtype: object,
    ) -> None:
        Layout.__init__(self, files, ShardingSpec(len(global_shape)), global_shape, dtype)
        boxes_of = tuple((file, tuple(boxes)) for file, boxes in sorted(stored.items()))
        object.__setattr__(self, "stored", boxes_of)
        object.__setattr__(self, "_hash", hash((boxes_of, self.global_shape, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        return StoredLayout, (self.mesh, dict(self.stored), self.global_shape, self.dtype)

    def local_boxes(self, physical_id: int) -> list[Box]:
        """Return the boxes of a file."""
        return list(dict(self.stored).get(physical_id, ()))


@dataclass(frozen=True, slots=True)
class TensorMove:
    """One tensor of a state dict: what it is called and how it is laid out, before and after."""

    source_name: str
    target_name: str
    source: Layout
    target: Layout
    view: View | None = None
    """Which elements of the source are which of the target; by default all, at the same indices."""

    @property
    def wire_dtype(self) -> str:
        """The dtype in which elements travel: the smaller one, else that of the target.

        So casts save bytes, and what arrives can be cast back to what left.
        """
        return min(self.target.dtype, self.source.dtype, key=item_bytes)


@dataclass(frozen=True)
class StateCopies:
    """What every device sends and receives to convert a state dict.

    A plain value, the same on every rank that makes it: it holds no tensor, buffer or group.
    """

    moves: tuple[TensorMove, ...]
    """The tensors, by name; those of one pair of layouts travel together."""
    max_bytes: int = MAX_BYTES
    """Bound of the bytes in buckets for sending, and for receiving, on each device."""
    values: tuple[tuple[str, str], ...] = ()
    """Plain values that go along: the name in the source, and in the target."""
    padded: tuple[str, ...] = ()
    """Tensors of the target that are zero where no tensor of the source fills them."""
    dropped: tuple[str, ...] = ()
    """Tensors of the source that are left behind."""
    quantized: tuple[str, ...] = ()
    """Tensors of the target that become codes and scales where they arrive."""
    links: Links | None = None
    """Links of the cluster; None for those of the meshes, or an assumed preset."""

    @cached_property
    def digest(self) -> str:
        """What is equal on ranks whose plans are; hexadecimal."""
        names = self.values, self.padded, self.dropped, *self.quantized
        digest = hashlib.sha256(repr((self.max_bytes, *names, self.links)).encode())
        texts = {layout: repr(_facts(layout)) for layout in self._layouts}
        for move in self.moves:
            ends = texts[move.source], texts[move.target]
            digest.update(repr((move.source_name, move.target_name, move.view, ends)).encode())
        return digest.hexdigest()

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Physical ids of all devices of all meshes, ascending."""
        return tuple(sorted(self.files.union(*(mesh.ids for mesh in self.meshes))))

    @cached_property
    def files(self) -> frozenset[int]:
        """Which of the devices stand for files of a checkpoint."""
        stored = {layout.mesh for layout in self._layouts if isinstance(layout, StoredLayout)}
        return frozenset(number for mesh in stored for number in mesh.ids)

    @cached_property
    def kinds(self) -> dict[MoveKind, list[int]]:
        """Pairs of layouts, and the view, with the places in `moves` of tensors that have them."""
        kinds: dict[MoveKind, list[int]] = {}
        for place, move in enumerate(self.moves):
            kinds.setdefault((move.source, move.target, move.view), []).append(place)
        return kinds

    @property
    def _layouts(self) -> set[Layout]:
        return {layout for key in self.kinds for layout in key[:2]}

    @cached_property
    def cluster(self) -> Cluster:
        """Links of the meshes, and the devices that share a host."""
        return cluster_of(sorted(self.meshes, key=lambda mesh: (mesh.ids, mesh.shape)), self.links)

    @cached_property
    def num_hosts(self) -> int:
        """Number of hosts of the devices; 1 where a checkpoint is read."""
        return 1 if self.files else len(set(map(self.cluster.host, self.devices)))

    @cached_property
    def _copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """What devices have already, and what they lack."""
        kept: list[StateCopy] = []
        lacking: list[StateCopy] = []
        kinds = (
            (kind, places, item_bytes(self.moves[places[0]].wire_dtype))
            for kind, places in self.kinds.items()
        )
        for copy in copies_of_kinds(kinds):
            (kept if copy.holders == (copy.receiver,) else lacking).append(copy)
        return kept, lacking

    @cached_property
    def stages(self) -> tuple[PlanStage, ...]:
        """One stage; or up to three, in which each byte enters a host once and is passed on.

        Those that take least time by the prices.
        """
        lacking = self._copies[1]
        direct = (PlanStage(lacking),)
        if self.num_hosts == 1 or not lacking:
            return direct
        # What is passed on is in the target by then.
        widths = [item_bytes(move.target.dtype) for move in self.moves]
        ways = [(True, True), (False, True), (True, False), (False, False)]
        once = [
            staged(lacking, self.cluster, widths.__getitem__, relays=relays, by_host=by_host)
            for relays, by_host in ways
        ]
        return min(*once, direct, key=self._seconds)

    @cached_property
    def _schedules(self) -> dict[int, Schedule]:
        return {}

    def schedule(self, device: int) -> Schedule:
        """Return the messages of a device."""
        schedules = self._schedules
        if device not in schedules:
            schedules[device] = schedule_of(self.stages, self.devices, device, self.bucket_bytes)
        return schedules[device]

    def kept(self, device: int) -> list[StateCopy]:
        """Return what a device has already."""
        return [copy for copy in self._copies[0] if copy.receiver == device]

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes by sender and receiver, of all stages."""
        return sum((Counter(stage.traffic) for stage in self.stages), Counter[tuple[int, int]]())

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Bytes that every device sends."""
        return self._summed(0)

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Bytes that every device receives: what it wants and lacks."""
        return self._summed(1)

    def _summed(self, end: int) -> dict[int, int]:
        summed = dict.fromkeys(self.devices, 0)
        for pair, num_bytes in self.traffic.items():
            summed[pair[end]] += num_bytes
        return summed

    @property
    def bytes_between_hosts(self) -> int | None:
        """Bytes that go from one host to another; None where one host has all devices."""
        if self.num_hosts == 1:
            return None
        return sum(size for pair, size in self.traffic.items() if self.cluster.crosses(*pair))

    @cached_property
    def bucket_bytes(self) -> int:
        """The most bytes of one message."""
        most = min(max(1, *(stage.most_peers for stage in self.stages)), MAX_PEERS)
        # Twice: a bucket is filled while the one before it is on its way.
        bucket = self.max_bytes // (2 * most)
        least = 16
        if bucket < least:
            raise LayoutError(
                f"max_bytes={self.max_bytes} is too small for messages with "
                f"{counted(most, 'peer')} at once; give at least {2 * most * least}"
            )
        return bucket

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds at once: its source, its target and its buckets."""
        before = {move.source_name: move.source for move in self.moves}
        after = {move.target_name: move.target for move in self.moves}
        num_bytes = dict.fromkeys(self.devices, 0)
        for layout, count in Counter([*before.values(), *after.values()]).items():
            if not isinstance(layout, StoredLayout):
                width = item_bytes(layout.dtype) * count
                for device in layout.mesh.ids:
                    num_bytes[device] += prod(layout.local_shape(device)) * width
        for device in num_bytes:
            for moved in (self.sent, self.received):
                num_bytes[device] += min(self.max_bytes, moved[device])
        return max(
            (num_bytes[device] for device in num_bytes if device not in self.files), default=0
        )

    @property
    def cost_seconds(self) -> float:
        """Modelled seconds: those of the device that sends or receives longest.

        After the time to start each stage, every message costs the latency, and every byte the
        transfer cost, of the link inside a host or of the one between hosts.
        """
        return self._seconds(self.stages)

    def _seconds(self, stages: Sequence[PlanStage]) -> float:
        stages = [stage for stage in stages if stage.traffic]
        if not self.meshes or not stages:
            return 0.0
        cluster = self.cluster
        one = cluster.far if len(set(map(cluster.host, self.devices))) > 1 else cluster.near
        link = (lambda _a, _b: one) if self.files else cluster.link
        return sum(cluster.start_s + stage.seconds(link, cluster, self.files) for stage in stages)

    @property
    def meshes(self) -> set[DeviceMesh]:
        """The meshes of devices."""
        return {layout.mesh for layout in self._layouts if not isinstance(layout, StoredLayout)}

    def as_dict(self) -> dict[str, object]:
        """Return what the plan says as plain values, ready for JSON."""
        return {
            "tensors": len(self.moves),
            "devices": list(self.devices),
            "sent": {str(device): num_bytes for device, num_bytes in self.sent.items()},
            "received": {str(device): num_bytes for device, num_bytes in self.received.items()},
            "busiest_sender": max(self.sent.values(), default=0),
            "busiest_receiver": max(self.received.values(), default=0),
            "pairs": len(self.traffic),
            "bytes_between_hosts": self.bytes_between_hosts,
            "peak_bytes": self.peak_bytes,
            "cost_seconds": self.cost_seconds,
            "digest": self.digest,
        }

    def to_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict())

    def __repr__(self) -> str:
        tensors, devices = (len(self.moves), "tensor"), (len(self.devices), "device")
        return f"{type(self).__name__}({counted(*tensors)} on {counted(*devices)})"

    def __str__(self) -> str:
        return self.text({})

    def text(self, names: Mapping[int, str]) -> str:
        """Return the plan as a table, some devices by name."""
        rows = [
            [
                names.get(device, str(device)),
                bytes_text(self.sent[device]),
                bytes_text(self.received[device]),
            ]
            for device in self.devices
        ]
        if len(rows) > _MOST_ROWS:
            rows = [*rows[:_MOST_ROWS], ["…", "", ""]]
        devices = counted(len(self.devices) - len(self.files), "device")
        files = f", from {counted(len(self.files), 'file')}" if self.files else ""
        lines = [
            f"{counted(len(self.moves), 'tensor')} on {devices}{files}",
            table_text(["device", "sends", "receives"], rows),
        ]
        for role, moved in (("sender", self.sent), ("receiver", self.received)):
            busy = [num_bytes for num_bytes in moved.values() if num_bytes]
            share = bytes_text(sum(busy) / max(1, len(busy)))
            lines.append(
                f"busiest {role} {bytes_text(max(busy, default=0))} "
                f"(even share of {counted(len(busy), role)}: {share})"
            )
        lines.append(
            f"{counted(len(self.traffic), 'pair')} of devices, "
            f"peak {bytes_text(self.peak_bytes)}, {seconds_text(self.cost_seconds)}"
        )
        if between := self.bytes_between_hosts:
            once = " (each byte once to a host)" if len(self.stages) > 1 else ""
            over = f" over {self.cluster.between.name}" if self.cluster.between else ""
            hosts = counted(self.num_hosts, "host")
            lines.append(f"between {hosts} {bytes_text(between)}{once}{over}")
        return "\n".join(lines)


def _facts(layout: Layout) -> tuple[object, ...]:
    """Return what of a layout plans depend on."""
    stored = layout.stored if isinstance(layout, StoredLayout) else ()
    mesh = layout.mesh
    links = mesh.mesh_alpha, mesh.mesh_beta, mesh.link_model
    return mesh.ids, mesh.shape, links, str(layout.spec), stored, layout.global_shape, layout.dtype
