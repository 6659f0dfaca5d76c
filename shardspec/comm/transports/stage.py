"""Defines stages: boxes that a transport moves at once, their places in memory and their order.

A stage is sent in waves: messages that are in flight together. This module also packs messages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from shardspec.boxes import box_shape
from shardspec.comm.senders import Copy
from shardspec.comm.transfers import Message, aligned_bytes
from shardspec.errors import CommunicatorError
from shardspec.text import ranks_text

ShardsByPlace: TypeAlias = Mapping[int, torch.Tensor]
"""Place to tensor of one device; the place is a tensor's number on all devices."""
RegionOf: TypeAlias = Callable[
    [Copy, tuple[int, ...], int], tuple[tuple[int, ...], tuple[int, ...], int]
]
"""Maps a copy, the strides of a shard and its device to the box's shape, strides and offset."""


class Wave(NamedTuple):
    """Messages that travel together: at most one to and one from each peer."""

    sends: Mapping[int, Message]
    """The message to each receiver."""
    receives: Mapping[int, Message]
    """The message from each sender; local copies are under the device itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Transfers of one device that run together; the next stage starts after this one ends."""

    name: str
    """The name of the step or plan, for errors."""
    device: int
    readers: frozenset[int]
    """The other devices that receive from this one."""
    senders: frozenset[int]
    """The other devices that send to this one."""
    source: ShardsByPlace
    target: ShardsByPlace
    source_region: RegionOf
    target_region: RegionOf
    dtype_of: Callable[[Copy], torch.dtype]
    """The dtype of the elements of a copy during the transfer."""
    waves: Callable[[int | None], Iterable[Wave]]
    """Maps the most bytes in buffers to the waves; None gives a single wave of uncut boxes."""
    one_by_one: bool = False
    """True if each wave must end before the next one starts, to combine its results."""
    is_combined: bool = False
    """True if waves contain addends, which are received in buffers."""

    def failed(self, why: object) -> CommunicatorError:
        """Return the error for a stage that failed, with its peers."""
        peers = ranks_text(self.readers | self.senders)
        return CommunicatorError(f"{self.name} with {peers} failed: {why}")

    def parts(self, copy: Copy, *, of_source: bool) -> Iterator[torch.Tensor]:
        """Yield the views of a copy's box in the shards, one per tensor."""
        shards = self.source if of_source else self.target
        region_of = self.source_region if of_source else self.target_region
        own_strides: tuple[int, ...] | None = None
        for place in copy.places:
            shard = shards[place]
            if shard.stride() != own_strides:
                own_strides = shard.stride()
                shape, strides, offset = region_of(copy, own_strides, self.device)
            yield shard.as_strided(shape, strides, shard.storage_offset() + offset)

    def pack(self, message: Message, bucket: torch.Tensor) -> None:
        """Copy boxes of the source into the buffer of a message."""
        for boxed, part in self._pairs(message, bucket, of_source=True):
            boxed.copy_(part)

    def unpack(self, message: Message, bucket: torch.Tensor) -> None:
        """Copy the boxes of a message from its buffer into the target."""
        for boxed, part in self._pairs(message, bucket, of_source=False):
            part.copy_(boxed)

    def copy(self, message: Message, sender: "Stage") -> None:
        """Copy boxes into the target from a device of this process, perhaps the same device."""
        for copy in message:
            views = sender.parts(copy, of_source=True), self.parts(copy, of_source=False)
            for source_part, target_part in zip(*views, strict=True):
                target_part.copy_(source_part)

    def _pairs(
        self, message: Message, bucket: torch.Tensor, *, of_source: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (view in the buffer, view in the shard) of each box of a message."""
        start = 0
        for copy in message:
            dtype, shape, step = self.dtype_of(copy), box_shape(copy.box), aligned_bytes(copy)
            typed, strides = bucket.view(dtype), torch.empty(shape, device="meta").stride()
            for part in self.parts(copy, of_source=of_source):
                yield typed.as_strided(shape, strides, start // dtype.itemsize), part
                start += step


class Transport(Protocol):
    """Moves bytes between devices; all devices of a stage call it together."""

    @property
    def name(self) -> str:
        """Name of the transport in ``SHARDSPEC_TRANSPORT``."""

    def close(self) -> None:
        """Give up: if the transport can signal it, peers that wait for this rank raise an error."""

    def move(self, stages: Iterable[Stage]) -> None:
        """Fill the targets of stages, one stage after the other, and send to other devices.

        The next wave is requested during the one before, or, if the stage is `one_by_one`, after
        its end. Raises `CommunicatorError` if a peer has ended or does not answer.
        """

    def reserve(self, first: Callable[[], tuple[int, int]], like: torch.Tensor) -> bool:
        """Allocate the buffers of the first wave, to fail before any transfer if memory is short.

        `first` returns the number of messages of the first wave, and the bytes of the longest.
        Returns True if the transport needs buffers.
        """
