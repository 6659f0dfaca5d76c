"""Adapters merged into their base: `merge(base, out, lora=adapter)`, by PEFT's formulas."""

import json
from math import sqrt

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardspec import (
    DeviceMesh,
    DTensor,
    merge,
    model_layouts,
    model_names,
    reshard,
    save_sharded,
)
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.dist.processes import run_ranks

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": ["q", "down"]}
Q, DOWN = "model.layers.0.q", "model.layers.0.down"


def run(*args):
    return CliRunner().invoke(cli, ["merge", *map(str, args)], prog_name="shardspec")


def base_of(dtype=torch.float32):
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        f"{Q}.weight": (40, 24),
        f"{DOWN}.weight": (24, 24),
        "lm_head.weight": (9, 24),
    }
    shapes |= {"model.embed_tokens.weight": (9, 24), f"{Q}.bias": (40,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def pair(module, inputs, outputs, rank=4, seed=1):
    """Return A and B of a linear layer, under the names of a file."""
    generator = torch.Generator().manual_seed(seed)
    start = f"base_model.model.{module}"
    return {
        f"{start}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
        f"{start}.lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }


def product(tensors, scale=2.5):
    a, b = tensors.values()
    return b @ a * scale


def write(place, tensors, config=None):
    """Write an adapter's folder."""
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return place


@pytest.fixture
def base(tmp_path):
    save_file(base_of(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def merged(base, adapter, **options):
    out = base.parent / "out"
    merge(base, out, lora=adapter, overwrite=True, **options)
    return load_file(out)


def assert_near(got, expected):
    """Check that numbers are equal but for the order of sums in a product."""
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 22}[got.dtype]
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    apart = (got.double() - expected.double()).abs()
    assert (apart <= 2.0**-bits * expected.double().abs() + 4e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_products_are_added_and_rounded_once(tmp_path, dtype):
    tensors = base_of(dtype)
    save_file(tensors, tmp_path / "base.safetensors")
    own, other = pair(Q, 24, 40), pair(DOWN, 24, 24, seed=2)
    adapter = write(tmp_path / "adapter", own | other)
    got = merged(tmp_path / "base.safetensors", adapter)
    assert got.keys() == tensors.keys()
    for name, delta in ((f"{Q}.weight", own), (f"{DOWN}.weight", other)):
        assert_near(got[name], (tensors[name].float() + product(delta)).to(dtype))
    assert torch.equal(got["lm_head.weight"], tensors["lm_head.weight"])
    got = merged(tmp_path / "base.safetensors", adapter, dtype="bf16")
    expected = tensors[f"{Q}.weight"].float() + product(own)
    assert_near(got[f"{Q}.weight"], expected.bfloat16())


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({"use_rslora": True}, 4, 10 / sqrt(4)),
        ({"rank_pattern": {"layers.0.q": 2}}, 2, 5),
        ({"alpha_pattern": {r"model\.layers\..*\.q": 3}}, 4, 0.75),
        (
            {"rank_pattern": {"q": 2}, "alpha_pattern": {"^model.*q": 1}, "use_rslora": True},
            2,
            0.5**0.5,
        ),
        ({"rank_pattern": {"other": 2}}, 4, 2.5),
    ],
)
def test_the_scale_is_that_of_the_config(base, tmp_path, config, rank, scale):
    own = pair(Q, 24, 40, rank)
    got = merged(base, write(tmp_path / "adapter", own, config))
    assert_near(got[f"{Q}.weight"], base_of()[f"{Q}.weight"] + product(own, scale))


def test_magnitudes_of_dora(base, tmp_path):
    for module, outputs in ((Q, 40), (DOWN, 24)):
        own = pair(module, 24, outputs)
        magnitude = torch.rand(outputs) + 0.5
        name = f"base_model.model.{module}.lora_magnitude_vector"
        for spelled in (name, f"{name}.weight"):
            adapter = write(tmp_path / "adapter", {**own, spelled: magnitude}, {"use_dora": True})
            changed = base_of()[f"{module}.weight"] + product(own)
            expected = (magnitude / changed.norm(dim=1))[:, None] * changed
            assert_near(merged(base, adapter)[f"{module}.weight"], expected)


def test_weights_stored_as_inputs_and_outputs(tmp_path):
    weights = {"a.weight": torch.randn(24, 40), "square.weight": torch.randn(24, 24)}
    save_file(weights, tmp_path / "base.safetensors")
    own, square = pair("a", 24, 40), pair("square", 24, 24)
    magnitude = {"base_model.model.a.lora_magnitude_vector": torch.rand(40)}
    config = {"fan_in_fan_out": True}
    adapter = write(tmp_path / "adapter", square, config)
    got = merged(tmp_path / "base.safetensors", adapter)
    assert_near(got["square.weight"], weights["square.weight"] + product(square).T)
    adapter = write(tmp_path / "adapter", own | magnitude, config | {"use_dora": True})
    got = merged(tmp_path / "base.safetensors", adapter)
    changed = weights["a.weight"] + product(own).T
    (factor,) = magnitude.values()
    assert_near(got["a.weight"], (factor / changed.norm(dim=0)) * changed)


def test_embeddings_and_trained_copies(base, tmp_path):
    start = "base_model.model.model.embed_tokens"
    a, b = torch.randn(4, 9), torch.randn(24, 4)
    head = torch.randn(9, 24)
    tensors = {f"{start}.lora_embedding_A": a, f"{start}.lora_embedding_B": b}
    tensors |= {"base_model.model.lm_head.weight": head}
    config = {"modules_to_save": ["lm_head"]}
    got = merged(base, write(tmp_path / "adapter", tensors, config))
    expected = base_of()["model.embed_tokens.weight"] + (b @ a * 2.5).T
    assert_near(got["model.embed_tokens.weight"], expected)
    assert torch.equal(got["lm_head.weight"], head)
    # The embedding that PEFT saves beside its adapter replaces that of the base.
    tensors[f"{start}.base_layer.weight"] = own = torch.randn(9, 24)
    got = merged(base, write(tmp_path / "adapter", tensors, config))
    assert_near(got["model.embed_tokens.weight"], own + (b @ a * 2.5).T)


def test_a_trained_module_that_the_base_lacks_is_added(base, tmp_path):
    tensors = {**pair(Q, 24, 40), "base_model.model.score.weight": torch.randn(3, 24)}
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        merged(base, write(tmp_path / "adapter", tensors))
    got = merged(base, write(tmp_path / "adapter", tensors, {"modules_to_save": ["score"]}))
    assert torch.equal(got["score.weight"], tensors["base_model.model.score.weight"])


def test_tied_embeddings_change_together(tmp_path):
    weights = base_of()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights, tmp_path / "base.pt")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "base.safetensors")
    head = pair("lm_head", 24, 9)
    a, b = torch.randn(4, 9), torch.randn(24, 4)
    start = "base_model.model.model.embed_tokens"
    both = head | {f"{start}.lora_embedding_A": a, f"{start}.lora_embedding_B": b}
    for tensors in (head, both):
        expected = weights["model.embed_tokens.weight"] + product(head)
        if len(tensors) > 2:
            expected = expected + (b @ a * 2.5).T
        adapter = write(tmp_path / "adapter", tensors)
        got = merged(tmp_path / "base.safetensors", adapter)
        assert_near(got["model.embed_tokens.weight"], expected)
        merge(tmp_path / "base.pt", tmp_path / "out.pt", lora=adapter, overwrite=True)
        tied = torch.load(tmp_path / "out.pt")
        assert_near(tied["model.embed_tokens.weight"], expected)
        assert torch.equal(tied["lm_head.weight"], tied["model.embed_tokens.weight"])


def test_a_trained_copy_of_one_of_two_tied_tensors_is_refused(tmp_path):
    weights = base_of()
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "base.safetensors")
    name = "model.embed_tokens.weight"
    tensors = {f"base_model.model.{name}": torch.randn(9, 24)}
    config: dict[str, object] = {"modules_to_save": ["embed_tokens"]}
    with pytest.raises(CheckpointError, match="ensure_weight_tying"):
        merged(tmp_path / "base.safetensors", write(tmp_path / "adapter", tensors, config))
    config["ensure_weight_tying"] = True
    # Jobs also save the model that they did not train beside its adapter.
    for more in (config, {"modules_to_save": None}):
        got = merged(tmp_path / "base.safetensors", write(tmp_path / "adapter", tensors, more))
        assert torch.equal(got[name], tensors[f"base_model.model.{name}"])


