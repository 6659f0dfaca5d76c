"""torch's operations on cut tensors, against the same on one whole tensor, in a job of four.

`make test` tries a combination of layouts of every fifth operation, and `make exhaustive` four of
each.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec import DeviceMesh, DTensor, Layout, ShardSpecError, init_device_mesh
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.errors import CommunicatorError
from tests.conversions import index_of
from tests.dist.operation_runs import Cut, cut, the_table
from tests.dist.processes import run_ranks
from tests.operation_table import TABLE

pytestmark = pytest.mark.dist

WHOLE = (torch.arange(48.0) * 0.37).sin().reshape(8, 6).double()


def told(call) -> str:
    try:
        call()
    except ShardSpecError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def like_a_tensor(rank, mesh):
    """What is not an operation on values: attributes, numbers, writing, modules."""
    t = Cut(WHOLE, mesh, "[S0,S1]")
    total = WHOLE.sum()
    torch.testing.assert_close(torch.tensor(float(t.sum())), total.float())
    torch.testing.assert_close(t.sum().item(), total.item())
    assert bool((t == t).all())
    other = WHOLE.clone()
    other[7, 5] = 9  # of one rank
    other = Cut(other, mesh, "[S0,S1]")
    assert [torch.equal(t, t), torch.equal(t, other)] == [True, False]
    assert [bool(t.isclose(u).all()) for u in (t, other)] == [True, False]
    assert int((t != other).sum()) == 1
    assert other.max().item() == 9
    assert not t.isnan().any()
    assert (len(t), t.ndim, t.numel(), t.size(), t.size(1)) == (8, 2, 48, (8, 6), 6)
    assert (t.device, t.is_leaf, t.is_floating_point()) == (torch.device("cpu"), True, True)
    assert t.mT.shape == (6, 8)
    assert len({t, t, Cut(WHOLE, mesh, "[S0,S1]")}) == 2
    assert [row.shape for row in DTensor(WHOLE, mesh, "[R,S1]")] == [(6,)] * 8
    # Links and names of the mesh stay, though torch's mesh has no links.
    linked = DeviceMesh(mesh.ids, mesh.shape, None, (1e-6, 1e-6), (1e-10, 1e-9))
    assert (Cut(WHOLE, linked, "[S0,R]") * 2).device_mesh == linked
    # Writing keeps object and storage; a tensor that requires a gradient gets a history by it.
    place, same = t.to_local().data_ptr(), t
    t += 1
    torch.add(t, t, out=t)
    assert t is same
    assert t.to_local().data_ptr() == place
    assert torch.equal(t.to_local(), 2 * (WHOLE + 1)[index_of(t.layout, rank)])
    factor = Cut(WHOLE.clone().requires_grad_(), mesh, "[S0,R]")
    t.zero_()
    t.add_(factor)
    assert t.requires_grad
    (t * t).sum().backward()
    assert factor.grad is not None
    torch.testing.assert_close(factor.grad.to_global(), 2 * WHOLE)
    assert not t.detach().requires_grad
    # Under no_grad a leaf may be written to, and stays one: that is how optimizers work.
    with torch.no_grad():
        factor.sub_(factor.grad, alpha=0.5)
    assert factor.is_leaf
    assert factor.requires_grad
    assert not factor.to_local().any()
    # Whoever holds nothing takes part.
    pair = Cut.from_shards(
        {rank: torch.ones(2)} if rank in (1, 3) else {},
        Layout(DeviceMesh([1, 3], (2,)), "[S0]", (4,), "float32"),
    )
    doubled = pair + pair
    assert {d: s.tolist() for d, s in doubled.shards.items()} == (
        {rank: [2.0, 2.0]} if rank in (1, 3) else {}
    )


def with_modules(mesh):
    """A module with torch's DTensors as parameters takes our tensor, and returns one."""
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.LayerNorm(5))
    module = module.double()
    whole = WHOLE.clone().requires_grad_()
    expected = module(whole)
    expected.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in module.named_parameters()}
    for layer in (module[0], module[2]):
        for name, parameter in list(layer.named_parameters()):
            spec = "[R,S1]" if parameter.dim() == 2 else "[R]"
            ours = Cut(parameter.detach(), mesh, spec)
            layer.register_parameter(name, torch.nn.Parameter(ours.to_torch()))
    given = Cut(WHOLE.clone().requires_grad_(), mesh, "[S0,R]")
    result = module(given)
    assert type(result) is DTensor
    torch.testing.assert_close(result.to_global(), expected)
    result.square().sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad.to_global(), whole.grad)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, TorchDTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name])


