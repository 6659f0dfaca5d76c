"""Megatron's checkpoints, written as its code writes them, from whole models cut by hand."""

import enum
import io
import random
import sys
import types
from argparse import Namespace

import numpy as np
import pytest
import torch

__all__ = ["LAYERS", "core", "legacy", "number", "write"]

HIDDEN, FFN, VOCAB, LAYERS = 6, 9, 15, 5
GENERATOR = torch.Generator().manual_seed(0)


def number(*shape):
    return torch.randn(shape, generator=GENERATOR).to(torch.bfloat16)


def core(gated):
    """A whole model by the names of Megatron core, with Transformer Engine's fused norms."""
    model = {
        "embedding.word_embeddings.weight": number(VOCAB, HIDDEN),
        "embedding.position_embeddings.weight": number(7, HIDDEN),
        "decoder.final_layernorm.weight": number(HIDDEN),
        "decoder.final_layernorm.bias": number(HIDDEN),
        "output_layer.weight": number(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        start = f"decoder.layers.{layer}."
        rows = 2 * FFN if gated else FFN
        model |= {
            f"{start}self_attention.linear_qkv.weight": number(3 * HIDDEN, HIDDEN),
            f"{start}self_attention.linear_qkv.bias": number(3 * HIDDEN),
            f"{start}self_attention.linear_qkv.layer_norm_weight": number(HIDDEN),
            f"{start}self_attention.linear_qkv.layer_norm_bias": number(HIDDEN),
            f"{start}self_attention.q_layernorm.weight": number(2),
            f"{start}self_attention.linear_proj.weight": number(HIDDEN, HIDDEN),
            f"{start}self_attention.linear_proj.bias": number(HIDDEN),
            f"{start}pre_mlp_layernorm.weight": number(HIDDEN),
            f"{start}mlp.linear_fc1.weight": number(rows, HIDDEN),
            f"{start}mlp.linear_fc1.bias": number(rows),
            f"{start}mlp.linear_fc2.weight": number(HIDDEN, FFN),
            f"{start}mlp.linear_fc2.bias": number(HIDDEN),
        }
    return model


def legacy(gated):
    """The same by the older names, nested as those files are."""
    names = {
        "decoder.": "language_model.encoder.",
        "embedding.": "language_model.embedding.",
        "output_layer.": "language_model.output_layer.",
        "final_layernorm": "final_norm",
        "linear_qkv.layer_norm_weight": "input_norm.weight",
        "linear_qkv.layer_norm_bias": "input_norm.bias",
        "linear_qkv": "query_key_value",
        "linear_proj": "dense",
        "linear_fc1": "dense_h_to_4h",
        "linear_fc2": "dense_4h_to_h",
    }
    model = {}
    for name, tensor in core(gated).items():
        for new, old in names.items():
            name = name.replace(new, old)
        model[name] = tensor
    return model


ROWS = ("word_embeddings", "output_layer", "qkv.weight", "qkv.bias", "query_key_value")
FIRST = ("linear_fc1", "dense_h_to_4h")
COLUMNS = ("proj.weight", "attention.dense.weight", "fc2.weight", "4h_to_h.weight")


def share(name, tensor, rank, ranks, gated):
    """Cut as ColumnParallelLinear, RowParallelLinear and the gated layers do."""
    if any(part in name for part in COLUMNS):
        return tensor.chunk(ranks, 1)[rank].contiguous()
    if any(part in name for part in FIRST) and gated:
        return torch.cat([part.chunk(ranks)[rank] for part in tensor.chunk(2)])
    if any(part in name for part in (*ROWS, *FIRST)):
        return tensor.chunk(ranks)[rank].clone()
    return tensor.clone()


def stage_of(name, tensor, layers, first, last):
    """Return a tensor under its name in a stage with these layers, or nothing."""
    before, dot, after = name.partition(".layers.")
    if dot:
        place, _, rest = after.partition(".")
        if int(place) in layers:
            return {f"{before}.layers.{layers.index(int(place))}.{rest}": tensor}
        return {}
    return (
        {name: tensor}
        if ("embedding." in name and first) or ("embedding." not in name and last)
        else {}
    )


def nested(model):
    """As language_model keeps its state: dicts of modules, flat names inside of those."""
    state: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for name, tensor in model.items():
        top, part, rest = name.split(".", 2)
        state.setdefault(top, {}).setdefault(part, {})[rest] = tensor
    return state


class ModelType(enum.Enum):
    """Stands where Megatron has it; its name goes into the files."""

    encoder_or_decoder = 1


def write(
    directory,
    model,
    ranks,
    splits,
    *,
    gated=True,
    old=False,
    args=True,
    virtual=False,
    iteration="iter_0000010",
    spoil=lambda rank, stage, state: None,  # noqa: ARG005
):
    """Write a model; `splits` has the layers of every stage, a list of those with `virtual`."""
    modules = pytest.MonkeyPatch()
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        modules.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core.enums"].ModelType = ModelType  # type: ignore[attr-defined]  # a stand-in
    modules.setattr(ModelType, "__module__", "megatron.core.enums")
    stages = len(splits)
    for stage in range(stages):
        chunks = splits[stage] if virtual else [splits[stage]]
        for rank in range(ranks):
            state: dict[str, object] = {"checkpoint_version": 3.0, "iteration": 10}
            for place, layers in enumerate(chunks):
                part: dict[str, object] = {}
                for name, tensor in model.items():
                    part |= stage_of(
                        name,
                        share(name, tensor, rank, ranks, gated),
                        layers,
                        stage == place == 0,
                        stage == stages - 1 and place == len(chunks) - 1,
                    )
                part["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"scales")
                if old:
                    del part["decoder.layers.0.mlp.linear_fc1._extra_state"]
                state[f"model{place}" if virtual else "model"] = nested(part) if old else part
            if args:
                state["args"] = Namespace(
                    tensor_model_parallel_size=ranks,
                    pipeline_model_parallel_size=stages,
                    virtual_pipeline_model_parallel_size=len(chunks) if virtual else None,
                    expert_model_parallel_size=1,
                    num_layers=LAYERS,
                    swiglu=gated,
                    rank=rank + 2 * ranks * stage,
                    params_dtype=torch.bfloat16,
                    model_type=ModelType.encoder_or_decoder,
                )
            state["optimizer"] = {"fp32": [[torch.ones(3)], [torch.ones(2)]], "step": 3}
            state["rng_state"] = [
                {"np": np.random.RandomState(0).get_state(), "python": random.Random(0).getstate()}
            ]
            spoil(rank, stage, state)
            folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            path = directory / iteration / folder / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(state, path)
    modules.undo()
    (directory / "latest_checkpointed_iteration.txt").write_text("10")
    return directory
