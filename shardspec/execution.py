"""Plans carried out: every step by the communicator of the mesh it happens on."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from shardspec.boxes import Box
from shardspec.comm.agreement import description
from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import AllReduce, Exchange, ReduceScatter, Step, backward
from shardspec.layout.cross import common_mesh, exchange_to
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.plan import ConversionPlan, step_bytes, step_seconds
from shardspec.tracing import StepRecord, log_from_environment, observers, report

__all__ = ["agree_on", "mesh_text", "on_both", "run_plan", "run_step", "undo_plan"]

log_from_environment()


def run_plan(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Carry out the steps of a plan, one after the other, on the shards that are held here.

    Parameters
    ----------
    plan
        What to do.
    communicator
        Of the source's mesh.
    shards
        The shard of every addressable device of the source's mesh.

    Returns
    -------
    dict
        The shard of every addressable device of the target's mesh.

    Raises
    ------
    CommunicatorError
        If ranks are about to do different things, on each of them; or if one of them fails or does
        not come.
    """
    return _run(plan, communicator, shards, back=False)


def undo_plan(
    plan: ConversionPlan, communicator: Communicator, grads: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Carry the gradients of a plan's result back to its source, its steps undone in reverse.

    The gradient of every addressable device of the target's mesh is given. What finishes a
    reduction does so by sum or avg.
    """
    return _run(plan, communicator, grads, back=True)


def _run(
    plan: ConversionPlan,
    communicator: Communicator,
    shards: Mapping[int, torch.Tensor],
    *,
    back: bool,
) -> dict[int, torch.Tensor]:
    shards, traces, numbers = dict(shards), observers(), range(len(plan.steps))
    with _conversion(plan, communicator, shards, "backward" if back else "forward") as device:
        for number in reversed(numbers) if back else numbers:
            planned, (before, after) = plan.steps[number], plan.layouts[number : number + 2]
            step = backward(planned) if back else planned
            if back:
                before, after = after, before
                if isinstance(step, Exchange):
                    # Other axes cut the source on the way back.
                    there = exchange_to(before, after, plan.model_between(before, after))
                    step = replace(step, apart=there.apart)
            started = time.perf_counter()
            if step is not None:
                shards = run_step(step, communicator, shards, before, after, device)
            if back and isinstance(planned, ReduceScatter | AllReduce) and planned.op == "avg":
                addends = prod(before.mesh.shape[axis] for axis in planned.axes)
                shards = {device_id: grad / addends for device_id, grad in shards.items()}
            if step is not None and traces is not None:
                here = communicator.on(common_mesh(before.mesh, after.mesh)).addressable
                passed = _elapsed(started, shards)
                # No gradient is pending where its value is.
                to = after.with_spec(after.spec.without_partial()) if back else after
                price = _priced(plan, step, before, to)
                record = StepRecord(step, before, after, here, started, passed, *price, back)
                report(record, traces)
    return shards


def _elapsed(started: float, shards: Mapping[int, torch.Tensor]) -> float:
    """Return the seconds since then, once the devices are done too."""
    for shard in shards.values():
        if shard.is_cuda:
            torch.cuda.synchronize(shard.device)
    return time.perf_counter() - started


def _priced(
    plan: ConversionPlan, step: Step, before: Layout, after: Layout
) -> tuple[float, int, str]:
    """Return seconds and bytes that are predicted for a step, and the links they are for."""
    model, mesh = plan.model_between(before, after), common_mesh(before.mesh, after.mesh)
    links = model.links_text([mesh.axis_label(axis) for axis in range(mesh.ndim)])
    return step_seconds(step, before, after, model), step_bytes(step, before, after), links


def agree_on(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor], note: str
) -> None:
    """Let all ranks of both meshes compare what they are about to do with a plan."""
    with _conversion(plan, communicator, shards, note):
        pass


def _conversion(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor], note: str
) -> AbstractContextManager[str]:
    mesh = common_mesh(plan.source.mesh, plan.target.mesh)
    device = next((shard.device.type for shard in shards.values()), "")
    content = _described(plan.source, plan.target, plan.steps, note)
    return communicator.on(mesh).conversion(content, device)


@lru_cache(maxsize=4096)
def _described(source: Layout, target: Layout, steps: tuple[Step, ...], note: str) -> bytes:
    """Say what is to be done, in words that other ranks compare."""
    return description(
        {
            "mesh": mesh_text(source),
            "target mesh": mesh_text(target),
            "source": str(source.spec),
            "target": str(target.spec),
            "shape": str(list(source.global_shape)),
            "dtype": source.dtype,
            "links": f"{_links_text(source)}; {_links_text(target)}",
            "plan": ", ".join(map(str, steps)),
            "gradient": note,
        }
    )


def mesh_text(layout: Layout) -> str:
    """Return the mesh of a layout and its ids, as ranks compare them."""
    return f"{layout.mesh} of ids {','.join(map(str, layout.mesh.ids))}"


def _links_text(layout: Layout) -> str:
    mesh = layout.mesh
    return f"{mesh.mesh_alpha} s, {mesh.mesh_beta} s/B, {mesh.link_model}"


def run_step(
    step: Step,
    communicator: Communicator,
    shards: Mapping[int, torch.Tensor],
    before: Layout,
    after: Layout,
    device: str,
) -> dict[int, torch.Tensor]:
    """Carry out one step, between two meshes too, of shards on one kind of device."""
    if not (before.spec.is_plain and after.spec.is_plain):
        return _run_by_parts(step, communicator, shards, before, after, device)
    if before.mesh == after.mesh:
        return communicator.on(before.mesh).run(step, shards, before.box, after.box)
    if _same_boxes(before, after):
        here = communicator.on(after.mesh).addressable
        return {device: shards[device].view_as(shards[device]) for device in here}
    across = communicator.on(common_mesh(before.mesh, after.mesh))
    if not across.addressable:
        return {}
    shape, dtype = before.global_shape or (1,), getattr(torch, before.dtype)
    nothing = torch.empty([0] * len(shape), dtype=dtype, device=device)
    given = {
        rank: shards[rank].reshape(before.local_shape(rank) or 1) if rank in shards else nothing
        for rank in across.addressable
    }
    results = across.run(step, given, on_both(before).box, on_both(after).box)
    return {
        rank: results[rank].view(after.local_shape(rank))
        for rank in communicator.on(after.mesh).addressable
    }


def _run_by_parts(
    step: Step,
    communicator: Communicator,
    shards: Mapping[int, torch.Tensor],
    before: Layout,
    after: Layout,
    device: str,
) -> dict[int, torch.Tensor]:
    """Carry out a step part by part: of each part every device holds one box."""
    across = communicator.on(common_mesh(before.mesh, after.mesh))
    dtype = getattr(torch, before.dtype)
    results = {
        rank: torch.empty(after.local_shape(rank), dtype=dtype, device=device or None)
        for rank in communicator.on(after.mesh).addressable
    }
    for held, wanted in _cells(before, after):
        given = {
            rank: shards[rank][held.cell.index(rank)].contiguous()
            if rank in shards
            else torch.empty([0] * len(before.global_shape), dtype=dtype, device=device or None)
            for rank in across.addressable
        }
        moved = across.run(step, given, held.box, wanted.box)
        for rank, result in results.items():
            result[wanted.cell.index(rank)] = moved[rank]
    return results


@lru_cache(maxsize=1024)
def _cells(before: Layout, after: Layout) -> list[tuple["_CellOnBoth", "_CellOnBoth"]]:
    """Return what both layouts say of each cell, as objects that are found again."""
    return [
        (_CellOnBoth(LayoutCell(before, cell)), _CellOnBoth(LayoutCell(after, cell)))
        for cell in cells_of(before, after)
    ]


@dataclass(frozen=True, slots=True)
class _CellOnBoth:
    """A cell of a layout seen from the devices of two meshes."""

    cell: LayoutCell

    def box(self, device: int) -> Box:
        """Return the box that a device holds, empty outside the layout's mesh."""
        if device not in self.cell.layout.mesh:
            return tuple((hi, hi) for _, hi in self.cell.cell)
        return self.cell.box(device)


@lru_cache(maxsize=4096)
def _same_boxes(before: Layout, after: Layout) -> bool:
    """Whether nothing moves, between two meshes of the same devices."""
    return before.boxes() == after.boxes()


@dataclass(frozen=True, slots=True)
class _OnBoth:
    """A layout seen from the devices of two meshes: those outside its own hold nothing.

    A scalar has no dim along which to hold nothing, so it is seen as a vector of one element.
    """

    layout: Layout

    def box(self, device: int) -> Box:
        """Return the box that a device holds, empty outside the layout's mesh."""
        shape = self.layout.global_shape or (1,)
        if device not in self.layout.mesh:
            return tuple((size, size) for size in shape)
        return self.layout.box(device) or ((0, 1),)


@lru_cache(maxsize=1024)
def on_both(layout: Layout) -> _OnBoth:
    """Return one object per layout, so that what is known of it can be found again."""
    return _OnBoth(layout)
