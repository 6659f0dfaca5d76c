"""Checkpoints summed with weights: `merge([a, b], out, weights=...)`, and ``--plus``."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shardspec import DeviceMesh, DTensor, NameMap, merge, reshard, save_sharded
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.handmade import handmade

WEIGHTS = [0.2, 0.3, 0.5]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ODD = [float("nan"), float("inf"), -float("inf"), 1e-41, -0.0, 0.0, 6e-8, -6e-8, 65504.0, 3e38]


def run(*args):
    return CliRunner().invoke(cli, list(map(str, args)), prog_name="shardspec")


def state(dtype, seed):
    """Return tensors of all sizes, the largest of several blocks, with odd numbers at any place."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        spread = torch.exp(4 * torch.randn(shape, generator=generator))
        values = torch.randn(shape, generator=generator) * spread
        if values.numel() > 100:
            places = torch.randint(values.numel(), (len(ODD),), generator=generator)
            values.view(-1)[places] = torch.tensor(ODD)
            values.view(-1)[: len(ODD)] = torch.tensor(ODD)  # in all checkpoints at one place
        return values.to(dtype)

    return {
        "large": drawn(1300, 700),
        "stacked": drawn(3, 5, 67),
        "vector": drawn(1001),
        "scalar": drawn(),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "counter": torch.tensor([3, 7]),
    }


def summed(states, weights, name, dtype):
    total = weights[0] * states[0][name].float()
    for each, weight in zip(states[1:], weights[1:], strict=True):
        total = total + weight * each[name].float()
    return total.to(dtype)


