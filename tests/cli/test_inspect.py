"""The command `shardspec inspect`."""

import json
from argparse import Namespace

import numpy as np
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner
from rich.cells import cell_len
from torch.distributed.checkpoint.state_dict_saver import save

from shardspec import merge
from shardspec.checkpoint.catalog import OpaqueValue
from shardspec.checkpoint.compare.inspect import inspect_checkpoint, other_text
from shardspec.cli.main import cli
from shardspec.cli.output import say_parts
from tests.checkpoint.formats.megatron_files import core, write
from tests.checkpoint.handmade import handmade, sample


def run(*args):
    wide = {"COLUMNS": "200"}
    return CliRunner().invoke(cli, ["inspect", *map(str, args)], prog_name="shardspec", env=wide)


@pytest.fixture
def ckpt(tmp_path):
    tensors = {
        **sample(),
        "a.[very].long\tname" * 6: ("[R]", np.zeros(3, np.uint8)),
        "p": ("[S0|P1]", {(i,): np.ones(4, np.float32) for i in range(3)}),
        "step": ("[]", np.array(7)),
    }
    return handmade(tensors, ids=[4, 1, 0, 5, 3, 2], axis_names=["dp", "tp"]).write(tmp_path / "c")


def test_tensors_and_ranks(ckpt):
    result = run(ckpt)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.stdout.splitlines()[0] == (
        f"{ckpt}: 5 tensors, 70 parameters, 1 element of an optimizer, 279 B, in the format of "
        "shardspec, saved on mesh dp=2,tp=3 (6 devices)"
    )
    assert ["w", "[S(dp),S(tp)]", "int32", "8×7", "224", "B", "uneven"] in lines
    assert ["p", "[S(dp)|P(tp)]", "float32", "4", "16", "B", "replicated"] in lines
    assert ["step", "1", "1", "8", "B", "int64"] in lines
    # What a terminal would take amiss is escaped, and nothing is cut off.
    assert [r"a.[very].long\tname" * 6, "[R]", "uint8", "3", "3", "B", "replicated"] in lines
    assert ["4", "(0,", "0)", "79", "B", "rank4.safetensors"] in lines
    assert ["2", "(1,", "2)", "24", "B", "rank2.safetensors"] in lines


def test_a_rank_that_stored_nothing(tmp_path):
    result = run(handmade({"b": ("[R]", np.zeros(3, np.uint8))}).write(tmp_path / "ckpt"))
    assert "5      (1, 2)           0 B   none" in result.stdout


def test_who_holds_a_row(ckpt):
    result = run(ckpt, "--tensor", "[wb]", "--index", "5")
    # Rows 4 to 8 are of the second half of the mesh; of 7 in 3 parts, the second has 3 to 5.
    assert result.stdout.splitlines() == [
        "b[5]: ranks 1,3, in [3:6]",
        "w[5]: rank 5, in [4:8, 0:3]",
        "w[5]: rank 3, in [4:8, 3:6]",
        "w[5]: rank 2, in [4:8, 6:7]",
    ]
    found = json.loads(run(ckpt, "--tensor", "w", "--index", "0,6", "--json").stdout)
    assert found == {
        "index": [0, 6],
        "holders": [{"name": "w", "box": [[0, 4], [6, 7]], "ranks": [0]}],
    }
    for bad, code, problem in [
        (("--index", "5"), 2, "name them with --tensor"),
        (("--picture",), 2, "name them with --tensor"),
        (("--tensor", "w", "--index", "8"), 3, "index [8] is outside shape [8, 7]"),
        (("--tensor", "b", "--index", "0,0"), 3, "index [0, 0] is outside shape [7]"),
        (("--tensor", "b", "--index", "-1"), 2, "'-1' is not a whole number"),
    ]:
        result = run(ckpt, *bad)
        assert (result.exit_code, result.stdout) == (code, "")
        assert problem in result.stderr


def test_a_picture_of_the_cut(ckpt, tmp_path):
    drawn = run(ckpt, "--tensor", "w", "--picture").stdout
    assert drawn.startswith("w\n[S(dp),S(tp)] of [8, 7] int32 on dp=2,tp=3\n")
    assert "│     4     │     1     │ 0 │" in drawn
    # A form without a mesh is drawn from its boxes.
    merge(ckpt, tmp_path / "whole.safetensors")
    drawn = run(tmp_path / "whole.safetensors", "--tensor", "w", "--picture").stdout
    assert drawn.splitlines()[0].split() == ["w", "int32", "[8,", "7]"]
    assert " 0 " in drawn


