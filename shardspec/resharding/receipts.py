"""Receipts of a sync: digests of what left each sender and of what arrived, compared on all ranks.

Of each message's boxes both ends take digests by their places in the target's tensors. First only
one hash a pair of devices travels; where these differ, all of the pair's digests do. What arrived
adds up to digests of whole tensors, and so tells replicas apart that differ.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from shardspec.boxes import Box, box_shape, box_size, contains
from shardspec.comm.agreement import on_all_ranks
from shardspec.errors import CommunicatorError
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.resharding.copies import Groups, StateCopies
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.resharding.given import torch_dtype
from shardspec.resharding.stages import StateCopy, region_of
from shardspec.resharding.view_parts import parts_of_view
from shardspec.resharding.views import identity_view
from shardspec.tensor.shards import bits_of
from shardspec.text import counted

Pair: TypeAlias = tuple[int, int, int]
"""A stage of the plan, a sender and a receiver."""
ByPlace: TypeAlias = dict[int, TensorDigest]
"""Digests of some boxes of tensors, by their places in the plan."""
Gather: TypeAlias = Callable[[dict[int, Any]], dict[int, Any]]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What arrived in a sync, the same on every rank: it is what left, element by element.

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
    """The caller's number of what was sent."""
    digests: Digests
    """Of the tensors of the target."""

    def require(self, version: int) -> None:
        """Raise CommunicatorError unless this is the receipt of a version."""
        if self.version != version:
            raise CommunicatorError(
                f"version {self.version} has arrived here, not {version}; sync again before this "
                "is read"
            )


class OfDevice(Protocol):
    """The shards of one device, by the tensor's place in the plan."""

    device: int
    source: dict[int, torch.Tensor]
    target: dict[int, torch.Tensor]


class WantedReceipt(NamedTuple):
    """Says that a receipt is wanted."""

    version: int | None


def receipt_of(
    every: StateCopies,
    ties: Groups,
    held: Mapping[int, OfDevice],
    gather: Gather,
    wanted: WantedReceipt,
) -> Receipt:
    """Compare what left with what arrived; all processes call this.

    Of `ties` the first was moved. Raises CommunicatorError on every rank if a tensor did not arrive
    as it was sent, or its replicas differ.
    """
    plan, version = every.without_ties(ties), wanted.version
    ends = {device: _Ends(plan, one) for device, one in held.items()}
    gathered = gather({device: end.hashes() for device, end in ends.items()})
    left = {pair: value for sent, *_ in gathered.values() for pair, value in sent.items()}
    arrived = {pair: value for _, got, _ in gathered.values() for pair, value in got.items()}
    wrong = {pair for pair in left.keys() | arrived if left.get(pair) != arrived.get(pair)}
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

    def __init__(self, plan: StateCopies, one: OfDevice) -> None:
        self.plan, self.device = plan, one.device
        self.left: dict[Pair, ByPlace] = {}
        self.arrived: dict[Pair, ByPlace] = {}
        self.boxes: dict[tuple[str, Box], TensorDigest] = {}
        """What arrived, by tensor and box of this device."""
        for place, shard in one.target.items():
            name, layout = plan.moves[place].target_name, plan.moves[place].target
            for box in _boxes_of(layout, one.device):
                digest = TensorDigest(layout.dtype, layout.global_shape)
                if name in plan.padded:  # with what no tensor of the source fills
                    shape, steps, at = region_of(
                        layout, None, box, tuple(shard.stride()), one.device, of_source=False
                    )
                    region = shard.as_strided(shape, steps, shard.storage_offset() + at)
                    digest = _of_region(region, box, digest)
                self.boxes[name, box] = digest
        known: dict[tuple[bool, int, Box], TensorDigest] = {}
        for copy in plan.kept(one.device):
            self._add((0, one.device, one.device), copy, one, known)
        for number, stage in enumerate(plan.stages):
            for (sender, receiver), copies in stage.streams(one.device).items():
                for copy in copies:
                    self._add((number, sender, receiver), copy, one, known)

    def _add(
        self,
        pair: Pair,
        copy: StateCopy,
        one: OfDevice,
        known: dict[tuple[bool, int, Box], TensorDigest],
    ) -> None:
        stage, sender, receiver = pair
        for place in copy.places:
            if sender == self.device:
                key = stage > 0, place, copy.box
                if key not in known:
                    shards = one.target if stage else one.source
                    parts = self._parts(shards[place], place, copy.box, of_source=not stage)
                    known[key] = self._sum(place, parts)
                _add_to(self.left.setdefault(pair, {}), place, known[key])
            if receiver == self.device:
                here = list(self._parts(one.target[place], place, copy.box, of_source=False))
                digest = self._sum(place, here)
                _add_to(self.arrived.setdefault(pair, {}), place, digest)
                self._arrived(place, here, digest)

    def _arrived(
        self, place: int, parts: list[tuple[torch.Tensor, Box]], digest: TensorDigest
    ) -> None:
        """Add parts to the boxes of this device; `digest` is of all, as it travelled."""
        move = self.plan.moves[place]
        name, layout = move.target_name, move.target
        boxes = _boxes_of(layout, self.device)
        if name in self.plan.padded:
            return
        if len(boxes) == 1 and layout.dtype == digest.dtype:
            self.boxes[name, boxes[0]] += digest
            return
        for region, part in parts:
            key = name, next(box for box in boxes if contains(box, part))
            self.boxes[key] = _of_region(region, part, self.boxes[key])

    def _parts(
        self, shard: torch.Tensor, place: int, box: Box, *, of_source: bool
    ) -> Iterator[tuple[torch.Tensor, Box]]:
        """Yield the regions of a shard that a copy's box is, with the boxes of the target."""
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
        found = TensorDigest(move.wire_dtype, move.target.global_shape)
        for region, part in parts:
            found = _of_region(region.to(dtype), part, found)
        return found

    def hashes(
        self,
    ) -> tuple[dict[Pair, str], dict[Pair, str], dict[tuple[str, Box], TensorDigest]]:
        """Return one hash for what was sent to each device, and received; and what is here now."""

        def hashed(found: ByPlace) -> str:
            text = repr([(place, one.sums) for place, one in sorted(found.items())])
            return hashlib.sha256(text.encode()).hexdigest()[:32]

        left = {pair: hashed(found) for pair, found in self.left.items()}
        return left, {pair: hashed(found) for pair, found in self.arrived.items()}, self.boxes

    def details(self, wrong: set[Pair]) -> tuple[dict[Pair, ByPlace], dict[Pair, ByPlace]]:
        """Return all digests of some pairs."""
        return (
            {pair: found for pair, found in self.left.items() if pair in wrong},
            {pair: found for pair, found in self.arrived.items() if pair in wrong},
        )


