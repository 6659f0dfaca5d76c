"""Conversions as autograd functions: a plan forwards, and backwards the steps that undo it.

Gradients follow the convention of `torch.distributed.tensor`; see `shardspec.dtensor`.
"""

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import AllReduce, ReduceScatter
from shardspec.errors import LayoutError
from shardspec.execution import run_plan, undo_plan
from shardspec.layout.plan import ConversionPlan

__all__ = ["Convert", "GradientsBy", "OneOfEqual", "check_differentiable"]


class Convert(torch.autograd.Function):
    """A plan forwards; backwards the steps that undo it, in reverse."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, plan: ConversionPlan, communicator: Communicator, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Carry out the plan."""
        # What backward needs is set on the context, whose class does not name it.
        ctx.plan, ctx.communicator = plan, communicator  # type: ignore[attr-defined]
        held = dict(zip(communicator.addressable, shards, strict=True))
        return tuple(run_plan(plan, communicator, held).values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Undo its steps, last first."""
        plan, communicator = ctx.plan, ctx.communicator
        at_target = communicator.on(plan.target.mesh)
        held = dict(zip(at_target.addressable, grads, strict=True))
        return (None, None, *undo_plan(plan, communicator, held).values())


class GradientsBy(torch.autograd.Function):
    """Forwards nothing; backwards a plan for the gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, plan: ConversionPlan, communicator: Communicator, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Hand the shards on."""
        # What backward needs is set on the context, whose class does not name it.
        ctx.plan, ctx.communicator = plan, communicator  # type: ignore[attr-defined]
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Carry out the plan on the gradients."""
        held = dict(zip(ctx.communicator.addressable, grads, strict=True))
        return (None, None, *run_plan(ctx.plan, ctx.communicator, held).values())


class OneOfEqual(torch.autograd.Function):
    """Forwards the first of equal shards; backwards its gradient for each of them."""

    @staticmethod
    def forward(ctx: Any, *shards: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Return the first shard."""
        ctx.copies = len(shards)
        return shards[0].view_as(shards[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Return its gradient for every shard."""
        grads: tuple[torch.Tensor, ...] = (grad,) * ctx.copies
        return grads


def check_differentiable(plan: ConversionPlan) -> None:
    """Raise `LayoutError` if a plan finishes a reduction that has no gradient here."""
    for step in plan.steps:
        if isinstance(step, ReduceScatter | AllReduce) and step.op not in ("sum", "avg"):
            raise LayoutError(
                f"no gradient is defined for the pending {step.op} of {plan.source.spec}; detach "
                "the shards first"
            )