def test_a_change_of_an_embedding_is_rounded_before_it_is_added(tmp_path):
    weights = base_of(torch.bfloat16)
    save_file(weights, tmp_path / "base.safetensors")
    a, b = torch.randn(4, 9), torch.randn(24, 4)
    start = "base_model.model.model.embed_tokens"
    tensors = {f"{start}.lora_embedding_A": a, f"{start}.lora_embedding_B": b}
    got = merged(tmp_path / "base.safetensors", write(tmp_path / "adapter", tensors))
    expected = weights["model.embed_tokens.weight"] + (b @ a * 2.5).T.bfloat16()
    assert_near(got["model.embed_tokens.weight"], expected)


def test_biases(base, tmp_path):
    start = f"base_model.model.{Q}"
    whole = {**pair(Q, 24, 40), f"{start}.bias": torch.randn(40)}
    got = merged(base, write(tmp_path / "adapter", whole, {"bias": "all"}))
    assert torch.equal(got[f"{Q}.bias"], whole[f"{start}.bias"])
    for name in ("bias", "lora_B.bias"):
        tensors = {**pair(DOWN, 24, 24), f"base_model.model.{DOWN}.{name}": torch.randn(24)}
        result = run(base, "--lora", write(tmp_path / "adapter", tensors), "-o", tmp_path / "out2")
        assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
        assert f"{DOWN}.{name}" in result.stderr


