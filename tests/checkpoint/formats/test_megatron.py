"""Megatron's checkpoints, written as its code writes them, from whole models cut by hand."""

import enum
import io
import random
import shutil
import sys
import types
from argparse import Namespace

import numpy as np
import pytest
import torch

from shardspec.checkpoint.cut_rules import parse_rules, read_cut_rules
from shardspec.checkpoint.merge import merge
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.source import Described
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import (
    assert_merged_without_torch,
    assert_same,
    read_whole,
    refused,
)

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
    sys.modules["megatron.core.enums"].ModelType = ModelType  # type: ignore[attr-defined]
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
    assert source.others["iteration"] == 10
    assert source.others["args"] == {
        "tensor_model_parallel_size": 3,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "num_layers": 5,
        "swiglu": True,
        "rank": 0,
        "params_dtype": Described("torch.bfloat16"),
        "model_type": Described("<megatron.core.enums.ModelType>"),
    }
    assert source.others["optimizer"] == Described("9 entries in the files of 3 ranks, not read")
    assert "_extra_state" in source.others


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
    assert_same(read_whole(ckpt, rules=rules, ranks=2), whole)
    lines = [
        '"*.fused.*" = { spec = "[S(tp),R]", parts = [4, 1, 1] }',
        '"*.wide.*" = { spec = "[R,S(tp)]", parts = [1, 3, 2] }',
        '"b.*" = "[R]"\n"*.linear_fc1.weight" = "[S(tp),R]"',
    ]
    (tmp_path / "rules.toml").write_text("\n".join(lines))
    assert read_cut_rules(tmp_path / "rules.toml") == parse_rules(rules, "rules")
    assert_same(read_whole(ckpt, rules=tmp_path / "rules.toml", ranks=2), whole)
    assert refused(ckpt, ranks=2, rules={**rules, "b.*": "[S(dp)]"}) == (
        "tensor 'b.weight': its rule [S(dp)] has another axis than 'tp', which is the one over "
        "which Megatron cuts"
    )
    assert refused(ckpt, ranks=2, rules={**rules, "b.*": "[R,R]"}) == (
        "tensor 'b.weight': its rule [R,R] is for 2 dims, but it has 1; give it a rule of its own"
    )
    assert refused(ckpt, ranks=2, rules={**rules, "b.*": {"spec": "[S(tp)]", "parts": 3}}) == (
        f"tensor 'b.weight': dim 0 has 4 elements in {ckpt}/mp_rank_00/model_optim_rng.pt, which "
        "cannot be made of parts [1, 1, 1]; correct its rule"
    )
    assert refused(ckpt, ranks=2, rules={**rules, "*.weight": "[S(tp)]"}).startswith(
        "tensor 'a.fused.weight' is matched by the rules ['*.fused.*', '*.weight']; narrow"
    )
    del rules["b.*"]
    assert refused(ckpt, ranks=2, rules=rules) == (
        f"{ckpt}/mp_rank_00/model_optim_rng.pt: no rule says how tensor 'b.weight' is cut over "
        'tensor parallel ranks; give one, such as "b.weight" = "[S(tp),R]", or "[R,R]" if '
        "all hold the same (--source-rules FILE, rules=)"
    )


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ('"a" = 3', "the rule of 'a' is 3, not a spec in quotes"),
        ('a.b = "[R]"', "the rule of 'a' has b; give it a spec, and parts if there are any"),
        ('"a" = "[X]"', "the rule of 'a': "),
        ('"a" = {spec = "[R]", parts = 2}', "the rule of 'a' is [R] in 2 parts; a tensor has"),
        ('"a" = {spec = "[S(tp)]", parts = 0}', "the parts of 'a' are 0; give their number"),
        ('"a" = {spec = "[S(tp)]", parts = [1, -1]}', "the parts of 'a' are [1, -1]; give"),
        ('"a" = "[R|P(tp)]"', "the rule of 'a' is [R|P(tp)] in 1 parts; a tensor has nothing"),
        ("a = [", "is no TOML: "),
    ],
)
def test_rules_that_are_none(tmp_path, rules, problem):
    path = tmp_path / "rules.toml"
    path.write_text(rules)
    with pytest.raises(CheckpointError) as caught:
        read_cut_rules(path)
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert len(str(caught.value).splitlines()) == 1


