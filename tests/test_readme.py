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
    notes = done.stderr.splitlines(keepends=True)
    others = [said for said in notes if not said.startswith("note: ")]
    assert (done.returncode, others) == (0, []), (line, others)
    return f"{line}\n{''.join(notes)}{done.stdout}"


def test_snippets_and_commands_print_what_is_shown(tmp_path):
    text = README.read_text("utf-8")
    kinds = [kind for kind, _ in BLOCK.findall(text)]
    assert kinds.count("python") == 2
    assert kinds.count("console") >= 6
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
        ("test", ".venv/bin/python -m pytest -n "),
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
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(named) > 25
    for name in named:
        assert (ROOT / "shardspec" / name).exists() or (ROOT / name).exists(), name
    # Every module at the top and every folder has its place in the text.
    for path in (ROOT / "shardspec").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name.startswith("_") or name == "py.typed" or f"`{name}`" in text, name


def test_ten_lines():
    bodies = [body for kind, body in BLOCK.findall(README.read_text("utf-8")) if kind == "python"]
    for body in bodies:
        assert len([line for line in body.splitlines() if line.strip()]) <= 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        README.write_text(rewritten(README.read_text("utf-8"), Path(temporary)), "utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        CHECKPOINTS.write_text(rewritten(CHECKPOINTS.read_text("utf-8"), Path(temporary)), "utf-8")
