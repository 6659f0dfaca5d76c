"""Runs a conversion plan on this process's shards, step by step, forward and backward.

Gradients follow the convention of `torch.distributed.tensor`; see `shardspec.tensor.dtensor`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, TypeAlias

import torch

from shardspec.comm.agreement import description
from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import AllReduce, Exchange, ReduceScatter, Step, backward
from shardspec.errors import LayoutError
from shardspec.layout.cross import common_mesh, exchange_to
from shardspec.layout.layout import Layout, LayoutCell, cells_of
from shardspec.layout.moving import transfers_of
from shardspec.layout.plan import ConversionPlan, model_between, step_text
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tracing import StepRecord, is_recording, log_from_environment, record_step

log_from_environment()


def run_conversion(
    plan: ConversionPlan,
    communicator: Communicator,
    shards: Mapping[int, torch.Tensor],
    *,
    back: bool = False,
) -> dict[int, torch.Tensor]:
    """Carry out a plan on this process's shards (device id -> shard); return the target's shards.

    The communicator is that of the source's mesh. With `back`, convert gradients of the target to
    those of the source: steps are undone in reverse order; reductions must be sums or means.
    """
    shards, numbers = dict(shards), range(len(plan.steps))
    note = "backward" if back else "forward"
    with (
        telling(communicator, plan.source.mesh, plan.target.mesh),
        _conversion(plan, communicator, shards, note) as (device, _),
    ):
        for number in reversed(numbers) if back else numbers:
            planned, (before, after) = plan.steps[number], plan.layouts[number : number + 2]
            step = backward(planned) if back else planned
            if back:
                before, after = after, before
                if isinstance(step, Exchange):
                    # On the way back, other axes cut the source.
                    exchange = exchange_to(before, after, model_between(plan, before, after))
                    step = replace(step, apart=exchange.apart, per_node=exchange.per_node)
            started = time.perf_counter()
            if step is not None:
                with torch.profiler.record_function(f"shardspec: {step_text(step)}"):
                    shards = run_step(step, communicator, shards, before, after, device)
            if back and isinstance(planned, ReduceScatter | AllReduce) and planned.op == "avg":
                addends = prod(before.mesh.shape[axis] for axis in planned.axes)
                shards = {device_id: grad / addends for device_id, grad in shards.items()}
            if step is not None and is_recording():
                for shard in shards.values():
                    if shard.is_cuda:
                        torch.cuda.synchronize(shard.device)
                passed = time.perf_counter() - started
                ranks = communicator.on(common_mesh(before.mesh, after.mesh)).addressable
                model = model_between(plan, before, after)
                record_step(StepRecord(step, before, after, ranks, passed, model, back))
    return shards


def _conversion(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor], note: str
) -> AbstractContextManager[tuple[str, Mapping[int, None]]]:
    mesh = common_mesh(plan.source.mesh, plan.target.mesh)
    device = next((shard.device.type for shard in shards.values()), "")
    content = _described(plan.source, plan.target, plan.steps, note)
    return communicator.on(mesh).conversion(content, device)


def telling(
    communicator: Communicator, source: DeviceMesh, target: object
) -> AbstractContextManager[None]:
    """Return a block in which an error on one rank reaches all ranks of both meshes."""
    # If the target is no mesh, which is an error, only the source's ranks are informed.
    other = target if isinstance(target, DeviceMesh) else source
    return communicator.on(common_mesh(source, other)).telling()


@lru_cache(maxsize=4096)
def _described(source: Layout, target: Layout, steps: tuple[Step, ...], note: str) -> bytes:
    """Return a text that is equal on all ranks only if they ask for the same conversion."""
    meshes = source.mesh, target.mesh
    links = "; ".join(f"{m.mesh_alpha} s, {m.mesh_beta} s/B, {m.link_model}" for m in meshes)
    return description(
        {
            "mesh": mesh_text(source),
            "target mesh": mesh_text(target),
            "source": str(source.spec),
            "target": str(target.spec),
            "shape": str(list(source.global_shape)),
            "dtype": source.dtype,
            "links": links,
            "plan": ", ".join(map(str, steps)),
            "gradient": note,
        }
    )


def mesh_text(layout: Layout) -> str:
    """Return mesh, shape and ids as text: ranks compare it."""
    return f"{layout.mesh} of ids {','.join(map(str, layout.mesh.ids))}"


def run_step(
    step: Step,
    communicator: Communicator,
    shards: Mapping[int, torch.Tensor],
    before: Layout,
    after: Layout,
    device: str,
) -> dict[int, torch.Tensor]:
    """Carry out one step; return the shards after it. Specs with parts run part by part."""
    plain, local = before.spec.is_plain and after.spec.is_plain, communicator.on(after.mesh)
    if plain and before.mesh == after.mesh:
        return local.run(transfers_of(step, before, after), shards)
    if plain and _same_boxes(before, after):
        return {rank: shards[rank].view_as(shards[rank]) for rank in local.addressable}
    across = communicator.on(common_mesh(before.mesh, after.mesh))
    if not across.addressable:
        return {}
    dtype, cells = getattr(torch, before.dtype), cells_of(before, after)
    empty = partial(torch.empty, dtype=dtype, device=device or None)
    nothing = empty([0] * (len(before.global_shape) or 1))
    shapes = {rank: after.local_shape(rank) for rank in local.addressable}
    results = {rank: empty(shape) for rank, shape in shapes.items()} if len(cells) > 1 else {}
    for cell in cells:
        old_cell, new_cell = LayoutCell(before, cell), LayoutCell(after, cell)
        given = {
            rank: _part_of(shards[rank], old_cell, rank).contiguous() if rank in shards else nothing
            for rank in across.addressable
        }
        moved = across.run(transfers_of(step, before, after, cell), given)
        if len(cells) == 1:
            return {rank: moved[rank].view(shape) for rank, shape in shapes.items()}
        for rank, result in results.items():
            _part_of(result, new_cell, rank).copy_(moved[rank])
    return results


def _part_of(shard: torch.Tensor, cell: LayoutCell, device: int) -> torch.Tensor:
    """Return the slice of a device's shard in one cell of the tensor; a scalar becomes a vector."""
    return shard[cell.index(device)] if cell.cell else shard.view(1)