def experts(transposed):
    """Return stacked experts, an adapter of both by PEFT's names, and the merged weights."""
    torch.manual_seed(3)
    shapes = {"gate_up_proj": (3, 24, 40), "down_proj": (3, 20, 24)}
    weights: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for at, (name, shape) in enumerate(shapes.items()):
        outputs, inputs = shape[1:] if not transposed else shape[:0:-1]
        weights[f"mlp.experts.{name}"] = torch.randn(shape)
        a, b = torch.randn(3 * 4, inputs), torch.randn(outputs, 4 * 3)
        # The parameter that PEFT wraps last is outermost.
        start = f"base_model.model.mlp.experts{'' if at else '.base_layer'}"
        tensors |= {f"{start}.lora_A.weight": a, f"{start}.lora_B.weight": b}
        product = torch.einsum("ore,eri->eoi", b.view(-1, 4, 3), a.view(3, 4, -1)) * 2.5
        if transposed:
            product = product.transpose(1, 2)
        expected[f"mlp.experts.{name}"] = weights[f"mlp.experts.{name}"] + product
    return weights, tensors, expected


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_stacked_in_one_parameter(tmp_path, transposed):
    weights, tensors, expected = experts(transposed)
    save_file(weights, tmp_path / "base.safetensors")
    config = {"target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"]}
    got = merged(tmp_path / "base.safetensors", write(tmp_path / "adapter", tensors, config))
    for name, tensor in expected.items():
        assert_near(got[name], tensor)
    with pytest.raises(CheckpointError, match="no place"):
        merged(tmp_path / "base.safetensors", write(tmp_path / "adapter", tensors))


