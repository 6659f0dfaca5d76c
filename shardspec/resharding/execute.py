"""Carrying a reshard plan out: by messages between ranks, or between devices of one process.

One message a pair of devices and wave: boxes are packed straight from the tensors' memory into a
bucket, and unpacked from it into the memory of the results. While one wave is on its way, the next
one is packed. Where ranks may read each other's memory, each reads what it wants instead.
"""

import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec.boxes import box_shape
from shardspec.comm.agreement import description
from shardspec.comm.communicator import Communicator
from shardspec.comm.messages import Addressed, start_messages
from shardspec.comm.peer_memory import Arrays, Ints, PeerMemory, Region
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.dtensor import DTensor
from shardspec.dtypes import item_bytes
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.interop.torch_dtensor import local_of
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.resharding.copies import StateCopies, flat_state
from shardspec.resharding.stages import (
    Message,
    Piece,
    StateCopy,
    Wave,
    message_bytes,
    region_of,
)
from shardspec.text import shown

_TAG: Final = 0x5EED0000
"""Tag of the messages, so that those of single conversions are not taken for them."""

State: TypeAlias = Mapping[str, object]
Shards: TypeAlias = dict[int, torch.Tensor]
"""Shards of one device by the tensor's place in the plan."""
Finish: TypeAlias = Callable[[], None]
"""Waits for the messages of a wave, and unpacks them."""


@torch.no_grad()
def run_plan(plan: StateCopies, state: State, out: State | None = None) -> dict[str, Any]:
    """Convert a state dict; see `shardspec.resharding.plan.ReshardPlan.run`."""
    state, out = flat_state(state), None if out is None else flat_state(out)
    values = {there: state[here] for here, there in plan.values if here in state}
    if dist.is_available() and dist.is_initialized():
        return _run_in_job(plan, state, out, values)
    held = {device: DeviceShards(plan, device, state, out, alone=False) for device in plan.devices}
    for one in held.values():
        one.allocate()
        one.keep()
    for wave in sorted({wave for device in held for wave in plan.schedule(device).sends}):
        for device, one in held.items():
            for peer, message in plan.schedule(device).sends.get(wave, {}).items():
                bucket = one.pack(wave, message)
                held[peer].unpack(wave, plan.schedule(peer).receives[wave][device], bucket)
    return _results(plan, held, out) | values


def _run_in_job(
    plan: StateCopies, state: State, out: State | None, values: dict[str, object]
) -> dict[str, Any]:
    rank = dist.get_rank()
    if rank not in plan.devices:
        return {}
    communicator = ProcessGroupCommunicator.of(DeviceMesh(plan.devices, (len(plan.devices),)))
    one: DeviceShards | None = None
    problem = "none"
    try:
        one = DeviceShards(plan, rank, state, out, alone=True)
    except LayoutError as error:
        problem = str(error)
    kinds = {shard.device.type for shard in one.source.values()} if one else set()
    # The number of stages follows from prices, which other processors might round otherwise.
    stages = str(len(plan.stages))
    words = {"reshard plan": plan.digest[:12], "stages": stages, "problem": problem}
    # Held by one thread at a time, and compared on all ranks before the first byte.
    with communicator.conversion(description(words), min(kinds, default="")) as home:
        if one is None:
            raise LayoutError(problem)
        if plan.values:
            values = _agreed_values(plan, communicator.gather({rank: values}))
        one.allocate()
        memory = communicator.peer_memory
        try:
            casts = any(move.source.dtype != move.target.dtype for move in plan.moves)
            if memory is not None and home == "cpu" and not casts:
                one.read_peers(memory)
            else:
                one.exchange_all()
        except (CommunicatorError, RuntimeError) as error:
            why = f"reshard plan {plan.digest[:12]} failed on the way, so `out` is half written"
            for value in (out or {}).values():
                if isinstance(value, DTensor):
                    value.mark_unusable(f"{why}: {error}")
            raise CommunicatorError(f"{why}; the job cannot go on: {error}") from error
    return _results(plan, {rank: one}, out) | values


def _agreed_values(plan: StateCopies, told: Mapping[int, dict[str, object]]) -> dict[str, object]:
    """Return the plain values, which are the same on all ranks that have any."""
    found: dict[str, object] = {}
    for _, name in plan.values:
        having = {peer: values[name] for peer, values in told.items() if name in values}
        if not having:
            raise LayoutError(f"no rank has the value {name!r}, which the plan carries")
        first = min(having)
        for peer, value in having.items():
            if pickle.dumps(value) != pickle.dumps(having[first]):
                raise LayoutError(
                    f"{name!r} is {shown(having[first])} on rank {first} and {shown(value)} on "
                    f"rank {peer}; make them equal, or leave it out"
                )
        found[name] = having[first]
    return found


