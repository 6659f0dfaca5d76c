"""Sends weights from a trainer to a generator after every step, as in reinforcement learning.

torchrun --standalone --nproc_per_node 6 examples/weight_sync.py

Ranks 0 to 3 train with torch: fully sharded over dp, tensor-parallel over tp. Ranks 4 and 5
generate, tensor-parallel, with q, k, v in one matrix and gate, up in another. One plan of all
copies is made once and run after every step.
"""

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from shardspec import DeviceMesh, DTensor, Layout, NameMap, plan_reshard

HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN, WORDS, LAYERS = 8, 4, 16, 128, 352, 512, 2
STEPS = 5

# On each generating rank the rows of its q, k and v heads follow each other, as do gate and up.
FUSED = """
[sizes]
t = 2                       # ranks that generate
d = 16                      # rows of a head
q = 4                       # heads of a rank
k = 2                       # key and value heads of a rank
r = "q + 2*k"
g = 2                       # gate and up

[[map]]
source = ["layers.{i}.attention.q.weight", "(t q d) c"]
target = ["layers.{i}.qkv", "(t r d) c", "r[:q]"]
[[map]]
source = ["layers.{i}.attention.k.weight", "(t k d) c"]
target = ["layers.{i}.qkv", "(t r d) c", "r[q:q+k]"]
[[map]]
source = ["layers.{i}.attention.v.weight", "(t k d) c"]
target = ["layers.{i}.qkv", "(t r d) c", "r[q+k:]"]
[[map]]
source = ["layers.{i}.gate.weight", "(t f) c"]
target = ["layers.{i}.gate_up", "(t g f) c", "g[0]"]
[[map]]
source = ["layers.{i}.up.weight", "(t f) c"]
target = ["layers.{i}.gate_up", "(t g f) c", "g[1]"]
[[map]]
source = "layers.{i}.attention.o.weight"
target = "layers.{i}.o"
[[map]]
source = "layers.{i}.down.weight"
target = "layers.{i}.down"
[[map]]
source = "layers.{i}.norms.{n}.weight"
target = "layers.{i}.norms.{n}"
[[map]]
source = "norm.weight"
target = "norm"
[[map]]
source = "words.weight"
target = "words"
"""
GENERATOR_SPECS = {
    "*.qkv": "[S(tp),R]",
    "*.gate_up": "[S(tp),R]",
    "*.o": "[R,S(tp)]",
    "*.down": "[R,S(tp)]",
}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of (batch, time, heads times HEAD_DIM), for the heads of this rank."""
    q, k, v = (x.view(*x.shape[:-1], -1, HEAD_DIM).transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's attention, to be added to its input."""
        out: torch.Tensor = self.o(attention(self.q(x), self.k(x), self.v(x)))
        return out


class Block(nn.Module):
    """A layer as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        out: torch.Tensor = x + self.down(silu(self.gate(y)) * self.up(y))
        return out


class Model(nn.Module):
    """The trained model; embedding and head share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return linear(self.norm(x), self.words.weight)


def trainer(mesh: TorchMesh) -> Model:
    """Return the model, sharded by torch over dp and tp."""
    torch.manual_seed(0)
    model = Model()
    by_columns = ("attention.q", "attention.k", "attention.v", "gate", "up")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in by_columns}
    plan |= {name: RowwiseParallel() for name in ("attention.o", "down")}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def generate(
    weights: dict[str, torch.Tensor], ids: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return logits by the shards of this generating rank."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        return x

    x = embedding(ids, weights["words"])
    for i in range(LAYERS):
        w = {n.removeprefix(f"layers.{i}."): t for n, t in weights.items() if f".{i}." in n}
        y = rms_norm(x, (WIDTH,), w["norms.0"], torch.finfo(x.dtype).eps)
        rows = [heads * HEAD_DIM // 2 for heads in (HEADS, HEADS + KV_HEADS)]
        q, k, v = linear(y, w["qkv"]).tensor_split(rows, dim=-1)
        x = x + summed(linear(attention(q, k, v), w["o"]))
        y = rms_norm(x, (WIDTH,), w["norms.1"], torch.finfo(x.dtype).eps)
        gate, up = linear(y, w["gate_up"]).chunk(2, dim=-1)
        x = x + summed(linear(silu(gate) * up, w["down"]))
    x = rms_norm(x, (WIDTH,), weights["norm"], torch.finfo(x.dtype).eps)
    return linear(x, weights["words"])


def by_full_tensors(state: dict[str, TorchDTensor], layouts: dict[str, Layout]) -> float:
    """Return the seconds of the usual way: gather every tensor, and send it to all."""
    dist.barrier()
    start = time.perf_counter()
    for name, layout in layouts.items():
        if dist.get_rank() < 4:
            whole = state[name].full_tensor()
        else:
            whole = torch.empty(layout.global_shape)
        dist.broadcast(whole, 0)
    return time.perf_counter() - start


# torch warns once per rank that it gathers such tensors in two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
training = rank < 4
pair = dist.new_group([4, 5])
# All ranks of a job create groups, also those outside the mesh.
torch_mesh = TorchMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
serving = DeviceMesh([4, 5], (2,), axis_names=("tp",))

model = trainer(torch_mesh) if training else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if model is not None else None
state: dict[str, Any] = dict(model.state_dict()) if model is not None else {}
plan = plan_reshard(state, (serving, GENERATOR_SPECS), names=NameMap.parse(FUSED))
layouts = {move.source_name: move.source for move in plan.moves}
if rank == 0:
    print(plan)

out: dict[str, DTensor] | None = None
torch.manual_seed(1)
for step in range(STEPS):
    ids = torch.randint(0, WORDS, (4, 32))
    if model is not None and optimizer is not None:
        logits = model(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        optimizer.zero_grad()
    state = dict(model.state_dict()) if model is not None else {}
    dist.barrier()
    start = time.perf_counter()
    out = plan.run(state, out)
    seconds = time.perf_counter() - start

    # The same with a receipt: every rank compares digests of sent and received tensors.
    dist.barrier()
    start = time.perf_counter()
    out, receipt = plan.run(state, out, receipt=True, version=step)
    receipt.require(step)
    with_receipt = time.perf_counter() - start
    usual = by_full_tensors(state, layouts)

    # Compare the generator's logits with the trainer's, for the same words.
    expected = torch.empty(4, 32, WORDS)
    if model is not None:
        with torch.no_grad():
            expected = model(ids).contiguous()
    dist.broadcast(expected, 0)
    if not training:
        got = generate({name: t.to_local() for name, t in out.items()}, ids, pair)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    if rank == 4:
        moved = sum(plan.sent.values())
        print(
            f"step {step}: logits equal, {moved / 1e6:.2f} MB in {seconds * 1e3:.1f} ms; "
            f"with a receipt, {receipt.digests.value}: {with_receipt * 1e3:.1f} ms; "
            f"full_tensor: {usual * 1e3:.1f} ms",
            flush=True,
        )
dist.destroy_process_group()
