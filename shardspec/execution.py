"""Plans carried out: every step by the communicator of the mesh it happens on."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

import torch

from shardspec.boxes import Box
from shardspec.comm.agreement import description
from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import AllReduce, ReduceScatter, Step, backward
from shardspec.layout.cross import common_mesh
from shardspec.layout.layout import Layout
from shardspec.layout.move_cost import step_bytes, step_seconds
from shardspec.layout.plan import ConversionPlan
from shardspec.tracing import StepRecord, log_from_environment, observers, report

__all__ = ["agree_on", "run_plan", "run_step", "undo_plan"]

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
        If ranks are about to do different things, on each of them, the first time that this plan
        is carried out; or if one of them fails or does not come.
    """
    held = dict(shards)
    watched = observers()
    with _conversion(plan, communicator, shards, "forward") as device:
        for number, (before, after) in enumerate(pairwise(plan.layouts)):
            step = plan.steps[number]
            started = time.perf_counter()
            held = run_step(step, communicator, held, before, after, device)
            if watched is not None:
                report(
                    StepRecord(
                        step,
                        before,
                        after,
                        communicator.on(common_mesh(before.mesh, after.mesh)).addressable,
                        started,
                        _elapsed(started, held),
                        plan.step_seconds[number],
                        plan.step_bytes[number],
                        _priced_by(plan, before, after),
                        backward=False,
                    ),
                    watched,
                )
    return held


def undo_plan(
    plan: ConversionPlan, communicator: Communicator, grads: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Carry the gradients of a plan's result back to its source, its steps undone in reverse.

    Parameters
    ----------
    plan, communicator
        As for `run_plan`; what finishes a reduction does so by sum or avg.
    grads
        The gradient of the shard of every addressable device of the target's mesh.
    """
    held = dict(grads)
    watched = observers()
    with _conversion(plan, communicator, grads, "backward") as device:
        for number in reversed(range(len(plan.steps))):
            step, before, after = plan.steps[number], plan.layouts[number], plan.layouts[number + 1]
            started = time.perf_counter()
            undo = backward(step)
            if undo is not None:
                held = run_step(undo, communicator, held, after, before, device)
            if isinstance(step, ReduceScatter | AllReduce) and step.op == "avg":
                addends = prod(before.mesh.shape[axis] for axis in step.axes)
                held = {device_id: grad / addends for device_id, grad in held.items()}
            if undo is not None and watched is not None:
                crossing = plan.target_model is not None
                model = plan.model_between(after, before) if crossing else plan.model
                plain = before.with_spec(before.spec.without_partial())
                report(
                    StepRecord(
                        undo,
                        after,
                        before,
                        communicator.on(common_mesh(before.mesh, after.mesh)).addressable,
                        started,
                        _elapsed(started, held),
                        step_seconds(undo, after, plain, model),
                        step_bytes(undo, after, plain),
                        _priced_by(plan, after, before),
                        backward=True,
                    ),
                    watched,
                )
    return held


def _elapsed(started: float, held: Mapping[int, torch.Tensor]) -> float:
    """Return the seconds since then, once the devices are done too."""
    for shard in held.values():
        if shard.is_cuda:
            torch.cuda.synchronize(shard.device)
    return time.perf_counter() - started


def _priced_by(plan: ConversionPlan, before: Layout, after: Layout) -> str:
    """Say which links a step was priced by."""
    crossing = plan.target_model is not None
    model = plan.model_between(before, after) if crossing else plan.model
    mesh = common_mesh(before.mesh, after.mesh)
    return model.links_text([mesh.axis_label(axis) for axis in range(mesh.ndim)])


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
            "mesh": _mesh_text(source),
            "target mesh": _mesh_text(target),
            "source": str(source.spec),
            "target": str(target.spec),
            "shape": str(list(source.global_shape)),
            "dtype": source.dtype,
            "links": f"{_links_text(source)}; {_links_text(target)}",
            "plan": ", ".join(map(str, steps)),
            "gradient": note,
        }
    )


def _mesh_text(layout: Layout) -> str:
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
    if before.mesh == after.mesh:
        return communicator.on(before.mesh).run(step, shards, before.box, after.box)
    if _same_boxes(before, after):
        here = communicator.on(after.mesh).addressable
        return {device: shards[device].view_as(shards[device]) for device in here}
    across = communicator.on(common_mesh(before.mesh, after.mesh))
    if not across.addressable:
        return {}
    scalar = not before.global_shape
    nothing = torch.empty(
        [0] * max(1, len(before.global_shape)), dtype=_dtype(before), device=device
    )
    held = {
        rank: (shards[rank].reshape(1) if scalar else shards[rank]) if rank in shards else nothing
        for rank in across.addressable
    }
    results = across.run(step, held, _on_both(before).box, _on_both(after).box)
    return {
        rank: results[rank].view(after.local_shape(rank))
        for rank in communicator.on(after.mesh).addressable
    }


@lru_cache(maxsize=4096)
def _same_boxes(before: Layout, after: Layout) -> bool:
    """Whether nothing moves, between two meshes of the same devices."""
    return before.boxes() == after.boxes()


def _dtype(layout: Layout) -> torch.dtype:
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


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
def _on_both(layout: Layout) -> _OnBoth:
    """Return one object per layout, so that what is known of it can be found again."""
    return _OnBoth(layout)