def _results(
    plan: StateCopies, held: Mapping[int, "DeviceShards"], out: State | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    communicators: dict[DeviceMesh, Communicator] = {}
    for place, move in enumerate(plan.moves):
        shards = {d: one.target[place] for d, one in held.items() if place in one.target}
        if shards and out is not None:
            found[move.target_name] = out[move.target_name]
        elif shards:
            mesh = move.target.mesh
            made = DTensor.from_shards(shards, move.target, communicators.get(mesh))
            communicators[mesh] = made.communicator
            found[move.target_name] = made
    for one in held.values():
        for place, shard in one.tied:
            if shard.data_ptr() != one.target[place].data_ptr():
                shard.copy_(one.target[place])
    for tie in plan.ties:
        first = plan.moves[tie.first].target_name
        if first in found:
            found[tie.target_name] = found[first] if out is None else out[tie.target_name]
    return found


class DeviceShards:
    """The shards of one device, and what it does with them.

    Where the device is `alone` in its process, plain tensors are taken for its shards. Raises
    LayoutError if these are not as the plan says.
    """

    def __init__(
        self, plan: StateCopies, device: int, state: State, out: State | None, *, alone: bool
    ) -> None:
        self.plan, self.device, self._alone = plan, device, alone
        self._free: list[torch.Tensor] = []
        """Buckets that hold no message."""
        # Of threads that reshard at once, each has other meshes.
        self._tag = _TAG + zlib.crc32(repr(plan.devices).encode()) % 0xFFFF
        moves, ties = plan.moves, plan.ties
        due = {move.source_name: move.source for move in moves if device in move.source.mesh}
        before = {name: self._shard(name, at, state, filled=False) for name, at in due.items()}
        due = {move.target_name: move.target for move in moves}
        due |= {tie.target_name: moves[tie.first].target for tie in ties}
        after = {
            name: self._shard(name, layout, out, filled=True)
            for name, layout in due.items()
            if out is not None and device in layout.mesh
        }
        places = list(enumerate(moves))
        self.source = {n: before[m.source_name] for n, m in places if m.source_name in before}
        self.target = {n: after[m.target_name] for n, m in places if m.target_name in after}
        self.tied = [(t.first, after[t.target_name]) for t in ties if t.target_name in after]
        """Shards to be filled with what has come to a place in the plan."""
        known = {m.source_name for m in moves} | {t.source_name for t in ties}
        known |= {*dict(plan.values), *plan.dropped}
        if alone and (unknown := sorted(state.keys() - known)):
            raise LayoutError(
                f"the state dict has {shown(unknown[0])}, which the plan lacks; leave it out, or "
                "make the plan with it"
            )
        self._check_memory()

    def _shard(self, name: str, layout: Layout, values: State, *, filled: bool) -> torch.Tensor:
        """Return the shard of a tensor, if it is as the plan says."""
        if name not in values:
            raise LayoutError(f"tensor {name!r} is missing from the state dict")
        shard: object = values[name]
        if isinstance(shard, DTensor):
            shard = shard.shards.get(self.device)
        elif isinstance(shard, TorchDTensor):
            shard = local_of(shard)
        elif not self._alone:
            shard = None
        if not isinstance(shard, torch.Tensor):
            raise LayoutError(
                f"{name!r} is a {type(values[name]).__name__}; give a DTensor of shardspec or of "
                "torch, or the shard of this rank as a tensor"
            )
        shape, dtype = _shape_and_dtype(layout, self.device)
        if shard.shape != shape or shard.dtype != dtype:
            raise LayoutError(
                f"the shard of {name!r} on device {self.device} is {tuple(shard.shape)} of "
                f"{str(shard.dtype).removeprefix('torch.')}; under {layout} it is {shape} of "
                f"{layout.dtype}"
            )
        if not (shard.is_conj() or shard.is_neg()):
            return shard
        # The values themselves are to lie in memory.
        if filled:
            raise LayoutError(
                f"out[{name!r}] is a view that conjugates or negates; give tensors of its own"
            )
        return shard.resolve_conj().resolve_neg()

    def _check_memory(self) -> None:
        """Refuse results that share memory with the source or with each other."""
        memory = {
            shard.untyped_storage().data_ptr() for shard in self.source.values() if shard.numel()
        }
        spans: dict[str, tuple[int, int]] = {}
        for place, shard in self.target.items():
            if not shard.numel():
                continue
            name = self.plan.moves[place].target_name
            if shard.untyped_storage().data_ptr() in memory:
                raise LayoutError(
                    f"out[{name!r}] shares memory with the source; give tensors of its own"
                )
            if shard.is_contiguous():
                spans[name] = shard.data_ptr(), shard.data_ptr() + shard.nbytes
        ordered = sorted((*span, name) for name, span in spans.items())
        for (_, end, name), (start, _, other) in pairwise(ordered):
            if start < end:
                raise LayoutError(
                    f"out[{name!r}] and out[{other!r}] share memory; give each a tensor of its own"
                )

    def allocate(self) -> None:
        """Make the results that were not given, and clear those that have padding."""
        where = next(iter(self.source.values())).device if self.source else _default_device()
        made: dict[str, torch.Tensor] = {}
        for place, move in enumerate(self.plan.moves):
            name = move.target_name
            if place in self.target:
                if name in self.plan.padded:
                    self.target[place].zero_()
            elif self.device in move.target.mesh:
                if name not in made:
                    shape, dtype = _shape_and_dtype(move.target, self.device)
                    # Zeros: what no tensor of the source fills is padding.
                    made[name] = torch.zeros(shape, dtype=dtype, device=where)
                self.target[place] = made[name]

    def keep(self) -> None:
        """Copy what the device has already."""
        for kept in self.plan.kept(self.device):
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
        schedule = self.plan.schedule(self.device)
        stage = 0
        before: Finish = self.keep
        for wave in sorted({*schedule.sends, *schedule.receives}):
            if wave[0] > stage:
                before()
                stage, before = wave[0], lambda: None
            # What is received in the wave before is unpacked while this one travels.
            finish = self._start(wave)
            before()
            before = finish
        before()

    def _start(self, wave: Wave) -> Finish:
        """Start the messages of a wave; return what ends it."""
        schedule = self.plan.schedule(self.device)
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
        largest = self.plan.schedule(self.device).largest_message
        return torch.empty(largest, dtype=torch.uint8, device=where)

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

    def _parts(self, shards: Shards, piece: Piece | StateCopy) -> Iterator[torch.Tensor]:
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
        for number, stage in enumerate(self.plan.stages):
            name = f"reshard plan {self.plan.digest[:12]}" + (f" stage {number}" if number else "")
            streams = stage.streams(self.device)
            readers = {receiver for _, receiver in streams} - {self.device}
            # What the device has already it reads from itself.
            wanted = {self.device: [] if number else self.plan.kept(self.device)}
            wanted |= {one: copies for (one, to), copies in streams.items() if to == self.device}
            arrays = partial(self._arrays, number, wanted, target)
            memory.fill(name, target if number else source, readers, set(wanted), arrays)

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

    def _arrays(
        self, stage: int, wanted: Mapping[int, list[StateCopy]], ours: Ints, peer: int, theirs: Ints
    ) -> Iterator[Arrays]:
        """Yield where boxes lie at a peer, and where they belong here, by both's tables."""
        for copy in wanted[peer]:
            move = self.plan.moves[copy.places[0]]
            layouts = (move.target if stage else move.source), move.target
            tables = [table[np.asarray(copy.places)] for table in (theirs, ours)]
            strides = np.stack([table[:, 1:] for table in tables], axis=1)
            same = not (strides != strides[0]).any()
            for row in strides[:1] if same else np.unique(strides, axis=0):
                alike = slice(None) if same else (strides == row).all(axis=(1, 2))
                regions = []
                for side, owner in enumerate((copy.holders[0], self.device)):
                    layout, of_source = layouts[side], not (side or stage)
                    steps = tuple(row[side, : len(layout.global_shape)].tolist())
                    shape, steps, at = region_of(
                        layout, move.view, copy.box, steps, owner, of_source=of_source
                    )
                    regions.append(Region(at, shape, steps, item_bytes(layout.dtype)))
                yield Arrays(regions[0], regions[1], tables[0][alike, 0], tables[1][alike, 0])


@cache
def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


@lru_cache(maxsize=4096)
def _shape_and_dtype(layout: Layout, device: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Return what the shard of a device is like."""
    return layout.local_shape(device), _torch_dtype(layout.dtype)


def _default_device() -> torch.device:
    nccl_only = dist.is_initialized() and "gloo" not in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")
