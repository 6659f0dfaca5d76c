"""torch's operators where one process holds the shards of all devices, beside whole tensors."""

import threading
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardspec import DeviceMesh, DTensor, ShardSpecError
from shardspec.errors import LayoutError
from tests.conversions import index_of
from tests.simulated_tensors import all_specs, check
from tests.simulated_tensors import cut as cut_as_it_is

# The stubs of torch take nothing but its own tensors.
Cut: Any = DTensor
MESHES = {
    shape: DeviceMesh(range(shape[0] * shape[1]), shape) for shape in ((2, 2), (2, 3), (1, 2))
}
WHOLE = (torch.arange(35.0).reshape(7, 5) * 0.37).sin().double()
FUNCTIONS: dict[str, Any] = {
    "exp": torch.exp,
    "add": lambda a: a + 2 * a - 1,
    "mul": lambda a: a * a / 3,
    "where": lambda a: torch.where(a > 0, a, 0.5 * a),
    "matmul": lambda a: a @ a.T,
    "linear": lambda a: F.linear(a, a[:2]),
    "sum": lambda a: a.sum(),
    "sum of a dim": lambda a: a.sum(1, keepdim=True),
    "mean": lambda a: a.mean(),
    "mean of a dim": lambda a: a.mean(0),
    "transpose": lambda a: a.transpose(0, 1),
    "view": lambda a: a.view(7, 1, 5),
    "flatten": lambda a: a.flatten(),
    "softmax": lambda a: a.softmax(0),
    "amax": lambda a: a.amax(0),
    "mean of a loss": lambda a: F.l1_loss(a, 2 * a.detach()),
}


def cut(whole: torch.Tensor, mesh: DeviceMesh, spec: str) -> Any:
    """Cut a tensor that wants a gradient."""
    return cut_as_it_is(whole.clone().requires_grad_(), mesh, spec)


def tried(name: str, mesh: DeviceMesh, spec: str) -> str:
    return check(FUNCTIONS[name], [WHOLE.clone().requires_grad_()], mesh, [spec])


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.exhaustive
def test_every_spec_gives_what_one_process_gives(name, shape):
    specs = all_specs(2)
    assert len(specs) == len(set(specs)) == 18
    assert [tried(name, MESHES[shape], spec) for spec in specs] == [""] * 18


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_give_what_one_process_gives(name):
    """The specs that differ most; the others are exhausted elsewhere."""
    for shape, spec in (((2, 3), "[S01,R]"), ((2, 2), "[R,S1|P0]")):
        assert not tried(name, MESHES[shape], spec), spec


def test_second_derivatives():
    ours, whole = cut(WHOLE, MESHES[2, 2], "[S0,S1]"), WHOLE.clone().requires_grad_()
    grads: list[Any] = []
    for tensor in (ours, whole):
        loss: Any = (tensor * tensor * tensor).sum()
        (first,) = torch.autograd.grad(loss, [tensor], create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), [tensor])
        grads.append(second)
    torch.testing.assert_close(grads[0].to_global(), grads[1])
    torch.testing.assert_close(grads[1], 36 * WHOLE**3)


def test_numbers_are_those_of_the_whole():
    tensor = Cut(WHOLE, MESHES[2, 3], "[S0,S1]")
    assert tensor.sum().item() == pytest.approx(WHOLE.sum().item())
    assert float(tensor.max()) == WHOLE.max().item()
    assert bool((tensor == tensor).all())
    assert torch.equal(tensor, tensor)
    assert not torch.equal(tensor, tensor + 1)
    assert len(tensor.split(3)) == 3
    pending: Any = DTensor.from_local(dict.fromkeys(range(6), WHOLE), MESHES[2, 3], "[R,R|P1]")
    assert (pending + 1).to_global().tolist() == (3 * WHOLE + 1).tolist()
    assert (pending + torch.tensor(1.0).double()).to_global().tolist() == (3 * WHOLE + 1).tolist()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (tensor * scale).sum().to_global().backward()
    torch.testing.assert_close(scale.grad, WHOLE.sum())


