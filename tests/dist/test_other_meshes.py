"""Real processes: tensors move to other meshes, and ranks that disagree are told so.

`make test` tries about six conversions of each pair of meshes, and `make exhaustive` forty.
"""

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout, ShardSpecError
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.steps import Exchange
from shardspec.comm.transfers import exchange_routes
from shardspec.errors import CommunicatorError, LayoutError
from shardspec.tensor.run import run_step
from tests.conversions import plain_specs, reduced, same_bits, shard_of, stack_of
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

WORLD = 8
MESHES = [
    (DeviceMesh(range(8), (2, 4)), DeviceMesh(range(8), (4, 2))),
    (DeviceMesh(range(8), (8,)), DeviceMesh(range(8), (2, 2, 2))),
    (DeviceMesh(range(8), (2, 4)), DeviceMesh([5, 3, 0, 6, 1, 7, 2, 4], (2, 4))),
    (DeviceMesh(range(4), (2, 2)), DeviceMesh(range(6), (3, 2))),  # growth
    (DeviceMesh(range(6), (2, 3)), DeviceMesh([4, 1], (2,))),  # shrinkage
    (DeviceMesh([0, 1, 2, 3], (2, 2)), DeviceMesh([7, 5, 4], (3,))),  # pipeline stages
    (DeviceMesh([2, 3], (2,)), DeviceMesh([3, 6, 7], (3,))),
    (DeviceMesh([0], (1,)), DeviceMesh(range(8), (2, 4))),
]
SHAPES = [(7, 12), (5, 2), (0, 3)]
BIG = tuple(
    Layout(DeviceMesh(ids, (len(ids),)), "[R,R]", (1024, 1200), "float32")
    for ids in ([6, 1], [0, 5, 3])
)
DTYPES = ["float32", "bfloat16", "int64", "bool"]


