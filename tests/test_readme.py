"""The README does what it says: its snippets and commands run, and print what it shows.

``python -m tests.test_readme`` writes what they print now into the README.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardspec.cli.main import cli
from tests.page_blocks import BLOCK, in_a_process, rewritten, steady

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"


def in_this_process(words, directory):
    """Run a command without a process of its own where it is ours."""
    if words[0] != "shardspec":
        return in_a_process(words, directory)
    with contextlib.chdir(directory):
        done = CliRunner().invoke(cli, words[1:], prog_name="shardspec")
    return done.exit_code, done.stdout, done.stderr


def ready(directory):
    """Return a folder that has what a clone has of the pages' checkpoints."""
    shutil.copytree(ROOT / "examples" / "checkpoint", directory / "examples" / "checkpoint")
    return directory


def test_snippets_and_commands_print_what_is_shown(tmp_path):
    text = README.read_text("utf-8")
    kinds = [kind for kind, _ in BLOCK.findall(text)]
    assert kinds.count("python") == 2
    assert kinds.count("console") >= 3
    printed = rewritten(text, ready(tmp_path), command=in_this_process)
    assert steady(printed) == steady(text)
    assert (tmp_path / "model.safetensors").is_file()


def test_the_last_quick_start_needs_neither_torch_nor_the_others(tmp_path):
    text = README.read_text("utf-8")
    alone = text[text.index("## Quick start 3") : text.index("## Where to go next")]
    assert "python" not in [kind for kind, _ in BLOCK.findall(alone)]
    assert steady(rewritten(alone, ready(tmp_path))) == steady(alone)


def test_pages_write_under_names_of_their_own():
    """So that one can work through all of them in one folder."""
    written: dict[str, str] = {}
    pages = [README, *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        blocks = [body for kind, body in BLOCK.findall(page.read_text("utf-8")) if kind != "sh"]
        outputs = re.findall(r" -o ([\w.-]+)|save_sharded\([^\n]*?\"([\w.-]+)\"", "\n".join(blocks))
        for name in {*map("".join, outputs)}:
            assert written.setdefault(name, page.name) == page.name, name
    assert len(written) > 20


def test_the_recipes_print_what_is_shown(tmp_path):
    text = CHECKPOINTS.read_text("utf-8")
    assert len([kind for kind, _ in BLOCK.findall(text) if kind == "console"]) >= 8
    assert steady(rewritten(text, tmp_path, command=in_this_process)) == steady(text)


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
        if not link.startswith("https:"):
            path, _, place = link.partition("#")
            assert (ROOT / path).is_file(), link
            if place:
                headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text("utf-8"), re.MULTILINE)
                words = [re.sub(r"[^a-z ]", "", heading.lower()) for heading in headings]
                assert place in [heading.replace(" ", "-") for heading in words], link


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


def test_snippets_have_ten_lines_at_most():
    bodies = [body for kind, body in BLOCK.findall(README.read_text("utf-8")) if kind == "python"]
    for body in bodies:
        assert len([line for line in body.splitlines() if line.strip()]) <= 10


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        README.write_text(rewritten(README.read_text("utf-8"), ready(Path(temporary))), "utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        CHECKPOINTS.write_text(rewritten(CHECKPOINTS.read_text("utf-8"), Path(temporary)), "utf-8")
