"""Receipts of a sync: digests of what was sent and of what arrived, compared on all ranks.

Sender and receiver digest the boxes of each message by their places in the tensors of the target.
They exchange one hash for each pair of devices, and all digests of a pair if its hashes differ. The
digests of what arrived add up to those of whole tensors, which shows replicas that differ.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Any, Protocol, TypeAlias

import torch

from shardspec.boxes import Box, box_shape, box_size, contains
from shardspec.comm.agreement import on_all_ranks
from shardspec.errors import CommunicatorError
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.resharding.copies import Groups, StateCopies, TensorMove
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.resharding.stages import StateCopy, region_of
from shardspec.resharding.view_parts import parts_of_view
from shardspec.resharding.views import identity_view
from shardspec.tensor.shards import bits_of, torch_dtype
from shardspec.text import counted

Pair: TypeAlias = tuple[int, int, int]
"""A stage of the plan, a sender and a receiver."""
ByPlace: TypeAlias = dict[int, TensorDigest]
"""Digests of some boxes of tensors, by their places in the plan."""
Gather: TypeAlias = Callable[[dict[int, Any]], dict[int, Any]]


@dataclass(frozen=True, slots=True)
class Receipt:
    """The digests of what arrived in a sync, equal on every rank; it is what was sent.

    Examples
    --------
    >>> import torch
    >>> from shardspec import DTensor, DeviceMesh, digest, plan_reshard
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> state = {"w": DTensor(torch.arange(6.0), mesh, "[S0]")}
    >>> plan = plan_reshard(state, (DeviceMesh([3], (1,)), {}))
    >>> new, receipt = plan.run(state, receipt=True, version=7)
    >>> receipt.digests == digest(state)
    True
    >>> receipt.require(7)
    """

    version: int | None
    """The number that the caller gave to what was sent."""
    digests: Digests
    """Of the tensors of the target."""

    def require(self, version: int) -> None:
        """Raise CommunicatorError unless this is the receipt of a version."""
        if self.version != version:
            raise CommunicatorError(
                f"version {self.version} has arrived here, not {version}; sync again before "
                "reading it"
            )


class OfDevice(Protocol):
    """The shards of one device, by the tensor's place in the plan."""

    device: int
    source: dict[int, torch.Tensor]
    target: dict[int, torch.Tensor]


def receipt_of(
    every: StateCopies,
    ties: Groups,
    shards: Mapping[int, OfDevice],
    gather: Gather,
    version: int | None,
) -> Receipt:
    """Compare what was sent with what arrived; all processes call this.

    Only the first tensor of each of `ties` was moved. Raises CommunicatorError on every rank if a
    tensor did not arrive as it was sent, or its replicas differ.
    """
    plan = every.without_ties(ties)
    ends = {device: _Ends(plan, of_device) for device, of_device in shards.items()}
    gathered = gather({device: end.hashes() for device, end in ends.items()})
    sent = {pair: value for hashes, *_ in gathered.values() for pair, value in hashes.items()}
    arrived = {pair: value for _, hashes, _ in gathered.values() for pair, value in hashes.items()}
    wrong = {pair for pair in sent.keys() | arrived if sent.get(pair) != arrived.get(pair)}
    if wrong:
        details = gather({device: end.details(wrong) for device, end in ends.items()})
        raise on_all_ranks(CommunicatorError(_problem(plan, wrong, details, version)))
    whole = _whole(plan, {device: boxes for device, (*_, boxes) in gathered.items()}, version)
    for first, *others in ties:
        for other in others:
            same = whole[every.moves[first].target_name]
            whole.setdefault(every.moves[other].target_name, same)
    return Receipt(version, Digests(whole))


