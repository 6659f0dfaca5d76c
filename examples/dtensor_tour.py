"""The whole tour of distributed tensors: meshes, placements, operations, conversions, a model.

torchrun --standalone --nproc_per_node 4 examples/dtensor_tour.py    (2, 4 or 8 processes)
"""

import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor

import shardspec
from shardspec import DTensor, Layout, distribute_tensor, init_device_mesh
from shardspec.layout.plan_text import step_text
from shardspec.parallel.distribute import distribute_module, inputs_as, outputs_as
from shardspec.parallel.rules import column_parallel, row_parallel

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device_type = "cuda" if torch.cuda.is_available() else "cpu"
rank, world = dist.get_rank(), dist.get_world_size()


def say(text: object) -> None:
    """Print a line once, from the first rank."""
    if rank == 0:
        print(text, flush=True)


def everyone(text: object) -> None:
    """Print what each rank has to say, in their order."""
    lines: list[object] = [None] * world
    dist.all_gather_object(lines, text)
    for number, line in enumerate(lines):
        say(f"  rank {number}: {line}")


say(f"== 1. Meshes: {world} processes in a row, and as a grid")
row = init_device_mesh(device_type, (world,), axis_names=("x",))
grid = init_device_mesh(device_type, (2, world // 2), axis_names=("dp", "tp"))
say(f"  {row} and {grid}; device 1 of the grid is at {grid.coordinates(1)}")
everyone(f"my slice along tp has devices {grid['tp'].ids}")

say("== 2. Three ways to make a DTensor")
whole = torch.arange(4.0 * world).view(4, world).to(device_type)
from_whole = distribute_tensor(whole, row, "[R,S0]")
from_parts = DTensor.from_local(torch.full((1, 2), float(rank)), row, "[S0,R]")
made_in_parts = shardspec.zeros(2 * world, 3, device_mesh=row, sharding_spec="[S0,R]")
say(f"  cut from a whole:     {from_whole.sharding_spec} of {tuple(from_whole.shape)}")
say(f"  put together of mine: {from_parts.sharding_spec} of {tuple(from_parts.shape)}")
say(f"  made where it lies:   {made_in_parts.sharding_spec} of {tuple(made_in_parts.shape)}")

say("== 3. Three placements: cut, whole, and a sum that is still to be added up")
for spec in ("[S0,R]", "[R,R]", "[R,R|P0]"):
    layout = Layout(row, spec, (world, 2), "float32")
    say(f"  {spec}: device 1 holds {layout.box(1)}")

say("== 4. Operations find their layouts")
a = shardspec.rand(8, 16, device_mesh=grid, sharding_spec="[S(dp),S(tp)]")
b = shardspec.rand(16, 4, device_mesh=grid, sharding_spec="[S(tp),R]")
product = a @ b
say(f"  {a.sharding_spec} @ {b.sharding_spec} = {product.sharding_spec}: sums wait over tp")
right = torch.allclose(product.to_global(), a.to_global() @ b.to_global())
positive: Any = torch.relu(product)
say(f"  relu of it: {positive.sharding_spec}; right: {right}")


def steps_of(trace: shardspec.tracing.Trace) -> str:
    """Name the steps that were carried out."""
    return ", then ".join(step_text(record.step) for record in trace.records)


say("== 5. Conversions, each step named as it happens")
for source, target in (
    ("[S0,R]", "[R,R]"),
    ("[R,R]", "[R,S0]"),
    ("[S0,R]", "[R,S0]"),
    ("[R,R|P0]", "[R,R]"),
    ("[R,R|P0]", "[S0,R]"),
):
    layout = Layout(row, source, (64, 64), "float32")
    local = torch.ones(layout.local_shape(rank), device=device_type)
    with shardspec.trace() as trace:
        DTensor.from_shards({rank: local}, layout).redistribute(target)
    say(f"  {source} → {target}: {steps_of(trace)}")

say("== 6. Two axes of a mesh on one tensor")
weight = shardspec.rand(12, 12, device_mesh=grid, sharding_spec="[S(dp,tp),R]")
for spec in ("[S(tp,dp),R]", "[S(dp),S(tp)]", "[R,S(dp,tp)]"):
    with shardspec.trace() as trace:
        moved = weight.redistribute(spec)
    same = moved.to_global().equal(weight.to_global())
    say(f"  {weight.layout.labelled_spec} → {spec}: {steps_of(trace)}; the same tensor: {same}")

say("== 7. A module, cut by rules, with gradients")
torch.manual_seed(0)
block = torch.nn.Sequential(
    OrderedDict(up=torch.nn.Linear(8, 16), act=torch.nn.ReLU(), down=torch.nn.Linear(16, 8))
).to(device_type)
alone = copy.deepcopy(block)
rules = column_parallel(["up"], bias=True) | row_parallel(["down"])
say(f"  rules: {', '.join(f'{name} {spec}' for name, spec in rules.items())}")
distribute_module(block, grid, rules, inputs_as("[R,R]"), outputs_as("[R,R]"))
batch = torch.linspace(-1, 1, 32, device=device_type).view(4, 8)
loss = block(batch).square().mean()
loss.backward()
alone(batch).square().mean().backward()
for name, parameter in block.named_parameters():
    gradient, due = parameter.grad, alone.get_parameter(name).grad
    assert isinstance(parameter, TorchDTensor) and isinstance(gradient, TorchDTensor)  # noqa: PT018
    right = due is not None and torch.allclose(gradient.full_tensor(), due, atol=1e-6)
    here = tuple(parameter.to_local().shape)
    say(f"  {name}: {here} of {tuple(parameter.shape)} here; gradient as in one process: {right}")

say("== 8. Collectives are conversions")
ones = torch.ones(2, device=device_type)
total = DTensor.from_shards({rank: ones * rank}, Layout(row, "[R|P0]", (2,), "float32"))
say(f"  all-reduce, a pending sum made whole: {total.redistribute('[R]').to_local().tolist()}")
mine = DTensor.from_shards({rank: ones[:1] * rank}, Layout(row, "[S0]", (world,), "float32"))
say(f"  all-gather, a cut made whole: {mine.redistribute('[R]').to_local().tolist()}")

dist.barrier()
dist.destroy_process_group()