def test_only_some(ckpt):
    for kind, names in [("uneven", ["b", "w"]), ("replicated", ["b", "p", "step"])]:
        found = json.loads(run(ckpt, "--only", kind, "--json").stdout)
        assert [t["name"] for t in found["tensors"] if "[" not in t["name"]] == names
        assert all(tensor[kind] for tensor in found["tensors"])


def test_only_some_as_a_table_or_drawn(ckpt, tmp_path):
    lines = run(ckpt, "--only", "uneven").stdout.splitlines()
    assert lines[0] == f"{ckpt}: 2 of 5 tensors are uneven"
    assert [line.split()[0] for line in lines[4:]] == ["b", "w"]
    assert run(ckpt, "--only", "uneven", "--picture").stdout.startswith("b\n[S(tp)] of [7]")
    merge(ckpt, tmp_path / "whole.safetensors")
    assert run(tmp_path / "whole.safetensors", "--only", "replicated").stdout == (
        f"{tmp_path}/whole.safetensors: none of 5 tensors is replicated, as far as safetensors "
        "says: what ranks hold alike may be stored once\n"
    )
    for drawn in ("--picture", "--index"):
        place = ("0",) if drawn == "--index" else ()
        result = run(tmp_path / "whole.safetensors", "--only", "uneven", drawn, *place)
        assert result.stdout == f"{tmp_path}/whole.safetensors: none of 5 tensors is uneven\n"


def test_an_index_that_some_have(ckpt):
    result = run(ckpt, "--tensor", "[wbs]*", "--index", "7")
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["w[7]"] * 3


def test_columns_in_which_nothing_stands_are_left_out(ckpt, tmp_path):
    merge(ckpt, tmp_path / "whole.safetensors")
    lines = [line.split() for line in run(tmp_path / "whole.safetensors").stdout.splitlines()]
    assert lines[2] == ["tensor", "dtype", "shape", "size"]
    assert lines[-3:] == [["rank", "stored", "file"], lines[-2], ["0", "279", "B", *lines[-1][3:]]]
    assert lines[-1][3:] == ["whole.safetensors"]


def test_what_is_no_tensor_is_shown_in_short():
    parts = [OpaqueValue("2 bytes"), OpaqueValue("<set>"), {"a": (1, None)}]
    assert other_text(parts) == "[<2 bytes>, <set>, {'a': (1, None)}]"
    assert other_text(OpaqueValue("an object")) == "an object"
    assert other_text("x" * 300) == "'" + "x" * 198 + "…"


def test_one_tensor_with_its_boxes(ckpt):
    result = run(ckpt, "--tensor", "[wp]")
    assert result.exit_code == 0
    assert result.stdout.count("\n\n") == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["p", "[S(dp)|P(tp)]", "float32", "[4]:", "16", "B,", "48", "B", "stored"]
    assert ["[0:2]", "addend", "[1]", "1", "8", "B"] in [line[:6] for line in lines]
    assert ["[4:8,", "6:7]", "2", "16", "B"] in [line[:5] for line in lines]
    assert not any(line[:1] == ["step"] for line in lines)


def test_a_pattern_that_matches_nothing(ckpt):
    result = run(ckpt, "--tensor", "W")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no tensor matches 'W'; the names start with 'a.[very]" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_json_says_everything(ckpt):
    found = json.loads(run(ckpt, "--json").stdout)
    assert found["format"] == "shardspec"
    assert found["mesh"] == {
        "ids": [4, 1, 0, 5, 3, 2],
        "shape": [2, 3],
        "axis_names": ["dp", "tp"],
    }
    assert found["bytes"] == 279
    assert [rank["rank"] for rank in found["ranks"]] == [4, 1, 0, 5, 3, 2]
    assert sum(rank["bytes"] for rank in found["ranks"]) == 279 + 32
    w = next(tensor for tensor in found["tensors"] if tensor["name"] == "w")
    assert {key: w[key] for key in ("shape", "dtype", "spec", "bytes", "stored_bytes")} == {
        "shape": [8, 7],
        "dtype": "int32",
        "spec": "[S0,S1]",
        "bytes": 224,
        "stored_bytes": 224,
    }
    # The places are true: reading them gives the tensor.
    whole = np.zeros((8, 7), np.int32)
    for box in w["boxes"]:
        data = (ckpt / box["file"]).read_bytes()[box["offset"] :][: box["bytes"]]
        index = tuple(slice(lo, hi) for lo, hi in box["box"])
        whole[index] = np.frombuffer(data, np.int32).reshape(whole[index].shape)
    np.testing.assert_array_equal(whole, sample()["w"][1])
    assert run(ckpt, "--json", "--tensor", "w").stdout.count('"name"') == 1