@lru_cache(maxsize=4096)
def _same_boxes(before: Layout, after: Layout) -> bool:
    """Return True if every device has the same box before and after."""
    return before.boxes() == after.boxes()


Shards: TypeAlias = tuple[torch.Tensor, ...]
Map: TypeAlias = Callable[[Shards], Shards]
"""A linear function of shards."""


class Linear(torch.autograd.Function):
    """A linear function whose gradient is another linear function, and vice versa."""

    @staticmethod
    def forward(ctx: Any, function: Map, gradient: Map, *shards: torch.Tensor) -> Shards:  # noqa: ANN401
        """Apply `function` to the shards."""
        ctx.function, ctx.gradient = function, gradient
        return function(shards)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Apply `gradient` to the gradients of the results."""
        return (None, None, *_apply(ctx.gradient, ctx.function, grads))


def _apply(function: Map, gradient: Map, shards: Iterable[torch.Tensor]) -> Shards:
    # torch leaves Function.apply untyped.
    results: Shards = Linear.apply(function, gradient, *shards)  # type: ignore[no-untyped-call]
    return results


def alias_of(shard: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same storage; gradients pass through it."""
    if not torch.is_grad_enabled():
        return shard.detach()
    alias: torch.Tensor = torch.ops.aten.alias.default(shard)
    return alias


def _views(shards: Shards) -> Shards:
    return tuple(shard.view_as(shard) for shard in shards)


def _run(plan: ConversionPlan, communicator: Communicator, back: bool, shards: Shards) -> Shards:
    own = communicator.on(plan.target.mesh) if back else communicator
    given = dict(zip(own.addressable, shards, strict=True))
    return tuple(run_conversion(plan, communicator, given, back=back).values())


def convert(
    plan: ConversionPlan,
    communicator: Communicator,
    shards: Mapping[int, torch.Tensor],
    *,
    tracked: bool,
) -> Mapping[int, torch.Tensor]:
    """Carry out a plan on this process's shards; return the target's. Differentiable if `tracked`.

    If nothing moves, the result has the same shards, or aliases of those that require a gradient.
    Raises `LayoutError` if a gradient is tracked through a min, max or prod, or to other devices.
    """
    source, target = plan.source.mesh, plan.target.mesh
    for step in plan.steps if tracked else ():
        if isinstance(step, ReduceScatter | AllReduce) and step.op not in ("sum", "avg"):
            raise LayoutError(
                f"no gradient is defined for the pending {step.op} of {plan.source.spec}; detach "
                "the shards first"
            )
    if not plan.steps or (source == target and not shards):
        return {d: alias_of(s) if s.requires_grad else s for d, s in shards.items()}
    if set(source.ids) == set(target.ids):
        run, undo = (partial(_run, plan, communicator, back) for back in (False, True))
        ranks = communicator.on(target).addressable
        return dict(zip(ranks, _apply(run, undo, shards.values()), strict=True))
    if tracked:
        # Ranks of the target alone do not see the gradient, so all ranks exchange notes first.
        note = "wanted, which does not pass to other devices"
        with _conversion(plan, communicator, shards, note):
            pass
        raise LayoutError(
            f"no gradient passes from mesh {source} to other devices; convert a detached tensor, "
            "and bring its gradient back by another conversion"
        )
    return run_conversion(plan, communicator, shards)


def with_gradient_reduced(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the shards unchanged; in the backward pass, `plan` reduces their gradients.

    The gradient of a pending mean is not divided: the devices return a mean again.
    """
    run = partial(_run, plan, communicator, False)
    return dict(zip(shards, _apply(_views, run, shards.values()), strict=True))


class _Written(torch.autograd.Function):
    """Lets the gradient of memory that was overwritten pass to the new values."""

    @staticmethod
    def forward(ctx: Any, memory: torch.Tensor, _new: torch.Tensor) -> torch.Tensor:  # noqa: ANN401, ARG004
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ANN401, ARG004
        return None, gradient


def written(memory: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return overwritten `memory` as a tensor whose gradient goes to its new values, `new`."""
    # torch leaves Function.apply untyped.
    result: torch.Tensor = _Written.apply(memory.detach(), new)  # type: ignore[no-untyped-call]
    return result


def with_gradient_shared(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the tensor; in the backward pass its gradient is divided by `count`."""
    if count == 1 or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    share = partial(torch.mul, other=1 / count)
    return _apply(_views, lambda grads: tuple(map(share, grads)), [tensor])[0]


def copies_of(tensor: torch.Tensor, count: int, *, distinct: bool = False) -> Shards:
    """Return `count` copies of a tensor. Their gradients are equal, so only the first is used.

    The first shares the tensor's memory, and so do the others unless they are `distinct`.
    """

    def copies(shards: Shards) -> Shards:
        others = (shards[0].clone() if distinct else shards[0] for _ in range(count - 1))
        return _views((shards[0], *others))

    return _apply(copies, lambda grads: _views(grads[:1]), [tensor]) if count else ()


def first_of_copies(shards: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the first of several equal shards; all copies get its gradient."""
    count, given = len(shards), shards.values()
    return _apply(lambda copies: _views(copies[:1]), lambda shard: _views(shard * count), given)[0]
