"""The table of operations, each on cut tensors beside the same on whole ones, as a rank does it."""

from typing import Any

import torch
from torch.distributed.tensor.experimental import implicit_replication

from shardspec import DTensor, Layout
from shardspec.errors import LayoutError
from tests.conversions import index_of
from tests.operation_table import TABLE

__all__ = ["Cut", "cut", "the_table"]

# The stubs of torch take nothing but its own tensors.
Cut: Any = DTensor
LAYOUTS = {
    1: ["[R]", "[S0]", "[S1]", "[S01]", "[R|P0]"],
    2: ["[S0,R]", "[R,S1]", "[S0,S1]", "[R,S0|P1]", "[S01,R]", "[S1,S0]", "[R,R]", "[R,S01]"],
    3: ["[S0,R,R]", "[R,S1,R]", "[R,R,S0]", "[S0,R,S1]", "[R,S0,R|P1]"],
}


def combinations(index, operation, count):
    if operation.layouts:
        return operation.layouts[:count]
    found = []
    for number in range(count):
        specs = []
        for place, shape in enumerate(operation.shapes):
            choices = LAYOUTS[len(shape)]
            spec = choices[(index + number * (1 + 2 * place) + 3 * place) % len(choices)]
            whole = "P" in spec and place in operation.integers
            specs.append(choices[0] if whole else spec)
        found.append(tuple(specs))
    return found


def made_up(operation, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, operation.below, shape, generator=generator)
        if place in operation.integers
        else torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(
            operation.gradient
        )
        for place, shape in enumerate(operation.shapes)
    ]


def cut(whole, mesh, spec, rank):
    """Cut a tensor; of what is pending over an axis of two, each device gets half."""
    layout = Layout(mesh, spec, whole.shape, whole.dtype)
    if not layout.spec.partials:
        return DTensor(whole, mesh, spec)
    plain = layout.with_spec(layout.spec.without_partial())
    half = (whole.detach() / 2)[index_of(plain, rank)].clone().requires_grad_(whole.requires_grad)
    return DTensor.from_local(half, mesh, spec, global_shape=whole.shape)


def as_list(result):
    return list(result) if isinstance(result, tuple | list) else [result]


def weights_of(whole):
    return torch.arange(whole.numel(), dtype=torch.float64).reshape(whole.shape).cos()


def compared(tensors, mesh, rank, operation, specs):
    """Return what differs, forwards and backwards, between cut and whole."""
    ours = [cut(whole, mesh, spec, rank) for whole, spec in zip(tensors, specs, strict=True)]
    results, expected = as_list(operation.function(*ours)), as_list(operation.function(*tensors))
    wrong = []
    losses, whole_losses = [], []
    for result, whole in zip(results, expected, strict=True):
        if not isinstance(result, DTensor) or result.device_mesh != mesh:
            return [f"{type(result).__name__}"]
        if (result.shape, result.dtype) != (whole.shape, whole.dtype):
            wrong.append(f"{result.layout} for {tuple(whole.shape)}")
        plain = not result.sharding_spec.partials
        # A shard is compared where it lies, and its gradient is that of its box.
        box = index_of(result.layout, rank) if plain else (...,)
        found = result.to_local() if plain else result.to_global()
        if not torch.allclose(found.double(), whole[box].double()):
            wrong.append(f"forward {result.layout}")
        if operation.gradient and whole.is_floating_point():
            losses.append((found * weights_of(whole)[box]).sum())
            whole_losses.append((whole * weights_of(whole)).sum())
    if operation.gradient:
        # Of plain indices, which torch makes on the way back.
        with implicit_replication():
            torch.stack(losses).sum().backward()
        torch.stack(whole_losses).sum().backward()
    for tensor, whole in zip(ours, tensors, strict=True):
        grad = tensor.grad
        if whole.grad is None:
            wrong += [] if grad is None else ["a gradient"]
        elif (
            grad is None
            or grad.sharding_spec != tensor.sharding_spec.without_partial()
            or not torch.allclose(grad.to_local(), whole.grad[index_of(grad.layout, rank)])
        ):
            wrong.append(f"gradient of {tensor.layout}")
    return wrong


def the_table(rank, mesh, count, every):
    """Return of every so-manieth operation what became of its combinations of layouts."""
    outcomes = {}
    for index, operation in list(enumerate(TABLE))[::every]:
        for specs in combinations(index, operation, count // 2):
            try:
                wrong = compared(made_up(operation, index), mesh, rank, operation, specs)
            except LayoutError as error:
                wrong = [f"refused: {error}"]
            except RuntimeError as error:
                wrong = [f"torch refuses: {error}"]
            outcomes[operation.name, specs] = "; ".join(wrong)
    return outcomes
