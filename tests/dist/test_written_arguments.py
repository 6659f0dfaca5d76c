"""Functions that write to arguments: fused optimizers, running statistics; losses in parallel."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardspec import DTensor, distribute_module, init_device_mesh
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

# The stubs of torch take nothing but its own tensors.
Cut: Any = DTensor
CPU: Any = torch
SPECS = {1: ("[S0,R]", "[R,S0]", "[R,R]"), 2: ("[S0,S1]", "[S01,R]", "[S10,R]", "[S1,R]")}


def adamw(p, g, m, v):
    options = {"weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    one = torch.tensor(1.0)
    CPU._fused_adamw_([p], [g], [m], [v], [], [one], lr=0.1, beta1=0.9, beta2=0.99, **options)


def sgd(p, g, m, v):
    options = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
    CPU._fused_sgd_(
        [p, v], [g, g], [m, m.clone()], weight_decay=0.1, momentum=0.9, lr=0.1, **options
    )


WRITES: dict[str, Any] = {
    "adamw": adamw,
    "sgd": sgd,
    "add": lambda p, g, m, v: CPU._foreach_add_([p, m], [g, v]),
    "addcmul": lambda p, g, m, _: CPU._foreach_addcmul_([p], [g], [m]),
    "lerp": lambda p, g, m, v: CPU._foreach_lerp_([p, v], [g, m], 0.3),
    # Arguments of other shapes and layouts, which torch's DTensor takes.
    "broadcast addcmul": lambda p, g, m, _: p.addcmul_(g.sum(1, keepdim=True), m.sum(0)),
    "broadcast lerp": lambda p, g, m, _: p.lerp_(g.sum(0, keepdim=True), m.sum(1, keepdim=True)),
    "broadcast fill": lambda p, g, *_: p.masked_fill_(g.sum(1, keepdim=True) > 3, 2.0),
}


def differences(mesh):
    """Return the names of what differs from one process."""
    wrong = []

    def compare(name, ours, whole):
        for mine, theirs in zip(ours, whole, strict=True):
            found = mine.to_global() if isinstance(mine, DTensor) else mine.full_tensor()
            if not torch.allclose(found, theirs, atol=1e-6):
                wrong.append(name)

    for rows in (8, 5):
        given = [torch.rand(rows, 6) for _ in range(4)]
        for spec in SPECS[mesh.ndim]:
            for name, write in WRITES.items():
                ours, whole = (
                    [Cut(t.clone(), mesh, spec) for t in given],
                    [t.clone() for t in given],
                )
                write(*ours)
                write(*whole)
                compare(f"{name} of {rows} rows as {spec}", ours, whole)
        wide = torch.rand(rows, 6, 4)
        for spec in SPECS[mesh.ndim]:
            for norm, cut in (
                (F.batch_norm, "[R]"),
                (F.batch_norm, "[S0]"),
                (F.instance_norm, "[S0]"),
            ):
                results = []
                for made in (lambda t, s: Cut(t, mesh, s), lambda t, _: t):
                    x = made(wide.clone().requires_grad_(), f"{spec[:-1]},R]")
                    mean, var = made(torch.zeros(6), cut), made(torch.ones(6), cut)
                    y = norm(x, mean, var, None, None, True)
                    (y.to_global() if isinstance(y, DTensor) else y).pow(3).sum().backward()
                    results.append((y, mean, var, x.grad))
                compare(f"{norm.__name__} of {rows} rows as {spec}, statistics {cut}", *results)
    return wrong


def losses_in_parallel(mesh):
    """Return the names of losses under torch's `loss_parallel` that differ."""
    from torch.distributed.tensor.parallel import loss_parallel

    wrong, logits, target = [], torch.rand(6, 8), torch.tensor([0, 1, 7, 3, -100, 2])
    for spec in SPECS[mesh.ndim]:
        for labels, reduction in (
            ("[R]", "mean"),
            ("[S0]", "mean"),
            ("[S0]", "sum"),
            ("[R]", "none"),
        ):
            ours: Any = Cut(logits.clone().requires_grad_(), mesh, spec)
            whole: Any = logits.clone()
            whole.requires_grad_()
            with loss_parallel():
                mine: Any = F.cross_entropy(ours, Cut(target, mesh, labels), reduction=reduction)
                mine.to_global().sum().backward()
            theirs = F.cross_entropy(whole, target, reduction=reduction)
            theirs.sum().backward()
            pairs = (mine.to_global(), theirs), (ours.grad.to_global(), whole.grad)
            wrong += [
                f"{spec}, {labels}, {reduction}" for a, b in pairs if not torch.allclose(a, b)
            ]
    return wrong


def trained(mesh, options):
    """Return the parameters after three steps, of a sharded module or of one process."""
    torch.manual_seed(1)
    module: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    x: Any = torch.rand(4, 6)
    if mesh is not None:
        module = distribute_module(module, mesh, {"*weight": "[S0,R]"})
        x = Cut(x, mesh).to_torch()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(x).pow(2).sum()
        (loss if mesh is None else loss.full_tensor()).backward()
        optimizer.step()
    return [p.detach() if mesh is None else p.full_tensor().detach() for p in module.parameters()]


def told(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def play(_, shape):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape)
    wrong = differences(mesh) + losses_in_parallel(mesh)
    every: list[Any] = [{"fused": True}, {"foreach": True}]
    for options in every:
        for ours, whole in zip(trained(mesh, options), trained(None, options), strict=True):
            wrong += [] if torch.allclose(ours, whole, atol=1e-6) else [str(options)]
        pair: Any = Cut(torch.ones(4, 6), mesh, "[S0,R]"), torch.ones(4, 6)
        for tensor in pair:
            optimizer = torch.optim.AdamW([tensor.requires_grad_()], lr=0.1, **options)
            tensor.cos().sum().backward()
            optimizer.step()
        wrong += [] if torch.allclose(pair[0].to_global(), pair[1]) else [f"our own, {options}"]
    tensor = Cut(torch.ones(4, 6), mesh)
    calls = (
        lambda: torch.vmap(lambda row: row * 2)(tensor),
        lambda: torch.func.grad(torch.sum)(tensor),
    )
    return wrong, [told(call) for call in calls]


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_arguments_are_written_and_losses_right(tmp_path, shape):
    (wrong, refusals), *others = run_ranks(2 ** len(shape), tmp_path, play, shape)
    assert wrong == []
    assert all(other == ([], refusals) for other in others)
    assert all("DTensor" in text and "\n" not in text for text in refusals)
