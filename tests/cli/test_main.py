"""The command line as a whole: help, versions, exit codes, and what it does not import."""

import ast
import gc
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version

import click
import numpy as np
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from rich.cells import cell_len
from safetensors.numpy import load_file, save_file

from shardspec.cli.main import cli, option_text
from shardspec.text import Argument
from tests.checkpoint.handmade import handmade, sample
from tests.forked import run_forked
from tests.sources import FILES, ROOT, nodes_of

TOP = cli.list_commands(click.Context(cli))


def leaves(group=cli, path=()):
    """Return the commands that do something, by the words that call them."""
    found: dict[tuple[str, ...], click.Command] = {}
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        inner = isinstance(command, click.Group)
        found |= leaves(command, (*path, name)) if inner else {(*path, name): command}
    return found


COMMANDS = leaves()
GROUPS = ("links", "delta")


def run(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="shardspec")


def test_help_lists_the_commands():
    for option in ("-h", "--help"):
        result = run(option)
        assert (result.exit_code, result.stderr) == (0, "")
        for command in TOP:
            assert re.search(rf"^  {command} +[A-Z].*\.$", result.stdout, re.MULTILINE)


def test_commands_called_from_python_let_go_of_what_they_made():
    """Only a process that ends leaves cycles of objects alone, and freezes what there is."""
    before = gc.get_freeze_count()
    for _ in range(3):
        assert run("links", "list").exit_code == 0
    assert gc.get_freeze_count() == before


def test_the_commands_known_at_first_are_there():
    words = "plan cost show explore links profile inspect verify diff digest merge reshard delta"
    assert [*words.split(), "plan-state"] == TOP


def test_the_help_of_each_command_agrees_with_its_line_in_the_list_and_has_examples():
    listed = re.findall(
        r"^  ([\w-]+) +[A-Z]", run("-h").stdout.partition("message and exit.")[2], re.MULTILINE
    )
    assert listed == TOP
    for words in COMMANDS:
        result, command = run(*words, "-h"), " ".join(words)
        assert (result.exit_code, result.stderr) == (0, "")
        assert f"Usage: shardspec {command} " in result.stdout
        assert f"shardspec {command}" in result.stdout.partition("Examples:")[2]


def test_what_an_option_takes_is_named_in_words_not_as_a_constant():
    helps = "".join(run(*words, "-h").stdout for words in COMMANDS)
    taken = set(re.findall(r"^  (?:-\w, )?--[\w-]+ ([A-Z]\S*)", helps, re.MULTILINE))
    assert {"FILE", "PRESETS", "SIZE"} < taken
    assert [word for word in sorted(taken) if "_" in word] == []


