"""One command for a model: names, sizes, config and tokenizer come from its directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from shardspec import (
    DeviceMesh,
    load_sharded,
    merge,
    model_names,
    plan_reshard,
)
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.test_low_precision import as_codes
from tests.families.test_shapes import HF, model

Arrays = dict[str, np.ndarray]


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def arrays_of(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    random = np.random.default_rng(0)
    return {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def saved(place: Path, name: str, **changes: object) -> tuple[Path, Arrays]:
    """Save a model with its config and a tokenizer; return what it holds."""
    config = {**HF[name]["config"], **changes}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer.json").write_text("{}")
    arrays = arrays_of(model(config).shapes())
    save_file(arrays, place / "model.safetensors")
    return place, arrays


def same(place: Path, wanted: Arrays) -> None:
    found = load_file(place / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], array) for name, array in wanted.items())


def test_to_megatron_and_back_with_config_and_tokenizer(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3_moe")
    way = ("--model", folder, "--names", "megatron", "--to", "dcp")
    assert "has the names of transformers" in run("reshard", folder, "-o", tmp_path / "run", *way)
    said = run("merge", tmp_path / "run", "-o", f"{tmp_path}/out/", "--model", folder)
    assert "has the names of Megatron-core" in said
    same(tmp_path / "out", arrays)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (folder / name).read_text()


def test_digests_and_deltas_are_of_the_tensors_under_the_names_of_a_model(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3")
    run(
        "merge",
        folder,
        "-o",
        tmp_path / "megatron.safetensors",
        "--model",
        folder,
        "--names",
        "megatron",
    )
    renamed = ("--model", folder)
    plain = run("digest", folder, "-o", tmp_path / "digests.json").rpartition(" ")[2]
    megatron = tmp_path / "megatron.safetensors"
    assert run("digest", megatron, *renamed).rpartition(" ")[2] == plain
    assert run("digest", megatron).rpartition(" ")[2] != plain
    run("verify", megatron, "--digests", tmp_path / "digests.json", *renamed)
    run("verify", megatron, "--digests", tmp_path / "digests.json", code=3)
    assert "give --digests too" in run("verify", megatron, *renamed, code=2)
    first = min(arrays)
    arrays[first] = arrays[first] + 1
    save_file(arrays, tmp_path / "base.safetensors")
    made = run(
        "delta",
        "make",
        tmp_path / "base.safetensors",
        megatron,
        "-o",
        tmp_path / "d",
        "--version",
        1,
        *renamed,
    )
    assert f"1 of {len(arrays)} tensors changed" in made
    assert "--model" in run("digest", megatron, "--names", "hf", code=2)


def test_layers_that_predict_further_tokens_and_copies_of_the_embedding(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=1)
    for copy, origin in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        arrays[f"model.layers.3.{copy}.weight"] = arrays[f"{origin}.weight"]
    save_file(arrays, folder / "model.safetensors")
    there = ("--model", folder, "--names", "megatron")
    run("merge", folder, "-o", f"{tmp_path}/megatron/", *there)
    assert "mtp.layers.0.eh_proj.weight" in load_file(tmp_path / "megatron" / "model.safetensors")
    run("merge", tmp_path / "megatron", "-o", f"{tmp_path}/back/", "--model", folder)
    same(tmp_path / "back", arrays)
    arrays["model.layers.3.embed_tokens.weight"] = arrays["lm_head.weight"]
    save_file(arrays, folder / "model.safetensors")
    said = run("merge", folder, "-o", f"{tmp_path}/other/", *there, code=3)
    assert "to 'model.embed_tokens.weight', but they differ" in said
    assert not (tmp_path / "other").exists()


def test_what_training_did_not_have_is_taken_from_the_original(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=1)
    tower = {"vision.patch": np.ones((2, 2), np.float32)}
    save_file(arrays | tower, folder / "model.safetensors")
    trained = {n: array + 1 for n, array in arrays.items() if not n.startswith("model.layers.3.")}
    (tmp_path / "trained").mkdir()
    save_file(trained, tmp_path / "trained" / "model.safetensors")
    call = ("merge", tmp_path / "trained", "-o", f"{tmp_path}/out/", "--model", folder)
    said = run(*call, code=3)
    assert "lacks 'model.layers.3.enorm.weight'" in said
    assert "--fill-from" in said
    assert not (tmp_path / "out").exists()
    said = run(*call, "--fill-from", folder)
    same(tmp_path / "out", arrays | trained | tower)
    for name in (arrays.keys() - trained.keys()) | tower.keys():
        assert name in said


def changed(config: dict[str, object]) -> dict[str, object]:
    return {**HF["qwen3_moe"]["config"], **config}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"model_type": "brain"},
            "no family for models of type 'brain'; known families: deepseek-v2",
        ),
        ({"model_type": "qwen2"}, "families 'gemma3'"),
        ({"num_hidden_layers": 4}, "lacks 'model.layers.3.input_layernorm.weight'"),
        ({"num_hidden_layers": 2}, "model.layers.2."),
        ({"num_experts": 3}, "num_experts give a multiple of 3"),
        ({"num_experts": 5}, "num_experts give a multiple of 5"),
        ({"num_attention_heads": 8}, "self_attn.q_proj.weight"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"mlp_only_layers": []}, "model.layers.0.mlp"),
    ],
)
def test_a_config_that_the_checkpoint_contradicts_is_refused(tmp_path, config, says):
    folder, _ = saved(tmp_path / "hf", "qwen3_moe")
    (folder / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(changed(config)))
    call = ("merge", folder, "-o", f"{tmp_path}/out/", "--model", tmp_path / "config.json")
    said = run(*call, code=3)
    assert says in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", ["hf", "megatron", "fused"])
@pytest.mark.parametrize(
    "missing",
    [
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.mlp.experts.3.up_proj.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_an_error_in_every_direction(tmp_path, missing, names):
    folder, arrays = saved(tmp_path / "hf", "qwen3_moe")
    save_file({n: a for n, a in arrays.items() if n != missing}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks"):
        merge(folder, tmp_path / "out", names=model_names(folder, names))


def test_a_strange_tensor_is_an_error_unless_it_is_dropped(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3_moe")
    strange = {"model.layers.0.self_attn.sinks": np.ones(4, np.float32)}
    save_file(arrays | strange, folder / "model.safetensors")
    call = ("merge", folder, "-o", f"{tmp_path}/out/", "--model", folder)
    said = run(*call, code=3)
    assert "'gpt-oss'" in said
    assert "--drop" in said
    run(*call, "--drop", "*.sinks")
    same(tmp_path / "out", arrays)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "llama-tied")
    head = {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    save_file(arrays | head, folder / "model.safetensors")
    call = ("merge", folder, "-o", f"{tmp_path}/out/", "--model", folder)
    run(*call)
    same(tmp_path / "out", arrays)
    save_file(arrays | {"lm_head.weight": head["lm_head.weight"] + 1}, folder / "model.safetensors")
    assert "but they differ" in run(*call, "--overwrite", code=3)


def test_biases_of_routers_stay_float32(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    run("merge", folder, "-o", f"{tmp_path}/out/", "--model", folder, "--dtype", "float16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(found[name], arrays[name])
    assert found["model.norm.weight"].dtype == np.float16
    plan = plan_reshard(folder, (DeviceMesh((0,)), {}), dtype="bfloat16")
    dtypes = {move.target_name: move.target.dtype for move in plan.moves}
    assert dtypes[name] == "float32"
    assert dtypes["model.norm.weight"] == "bfloat16"


def test_step_counts_keep_their_dtype(tmp_path):
    """A step of 1001 would become 1000 in 16 bits."""
    names = ("optim.state.up.weight.step", "optimizer.step.up.weight", "up.weight", "step.weight")
    save_file({name: np.full(1, 1001, np.float32) for name in names}, tmp_path / "in.safetensors")
    run("merge", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors", "--dtype", "f16")
    found = load_file(tmp_path / "out.safetensors")
    dtypes = [found[name].dtype for name in names]
    assert dtypes == [np.float32, np.float32, np.float16, np.float16]
    assert found[names[0]] == 1001


def test_a_config_no_longer_says_that_weights_are_quantized(tmp_path):
    folder, _ = saved(tmp_path / "hf", "qwen3")
    quantized = HF["qwen3"]["config"] | {"quantization_config": {"quant_method": "fp8"}}
    home = tmp_path / "released"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(quantized))
    run("merge", folder, "-o", f"{tmp_path}/out/", "--model", home)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == HF["qwen3"]["config"]


def test_an_index_that_lists_tensors_of_no_file_is_refused(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3")
    listed = dict.fromkeys([*arrays, "model.layers.9.enorm.weight"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    for names in ("hf", "megatron", "fused"):
        call = ("merge", folder, "-o", f"{tmp_path}/out/", "--model", folder, "--names", names)
        said = run(*call, code=3)
        assert "model.layers.9.enorm.weight" in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", ["model.", "module.module.", "state_dict.model."])
@pytest.mark.parametrize("names", ["hf", "megatron", "fused"])
def test_what_stands_before_all_names_is_no_part_of_them(tmp_path, prefix, names):
    folder, arrays = saved(tmp_path / "hf", "qwen3_moe")
    run("merge", folder, "-o", f"{tmp_path}/plain/", "--model", folder, "--names", names)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    job = tmp_path / "job"
    job.mkdir()
    steps = {"optimizer.state.step": np.zeros(1, np.float32)}
    save_file({f"{prefix}{n}": a for n, a in plain.items()} | steps, job / "model.safetensors")
    said = run("merge", job, "-o", f"{tmp_path}/out/", "--model", folder)
    assert f"behind {prefix!r}" in said
    same(tmp_path / "out", arrays)
    del plain[max(plain)]
    save_file({f"{prefix}{n}": a for n, a in plain.items()}, job / "model.safetensors")
    said = run("merge", job, "-o", f"{tmp_path}/less/", "--model", folder, code=3)
    assert "lacks" in said or "num_" in said


def test_loading_under_other_names(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3")
    mesh = DeviceMesh((0,))
    found = load_sharded(folder, mesh, {"*norm.weight": "[R]"}, names=model_names(folder, "fused"))
    parts = [arrays[f"model.layers.0.mlp.{one}_proj.weight"] for one in ("gate", "up")]
    shard = found["model.layers.0.mlp.gate_up_proj.weight"].to_local(0)
    assert np.array_equal(shard.numpy(), np.concatenate(parts))


def low_precision(place: Path, folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Save a quantized model; return what its weights come to in bfloat16."""
    merge(as_codes(folder, kind, dtype="bf16"), f"{place}/")
    run("merge", place, "-o", f"{place}.safetensors", "--dtype", "bf16")
    found: dict[str, torch.Tensor] = load_torch(f"{place}.safetensors")
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("deepseek_v3", "fp8-128x128"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "mxfp8")],
)
def test_quantized_models_are_dequantized_on_the_way(tmp_path, name, kind):
    sizes = {
        "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
        "qwen3_moe": {"intermediate_size": 64, "moe_intermediate_size": 32},
    }
    folder, arrays = saved(tmp_path / "hf", name, **sizes.get(name, {}))
    wanted = low_precision(tmp_path / "low", folder, kind)
    assert wanted.keys() == arrays.keys()
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] in ("fp8", "mxfp4", "mxfp8")
    if name == "gpt_oss":
        shapes = {
            n: list(a.shape) for n, a in load_torch(tmp_path / "low/model.safetensors").items()
        }
        count, rows, columns = arrays["model.layers.0.mlp.experts.gate_up_proj"].shape
        experts = "model.layers.0.mlp.experts.gate_up_proj"
        assert shapes[f"{experts}_blocks"] == [count, columns, rows // 32, 16]
        assert shapes[f"{experts}_scales"] == [count, columns, rows // 32]
        assert sum(n.endswith("_blocks") for n in shapes) == 2 * 2
    way = ("--model", tmp_path / "low", "--names", "megatron")
    assert "is quantized" in run("merge", tmp_path / "low", "-o", f"{tmp_path}/no/", *way, code=3)
    run("merge", tmp_path / "low", "-o", f"{tmp_path}/run/", *way, "--dtype", "bf16")
    run("merge", tmp_path / "run", "-o", f"{tmp_path}/back/", "--model", tmp_path / "low")
    found = load_torch(tmp_path / "back" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert tensor.dtype == found[key].dtype, key
        assert tensor.equal(found[key]), key
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    layout = ("--layout", "fsdp:2", "--dtype", "bf16")
    run("plan-state", tmp_path / "low", "--model", tmp_path / "low/config.json", *layout)


def test_what_is_taken_from_a_quantized_original_is_dequantized(tmp_path):
    folder, _ = saved(tmp_path / "hf", "deepseek_v3")
    wanted = low_precision(tmp_path / "low", folder, "fp8-128x128")
    lacking = {name for name in wanted if name.endswith("kv_b_proj.weight")}
    (tmp_path / "trained").mkdir()
    trained = {name: tensor for name, tensor in wanted.items() if name not in lacking}
    save_torch(trained, tmp_path / "trained" / "model.safetensors")
    way = ("--model", folder, "--fill-from", tmp_path / "low")
    call = ("merge", tmp_path / "trained", "-o", f"{tmp_path}/out/", *way)
    assert "is quantized" in run(*call, code=3)
    run(*call, "--dtype", "bf16")
    found = load_torch(tmp_path / "out" / "model.safetensors")
    assert all(found[name].equal(wanted[name]) for name in lacking)


def test_quantized_weights_are_refused_with_the_reason(tmp_path):
    folder, arrays = saved(tmp_path / "hf", "qwen3")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes: dict[str, Any] = {
        name: arrays[name].astype(np.int8),
        f"{name}_scale_inv": np.ones((1, 1), np.float32),
    }
    save_file(arrays | codes, folder / "model.safetensors")
    for names in ("hf", "megatron", "fused"):
        call = ("merge", folder, "-o", f"{tmp_path}/out/", "--model", folder, "--names", names)
        assert "is quantized" in run(*call, code=3)
    assert not (tmp_path / "out").exists()
