"""What a transport moves: boxes of tensors, where they lie, and in which waves they travel.

The one place where boxes are packed into messages and unpacked from them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from shardspec.boxes import box_shape
from shardspec.comm.transfers import Message, Piece

ShardsByPlace: TypeAlias = Mapping[int, torch.Tensor]
"""Tensors of one device by their places."""
RegionOf: TypeAlias = Callable[
    [Piece, tuple[int, ...], int], tuple[tuple[int, ...], tuple[int, ...], int]
]
"""From a box, the strides of a shard, and its device: shape, strides and offset of the box."""


class Wave(NamedTuple):
    """At most one message to and one from each of some peers."""

    sends: Mapping[int, Message]
    """By receiver, what is packed into its message."""
    receives: Mapping[int, Message]
    """By sender, what is unpacked; under the device itself what it copies."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What one device sends and receives; of several stages one starts when the last has ended."""

    name: str
    """Of the step or plan, in errors."""
    device: int
    readers: frozenset[int]
    """The other devices that get something from this one."""
    senders: frozenset[int]
    """The other devices from which it gets something."""
    source: ShardsByPlace
    target: ShardsByPlace
    source_region: RegionOf
    target_region: RegionOf
    dtype_of: Callable[[Piece], torch.dtype]
    """In which elements travel."""
    waves: Callable[[int | None], Iterable[Wave]]
    """Given how many bytes may be in buffers: the waves; with None one of whole boxes."""
    num_places: int
    """Of tensors, the same on all devices."""
    num_dims: int
    """The most that one of them has."""
    one_by_one: bool = False
    """Whether a wave has to end before the next one is asked for, since it is combined then."""
    is_combined: bool = False
    """Whether waves are addends, for which there are buffers."""

    def parts(self, piece: Piece, *, of_source: bool) -> Iterator[torch.Tensor]:
        """Yield the parts of shards that a box of some tensors is."""
        shards = self.source if of_source else self.target
        region_of = self.source_region if of_source else self.target_region
        known: tuple[int, ...] | None = None
        for place in piece.places:
            shard = shards[place]
            if shard.stride() != known:
                known = shard.stride()
                shape, strides, offset = region_of(piece, known, self.device)
            yield shard.as_strided(shape, strides, shard.storage_offset() + offset)

    def pack(self, message: Message, bucket: torch.Tensor) -> None:
        """Copy boxes of the source into a message."""
        for piece in message:
            sides = zip(self._seen(piece, bucket), self.parts(piece, of_source=True), strict=True)
            for seen, part in sides:
                seen.copy_(part)

    def unpack(self, message: Message, bucket: torch.Tensor) -> None:
        """Copy the boxes of a message to where they belong."""
        for piece in message:
            sides = zip(self._seen(piece, bucket), self.parts(piece, of_source=False), strict=True)
            for seen, part in sides:
                part.copy_(seen)

    def copy(self, message: Message) -> None:
        """Copy what the device has already."""
        for piece in message:
            ends = (self.parts(piece, of_source=of_source) for of_source in (True, False))
            for here, there in zip(*ends, strict=True):
                there.copy_(here)

    def _seen(self, piece: Piece, bucket: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the boxes of some tensors as parts of a message."""
        dtype, shape = self.dtype_of(piece), box_shape(piece.box)
        typed = bucket.view(dtype)
        strides = torch.empty(shape, device="meta").stride()
        for number in range(len(piece.places)):
            at = (piece.start + number * piece.step) // dtype.itemsize
            yield typed.as_strided(shape, strides, at)


class Transport(Protocol):
    """Moves bytes between devices; every device of a stage calls it at once."""

    def move(self, stages: Iterable[Stage]) -> None:
        """Fill targets with what the stages say, one stage after the other, and serve the others.

        A wave is asked for when the one before is on its way, or has ended where they go one by
        one. Raises CommunicatorError if a peer has gone or does not come.
        """

    def reserve(self, first: Callable[[], tuple[int, int]], like: torch.Tensor) -> bool:
        """Make the memory that moving needs at first, so that no device is without it midway.

        `first` says how many messages a wave has at first, and the bytes of the longest message.
        Returns whether the transport needs any.
        """
