"""Runs a plan for a state dict: copies every box to the device that needs it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardspec.comm.agreement import description, failure_text
from shardspec.comm.communicator import Communicator
from shardspec.comm.consensus import Failure, raise_first
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.senders import Copy
from shardspec.comm.transports.stage import Stage, Transport, Wave
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.inputs import (
    DeviceInputs,
    Inputs,
    State,
    Statement,
    agreed_values,
    check_equal,
    checked_inputs,
    unequal_pair,
)
from shardspec.resharding.receipts import Receipt, receipt_of
from shardspec.resharding.stages import StateCopies, region_of
from shardspec.tensor.dtensor import DTensor
from shardspec.tensor.shards import shape_and_dtype, torch_dtype
from shardspec.text import counted


@torch.no_grad()
def run_reshard(
    plan: StateCopies,
    state: State,
    out: State | None = None,
    *,
    receipt: bool = False,
    version: int | None = None,
) -> tuple[dict[str, Any], Receipt | None]:
    """Copy the tensors of a state dict to their new layouts; see `ReshardPlan.run`."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_rank() not in plan.devices:
            if receipt:
                raise LayoutError(
                    f"rank {dist.get_rank()} is on no mesh of the plan, so it gets no receipt; "
                    "omit receipt= there"
                )
            return {}, None
        mesh = DeviceMesh(plan.devices, (len(plan.devices),))
        communicator = ProcessGroupCommunicator.of(mesh)
        with communicator.telling():
            return _run_in_job(plan, state, out, communicator, receipt=receipt, version=version)
    inputs = checked_inputs(plan, state, out, plan.devices, alone=False)
    check_equal(unequal_pair(plan, inputs.statement.shared, inputs.devices.values()))
    values = agreed_values(plan, {0: inputs.statement.values})
    shards = {device: DeviceShards(plan, device, each) for device, each in inputs.devices.items()}
    # Devices may share tensors of `out`, so all are cleared before the first copy.
    for each in shards.values():
        each.allocate()
        each.clear()
    for number in range(len(plan.stages)):
        stages = {device: each.stage(number) for device, each in shards.items()}
        for stage in stages.values():
            for wave in stage.waves(None):
                for sender, message in wave.receives.items():
                    stage.copy(message, stages[sender])
    results = _results(plan, shards, inputs) | values
    if not receipt:
        return results, None
    with _marking(inputs, f"version {version} did not arrive"):
        return results, receipt_of(plan, shards, lambda message: message, version)


def _run_in_job(
    plan: StateCopies,
    state: State,
    out: State | None,
    communicator: ProcessGroupCommunicator,
    *,
    receipt: bool,
    version: int | None,
) -> tuple[dict[str, Any], Receipt | None]:
    rank = dist.get_rank()
    inputs: Inputs | None = None
    cause: Exception | None = None
    device_type = ""
    try:
        inputs = checked_inputs(plan, state, out, (rank,), alone=True)
        statement, device_type = inputs.statement, _device_type(inputs.devices[rank])
    except Exception as error:  # whatever it is, the other ranks would wait for this one
        cause = error
        statement = Statement(Failure(LayoutError, failure_text(error)), b"", (), 0, False)
    # One thread converts at a time, and ranks compare their plans before the first byte.
    facts = {"reshard plan": plan.digest[:12]}
    if receipt:
        facts["with a receipt of version"] = str(version)
    words = description(facts)
    with communicator.conversion(words, device_type, {rank: statement}) as (
        home,
        statements,
    ):
        raise_first({peer: of_peer.failure for peer, of_peer in statements.items()}, cause)
        assert inputs is not None, "this rank has not failed either"
        values = agreed_values(plan, {peer: of_peer.values for peer, of_peer in statements.items()})
        _compare_stages({peer: of_peer.num_stages for peer, of_peer in statements.items()})
        if pairs := sorted({pair for other in statements.values() for pair in other.shared}):
            own_pair = unequal_pair(plan, pairs, inputs.devices.values())
            unequal = communicator.gather({rank: own_pair})
            check_equal(next((pair for pair in unequal.values() if pair is not None), None))
        own = DeviceShards(plan, rank, inputs.devices[rank])
        own.allocate()
        casts = any(move.source.dtype != move.target.dtype for move in plan.moves)
        transport = communicator.transport(home, casts=casts)
        reserved = own.reserve(transport)
        if reserved or not all(other.fills for other in statements.values()):
            communicator.gather({rank: None})  # fails on all ranks if one lacks memory
        own.clear()
        to = f", to version {version}," if receipt else ""
        why = f"reshard plan {plan.digest[:12]}{to} failed on the way, so `out` is half written"
        try:
            with _marking(inputs, why), communicator.moving(transport):
                transport.move(own.stage(number) for number in range(len(plan.stages)))
        except (CommunicatorError, RuntimeError) as error:
            raise CommunicatorError(f"{why}: {error}") from error
        shards = {rank: own}
        results = _results(plan, shards, inputs) | values
        if not receipt:
            return results, None
        with _marking(inputs, f"version {version} did not arrive"):
            return results, receipt_of(plan, shards, communicator.gather, version)


@contextmanager
def _marking(inputs: Inputs, why: str) -> Iterator[None]:
    """Mark the DTensors of `out` as unusable if an error in the block leaves them half filled."""
    try:
        yield
    except BaseException as error:
        for value in (inputs.out or {}).values():
            if isinstance(value, DTensor):
                value._mark_unusable(f"{why}: {error}")
        raise