def test_views_of_the_shape_of_a_tensor_with_dims_or_without():
    mesh = MESHES[2, 2]
    total = Cut(WHOLE, mesh, "[S01,R]").sum()
    number = Cut(torch.tensor(1.0), mesh, "[]")
    for like in (number, torch.tensor(1.0)):
        assert total.view_as(like).shape == ()
        assert total.view_as(like).to_global().item() == pytest.approx(WHOLE.sum().item())
    three = Cut(torch.zeros(5, 1, 7), mesh, "[R,R,R]")
    assert torch.equal(Cut(WHOLE, mesh, "[R,R]").view_as(three).to_global(), WHOLE.view(5, 1, 7))


def test_writes_reach_the_shards():
    mesh = MESHES[2, 3]
    for spec in ("[R,R]", "[S01,R]"):
        tensor, whole = Cut(WHOLE, mesh, spec), WHOLE.clone()
        places = {device: shard.data_ptr() for device, shard in tensor.shards.items()}
        for each in (tensor, whole):
            each += 1
            each[1, 2] = 9
            each[3] = 4
            each[:, 1] = torch.tensor(5)
            each[each > 0.5] = 0
            each[[0, 6]] = 2
            if spec == "[R,R]":
                each.view(7, 5).mul_(2)
            torch.mul(each, 3, out=each)
        assert torch.equal(tensor.to_global(), whole)
        assert {device: shard.data_ptr() for device, shard in tensor.shards.items()} == places
    shares = {device: WHOLE.clone() for device in range(6)}
    pending = DTensor.from_local(shares, mesh, "[R,R|P0]")
    pending.fill_(4)
    assert pending.to_global().tolist() == torch.full((7, 5), 4.0).tolist()