@pytest.mark.parametrize("words", [(), ("links",), ("delta",), ("plan",)])
def test_help_fits_a_narrow_terminal_and_ends_no_sentence_early(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = run(*words, "-h").stdout.partition("Examples:")[0]
    assert "..." not in text.replace("]...", "")
    wide = [line for line in text.splitlines() if cell_len(line) > 40]
    assert [line for line in wide if len(line.split()) > 1] == []


def test_help_lists_commands_by_task():
    groups = run("-h").stdout.partition("message and exit.\n\n")[2].split("\n\n")
    found = {
        group.partition(":\n")[0]: re.findall(r"^  ([\w-]+)", group, re.MULTILINE)
        for group in groups[:3]
    }
    assert found == {
        "Plan and price conversions": ["plan", "cost", "show", "explore", "links", "profile"],
        "Look into checkpoints": ["inspect", "verify", "diff", "digest"],
        "Write checkpoints": ["merge", "reshard", "delta", "plan-state"],
    }


def test_there_are_few_commands_and_options():
    every = [*COMMANDS.values(), *(cli.get_command(click.Context(cli), n) for n in GROUPS)]
    count = len(every) + sum(
        isinstance(parameter, click.Option) for command in every for parameter in command.params
    )
    assert len(TOP) <= 14
    # With -h of each, without the four of shardspec itself. merge and reshard have six options for
    # sums and adapters, show has four for the move of a model.
    assert count <= 225


def test_each_option_is_defined_once():
    defined = Counter(
        node.args[0].value
        for path in FILES
        if ROOT / "cli" in path.parents
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("Option", "flag", "unless")
        and isinstance(node.args[0], ast.Constant)
    )
    assert {name: times for name, times in defined.items() if times > 1} == {}
    parsed = {
        parameter.name
        for command in COMMANDS.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
    }
    assert parsed == set(defined)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_options_are_grouped_under_headings(words):
    help = run(*words, "-h").stdout
    titles = re.findall(r"^(\w+):$", help, re.MULTILINE)
    order = ["Input", "Names", "Output", "Precision", "Running"]
    assert titles == [title for title in order if title in titles]
    assert "Running" in titles


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["graph", "--mesh", "2x2", "--dims", "2"], "LayoutConverter.to_dot"),
        (["convert", "[S0]", "--mesh", "2"], "shardspec.interop.notations"),
        (["presets"], "links list"),
        (["check-map", "map.toml", "--source", "ckpt"], "merge CKPT -o OUT --map FILE --dry-run"),
        (["apply", "base", "delta", "-o", "out"], "delta apply BASE DELTA... -o OUT"),
        (["delta", "base", "new", "-o", "out", "--version", "1"], "delta make BASE NEW -o OUT"),
        (["verify", "a", "--against", "b"], "diff A B"),
        (["merge", "a", "-o", "b", "--map", "llama-megatron-to-hf"], "--model DIR --names hf"),
        (["digest", "a", "--map", "qwen3-hf-to-fused"], "--model DIR --names fused"),
        (["merge", "a", "-o", "b", "--sizes", "config.json"], "--model config.json"),
        (["reshard", "a", "-o", "b", "--reverse-map"], "--names"),
        (["merge", "a", "-o", "b", "--scale-rule", "amax/448"], "448"),
        (
            ["plan", "[S0]", "[R]", "--alpha", "1", "--beta", "1"],
            "--links SECONDS:SECONDS_PER_BYTE",
        ),
        (["plan", "[S0]", "[R]", "--profile", "cluster.json"], "--links cluster.toml"),
        (["digest", "a", "--fill-from", "b"], "merge --fill-from"),
        (["delta", "make", "a", "b", "-o", "c", "--drop-rows"], "merge --drop-rows"),
        (["merge", "a", "-o", "b", "--no-metadata"], "metadata=False"),
    ],
)
def test_what_has_gone_is_answered_by_its_remedy(args, remedy):
    result = run(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert " was removed; " in result.stderr
    assert remedy in result.stderr


SMALL = {
    "plan": ["[S0,R]", "[R,R]", "--mesh", "2", "--shape", "4x4"],
    "cost": ["[S0,R]", "[R,R]", "--mesh", "2", "--shape", "4x4"],
    "show": ["[S0,R]", "--mesh", "2", "--shape", "4x4"],
    "links": ["list"],
}


@pytest.mark.parametrize("command", SMALL)
def test_quiet_and_verbose_are_of_every_command(command):
    plain = run(command, *SMALL[command])
    assert (plain.exit_code, bool(plain.stdout), plain.stderr) == (0, True, "")
    for option in ("-q", "--quiet"):
        quiet = run(command, *SMALL[command], option)
        assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")
        assert run(option, command, *SMALL[command]).output == ""
    verbose = run(command, *SMALL[command], "-v")
    assert verbose.stdout == plain.stdout
    assert re.fullmatch(r"took [\d.]+ \S+, .* of memory at most\n", verbose.stderr)


@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_a_quiet_command_says_by_its_exit_code_what_it_found(command, tmp_path):
    one, other = (
        handmade({"w": ("[S0]", np.full(6, at))}).write(tmp_path / f"{at}") for at in (1, 2)
    )
    same = run(command, "--quiet", one, *([one] if command == "diff" else []))
    assert (same.exit_code, same.stdout, same.stderr) == (0, "", "")
    if command == "diff":
        assert run(command, one, other, "--quiet").exit_code == 1
    bad = run(command, "-v", "-q", tmp_path / "none", *([one] if command == "diff" else []))
    assert (bad.exit_code, bad.stdout) == (3, "")
    assert "Traceback" in bad.stderr
    assert bad.stderr.splitlines()[-1].startswith(f"Error: {tmp_path / 'none'}: there is no")


def test_shells_complete_paths():
    merge = cli.get_command(click.Context(cli), "merge")
    assert merge is not None
    completed = {
        parameter.name: [
            item.type
            for item in parameter.type.shell_complete(click.Context(merge), parameter, "ch")
        ]
        for parameter in merge.params
    }
    for name in ("checkpoints", "output", "map", "source_rules"):
        assert completed[name] == ["file"], name
    assert completed["dtype"] == []


def library():
    """Yield the path and every node of every module but those of the command line."""
    for path in FILES:
        if ROOT / "cli" not in path.parents:
            for node in nodes_of(path):
                yield path, node


def options():
    """Return the names of the options of all commands."""
    return {
        name
        for command in COMMANDS.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name.startswith("--")
    }


def test_an_argument_that_a_message_names_is_an_option_at_the_command_line():
    named = {
        ast.unparse(node)
        for _, node in library()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Argument"
    }
    assert len(named) > 10
    for text in named:
        names = {"name": "ranks", "argument": "quantize_include", "count": 3, "states": "abc"}
        argument = eval(text, {"Argument": Argument, **names})
        assert option_text(argument).split()[0] in options(), text
    assert option_text(Argument("ranks", 1)) == "--ranks 1"
    assert option_text(Argument("overwrite", value=True)) == "--overwrite"
    assert option_text(Argument("sidecars", value=False)) == "--no-sidecars"


def test_the_library_does_not_speak_of_options():
    ours = re.compile("|".join(rf"(?<!\w){option}\b(?!-)" for option in options()))
    for path, node in library():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "--" in node.value:
            assert not ours.search(node.value), f"{path}:{node.lineno}: {node.value}"


def test_no_command_shows_the_help():
    result = run()
    assert result.exit_code == 2
    assert result.stderr == run("-h").stdout


def test_the_version():
    assert run("--version").stdout == f"shardspec {version('shardspec')}\n"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["nope"], "Error: No such command 'nope'; see 'shardspec -h'"),
        (["--nope"], "Error: No such option '--nope'; see 'shardspec -h'"),
        (["merge", "x"], "Error: Missing option '-o' / '--output'; see 'shardspec merge -h'"),
        (["inspect"], "Error: Missing argument 'CKPT'; see 'shardspec inspect -h'"),
        (["merge", "x", "-o"], "Error: Option '-o' requires an argument"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args, line):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"{line}\n"


