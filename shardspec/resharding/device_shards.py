"""The shards of one device, and how it packs, sends, reads and unpacks parts of them."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box
from shardspec.comm.peer_memory import PeerMemory
from shardspec.comm.process_memory import Region as MemoryRegion
from shardspec.dtensor import DTensor
from shardspec.layout.layout import Layout
from shardspec.resharding.copies import StateCopies
from shardspec.resharding.schedule import (
    Messages,
    Piece,
    Region,
    Schedule,
    Streams,
    Wave,
    message_bytes,
    region_of,
    schedule_for,
)
from shardspec.text import shown

__all__ = ["DeviceShards"]

_TAG: Final = 0x5EED0000
"""Of the messages, so that those of single conversions are not taken for them."""

Transfer: TypeAlias = tuple[dist.Work, Callable[[], None]]
"""A message on its way, and what is done when it has come or gone."""
Shards: TypeAlias = dict[int, torch.Tensor]
"""Shards of one device by the tensor's place in the plan."""


def _finish(works: list[Transfer]) -> None:
    """Wait for messages in their order, and let go of each as soon as it is unpacked."""
    works.reverse()
    while works:
        work, then = works.pop()
        work.wait()
        then()
        del work, then


class DeviceShards:
    """The shards of one device, and what it does with them."""

    def __init__(
        self,
        plan: StateCopies,
        device: int,
        state: Mapping[str, object],
        out: Mapping[str, object] | None,
        *,
        alone: bool,
    ) -> None:
        self.plan, self.device = plan, device
        self.problems: list[str] = []
        self.source: Shards = {}
        self.target: Shards = {}
        self._schedule: Schedule = schedule_for(plan, device)
        self._due: dict[Layout, tuple[tuple[int, ...], torch.dtype]] = {}
        # What crosses in the first stage may be cast there; then it is as in the result.
        wire = [_torch_dtype(move.wire_dtype) for move in plan.moves]
        self._wire = (wire, [_torch_dtype(move.target.dtype) for move in plan.moves])
        self._free: list[torch.Tensor] = []
        """Buckets that hold no message."""
        self._alone = alone
        # Of threads that reshard at once, each has other meshes.
        self._tag = _TAG + zlib.crc32(repr(plan.devices).encode()) % 0xFFFF
        names = {move.source_name for move in plan.moves}
        names |= {tie.source_name for tie in plan.ties} | {name for name, _ in plan.values}
        taken: dict[tuple[bool, str], torch.Tensor | None] = {}
        for place, move in enumerate(plan.moves):
            if device in move.source.mesh:
                self._take(taken, False, place, move.source_name, move.source, state)
            if out is not None and device in move.target.mesh:
                self._take(taken, True, place, move.target_name, move.target, out)
        self.tied: list[tuple[int, torch.Tensor]] = []
        for tie in plan.ties:
            layout = plan.moves[tie.first].target
            if out is not None and device in layout.mesh:
                shard = self._checked(tie.target_name, layout, out, filled=True)
                if shard is not None:
                    self.tied.append((tie.first, shard))
        if alone and (unknown := sorted(set(state) - names)):
            self.problems.append(
                f"the state dict has {shown(unknown[0])}, of which the plan knows nothing; leave "
                "it out, or make the plan with it"
            )
        memory = {
            shard.untyped_storage().data_ptr() for shard in self.source.values() if shard.numel()
        }
        for place, shard in self.target.items():
            if shard.numel() and shard.untyped_storage().data_ptr() in memory:
                self.problems.append(
                    f"out[{plan.moves[place].target_name!r}] shares memory with the source; give "
                    "tensors of its own"
                )
        if pair := self._sharing():
            self.problems.append(
                f"out[{pair[0]!r}] and out[{pair[1]!r}] share memory; give each a tensor of its own"
            )

    def _sharing(self) -> tuple[str, str] | None:
        """Return two results that would be written to the same place, if there are such."""
        places = {
            self.plan.moves[place].target_name: (shard.data_ptr(), shard.nbytes)
            for place, shard in self.target.items()
            if shard.numel() and shard.is_contiguous()
        }
        ordered = sorted((start, start + size, name) for name, (start, size) in places.items())
        for (_, end, name), (start, _, other) in pairwise(ordered):
            if start < end:
                return name, other
        return None

    def _take(
        self,
        taken: dict[tuple[bool, str], torch.Tensor | None],
        into_target: bool,
        place: int,
        name: str,
        layout: Layout,
        state: Mapping[str, object],
    ) -> None:
        """Find the shard of a tensor, once, and whether it is as the plan says."""
        key = (into_target, name)
        if key not in taken:
            taken[key] = self._checked(name, layout, state, filled=into_target)
        shard = taken[key]
        if shard is not None:
            (self.target if into_target else self.source)[place] = shard

    def _checked(
        self, name: str, layout: Layout, state: Mapping[str, object], *, filled: bool
    ) -> torch.Tensor | None:
        if name not in state:
            self.problems.append(f"tensor {name!r} is missing from the state dict")
            return None
        shard = _shard_of(state[name], self.device, alone=self._alone)
        if shard is None:
            self.problems.append(
                f"{name!r} is a {type(state[name]).__name__}; give a DTensor of shardspec or of "
                "torch, or the shard of this rank as a tensor"
            )
            return None
        if layout not in self._due:
            self._due[layout] = layout.local_shape(self.device), _torch_dtype(layout.dtype)
        wanted, due = self._due[layout]
        if shard.shape != wanted or shard.dtype != due:
            dtype = str(shard.dtype).removeprefix("torch.")
            self.problems.append(
                f"the shard of {name!r} on device {self.device} is {tuple(shard.shape)} of "
                f"{dtype}; under {layout} it is {wanted} of {layout.dtype}"
            )
            return None
        if not (shard.is_conj() or shard.is_neg()):
            return shard
        # What lies in memory is to be the values: no conjugation that is still to be done.
        if filled:
            self.problems.append(
                f"out[{name!r}] is a view that conjugates or negates; give tensors of its own"
            )
            return None
        return shard.resolve_conj().resolve_neg()

    @property
    def waves(self) -> list[Wave]:
        """The waves of messages that the device takes part in, in order."""
        return self._schedule.waves

    def sending(self, wave: Wave) -> Messages:
        """Return what is sent in a wave, by peer."""
        return self._schedule.sends.get(wave, {})

    def receiving(self, wave: Wave) -> Messages:
        """Return what is received in a wave, by peer."""
        return self._schedule.receives.get(wave, {})

    def allocate(self) -> None:
        """Make the results that were not given, and clear those that have padding."""
        for place, shard in self.target.items():
            if self.plan.moves[place].target_name in self.plan.padded:
                shard.zero_()
        where = next(iter(self.source.values())).device if self.source else _default_device()
        made: dict[str, torch.Tensor] = {}
        for place, move in enumerate(self.plan.moves):
            if place not in self.target and self.device in move.target.mesh:
                name = move.target_name
                if name not in made:
                    dtype = getattr(torch, move.target.dtype)
                    shape = move.target.local_shape(self.device)
                    # Zeros: what no tensor of the source fills is padding.
                    made[name] = torch.zeros(shape, dtype=dtype, device=where)
                self.target[place] = made[name]

    def keep(self) -> None:
        """Copy what the device has already."""
        for kept in self._schedule.kept:
            source = self._part(self.source, kept.move, kept.box, kept.source)
            self._part(self.target, kept.move, kept.box, kept.target).copy_(source)

    def pack(self, wave: Wave, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return a message with some boxes: of the source, or of what has come in stages before."""
        shards = self.target if wave[0] else self.source
        bucket = self._bucket(pieces, shards)
        for piece, seen in zip(pieces, self._seen(wave, bucket, pieces), strict=True):
            seen.copy_(self._part(shards, piece.move, piece.box, piece.shard))
        return bucket

    def unpack(self, wave: Wave, pieces: Sequence[Piece], bucket: torch.Tensor) -> None:
        """Copy the boxes of a message to where they belong."""
        for piece, seen in zip(pieces, self._seen(wave, bucket, pieces), strict=True):
            self._part(self.target, piece.move, piece.box, piece.shard).copy_(seen)

    def exchange_all(self) -> None:
        """Carry the plan out by messages."""
        works: list[Transfer] = []
        stage = 0
        for wave in self.waves:
            if wave[0] > stage:
                _finish(works)
                stage = wave[0]
            # What is received in the wave before is unpacked while this one travels.
            works, before = self.exchange(wave), works
            _finish(before)
        self.keep()
        _finish(works)

    def read_peers(self, memory: PeerMemory) -> None:
        """Read what is wanted from where it lies in the memory of its holders."""
        where = tuple(
            (shard.data_ptr(), shard.stride())
            for shards in (self.source, self.target)
            for shard in shards.values()
        )
        for stage, (sends, receives) in enumerate(self._schedule.streams):
            shards = self.target if stage else self.source

            def place(peer: int, number: int, receives: Streams = receives) -> torch.Tensor:
                piece = receives[peer][number]
                return self._part(self.target, piece.move, piece.box, piece.shard)

            def arrays(
                sends: Streams = sends, receives: Streams = receives, shards: Shards = shards
            ) -> tuple[dict[int, list[MemoryRegion]], dict[int, list[MemoryRegion]]]:
                return (
                    {peer: self._in_memory(shards, pieces) for peer, pieces in sends.items()},
                    {peer: self._in_memory(self.target, p) for peer, p in receives.items()},
                )

            name = f"reshard plan {self.plan.digest[:12]}" + (f" stage {stage}" if stage else "")
            memory.exchange(name, where, arrays, place)
        self.keep()

    def _in_memory(self, shards: Shards, pieces: Sequence[Piece]) -> list[MemoryRegion]:
        """Return where boxes lie in memory."""
        starts = {place: shard.data_ptr() for place, shard in shards.items()}
        found = []
        for piece in pieces:
            region = self._region(shards, piece.move, piece.box, piece.shard)
            width = shards[piece.move].element_size()
            strides = tuple(stride * width for stride in region.strides)
            address = starts[piece.move] + region.offset * width
            found.append(MemoryRegion(address, region.shape, strides, width))
        return found

    def exchange(self, wave: Wave) -> list[Transfer]:
        """Start the messages of a wave; return what is to be waited for, and done then."""
        incoming: dict[int, torch.Tensor] = {}
        then: list[Callable[[], None]] = []
        for peer, pieces in self.receiving(wave).items():
            bucket = self._bucket(pieces, self.target)
            incoming[peer] = bucket[: message_bytes(pieces)]
            then.append(partial(self._unpack_and_free, wave, pieces, bucket))
        if self._on_host():
            # One by one: what is packed first is on its way while the next is packed.
            here = [dist.irecv(b, peer, tag=self._tag) for peer, b in incoming.items()]
            for peer, pieces in self.sending(wave).items():
                bucket = self.pack(wave, pieces)
                here.append(dist.isend(bucket[: message_bytes(pieces)], peer, tag=self._tag))
                then.append(partial(self._free.append, bucket))
            return [(_checked_work(work), act) for work, act in zip(here, then, strict=True)]
        ops = [dist.P2POp(dist.irecv, b, peer, tag=self._tag) for peer, b in incoming.items()]
        for peer, pieces in self.sending(wave).items():
            bucket = self.pack(wave, pieces)
            message = bucket[: message_bytes(pieces)]
            ops.append(dist.P2POp(dist.isend, message, peer, tag=self._tag))
            then.append(partial(self._free.append, bucket))
        works = dist.batch_isend_irecv(ops) if ops else []
        if len(works) == len(ops):
            return list(zip(works, then, strict=True))
        # NCCL makes one work of all.
        return [(work, _all(then if work is works[-1] else [])) for work in works]

    def _on_host(self) -> bool:
        """Whether messages lie in memory of the host; the same on all ranks of a job."""
        kinds = {
            shard.device.type for shards in (self.source, self.target) for shard in shards.values()
        }
        config = dist.get_backend_config()
        return all(kind == "cpu" or f"{kind}:gloo" in config for kind in kinds)

    def _bucket(self, pieces: Sequence[Piece], like: Shards) -> torch.Tensor:
        where = like[pieces[0].move].device
        if dist.is_initialized() and f"{where.type}:gloo" in dist.get_backend_config():
            where = torch.device("cpu")  # gloo sends and reads memory of the host alone
        # Used again and again, as the allocator keeps some of what it gets back.
        if self._free:
            return self._free.pop()
        return torch.empty(self._schedule.largest_message, dtype=torch.uint8, device=where)

    def _unpack_and_free(self, wave: Wave, pieces: Sequence[Piece], bucket: torch.Tensor) -> None:
        self.unpack(wave, pieces, bucket)
        self._free.append(bucket)

    def _seen(
        self, wave: Wave, bucket: torch.Tensor, pieces: Sequence[Piece]
    ) -> Iterator[torch.Tensor]:
        """Yield the boxes of a message as parts of it."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        for piece in pieces:
            dtype = self._wire[wave[0]][piece.move]
            if dtype not in typed:
                typed[dtype] = bucket.view(dtype)
            at = piece.message
            yield typed[dtype].as_strided(at.shape, at.strides, at.offset)

    def _part(self, shards: Shards, place: int, box: Box, region: Region) -> torch.Tensor:
        """Return the part of a shard that a box is."""
        shard, region = shards[place], self._region(shards, place, box, region)
        at = shard.storage_offset() + region.offset
        return shard.as_strided(region.shape, region.strides, at)

    def _region(self, shards: Shards, place: int, box: Box, region: Region) -> Region:
        """Return where a box lies in a shard, given where it does if that is contiguous."""
        shard = shards[place]
        if shard.is_contiguous():
            return region
        of_source = shards is self.source
        move = self.plan.moves[place]
        held = (move.source if of_source else move.target).intervals(self.device)
        return region_of(move, box, shard.stride(), held, of_source=of_source)


def _checked_work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is part of the job"
    return work


@cache
def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _all(acts: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def act() -> None:
        for one in acts:
            one()

    return act


def _default_device() -> torch.device:
    nccl_only = dist.is_initialized() and "gloo" not in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")


def _shard_of(value: object, device: int, *, alone: bool) -> torch.Tensor | None:
    if isinstance(value, DTensor):
        return value.shards.get(device)
    if isinstance(value, torch.distributed.tensor.DTensor):
        from shardspec.interop.torch_dtensor import local_of

        return local_of(value)
    if alone and isinstance(value, torch.Tensor):
        return value
    return None
