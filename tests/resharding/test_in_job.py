"""Reshard plans between real processes, over gloo."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    ShardSpecError,
    load_sharded,
    plan_reshard,
    reshard_state,
    save_sharded,
)
from shardspec.errors import LayoutError
from tests.dist.processes import communicator_by, run_ranks, substitute
from tests.resharding.changed_states import changed_case, outcome
from tests.resharding.states import random_case, shard_at, wrong_shards

pytestmark = pytest.mark.dist

WORLD = 6
SEEDS = (*range(120), 165, 217, 252, 314, 343, 367, 405, 485)
"""The last ones pass bytes on inside of hosts; `make test` takes every fifth."""


def _random_cases(rank: int, seeds: Sequence[int], world: int = WORLD) -> tuple[int, list[str]]:
    compared, wrong = 0, []
    for seed in seeds:
        whole, source, target = random_case(seed, ids=world)
        plan = plan_reshard(source, target, max_bytes=(None, 4096)[seed % 2])
        if seed % 3 == 0:  # by messages, also where memory of peers may be read
            devices = DeviceMesh(plan.copies.devices, (len(plan.copies.devices),))
            substitute(communicator_by(devices, reads_peers=False))
        mesh = next(iter(source.values())).mesh
        inside = rank in mesh
        state = {n: shard_at(w, source[n], rank) for n, w in whole.items()} if inside else {}
        for _ in range(2):
            got = plan.run(state)
            wrong += [f"{seed}: {text}" for text in wrong_shards(whole, target, got, [rank])]
        compared += len(got)
    return compared, wrong


def _torch_state(rank: int) -> list[str]:
    """FSDP-like tensors of torch to a tensor-parallel mesh of two other ranks."""
    torch.manual_seed(0)
    whole = {"up": torch.randn(8, 6), "down": torch.randn(6, 8), "norm": torch.randn(6)}
    mesh = TorchMesh("cpu", torch.arange(4))  # a collective of all ranks
    state = {}
    if rank < 4:
        state = {name: distribute_tensor(w, mesh, [Shard(0)]) for name, w in whole.items()}
    ours = DeviceMesh(range(4), (4,))
    source = {
        n: Layout(ours, f"[S0{',R' * (w.ndim - 1)}]", w.shape, w.dtype) for n, w in whole.items()
    }
    serving = DeviceMesh([5, 4], (2,))
    plan = plan_reshard(source, (serving, {"up": "[S0,R]", "down": "[R,S0]"}))
    got = plan.run(state)
    target = {move.target_name: move.target for move in plan.moves}
    return wrong_shards(whole, target, got, [rank])


def _layouts_travel(rank: int, place: Path) -> list[Any]:
    """Two stages of a model, each on two ranks, to two ranks that hold nothing."""
    stage = DeviceMesh([rank // 2 * 2, rank // 2 * 2 + 1], axis_names=("tp",))
    serving = DeviceMesh([5, 4], axis_names=("tp",))
    whole = {f"layers.{i}.up": torch.arange(12.0).reshape(4, 3) + i for i in range(2)}
    state: dict[str, object] = {}
    if rank < 4:
        name = f"layers.{rank // 2}.up"
        state = {name: DTensor(whole[name], stage, "[S(tp),R]"), "step": 7}
    rules = {"*": "[...,S(tp)]"}
    plan = plan_reshard(state, (serving, rules))
    got = plan.run(state)
    found = [sorted(got), wrong_of(got, whole, rank), got["step"]]
    # Into tensors that only the receiving ranks have, and in one call.
    out = {n: DTensor(torch.zeros(4, 3), serving, "[R,S(tp)]") for n in whole} if rank > 3 else {}
    again = plan_reshard(state, out)
    again.run(state, out or None)
    found += [wrong_of(out, whole, rank), again == plan]
    found.append(wrong_of(reshard_state(state, rules, device_mesh=serving), whole, rank))
    # From files, of which ranks outside of the mesh read nothing.
    if rank == 0:
        save_file(whole, place)
    dist.barrier()
    loaded = load_sharded(place, serving, rules)
    found.append(wrong_of({n: t for n, t in loaded.items() if rank > 3}, whole, rank))
    found.append(sorted(load_sharded(place, into=out)))
    # One rank has another layout than the others.
    if rank == 1:
        state = {"layers.0.up": DTensor(whole["layers.0.up"], DeviceMesh([1]), "[R,R]")}
    try:
        plan_reshard(state, (serving, rules))
    except ShardSpecError as error:
        found.append(str(error))
    try:
        plan_reshard({"w": torch.ones(2)} if rank == 2 else state, (serving, rules))
    except ShardSpecError as error:
        found.append(str(error))
    return found


def wrong_of(got: Mapping[str, Any], whole: Mapping[str, torch.Tensor], rank: int) -> list[str]:
    """Return the tensors whose shards on the serving ranks 5 and 4 are not as they should be."""
    columns = slice(0, 2) if rank == 5 else slice(2, 3)
    wrong = [
        n for n in whole if n in got and not torch.equal(got[n].to_local(), whole[n][:, columns])
    ]
    return wrong if rank < 4 or whole.keys() <= got.keys() else [*wrong, "missing"]


def _values(rank: int) -> tuple[list[object], str]:
    """Values and tied tensors, from four ranks to two others; then a value that differs."""
    mesh, serving = DeviceMesh(range(4), (4,)), DeviceMesh([5, 4], (2,))
    layout = Layout(mesh, "[S0]", (8,), "float32")
    source = {"head": layout, "optimizer": {"step": 0, "groups": [0.5, ("adam", None)]}}
    plan = plan_reshard(source, (serving, {"*": "[S0]"}))
    shard = torch.arange(8.0)[2 * rank : 2 * rank + 2]
    optimizer: dict[str, object] = {"step": 7, "groups": [0.5, ("adam", None)]}
    state: dict[str, object] = {"head": shard, "optimizer": optimizer} if rank < 4 else {}
    got = plan.run(state)
    found = [got["optimizer.step"], got["optimizer.groups"]]
    if rank >= 4:
        found.append(got["head"].to_local(rank).tolist())
    optimizer["step"] = 7 + (rank == 3)
    try:
        plan.run(state)
    except ShardSpecError as error:
        return found, str(error)
    return found, "done"


def _disagreements(rank: int) -> list[str]:
    """Ranks that differ in the plan or in what they hold: an error on all, nothing written."""
    mesh = DeviceMesh(range(WORLD), (WORLD,))
    whole = torch.arange(12.0)
    tensor = DTensor(whole, mesh, "[S0]")
    out = {"w": DTensor(torch.full((12,), 7.0), mesh, "[R]")}
    said = []
    source = {"w": tensor.layout}
    for case in range(3):
        plan = plan_reshard(source, {"w": out["w"].layout})
        state: dict[str, object] = {"w": tensor}
        if rank == 2 and case == 0:
            plan = plan_reshard(source, {"w": out["w"].layout}, max_bytes=1 << 20)
        if rank == 2 and case == 1:
            state = {}
        if rank == 2 and case == 2:
            state = {"w": torch.zeros(3)}
        try:
            plan.run(state, out)
            said.append("done")
        except ShardSpecError as error:
            said.append(f"{type(error).__name__}: {error}")
    said.append(str(bool((out["w"].to_local() == 7).all())))
    return said


def _changed(rank: int, seeds: Sequence[int]) -> dict[int, tuple[str, list[str], bool]]:
    """State dicts that are others than planned: what was refused, what is wrong, and a reason."""
    ends = {}
    for seed in seeds:
        case = changed_case(seed, ids=4)
        if rank in case.devices:
            said, problems = outcome(case, [rank], in_job=True)
            ends[seed] = said, problems, bool(case.wrong_names) or case.conflicts([rank])
    return ends


def _tied(rank: int) -> list[object]:
    """Fill one tensor of two names, of which some ranks hold nothing; then from unequal sources."""
    mesh, target, whole = DeviceMesh(range(3)), DeviceMesh([4, 3, 0]), torch.arange(4.0)
    layout = Layout(mesh, "[S0]", (4,), "float32")
    state: dict[str, object] = {}
    if rank in mesh:
        w = DTensor(whole, mesh, "[S0]")
        state = {"embed": w, "head": w} if rank else {"head": w, "embed": w}
    plan = plan_reshard(state, (target, {"*": "[R]"}))
    got = plan.run(state)
    values = [got[name].shards[rank].tolist() for name in sorted(got)]
    out: dict[str, object] = {}
    if rank in target:
        shard = torch.zeros(4)
        out = {"embed": shard, "head": shard}
    if rank == 1:  # a copy with the same values
        state["head"] = DTensor.from_shards({rank: whole[2:].clone()}, layout)
    plan.run(state, out)
    values += [shard.tolist() for shard in out.values() if isinstance(shard, torch.Tensor)]
    if rank == 1:
        state["head"] = DTensor.from_shards({rank: -whole[2:]}, layout)
    try:
        plan.run(state, out)
        return [values, "taken"]
    except LayoutError as error:
        return [values, "share memory, but differ" in str(error)]


def _plain_tensors(rank: int) -> tuple[list[Any], str]:
    """Buffers and norms that are no DTensors, on both ends; then on a rank with meshes apart."""
    trainer, part, generator = DeviceMesh(range(4), (2, 2)), DeviceMesh([0, 1]), DeviceMesh([4, 5])
    state: dict[str, object] = {}
    out: dict[str, object] = {}
    if rank in trainer:
        w = DTensor(torch.arange(8.0).view(4, 2), trainer, "[S0,R]")
        state = {"w": w, "norm": torch.arange(3.0), "count": torch.tensor(7)}
    if rank in part:
        state["bias"] = DTensor(torch.arange(2.0), part, "[S0]")
    if rank in generator:
        out = {"w": DTensor(torch.zeros(4, 2), generator, "[R,S0]")}
        out |= {"norm": torch.zeros(3), "count": torch.tensor(0), "bias": torch.zeros(2)}
    plan_reshard(state, out).run(state, out)
    got = [value.tolist() for value in out.values() if type(value) is torch.Tensor]
    if rank == 0:
        layout = Layout(DeviceMesh([0, 5]), "[S0]", (2,), "float32")
        state["other"] = DTensor.from_shards({0: torch.zeros(1)}, layout)
    try:
        plan_reshard(state, (generator, {}))
    except ShardSpecError as error:
        return got, str(error)
    return got, ""


def _equal_values(rank: int) -> tuple[list[object], list[str]]:
    """Values that are equal and pickle otherwise on each rank; then some that differ."""
    mesh = DeviceMesh(range(WORLD))
    text = "".join(["de", "cay"])
    values: list[object] = [[text, text], {text, "x"}, float("nan"), np.float32(0.5)]
    if rank % 2:
        values = [[text, "".join(text)], {"x", "decay"}, float("nan"), np.float32(0.5)]
    state = {"w": DTensor(torch.arange(6.0), mesh, "[S0]"), "values": values}
    plan = plan_reshard(state, (mesh, {}))
    got, said = plan.run(state)["values"], []
    for other in (1 if rank else True, 0.0 if rank else -0.0, torch.zeros(1) if rank else 1):
        try:
            plan.run(state | {"values": other})
        except ShardSpecError as error:
            said.append(f"{type(error).__name__}: {error}")
    return [got[0], sorted(got[1]), got[3]], said


def _old_values(place: Path) -> list[str]:
    """Backward through what `out` held before, whichever way it is overwritten."""
    mesh = DeviceMesh(range(WORLD), (WORLD,))
    state = {"w": DTensor(torch.arange(12.0), mesh, "[S0]")}
    save_sharded(state, place)
    said = []
    for way in ("reading", "messages", "files", "into"):
        ways = communicator_by(mesh, reads_peers=way == "reading")
        substitute(ways)
        held = torch.ones(12)
        out = {"w": DTensor.from_local(held, mesh, "[R]")}
        given = torch.ones(12, requires_grad=True)
        loss = (given * held).sum()
        if way == "into":
            load_sharded(place, into=out)
        elif way == "files":
            plan_reshard(place, {"w": out["w"].layout}).run({}, out)
        else:
            plan_reshard(state, {"w": out["w"].layout}).run(state, out)
        assert held.tolist() == list(range(12))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        said.append(way)
    return said


def _all(rank: int, place: Path, every: int):
    assert len(_old_values(place)) == 4
    found = _random_cases(rank, SEEDS[::every]), _torch_state(rank), _disagreements(rank)
    changed = _changed(rank, range(0, 60, every)), _tied(rank), _equal_values(rank)
    filled, refused = _plain_tensors(rank)
    assert filled == ([[0.0, 1.0, 2.0], 7, [0.0, 1.0]] if rank in (4, 5) else [])
    assert "'norm' is a Tensor, which has no mesh; give a Layout" in refused
    assert rank == 0 or refused.startswith("rank 0 has failed")
    values, said = _values(rank)
    assert values[:2] == [7, [0.5, ("adam", None)]]
    assert values[2:] == (
        [[[4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]][rank - 4]] if rank > 3 else []
    )
    assert "'optimizer.step' is 7 on rank 0 and 8 on rank 3" in said
    whole = torch.arange(24.0).reshape(4, 6)
    mesh = DeviceMesh(range(WORLD), (2, 3))
    got = reshard_state({"w": DTensor(whole, mesh, "[S0,S1]")}, {"w": "[S1,R]"})
    assert torch.equal(got["w"].to_global(), whole)
    dist.barrier()
    travelled = _layouts_travel(rank, place.with_name("stages.safetensors"))
    names = [f"layers.{i}.up" for i in range(2)]
    assert travelled[:3] == [["step"] if rank < 4 else [*names, "step"], [], 7]
    assert travelled[3:7] == [[], True, [], []]
    assert travelled[7] == (names if rank > 3 else [])
    assert travelled[8].startswith(
        "'layers.0.up' is [S0,R] of [4, 3] float32 on tp=2 on rank 0 and"
    )
    assert "'w' is a Tensor, which has no mesh; give a Layout, or a DTensor" in travelled[9]
    assert rank == 2 or travelled[9].startswith("rank 2 ")
    return *found, changed


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_in_a_job(tmp_path, every):
    results = run_ranks(WORLD, tmp_path, _all, tmp_path / "saved", every)
    assert sum(compared for (compared, _), _, _, _ in results) > 500 // every
    for (_, wrong), from_torch, said, _ in results:
        assert wrong == []
        assert from_torch == []
        plans, missing, other_shape, untouched = said
        assert "rank 2 asks for another conversion than rank 0: reshard plan" in plans
        assert missing == "LayoutError: rank 2: tensor 'w' is missing from the state dict"
        assert "LayoutError: rank 2: the shard of 'w' on device 2 is (3,)" in other_shape
        assert untouched == "True"
    assert _refused([changed for _, _, _, (changed, _, _) in results]) > 10 // every
    tied, values = ([found[at] for _, _, _, found in results] for at in (1, 2))
    whole = [0.0, 1.0, 2.0, 3.0]
    assert tied == [
        [[whole] * 4, True] if r in (0, 3, 4) else [[], True if r in (1, 2) else "taken"]
        for r in range(WORLD)
    ]
    for found, said in values:
        assert found == [["decay", "decay"], ["decay", "x"], 0.5]
        assert said == [
            "LayoutError: 'values' is True on rank 0 and 1 on rank 1; make them equal, or "
            "remove it",
            "LayoutError: 'values' is -0.0 on rank 0 and 0.0 on rank 1; make them equal, or "
            "remove it",
            "LayoutError: rank 1: 'values' is a Tensor, but was a plain value when the plan was "
            "made; make the plan with it",
        ]


def _refused(found: Sequence[dict[int, tuple[str, list[str], bool]]]) -> int:
    """Return how many are refused: on all ranks alike, and for a reason; all else is right."""
    refused = 0
    for seed in set().union(*found):
        ends = [ranks[seed] for ranks in found if seed in ranks]
        assert [problem for _, problems, _ in ends for problem in problems] == [], seed
        texts = {said for said, _, _ in ends}
        assert len(texts) == 1, (seed, texts)
        if texts != {""}:
            assert any(reason for _, _, reason in ends), (seed, texts)
            refused += 1
    return refused


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", range(3, 9))
def test_random_state_dicts_between_ranks(tmp_path, world):
    """All relations of meshes, with parts and blocks, each run twice: 504 in all."""
    seeds = range(1000 * world, 1000 * world + 84)
    results = run_ranks(world, tmp_path, _random_cases, seeds, world, timeout_s=600)
    assert sum(compared for compared, _ in results) > 200
    assert [text for _, wrong in results for text in wrong] == []
