"""Modules cut by rules in a job of four: trained as in one process, and taken by torch's tools."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor

import shardspec
from shardspec import (
    DeviceMesh,
    DTensor,
    ShardingSpec,
    ShardSpecError,
    distribute_module,
    init_device_mesh,
    match_rules,
)
from shardspec.parallel import inputs_as, outputs_as
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

VOCABULARY, WIDTH, HEADS, INNER, LENGTH = 16, 8, 4, 12, 6
COLUMNS = [
    "*.q_proj",
    "*.k_proj",
    "*.v_proj",
    "*.gate_proj",
    "*.up_proj",
    "lm_head",
    "embed_tokens",
]
LLAMA = {
    **{f"{name}.weight": "[S(tp),R]" for name in COLUMNS},
    **{f"{name}.weight": "[R,S(tp)]" for name in ("*.o_proj", "*.down_proj")},
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Any) -> Any:
        q, k, v = (
            proj(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = (q * (WIDTH // HEADS) ** -0.5) @ k.transpose(2, 3)
        mixed = scores.softmax(-1) @ v
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), FeedForward()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    scale: Any

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block()])
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: Any) -> Any:
        x = self.embed_tokens(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def model():
    torch.manual_seed(7)
    return Model().double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)


def loss_of(logits, tokens):
    """A mean over the tokens that are given."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def train(module, mine, steps=2):
    """Train by AdamW, on some rows of each batch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for step in range(steps):
        tokens = batch(step)[mine]
        loss = loss_of(module(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def check(module, mesh, specs=None):
    """Compare every parameter with the same training in one process."""
    alone = model()
    train(alone, slice(None))
    for (name, cut), (_, whole) in zip(
        module.named_parameters(), alone.named_parameters(), strict=True
    ):
        assert isinstance(cut, nn.Parameter), name
        assert isinstance(cut.data, TorchDTensor), name
        ours = DTensor.from_torch(cut)
        assert ours.device_mesh == mesh
        torch.testing.assert_close(ours.detach().to_global(), whole.detach(), msg=name)
        if specs is not None:
            assert ours.sharding_spec == DTensor(whole, mesh, specs[name]).sharding_spec, name


def local_shape(module, name):
    return DTensor.from_torch(module.get_parameter(name)).to_local().shape


def fsdp_specs(module, axis, rules):
    """Return specs of parameters whose dim 0 `fully_shard` has sharded over one more axis."""
    dims = {name: parameter.dim() for name, parameter in module.named_parameters()}
    before = {name: ShardingSpec(ndim) for name, ndim in dims.items()} | match_rules(rules, dims)
    return {
        name: spec.with_dims({0: [*spec.dim_specs[0].axes, axis]}) for name, spec in before.items()
    }


def tensor_parallel(mesh):
    tp = mesh["tp"]
    module = distribute_module(model(), tp, LLAMA, inputs_as("[R]"), outputs_as("[R,R,R]"))
    assert isinstance(module.get_parameter("lm_head.weight").data, TorchDTensor)
    assert local_shape(module, "layers.0.mlp.up_proj.weight") == (6, WIDTH)
    assert isinstance(module.get_buffer("scale"), TorchDTensor)
    train(module, slice(None))
    check(module, tp)


def with_a_cut_sequence(mesh):
    tp = mesh["tp"]
    seen = []
    module = model()
    module.layers[0].post_attention_layernorm.register_forward_hook(
        lambda _, inputs, __: seen.append(DTensor.from_torch(inputs[0]).sharding_spec)
    )
    distribute_module(
        module,
        tp,
        LLAMA,
        inputs_as("[R]"),
        outputs_as("[R,R,R]"),
        outputs=dict.fromkeys(["embed_tokens", "*.o_proj", "*.down_proj"], "[R,S(tp),R]"),
    )
    train(module, slice(None))
    assert {str(spec) for spec in seen} == {"[R,S0,R]"}
    check(module, tp)


def on_both_axes(mesh):
    """Tensor parallel by tp and data parallel by dp, all by rules."""

    def make():
        torch.manual_seed(5)
        return nn.Sequential(nn.RMSNorm(WIDTH), FeedForward(), nn.RMSNorm(WIDTH)).double()

    def trained(module, rows):
        x = torch.arange(4 * LENGTH * WIDTH).reshape(4, LENGTH, WIDTH).double().cos()
        module(x[rows]).square().cumsum(2).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        return module

    dp = mesh.coordinates(dist.get_rank())[0]
    alone = trained(make(), slice(None))
    tp_rules = {
        "1.gate_proj.weight": "[S(tp),R]",
        "1.up_proj.weight": "[S(tp),R]",
        "1.down_proj.weight": "[R,S(tp)]",
    }
    module = distribute_module(
        make(),
        mesh,
        tp_rules,
        inputs_as("[S(dp)]"),
        outputs_as("[S(dp),R,R]"),
        outputs={"1.down_proj": "[S(dp),R,R]"},
    )
    trained(module, slice(2 * dp, 2 * dp + 2))
    for name, whole in alone.named_parameters():
        cut = DTensor.from_torch(module.get_parameter(name).detach())
        torch.testing.assert_close(cut.to_global(), whole.detach(), msg=name)


def fully_sharded(mesh, directory):
    """FSDP over dp, around tensor parallelism: FSDP takes the mean of the gradients over dp."""
    dp = mesh.coordinates(dist.get_rank())[0]
    module = distribute_module(model(), mesh["tp"], LLAMA, inputs_as("[R]"), outputs_as("[R,R,R]"))
    specs = fsdp_specs(module, "dp", LLAMA)
    for layer in module.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh["dp"].to_torch())
    fully_shard(module, mesh=mesh["dp"].to_torch())
    train(module, slice(2 * dp, 2 * dp + 2))
    check(module, mesh, specs)
    # torch's distributed checkpoint, and ours, take it.
    dcp_save(module.state_dict(), checkpoint_id=directory / "dcp")
    state = {name: tensor * 0 for name, tensor in module.state_dict().items()}
    dcp_load(state, checkpoint_id=directory / "dcp")
    for name, tensor in module.state_dict().items():
        assert torch.equal(state[name].to_local(), tensor.to_local())
    ours = {
        name: DTensor.from_torch(tensor.detach())
        for name, tensor in module.state_dict().items()
        if tensor.device_mesh.ndim == 2
    }
    shardspec.save_sharded(ours, directory / "ours")


def hybrid(mesh):
    """HSDP: copies along one axis, shards along the other, on the whole mesh."""
    module = model()
    del module.scale
    module.scale = 2.0
    rank = dist.get_rank()
    specs = fsdp_specs(module, "tp", {})
    fully_shard(module, mesh=mesh.to_torch())
    train(module, [rank])
    alone = model()
    train(alone, slice(None))
    for name, cut in module.named_parameters():
        ours = DTensor.from_torch(cut)
        assert ours.device_mesh == mesh
        assert ours.layout.labelled_spec == specs[name]
        whole = alone.get_parameter(name).detach()
        torch.testing.assert_close(ours.detach().to_global(), whole)


def other_modules(mesh):
    tp = mesh["tp"]
    # Tied weights stay tied, and without data there is none made.
    tied = model().to("meta")
    tied.lm_head.weight = tied.embed_tokens.weight
    distribute_module(tied, tp, {"embed_tokens.weight": "[S0,R]", "lm_head.weight": "[S0,R]"})
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert tied.lm_head.weight.is_meta
    assert DTensor.from_torch(tied.lm_head.weight).layout.local_shape(tp.ids[0]) == (8, WIDTH)
    # A pair of layers with biases, our own tensor as input; cut again another way.
    torch.manual_seed(2)
    pair = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    expected = pair(x).detach()
    rules = {"0.weight": "[S(tp),R]", "0.bias": "[S(tp)]", "2.weight": "[R,S(tp)]"}
    distribute_module(pair, mesh, rules)
    result = pair(DTensor(x, mesh, "[S(dp),R]"))
    assert type(result) is DTensor
    torch.testing.assert_close(result.to_global().detach(), expected)
    distribute_module(pair, mesh, {"*.weight": "[R,S(dp)]"})
    assert str(DTensor.from_torch(pair.get_parameter("0.weight")).sharding_spec) == "[R,S0]"
    again = pair(DTensor(x, mesh, "[R,R]"))
    torch.testing.assert_close(again.to_global().detach(), expected)


def told(rules, mesh, make=model, **more):
    module = make()
    before = list(module.parameters())
    try:
        distribute_module(module, mesh, rules, **more)
    except ShardSpecError as error:
        assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def tied():
    module = model()
    module.lm_head.weight = module.embed_tokens.weight
    return module


def refused(mesh):
    return [
        told({"*.q_porj.weight": "[S(tp),R]"}, mesh),
        told({"*.q_proj.weight": "[S(tp),R]", "*_proj.weight": "[R,R]"}, mesh),
        told({"norm.weight": "[S(tp),R]"}, mesh),
        told({"norm.weight": "[R|P(tp)]"}, mesh),
        told({"norm.weight": "[R|P(dp),Pmax(tp)]"}, mesh),
        told({"norm.weight": "[S(pp)]"}, mesh),
        told({"norm.weight": "[S"}, mesh),
        told({"embed*.weight": "[S(tp),R]", "lm_head.weight": "[R,R]"}, mesh, tied),
        told({}, mesh, outputs={"*.out": "[R,S(tp),R]"}),
        told({}, mesh, outputs={"*.o_proj": "[R,S(tp),R]", "*o_proj": "[R,S(tp)]"}),
        told({}, DeviceMesh(range(3, -1, -1), (4,))),
        told({}, DeviceMesh(range(5), (5,))),
    ]


def random_numbers(rank, mesh):
    """One tensor on every rank, though torch's own generators differ."""
    torch.manual_seed(100 + rank)
    rows = shardspec.randn(9, 5, device_mesh=mesh, sharding_spec="[S01,R]")
    torch.manual_seed(100 + rank)
    columns = shardspec.randn(9, 5, device_mesh=mesh, sharding_spec="[S0,S1]")
    assert torch.equal(rows.to_global(), columns.to_global())
    assert list(rows.shards) == [rank]
    doubled: Any = shardspec.ones(9, 5, device_mesh=mesh, sharding_spec="[S01,R]") + rows
    torch.testing.assert_close(doubled.to_global(), rows.to_global() + 1)
    empty: Any = shardspec.zeros(9, 5, device_mesh=mesh, sharding_spec="[S0,R]", device="meta") * 2
    assert empty.to_local().device.type == "meta"