def _device_type(inputs: DeviceInputs) -> str:
    """Return the device type of all shards of this rank, "cuda" or "cpu"; "" if it has none."""
    names: dict[str, str] = {}
    for shards, label in ((inputs.source, "{!r}"), (inputs.out, "out[{!r}]")):
        for name, shard in shards.items():
            names.setdefault(shard.device.type, label.format(name))
    if len(names) > 1:
        (device_type, first), (other_type, second) = list(names.items())[:2]
        raise LayoutError(
            f"{first} is on {device_type} and {second} on {other_type}; move both to one type"
        )
    return next(iter(names), "")


def _compare_stages(counts: Mapping[int, int]) -> None:
    """Raise CommunicatorError if ranks have different numbers of stages; `counts` are by rank."""
    first = min(counts)
    for peer, count in counts.items():
        if count != counts[first]:
            raise CommunicatorError(
                f"plans differ: rank {peer} has {counted(count, 'stage')}, rank {first} has "
                f"{counts[first]}; plan on processors of one kind, or without links"
            )


def _results(
    plan: StateCopies, of_devices: Mapping[int, "DeviceShards"], inputs: Inputs
) -> dict[str, Any]:
    """Return the new state dict: names to filled tensors and plain values."""
    filled: dict[str, Any] = {}
    communicators: dict[DeviceMesh, Communicator] = {}
    for place, move in enumerate(plan.moves):
        shards = {
            d: shard_of.target[place]
            for d, shard_of in of_devices.items()
            if place in shard_of.target
        }
        if shards and inputs.out is not None:
            filled[move.target_name] = inputs.out[move.target_name]
        elif shards:
            mesh = move.target.mesh
            made = DTensor.from_shards(shards, move.target, communicators.get(mesh))
            communicators[mesh] = made.communicator
            filled[move.target_name] = made
    places = {name: place for place, name in enumerate(inputs.names)}
    order = {m.target_name: places.get(m.source_name, len(places)) for m in plan.moves}
    return dict(sorted(filled.items(), key=lambda item: order[item[0]]))


class DeviceShards:
    """The shards of one device, from which it sends and into which it receives, stage by stage."""

    def __init__(self, plan: StateCopies, device: int, inputs: DeviceInputs) -> None:
        self.plan, self.device = plan, device
        places = list(enumerate(plan.moves))
        before, after = inputs.source, inputs.out
        self.source = {n: before[m.source_name] for n, m in places if m.source_name in before}
        self.target = {n: after[m.target_name] for n, m in places if m.target_name in after}
        self._of_out = tuple(self.target)

    def allocate(self) -> None:
        """Allocate memory for the shards of the target that `out` does not have."""
        where = next(iter(self.source.values())).device if self.source else _default_device()
        made: dict[str, torch.Tensor] = {}
        for place, move in enumerate(self.plan.moves):
            name = move.target_name
            if place not in self.target and self.device in move.target.mesh:
                if name not in made:
                    shape, dtype = shape_and_dtype(move.target, self.device)
                    # Zeros, since elements that no source tensor fills are padding.
                    made[name] = torch.zeros(shape, dtype=dtype, device=where)
                self.target[place] = made[name]

    def clear(self) -> None:
        """Fill tensors of `out` with zeros if they have padding, which nothing is copied to."""
        for place in self._of_out:
            if self.plan.moves[place].target_name in self.plan.padded:
                self.target[place].zero_()

    def reserve(self, transport: Transport) -> bool:
        """Allocate the transport's first send and receive buffers; True if it needs any."""
        shards = self.source or self.target
        return transport.reserve(self._first_wave, next(iter(shards.values()), torch.empty(0)))

    def _first_wave(self) -> tuple[int, int]:
        sends, receives, largest = self.plan.schedule(self.device)
        first = min({*sends, *receives}, default=None)
        return sum(len(turns.get(first, ())) for turns in (sends, receives) if first), largest

    def stage(self, number: int) -> Stage:
        """Return what the device sends and receives in stage `number` of the plan."""
        streams = self.plan.stages[number].streams(self.device)
        name = f"reshard plan {self.plan.digest[:12]}" + (f" stage {number}" if number else "")
        return Stage(
            name,
            self.device,
            frozenset(receiver for _, receiver in streams) - {self.device},
            frozenset(sender for sender, _ in streams) - {self.device},
            self.target if number else self.source,
            self.target,
            partial(self._region, of_source=not number),
            partial(self._region, of_source=False),
            partial(self._dtype, number),
            partial(self._waves, number),
        )

    def _region(
        self, copy: Copy, strides: tuple[int, ...], device: int, *, of_source: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        move = self.plan.moves[copy.places[0]]
        layout = move.source if of_source else move.target
        steps = strides[: len(layout.global_shape)]
        return region_of(layout, move.view, copy.box, steps, device, of_source=of_source)

    def _dtype(self, number: int, copy: Copy) -> torch.dtype:
        move = self.plan.moves[copy.places[0]]
        # The first stage casts; later ones pass on elements of the target.
        return torch_dtype(move.target.dtype if number else move.wire_dtype)

    def _waves(self, number: int, most_bytes: int | None) -> Iterator[Wave]:
        """Yield local copies, then messages in waves of `most_bytes`; one wave if that is None."""
        inside = [copy for copy in self.plan.own_copies if copy.receiver == self.device]
        own = {self.device: inside} if inside and not number else {}
        if most_bytes is None:
            streams = self.plan.stages[number].streams(self.device)
            incoming = {
                sender: copies
                for (sender, receiver), copies in streams.items()
                if receiver == self.device
            }
            yield Wave({}, {**own, **incoming})
            return
        if own:
            yield Wave({}, own)
        sends, receives, _ = self.plan.schedule(self.device)
        for turn in sorted({*sends, *receives}):
            if turn[0] == number:
                yield Wave(sends.get(turn, {}), receives.get(turn, {}))


def _default_device() -> torch.device:
    nccl_only = dist.is_initialized() and "gloo" not in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl_only else torch.device("cpu")