def test_experts_that_files_store_one_by_one(tmp_path):
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    sizes |= {"num_experts": 3, "moe_intermediate_size": 6, "intermediate_size": 12}
    config = {"model_type": "qwen3_moe", "vocab_size": 16, "num_hidden_layers": 1, **sizes}
    config["tie_word_embeddings"] = False
    torch.manual_seed(0)
    shapes = {name: at.global_shape for name, at in model_layouts(config, "fsdp:1").items()}
    live = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(live, tmp_path / "live.safetensors")
    base = tmp_path / "base"
    merge(tmp_path / "live.safetensors", f"{base}/", names=model_names(config, "hf"))
    (base / "config.json").write_text(json.dumps(config))
    a, b = torch.randn(3 * 4, 6), torch.randn(8, 4 * 3)
    module = "model.layers.0.mlp.experts"
    tensors = {f"base_model.model.{module}.lora_A.weight": a}
    tensors[f"base_model.model.{module}.lora_B.weight"] = b
    options = {"target_parameters": ["mlp.experts.down_proj"]}
    adapter = write(tmp_path / "adapter", tensors, options)
    merge(base, tmp_path / "out", lora=adapter)
    got = load_file(tmp_path / "out")
    assert got.keys() == load_file(next(base.glob("*.safetensors"))).keys()
    change = torch.einsum("ore,eri->eoi", b.view(-1, 4, 3), a.view(3, 4, -1)) * 2.5
    for expert in range(3):
        expected = live[f"{module}.down_proj"][expert] + change[expert]
        assert_near(got[f"{module}.{expert}.down_proj.weight"], expected)


def test_a_sharded_adapter_and_base(base, tmp_path):
    own, mesh = pair(Q, 24, 40), DeviceMesh(range(4), (4,))
    live = {name.replace(".weight", ".default.weight"): tensor for name, tensor in own.items()}
    cut = {
        name: DTensor(tensor, mesh, "[S0,R]" if "lora_B" in name else "[R,S0]")
        for name, tensor in live.items()
    }
    save_sharded(cut, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(CONFIG))
    reshard(base, tmp_path / "cut", device_mesh=mesh, rules={"*.weight": "[S0,R]"})
    merge(tmp_path / "cut", tmp_path / "out", lora=tmp_path / "adapter")
    got = load_file(tmp_path / "out")
    assert torch.equal(
        got[f"{Q}.weight"], merged(base, write(tmp_path / "plain", own))[f"{Q}.weight"]
    )
    reshard(
        base,
        tmp_path / "again",
        lora=tmp_path / "adapter",
        device_mesh=mesh,
        rules={"*.weight": "[R,S0]"},
    )
    merge(tmp_path / "again", tmp_path / "out2")
    assert torch.equal(load_file(tmp_path / "out2")[f"{Q}.weight"], got[f"{Q}.weight"])