WRITES: list[Any] = [
    lambda t: t.mul_(3),
    lambda t: t.__setitem__(1, 5.0),
    lambda t: t.__setitem__(t > 0, 5.0),
    lambda t: t.view(35)[3:].zero_(),
    lambda t: t.detach().t().add_(1),
    lambda t: t.split(2)[0].fill_(3),
    lambda t: torch.add(t, 1, out=t),
    lambda t: F.relu(t, inplace=True),
    lambda t: torch._foreach_mul_([t], 2.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_backward_that_needs_old_values_is_refused(write):
    mesh, number = MESHES[2, 2], torch.ones(7, 5).double().requires_grad_()
    tensor = Cut(WHOLE.clone(), mesh, "[R,R]")
    leaf = Cut(WHOLE.clone().requires_grad_(), mesh, "[R,R]")
    tensor.view(35)[1:] + 1  # reads alone
    (leaf * tensor).sum().to_global().backward()
    losses = [(leaf * tensor).sum().to_global()]
    losses += [(number * shard).sum() for shard in tensor.shards.values()]
    write(tensor)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_backward_sees_writes_to_views_of_tracked_tensors():
    leaf, other = (Cut(WHOLE.clone().requires_grad_(), MESHES[2, 2], "[S0,R]") for _ in range(2))
    loss = (leaf * other).sum().to_global()
    with pytest.raises(LayoutError, match="gathered into a copy"):
        leaf.t().detach().zero_()
    leaf.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


dropout: Any = F.dropout


def test_replicas_draw_the_same_numbers():
    mesh = MESHES[2, 3]
    for spec in ("[S0,R]", "[R,R]"):
        torch.manual_seed(5)
        ones = Cut(torch.ones(8, 6), mesh, spec)
        kept, after = dropout(ones), torch.rand(2)
        torch.manual_seed(5)
        assert torch.equal(dropout(ones).to_global(), kept.to_global())
        assert torch.equal(torch.rand(2), after)
        assert 0 < kept.to_global().count_nonzero() < 48
        for device, shard in kept.shards.items():
            assert torch.equal(shard, kept.to_global()[index_of(kept.layout, device)])
    # The numbers of the gradient are those of the value.
    tensor = cut(WHOLE.abs() + 1, mesh, "[S0,R]")
    dropped = dropout(tensor)
    dropped.sum().backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.grad.to_global() != 0, dropped.to_global() != 0)


def test_extrema_where_any_device_has_nothing():
    meshes = MESHES[2, 3], DeviceMesh(range(6), (3, 2))
    cases = list(product(range(1, 8), meshes, ("[S01,R]", "[S0,S1]")))
    for length, mesh, spec in cases[::3]:
        whole = WHOLE[:length]
        tensor = Cut(whole, mesh, spec)
        assert tensor.amax(0).to_global().tolist() == whole.amax(0).tolist()
        assert tensor.argmin(0).to_global().tolist() == whole.argmin(0).tolist()


def test_what_is_refused_in_a_job_is_refused():
    mesh = MESHES[2, 2]
    tensor = Cut(WHOLE.clone().requires_grad_(), mesh, "[S0,R]")
    refusals: list[tuple[Any, str]] = [
        (lambda: tensor.add_(1), "would write to a leaf"),
        (lambda: tensor + torch.ones(7, 5), "a plain tensor of shape"),
        (lambda: torch.tensor(1.0).add_(tensor.detach().sum()), "would write a DTensor to a plain"),
        (lambda: tensor + Cut(WHOLE, MESHES[2, 3], "[S0,R]"), "another on mesh 2x3"),
        (lambda: tensor.detach()[:2].zero_(), "gathered into a copy"),
        (lambda: tensor.detach().t_(), "would change the shape"),
    ]
    for call, words in refusals:
        with pytest.raises(LayoutError) as caught:
            call()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    descending = Cut(WHOLE, DeviceMesh([1, 0, 2, 3], (2, 2)), "[S0,R]")
    torch.testing.assert_close((descending @ descending.T).to_global(), WHOLE @ WHOLE.T)
    with pytest.raises(ShardSpecError, match="one process per device"):
        tensor.to_torch()
    # Nothing is left of it.
    torch.testing.assert_close((tensor + 1).to_global(), WHOLE + 1)
    assert not dist.is_initialized()


def test_a_job_that_has_ended_meanwhile_changes_nothing(tmp_path):
    mesh = DeviceMesh(range(4), (2, 2))
    left, right = torch.arange(15.0).reshape(5, 3), torch.arange(6.0).reshape(3, 2)

    def multiplied():
        product: Any = DTensor(left, mesh, "[S0,R]") @ DTensor(right, mesh, "[S01,R]")
        return product.full_tensor()

    assert torch.equal(multiplied(), left @ right)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/at", rank=0, world_size=1)
    dist.destroy_process_group()  # torch forgets the names of all groups
    assert torch.equal(multiplied(), left @ right)


def test_threads_take_turns():
    results: dict[int, Any] = {}

    def work(seed: int) -> None:
        whole = WHOLE * seed
        tensor = Cut(whole, MESHES[2, 2], "[S0,S1]")
        results[seed] = all(
            torch.allclose((tensor @ tensor.T).to_global(), whole @ whole.T) for _ in range(5)
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: True, 2: True, 3: True}


def test_unbound_methods_are_the_bound_ones():
    tensor = Cut(WHOLE, MESHES[2, 3], "[S0,S1]")
    methods: Any = torch.Tensor
    torch.testing.assert_close(methods.mean(tensor).to_global(), WHOLE.mean())
    assert torch.equal(methods.add(tensor, tensor).to_global(), WHOLE + WHOLE)
    for name in ("detach", "requires_grad_", "view_as", "__len__", "dim", "__repr__"):
        arguments = (tensor,) if name == "view_as" else ()
        unbound, bound = getattr(methods, name)(tensor, *arguments), getattr(tensor, name)
        assert str(unbound) == str(bound(*arguments)), name
    assert methods.layout.__get__(tensor) == tensor.layout


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own jvp
def test_code_of_torch_that_asks_for_no_layout_is_refused():
    tensor = Cut(WHOLE, MESHES[2, 3], "[S0,S1]")
    calls: list[Any] = [
        lambda: torch.vmap(lambda row: row * 2)(tensor),
        lambda: torch.func.grad(lambda x: (x * 2).sum())(tensor),
        lambda: torch.func.jvp(lambda x: x * 2, (tensor,), (tensor,)),
        lambda: torch.func.grad(lambda x: (x * tensor).sum())(torch.ones(1)),
        lambda: setattr(tensor, "data", tensor),
        lambda: tensor.untyped_storage(),
    ]
    for call in calls:
        with pytest.raises(LayoutError, match=r"to_local\(\)") as refusal:
            call()
        assert "\n" not in str(refusal.value)
