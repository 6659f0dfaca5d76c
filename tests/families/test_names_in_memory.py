"""Names of models for state dicts in memory, against the same names of a checkpoint."""

import pytest
import torch

from shardspec import (
    DeviceMesh,
    DTensor,
    digest,
    load_sharded,
    model_layouts,
    model_names,
    plan_reshard,
    save_sharded,
)
from shardspec.errors import ShardSpecError

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def hf_state(prefix=""):
    sizes = {"model.embed_tokens": (64, 32), "lm_head": (64, 32), "model.norm": (32,)}
    layer = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "self_attn.q_norm": (8,),
        "self_attn.k_norm": (8,),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    sizes |= {f"model.layers.{i}.{name}": size for i in range(2) for name, size in layer.items()}
    trainer = DeviceMesh([0, 1])
    return {
        f"{prefix}{name}.weight": DTensor(
            torch.randn(size), trainer, "[S0,R]" if len(size) > 1 else "[S0]"
        )
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_of_a_model_give_the_plan_of_the_map(prefix):
    state = hf_state(prefix)
    engine = model_layouts(CONFIG, "vllm:tp=2", device_mesh=DeviceMesh([2, 3]), dtype="float32")
    names = model_names(CONFIG, "fused")
    got, receipt = plan_reshard(state, engine, names=names).run(state, receipt=True)
    assert got.keys() == engine.keys()
    assert receipt.digests == digest(state, names=names)
    # And back, where what is fused is cut.
    back = plan_reshard(got, (DeviceMesh([0, 1]), {}), names=model_names(CONFIG, "hf")).run(got)
    for name, tensor in back.items():
        assert torch.equal(tensor.to_global(), state[prefix + name].to_global()), name


def test_what_the_config_says_and_the_state_dict_lacks_is_refused():
    state = hf_state()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ShardSpecError, match=r"lacks 'model.layers.1.mlp.up_proj.weight'"):
        plan_reshard(state, (DeviceMesh([0]), {}), names=model_names(CONFIG, "fused"))


def test_plans_from_a_checkpoint_take_names_of_a_model(tmp_path):
    save_sharded(hf_state(), tmp_path / "saved")
    names, mesh = model_names(CONFIG, "fused"), DeviceMesh([0])
    plan = plan_reshard(tmp_path / "saved", (mesh, {"*": "[...]"}), names=names)
    read = plan.run({})
    loaded = load_sharded(tmp_path / "saved", mesh, {"*": "[...]"}, names=names)
    assert read.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert torch.equal(read[name].to_global(), tensor.to_global()), name