def _move(rank: int, most: int) -> tuple[int, list[str]]:
    tried, wrong = 0, []
    for here, there in MESHES:
        if rank not in here and rank not in there:
            continue
        pairs = list(product(plain_specs(2, here.ndim), plain_specs(2, there.ndim)))
        every = max(1, len(pairs) // most)
        for index, (spec, target) in enumerate(pairs[::every]):
            shape, dtype = SHAPES[index % len(SHAPES)], DTYPES[index % len(DTYPES)]
            before = Layout(here, spec, shape, dtype)
            stack = stack_of(before)
            shards = {rank: shard_of(before, stack, rank)} if rank in here else {}
            result = DTensor.from_shards(shards, before).redistribute(target, device_mesh=there)
            tried += 1
            expected = {rank: shard_of(result.layout, stack, rank)} if rank in there else {}
            if result.shards.keys() != expected.keys() or not all(
                same_bits(result.shards[device], shard) for device, shard in expected.items()
            ):
                wrong.append(f"{spec} on {here.ids} → {target} on {there.ids}: {result.shards}")
    # One piece of a large tensor comes from two replicas.
    before, after = BIG
    if rank in before.mesh or rank in after.mesh:
        whole = torch.arange(prod(before.global_shape)).view(before.global_shape).to(torch.float32)
        world = ProcessGroupCommunicator.of(DeviceMesh(range(WORLD), (WORLD,)))
        given = {rank: whole} if rank in before.mesh else {}
        tried += 1
        for device, shard in run_step(Exchange(()), world, given, before, after, "cpu").items():
            if not torch.equal(shard, whole):
                wrong.append(f"a divided piece of {device}")
    # Reductions that are pending are finished on the way, by everyone or by some ranks only.
    for here, there in MESHES[:1] + MESHES[3:4]:
        before = Layout(here, "[S0,R|P1]", (7, 12), "float32")
        stack = stack_of(before)
        if rank in here or rank in there:
            shards = {rank: shard_of(before, stack, rank)} if rank in here else {}
            result = DTensor.from_shards(shards, before).redistribute("[R,S0]", device_mesh=there)
            whole = reduced(stack, before.spec, result.layout.spec)
            tried += 1
            if rank in there and not same_bits(
                result.to_local(), shard_of(result.layout, whole, rank)
            ):
                wrong.append(f"pending sum to {there.ids}")
    # Gradients come back where the devices are the same.
    here, there = MESHES[2]
    weights = torch.arange(12.0).reshape(4, 3)
    tensor = DTensor(torch.ones(4, 3, requires_grad=True), here, "[S0,S1]")
    moved = tensor.redistribute("[R,S10]", device_mesh=there)
    (moved.to_global() * weights).sum().backward()
    tried += 1
    box = tensor.layout.box(rank)
    found = tensor.to_local().grad
    if found is None or not torch.equal(found, weights[tuple(slice(*side) for side in box)]):
        wrong.append("gradient")
    return tried, wrong


def _disagree(rank: int) -> list[tuple[str, str]]:
    """Ask for different things on one rank; return what each rank is told."""
    told = []

    def tell(call: Any) -> None:
        try:
            call()
        except ShardSpecError as error:
            told.append((type(error).__name__, str(error)))
        else:
            told.append(("", "nothing was raised"))
        dist.barrier()

    mesh = DeviceMesh(range(8), (2, 4))
    whole = torch.zeros(8, 8)
    DTensor(whole, mesh, "[S0,R]").redistribute("[R,S0]")
    tell(lambda: DTensor(whole, mesh, "[S0,R]").redistribute("[R,S1]" if rank == 5 else "[S1,R]"))
    tell(lambda: DTensor(whole, mesh, "[S1,R]" if rank == 3 else "[S0,R]").redistribute("[S01,R]"))
    tell(lambda: DTensor(torch.zeros(8, 8 + (rank == 7)), mesh, "[S0,R]").redistribute("[R,R]"))
    tell(
        lambda: DTensor(
            whole.to(torch.float64 if rank == 0 else torch.float32), mesh, "[S1,R]"
        ).redistribute("[R,R]")
    )
    other = DeviceMesh(range(8), (2, 4)) if rank == 2 else DeviceMesh(range(8), (4, 2))
    tell(lambda: DTensor(whole, other, "[S0,R]").redistribute("[R,S01]"))
    slower = DeviceMesh(
        range(8), (2, 4), mesh_alpha=(1e-6, 1e-6), mesh_beta=(1e-9, 1e-9 * (1 + rank // 7))
    )
    tell(lambda: DTensor(whole, slower, "[S0,R]").redistribute("[S1,R]"))
    pair, four = DeviceMesh([0, 1], (2,)), DeviceMesh(range(4), (4,))
    if rank in four:
        layout = Layout(pair, "[S0]", (8,), "float32")
        shards = {rank: torch.ones(4, requires_grad=True)} if rank in pair else {}
        tensor = DTensor.from_shards(shards, layout)
        tell(lambda: tensor.redistribute("[S0]", device_mesh=four))
    else:
        dist.barrier()
        told.append(("", ""))
    # After every disagreement the ranks still work together.
    assert torch.equal(DTensor(whole, mesh, "[S01,R]").redistribute("[R,S1]").to_global(), whole)
    return told


def _both(rank: int, most: int) -> tuple[tuple[int, list[str]], list[tuple[str, str]]]:
    return _move(rank, most), _disagree(rank)


@pytest.fixture(scope="module", params=[6, pytest.param(40, marks=pytest.mark.exhaustive)])
def most(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, most):
    return run_ranks(WORLD, tmp_path_factory.mktemp("job"), _both, most)


def test_every_rank_gets_its_box_on_the_other_mesh(outcomes, most):
    moved = [move for move, _ in outcomes]
    assert [wrong for _, wrong in moved] == [[]] * WORLD
    assert sum(tried for tried, _ in moved) > 25 * most
    assert min(tried for tried, _ in moved) > 2.5 * most


def test_a_piece_that_was_moved_was_divided():
    before, after = BIG
    moves = exchange_routes(before.boxes(), after.boxes(), lambda a, b: int(a != b))
    assert [(move.sender, move.receiver, move.box) for move in moves] == [
        (6, 0, ((0, 1024), (0, 1200))),
        (1, 5, ((0, 1024), (0, 1200))),
        (6, 3, ((0, 512), (0, 1200))),
        (1, 3, ((512, 1024), (0, 1200))),
    ]


DIFFERENCES = [
    (
        "rank 5 asks for another conversion than rank 0",
        "target [R,S1] where rank 0 has [S1,R]",
    ),
    (
        "rank 3 asks for another conversion than rank 0",
        "new tensor [S1,R] where rank 0 has [S0,R]",
    ),
    (
        "rank 7 asks for another conversion than rank 0",
        "shape [8, 9] where rank 0 has [8, 8]",
    ),
    (
        "asks for another conversion than rank 0",
        "dtype float32 where rank 0 has float64",
    ),
    ("rank 2 asks for another conversion than rank 0", "mesh 2x4 of ids 0,1,2,3,4,5,6,7"),
]


@pytest.mark.parametrize("case", range(len(DIFFERENCES)))
def test_every_rank_is_told_who_differs_and_how(outcomes, case):
    for _, told in outcomes:
        kind, text = told[case]
        assert kind == CommunicatorError.__name__
        for words in DIFFERENCES[case]:
            assert words in text
        assert text.endswith(
            "every rank of the mesh must call the same conversions in the same order"
        )


def test_links_that_differ_are_a_difference_though_the_plan_may_be_the_same(outcomes):
    for _, told in outcomes:
        assert told[5][0] == CommunicatorError.__name__
        assert "rank 7 asks for another conversion than rank 0: links " in told[5][1]


def test_wanted_gradient_to_other_devices_is_refused_on_every_rank(outcomes):
    kinds = [told[6][0] for _, told in outcomes]
    assert kinds[:4] == [CommunicatorError.__name__] * 4
    assert all("gradient" in told[6][1] for _, told in outcomes[:4])


def test_wanted_gradient_is_refused_where_all_ranks_know_of_it():
    fewer = DeviceMesh([1], (1,))
    tensor = DTensor(torch.ones(4, requires_grad=True), DeviceMesh([0, 1], (2,)), "[S0]")
    with pytest.raises(LayoutError, match="detached"):
        tensor.redistribute("[R]", device_mesh=fewer)