def assert_same(got, expected):
    """Check that bits are equal; a NaN equals any NaN."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got.isnan(), expected.isnan())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    kept = ~got.isnan().reshape(-1)
    assert torch.equal(got.reshape(-1)[kept].view(bits), expected.reshape(-1)[kept].view(bits))


def write_forms(states, place):
    """Write three states in three formats, the second in four shards with replicas."""
    mesh = DeviceMesh(range(4), (2, 2))
    save_file(states[0], place / "a.safetensors")
    cut = {
        name: DTensor(tensor, mesh, "[S0,R]") if name == "large" else tensor
        for name, tensor in states[1].items()
    }
    save_sharded(cut, place / "b")
    torch.save(states[2], place / "c.pt")
    return [place / "a.safetensors", place / "b", place / "c.pt"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("written", [None, *DTYPES])
def test_an_average_is_summed_in_float32_and_rounded_once(tmp_path, dtype, written):
    states = [state(DTYPES[dtype], seed) for seed in range(3)]
    places = write_forms(states, tmp_path)
    merge(places, tmp_path / "out", weights=WEIGHTS, dtype=written, threads=2)
    got = load_file(tmp_path / "out")
    assert got.keys() == states[0].keys()
    assert torch.equal(got.pop("counter"), states[0]["counter"])
    for name, tensor in got.items():
        assert_same(tensor, summed(states, WEIGHTS, name, DTYPES[written or dtype]))


def test_sources_of_other_dtypes_are_summed_under_a_common_one(tmp_path):
    states = [state(dtype, 5) for dtype in DTYPES.values()]
    places = write_forms(states, tmp_path)
    with pytest.raises(CheckpointError, match="dtype="):
        merge(places, tmp_path / "out", weights=WEIGHTS)
    merge(places, tmp_path / "out", weights=WEIGHTS, dtype="bf16")
    got = load_file(tmp_path / "out")
    for name in ("large", "stacked", "vector", "scalar"):
        assert_same(got[name], summed(states, WEIGHTS, name, torch.bfloat16))


def test_float64_is_summed_in_float64(tmp_path):
    states = [{"w": torch.randn(9, dtype=torch.float64)} for _ in range(2)]
    places = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for each, place in zip(states, places, strict=True):
        torch.save(each, place)
    merge(places, tmp_path / "out", weights=[0.1, 0.9])
    expected = 0.1 * states[0]["w"] + 0.9 * states[1]["w"]
    assert torch.equal(load_file(tmp_path / "out")["w"], expected)


def test_a_difference_is_added_to_a_base(tmp_path):
    states = [state(torch.bfloat16, seed) for seed in range(3)]
    base, new, old = write_forms(states, tmp_path)
    out = tmp_path / "out"
    result = run("merge", base, "--plus", new, "--minus", old, "--scale", "0.8", "-o", out)
    assert (result.exit_code, result.stderr) == (0, "")
    got = load_file(out)
    for name in ("large", "vector", "scalar"):
        assert_same(got[name], summed(states, [1, 0.8, -0.8], name, torch.bfloat16))


def test_a_sum_is_resharded(tmp_path):
    states = [state(torch.float16, seed) for seed in range(3)]
    places, mesh = write_forms(states, tmp_path), DeviceMesh(range(3), (3,))
    rules = {"large": "[R,S0]"}
    reshard(places, tmp_path / "cut", weights=WEIGHTS, device_mesh=mesh, rules=rules)
    merge(tmp_path / "cut", tmp_path / "out")
    assert_same(load_file(tmp_path / "out")["large"], summed(states, WEIGHTS, "large", torch.half))
    options = ["--mesh", "3", "--rule", "large", "[R,S0]"]
    out = tmp_path / "by_command"
    assert run("reshard", *places, "-o", out, *options, "--weights", "0.2,0.3,0.5").exit_code == 0
    merge(out, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()


def test_pending_sums_are_finished_before(tmp_path):
    values = np.random.default_rng(0).normal(size=(2, 8, 6)).astype(np.float32)
    addends = {(number,): addend for number, addend in enumerate(values)}
    handmade({"w": ("[S0,R|P1]", addends)}, (2, 2)).write(tmp_path / "a")
    other = torch.randn(8, 6)
    save_file({"w": other}, tmp_path / "b.safetensors")
    merge(tmp_path / "a", tmp_path / "finished")
    merge([tmp_path / "a", tmp_path / "b.safetensors"], tmp_path / "out", weights=[0.25, 0.75])
    expected = 0.25 * load_file(tmp_path / "finished")["w"] + 0.75 * other
    assert torch.equal(load_file(tmp_path / "out")["w"], expected)


def test_a_map_renames_the_sources_that_need_it(tmp_path):
    a, b = ({"w": torch.randn(4, 3)}, {"layers.w": torch.randn(4, 3)})
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    places = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    names = NameMap(((("w",), ("layers.w",)),))
    merge(places, tmp_path / "out", weights=[0.5, 0.5], names=names)
    expected = 0.5 * a["w"] + 0.5 * b["layers.w"]
    assert torch.equal(load_file(tmp_path / "out")["layers.w"], expected)


def test_optimizer_state_is_left_out_unless_asked_for(tmp_path):
    places = []
    for seed in range(2):
        torch.manual_seed(seed)
        moment = torch.randn(3)
        nested = {"w": torch.randn(3), "optim": {"w.exp_avg": moment, "step": torch.tensor(7.0)}}
        places.append(tmp_path / f"{seed}.pt")
        torch.save(nested, places[-1])
    weights = ["--weights", "0.5,0.5"]
    result = run("merge", *places, "-o", tmp_path / "out", *weights)
    assert result.exit_code == 0
    assert "2 tensors of the optimizer's state" in result.stderr
    assert load_file(tmp_path / "out").keys() == {"w"}
    result = run("merge", *places, "-o", tmp_path / "all", *weights, "--include", "*")
    assert (result.exit_code, result.stderr) == (0, "")
    got = load_file(tmp_path / "all")
    assert got.keys() == {"w", "optim.w.exp_avg", "optim.step"}
    assert got["optim.step"] == 7


def test_weights_that_do_not_add_up_to_one_are_said(tmp_path):
    places = write_forms([state(torch.float32, seed) for seed in range(3)], tmp_path)
    result = run("merge", *places, "-o", tmp_path / "out", "--weights", "1,1,0.5", "--json")
    assert result.exit_code == 0
    assert "2.5" in result.stderr
    assert any("2.5" in note for note in json.loads(result.stdout)["summed"])


def test_tensors_that_cannot_be_summed_are_equal_or_those_of_the_first(tmp_path):
    states = [{"w": torch.ones(3), "n": torch.tensor(seed), "step": seed} for seed in range(2)]
    places = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for each, place in zip(states, places, strict=True):
        torch.save(each, place)
    options = ["-o", tmp_path / "out.pt", "--weights", "0.5,0.5"]
    result = run("merge", *places, *options)
    assert result.exit_code == 3
    assert "'n'" in result.stderr
    assert "--take-first" in result.stderr
    result = run("merge", *places, *options, "--take-first", "n")
    assert result.exit_code == 3
    assert "'step'" in result.stderr
    result = run("merge", *places, *options, "--take-first", "n", "--take-first", "step")
    assert result.exit_code == 0
    got = torch.load(tmp_path / "out.pt")
    assert (got["n"].item(), got["step"]) == (0, 0)


def test_codes_are_dequantized_or_equal(tmp_path):
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "llama", "quantization_config": section}
    weights = []
    for seed in range(2):
        torch.manual_seed(seed)
        codes = torch.randn(128, 128).to(torch.float8_e4m3fn)
        scales = torch.rand(1, 1)
        place = tmp_path / str(seed)
        place.mkdir()
        save_file({"w.weight": codes, "w.weight_scale_inv": scales}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config))
        weights.append((codes.float() * scales).float())
    places = [tmp_path / "0", tmp_path / "1"]
    result = run("merge", *places, "-o", tmp_path / "out", "--weights", "0.5,0.5")
    assert result.exit_code == 3
    assert "--dtype bf16" in result.stderr
    merge(places, tmp_path / "out", weights=[0.25, 0.75], dtype="fp32")
    expected = 0.25 * weights[0] + 0.75 * weights[1]
    assert torch.equal(load_file(tmp_path / "out")["w.weight"], expected)


def test_a_tied_tensor_stays_tied(tmp_path):
    places = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for place in places:
        tensor = torch.randn(40, 7)
        torch.save({"head": tensor, "embedding": tensor}, place)
    merge(places, tmp_path / "out.pt", weights=[0.5, 0.5])
    got = torch.load(tmp_path / "out.pt")
    assert got["head"].data_ptr() == got["embedding"].data_ptr()


@pytest.fixture
def pair(tmp_path):
    save_file({"w": torch.ones(4, 3), "b": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(4, 3), "b": torch.ones(3)}, tmp_path / "b.safetensors")
    return [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


@pytest.mark.parametrize("weights", ["1", "0.5,0.2,0.3", "nan,1", "1,inf", "0,0", "1e39,1"])
def test_odd_weights_are_refused(pair, tmp_path, weights):
    result = run("merge", *pair, "-o", tmp_path / "out", "--weights", weights)
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "weights" in result.stderr
    assert not (tmp_path / "out").exists()


def test_several_checkpoints_need_weights(pair, tmp_path):
    result = run("merge", *pair, "-o", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "--weights" in result.stderr
    result = run("merge", *pair, "-o", tmp_path / "out", "--weights", "a,b")
    assert result.exit_code == 2
    result = run("merge", *pair, "-o", tmp_path / "out", "--plus", pair[0])
    assert result.exit_code == 2
    with pytest.raises(CheckpointError):
        merge([], tmp_path / "out", weights=[])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"w": torch.ones(3, 4), "b": torch.ones(3)}, ["'w'", "[4, 3]", "[3, 4]"]),
        ({"w": torch.ones(4, 3)}, ["'b'", "lacks"]),
        ({"w": torch.ones(4, 3), "b": torch.ones(3), "c": torch.ones(3)}, ["'c'", "lacks"]),
        ({"w": torch.ones(4, 3), "b": torch.ones(3).half()}, ["'b'", "float16", "--dtype"]),
        ({"w": torch.ones(4, 3), "b": torch.ones(3, dtype=torch.int32)}, ["'b'", "int32"]),
    ],
)
def test_sources_of_other_tensors_are_refused(pair, tmp_path, other, named):
    save_file(other, tmp_path / "c.safetensors")
    result = run(
        "merge", pair[0], tmp_path / "c.safetensors", "-o", tmp_path / "out", "--weights", "1,1"
    )
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert all(word in result.stderr for word in named)
    assert not (tmp_path / "out").exists()


def test_excluded_tensors_may_differ(pair, tmp_path):
    save_file({"w": torch.ones(4, 3), "b": torch.ones(9)}, tmp_path / "c.safetensors")
    merge([pair[0], tmp_path / "c.safetensors"], tmp_path / "out", weights=[1, 1], exclude="b")
    assert torch.equal(load_file(tmp_path / "out")["w"], torch.full((4, 3), 2.0))


def test_models_of_other_types_are_refused(tmp_path):
    for name in ("llama", "qwen3"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(3)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
    places = [tmp_path / "llama", tmp_path / "qwen3"]
    result = run("merge", *places, "-o", tmp_path / "out", "--weights", "1,1")
    assert result.exit_code == 3
    assert "llama" in result.stderr
    assert "qwen3" in result.stderr


def test_a_missing_shard_is_named_with_its_checkpoint(pair, tmp_path):
    mesh = DeviceMesh(range(2), (2,))
    tensors = {"w": DTensor(torch.ones(4, 3), mesh, "[S0,R]"), "b": torch.ones(3)}
    save_sharded(tensors, tmp_path / "cut")
    next((tmp_path / "cut").glob("shard-00001-*")).unlink()
    result = run("merge", pair[0], tmp_path / "cut", "-o", tmp_path / "out", "--weights", "1,1")
    assert result.exit_code == 3
    assert str(tmp_path / "cut") in result.stderr


def test_no_source_is_overwritten(pair, tmp_path):
    before = [place.read_bytes() for place in pair]
    for place in pair:
        with pytest.raises(CheckpointError):
            merge(pair, place, weights=[1, 1], overwrite=True)
        with pytest.raises(CheckpointError):
            merge(pair, place, weights=[1, 1])
    (tmp_path / "alone").mkdir()
    other = tmp_path / "alone" / "model.safetensors"
    other.write_bytes(before[1])
    with pytest.raises(CheckpointError):  # it would count as a file of the second checkpoint
        merge([pair[0], other.parent], tmp_path / "alone" / "x.safetensors", weights=[1, 1])
    assert [place.read_bytes() for place in pair] == before


def test_a_source_that_changes_meanwhile_is_noticed(pair, tmp_path):
    def change(*_):
        pair[1].write_bytes(pair[1].read_bytes() + b" ")

    with pytest.raises(CheckpointError, match="changed"):
        merge(pair, tmp_path / "out", weights=[1, 1], progress=change)
    assert not (tmp_path / "out").exists()


def test_complex_and_packed_tensors_are_equal_or_refused(tmp_path):
    places = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for seed, place in enumerate(places):
        torch.manual_seed(0)
        angle = torch.polar(torch.ones(5), torch.arange(5.0))
        torch.save({"w": torch.ones(3) * seed, "angle": angle}, place)
    merge(places, tmp_path / "out.pt", weights=[0.5, 0.5])
    got = torch.load(tmp_path / "out.pt")
    assert got["angle"].is_complex()
    assert torch.equal(got["w"], torch.full((3,), 0.5))


def test_a_dry_run_says_what_is_read(pair, tmp_path):
    report = merge(pair, tmp_path / "out", weights=[1, 1], dry_run=True)
    assert (report.read_files, report.read_bytes) == (2, 2 * 15 * 4)
    assert not report.written
