"""The collectives of sharded models in a job of two: nothing is gathered where shards suffice."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from shardspec import DTensor, init_device_mesh, trace
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

# The stubs of torch take nothing but its own tensors.
Cut: Any = DTensor
KINDS = {"all_reduce": "reduce", "all_gather": "gather", "reduce_scatter": "scatter"}
OURS = {"AllReduce": "reduce", "AllGather": "gather", "ReduceScatter": "scatter", "Slice": ""}


def counted(run):
    """Return the collectives of torch and the steps of conversions within a call, by kind."""
    kinds: Counter[str] = Counter()
    with CommDebugMode() as theirs, trace() as steps:
        run()
    for op, number in theirs.get_comm_counts().items():
        kinds[next(kind for name, kind in KINDS.items() if name in str(op))] += number
    for record in steps.records:
        name = type(record.step).__name__
        kinds[OURS.get(name, name)] += 1
    del kinds[""]
    return dict(kinds)


def made(mesh, spec, *shape):
    torch.manual_seed(sum(shape))
    return Cut((torch.randn(shape) / 4).requires_grad_(), mesh, spec)


def play(_):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    results: list[Any] = []
    found: dict[str, Any] = {}
    functional: Any = F
    x, tokens = made(mesh, "[R,R,R]", 2, 6, 8), Cut(torch.arange(12).reshape(2, 6), mesh, "[R,R]")
    up, down = made(mesh, "[S0,R]", 16, 8), made(mesh, "[R,S0]", 8, 16)

    def mlp(given):
        return F.linear(F.gelu(F.linear(given, up)), down)

    def forwards():
        results.append(mlp(x) + x.detach())

    found["mlp"] = counted(forwards), counted(lambda: results[-1].to_global().sum().backward())

    def sequence_parallel():
        whole = made(mesh, "[R,S0,R]", 2, 6, 8).redistribute("[R,R,R]")
        results.append(mlp(whole).redistribute("[R,S0,R]"))

    found["sequence"] = (counted(sequence_parallel),)
    q, k, v = (made(mesh, "[S0,R]", 16, 8) for _ in range(3))
    out = made(mesh, "[R,S0]", 8, 16)

    def attention():
        heads = [F.linear(x, w).view(2, 6, 4, 4).transpose(1, 2) for w in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        results.append(F.linear(mixed.transpose(1, 2).reshape(2, 6, 16), out) + x.detach())

    found["attention"] = (
        counted(attention),
        counted(lambda: results[-1].to_global().sum().backward()),
    )
    weight = made(mesh, "[S0,R]", 12, 8)
    found["embedding"] = (
        counted(
            lambda: results.append(functional.embedding(tokens, weight).redistribute("[R,S0,R]"))
        ),
        counted(lambda: results[-1].to_global().sum().backward()),
    )
    logits, labels = made(mesh, "[S0,R]", 6, 5), torch.tensor([0, -100, -100, -100, -100, 3])
    target = Cut(labels, mesh, "[S0]")
    found["cross entropy"] = (
        counted(lambda: results.append(F.cross_entropy(logits, target))),
        counted(lambda: results[-1].backward()),
    )
    torch.manual_seed(11)
    whole = (torch.randn(6, 5) / 4).requires_grad_()
    F.cross_entropy(whole, labels).backward()
    torch.testing.assert_close(results[-1].to_global(), F.cross_entropy(whole, labels))
    torch.testing.assert_close(logits.grad.to_global(), whole.grad)
    with trace() as steps:
        x.detach().redistribute("[S0,R,R]").kthvalue(1, 0)
    found["gathered"] = (dict(Counter(type(r.step).__name__ for r in steps.records)),)
    return found


def test_shards_stay_shards(tmp_path):
    first, second = run_ranks(2, tmp_path, play)
    assert first == second
    assert first["mlp"] == ({"reduce": 1}, {"reduce": 1})
    assert first["sequence"] == ({"gather": 1, "scatter": 1},)
    assert first["attention"] == ({"reduce": 1}, {"reduce": 1})
    assert first["embedding"][0] == {"scatter": 1}
    assert "reduce" not in first["embedding"][1]
    assert first["cross entropy"] == ({"reduce": 1}, {})
    assert first["gathered"] == ({"Slice": 1, "AllGather": 1},)