def random_numbers(rank, mesh, every):
    """Devices that hold the same box draw the same, and others draw others, whatever the seeds."""
    ones = torch.ones(16, 12)
    drawing: dict[str, Any] = {
        "dropout": lambda t: F.dropout(t, 0.5),
        "dropout in place": lambda t: F.dropout(t.clone(), 0.5, inplace=True),
        "bernoulli": lambda t: torch.bernoulli(t / 2),
        "normal": lambda t: t.clone().normal_(),
        "normal of a generator": lambda t: t.clone().normal_(
            generator=torch.Generator().manual_seed(rank)
        ),
        "rand": torch.rand_like,
        "randn": lambda t: torch.randn_like(t),
    }
    specs = ("[R,R]", "[S0,R]", "[S1,S0]", "[R,S01]")
    for name, spec, seed in list(product(drawing, specs, (7, 7 + rank)))[::every]:
        torch.manual_seed(seed)
        cut = Cut(ones, mesh, spec)
        result = drawing[name](cut)
        assert result.layout.spec == cut.layout.spec, name
        whole = [torch.empty(16, 12) for _ in range(4)]
        dist.all_gather(whole, result.to_global())
        # What is whole comes from copies that agree, and parts of one size differ.
        shard = whole[0][index_of(result.layout, rank)]
        assert torch.equal(result.to_local(), shard), (name, spec, seed)
        assert all(torch.equal(other, whole[0]) for other in whole), name
        parts = {tuple(whole[0][index_of(result.layout, d)].flatten().tolist()) for d in range(4)}
        assert len(parts) == len({result.layout.box(d) for d in range(4)}), name
    torch.manual_seed(3)
    dropout: Any = F.dropout
    first = dropout(Cut(ones, mesh, "[S0,R]"))
    following = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(dropout(Cut(ones, mesh, "[S0,R]")).to_local(), first.to_local())
    assert torch.equal(torch.rand(2), following)
    assert torch.equal(dropout(Cut(ones, mesh, "[R,R]"), training=False).to_local(), ones)
    heads = Cut(torch.ones(2, 4, 6, 3), mesh, "[S0,R,R,R]")
    mixed: Any = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)
    assert mixed.layout.labelled_spec == heads.layout.labelled_spec
    assert mixed.to_global()[0].tolist() != mixed.to_global()[1].tolist()


def where_torch_is_right(mesh):
    """What is refused with a gradient is right without one, and by what the refusals say."""
    t = Cut(WHOLE, mesh, "[S0,S1]")
    torch.testing.assert_close(t.amax().item(), WHOLE.amax().item())
    torch.testing.assert_close(t.norm(float("inf")).item(), WHOLE.abs().amax().item())
    calls: list[Any] = [
        lambda a, b: F.mse_loss(a, b),
        lambda a, b: F.smooth_l1_loss(a, b, reduction="sum"),
        lambda a, b: (a * b).abs().amax((0, 1)),
    ]
    for call in calls:
        whole = [(factor * WHOLE).requires_grad_() for factor in (1, 2)]
        cut = [Cut(w, mesh, spec) for w, spec in zip(whole, ("[S0,S1]", "[R,S01]"), strict=True)]
        call(*whole).backward()
        call(*cut).backward()
        for ours, theirs in zip(cut, whole, strict=True):
            torch.testing.assert_close(ours.grad.to_global(), theirs.grad)


def gathered(mesh):
    """What torch has no right rule for is computed on the whole, forwards and backwards."""
    calls: list[Any] = [
        lambda a: F.normalize(a, dim=1),
        lambda a: (a * a)[:, [0, 2]],
        lambda a: torch.cdist(a, a + 1),
        lambda a: a.view(48),
        lambda a: a.reshape(2, 4, 6) @ a.T,
        lambda a: a.amax(),
        lambda a: a.norm(float("inf")),
        lambda a: torch.linalg.vector_norm(a, -float("inf")),
        lambda a: torch.stack(list(a.reshape(8, 3, 2).unbind(2))),
        lambda a: F.batch_norm(a, None, None, training=True),
    ]
    for call, spec in product(calls, ("[S0,S1]", "[R,S10]", "[R,S0|P1]")):
        whole = WHOLE.clone().requires_grad_()
        ours = cut(whole, mesh, spec, dist.get_rank())
        result, wanted = call(ours), call(whole)
        torch.testing.assert_close(result.to_global(), wanted)
        weights = torch.arange(wanted.numel()).reshape(wanted.shape).double().cos()
        (result.to_global() * weights).sum().backward()
        (wanted * weights).sum().backward()
        torch.testing.assert_close(ours.grad.to_global(), whole.grad)
    pending = Cut.from_local(WHOLE.clone(), mesh, "[R,R|P0]")
    assert torch.equal(pending.exp_().to_global(), (2 * WHOLE).exp())


