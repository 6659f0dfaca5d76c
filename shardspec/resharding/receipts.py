"""Proves that resharded weights have arrived unchanged, by comparing digests.

Every device digests its shards of the target, and its shards of the source after renaming, casting
and padding. Digests of boxes add up to digests of tensors, so it does not matter who sent a box.
Replicas are compared in the source and in the target.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from shardspec.boxes import Box, box_shape, chunks, slices_within
from shardspec.comm.agreement import on_all_ranks
from shardspec.errors import CommunicatorError
from shardspec.resharding.digests import LANES, Digests, TensorDigest
from shardspec.resharding.stages import (
    StateCopies,
    TensorMove,
    boxes_of,
    holders_of,
    region_of,
)
from shardspec.resharding.views import identity_view, parts_of_view
from shardspec.tensor.shards import bits_of, torch_dtype

Gather: TypeAlias = Callable[[dict[int, Any]], dict[int, Any]]
_CHUNK: Final = 1 << 20
"""Number of elements that are cast at once."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Digests of the target's tensors, equal on every rank and equal to the source's digests.

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
    """The caller's version number."""
    digests: Digests
    """Digests of the tensors of the target, by name."""

    def require(self, version: int) -> None:
        """Raise CommunicatorError if the receipt is of another version."""
        if self.version != version:
            raise CommunicatorError(
                f"version {self.version} has arrived here, not {version}; sync again before "
                "reading it"
            )


class OfDevice(Protocol):
    """The shards of one device before and after; `plan.moves` numbers the tensors."""

    device: int
    source: dict[int, torch.Tensor]
    target: dict[int, torch.Tensor]


class _Boxes(NamedTuple):
    """Digests of one device's shards, by index or name of the tensor, and by box."""

    source: dict[tuple[int, Box], TensorDigest]
    target: dict[tuple[str, Box], TensorDigest]
    raw: dict[tuple[str, Box], TensorDigest]
    """Digests of target boxes with the original bits of NaNs; `target` makes all NaNs equal."""


def receipt_of(
    plan: StateCopies, shards: Mapping[int, OfDevice], gather: Gather, version: int | None
) -> Receipt:
    """Compare digests of source and target, and return the receipt; all ranks call this.

    Every rank raises CommunicatorError if a tensor has not arrived unchanged, or replicas differ.
    """
    boxes: dict[int, _Boxes] = gather({d: _boxes(plan, own) for d, own in shards.items()})

    def fail(name: str, problem: str) -> Exception:
        text = f"version {version}: tensor {name!r} {problem}, and sync again"
        return on_all_ranks(CommunicatorError(text))

    sent: dict[str, TensorDigest] = {}
    arrived: dict[str, TensorDigest] = {}
    raw: dict[str, TensorDigest] = {}
    for place, move in enumerate(plan.moves):
        name, target = move.target_name, move.target
        zero = TensorDigest(target.dtype, target.global_shape)
        for box, holders in holders_of(move.source).items():
            first, *others = holders
            for other in others:
                if boxes[first].source[place, box] != boxes[other].source[place, box]:
                    raise fail(
                        move.source_name,
                        f"differs on devices {first} and {other} of the source; make them equal",
                    )
            sent[name] = sent.get(name, zero) + boxes[first].source[place, box]
        sent.setdefault(name, zero)
        if name in arrived:
            continue
        arrived[name] = raw[name] = zero
        for box, (first, *others) in holders_of(target).items():
            for other in others:
                if boxes[first].target[name, box] != boxes[other].target[name, box]:
                    raise fail(
                        name, f"differs on devices {first} and {other} of the target; check both"
                    )
            arrived[name] += boxes[first].target[name, box]
            key = name, box
            raw[name] += boxes[first].raw.get(key, boxes[first].target[key])
    for name, digest in sent.items():
        # Padding is zero, so it changes the cover only.
        sums = LANES if name in plan.padded else LANES + 1
        if digest.sums[:sums] != arrived[name].sums[:sums]:
            values = f"its digest is {digest.value} there and {arrived[name].value} here"
            raise fail(name, f"did not arrive unchanged: {values}; check the links")
    return Receipt(version, Digests(raw).require_complete())


def _boxes(plan: StateCopies, shards: OfDevice) -> _Boxes:
    """Return the digests of the source and target boxes of one device."""
    digests = _Boxes({}, {}, {})
    cast = {m.target_name for m in plan.moves if m.source.dtype != m.target.dtype}
    for place, shard in shards.source.items():
        move = plan.moves[place]
        for box in boxes_of(move.source, shards.device):
            digest = TensorDigest(move.target.dtype, move.target.global_shape)
            for region, part in _as_target(move, shard, box, shards.device):
                digest = _added(digest, region, part)
            digests.source[place, box] = digest
    for place, shard in shards.target.items():
        name, layout = plan.moves[place].target_name, plan.moves[place].target
        for box in boxes_of(layout, shards.device):
            if (name, box) in digests.target:
                continue
            zero = TensorDigest(layout.dtype, layout.global_shape)
            strides = tuple(shard.stride())
            shape, steps, at = region_of(layout, None, box, strides, shards.device, of_source=False)
            region = shard.as_strided(shape, steps, shard.storage_offset() + at)
            digest = _added(zero, region, box)
            if name in cast and bool(region.isnan().any()):
                digests.raw[name, box] = digest
                digest = _added(zero, _equal_nans(region), box)
            digests.target[name, box] = digest
    return digests


def _as_target(
    move: TensorMove, shard: torch.Tensor, box: Box, device: int
) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield parts of a source shard, cast to the target's dtype, each with its target box."""
    view = move.view or identity_view(move.source.global_shape)
    casts = move.source.dtype != move.target.dtype
    strides = tuple(shard.stride())
    for inner in view.source.boxes(box, len(view.shape)):
        _, steps, at = region_of(move.source, view, inner, strides, device, of_source=True)
        for part, by, before in parts_of_view(view.target, inner, steps):
            region = shard.as_strided(box_shape(part), by, shard.storage_offset() + at + before)
            if not casts:
                yield region, part
                continue
            for piece in chunks(part, _CHUNK):
                made = region[slices_within(piece, part)].to(torch_dtype(move.target.dtype))
                yield _equal_nans(made), piece


def _equal_nans(values: torch.Tensor) -> torch.Tensor:
    """Give all NaNs the same bits, since devices cast NaNs differently."""
    return torch.where(values.isnan(), values.new_full((), nan), values)


def _added(digest: TensorDigest, region: torch.Tensor, box: Box) -> TensorDigest:
    return digest + TensorDigest.of_box(bits_of(region), box, digest.shape, digest.dtype)