def _add_to(found: ByPlace, place: int, digest: TensorDigest) -> None:
    found[place] = found[place] + digest if place in found else digest


def _of_region(region: torch.Tensor, box: Box, more: TensorDigest) -> TensorDigest:
    """Add the elements of a box."""
    return more + TensorDigest.of_box(bits_of(region), box, more.shape, more.dtype)


def _problem(
    plan: StateCopies,
    wrong: set[Pair],
    details: Mapping[int, tuple[Mapping[Pair, ByPlace], Mapping[Pair, ByPlace]]],
    version: int | None,
) -> str:
    """Say which tensor did not arrive as it was sent, from whom, and where."""
    problems = []
    for pair in sorted(wrong):
        _, sender, receiver = pair
        left, arrived = details[sender][0].get(pair, {}), details[receiver][1].get(pair, {})
        for place in sorted(left.keys() | arrived):
            sent, got = left.get(place), arrived.get(place)
            if sent != got:
                values = [one.value if one else "nothing" for one in (sent, got)]
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
    """Return the boxes of a device that are not empty, each the same or apart on other devices."""
    if layout.spec.is_plain:
        boxes = [layout.box(device)]
    else:  # where one part is replicated, it may join the one before it
        boxes = [LayoutCell(layout, cell).box(device) for cell in cells_of(layout)]
    return [box for box in boxes if box_size(box)]


@lru_cache(256)
def _holders(layout: Layout) -> dict[Box, tuple[int, ...]]:
    found: dict[Box, tuple[int, ...]] = {}
    for device in layout.mesh.ids:
        for box in _boxes_of(layout, device):
            found[box] = (*found.get(box, ()), device)
    return found


def _whole(
    plan: StateCopies,
    boxes: Mapping[int, Mapping[tuple[str, Box], TensorDigest]],
    version: int | None,
) -> dict[str, TensorDigest]:
    """Return the digests of whole tensors; replicas of a box are equal."""
    found: dict[str, TensorDigest] = {}
    for name, layout in {move.target_name: move.target for move in plan.moves}.items():
        total = TensorDigest(layout.dtype, layout.global_shape)
        for box, (first, *others) in _holders(layout).items():
            due = boxes[first][name, box]
            for other in others:
                if boxes[other][name, box] != due:
                    raise on_all_ranks(
                        CommunicatorError(
                            f"version {version}: tensor {name!r} differs on devices {first} and "
                            f"{other}, since replicas of the source did; make them equal, and "
                            "sync again"
                        )
                    )
            total += due
        found[name] = total
    return found
