"""Conversions as autograd functions, differentiable any number of times.

Gradients follow the convention of `torch.distributed.tensor`; see `shardspec.dtensor`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import AllReduce, ReduceScatter
from shardspec.errors import LayoutError
from shardspec.execution import run_plan
from shardspec.layout.plan import ConversionPlan

__all__ = ["check_differentiable", "convert", "first_of_copies", "with_gradient_reduced"]

Shards: TypeAlias = tuple[torch.Tensor, ...]
Map: TypeAlias = Callable[[Shards], Shards]
"""A linear function of shards."""


class Linear(torch.autograd.Function):
    """A linear function forwards, and backwards another one, of which it is the gradient."""

    @staticmethod
    def forward(ctx: Any, function: Map, gradient: Map, *shards: torch.Tensor) -> Shards:  # noqa: ANN401
        """Apply the function."""
        ctx.function, ctx.gradient = function, gradient
        return function(shards)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Apply the other one."""
        return (None, None, *_apply(ctx.gradient, ctx.function, grads))


def _apply(function: Map, gradient: Map, shards: Shards) -> Shards:
    # torch leaves Function.apply untyped.
    results: Shards = Linear.apply(function, gradient, *shards)  # type: ignore[no-untyped-call]
    return results


def _views(shards: Shards) -> Shards:
    return tuple(shard.view_as(shard) for shard in shards)


def _run(plan: ConversionPlan, communicator: Communicator, back: bool, shards: Shards) -> Shards:
    here = communicator.on(plan.target.mesh) if back else communicator
    given = dict(zip(here.addressable, shards, strict=True))
    return tuple(run_plan(plan, communicator, given, back=back).values())


def convert(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Carry out a plan between meshes of the same devices; its gradient is converted back.

    The communicator is of the source's mesh, and all its addressable devices give their shards.
    """
    run, undo = (partial(_run, plan, communicator, back) for back in (False, True))
    there = communicator.on(plan.target.mesh).addressable
    return dict(zip(there, _apply(run, undo, tuple(shards.values())), strict=True))


def with_gradient_reduced(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the shards; parts of gradients that arrive at them are added up by a plan.

    The gradient of that goes to each addend. That of a mean is not divided: what comes back from
    the devices is a mean again.
    """
    run = partial(_run, plan, communicator, False)
    return dict(zip(shards, _apply(_views, run, tuple(shards.values())), strict=True))


def first_of_copies(shards: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the first of equal shards; its gradient is that of every copy."""

    def copies(first: Shards) -> Shards:
        return _views(first * len(shards))

    return _apply(lambda given: _views(given[:1]), copies, tuple(shards.values()))[0]


def check_differentiable(plan: ConversionPlan) -> None:
    """Raise `LayoutError` if a plan finishes a reduction that has no gradient here."""
    for step in plan.steps:
        if isinstance(step, ReduceScatter | AllReduce) and step.op not in ("sum", "avg"):
            raise LayoutError(
                f"no gradient is defined for the pending {step.op} of {plan.source.spec}; detach "
                "the shards first"
            )