def save_on_ranks(rank, place):
    """Save an adapter of two ranks by torch's checkpoints, by a file a rank, and by shardspec."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name.replace(".weight", ".default.weight"): distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in pair(Q, 24, 40, rank=5).items()
    }
    save(state, checkpoint_id=place / "dcp")
    (place / "files").mkdir(exist_ok=True)
    torch.save(state, place / "files" / f"model_world_size_2_rank_{rank}.pt")
    own = DeviceMesh(range(2))
    save_sharded(
        {
            name: DTensor.from_local(tensor.to_local(), own, "[S0,R]", global_shape=tensor.shape)
            for name, tensor in state.items()
        },
        place / "own",
    )


@pytest.fixture(scope="module")
def saved_by_ranks(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    run_ranks(2, place, save_on_ranks, place)
    return place


@pytest.mark.parametrize("form", ["dcp", "files", "own"])
def test_an_adapter_that_two_ranks_saved(base, tmp_path, saved_by_ranks, form):
    config = {"r": 5}
    (saved_by_ranks / form / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    result = run(base, "--lora", saved_by_ranks / form, "-o", tmp_path / "got")
    assert result.exit_code == 0, result.stderr
    adapter = write(tmp_path / "plain", pair(Q, 24, 40, rank=5), config)
    merge(base, tmp_path / "expected", lora=adapter)
    assert (tmp_path / "got").read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_large_weight_is_merged_in_parts(tmp_path):
    weight = torch.randn(1500, 1100)
    save_file({"w.weight": weight}, tmp_path / "base.safetensors")
    own = pair("w", 1100, 1500)
    magnitude = {"base_model.model.w.lora_magnitude_vector": torch.rand(1500)}
    adapter = write(tmp_path / "adapter", own | magnitude, {"use_dora": True})
    got = merged(tmp_path / "base.safetensors", adapter)
    changed = weight + product(own)
    factor = magnitude["base_model.model.w.lora_magnitude_vector"] / changed.norm(dim=1)
    assert torch.allclose(got["w.weight"], factor[:, None] * changed, rtol=1e-5, atol=1e-6)


def test_a_quantized_base_is_dequantized(tmp_path):
    place = tmp_path / "base"
    place.mkdir()
    codes, scales = torch.randn(128, 128).to(torch.float8_e4m3fn), torch.rand(1, 1)
    save_file({"w.weight": codes, "w.weight_scale_inv": scales}, place / "model.safetensors")
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "llama", "quantization_config": section}
    (place / "config.json").write_text(json.dumps(config))
    own = pair("w", 128, 128)
    adapter = write(tmp_path / "adapter", own)
    result = run(place, "--lora", adapter, "-o", tmp_path / "out")
    assert result.exit_code == 3
    assert "--dtype bf16" in result.stderr
    merge(place, tmp_path / "out", lora=adapter, dtype="fp32")
    expected = codes.float() * scales + product(own)
    assert_near(load_file(tmp_path / "out")["w.weight"], expected)


def test_codes_that_are_not_read_are_refused(base, tmp_path):
    tensors = base_of()
    del tensors[f"{Q}.weight"]
    tensors |= {f"{Q}.qweight": torch.ones(3, 40, dtype=torch.int32)}
    tensors |= {f"{Q}.scales": torch.ones(1, 40), f"{Q}.qzeros": torch.ones(1, 5).int()}
    other = base_of() | {f"{Q}.weight": torch.ones(40, 24, dtype=torch.int8)}
    adapter = write(tmp_path / "adapter", pair(Q, 24, 40))
    for each, named in ((tensors, "quantized"), (other, "int8")):
        save_file(each, base)
        result = run(base, "--lora", adapter, "--dtype", "bf16", "-o", tmp_path / "out")
        assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
        assert named in result.stderr


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"lora_bias": True}, "lora_bias"),
        ({"r": 8}, "rank"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"rank_pattern": [4]}, "rank_pattern"),
        ({"target_parameters": 5}, "target_parameters"),
        ({"rank_pattern": {"(": 4}}, "regular expression"),
        ({"rank_pattern": {"(.*)*(.*)*(.*)*x": 4}}, "repeats"),
        ({"use_dora": True}, "use_dora"),
        ({"fan_in_fan_out": "no"}, "fan_in_fan_out"),
    ],
)
def test_unknown_methods_are_refused(base, tmp_path, config, named):
    adapter = write(tmp_path / "adapter", pair(Q, 24, 40), config)
    result = run(base, "--lora", adapter, "-o", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert named in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (pair(Q, 24, 41), Q),
        (pair("model.layers.7.q", 24, 40), "layers.7"),
        (pair(Q, 24, 40) | {f"base_model.model.{Q}.lora_C.weight": torch.ones(1)}, "lora_C"),
        (dict([next(iter(pair(Q, 24, 40).items()))]), "lora_B"),
        (pair(Q, 24, 40) | {"base_model.model.norm.weight": torch.ones(3)}, "norm.weight"),
        ({name: tensor.int() for name, tensor in pair(Q, 24, 40).items()}, "int32"),
        (pair(Q, 24, 40) | {f"base_model.model.{Q}.lora_A.b.weight": torch.ones(4, 24)}, "several"),
    ],
)
def test_tensors_without_a_place_are_refused(base, tmp_path, tensors, named):
    result = run(base, "--lora", write(tmp_path / "adapter", tensors), "-o", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert named in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_is_no_sum(base, tmp_path):
    adapter = write(tmp_path / "adapter", pair(Q, 24, 40))
    result = run(base, "--lora", adapter, "--plus", base, "-o", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    (adapter / "adapter_config.json").unlink()
    result = run(base, "--lora", adapter, "-o", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert "adapter_config.json" in result.stderr
    with pytest.raises(CheckpointError):
        merge(base, adapter / "adapter_model.safetensors", lora=adapter, overwrite=True)
