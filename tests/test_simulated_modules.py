"""Modules that are sharded on a mesh that this process simulates, beside whole ones."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardspec import DeviceMesh, DTensor, distribute_module, distribute_tensor
from shardspec.parallel import inputs_as, outputs_as

MESH = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
RULES = {
    "0.weight": "[S(tp),R]",
    "1.weight": "[S(tp),R]",
    "1.bias": "[S(tp)]",
    "4.weight": "[R,S(tp)]",
}


def build() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4), nn.BatchNorm1d(4)
    return nn.Sequential(nn.Embedding(10, 6), *layers)


def by_function(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(
            distribute_tensor(module.weight, mesh, [Replicate(), Shard(0)])
        )


@pytest.mark.parametrize("how", [RULES, by_function], ids=["rules", "function"])
def test_a_module_trains_as_a_whole_one(how):
    alone = build()
    module: Any = distribute_module(build(), MESH, how)
    numbers = torch.randint(0, 10, (4,))
    for _ in range(2):
        y, whole = module(DTensor(numbers, MESH, "[S(dp)]")), alone(numbers)
        torch.testing.assert_close(y.to_global(), whole)
        y.pow(3).sum().backward()
        whole.pow(3).sum().backward()
        with torch.no_grad():
            for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.to_global(), theirs.grad)
                for each in (ours, theirs):
                    each -= 0.1 * each.grad
                    each.grad = None
    state = module.state_dict()
    assert str(module[1].weight.layout.labelled_spec) == "[S(tp),R]"
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name].to_global(), value)
    again: Any = distribute_module(module, MESH, {"1.weight": "[R,S0]"})
    assert again[1].weight.shards[2].shape == (8, 3)


def test_shards_go_in_and_a_tensor_of_all_shards_comes_out():
    module: Any = distribute_module(
        nn.Linear(6, 8), MESH, {"weight": "[S(tp),R]"}, inputs_as("[S(dp)]"), outputs_as("[S(dp)]")
    )
    x = torch.rand(2, 6)
    y = module(x)
    assert str(y.layout.labelled_spec) == "[S(dp),R]"
    alone = module.weight.to_global(), module.bias.to_global()
    torch.testing.assert_close(y.to_global(), nn.functional.linear(x.repeat(2, 1), *alone))


@pytest.mark.parametrize("spec", ["[S0,S1]", "[R,S01]"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop", "Adafactor"])
def test_optimizers_of_torch_step_as_in_one_process(kind, spec):
    weight, rows = torch.randn(6, 5), torch.randn(3, 6)
    ours, alone = DTensor(weight.clone().requires_grad_(), MESH, spec), weight.requires_grad_()
    pairs = [(ours, DTensor(rows, MESH, "[R,R]")), (alone, rows)]
    for tensor, inputs in pairs:
        optimizer = getattr(torch.optim, kind)([tensor], lr=0.1)
        for _ in range(3):
            (inputs @ tensor).sin().square().sum().backward()
            torch.nn.utils.clip_grad_norm_([tensor], 1.0)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.to_global(), alone)
