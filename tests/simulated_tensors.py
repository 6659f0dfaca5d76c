"""Operators on tensors that one process has sharded over a simulated mesh, beside whole ones."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from shardspec import DeviceMesh, DTensor, Layout
from shardspec.errors import LayoutError
from tests.conversions import index_of

__all__ = ["all_specs", "check", "cut"]


def all_specs(dims: int) -> list[str]:
    """Every way to shard by two axes, each in each order, and to leave sums pending."""
    specs = []
    for first, second in product(("R", "P", *range(dims)), repeat=2):
        parts = ["R"] * dims
        for axis, place in enumerate((first, second)):
            if isinstance(place, int):
                parts[place] = f"{parts[place].replace('R', 'S')}{axis}"
        pending = ",".join(f"P{axis}" for axis, p in enumerate((first, second)) if p == "P")
        specs.append(f"[{','.join(parts)}{'|' + pending if pending else ''}]")
        if first == second and isinstance(first, int):
            specs.append(specs[-1].replace("S01", "S10"))
    return specs


def cut(whole: torch.Tensor, mesh: DeviceMesh, spec: str) -> Any:
    """Cut a tensor; addends of what is pending differ."""
    layout = Layout(mesh, spec, whole.shape, whole.dtype)
    pending = [int(p.axis) for p in layout.spec.partials]
    addends = 1
    for axis in pending:
        addends *= mesh.shape[axis]
    shards = {}
    for device in mesh.ids:
        shard, at = whole.detach()[index_of(layout, device)].clone(), 0
        for axis in pending:
            at = at * mesh.shape[axis] + mesh.coordinates(device)[axis]
        if pending:
            shard = shard * (2 * (at + 1) / (addends * (addends + 1)))
        shards[device] = shard.requires_grad_(whole.requires_grad)
    return DTensor.from_local(shards, mesh, spec, global_shape=whole.shape)


def check(
    function: Callable[..., Any],
    wholes: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    specs: Sequence[str],
) -> str:
    """Compare values and gradients with those of whole tensors; return why it was refused."""
    ours = [cut(whole, mesh, spec) for whole, spec in zip(wholes, specs, strict=True)]
    wanted = function(*wholes)
    wanted = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    losses, of_whole = [], []
    try:
        results = function(*ours)
        results = list(results) if isinstance(results, tuple | list) else [results]
        for result, whole in zip(results, wanted, strict=True):
            assert isinstance(result, DTensor)
            assert (result.shape, result.dtype) == (whole.shape, whole.dtype)
            shapes = {device: tuple(shard.shape) for device, shard in result.shards.items()}
            assert shapes == {device: result.layout.local_shape(device) for device in mesh.ids}
            torch.testing.assert_close(result.to_global(), whole)
            if whole.requires_grad:
                weights = torch.arange(whole.numel()).reshape(whole.shape).double().cos()
                losses.append((result.to_global() * weights).sum())
                of_whole.append((whole * weights).sum())
        if losses:
            torch.stack(losses).sum().backward()
    except LayoutError as error:
        return str(error)
    if of_whole:
        torch.stack(of_whole).sum().backward()
    for tensor, whole in zip(ours, wholes, strict=True):
        if whole.grad is None:
            assert tensor.grad is None
            continue
        assert tensor.grad.sharding_spec == tensor.sharding_spec.without_partial()
        for device, shard in tensor.grad.shards.items():
            torch.testing.assert_close(shard, whole.grad[index_of(tensor.grad.layout, device)])
        whole.grad = None
    return ""