def play(rank, directory):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    random_numbers(rank, mesh)
    tensor_parallel(mesh)
    with_a_cut_sequence(mesh)
    on_both_axes(mesh)
    fully_sharded(mesh, directory)
    hybrid(mesh)
    other_modules(mesh)
    return refused(mesh)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    directory = tmp_path_factory.mktemp("job")
    return directory, run_ranks(4, directory, play, directory)


REFUSALS = [
    "LayoutError: rule '*.q_porj.weight' matches no tensor; the names start with 'scale', ",
    "LayoutError: rule '*.q_proj.weight' has no effect, since later rules win and '*_proj.weight'",
    "LayoutError: rule 'norm.weight' has spec [S(tp),R] of 2 dims, but tensor 'norm.weight' has 1; "
    "write [S(tp),...]",
    "LayoutError: tensor 'norm.weight' cannot be sharded as [R|P(tp)]; give a spec",
    "AxisError: rule 'norm.weight': pending reductions ['max', 'sum'] do not commute, so their "
    "result depends on the order; finish one",
    "AxisError: spec [S(pp)]: mesh dp=2,tp=2 has no axis named 'pp'; its names: dp, tp",
    "SpecSyntaxError: ",
    "LayoutError: 'embed_tokens.weight' and 'lm_head.weight' are one tensor, but the rules",
    "LayoutError: rule '*.out' matches no module",
    "LayoutError: rule '*.o_proj' has no effect, since later rules win and '*o_proj' matches every",
    "MeshError: mesh 4 has the ids (3, 2, 1, 0) along an axis, but torch sorts",
    "CommunicatorError: device 4 of mesh 5 is not a rank of this job, which has 4 ranks",
]


@pytest.mark.parametrize("case", range(len(REFUSALS)))
def test_what_does_not_fit_leaves_the_module_as_it_was(played, case):
    """And before that, everything that is asserted on the ranks themselves."""
    _, outcomes = played
    assert len(outcomes) == 4
    for refusals in outcomes:
        assert len(refusals) == len(REFUSALS)
        assert refusals[case].startswith(REFUSALS[case])


def test_what_was_saved_merges_to_what_one_process_trains(played, tmp_path):
    from safetensors.torch import load_file

    directory, _ = played
    shardspec.merge(directory / "ours", tmp_path / "whole.safetensors")
    merged = load_file(tmp_path / "whole.safetensors")
    alone = model()
    train(alone, slice(None))
    assert merged.keys() == dict(alone.named_parameters()).keys()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(merged[name], parameter.detach())