class _Ends:
    """The digests of what one device has sent and received."""

    def __init__(self, plan: StateCopies, shards: OfDevice) -> None:
        self.plan, self.shards, self.device = plan, shards, shards.device
        self.sent: dict[Pair, ByPlace] = {}
        self.arrived: dict[Pair, ByPlace] = {}
        self.boxes: dict[tuple[str, Box], TensorDigest] = {}
        """What arrived, by tensor and box of this device."""
        self._of_copies: dict[tuple[bool, int, Box], TensorDigest] = {}
        """What is sent, perhaps to several devices."""
        for place, shard in shards.target.items():
            name, layout = plan.moves[place].target_name, plan.moves[place].target
            for box in _boxes_of(layout, self.device):
                digest = TensorDigest(layout.dtype, layout.global_shape)
                if name in plan.padded:  # zeros come from no tensor of the source
                    shape, steps, at = region_of(
                        layout, None, box, tuple(shard.stride()), self.device, of_source=False
                    )
                    region = shard.as_strided(shape, steps, shard.storage_offset() + at)
                    digest = _with_region(digest, region, box)
                self.boxes[name, box] = digest
        for copy in plan.kept(self.device):
            self._add((0, self.device, self.device), copy)
        for number, stage in enumerate(plan.stages):
            for (sender, receiver), copies in stage.streams(self.device).items():
                for copy in copies:
                    self._add((number, sender, receiver), copy)

    def _add(self, pair: Pair, copy: StateCopy) -> None:
        stage, sender, receiver = pair
        for place in copy.places:
            if sender == self.device:
                key = stage > 0, place, copy.box
                if key not in self._of_copies:
                    shards = self.shards.target if stage else self.shards.source
                    parts = self._parts(shards[place], place, copy.box, of_source=not stage)
                    self._of_copies[key] = self._sum(place, parts)
                _add_to(self.sent.setdefault(pair, {}), place, self._of_copies[key])
            if receiver == self.device:
                shard = self.shards.target[place]
                arrived = list(self._parts(shard, place, copy.box, of_source=False))
                digest = self._sum(place, arrived)
                _add_to(self.arrived.setdefault(pair, {}), place, digest)
                self._add_to_boxes(place, arrived, digest)

    def _add_to_boxes(
        self, place: int, parts: list[tuple[torch.Tensor, Box]], digest: TensorDigest
    ) -> None:
        """Add parts to the boxes of this device; `digest` is that of all parts, as sent."""
        move = self.plan.moves[place]
        name, layout = move.target_name, move.target
        boxes = _boxes_of(layout, self.device)
        if name in self.plan.padded:
            return
        as_sent = layout.dtype == digest.dtype and not _has_cast_nans(move, parts)
        if len(boxes) == 1 and as_sent:
            self.boxes[name, boxes[0]] += digest
            return
        for region, part in parts:
            key = name, next(box for box in boxes if contains(box, part))
            self.boxes[key] = _with_region(self.boxes[key], region, part)

    def _parts(
        self, shard: torch.Tensor, place: int, box: Box, *, of_source: bool
    ) -> Iterator[tuple[torch.Tensor, Box]]:
        """Yield the regions of a shard that form the box of a copy, with boxes of the target."""
        move = self.plan.moves[place]
        layout = move.source if of_source else move.target
        view = move.view or identity_view(layout.global_shape)
        strides = tuple(shard.stride())
        _, steps, at = region_of(layout, view, box, strides, self.device, of_source=of_source)
        for part, by, before in parts_of_view(view.target, box, steps):
            yield shard.as_strided(box_shape(part), by, shard.storage_offset() + at + before), part

    def _sum(self, place: int, parts: Iterable[tuple[torch.Tensor, Box]]) -> TensorDigest:
        move = self.plan.moves[place]
        dtype = torch_dtype(move.wire_dtype)
        digest = TensorDigest(move.wire_dtype, move.target.global_shape)
        for region, part in parts:
            sent = region.to(dtype)
            if _has_cast_nans(move, [(sent, part)]):
                sent = torch.where(sent.isnan(), sent.new_full((), nan), sent)
            digest = _with_region(digest, sent, part)
        return digest

    def hashes(
        self,
    ) -> tuple[dict[Pair, str], dict[Pair, str], dict[tuple[str, Box], TensorDigest]]:
        """Return a hash of what went to each device, one of what came from each, and all boxes."""
        sent = {pair: _hash(by_place) for pair, by_place in self.sent.items()}
        return sent, {pair: _hash(digests) for pair, digests in self.arrived.items()}, self.boxes

    def details(self, wrong: set[Pair]) -> tuple[dict[Pair, ByPlace], dict[Pair, ByPlace]]:
        """Return all digests of some pairs."""
        return (
            {pair: digests for pair, digests in self.sent.items() if pair in wrong},
            {pair: digests for pair, digests in self.arrived.items() if pair in wrong},
        )


