"""Single steps, torch's own conversions and gradients on eight real processes, started once.

`make test` takes every 19th step and every third of the other conversions, `make exhaustive` all.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardspec import DeviceMesh, DTensor, Layout, ShardingSpec
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.steps import AllReduce, ReduceOp
from shardspec.layout.moving import transfers_of
from tests.conversions import (
    OPS,
    Move,
    Outcome,
    collectives,
    partial_specs,
    plain_specs,
    reduced,
    routed,
    run_moves,
    same_bits,
    shard_of,
    stack_of,
)
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

SIX = DeviceMesh([6, 1, 7, 0, 3, 2], (2, 3))
CUBE = DeviceMesh([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2))
WIDE = DeviceMesh(range(8), (2, 4))


def moves_of(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    dtype: str,
    ops: Sequence[ReduceOp] = OPS,
    every: int = 1,
) -> list[Move]:
    """Every collective there is, every permute, and some of the exchanges."""
    plain = [Layout(mesh, spec, shape, dtype) for spec in plain_specs(len(shape), mesh.ndim)]
    specs = partial_specs(len(shape), mesh.ndim, ops)
    pending = [Layout(mesh, spec, shape, dtype) for spec in specs]
    moves = [move for layout in plain + pending for move in collectives(layout)]
    return moves + [move for a, b in list(product(plain, plain))[::every] for move in routed(a, b)]


def single_steps(sampled: int) -> dict[str, Outcome]:
    # "gaps": the shards given are not contiguous in memory
    return {
        name: run_moves(
            ProcessGroupCommunicator.of(mesh), moves[::sampled], with_gaps="gaps" in name
        )
        for name, mesh, moves in [
            ("uneven", SIX, moves_of(SIX, (7, 5), "float32")),
            ("short, gaps", SIX, moves_of(SIX, (1, 2), "float32", ("sum", "min"))),
            ("empty", SIX, moves_of(SIX, (0, 5), "float32", ("sum",))),
            ("cube, gaps", CUBE, moves_of(CUBE, (3, 5), "float32", ("sum",), every=23)),
            ("bfloat16", SIX, moves_of(SIX, (7, 5), "bfloat16", every=3)),
            ("int64, gaps", SIX, moves_of(SIX, (7, 5), "int64", ("sum", "min"), every=3)),
            ("bool", SIX, moves_of(SIX, (7, 5), "bool", ("max", "prod"), every=3)),
            ("complex64, gaps", SIX, moves_of(SIX, (7, 5), "complex64", ("sum", "avg"), every=3)),
            ("float8_e5m2", SIX, moves_of(SIX, (7, 5), "float8_e5m2", (), every=3)),
        ]
    }


def rounded_sums(rank: int) -> list[tuple[str, float]]:
    """Return a digest of sums that must round, and how far they are from those of doubles."""
    found = []
    for axes, dtype in product([(0,), (1,), (0, 1)], [torch.float32, torch.bfloat16]):
        before = Layout(WIDE, f"[R,R|P{''.join(map(str, axes))}]", (7, 501), dtype)
        generator = torch.Generator().manual_seed(9)
        sizes = [WIDE.shape[axis] for axis in axes]
        stack = torch.randn(*sizes, 7, 501, generator=generator, dtype=torch.float64).to(dtype)
        after = before.with_spec("[R,R]")
        run = ProcessGroupCommunicator.of(WIDE).run
        given = {rank: shard_of(before, stack, rank)}
        got = run(transfers_of(AllReduce(axes, "sum"), before, after), given)[rank]
        exact = stack.double().sum(tuple(range(len(axes))))
        error = float((got.double() - exact).abs().max())
        found.append((got.view(torch.uint8).numpy().tobytes().hex(), error))
    return found


def torch_placement(choice: str) -> Placement:
    words = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1)}
    return words[choice] if choice in words else Partial(choice)


def our_spec(choices: tuple[str, ...]) -> ShardingSpec:
    cuts: dict[int, list[int | str]] = {}
    partial: dict[int | str, Any] = {}
    for axis, choice in enumerate(choices):
        if choice in ("S0", "S1"):
            cuts.setdefault(int(choice[1]), []).append(axis)
        elif choice != "R":
            partial[axis] = "prod" if choice == "product" else choice
    return ShardingSpec(2, cuts, partial=partial)


def like_torch(
    rank: int, words: tuple[str, ...], shape: tuple[int, ...], every: int
) -> tuple[int, list[str]]:
    """Convert between layouts that torch can express, by its redistribute and by ours."""
    torch_mesh = TorchMesh("cpu", torch.tensor(WIDE.ids).reshape(WIDE.shape))
    tried, wrong = 0, []
    for index, source in list(enumerate(product(words, repeat=2)))[::every]:
        pending = {choice for choice in source if choice not in ("R", "S0", "S1")}
        if len(pending) > 1:
            continue  # torch takes such a mixture; here only sum and mean mix
        layout = Layout(WIDE, our_spec(source), shape, torch.float32)
        stack = stack_of(layout)
        local = shard_of(layout, stack, rank)
        ours = DTensor.from_local(local, WIDE, layout.spec, global_shape=shape)
        theirs = TorchDTensor.from_local(
            local,
            torch_mesh,
            [torch_placement(choice) for choice in source],
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
        for target in list(product(("R", "S0", "S1"), repeat=2))[index % 4 :: 4]:
            got = ours.redistribute(our_spec(target))
            other = theirs.redistribute(placements=[torch_placement(choice) for choice in target])
            wanted = shard_of(got.layout, reduced(stack, layout.spec, got.layout.spec), rank)
            tried += 1
            if not same_bits(got.to_local(), other.to_local()):
                wrong.append(f"torch differs: {source} → {target}")
            if not same_bits(got.to_local(), wanted):
                wrong.append(f"{source} → {target}")
    return tried, wrong


def gradients(rank: int, every: int) -> tuple[int, list[str]]:
    """Gradients of losses from to_global, and of losses in parts from to_local."""
    shape = (7, 5)
    whole = (torch.arange(35.0) * 0.37).sin().reshape(shape).double()
    weights = torch.arange(35.0).reshape(shape).double()
    wanted = 3 * whole**2 * weights
    tried, wrong = 0, []
    for source, target in list(product(plain_specs(2, 2), repeat=2))[:: 4 * every]:
        leaf = DTensor(whole.clone().requires_grad_(), WIDE, source)
        (leaf.redistribute(target).to_global() ** 3 * weights).sum().backward()
        once = leaf.grad
        end = leaf.redistribute(target)
        unused = [axis for axis in range(2) if axis not in target.axes]
        copies = 1
        for axis in unused:
            copies *= WIDE.shape[axis]
        cuts = target.dim_partition_dict
        parts = ShardingSpec(2, cuts, partial=dict.fromkeys(unused, "sum"))
        local = end.to_local(grad_spec=parts)
        part = shard_of(end.layout, weights, rank) / copies
        (local**3 * part).sum().backward()
        twice = leaf.grad
        tried += 1
        if once is None or twice is None or once.sharding_spec != source:
            wrong.append(f"no gradient: {source} → {target}")
            continue
        expected = shard_of(leaf.layout, wanted, rank)
        # Both gradients add up in the same leaf, so the two objects hold one and the same sum.
        if not torch.allclose(twice.to_local(), 2 * expected, rtol=1e-12, atol=0):
            wrong.append(f"{source} → {target}")
    return tried, wrong


def no_plan_from_nothing(rank: int) -> list[str]:
    """Say what a rank outside a mesh may do, and what it may not."""
    pair = DeviceMesh([5, 2], (2,))
    t = DTensor(torch.arange(5), pair, "[S0]")
    said = [repr(t.redistribute("[R]"))]
    for attempt in (t.to_global, lambda: DTensor.from_local(torch.ones(2), pair, "[S0]")):
        try:
            said.append(str(attempt()))
        except RuntimeError as error:
            said.append(str(error))
    del rank
    return said


def everything(rank: int, sampled: int) -> dict[str, Any]:
    every = 1 if sampled == 1 else 3
    return {
        "steps": single_steps(sampled),
        "sums": rounded_sums(rank),
        "torch": like_torch(rank, ("R", "S0", "S1", "sum", "avg", "min", "max"), (7, 5), every),
        "torch, even": like_torch(rank, ("R", "S0", "S1", "product"), (8, 16), every),
        "torch, short": like_torch(rank, ("R", "S0", "S1", "sum"), (3, 1), every),
        "gradients": gradients(rank, every),
        "outside": no_plan_from_nothing(rank),
    }


@pytest.fixture(scope="module", params=[19, pytest.param(1, marks=pytest.mark.exhaustive)])
def sampled(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, sampled):
    return run_ranks(8, tmp_path_factory.mktemp("everything"), everything, sampled)


def test_every_single_step_gives_each_device_its_box(ranks, sampled):
    cube = {"cube, gaps": 895}
    six = {
        "uneven": 365,
        "short, gaps": 244,
        "empty": 225,
        "bfloat16": 285,
        "int64, gaps": 162,
        "bool": 162,
        "complex64, gaps": 162,
        "float8_e5m2": 80,
    }
    for rank, found in enumerate(ranks):
        wrong = [problem for outcome in found["steps"].values() for problem in outcome.wrong]
        assert wrong == []
        shards = {name: outcome.shards for name, outcome in found["steps"].items()}
        due = cube | (six if rank in SIX else dict.fromkeys(six, 0))
        assert shards == {name: -(-count // sampled) for name, count in due.items()}


def test_every_rank_rounds_sums_alike(ranks):
    for found in ranks:
        assert found["sums"][4:] == ranks[0]["sums"][4:]
    for rank, found in enumerate(ranks):
        assert found["sums"] == [
            *ranks[rank % 4]["sums"][:2],
            *ranks[rank // 4 * 4]["sums"][2:4],
            *ranks[0]["sums"][4:],
        ]
        errors = [error for _, error in found["sums"]]
        assert max(errors[0::2]) < 1e-5
        assert 0 < max(errors[1::2]) < 0.05


def test_torch_converts_alike(ranks, sampled):
    whole, even, short = (87, 36, 36) if sampled == 1 else (31, 14, 14)
    for found in ranks:
        assert found["torch"] == (whole, [])
        assert found["torch, even"] == (even, [])
        assert found["torch, short"] == (short, [])


def test_gradients_of_whole_and_partial_losses_add_up(ranks, sampled):
    for found in ranks:
        assert found["gradients"] == (31 if sampled == 1 else 11, [])


def test_ranks_outside_the_mesh(ranks):
    for rank, found in enumerate(ranks):
        shown, whole, cut = found["outside"]
        if rank in (2, 5):
            assert shown.startswith(f"DTensor([R] of [5] int64 on 2; shard of device {rank}:")
            assert whole == "tensor([0, 1, 2, 3, 4])"
            assert f"shard of device {rank}:" in cut
        else:
            assert shown == "DTensor([R] of [5] int64 on 2; no shards in this process)"
            assert "only its ranks can gather the tensor" in whole
            assert "only its ranks hold shards" in cut
