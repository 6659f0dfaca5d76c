"""The README does what it says: its snippets and commands run, and print what it shows.

``python -m tests.test_readme`` writes what they print now into the README.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
# What differs from run to run: the name of a save, its digest, and how long writing took.
VARYING = re.compile(
    r"\b[0-9a-f]{16}\b| in [\d.e-]+ \S+ \([\d.]+ \w+/s\), CRC-32 [0-9a-f]{8}$", re.MULTILINE
)


def steady(text):
    return VARYING.sub("…", text)


def rewritten(text, directory, *, shared=False):
    """Return a page with all output as it is when its blocks run one after another.

    Each block starts afresh, or goes on with the names of those before it.
    """
    printed: list[str] = []
    names: dict[str, object] = {}

    def run_block(match):
        kind, body = match.groups()
        if kind == "python":
            printed.extend(filter(None, [run_python(body, directory, names if shared else {})]))
        elif kind == "text":
            body = printed.pop(0)
        elif kind == "console":
            body = run_command(body.splitlines()[0], directory)
        return f"```{kind}\n{body}```"

    text = BLOCK.sub(run_block, text)
    assert not printed, "a snippet is shown without its output"
    return text


def run_python(source, directory, names):
    output = io.StringIO()
    names["__name__"] = "readme"
    with contextlib.chdir(directory), contextlib.redirect_stdout(output):
        exec(compile(source, "README.md", "exec"), names)
    return output.getvalue()


def run_command(line, directory):
    """Run a line as the shell would, with the commands of this environment."""
    assert line.startswith("$ ")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(
        shlex.split(line[2:]),
        cwd=directory,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert (done.returncode, done.stderr) == (0, ""), line
    return f"{line}\n{done.stdout}"


def test_snippets_and_commands_print_what_is_shown(tmp_path):
    text = README.read_text("utf-8")
    kinds = [kind for kind, _ in BLOCK.findall(text)]
    first = ["python", "text", "sh", "python", "text", "console", "console"]
    assert kinds == [*first, "sh", *["console"] * 5]
    assert steady(rewritten(text, tmp_path)) == steady(text)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_recipes_print_what_is_shown(tmp_path):
    text = CHECKPOINTS.read_text("utf-8")
    assert len([kind for kind, _ in BLOCK.findall(text) if kind == "console"]) >= 8
    assert steady(rewritten(text, tmp_path)) == steady(text)


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", ".venv/bin/python examples/minilm.py"),
        ("test", ".venv/bin/python -m pytest"),
        ("setup", ""),
    ],
)
def test_the_make_targets_exist(target, command):
    assert f"make {target}" in README.read_text("utf-8")
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # This may itself run under make.
        env={key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert command in done.stdout


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README.read_text("utf-8"))
    assert len(links) > 15
    for link in links:
        assert (ROOT / link).is_file(), link


def test_the_architecture_names_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    folder = ROOT / "shardspec"
    named = set()
    for line in text.splitlines():
        # In the table of layers, files stand beside the folder that they are in.
        inside = re.match(r"\| `(\w+/)`", line)
        places = [ROOT, folder, folder / inside[1]] if inside else [ROOT, folder]
        for name in re.findall(r"`([\w/]+\.py)`", line):
            assert any((place / name).is_file() for place in places), name
            named.add(name.rpartition("/")[2])
    parts = [*folder.glob("*.py"), *folder.glob("comm/*.py"), *folder.glob("layout/*.py")]
    inner = {path.name for path in parts if not path.name.startswith("__")}
    # Every module of these layers has its place in the text.
    assert inner - named == {"default.py"}


def test_ten_lines():
    bodies = [body for kind, body in BLOCK.findall(README.read_text("utf-8")) if kind == "python"]
    assert len([line for line in bodies[1].splitlines() if line.strip()]) <= 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        README.write_text(rewritten(README.read_text("utf-8"), Path(temporary)), "utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        CHECKPOINTS.write_text(rewritten(CHECKPOINTS.read_text("utf-8"), Path(temporary)), "utf-8")