def test_the_library_side(ckpt):
    summary = inspect_checkpoint(ckpt)
    assert summary.names[1:] == ("b", "p", "step", "w")
    assert summary.source.mesh is not None
    assert summary.source.mesh.axis_names == ("dp", "tp")
    assert summary.bytes_by_rank[2] == 24
    pending = summary.tensor_facts(summary.names[2])
    assert pending["stored_bytes"] == 3 * pending["bytes"] == 48


@pytest.fixture
def model(tmp_path):
    """A model of 12 layers, of which the first has no experts and another one has fewer."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed.weight": (10, 4), "head.weight": (10, 4)}
    for i in range(12):
        shapes[f"model.layers.{i}.norm.weight"] = (4,)
        for expert in range(0 if i == 0 else 2 if i == 7 else 3):
            shapes[f"model.layers.{i}.experts.{expert}.w1"] = (6, 4)
            shapes[f"model.layers.{i}.experts.{expert}.w2"] = (4, 6)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({n: np.zeros(s, np.float32) for n, s in shapes.items()}, path)
    return path


def test_layers_that_are_alike_are_one_row(model):
    lines = run(model).stdout.splitlines()
    assert lines[0].endswith(
        ": 78 tensors, 1,664 parameters, 6.5 KiB, in the format of safetensors"
    )
    table = [line.split() for line in lines[2 : lines.index("", 3)]]
    assert table[0] == ["tensor", "count", "dtype", "shape", "size", "each"]
    assert [row[:2] for row in table[2:]] == [
        ["head.weight", "float32"],
        ["model.embed.weight", "float32"],
        ["model.layers.{0..11}.norm.weight", "12"],
        ["model.layers.{1..6,8..11}.experts.{0..2}.w1", "30"],
        ["model.layers.{1..6,8..11}.experts.{0..2}.w2", "30"],
        ["model.layers.7.experts.{0,1}.w1", "2"],
        ["model.layers.7.experts.{0,1}.w2", "2"],
    ]
    groups = [line.split() for line in lines[lines.index("", 3) + 3 :]][:3]
    assert groups == [
        ["head", "1", "40", "160", "B"],
        ["model.embed", "1", "40", "160", "B"],
        ["model.layers", "76", "1,584", "6.188", "KiB"],
    ]


def test_every_row_in_the_order_of_numbers(model):
    full = run(model, "--full").stdout.splitlines()[4:82]
    names = [line.split()[0] for line in full]
    assert len(set(names)) == 78
    norms = [name for name in names if "norm" in name]
    assert norms == [f"model.layers.{i}.norm.weight" for i in range(12)]
    facts = json.loads(run(model, "--json").stdout)
    assert [tensor["name"] for tensor in facts["tensors"]] == names
    assert facts["parameters"] == 1664
    assert facts["groups"]["model.layers"] == {"tensors": 76, "parameters": 1584, "num_bytes": 6336}


def test_every_file_of_a_rank_is_listed_with_its_bytes(tmp_path):
    tensors = {f"t{i}": np.zeros(64, np.float32) for i in range(3)}
    safetensors.numpy.save_file(tensors, tmp_path / "whole.safetensors")
    merge(tmp_path / "whole.safetensors", tmp_path / "parts", max_shard_bytes=600)
    rows = [line.split() for line in run(tmp_path / "parts").stdout.splitlines()[-2:]]
    assert rows == [
        ["0", "512", "B", "model-00001-of-00002.safetensors"],
        ["0", "256", "B", "model-00002-of-00002.safetensors"],
    ]
    listed = json.loads(run(tmp_path / "parts", "--json").stdout)["ranks"]
    assert [(row["rank"], row["bytes"]) for row in listed] == [(0, 512), (0, 256)]


NAMES = [
    "x" * 500,
    "模型.权重." + "层" * 60,
    *(f"model.layers.{i}.self_attention.linear_qkv.layer_norm_weight" for i in (0, 2)),
    *(f"optim.state.{name}.exp_avg" for name in "ab"),
]


@pytest.mark.parametrize("full", [(), ("--full",)])
@pytest.mark.parametrize("columns", [None, 40, 80, 120])
def test_what_is_printed_fits_the_terminal(tmp_path, columns, full):
    tensors = {name: ("[R]", np.zeros(3, np.float32)) for name in NAMES}
    place = handmade(tensors).write(tmp_path / "c")
    env = {"COLUMNS": None if columns is None else str(columns), "TERM": "dumb"}
    result = CliRunner().invoke(cli, ["inspect", str(place), *full], env=env)
    assert result.exit_code == 0
    title, table, states, *_ = result.stdout.split("\n\n")
    assert "12 parameters, 6 elements of an optimizer" in " ".join(title.split())
    lines = [line for line in result.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(cell_len, lines)) <= (columns or 80)
    assert "exp_avg" not in table
    rows = [line.split() for line in states.splitlines()[2:]]
    if full:
        assert [row[0] for row in rows] == ["optim.state.a.exp_avg", "optim.state.b.exp_avg"]
    else:
        assert [row[:3] for row in rows] == [["exp_avg", "2", "6"]]


def test_a_line_is_printed_before_later_ones_are_made(capsys):
    def lines():
        yield "first"
        assert capsys.readouterr().out == "first\n"
        yield "second"

    say_parts(lines())
    assert capsys.readouterr().out == "second\n"


def test_rows_of_many_tensors_are_cut_unless_all_are_wanted(tmp_path):
    path = tmp_path / "many.safetensors"
    safetensors.numpy.save_file({f"n{i}x": np.zeros(1, np.int8) for i in range(1500)}, path)
    short, full = run(path).stdout, run(path, "--full").stdout
    assert short.count("\nn") == 1000
    assert "and 500 more; --full" in short
    assert full.count("\nn") == 1500
    first, second = (table.splitlines() for table in full.split("\n\n")[1:3])
    assert (first[0], len(first), len(second)) == (second[0], 1002, 502)


SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("common", "run_facts"),
    [
        ({"iteration": 30, "args": SIZES}, {"iteration": 30, "tp": 2, "pp": 4}),
        ({"args": {"expert_model_parallel_size": 8}}, {"ep": 8}),
        ({"iteration": "30", "args": {"tensor_model_parallel_size": True}}, {}),
        ({"iteration": 30}, {"iteration": 30}),
        (b"no pickle", {}),
        (None, {}),
    ],
)
def test_what_megatron_says_of_a_run(tmp_path, common, run_facts):
    save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    if isinstance(common, bytes):
        (tmp_path / "common.pt").write_bytes(common)
    elif common is not None:
        args = {"args": Namespace(**common["args"])} if "args" in common else {}
        torch.save({**common, **args}, tmp_path / "common.pt")
    assert json.loads(run(tmp_path, "--json").stdout)["run"] == run_facts
    title = " ".join(run(tmp_path).stdout.partition("\n\n")[0].split())
    texts = [f"{key if key == 'iteration' else key.upper()} {n}" for key, n in run_facts.items()]
    assert ("Megatron" in title) == bool(run_facts)
    assert title.endswith(", ".join(texts))


def test_what_ranks_of_megatron_say_of_a_run(tmp_path):
    write(tmp_path, core(gated=True), 3, [[0, 1], [2, 3, 4]])
    facts = json.loads(run(tmp_path, "--json").stdout)["run"]
    assert facts == {"iteration": 10, "tp": 3, "pp": 2, "ep": 1}
    assert "of Megatron: iteration 10, TP 3, PP 2, EP 1" in " ".join(run(tmp_path).stdout.split())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_objects_of_layers_share_a_row(tmp_path):
    state = {"w": torch.ones(3), "step": 4}
    state |= {f"decoder.mlp._extra_state/shard_{i}_3": [None] for i in range(3)}
    save(state, checkpoint_id=tmp_path, no_dist=True)
    rows = [line.split() for line in run(tmp_path).stdout.split("\n\n")[-1].splitlines()[2:]]
    assert rows == [["decoder.mlp._extra_state/…", "3", "[None]"], ["step", "4"]]
