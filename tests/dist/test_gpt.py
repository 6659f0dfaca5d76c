"""Blocks of the GPT family by rules in a job of two: values and gradients of one process."""

import math
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec import DTensor, distribute_module, init_device_mesh
from shardspec.parallel import inputs_as, outputs_as
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

VOCABULARY, WIDTH, HEADS, LENGTH = 14, 12, 4, 5


class InputsFirst(nn.Module):
    """A linear layer as GPT-2 has it in Hugging Face's models, its weight turned."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Any) -> Any:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], flat.size(-1))


def attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of (batch, heads, length, features)."""
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    mixed = scores.softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """All queries first, then all keys, then all values; as in GPT-2 and nanoGPT."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.c_attn, self.c_proj = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        parts = self.c_attn(x).split(WIDTH, dim=2)
        return self.c_proj(attended(*(p.unflatten(2, (HEADS, -1)).transpose(1, 2) for p in parts)))


class HeadByHead(nn.Module):
    """Query, key and value of a head beside each other; as in GPT-NeoX."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        heads = self.query_key_value(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        return self.dense(attended(*heads.chunk(3, dim=-1)))


class FeedForward(nn.Module):
    def __init__(self, linear: Any, names: tuple[str, str]) -> None:
        super().__init__()
        self.up, self.down = names
        self.add_module(self.up, linear(WIDTH, 4 * WIDTH))
        self.add_module(self.down, linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        return self.get_submodule(self.down)(F.gelu(self.get_submodule(self.up)(x)))


class Block(nn.Module):
    def __init__(self, name: str, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.own = name
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.add_module(name, attention)
        self.mlp = mlp

    def forward(self, x: Any) -> Any:
        x = x + self.get_submodule(self.own)(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([block])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


def nano() -> Gpt:
    mlp = FeedForward(nn.Linear, ("c_fc", "c_proj"))
    return Gpt(Block("attn", Fused(nn.Linear), mlp))


def gpt2() -> Gpt:
    mlp = FeedForward(InputsFirst, ("c_fc", "c_proj"))
    return Gpt(Block("attn", Fused(InputsFirst), mlp))


def neox() -> Gpt:
    mlp = FeedForward(nn.Linear, ("dense_h_to_4h", "dense_4h_to_h"))
    return Gpt(Block("attention", HeadByHead(), mlp))


NANO = {
    "h.0.attn.c_attn.weight": "[S(tp),R]",
    "h.0.attn.c_attn.bias": "[S(tp)]",
    "h.0.attn.c_proj.weight": "[R,S(tp)]",
    "h.0.mlp.c_fc.weight": "[S(tp),R]",
    "h.0.mlp.c_fc.bias": "[S(tp)]",
    "h.0.mlp.c_proj.weight": "[R,S(tp)]",
    "wte.weight": "[S(tp),R]",
    "lm_head.weight": "[S(tp),R]",
}
TURNED = {"[S(tp),R]": "[R,S(tp)]", "[R,S(tp)]": "[S(tp),R]"}
GPT2 = {name: TURNED.get(spec, spec) if ".c_" in name else spec for name, spec in NANO.items()}
NEOX_NAMES = {
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
NEOX = {
    reduce(lambda text, pair: text.replace(*pair), NEOX_NAMES.items(), name): spec
    for name, spec in NANO.items()
}
FAMILY = {
    "nanoGPT": (nano, NANO, "h.0.attn.c_attn.weight", "c_proj", (18, WIDTH), "[R,R,R]"),
    "GPT-2": (gpt2, GPT2, "h.0.attn.c_attn.weight", "c_proj", (WIDTH, 18), "[R,R,R]"),
    "GPT-NeoX": (
        neox,
        NEOX,
        "h.0.attention.query_key_value.weight",
        "dense",
        (18, WIDTH),
        "[R,R,S0]",
    ),
}


def loss_of(module: nn.Module) -> torch.Tensor:
    tokens = torch.arange(3 * LENGTH).reshape(3, LENGTH) % VOCABULARY
    logits = module(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
    loss.backward()
    return loss.detach()


def as_in_one_process(mesh, name):
    """Return the specs that the attention's last layer has seen."""
    build, rules, fused, after, shape, _ = FAMILY[name]
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(build().double())
    alone, module = made
    seen = []
    last = module.get_submodule(fused.rsplit(".", 2)[0]).get_submodule(after)
    distribute_module(module, mesh, rules, inputs_as("[R]"), outputs_as("[R,R,R]"))
    last.register_forward_pre_hook(
        lambda _, inputs: seen.append(str(DTensor.from_torch(inputs[0]).sharding_spec))
    )
    torch.testing.assert_close(loss_of(module), loss_of(alone))
    assert DTensor.from_torch(module.get_parameter(fused)).to_local().shape == shape
    for key, parameter in module.named_parameters():
        assert isinstance(parameter.grad, TorchDTensor), key
        torch.testing.assert_close(
            parameter.grad.full_tensor(), alone.get_parameter(key).grad, msg=key
        )
    return seen


def with_dropout(rank, mesh):
    """What is whole stays the same on all ranks, and shards draw numbers of their own."""
    torch.manual_seed(100 + rank)
    module = nn.Sequential(nn.Linear(WIDTH, 40, bias=False), nn.Dropout(0.5), nn.Dropout(0.5))
    module.requires_grad_(False)
    distribute_module(module, mesh, {"0.weight": "[S(tp),R]"}, inputs_as("[R,R]"))
    kept = []
    module[1].register_forward_hook(lambda _, __, result: kept.append(result))
    for _ in range(2):
        result = module(torch.ones(3, WIDTH))
        assert isinstance(result, TorchDTensor)
    masks = [DTensor.from_torch(result).to_global() != 0 for result in kept]
    assert not torch.equal(masks[0], masks[1])
    # The halves belong to one rank each.
    assert not torch.equal(masks[0][:, :20], masks[0][:, 20:])
    assert all(20 < int(mask.sum()) < 100 for mask in masks)
    module.eval()
    state = torch.get_rng_state()
    module(torch.ones(3, WIDTH))
    assert torch.equal(state, torch.get_rng_state())
    whole = distribute_module(nn.Sequential(nn.Dropout(0.5)), mesh, {}, inputs_as("[R,R]"))
    return whole(torch.ones(6, 7)).to_local().tolist()


def play(rank):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), axis_names=("tp",))
    return {name: as_in_one_process(mesh, name) for name in FAMILY}, with_dropout(rank, mesh)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("job"), play)


@pytest.mark.parametrize("name", FAMILY)
def test_attention_is_cut_by_heads_where_the_weight_allows_it(played, name):
    """And before that, losses and gradients are compared on the ranks themselves."""
    for seen, _ in played:
        assert seen[name] == [FAMILY[name][-1]]


def test_dropout_of_what_is_whole_is_the_same_on_all_ranks(played):
    (_, first), (_, second) = played
    assert first == second
    assert 0 < sum(map(sum, first)) < 84
