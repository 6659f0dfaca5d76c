"""Conversions as autograd functions, differentiable any number of times.

Gradients follow the convention of `torch.distributed.tensor`; see `shardspec.dtensor`. A plan is
linear, so `Convert` and `Revert` are each other's backward.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import AllReduce, ReduceScatter
from shardspec.errors import LayoutError
from shardspec.execution import run_plan, undo_plan
from shardspec.layout.plan import ConversionPlan

__all__ = ["check_differentiable", "convert", "first_of_copies", "with_gradient_reduced"]

Shards: TypeAlias = tuple[torch.Tensor, ...]
# torch leaves Function.apply untyped, and the context's class does not name what is set on it.
Context: TypeAlias = Any


def convert(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Carry out a plan between meshes of the same devices; its gradient is converted back.

    Parameters
    ----------
    plan
        What to do.
    communicator
        Of the source's mesh.
    shards
        The shard of every addressable device.
    """
    there = communicator.on(plan.target.mesh).addressable
    # torch leaves Function.apply untyped, here and below.
    results = Convert.apply(plan, communicator, *shards.values())  # type: ignore[no-untyped-call]
    return dict(zip(there, results, strict=True))


def with_gradient_reduced(
    plan: ConversionPlan, communicator: Communicator, shards: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return the shards; parts of gradients that arrive at them are added up by a plan."""
    results = GradientReduced.apply(plan, communicator, *shards.values())  # type: ignore[no-untyped-call]
    return dict(zip(shards, results, strict=True))


def first_of_copies(shards: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return the first of equal shards; its gradient is that of every copy."""
    result: torch.Tensor = FirstOfCopies.apply(*shards.values())  # type: ignore[no-untyped-call]
    return result


class Convert(torch.autograd.Function):
    """A plan forwards; backwards its steps undone, last first."""

    @staticmethod
    def forward(
        ctx: Context, plan: ConversionPlan, communicator: Communicator, *shards: torch.Tensor
    ) -> Shards:
        """Carry out the plan."""
        ctx.plan, ctx.communicator = plan, communicator
        held = dict(zip(communicator.addressable, shards, strict=True))
        return tuple(run_plan(plan, communicator, held).values())

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Undo its steps."""
        undone: Shards = Revert.apply(ctx.plan, ctx.communicator, *grads)  # type: ignore[no-untyped-call]
        return (None, None, *undone)


class Revert(torch.autograd.Function):
    """A plan's gradients forwards: its steps undone, last first; backwards the plan itself."""

    @staticmethod
    def forward(
        ctx: Context, plan: ConversionPlan, communicator: Communicator, *grads: torch.Tensor
    ) -> Shards:
        """Undo the steps of the plan."""
        ctx.plan, ctx.communicator = plan, communicator
        there = communicator.on(plan.target.mesh).addressable
        return tuple(undo_plan(plan, communicator, dict(zip(there, grads, strict=True))).values())

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Carry out the plan."""
        done: Shards = Convert.apply(ctx.plan, ctx.communicator, *grads)  # type: ignore[no-untyped-call]
        return (None, None, *done)


class GradientReduced(torch.autograd.Function):
    """Forwards nothing; backwards a plan for the gradients, parts of which come from devices."""

    @staticmethod
    def forward(
        ctx: Context, plan: ConversionPlan, communicator: Communicator, *shards: torch.Tensor
    ) -> Shards:
        """Hand the shards on."""
        ctx.plan, ctx.communicator = plan, communicator
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Carry out the plan on the gradients."""
        done: Shards = Reduced.apply(ctx.plan, ctx.communicator, *grads)  # type: ignore[no-untyped-call]
        return (None, None, *done)


class Reduced(Convert):
    """A plan forwards, that finishes sums or means; backwards the gradient goes to each addend.

    That of a mean is not divided: what comes back from the devices is a mean again.
    """

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Hand the gradient on."""
        same: Shards = GradientReduced.apply(ctx.plan, ctx.communicator, *grads)  # type: ignore[no-untyped-call]
        return (None, None, *same)


class FirstOfCopies(torch.autograd.Function):
    """Forwards the first of equal shards; backwards its gradient for each of them."""

    @staticmethod
    def forward(ctx: Context, *shards: torch.Tensor) -> torch.Tensor:
        """Return the first shard."""
        ctx.copies = len(shards)
        return shards[0].view_as(shards[0])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Shards:
        """Return its gradient for every shard."""
        copies: Shards = Copies.apply(grad, ctx.copies)  # type: ignore[no-untyped-call]
        return copies


class Copies(torch.autograd.Function):
    """Forwards copies of a tensor; backwards the gradient of the first, equal to the others."""

    @staticmethod
    def forward(_: Context, tensor: torch.Tensor, copies: int) -> Shards:
        """Return the tensor so many times."""
        return tuple(tensor.view_as(tensor) for _ in range(copies))

    @staticmethod
    def backward(_: Context, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the first gradient."""
        return first_of_copies(dict(enumerate(grads))), None


def check_differentiable(plan: ConversionPlan) -> None:
    """Raise `LayoutError` if a plan finishes a reduction that has no gradient here."""
    for step in plan.steps:
        if isinstance(step, ReduceScatter | AllReduce) and step.op not in ("sum", "avg"):
            raise LayoutError(
                f"no gradient is defined for the pending {step.op} of {plan.source.spec}; detach "
                "the shards first"
            )
