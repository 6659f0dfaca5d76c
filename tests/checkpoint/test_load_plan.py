"""Reshard plans whose source is a checkpoint: what they read is what they plan."""

import pickle

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from shardspec import DeviceMesh, DTensor, Layout, NameMap, plan_reshard, save_sharded
from shardspec.errors import CheckpointError, LayoutError
from tests.checkpoint.test_low_precision import merged
from tests.dist.processes import run_ranks
from tests.resharding.states import random_case, wrong_shards

FOUR, THREE = DeviceMesh(range(4), (2, 2)), DeviceMesh([5, 9, 2], (3,))
FUSED = NameMap.parse(
    """
[sizes]
p = 2
[[map]]
source = ["q", "r c"]
target = ["qv", "(p r) c", "p[0]"]
[[map]]
source = ["v", "r c"]
target = ["qv", "(p r) c", "p[1]"]
"""
)


@pytest.fixture
def whole():
    torch.manual_seed(0)
    return {name: torch.randn(8, 6) for name in ("q", "v")}


@pytest.fixture
def checkpoint(tmp_path, whole):
    specs = {"q": "[S0,S1]", "v": "[S10,R]"}
    save_sharded({n: DTensor(w, FOUR, specs[n]) for n, w in whole.items()}, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_random_state_dicts(tmp_path, every):
    for seed in range(0, 40, every):
        whole, source, target = random_case(seed, ids=8)
        state = {n: DTensor(w, source[n].mesh, source[n].spec) for n, w in whole.items()}
        save_sharded(state, tmp_path / f"{seed}")
        plan = plan_reshard(tmp_path / f"{seed}", target)
        ids = next(iter(target.values())).mesh.ids
        assert wrong_shards(whole, target, plan.run({}), ids) == [], seed
        out = {
            n: DTensor(torch.zeros(w.shape, dtype=w.dtype), target[n].mesh, target[n].spec)
            for n, w in whole.items()
        }
        for _ in range(2):
            assert plan.run({}, out) == out
            assert wrong_shards(whole, target, out, ids) == [], seed


def test_maps_dtypes_and_several_meshes(checkpoint, whole):
    plan = plan_reshard(checkpoint, (THREE, {"*": "[S0,R]"}), names=FUSED, dtype="bfloat16")
    both = torch.cat([whole["q"], whole["v"]]).bfloat16()
    target = {"qv": Layout(THREE, "[S0,R]", (16, 6), "bfloat16")}
    assert hash(plan) == hash(pickle.loads(pickle.dumps(plan)))
    for each in (plan, pickle.loads(pickle.dumps(plan))):
        assert wrong_shards({"qv": both}, target, each.run({}), THREE.ids) == []
    out = {"qv": DTensor(torch.zeros(16, 6, dtype=torch.bfloat16), THREE, "[S0,R]")}
    plan.run({}, out)
    assert torch.equal(out["qv"].to_global(), both)
    apart = {
        "a": Layout(THREE, "[R,S0]", (8, 6), "float32"),
        "v": Layout(FOUR, "[S1,R]", (8, 6), "float32"),
    }
    got = plan_reshard(checkpoint, apart, names={"q": "a"}).run({})
    assert list(got) == ["a", "v"]
    assert wrong_shards({"a": whole["q"]}, apart, got, THREE.ids) == []
    assert wrong_shards({"v": whole["v"]}, apart, got, FOUR.ids) == []


def test_names_with_brackets_are_left_behind_by_their_letters(tmp_path):
    codes = {"a[0].weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "b": torch.ones(3)}
    save_file(codes, tmp_path / "a.safetensors")
    for dtype in ("bfloat16", "fp8-128x128"):
        plan = plan_reshard(tmp_path / "a.safetensors", (THREE, {}), dtype=dtype, drop="a*")
        assert plan.dropped == ("a[0].weight",)
        assert list(plan.run({})) == ["b"]


def test_what_is_refused(checkpoint, whole):
    plan = plan_reshard(checkpoint, (THREE, {}))
    with pytest.raises(LayoutError, match="takes no tensors"):
        plan.run({"q": DTensor(whole["q"], FOUR, "[R,R]")})
    with pytest.raises(LayoutError, match=r"reads the checkpoint .* gives no receipt; compare"):
        plan.run({}, receipt=True)
    out = {name: DTensor(torch.zeros(8, 6), THREE, "[S0,R]") for name in whole}
    with pytest.raises(CheckpointError, match="the plan has"):
        plan.run({}, out)
    with pytest.raises(CheckpointError, match="'v' is missing"):
        plan.run({}, {"q": DTensor(torch.zeros(8, 6), THREE, "[R,R]")})
    rows = {device: torch.zeros(12, 6) for device in THREE.ids}
    for cut in ((slice(0, 8), slice(4, 12)), (slice(4, 12), slice(0, 8))):
        halves = [{device: of[at] for device, of in rows.items()} for at in cut]
        overlapping = {
            n: DTensor.from_local(h, THREE, "[R,R]") for n, h in zip("qv", halves, strict=True)
        }
        with pytest.raises(CheckpointError, match=r"out\['q'\] and out\['v'\] share memory"):
            plan.run({}, overlapping)
    expanded = {device: torch.zeros(6).expand(8, 6) for device in THREE.ids}
    with pytest.raises(CheckpointError, match=r"elements of out\['q'\] share memory"):
        plan.run({}, dict.fromkeys("qv", DTensor.from_local(expanded, THREE, "[R,R]")))
    assert not any(bool(of.any()) for of in rows.values())
    assert all(bool((tensor.to_global() == 0).all()) for tensor in out.values())
    save_sharded(
        {n: DTensor(w, FOUR, "[R,S0]") for n, w in whole.items()}, checkpoint, overwrite=True
    )
    with pytest.raises(CheckpointError, match="'q' has changed since the plan was made"):
        plan.run({})


def _quantized_in_job(rank: int, place: str) -> list[str]:
    """Return which shards of codes and scales differ from what `merge` wrote."""
    serving = DeviceMesh([2, 0], (2,))
    wanted = load_file(f"{place}.safetensors")
    plan = plan_reshard(place, (serving, {"*.weight": "[S0,R]"}), dtype="fp8-128x128")
    target = {move.target_name: move.target for move in plan.moves}
    got = plan.run({})
    assert got.keys() == (wanted.keys() if rank in serving else set())
    differing = wrong_shards(wanted, target, got, [rank])
    plan.run({}, got)
    infinite = plan_reshard(f"{place}-inf", (serving, {"up.weight": "[S0,R]"}), dtype="fp8-128x128")
    if rank in serving:  # one of them alone reads what is not finite
        with pytest.raises(CheckpointError, match="has NaN or infinity") as error:
            infinite.run({})
        assert "\n" not in str(error.value)
    return [*differing, *wrong_shards(wanted, target, got, [rank])]


def _in_job(rank: int, place: str, whole: dict[str, torch.Tensor], weights: str) -> list[str]:
    assert _quantized_in_job(rank, weights) == []
    serving = DeviceMesh([2, 0], (2,))
    plan = plan_reshard(place, (serving, {"*": "[R,S0]"}))
    got = plan.run({})
    target = {move.target_name: move.target for move in plan.moves}
    other = plan_reshard(place, (serving, {"*": "[S0,R]" if rank else "[R,S0]"}))
    said = ""
    if rank in serving:
        with pytest.raises(CheckpointError, match="make the same plan on every rank") as error:
            other.run({})
        said = str(error.value)
    assert said.startswith("ranks differ in reshard plan: rank ") == (rank in serving)
    dist.barrier()
    return [*sorted(got), *wrong_shards(whole, target, got, [rank])]


@pytest.mark.dist
def test_in_a_job(tmp_path, checkpoint, whole):
    weights = {"up.weight": torch.randn(260, 130), "down.weight": torch.randn(300, 7)}
    save_sharded({n: DTensor(w, FOUR, "[S0,S1]") for n, w in weights.items()}, tmp_path / "w")
    merged(tmp_path / "w", tmp_path / "w.safetensors", quantize="fp8-128x128")
    weights["up.weight"][-1, -1] = float("nan")
    save_sharded(weights, tmp_path / "w-inf")
    done = run_ranks(3, tmp_path, _in_job, str(checkpoint), whole, str(tmp_path / "w"))
    assert done == [["q", "v"], [], ["q", "v"]]