MODEL = core(gated=True)
SPLITS = [[0, 1, 2], [3, 4]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("megatron")
    write(directory / "ckpt", MODEL, 3, SPLITS)
    write(directory / "told", MODEL, 3, SPLITS, args=False)
    return directory


@pytest.fixture
def ckpt(saved, tmp_path):
    return shutil.copytree(saved / "ckpt", tmp_path / "ckpt") / "iter_0000010"


@pytest.mark.parametrize("lost", range(1, 63))
def test_every_set_of_missing_ranks_is_refused(ckpt, lost):
    places = [f"mp_rank_{rank:02d}_{stage:03d}" for stage in range(2) for rank in range(3)]
    missing = [place for at, place in enumerate(places) if lost >> at & 1]
    for place in missing:
        shutil.rmtree(ckpt / place)
    message = refused(ckpt)
    assert f"{ckpt}/" in message or message.startswith(f"{ckpt}: ")
    assert any(f"{place} is missing" in message for place in missing) or (
        "was saved with tensor_model_parallel_size 3, but" in message
        or "was saved with pipeline_model_parallel_size 2, but" in message
    )


def test_files_without_arguments_want_to_be_counted(saved):
    ckpt = saved / "told" / "iter_0000010"
    assert refused(ckpt) == (
        f"{ckpt}/mp_rank_00_000/model_optim_rng.pt: does not say how many ranks there were (it has "
        "no args), so that later ones may be missing without a trace; if there were none, say so: "
        "--ranks 6 (ranks=6)"
    )
    assert refused(ckpt, ranks=8) == (
        f"{ckpt}: holds the files of 6 ranks, but 8 are said to have written some; restore what is "
        "missing or correct the number"
    )
    # Whether the first layers are gated is not said either.
    assert "no rule says how tensor 'decoder.layers.0.mlp.linear_fc1.bias' is" in refused(
        ckpt, ranks=6
    )
    rules = {
        "*.linear_fc1.weight": {"spec": "[S(tp),R]", "parts": 2},
        "*.linear_fc1.bias": {"spec": "[S(tp)]", "parts": 2},
    }
    assert_same(read_whole(ckpt, ranks=6, rules=rules), MODEL)


@pytest.mark.parametrize(("a", "b"), [("00_000", "01_000"), ("01_000", "01_001")])
def test_swapped_ranks(ckpt, a, b):
    one, other = ckpt / f"mp_rank_{a}", ckpt / f"mp_rank_{b}"
    one.rename(ckpt / "x")
    other.rename(one)
    (ckpt / "x").rename(other)
    assert "the files are swapped or not of one save, restore their places" in refused(ckpt)


def test_a_copy_in_place_of_another_rank(ckpt):
    shutil.rmtree(ckpt / "mp_rank_02_001")
    shutil.copytree(ckpt / "mp_rank_01_001", ckpt / "mp_rank_02_001")
    assert "the files are swapped or not of one save, restore their places" in refused(ckpt)


NORM = "decoder.layers.0.pre_mlp_layernorm.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda m: m.update({NORM: m[NORM] * 2}),
            "tensor 'decoder.layers.3.pre_mlp_layernorm.weight': ranks 3 and 4 claim different "
            "data for box [0:6], first at index [0], in {0} and {1}; keep the right one of the two",
        ),
        (
            lambda m: m.update({FC2: m[FC2].float()}),
            f"tensor '{FC2}' is bfloat16 of shape [6, 3] in {{0}}, but float32 of [6, 3] in {{1}}; "
            "the files are not of one save",
        ),
        (
            lambda m: m.update({FC2: m[FC2][:, :2].clone()}),
            f"tensor '{FC2}' is bfloat16 of shape [6, 3] in {{0}}, but bfloat16 of [6, 2] in {{1}};"
            " the files are not of one save",
        ),
        (
            lambda m: m.pop(FC2),
            f"{{1}}: lacks tensor '{FC2}', which {{0}} holds; the files are not of one save",
        ),
        (
            lambda m: m.update({"x": m[FC2]}),
            "{0}: lacks tensor 'x', which {1} holds; the files are not of one save",
        ),
    ],
)
def test_a_rank_that_contradicts_the_others(tmp_path, change, problem):
    def spoil(rank, stage, state):
        if (rank, stage) == (1, 1):
            change(state["model"])

    ckpt = write(tmp_path / "ckpt", MODEL, 3, SPLITS, spoil=spoil) / "iter_0000010"
    paths = [ckpt / f"mp_rank_{rank}_001" / "model_optim_rng.pt" for rank in ("00", "01")]
    assert refused(ckpt) == problem.format(*paths)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda s: s.update(model1=s["model"]),
            "{0}: has the models model, model1, but model, or model0, model1 and so on, are due; "
            "the file was changed, restore it",
        ),
        (
            lambda s: s.update(model3=s.pop("model")),
            "{0}: has the models model3, but model, or model0, model1 and so on, are due; the file "
            "was changed, restore it",
        ),
        (
            lambda s: s["model"].update({"decoder.layers.7.x": torch.ones(1)}),
            "{0}: has no layer decoder.layers.3, but decoder.layers.7; each stage counts its "
            "layers from 0, so that the file was changed, restore it",
        ),
        (
            lambda s: setattr(s["args"], "num_layers", 6),
            "{ckpt}: the stages hold 5 layers in all, but the run had num_layers 6; the files are "
            "not of one save",
        ),
        (
            lambda s: setattr(s["args"], "expert_model_parallel_size", 2),
            "{0}: was saved with expert_model_parallel_size 2, but 1 expert parallel rank are "
            "there; restore what is missing (expert parallel checkpoints cannot be read)",
        ),
        (
            lambda s: s.update(run=print),
            "{0}: the pickle names __builtin__.print, which does not belong in a checkpoint; "
            "nothing of it was run. If you trust its writer, save it again as a state dict of "
            "tensors and plain values",
        ),
    ],
)
def test_files_that_are_not_as_megatron_writes_them(tmp_path, change, problem):
    ckpt = write(tmp_path / "ckpt", MODEL, 3, SPLITS, spoil=lambda *at: change(at[2]))
    place = ckpt / "iter_0000010"
    first = place / "mp_rank_00_000" / "model_optim_rng.pt"
    assert refused(ckpt) == problem.format(first, ckpt=place)


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
        "version 0, where ranks hold all of their q above k above v; give it a rule with 3 parts: "
        f'"{name}" = {{ spec = "[S(tp),R]", parts = 3 }}'
    )
    rules = {
        "*.query_key_value.weight": {"spec": "[S(tp),R]", "parts": 3},
        "*.query_key_value.bias": {"spec": "[S(tp)]", "parts": 3},
    }
    assert_same(read_whole(ckpt, rules=rules), model)