def _has_cast_nans(move: TensorMove, parts: Iterable[tuple[torch.Tensor, Box]]) -> bool:
    """Whether there are NaNs that have been cast: their bits depend on how memory was read."""
    casts = move.source.dtype != move.target.dtype
    return casts and any(bool(region.isnan().any()) for region, _ in parts)


def _hash(digests: ByPlace) -> str:
    text = repr([(place, digest.sums) for place, digest in sorted(digests.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _add_to(digests: ByPlace, place: int, digest: TensorDigest) -> None:
    digests[place] = digests[place] + digest if place in digests else digest


def _with_region(digest: TensorDigest, region: torch.Tensor, box: Box) -> TensorDigest:
    """Add the elements of a box."""
    return digest + TensorDigest.of_box(bits_of(region), box, digest.shape, digest.dtype)


def _problem(
    plan: StateCopies,
    wrong: set[Pair],
    details: Mapping[int, tuple[Mapping[Pair, ByPlace], Mapping[Pair, ByPlace]]],
    version: int | None,
) -> str:
    """Return which tensor did not arrive as it was sent, from and to which device, as text."""
    problems = []
    for pair in sorted(wrong):
        _, sender, receiver = pair
        all_sent, all_arrived = details[sender][0].get(pair, {}), details[receiver][1].get(pair, {})
        for place in sorted(all_sent.keys() | all_arrived):
            sent, arrived = all_sent.get(place), all_arrived.get(place)
            if sent != arrived:
                values = [digest.value if digest else "nothing" for digest in (sent, arrived)]
                problems.append(
                    f"tensor {plan.moves[place].target_name!r} did not arrive at device {receiver} "
                    f"as device {sender} has sent it: {values[0]} left and {values[1]} arrived"
                )
    more = (
        f" (and {counted(len(problems) - 1, 'other box', 'other boxes')})" if problems[1:] else ""
    )
    return f"version {version}: {problems[0]}{more}; sync again"


@lru_cache(4096)
def _boxes_of(layout: Layout, device: int) -> list[Box]:
    """Return the boxes of a device that are not empty; two of all devices are equal or disjoint."""
    if layout.spec.is_plain:
        boxes = [layout.box(device)]
    else:  # parts are kept apart, as one that is replicated may adjoin another
        boxes = [LayoutCell(layout, cell).box(device) for cell in cells_of(layout)]
    return [box for box in boxes if box_size(box)]


@lru_cache(256)
def _holders(layout: Layout) -> dict[Box, tuple[int, ...]]:
    holders: dict[Box, tuple[int, ...]] = {}
    for device in layout.mesh.ids:
        for box in _boxes_of(layout, device):
            holders[box] = (*holders.get(box, ()), device)
    return holders


def _whole(
    plan: StateCopies,
    boxes: Mapping[int, Mapping[tuple[str, Box], TensorDigest]],
    version: int | None,
) -> dict[str, TensorDigest]:
    """Return the digests of whole tensors; raises CommunicatorError if replicas differ."""
    whole: dict[str, TensorDigest] = {}
    for name, layout in {move.target_name: move.target for move in plan.moves}.items():
        total = TensorDigest(layout.dtype, layout.global_shape)
        for box, (first, *others) in _holders(layout).items():
            for other in others:
                if boxes[other][name, box] != boxes[first][name, box]:
                    raise on_all_ranks(
                        CommunicatorError(
                            f"version {version}: tensor {name!r} differs on devices {first} and "
                            f"{other}, since replicas of the source did; make them equal, and "
                            "sync again"
                        )
                    )
            total += boxes[first][name, box]
        whole[name] = total
    return whole
