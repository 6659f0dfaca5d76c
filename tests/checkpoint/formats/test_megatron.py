"""What is read of Megatron's checkpoints, and the rules of their cuts."""

from argparse import Namespace

import pytest
import torch

from shardspec import merge
from shardspec.checkpoint.catalog import OpaqueValue
from shardspec.checkpoint.formats.cut_rules import cut_rules
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.megatron_files import LAYERS, core, legacy, number, write
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    read_whole,
    refused,
)

WAYS = [
    (3, [[0, 1, 2, 3, 4]], False),
    (1, [[0, 1], [2, 3, 4]], False),
    (3, [[0, 1], [2], [3, 4]], False),
    (3, [[0, 1, 2, 3, 4], []], False),
    (3, [[[0, 1], [3]], [[2], [4]]], True),
]


@pytest.mark.parametrize(("ranks", "splits", "virtual"), WAYS)
@pytest.mark.parametrize("gated", [True, False])
def test_models_of_megatron_core(tmp_path, ranks, splits, virtual, gated):
    model = core(gated)
    ckpt = write(tmp_path / "ckpt", model, ranks, splits, gated=gated, virtual=virtual)
    assert_same(read_whole(ckpt), model)
    assert_same(read_whole(ckpt / "iter_0000010"), model)


@pytest.mark.parametrize(("ranks", "splits", "virtual"), WAYS)
@pytest.mark.parametrize("gated", [True, False])
def test_models_by_the_older_names(tmp_path, ranks, splits, virtual, gated):
    model = legacy(gated)
    ckpt = write(tmp_path / "ckpt", model, ranks, splits, gated=gated, virtual=virtual, old=True)
    assert_same(read_whole(ckpt), model)


def test_what_is_said_of_it(tmp_path):
    model = core(gated=True)
    ckpt = write(tmp_path / "ckpt", model, 3, [[0, 1, 2, 3, 4]])
    source = open_checkpoint(ckpt)
    assert (source.format, source.directory) == ("Megatron-LM", ckpt / "iter_0000010")
    assert source.mesh is not None
    assert (source.mesh.ids, source.mesh.axis_names) == ((0, 1, 2), ("tp",))
    start = "decoder.layers.2."
    proj = source.tensor(f"{start}self_attention.linear_proj.weight")
    assert str(proj.spec) == "[R,S0]"
    assert [box.box for box in proj.boxes] == [((0, 6), (lo, lo + 2)) for lo in (0, 2, 4)]
    gate = source.tensor(f"{start}mlp.linear_fc1.bias")
    assert gate.spec is None
    assert [(b.rank, b.box[0]) for b in gate.boxes] == [
        (0, (0, 3)),
        (0, (9, 12)),
        (1, (3, 6)),
        (1, (12, 15)),
        (2, (6, 9)),
        (2, (15, 18)),
    ]
    assert source.extras["iteration"] == 10
    assert source.extras["args"] == {
        "tensor_model_parallel_size": 3,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "num_layers": 5,
        "swiglu": True,
        "rank": 0,
        "params_dtype": OpaqueValue("torch.bfloat16"),
        "model_type": OpaqueValue("<megatron.core.enums.ModelType>, not read and not run"),
    }
    assert source.extras["optimizer"] == OpaqueValue("9 entries in the files of 3 ranks, not read")
    assert "_extra_state" in source.extras


def test_merging_needs_no_torch(tmp_path):
    model = core(gated=True)
    ckpt = write(tmp_path / "ckpt", model, 3, [[0, 1], [2, 3, 4]])
    assert_merged_without_torch(ckpt, tmp_path / "out.safetensors")
    assert_same(read_whole(tmp_path / "out.safetensors"), model)
    merge(open_checkpoint(ckpt / "iter_0000010"), tmp_path / "again.safetensors")
    assert_same(read_whole(tmp_path / "again.safetensors"), model)


