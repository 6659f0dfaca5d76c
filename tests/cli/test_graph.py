"""The command `shardspec graph`."""

import json

import pytest
from click.testing import CliRunner

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter
from shardspec.cli.main import cli
from shardspec.layout.dot import dot_text, draw_graph
from shardspec.layout.transitions import transitions

PATH = [
    *("[S(tp,dp),R]", "[R,S(tp)]", "--mesh", "dp=2,tp=4", "--shape", "4096x4096"),
    *("--dtype", "bf16", "--links", "ib-ndr-per-gpu,h100-nvswitch"),
]
PLAIN = ["--mesh", "2x3", "--dims", "2"]


def run(*args):
    return CliRunner().invoke(cli, ["graph", *map(str, args)], prog_name="shardspec")


def path_drawing():
    mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
    model = CostModel.from_presets(mesh, ["ib-ndr-per-gpu", "h100-nvswitch"])
    layout = Layout(mesh, "[S10,R]", (4096, 4096), "bf16")
    converter = LayoutConverter(model)
    return draw_graph(transitions(mesh, 2), mesh, 2, converter.plan(layout, "[R,S1]"))


def test_dot_is_printed():
    result = run(*PLAIN)
    assert (result.exit_code, result.stderr) == (0, "")
    mesh = DeviceMesh(range(6), (2, 3))
    assert result.stdout == dot_text(draw_graph(transitions(mesh, 2), mesh, 2))
    assert run(*PATH).stdout == dot_text(path_drawing())


@pytest.mark.parametrize("name", ["a.dot", "a.gv", "a.DOT"])
def test_files_by_the_end_of_their_name(tmp_path, name):
    result = run(*PATH, "-o", tmp_path / name)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"{tmp_path / name}: [S(tp,dp),R] → [R,S(tp)], 149.4 µs; 11 specs of 2 dims on mesh "
        f"dp=2,tp=4\naccuracy: {path_drawing().known_error}\n"
    )
    assert (tmp_path / name).read_text("utf-8") == dot_text(path_drawing())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_is_replaced_only_on_demand(tmp_path):
    path = tmp_path / "a.dot"
    path.write_text("mine")
    result = run(*PLAIN, "-o", path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"Error: {path}: exists; choose another name, or overwrite it with --overwrite\n"
    )
    assert path.read_text() == "mine"
    assert run(*PLAIN, "-o", path, "--overwrite").exit_code == 0
    assert path.read_text().startswith("digraph ")


def test_a_directory_that_is_not_there(tmp_path):
    result = run(*PLAIN, "-o", tmp_path / "no" / "a.dot")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"Error: {tmp_path / 'no' / 'a.dot'}: cannot be written: No such file or directory\n"
    )


def test_json(tmp_path):
    result = run(*PATH, "--json")
    assert json.loads(result.stdout) == path_drawing().as_dict()
    assert [edge["target"] for edge in path_drawing().as_dict()["path"]] == (
        ["[S(tp),R]", "[R,S(tp)]"]
    )
    both = run(*PATH, "--json", "-o", tmp_path / "a.dot")
    assert both.stdout == result.stdout
    assert (tmp_path / "a.dot").read_text("utf-8") == dot_text(path_drawing())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--mesh 2x2", "nothing to draw; give --dims, or FROM, TO and --shape"),
        (
            "--mesh 2x2 --dims 2 --shape 4x4",
            "--shape is for the path; give FROM and TO too, or leave it out",
        ),
        ("[S0] --mesh 2 --shape 4", "1 spec where two are needed, FROM and TO"),
        ("[S0] [R] [R] --mesh 2 --shape 4", "3 specs where two are needed, FROM and TO"),
        (
            "[S0] [R] --mesh 2 --dims 1",
            "a path from FROM to TO depends on the tensor; give its --shape",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4 --dims 1",
            "--dims follows from FROM and TO; leave it out",
        ),
        ("--mesh 2 --dims -1", "Invalid value for '--dims': -1 is not in the range x>=0"),
        (
            "--mesh 2 --dims 1 -o a.png",
            "Invalid value for '-o' / '--output': a.png: give a name that ends in .dot or .gv; "
            "Graphviz makes pictures of it: 'dot -Tsvg a.dot -o a.svg'",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args, message):
    result = run(*args.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: {message}; see 'shardspec graph -h'\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "--mesh 2x2x2x2x2 --dims 4",
            "the graph of mesh 2x2x2x2x2 and 4 dims has 12,341 specs; graphs of up to 1,500 are "
            "laid out whole: take fewer mesh axes or dims",
        ),
        (
            "[S0] [R|P0] --mesh 2 --shape 4",
            "cannot convert [S0] to [R|P0]: the target wants a pending sum that the source lacks; "
            "a conversion only finishes reductions, it never starts one",
        ),
        (
            "[S0] [R] --mesh 2 --shape 4x4",
            "spec [S0] is for 1 dim, but the tensor of shape (4, 4) has 2 dims",
        ),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_exit_code_2(tmp_path, args, message):
    result = run(*(word.replace("OUT", str(tmp_path / "out")) for word in args.split()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_help_has_examples_that_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run("-h").stdout
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len(examples) == 4
    for line in examples:
        words = [word.strip('"') for word in line.split()]
        assert words[:2] == ["shardspec", "graph"]
        result = run(*words[2:])
        assert (result.exit_code, result.stderr) == (0, ""), line
    assert {path.name for path in tmp_path.iterdir()} == {"graph.dot", "path.dot"}
