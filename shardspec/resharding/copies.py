"""What moves when a whole state dict changes its layouts, as plain data."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

import numpy as np

from shardspec.comm.cost import CostModel
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.resharding.stored import StoredLayout
from shardspec.resharding.transfers import Kind, Senders, balanced, kind_of
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
    """The tensors, in the order in which they travel."""
    max_bytes: int = MAX_BYTES
    """Bound of the bytes in buckets for sending, and for receiving, on each device."""
    ties: tuple[Tie, ...] = ()
    """Tensors that are others of `moves` under a second name."""
    values: tuple[tuple[str, str], ...] = ()
    """Plain values that go along: the name in the source, and in the target."""
    padded: tuple[str, ...] = ()
    """Tensors of the target that are zero where no tensor of the source fills them."""

    @cached_property
    def digest(self) -> str:
        """What is equal on ranks whose plans are; hexadecimal."""
        found = hashlib.sha256(repr((self.max_bytes, self.ties, self.values, self.padded)).encode())
        texts = {}
        for move in self.moves:
            for layout in (move.source, move.target):
                if layout not in texts:
                    stored = layout.held if isinstance(layout, StoredLayout) else ()
                    facts = (layout.mesh.ids, layout.mesh.shape, str(layout.spec), stored)
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
    def overlaps(self) -> tuple[Kind, ...]:
        """The overlaps of every pair of layouts."""
        return tuple(kind_of(*key) for key in self.kinds)

    @cached_property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of an element on its way, for every pair of layouts."""
        return tuple(item_bytes(self.moves[places[0]].wire_dtype) for places in self.kinds.values())

    @cached_property
    def senders(self) -> Senders:
        """Which of the replicas sends what."""
        counts = [len(places) for places in self.kinds.values()]
        return balanced(self.overlaps, counts, self.item_bytes)

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Bytes that every device sends."""
        found = dict.fromkeys(self.devices, 0)
        for holders, ends in self.senders.ends.items():
            for device, num_bytes in zip(holders, np.diff(ends, prepend=0).tolist(), strict=True):
                found[device] += num_bytes
        return found

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Bytes that every device receives: what it wants and lacks."""
        found = dict.fromkeys(self.devices, 0)
        for kind, width, places in zip(
            self.overlaps, self.item_bytes, self.kinds.values(), strict=True
        ):
            devices, index = np.unique(kind.receiver, return_inverse=True)
            sums = np.bincount(index, kind.elements * (width * len(places)), len(devices))
            for device, num_bytes in zip(devices.tolist(), sums.tolist(), strict=True):
                found[device] += round(num_bytes)
        return found

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """Sender and receiver of every message."""
        found: set[tuple[int, int]] = set()
        for kind, width, places, starts in zip(
            self.overlaps,
            self.item_bytes,
            self.kinds.values(),
            self.senders.starts,
            strict=True,
        ):
            bounds = np.searchsorted(kind.at, np.arange(len(kind.holders) + 1))
            num_bytes = kind.elements * (width * len(places))
            for holders, first, last in zip(kind.holders, bounds[:-1], bounds[1:], strict=True):
                receivers = kind.receiver[first:last].tolist()
                if len(holders) == 1:
                    found.update((holders[0], receiver) for receiver in receivers)
                    continue
                ends = self.senders.ends.get(holders)
                if ends is None:
                    continue
                begin = starts[first:last]
                left = np.searchsorted(ends, begin, side="right")
                right = np.searchsorted(ends, begin + num_bytes[first:last], side="left")
                for receiver, a, b in zip(receivers, left.tolist(), right.tolist(), strict=True):
                    found.update((sender, receiver) for sender in holders[a : b + 1])
        return frozenset(found)

    @cached_property
    def bucket_bytes(self) -> int:
        """The most bytes of one message."""
        peers: dict[tuple[str, int], int] = defaultdict(int)
        for sender, receiver in self.pairs:
            peers["to", sender] += 1
            peers["from", receiver] += 1
        most = max(peers.values(), default=1)
        most = min(most, MAX_PEERS)
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

        After the time to start, every message costs the latency, and every byte the transfer cost,
        of the slowest axis of the meshes; see `CostModel`.
        """
        meshes = {
            layout.mesh
            for key in self.kinds
            for layout in key[:2]
            if not isinstance(layout, StoredLayout)
        }
        models = set(map(CostModel.of_mesh, meshes))
        if not models or not self.pairs:
            return 0.0
        slowest = [model.slowest(range(len(model.links))) for model in models if model.links]
        latency = max((alpha for alpha, _ in slowest), default=0.0)
        per_byte = max((beta for _, beta in slowest), default=0.0)
        start = max(model.start_s for model in models)
        messages: dict[tuple[str, int], int] = defaultdict(int)
        for sender, receiver in self.pairs:
            messages["to", sender] += 1
            messages["from", receiver] += 1
        return start + max(
            count * latency + (self.sent if way == "to" else self.received)[device] * per_byte
            for (way, device), count in messages.items()
            if device not in self.files
        )

    def as_dict(self) -> dict[str, object]:
        """Return what the plan says as plain values, ready for JSON."""
        return {
            "tensors": len(self.moves),
            "devices": list(self.devices),
            "sent": {str(device): num_bytes for device, num_bytes in self.sent.items()},
            "received": {str(device): num_bytes for device, num_bytes in self.received.items()},
            "busiest_sender": max(self.sent.values(), default=0),
            "busiest_receiver": max(self.received.values(), default=0),
            "pairs": len(self.pairs),
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
            f"{counted(len(self.pairs), 'pair')} of devices, "
            f"peak {bytes_text(self.peak_bytes)}, {seconds_text(self.cost_seconds)}",
        ]
        return "\n".join(lines)


_MOST_ROWS: Final = 32


def _local_bytes(layout: Layout) -> dict[int, int]:
    width = item_bytes(layout.dtype)
    return {device: prod(layout.local_shape(device)) * width for device in layout.mesh.ids}
