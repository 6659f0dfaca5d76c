"""The recipes by tool: their commands run on what each tool saves, and print what is shown.

``python -m tests.test_recipes`` writes what they print now into the page.
"""

import os
import re
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.page_blocks import BLOCK, rewritten, steady
from tests.recipe_job import make_checkpoints
from tests.test_readme import ROOT, in_this_process

RECIPES = ROOT / "docs" / "recipes.md"
JOB = ROOT / "tests" / "recipe_job.py"
SECTIONS = 13


def prepared(text, directory, temporary):
    """Write the files of rules that the page shows, and the checkpoints that it starts from."""
    for kind, body in BLOCK.findall(text):
        if kind == "toml":
            name = re.match(r"# (\w+\.toml)\n", body)
            assert name is not None, body
            (directory / name[1]).write_text(body)
    make_checkpoints(directory, temporary)


def sections(text):
    return re.split(r"^## ", text, flags=re.MULTILINE)[1:]


@pytest.mark.dist
def test_recipes_print_what_is_shown(tmp_path, tmp_path_factory, monkeypatch):
    # In which order ls lists names.
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    text = RECIPES.read_text("utf-8")
    prepared(text, tmp_path, tmp_path_factory.mktemp("meet"))
    assert steady(rewritten(text, tmp_path, command=in_this_process)) == steady(text)


def test_what_saves_is_what_was_run():
    job = JOB.read_text("utf-8")
    shown = [body for kind, body in BLOCK.findall(RECIPES.read_text("utf-8")) if kind == "py"]
    assert len(shown) >= SECTIONS - 5
    for body in shown:
        assert textwrap.indent(body, "    ") in job, body


def test_every_tool_has_the_same_commands():
    parts = [part for part in sections(RECIPES.read_text("utf-8")) if "$ ls " in part]
    assert len(parts) == SECTIONS
    for part in parts:
        commands = re.findall(r"^\$ (?:shardspec )?(\w+)", part, re.MULTILINE)
        assert {"ls", "merge", "reshard"} < set(commands), part
        assert {"verify", "diff"} & set(commands), part


if __name__ == "__main__":
    os.environ["LC_ALL"] = "C.UTF-8"
    page = RECIPES.read_text("utf-8")
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as meeting:
        prepared(page, Path(place), Path(meeting))
        RECIPES.write_text(rewritten(page, Path(place)), "utf-8")