def refused(mesh):
    t = Cut(WHOLE, mesh, "[S0,S1]")
    leaf = Cut(WHOLE.clone().requires_grad_(), mesh, "[S0,S1]")
    line = Cut(WHOLE, DeviceMesh(range(4), (4,)), "[S0,R]")
    alone = Cut(WHOLE, mesh, "[S0,R]", communicator=SimulatedCommunicator(mesh))
    assert torch.equal((alone * 2).sum(0).to_global(), (WHOLE * 2).sum(0))
    return [
        told(lambda: t + line),
        told(lambda: torch.cat([t, line])),
        told(lambda: t * line.to_torch()),
        told(lambda: t + torch.ones(8, 6)),
        told(lambda: torch.ones(8, 6) @ t),
        told(lambda: alone + t),
        told(lambda: leaf.add_(1)),
        told(lambda: torch.exp(t, out=leaf)),
        told(lambda: leaf.__setitem__(0, 1)),
        told(lambda: leaf.t().add_(1)),
        told(lambda: t[2:5].add_(1)),
        told(lambda: t.t_()),
    ]


def torchs_own_errors(mesh):
    """Where layouts are not why, torch's own error comes through."""
    t = Cut(WHOLE, mesh, "[S0,S1]")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.mm(t, t)
    with pytest.raises(IndexError, match="out of range"):
        t.sum(5)
    with pytest.raises(TypeError):
        t.sum("x")
    with pytest.raises(AttributeError, match="no attribute 'placement'"):
        t.placement  # noqa: B018  # the access is the test


def play(rank, combinations, every):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    like_a_tensor(rank, mesh)
    with_modules(mesh)
    random_numbers(rank, mesh, every)
    where_torch_is_right(mesh)
    gathered(mesh)
    torchs_own_errors(mesh)
    return the_table(rank, mesh, combinations, every), refused(mesh)


SAMPLE = pytest.param((2, 5), id="sample")
ALL = pytest.param((8, 1), id="all", marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module", params=[SAMPLE, ALL])
def extent(request):
    """Return how many combinations of layouts are tried, and of every which operation."""
    return request.param


@pytest.fixture(scope="module")
def played(tmp_path_factory, extent):
    return run_ranks(4, tmp_path_factory.mktemp("job"), play, *extent)


@pytest.fixture
def outcomes(played):
    return [table for table, _ in played]


def test_the_table_is_large_and_all_ranks_agree(outcomes, extent):
    assert len({operation.name for operation in TABLE}) == len(TABLE)
    assert len(TABLE) >= 90
    assert len(outcomes[0]) > {2: 15, 8: 300}[extent[0]]
    refusals = [
        {case for case, told in outcome.items() if told.startswith("refused")}
        for outcome in outcomes
    ]
    assert refusals == [refusals[0]] * 4


def test_as_on_one_whole_tensor(outcomes, extent):
    wrong: dict[tuple[str, object], str] = {}
    for outcome, operation in product(outcomes, TABLE[:: extent[1]]):
        told = {specs: text for (name, specs), text in outcome.items() if name == operation.name}
        assert told
        wrong |= {(operation.name, specs): text for specs, text in told.items() if text}
    assert wrong == {}


MIXED = "on mesh dp=2,tp=2 of ids (0, 1, 2, 3), another "
PLAIN = (
    "LayoutError: {}: a plain tensor of shape (8, 6) is mixed with a DTensor; shard or replicate"
)
LEAF = "would write to a leaf that requires a gradient; do it under torch.no_grad()"
REFUSALS = [
    f"LayoutError: add: one tensor is {MIXED}on mesh 4 of ids (0, 1, 2, 3); bring them to one",
    f"LayoutError: cat: one tensor is {MIXED}on mesh 4",
    f"LayoutError: mul: one tensor is {MIXED}is a torch DTensor on DeviceMesh((4,)",
    PLAIN.format("add"),
    PLAIN.format("matmul"),
    "LayoutError: add: one tensor on mesh dp=2,tp=2 is of a job, and another is simulated in this",
    f"LayoutError: add {LEAF}",
    f"LayoutError: exp {LEAF}",
    f"LayoutError: setitem {LEAF}",
    "LayoutError: add would write to a part",
    "LayoutError: add would write to a part that was gathered",
    "LayoutError: t would change the shape",
]


@pytest.mark.parametrize("case", range(len(REFUSALS)))
def test_what_is_refused_is_one_line_on_every_rank(played, case):
    for _, refusals in played:
        assert len(refusals) == len(REFUSALS)
        assert "\n" not in refusals[case]
        assert refusals[case].startswith(REFUSALS[case])


def test_without_a_job():
    t = Cut(WHOLE, DeviceMesh(range(4), (2, 2)), "[S0,R]")
    assert torch.equal((t + 1).to_global(), WHOLE + 1)
    with pytest.raises(CommunicatorError, match="one process per device"):
        t.to_torch()
    assert (t.ndim, len(t), t.numel(), t.size(0)) == (2, 8, 48, 8)
    assert repr(t).startswith("DTensor([S0,R] of [8, 6]")
    with pytest.raises(AttributeError, match="'DTensor' object has no attribute 'color'"):
        t.color  # noqa: B018  # the access is the test