def test_a_bad_checkpoint_is_one_line_and_exit_code_3(tmp_path):
    for args in (["inspect", tmp_path], ["merge", tmp_path, "-o", tmp_path / "out"]):
        result = run(*args)
        assert (result.exit_code, result.stdout) == (3, "")
        assert (
            result.stderr
            == f"Error: {tmp_path}: is empty, so there is no checkpoint in it; check the path\n"
        )


def test_a_bad_spec_is_exit_code_2_and_one_line():
    result = run("plan", "[S0,X]", "[R,R]", "--mesh", "2x2", "--shape", "4x4")
    assert result.exit_code == 2
    assert result.stderr == "Error: expected R or S and its axes (character 5 of '[S0,X]')\n"


def test_an_interrupt_is_exit_code_130(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    monkeypatch.setattr("shardspec.checkpoint.convert.output.merge", interrupt)
    result = run("merge", ckpt, "-o", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Error: interrupted\n"


def test_a_full_disk_behind_the_output_is_one_line(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    command = [sys.executable, "-m", "shardspec", "inspect", ckpt]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "Error: cannot write to stdout: No space left on device\n"


KILLED = """
import os, signal, sys
import shardspec.checkpoint.convert.output as command
from shardspec.cli.main import main
merge = command.merge
def end(*_):
    os.kill(os.getpid(), signal.SIGTERM)
command.merge = lambda *args, **more: merge(*args, **{**more, "progress": end})
main()
"""


IN_A_CALLBACK = KILLED.replace(
    "    os.kill(os.getpid(), signal.SIGTERM)",
    """    ended = lambda _: os.kill(os.getpid(), signal.SIGTERM)
    if not begun:
        begun.append(weakref.ref(some := Some(), ended))
        del some
    time.sleep(0.05)""",
).replace("import os", "import time, weakref\nclass Some: pass\nbegun = []\nimport os")


@pytest.mark.parametrize("script", [KILLED, IN_A_CALLBACK], ids=["anywhere", "in a callback"])
def test_being_told_to_end_removes_the_temporary_file(tmp_path, script):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    command = [sys.executable, "-c", script, "merge", ckpt, "-o", tmp_path / "out"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (143, "")
    assert ended.stderr == "Error: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_python_m_shardspec_is_the_same_command():
    ended = subprocess.run(
        [sys.executable, "-m", "shardspec", "--version"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, f"shardspec {version('shardspec')}\n")


STARTED = """
import sys
import numpy
from shardspec.cli.main import cli, option_text
from shardspec.text import Argument
"""
LIGHT = """
try:
    cli(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {"torch", "networkx", "safetensors", "rich"} & sys.modules.keys()
print(sorted(heavy), file=sys.stderr)
"""


def test_commands_import_only_what_they_need(tmp_path):
    addends = {(i,): array for i, (_, array) in enumerate([sample()["w"]] * 2)}
    places = {
        "CKPT": handmade(sample()).write(tmp_path / "ckpt"),
        "PENDING": handmade({"p": ("[R,S1|P0]", addends)}).write(tmp_path / "pending"),
        "OUT": tmp_path / "out",
    }
    imported = {
        ("-h",): "[]",
        ("merge", "-h"): "[]",
        ("merge", "CKPT", "-o", "OUT"): "[]",
        ("merge", "PENDING", "-o", "OUT", "--json", "--overwrite"): "[]",
        ("inspect", "CKPT", "--json"): "[]",
        ("inspect", "CKPT"): "['rich']",
    }
    runs = ([places.get(word, word) for word in words] for words in imported)
    for words, ended in zip(imported, run_forked(STARTED, LIGHT, runs), strict=True):
        assert (ended.returncode, ended.stderr) == (0, f"{imported[words]}\n"), words


WITHOUT_TORCH = """
import sys
from shardspec.cli.main import cli
for line in sys.argv[1:]:
    try:
        cli(line.split(), prog_name="shardspec")
    except SystemExit as end:
        assert not end.code, line
    assert "torch" not in sys.modules, line
"""


def test_planning_and_drawing_need_no_torch():
    lines = [
        "plan [S0,R] [R,S01] --mesh 2x4 --shape 4096x4096 --dtype bf16",
        "cost [S0,R] [R,R] --mesh 2x3 --shape 7x5 --dtype bf16",
        "show [S0,R] --mesh 2x3 --shape 7x5",
        "links list",
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, *lines]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "".join(run(*line.split()).stdout for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        ("merge", "CKPT", "-o", "OUT", "--model", "s3://bucket/model"),
        ("reshard", "CKPT", "-o", "OUT", "--mesh", "2", "--rules", "s3://bucket/rules.toml"),
    ],
)
def test_a_url_where_a_local_file_is_needed_is_refused(tmp_path, words):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    places = {"CKPT": ckpt, "OUT": tmp_path / "out"}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == 2
    assert "s3://bucket/" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_deltas_and_digests_in_a_store(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": np.full(8, value, np.float32)}, tmp_path / f"{name}.safetensors")
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    result = run("delta", "make", a, b, "-o", "memory://bucket/delta", "--version", "1")
    assert result.exit_code == 3
    assert "memory://bucket/delta" in result.stderr
    assert run("delta", "make", a, b, "-o", tmp_path / "delta", "--version", "1").exit_code == 0
    for path in (tmp_path / "delta").iterdir():
        MemoryFileSystem().pipe(f"/bucket/delta/{path.name}", path.read_bytes())
    delta = "memory://bucket/delta"
    assert run("delta", "apply", a, delta, "-o", tmp_path / "c.safetensors").exit_code == 0
    np.testing.assert_array_equal(load_file(tmp_path / "c.safetensors")["w"], np.full(8, 2.0))
    digests = "memory://bucket/digests.json"
    assert run("digest", b, "-o", digests).exit_code == 0
    assert run("verify", tmp_path / "c.safetensors", "--digests", digests).exit_code == 0
    assert run("verify", a, "--digests", digests).exit_code == 3


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize(
    "args",
    [
        ["inspect", "/none/" + "名前" * 90],
        ["plan", "--mesh", "2x2", "--shape", "8x8", "[S0,R]", "[S0,S0]"],
        ["plan", "--mesh", "dp=2,tp=2", "--shape", "8x8", "[S(dp),R]", "[S(" + "x" * 500 + "),R]"],
        ["reshard", "examples/checkpoint", "-o", "out"],
    ],
)
def test_an_error_on_a_terminal_has_three_lines_wrapped_at_words(args, columns):
    ours, theirs = os.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "shardspec", *args]
    done = subprocess.run(command, stderr=theirs, env=environment, cwd=ROOT.parent)
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    lines = text.splitlines()
    assert done.returncode in (2, 3)
    assert lines[0].startswith("Error:")
    assert sum(-(-cell_len(line) // columns) for line in lines) <= 3
    assert all(" " not in line or cell_len(line) <= columns for line in lines)


LOGGED = """
import logging, sys
from shardspec.cli import main
from shardspec.errors import CheckpointError

def refuse(**_):
    logging.getLogger("gcsfs").error("retrying\\nagain")
    raise CheckpointError("gs://a: cannot be read")

main.cli.invoke = lambda _: refuse()
sys.argv = ["shardspec", "inspect", "gs://a"]
main.main()
"""


def test_what_libraries_log_does_not_stand_above_an_error():
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "Error: gs://a: cannot be read\n"
