"""Carrying a reshard plan out: by messages between ranks, or between devices of one process.

One message a pair of devices and wave: boxes are packed straight from the tensors' memory into a
bucket, and unpacked from it into the memory of the results. While one wave is on its way, the next
one is packed. Where ranks may read each other's memory, each reads what it wants instead.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardspec.boxes import box_shape
from shardspec.comm.agreement import description, on_all_ranks
from shardspec.comm.communicator import Communicator
from shardspec.comm.messages import Addressed, start_messages
from shardspec.comm.peer_memory import Arrays, Ints, PeerMemory, Region
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.dtypes import item_bytes
from shardspec.errors import CommunicatorError, LayoutError, ShardSpecError
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.copies import Groups, StateCopies
from shardspec.resharding.given import (
    DeviceGiven,
    Given,
    State,
    Told,
    agreed_ties,
    agreed_values,
    given_to,
    shape_and_dtype,
    torch_dtype,
)
from shardspec.resharding.receipts import Receipt, Wanted, receipt_of
from shardspec.resharding.stages import (
    Message,
    Piece,
    StateCopy,
    Wave,
    message_bytes,
    region_of,
)
from shardspec.tensor.dtensor import DTensor
from shardspec.text import counted

Shards: TypeAlias = dict[int, torch.Tensor]
"""Shards of one device by the tensor's place in the plan."""
Finish: TypeAlias = Callable[[], None]
"""Waits for the messages of a wave, and unpacks them."""


