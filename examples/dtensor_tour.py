"""A tour of distributed tensors: meshes, placements, operators, conversions, a model.

torchrun --standalone --nproc_per_node 4 examples/dtensor_tour.py    (2, 4 or 8 processes)
"""

import copy
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.debug import CommDebugMode

import shardspec
from shardspec import DTensor, Layout, distribute_tensor, init_device_mesh
from shardspec.layout.plan import step_text
from shardspec.parallel import distribute_module, inputs_as, outputs_as
from shardspec.text import bytes_text

# One GPU per process of this machine; if there are too few, all processes use the CPU.
each = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
if each:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device_type = "cuda" if each else "cpu"
dist.init_process_group("nccl" if each else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def say(text: object) -> None:
    """Print a line once, from the first rank."""
    if rank == 0:
        print(text, flush=True)


def everyone(text: object) -> None:
    """Print the text of every rank, in the order of ranks."""
    lines: list[object] = [None] * world
    dist.all_gather_object(lines, text)
    for number, line in enumerate(lines):
        say(f"  rank {number}: {line}")


def places(local: torch.Tensor) -> list[object]:
    """Return the shard of every rank, as lists of numbers."""
    lists: list[object] = [None] * world
    dist.all_gather_object(lists, local.tolist())
    return lists


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Print the steps executed in the block: shardspec's, and those of torch's operators."""
    torchs = CommDebugMode()  # type: ignore[no-untyped-call]  # untyped in torch
    with shardspec.trace() as trace, torchs:
        yield
    ours = [
        f"{'back: ' if record.backward else ''}{step_text(record.step)} "
        f"({bytes_text(record.num_bytes)})"
        for record in trace.records
    ]
    theirs = [
        f"{str(operator).rpartition('.')[2]} by torch" + (f", {count} times" if count > 1 else "")
        for operator, count in torchs.get_comm_counts().items()
        if "functional" in str(operator)
    ]
    say(f"  {what}: {', then '.join([*ours, *theirs]) or 'nothing moves'}")


say(f"== 1. Meshes: {world} processes in a row, and as a grid")
row = init_device_mesh(device_type, (world,), axis_names=("x",))
grid = init_device_mesh(device_type, (2, world // 2), axis_names=("dp", "tp"))
say(f"  {row} and {grid}; device 1 of the grid is at {grid.coordinates(1)}")
everyone(f"my slice along tp has devices {grid['tp'].ids}")

say("== 2. Three ways to make a DTensor")
whole = torch.arange(4.0 * world).view(4, world).to(device_type)
from_whole = distribute_tensor(whole, row, "[R,S0]")
from_parts = DTensor.from_local(whole[:1, :2] + rank, row, "[S0,R]")
made_in_parts = shardspec.zeros(2 * world, 3, device_mesh=row, sharding_spec="[S0,R]")
for how, made in (
    ("cut from a whole:    ", from_whole),
    ("put together of mine:", from_parts),
    ("made where it lies:  ", made_in_parts),
):
    here = tuple(made.to_local().shape)
    say(f"  {how} {made.sharding_spec} of {tuple(made.shape)}, {here} here")

say("== 3. Three placements of one tensor: cut, whole, and addends of a sum to be taken")
numbers = torch.arange(float(world), device=device_type)
for spec, local in (
    ("[S0]", numbers[rank : rank + 1]),
    ("[R]", numbers),
    ("[R|P0]", numbers * (numbers == rank)),
):
    placed = DTensor.from_local(local, row, spec)
    zero, one, *_ = places(local)
    say(f"  {spec}: rank 0 holds {zero}, rank 1 {one}; whole it is {placed.to_global().tolist()}")

say("== 4. Operations find their layouts; a sum is taken where one is needed")
a = shardspec.rand(8, 16, device_mesh=grid, sharding_spec="[S(dp),S(tp)]")
b = shardspec.rand(16, 4, device_mesh=grid, sharding_spec="[S(tp),R]")
with naming(f"{a.layout.labelled_spec} @ {b.layout.labelled_spec}"):
    product: Any = a @ b
say(f"    = {product.layout.labelled_spec}: sums wait over tp")
with naming(f"relu of {product.layout.labelled_spec}"):
    positive: Any = torch.relu(product)
right = torch.allclose(positive.to_global(), torch.relu(a.to_global() @ b.to_global()))
say(f"    = {positive.layout.labelled_spec}; as in one process: {right}")

say("== 5. Conversions: each collective as it happens, and what a device receives")
for source, target in (
    ("[S0,R]", "[R,R]"),
    ("[R,R]", "[R,S0]"),
    ("[S0,R]", "[R,S0]"),
    ("[R,R|P0]", "[R,R]"),
    ("[R,R|P0]", "[S0,R]"),
):
    layout = Layout(row, source, (2048, 2048), "float32")
    local = torch.ones(layout.local_shape(rank), device=device_type)
    with naming(f"{source} → {target}"):
        DTensor.from_shards({rank: local}, layout).redistribute(target)

say("== 6. Two axes of a mesh on one tensor")
weight = shardspec.rand(12, 12, device_mesh=grid, sharding_spec="[S(dp,tp),R]")
for spec in ("[S(tp,dp),R]", "[S(dp),S(tp)]", "[R,S(dp,tp)]"):
    with naming(f"{weight.layout.labelled_spec} → {spec}"):
        moved = weight.redistribute(spec)
    say(f"    the same tensor: {moved.to_global().equal(weight.to_global())}")

say("== 7. A module, cut by rules, with gradients")
torch.manual_seed(0)
block = torch.nn.Sequential(
    OrderedDict(up=torch.nn.Linear(8, 16), act=torch.nn.ReLU(), down=torch.nn.Linear(16, 8))
).to(device_type)
alone = copy.deepcopy(block)
rules = {"up.weight": "[S(tp),R]", "up.bias": "[S(tp)]", "down.weight": "[R,S(tp)]"}
say(f"  rules: {', '.join(f'{name} {spec}' for name, spec in rules.items())}")
distribute_module(block, grid, rules, inputs_as("[R,R]"), outputs_as("[R,R]"))
batch = torch.linspace(-1, 1, 32, device=device_type).view(4, 8).requires_grad_()
with naming("forward"):
    loss = block(batch).square().mean()
with naming("backward"):
    loss.backward()
alone(batch).square().mean().backward()
for name, parameter in block.named_parameters():
    gradient, due = parameter.grad, alone.get_parameter(name).grad
    assert isinstance(parameter, TorchDTensor) and isinstance(gradient, TorchDTensor)  # noqa: PT018
    right = due is not None and torch.allclose(gradient.full_tensor(), due, atol=1e-6)
    here = tuple(parameter.to_local().shape)
    say(f"  {name}: {here} of {tuple(parameter.shape)} here; gradient as in one process: {right}")

say("== 8. Collectives are conversions")
mine, ones = numbers[rank : rank + 1], torch.ones_like(numbers)
for name, local, source, target in (
    ("all-gather", mine, "[S0]", "[R]"),
    ("all-reduce", ones * rank, "[R|P0]", "[R]"),
    ("reduce-scatter", ones * rank, "[R|P0]", "[S0]"),
    ("all-to-all", 10 * mine[:, None] + numbers, "[S0,R]", "[R,S0]"),
):
    before = DTensor.from_local(local, row, source)
    zero, one, *_ = places(before.redistribute(target).to_local())
    say(f"  {name}, {source} → {target}: rank 0 has {zero}, rank 1 {one}")

# No process ends while others still communicate.
dist.barrier()
dist.destroy_process_group()
