"""The shards of one device: whether they are as a plan says, and parts of them copied."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from shardspec.boxes import box_shape
from shardspec.comm.messages import Addressed, start_messages
from shardspec.comm.peer_memory import Arrays, Ints, PeerMemory
from shardspec.comm.peer_memory import Region as MemoryRegion
from shardspec.dtensor import DTensor
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.resharding.copies import StateCopies
from shardspec.resharding.schedule import (
    Message,
    Part,
    Piece,
    Schedule,
    Wanted,
    Wave,
    message_bytes,
    reads_for,
    region_of,
    schedule_for,
)
from shardspec.text import shown

_TAG: Final = 0x5EED0000
"""Of the messages, so that those of single conversions are not taken for them."""

Shards: TypeAlias = dict[int, torch.Tensor]
"""Shards of one device by the tensor's place in the plan."""
Finish: TypeAlias = Callable[[], None]
"""Waits for the messages of a wave, and unpacks them."""


class DeviceShards:
    """The shards of one device, and what it does with them.

    `problems` says how they are not as the plan says. Where the device is `alone` in its process,
    plain tensors are taken for its shards.
    """

    def __init__(
        self,
        plan: StateCopies,
        device: int,
        state: Mapping[str, object],
        out: Mapping[str, object] | None,
        *,
        alone: bool,
    ) -> None:
        self.plan, self.device, self._alone = plan, device, alone
        self.problems: list[str] = []
        self.source: Shards = {}
        self.target: Shards = {}
        self.tied: list[tuple[int, torch.Tensor]] = []
        """Shards to be filled with what has come to a place in the plan."""
        self._free: list[torch.Tensor] = []
        """Buckets that hold no message."""
        # Of threads that reshard at once, each has other meshes.
        self._tag = _TAG + zlib.crc32(repr(plan.devices).encode()) % 0xFFFF
        taken: dict[tuple[bool, str], torch.Tensor | None] = {}
        due: dict[Layout, tuple[tuple[int, ...], torch.dtype]] = {}

        def take(name: str, layout: Layout, values: Mapping[str, object], filled: bool) -> None:
            if layout not in due:
                due[layout] = layout.local_shape(device), _torch_dtype(layout.dtype)
            taken[filled, name] = self._checked(name, layout, *due[layout], values, filled=filled)

        for place, move in enumerate(plan.moves):
            for filled, name, layout, values in (
                (False, move.source_name, move.source, state),
                (True, move.target_name, move.target, out),
            ):
                if values is not None and device in layout.mesh:
                    if (filled, name) not in taken:
                        take(name, layout, values, filled)
                    if (shard := taken[filled, name]) is not None:
                        (self.target if filled else self.source)[place] = shard
        for tie in plan.ties:
            layout = plan.moves[tie.first].target
            if out is not None and device in layout.mesh:
                take(tie.target_name, layout, out, True)
                if (shard := taken[True, tie.target_name]) is not None:
                    self.tied.append((tie.first, shard))
        names = {move.source_name for move in plan.moves}
        names |= {tie.source_name for tie in plan.ties} | {name for name, _ in plan.values}
        if alone and (unknown := sorted(state.keys() - names)):
            self.problems.append(
                f"the state dict has {shown(unknown[0])}, of which the plan knows nothing; leave "
                "it out, or make the plan with it"
            )
        self._check_memory()

    def _checked(
        self,
        name: str,
        layout: Layout,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        values: Mapping[str, object],
        *,
        filled: bool,
    ) -> torch.Tensor | None:
        """Find the shard of a tensor, and whether it is as the plan says."""
        if name not in values:
            self.problems.append(f"tensor {name!r} is missing from the state dict")
            return None
        shard = _shard_of(values[name], self.device, alone=self._alone)
        if shard is None:
            self.problems.append(
                f"{name!r} is a {type(values[name]).__name__}; give a DTensor of shardspec or of "
                "torch, or the shard of this rank as a tensor"
            )
            return None
        if shard.shape != shape or shard.dtype != dtype:
            self.problems.append(
                f"the shard of {name!r} on device {self.device} is {tuple(shard.shape)} of "
                f"{str(shard.dtype).removeprefix('torch.')}; under {layout} it is {shape} of "
                f"{layout.dtype}"
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

    def _check_memory(self) -> None:
        """Results may share memory neither with the source nor with each other."""
        memory = {
            shard.untyped_storage().data_ptr() for shard in self.source.values() if shard.numel()
        }
        spans: dict[str, tuple[int, int]] = {}
        for place, shard in self.target.items():
            if not shard.numel():
                continue
            name = self.plan.moves[place].target_name
            if shard.untyped_storage().data_ptr() in memory:
                self.problems.append(
                    f"out[{name!r}] shares memory with the source; give tensors of its own"
                )
            if shard.is_contiguous():
                start = shard.data_ptr()
                spans[name] = start, start + shard.nbytes
        ordered = sorted((*span, name) for name, span in spans.items())
        for (_, end, name), (start, _, other) in pairwise(ordered):
            if start < end:
                self.problems.append(
                    f"out[{name!r}] and out[{other!r}] share memory; give each a tensor of its own"
                )
                break

    def allocate(self) -> None:
        """Make the results that were not given, and clear those that have padding."""
        for place, shard in self.target.items():
            if self.plan.padded and self.plan.moves[place].target_name in self.plan.padded:
                shard.zero_()
        where = next(iter(self.source.values())).device if self.source else _default_device()
        made: dict[str, torch.Tensor] = {}
        for place, move in enumerate(self.plan.moves):
            if place not in self.target and self.device in move.target.mesh:
                name = move.target_name
                if name not in made:
                    shape = move.target.local_shape(self.device)
                    # Zeros: what no tensor of the source fills is padding.
                    dtype = _torch_dtype(move.target.dtype)
                    made[name] = torch.zeros(shape, dtype=dtype, device=where)
                self.target[place] = made[name]

    @property
    def schedule(self) -> Schedule:
        """The messages of the device."""
        return schedule_for(self.plan, self.device)

    def keep(self) -> None:
        """Copy what the device has already."""
        for kept in self.schedule.kept:
            parts = (self._parts(shards, kept) for shards in (self.source, self.target))
            for here, there in zip(*parts, strict=True):
                there.copy_(here)

    def pack(self, wave: Wave, message: Message) -> torch.Tensor:
        """Return a message with some boxes: of the source, or of what has come in stages before."""
        shards = self.target if wave[0] else self.source
        bucket = self._bucket(shards[message[0].places[0]])
        for seen, part in self._seen(wave, bucket, message, shards):
            seen.copy_(part)
        return bucket

    def unpack(self, wave: Wave, message: Message, bucket: torch.Tensor) -> None:
        """Copy the boxes of a message to where they belong."""
        for seen, part in self._seen(wave, bucket, message, self.target):
            part.copy_(seen)

    def exchange_all(self) -> None:
        """Carry the plan out by messages."""
        schedule, stage = self.schedule, 0
        finish: Finish = lambda: None  # noqa: E731
        for wave in sorted({*schedule.sends, *schedule.receives}):
            if wave[0] > stage:
                finish()
                stage, finish = wave[0], lambda: None
            # What is received in the wave before is unpacked while this one travels.
            finish, before = self._start(wave), finish
            before()
        self.keep()
        finish()

    def _start(self, wave: Wave) -> Finish:
        """Start the messages of a wave; return what ends it."""
        schedule = self.schedule
        receives = schedule.receives.get(wave, {})
        buckets: list[torch.Tensor] = []
        coming: Addressed = []
        going: Addressed = []
        for peer, message in receives.items():
            buckets.append(self._bucket(self.target[message[0].places[0]]))
            coming.append((peer, buckets[-1][: message_bytes(message)]))
        for peer, message in schedule.sends.get(wave, {}).items():
            buckets.append(self.pack(wave, message))
            going.append((peer, buckets[-1][: message_bytes(message)]))
        works = start_messages(going, coming, self._tag)

        def finish() -> None:
            for work in works:
                work.wait()
            for bucket, message in zip(buckets, receives.values(), strict=False):
                self.unpack(wave, message, bucket)
            # Used again and again, as the allocator keeps some of what it gets back.
            self._free.extend(buckets)

        return finish

    def _bucket(self, like: torch.Tensor) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        where = like.device
        if dist.is_initialized() and f"{where.type}:gloo" in dist.get_backend_config():
            where = torch.device("cpu")  # gloo sends and reads memory of the host alone
        return torch.empty(self.schedule.largest_message, dtype=torch.uint8, device=where)

    def _seen(
        self, wave: Wave, bucket: torch.Tensor, message: Message, shards: Shards
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the boxes of a message: as parts of it, and as parts of shards."""
        for piece in message:
            move = self.plan.moves[piece.places[0]]
            # What crosses in the first stage may be cast there; then it is as in the result.
            dtype = _torch_dtype(move.target.dtype if wave[0] else move.wire_dtype)
            typed = bucket.view(dtype)
            shape, width = box_shape(piece.box), dtype.itemsize
            strides = torch.empty(shape, device="meta").stride()
            for number, part in enumerate(self._parts(shards, piece)):
                at = (piece.start + number * piece.step) // width
                yield typed.as_strided(shape, strides, at), part

    def _parts(self, shards: Shards, piece: Piece | Part) -> Iterator[torch.Tensor]:
        """Yield the parts of shards that a box of some tensors is."""
        known: tuple[int, ...] | None = None
        move, of_source = self.plan.moves[piece.places[0]], shards is self.source
        layout = move.source if of_source else move.target
        for place in piece.places:
            shard = shards[place]
            if shard.stride() != known:
                known = shard.stride()
                shape, strides, offset = region_of(
                    layout, move.view, piece.box, known, self.device, of_source=of_source
                )
            yield shard.as_strided(shape, strides, shard.storage_offset() + offset)

    def read_peers(self, memory: PeerMemory) -> None:
        """Carry the plan out by reading what is wanted where it lies in the memory of holders."""
        source, target = (self._table(shards) for shards in (self.source, self.target))
        for stage in range(len(self.plan.stages)):
            name = f"reshard plan {self.plan.digest[:12]}" + (f" stage {stage}" if stage else "")
            readers, holders, wanted = reads_for(self.plan, self.device, stage)

            def arrays(
                peer: int, table: Ints, stage: int = stage, wanted: Wanted = wanted
            ) -> Iterator[Arrays]:
                return self._arrays(stage, wanted.get(peer, []), table, target)

            memory.fill(name, target if stage else source, readers, holders, arrays)

    def _table(self, shards: Shards) -> Ints:
        """Return, by the place in the plan, where shards lie: address, and strides in bytes."""
        moves = self.plan.moves
        dims = (len(layout.global_shape) for m in moves for layout in (m.source, m.target))
        nothing = [0] * (1 + max(dims, default=0))
        rows = [nothing] * len(moves)
        for place, shard in shards.items():
            item = shard.element_size()
            row = [shard.data_ptr(), *(stride * item for stride in shard.stride())]
            rows[place] = row + nothing[len(row) :]
        return np.array(rows, dtype=np.int64).reshape(len(moves), len(nothing))

    def _arrays(self, stage: int, parts: list[Part], theirs: Ints, ours: Ints) -> Iterator[Arrays]:
        """Yield where boxes lie at their sender, and where they belong here, by both's tables."""
        for part in parts:
            move = self.plan.moves[part.places[0]]
            layouts = (move.target if stage else move.source), move.target
            tables = [table[np.asarray(part.places)] for table in (theirs, ours)]
            strides = np.stack([table[:, 1:] for table in tables], axis=1)
            same = not (strides != strides[0]).any()
            for row in strides[:1] if same else np.unique(strides, axis=0):
                alike = slice(None) if same else (strides == row).all(axis=(1, 2))
                regions = []
                for side, owner in enumerate((part.sender, self.device)):
                    layout, of_source = layouts[side], not (side or stage)
                    steps = tuple(row[side, : len(layout.global_shape)].tolist())
                    shape, steps, at = region_of(
                        layout, move.view, part.box, steps, owner, of_source=of_source
                    )
                    regions.append(MemoryRegion(at, shape, steps, item_bytes(layout.dtype)))
                yield Arrays(regions[0], regions[1], tables[0][alike, 0], tables[1][alike, 0])


@cache
def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


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