@torch.no_grad()
def run_plan(
    plan: StateCopies, state: State, out: State | None = None, wanted: Wanted | None = None
) -> tuple[dict[str, Any], Receipt | None]:
    """Convert a state dict; see `shardspec.resharding.plan.ReshardPlan.run`."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_rank() not in plan.devices:
            return {}, None
        mesh = DeviceMesh(plan.devices, (len(plan.devices),))
        communicator = ProcessGroupCommunicator.of(mesh)
        with communicator.telling(plan.meshes):
            return _run_in_job(plan, state, out, communicator, wanted)
    given = given_to(plan, state, out, plan.devices, alone=False)
    ties = agreed_ties(plan, [given.told])
    values = agreed_values(plan, {0: given.told.values})
    moving = plan.without_ties(ties)
    held = {device: DeviceShards(moving, device, one) for device, one in given.devices.items()}
    # Devices may share what is filled.
    for one in held.values():
        one.allocate()
        one.clear()
    for one in held.values():
        one.keep()
    for wave in sorted({wave for device in held for wave in moving.schedule(device).sends}):
        for device, one in held.items():
            for peer, message in moving.schedule(device).sends.get(wave, {}).items():
                bucket = one.pack(wave, message)
                held[peer].unpack(wave, moving.schedule(peer).receives[wave][device], bucket)
    results = _results(plan, ties, held, given) | values
    if wanted is None:
        return results, None
    with _marking(given, f"version {wanted.version} did not arrive"):
        return results, receipt_of(plan, ties, held, lambda found: found, wanted)


def _run_in_job(
    plan: StateCopies,
    state: State,
    out: State | None,
    communicator: ProcessGroupCommunicator,
    wanted: Wanted | None,
) -> tuple[dict[str, Any], Receipt | None]:
    rank = dist.get_rank()
    given: Given | None = None
    cause: Exception | None = None
    device_type = ""
    try:
        given = given_to(plan, state, out, (rank,), alone=True)
        told, device_type = given.told, _device_type(given.devices[rank])
    except Exception as error:  # whatever it is, the other ranks would wait for this one
        cause, told = error, Told(_problem(error), b"", {}, (), 0, False)
    # Held by one thread at a time, and compared on all ranks before the first byte.
    facts = {"reshard plan": plan.digest[:12]}
    if wanted is not None:
        facts["with a receipt of version"] = str(wanted.version)
    words = description(facts)
    with communicator.conversion(words, device_type, plan.meshes, {rank: told}) as (home, every):
        _require_no_problem({peer: one.problem for peer, one in every.items()}, cause)
        assert given is not None, "this rank has no problem either"
        values = agreed_values(plan, {peer: one.values for peer, one in every.items()})
        ties = agreed_ties(plan, every.values())
        _compare_stages({peer: one.num_stages for peer, one in every.items()})
        moving = plan.without_ties(ties)
        if ties and moving.hosts is not None:
            _compare_stages(communicator.gather({rank: len(moving.stages)}))
        one = DeviceShards(moving, rank, given.devices[rank])
        one.allocate()
        casts = any(move.source.dtype != move.target.dtype for move in plan.moves)
        memory = communicator.peer_memory if home == "cpu" and not casts else None
        if memory is None:
            one.reserve()
        if memory is None or not all(other.fills for other in every.values()):
            communicator.gather({rank: None})  # if a rank had no memory for it, all hear of it
        one.clear()
        try:
            if memory is not None:
                one.read_peers(memory)
            else:
                one.exchange_all(communicator.message_tag)
        except (CommunicatorError, RuntimeError) as error:
            to = "" if wanted is None else f", to version {wanted.version},"
            why = f"reshard plan {plan.digest[:12]}{to} failed on the way, so `out` is half written"
            for value in (given.out or {}).values():
                if isinstance(value, DTensor):
                    value.mark_unusable(f"{why}: {error}")
            raise CommunicatorError(f"{why}; the job cannot go on: {error}") from error
        held = {rank: one}
        results = _results(plan, ties, held, given) | values
        if wanted is None:
            return results, None
        with _marking(given, f"version {wanted.version} did not arrive"):
            return results, receipt_of(plan, ties, held, communicator.gather, wanted)


@contextmanager
def _marking(given: Given, why: str) -> Iterator[None]:
    """Let DTensors of `out` say that they are not to be read if something is raised."""
    try:
        yield
    except BaseException as error:
        for value in (given.out or {}).values():
            if isinstance(value, DTensor):
                value.mark_unusable(f"{why}: {error}")
        raise


def _device_type(given: DeviceGiven) -> str:
    """Return the kind of device that all shards of this rank are on; empty if it has none."""
    names: dict[str, str] = {}
    for shards, label in ((given.source, "{!r}"), (given.out, "out[{!r}]")):
        for name, shard in shards.items():
            names.setdefault(shard.device.type, label.format(name))
    if len(names) > 1:
        (one, first), (other, second) = list(names.items())[:2]
        raise LayoutError(f"{first} is on {one} and {second} on {other}; move them to one kind")
    return next(iter(names), "")


def _problem(error: Exception) -> str:
    kind = "" if isinstance(error, LayoutError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def _require_no_problem(problems: Mapping[int, str], cause: Exception | None) -> None:
    """Raise the same on every rank if one has a problem; an error not of ours where it was."""
    failed = {peer: problem for peer, problem in problems.items() if problem}
    if cause is not None and not isinstance(cause, ShardSpecError):
        raise on_all_ranks(cause)  # they have heard of it
    if failed:
        peer, problem = next(iter(failed.items()))
        everywhere = len(set(problems.values())) == 1
        text = problem if everywhere else f"rank {peer}: {problem}"
        raise on_all_ranks(LayoutError(text)) from cause


def _compare_stages(counts: Mapping[int, int]) -> None:
    """Raise on every rank if plans differ: prices may round otherwise on another processor."""
    first = min(counts)
    for peer, count in counts.items():
        if count != counts[first]:
            raise CommunicatorError(
                f"rank {peer} has a plan of {counted(count, 'stage')} where rank {first} has "
                f"{counts[first]}; plan on processors of one kind, or without links"
            )


def _results(
    plan: StateCopies, ties: Groups, held: Mapping[int, "DeviceShards"], given: Given
) -> dict[str, Any]:
    """Return what was filled, in the order of the state dict; of `ties` the first was moved."""
    filled: dict[str, Any] = {}
    communicators: dict[DeviceMesh, Communicator] = {}
    moved = next(iter(held.values())).plan.moves
    for place, move in enumerate(moved):
        shards = {d: one.target[place] for d, one in held.items() if place in one.target}
        if shards and given.out is not None:
            filled[move.target_name] = given.out[move.target_name]
        elif shards:
            mesh = move.target.mesh
            made = DTensor.from_shards(shards, move.target, communicators.get(mesh))
            communicators[mesh] = made.communicator
            filled[move.target_name] = made
    for first, *others in ties:
        name, *names = (plan.moves[place].target_name for place in (first, *others))
        for other in names if name in filled else ():
            filled[other] = filled[name] if given.out is None else given.out[other]
            for device in given.devices.values():
                both = [device.out[n] for n in (other, name) if n in device.out]
                # They are the same memory, or apart.
                if both and both[0].data_ptr() != both[1].data_ptr():
                    both[0].copy_(both[1])
    places = {name: place for place, name in enumerate(given.names)}
    order = {m.target_name: places.get(m.source_name, len(places)) for m in plan.moves}
    return dict(sorted(filled.items(), key=lambda item: order[item[0]]))


class DeviceShards:
    """The shards of one device, and what it does with them."""

    def __init__(self, plan: StateCopies, device: int, given: DeviceGiven) -> None:
        self.plan, self.device = plan, device
        self._free: list[torch.Tensor] = []
        """Buckets that hold no message."""
        places = list(enumerate(plan.moves))
        before, after = given.source, given.out
        self.source = {n: before[m.source_name] for n, m in places if m.source_name in before}
        self.target = {n: after[m.target_name] for n, m in places if m.target_name in after}
        self._given = tuple(self.target)

    def allocate(self) -> None:
        """Make the results that were not given."""
        where = next(iter(self.source.values())).device if self.source else _default_device()
        made: dict[str, torch.Tensor] = {}
        for place, move in enumerate(self.plan.moves):
            name = move.target_name
            if place not in self.target and self.device in move.target.mesh:
                if name not in made:
                    shape, dtype = shape_and_dtype(move.target, self.device)
                    # Zeros: what no tensor of the source fills is padding.
                    made[name] = torch.zeros(shape, dtype=dtype, device=where)
                self.target[place] = made[name]

    def clear(self) -> None:
        """Write zeros to the results that were given and have padding."""
        for place in self._given:
            if self.plan.moves[place].target_name in self.plan.padded:
                self.target[place].zero_()

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

    def reserve(self) -> None:
        """Make the buckets of the first wave."""
        (sends, receives, _), shards = self.plan.schedule(self.device), (self.source or self.target)
        if waves := {*sends, *receives}:
            peers = [*sends.get(min(waves), ()), *receives.get(min(waves), ())]
            self._free = [self._bucket(next(iter(shards.values()))) for _ in peers]

    def exchange_all(self, tag: int) -> None:
        """Carry the plan out by messages with a tag."""
        schedule = self.plan.schedule(self.device)
        stage = 0
        before: Finish = self.keep
        for wave in sorted({*schedule.sends, *schedule.receives}):
            if wave[0] > stage:
                before()
                stage, before = wave[0], lambda: None
            # What is received in the wave before is unpacked while this one travels.
            finish = self._start(wave, tag)
            before()
            before = finish
        before()

    def _start(self, wave: Wave, tag: int) -> Finish:
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
        works = start_messages(going, coming, tag)

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
            dtype = torch_dtype(move.target.dtype if wave[0] else move.wire_dtype)
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
        # What autograd has kept of them is no longer there; torch does not see the writing.
        increment_version(list(self.target.values()))
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


def _default_device() -> torch.device:
    nccl_only = dist.is_initialized() and "gloo" not in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")
