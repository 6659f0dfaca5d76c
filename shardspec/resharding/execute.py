"""Carrying a reshard plan out: by messages between ranks, or between devices of one process.

One message a pair of devices and wave: boxes are packed straight from the tensors' memory into a
bucket, and unpacked from it into the memory of the results. While one wave is on its way, the next
one is packed.
"""

import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardspec.comm.agreement import description
from shardspec.comm.communicator import Communicator
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.dtensor import DTensor
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.mesh import DeviceMesh
from shardspec.resharding.copies import StateCopies, flat_state
from shardspec.resharding.device_shards import DeviceShards
from shardspec.text import shown


@torch.no_grad()
def run_plan(
    plan: StateCopies,
    state: Mapping[str, object],
    out: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Convert a state dict; see `shardspec.resharding.plan.ReshardPlan.run`."""
    state, out = flat_state(state), None if out is None else flat_state(out)
    if dist.is_available() and dist.is_initialized():
        return _run_in_job(plan, state, out)
    held = {device: DeviceShards(plan, device, state, out, alone=False) for device in plan.devices}
    if problems := [problem for one in held.values() for problem in one.problems]:
        raise LayoutError(problems[0])
    for one in held.values():
        one.allocate()
        one.keep()
    for wave in sorted({wave for one in held.values() for wave in one.schedule.sends}):
        for device, one in held.items():
            for peer, message in one.schedule.sends.get(wave, {}).items():
                bucket = one.pack(wave, message)
                held[peer].unpack(wave, held[peer].schedule.receives[wave][device], bucket)
    return _results(plan, held, out) | _values_of(plan, state)


def _run_in_job(
    plan: StateCopies, state: Mapping[str, object], out: Mapping[str, object] | None
) -> dict[str, Any]:
    rank = dist.get_rank()
    if rank not in plan.devices:
        return {}
    mesh = DeviceMesh(plan.devices, (len(plan.devices),))
    communicator = ProcessGroupCommunicator.of(mesh)
    one = DeviceShards(plan, rank, state, out, alone=True)
    problem = one.problems[0] if one.problems else "none"
    # The number of stages follows from prices, which other processors might round otherwise.
    stages = str(len(plan.stages))
    words = {"reshard plan": plan.digest[:12], "stages": stages, "problem": problem}
    kinds = {shard.device.type for shard in one.source.values()}
    # Held by one thread at a time, and compared on all ranks before the first byte.
    with communicator.conversion(description(words), min(kinds, default="")) as home:
        if one.problems:
            raise LayoutError(problem)
        values = _agreed_values(plan, state, communicator, rank) if plan.values else {}
        one.allocate()
        memory = communicator.peer_memory
        try:
            if memory is not None and home == "cpu" and not plan.casts:
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


def _values_of(plan: StateCopies, state: Mapping[str, object]) -> dict[str, object]:
    return {there: state[here] for here, there in plan.values if here in state}


def _agreed_values(
    plan: StateCopies,
    state: Mapping[str, object],
    communicator: ProcessGroupCommunicator,
    rank: int,
) -> dict[str, object]:
    """Return the plain values, which are the same on all ranks that have any."""
    told = communicator.gather({rank: _values_of(plan, state)})
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
    plan: StateCopies, held: Mapping[int, DeviceShards], out: Mapping[str, object] | None
) -> dict[str, Any]:
    for one in held.values():
        for place, shard in one.tied:
            if shard.data_ptr() != one.target[place].data_ptr():
                shard.copy_(one.target[place])
    found: dict[str, Any] = {}
    communicators: dict[DeviceMesh, Communicator] = {}
    for place, move in enumerate(plan.moves):
        shards = {d: one.target[place] for d, one in held.items() if place in one.target}
        if not shards:
            continue
        if out is not None:
            found[move.target_name] = out[move.target_name]
            continue
        mesh = move.target.mesh
        made = DTensor.from_shards(shards, move.target, communicators.get(mesh))
        communicators[mesh] = made.communicator
        found[move.target_name] = made
    for tie in plan.ties:
        first = plan.moves[tie.first].target_name
        if first in found:
            found[tie.target_name] = found[first] if out is None else out[tie.target_name]
    return found