def test_which_iteration_counts(saved, tmp_path):
    root = shutil.copytree(saved / "ckpt", tmp_path / "ckpt")
    shutil.copytree(root / "iter_0000010", root / "iter_0000020")
    shutil.copytree(root / "iter_0000010", root / "release")
    tracker = root / "latest_checkpointed_iteration.txt"
    tracker.write_text("20\n")
    assert open_checkpoint(root).directory == root / "iter_0000020"
    tracker.write_text("release")
    assert open_checkpoint(root).directory == root / "release"
    tracker.write_text("30")
    assert refused(root) == (
        f"{tracker}: says '30', but no such checkpoint is beside it; name the directory of the "
        "iteration itself"
    )
    tracker.unlink()
    assert refused(root) == (
        f"{root}: has the iterations iter_0000010, iter_0000020, release and no "
        "latest_checkpointed_iteration.txt that says which counts; name the directory of one"
    )
    shutil.rmtree(root / "iter_0000020")
    shutil.rmtree(root / "release")
    assert open_checkpoint(root).directory == root / "iter_0000010"
    for path in (root / "iter_0000010").iterdir():
        shutil.rmtree(path)
    assert refused(root) == (
        f"{root}/iter_0000010: has no directories mp_rank_00 and so on; if it is a checkpoint of "
        "another form, name it itself"
    )


def test_names_of_directories_that_do_not_fit(ckpt):
    shutil.copytree(ckpt / "mp_rank_00_000", ckpt / "mp_rank_000_000")
    assert refused(ckpt).endswith("cannot be of one save; move those of the other away")
    (ckpt / "mp_rank_000_000").rename(ckpt / "mp_rank_00")
    assert refused(ckpt).endswith("cannot be of one save; move those of the other away")
    (ckpt / "mp_rank_00").rename(ckpt / "mp_rank_00_000_001")
    assert "mp_rank_00_000_001 is of an expert parallel run, which cannot be read" in refused(ckpt)
    shutil.rmtree(ckpt / "mp_rank_00_000_001")
    (ckpt / "mp_rank_00_000" / "model_optim_rng.pt").unlink()
    assert refused(ckpt) == (f"{ckpt}/mp_rank_00_000/model_optim_rng.pt: is missing; restore it")
