"""What moves when a whole state dict changes its layouts, as plain data."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.resharding.hosts import Hosts, crossing_once, hosts_of
from shardspec.resharding.maps import NameMap
from shardspec.resharding.stages import Stage
from shardspec.resharding.stored import StoredLayout
from shardspec.resharding.transfers import kind_of
from shardspec.resharding.views import View
from shardspec.text import bytes_text, counted, seconds_text, table_text

__all__ = ["MAX_BYTES", "MAX_PEERS", "StateCopies", "TensorMove", "Tie"]

MAX_BYTES: Final = 256 << 20
"""What buckets of a device hold by default: so much for sending and so much for receiving."""
MAX_PEERS: Final = 32
"""How many devices a device sends to at once at most, and receives from."""


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
        """The dtype in which elements travel: the smaller one, so that casts save bytes."""
        both = (self.source.dtype, self.target.dtype)
        return min(both, key=item_bytes)


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor that is another one under a second name: it does not travel again."""

    source_name: str
    target_name: str
    first: int
    """The place of the other one in the plan's moves."""


@dataclass(frozen=True)
class StateCopies:
    """What every device sends and receives to convert a state dict.

    A plain value, the same on every rank that makes it: it holds no tensor, buffer or group.
    """

    moves: tuple[TensorMove, ...]
    """The tensors; those of one pair of layouts travel together."""
    max_bytes: int = MAX_BYTES
    """Bound of the bytes in buckets for sending, and for receiving, on each device."""
    ties: tuple[Tie, ...] = ()
    """Tensors that are others of `moves` under a second name."""
    values: tuple[tuple[str, str], ...] = ()
    """Plain values that go along: the name in the source, and in the target."""
    padded: tuple[str, ...] = ()
    """Tensors of the target that are zero where no tensor of the source fills them."""
    checkpoint: Path | None = None
    """What is read, where the source is a checkpoint."""
    names: NameMap | None = field(default=None, compare=False)
    """By which map, if by one."""

    @cached_property
    def digest(self) -> str:
        """What is equal on ranks whose plans are; hexadecimal."""
        found = hashlib.sha256(repr((self.max_bytes, self.ties, self.values, self.padded)).encode())
        texts = {}
        for move in self.moves:
            for layout in (move.source, move.target):
                if layout not in texts:
                    stored = layout.held if isinstance(layout, StoredLayout) else ()
                    mesh = layout.mesh
                    links = mesh.mesh_alpha, mesh.mesh_beta, mesh.link_model
                    facts = (mesh.ids, mesh.shape, links, str(layout.spec), stored)
                    texts[layout] = repr((*facts, layout.global_shape, layout.dtype)).encode()
            found.update(repr((move.source_name, move.target_name, move.view)).encode())
            found.update(texts[move.source] + texts[move.target])
        return found.hexdigest()

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Physical ids of all devices of all meshes, ascending."""
        meshes = {layout.mesh for move in self.moves for layout in (move.source, move.target)}
        return tuple(sorted({device for mesh in meshes for device in mesh.ids}))

    @cached_property
    def casts(self) -> bool:
        """Whether any tensor changes its dtype."""
        return any(move.source.dtype != move.target.dtype for move in self.moves)

    @cached_property
    def files(self) -> frozenset[int]:
        """Which of the devices stand for files of a checkpoint."""
        stored = {m.source.mesh for m in self.moves if isinstance(m.source, StoredLayout)}
        return frozenset(number for mesh in stored for number in mesh.ids)

    @cached_property
    def kinds(self) -> dict[tuple[Layout, Layout, View | None], list[int]]:
        """Pairs of layouts, and the view, with the places in `moves` of tensors that have them."""
        found: dict[tuple[Layout, Layout, View | None], list[int]] = {}
        for place, move in enumerate(self.moves):
            found.setdefault((move.source, move.target, move.view), []).append(place)
        return found

    @cached_property
    def hosts(self) -> Hosts | None:
        """Which devices share a host, where the links of the meshes tell them apart."""
        return None if self.files else hosts_of(self._meshes)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What is copied at once: all; or first to each host what it lacks, then inside of it."""
        counts = tuple(map(len, self.kinds.values()))
        first_of = [self.moves[places[0]] for places in self.kinds.values()]
        widths = tuple(item_bytes(move.wire_dtype) for move in first_of)
        kinds = tuple(kind_of(*key) for key in self.kinds)
        direct = (Stage(kinds, counts, widths),)
        if self.hosts is None:
            return direct
        across, inside = zip(*(crossing_once(k, self.hosts.number) for k in kinds), strict=True)
        once: tuple[Stage, ...] = (Stage(across, counts, widths),)
        if any(len(kind.at) for kind in inside):
            # It is handed on as it lies in the result.
            widths = tuple(item_bytes(move.target.dtype) for move in first_of)
            once += (Stage(inside, counts, widths),)
        return min(once, direct, key=self._seconds)

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Bytes that every device sends."""
        return {d: sum(stage.sent.get(d, 0) for stage in self.stages) for d in self.devices}

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Bytes that every device receives: what it wants and lacks."""
        return {d: sum(stage.received.get(d, 0) for stage in self.stages) for d in self.devices}

    @property
    def num_pairs(self) -> int:
        """Pairs of sender and receiver."""
        pairs = [np.stack(stage.traffic[:2]) for stage in self.stages]
        return int(np.unique(np.concatenate(pairs, axis=1), axis=1).shape[1])

    @property
    def bytes_between_hosts(self) -> int | None:
        """Bytes that go from one host to another, where the meshes tell which these are."""
        if self.hosts is None:
            return None
        return sum(stage.bytes_between(self.hosts.number) for stage in self.stages)

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
        tensors = {("source", move.source_name, move.source) for move in self.moves}
        tensors = {one for one in tensors if not isinstance(one[2], StoredLayout)}
        tensors |= {("target", move.target_name, move.target) for move in self.moves}
        held = dict.fromkeys(self.devices, 0)
        sizes = {layout: _local_bytes(layout) for layout in {layout for *_, layout in tensors}}
        for *_, layout in tensors:
            for device, num_bytes in sizes[layout].items():
                held[device] += num_bytes
        return max(
            (
                num_bytes
                + min(self.max_bytes, self.sent[device])
                + min(self.max_bytes, self.received[device])
                for device, num_bytes in held.items()
                if device not in self.files
            ),
            default=0,
        )

    @property
    def cost_seconds(self) -> float:
        """Modelled seconds: those of the device that sends or receives longest.

        After the time to start each stage, every message costs the latency, and every byte the
        transfer cost, of the slowest axis of the meshes, or of the slowest that join devices of a
        host; see `CostModel`.
        """
        return self._seconds(self.stages)

    def _seconds(self, stages: Sequence[Stage]) -> float:
        models = set(map(CostModel.of_mesh, self._meshes))
        stages = [stage for stage in stages if len(stage.traffic.sender)]
        if not models or not stages:
            return 0.0
        slowest = [model.slowest(range(len(model.links))) for model in models if model.links]
        latency = max((alpha for alpha, _ in slowest), default=0.0)
        per_byte = max((beta for _, beta in slowest), default=0.0)
        start = max(model.start_s for model in models)
        link = latency, per_byte
        return sum(start + stage.seconds(link, self.hosts, self.files) for stage in stages)

    @property
    def _meshes(self) -> set[DeviceMesh]:
        """The meshes of devices."""
        return {
            layout.mesh
            for key in self.kinds
            for layout in key[:2]
            if not isinstance(layout, StoredLayout)
        }

    def as_dict(self) -> dict[str, object]:
        """Return what the plan says as plain values, ready for JSON."""
        return {
            "tensors": len(self.moves),
            "devices": list(self.devices),
            "sent": {str(device): num_bytes for device, num_bytes in self.sent.items()},
            "received": {str(device): num_bytes for device, num_bytes in self.received.items()},
            "busiest_sender": max(self.sent.values(), default=0),
            "busiest_receiver": max(self.received.values(), default=0),
            "pairs": self.num_pairs,
            "bytes_between_hosts": self.bytes_between_hosts,
            "peak_bytes": self.peak_bytes,
            "cost_seconds": self.cost_seconds,
            "digest": self.digest,
        }

    def to_json(self) -> str:
        """Return `as_dict` as text."""
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        return self.text({})

    def text(self, names: Mapping[int, str]) -> str:
        """Return the plan as a table, some devices by name."""
        total = sum(self.sent.values())
        senders = sum(1 for num_bytes in self.sent.values() if num_bytes)
        receivers = sum(1 for num_bytes in self.received.values() if num_bytes)
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
        table = table_text(["device", "sends", "receives"], rows)
        lines = [
            f"{counted(len(self.moves), 'tensor')} on "
            f"{counted(len(self.devices) - len(self.files), 'device')}"
            + (f", from {counted(len(self.files), 'file')}" if self.files else ""),
            table,
            f"busiest sender {bytes_text(max(self.sent.values(), default=0))} "
            f"(even share of {counted(senders, 'sender')}: {bytes_text(total / max(1, senders))})",
            f"busiest receiver {bytes_text(max(self.received.values(), default=0))} "
            f"(even share of {counted(receivers, 'receiver')}: "
            f"{bytes_text(total / max(1, receivers))})",
            f"{counted(self.num_pairs, 'pair')} of devices, "
            f"peak {bytes_text(self.peak_bytes)}, {seconds_text(self.cost_seconds)}",
        ]
        if self.hosts is not None and (between := self.bytes_between_hosts):
            once = " (each byte once to a host)" if len(self.stages) > 1 else ""
            lines.append(
                f"between {counted(len(set(self.hosts.number.values())), 'host')} "
                f"{bytes_text(between)}{once}"
            )
        return "\n".join(lines)


_MOST_ROWS: Final = 32


def _local_bytes(layout: Layout) -> dict[int, int]:
    width = item_bytes(layout.dtype)
    return {device: prod(layout.local_shape(device)) * width for device in layout.mesh.ids}