def test_rules_of_the_caller(tmp_path):
    """Fused parts of unequal size, cut along rows or along columns, and a new name."""
    whole = {
        "a.fused.weight": number(12, 5),
        "a.wide.weight": number(5, 12),
        "b.weight": number(4),
        "a.mlp.linear_fc1.weight": number(12, 2),
    }
    rules = {
        "*.fused.*": {"spec": "[S(tp),R]", "parts": [4, 1, 1]},
        "*.wide.*": {"spec": "[R,S(tp)]", "parts": [1, 3, 2]},
        "b.*": "[R]",
        # Against the shipped rule for gated layers.
        "*.linear_fc1.weight": "[S(tp),R]",
    }
    split = {"a.fused.weight": (0, [8, 2, 2]), "a.wide.weight": (1, [2, 6, 4])}
    for rank in range(2):
        model = {}
        for name, tensor in whole.items():
            dim, sizes = split.get(name, (0, [len(tensor)]))
            parts = [part.chunk(2, dim)[rank] for part in tensor.split(sizes, dim)]
            model[name] = tensor if name == "b.weight" else torch.cat(parts, dim)
        path = tmp_path / "ckpt" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save({"model": model, "args": Namespace(swiglu=True)}, path)
    ckpt = tmp_path / "ckpt"
    assert_same(read_whole(ckpt, source_rules=rules, ranks=2), whole)
    lines = [
        '"*.fused.*" = { spec = "[S(tp),R]", parts = [4, 1, 1] }',
        '"*.wide.*" = { spec = "[R,S(tp)]", parts = [1, 3, 2] }',
        '"b.*" = "[R]"\n"*.linear_fc1.weight" = "[S(tp),R]"',
    ]
    (tmp_path / "rules.toml").write_text("\n".join(lines))
    assert cut_rules(tmp_path / "rules.toml") == cut_rules(rules)
    assert_same(read_whole(ckpt, source_rules=tmp_path / "rules.toml", ranks=2), whole)
    assert refused(ckpt, ranks=2, source_rules={**rules, "b.*": "[S(dp)]"}).startswith(
        "rules: the rule of 'b.*' is '[S(dp)]'; give a spec in quotes, over the axis tp alone"
    )
    assert refused(ckpt, ranks=2, source_rules={**rules, "b.*": "[R,R]"}) == (
        "rule 'b.*' has spec [R,R] of 2 dims, but tensor 'b.weight' has 1; write [...], which fits "
        "any number of dims from 0, or give that tensor a rule of its own after it, such as [R]"
    )
    assert refused(
        ckpt, ranks=2, source_rules={**rules, "b.*": {"spec": "[S(tp)]", "parts": 3}}
    ) == (
        f"tensor 'b.weight': dim 0 has 4 elements in {ckpt}/mp_rank_00/model_optim_rng.pt, which "
        "cannot be made of parts [1, 1, 1]; correct its rule"
    )
    assert refused(ckpt, ranks=2, source_rules={**rules, "*.weight": "[S(tp),...]"}).startswith(
        "source_rules= rule '*.fused.*' has no effect, since later rules win and '*.weight' matches"
    )
    assert refused(ckpt, ranks=2, source_rules={**rules, "*.wieght": "[R]"}).startswith(
        "source_rules= rule '*.wieght' matches no tensor; the names start with 'a.fused.weight', "
    )
    anyhow = {"*": "[S(tp),...]", **rules, "b.*": "[...]"}
    del anyhow["*.linear_fc1.weight"]
    assert_same(read_whole(ckpt, source_rules=anyhow, ranks=2), whole)
    del rules["b.*"]
    assert refused(ckpt, ranks=2, source_rules=rules) == (
        f"{ckpt}/mp_rank_00/model_optim_rng.pt: no rule says how tensor 'b.weight' is sharded over "
        'tensor parallel ranks; give one, such as "b.weight" = "[S(tp),R]", or "[R,R]" if '
        "all are equal, in source_rules="
    )


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ('"a" = 3', "the rule of 'a' is 3; give a spec in quotes"),
        ('a.b = "[R]"', "the rule of 'a' is {'b': '[R]'}; give a spec in quotes"),
        ('"a" = "[X]"', "the rule of 'a' is not a spec: "),
        ('"a" = {spec = "[R]", parts = 2}', "the rule of 'a' is {'spec': '[R]', 'parts': 2}; give"),
        (
            '"a" = {spec = "[S(tp)]", parts = 0}',
            "the rule of 'a' is {'spec': '[S(tp)]', 'parts': 0}; give a spec in quotes",
        ),
        (
            '"a" = {spec = "[S(tp)]", parts = [1, -1]}',
            "the rule of 'a' is {'spec': '[S(tp)]', 'parts': [1, -1]}; give a spec in quotes",
        ),
        ('"a" = "[R|P(tp)]"', "the rule of 'a' is '[R|P(tp)]'; give a spec in quotes"),
        ("a = [", "is not TOML: "),
    ],
)
def test_rules_that_are_none(tmp_path, rules, problem):
    path = tmp_path / "rules.toml"
    path.write_text(rules)
    with pytest.raises(CheckpointError) as caught:
        cut_rules(path)
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert len(str(caught.value).splitlines()) == 1


def test_the_oldest_order_of_heads_wants_a_rule(tmp_path):
    """Version 0 has all q of a rank above its k above its v."""
    model = legacy(gated=False)

    def spoil(rank, _, state):
        del state["checkpoint_version"]
        for name in [name for name in model if "query_key_value" in name]:
            _, _, rest = name.split(".", 2)
            parts = [part.chunk(3)[rank] for part in model[name].chunk(3)]
            state["model"]["language_model"]["encoder"][rest] = torch.cat(parts)

    ckpt = write(
        tmp_path / "ckpt", model, 3, [list(range(LAYERS))], gated=False, old=True, spoil=spoil
    )
    name = "language_model.encoder.layers.0.self_attention.query_key_value.bias"
    assert refused(ckpt) == (
        f"{ckpt}/iter_0000010/mp_rank_00/model_optim_rng.pt: tensor {name!r} is of checkpoint "
        "version 0, where each rank stores q, then k, then v; give it a rule with 3 parts: "
        f'"{name}" = {{ spec = "[S(tp),R]", parts = 3 }}'
    )
    rules = {
        "*.query_key_value.weight": {"spec": "[S(tp),R]", "parts": 3},
        "*.query_key_value.bias": {"spec": "[S(tp)]", "parts": 3},
    }
    assert_same(read_whole(ckpt, source_rules=rules), model)
