"""The documentation: its snippets print what it shows, and its site is complete.

``python -m tests.test_docs`` writes what they print now into the pages.
"""

import inspect
import re
import tempfile
from importlib import import_module, util
from pathlib import Path

import click
import pytest

import shardspec
from shardspec.cli.main import cli
from tests.page_blocks import BLOCK, rewritten, steady
from tests.test_readme import ROOT, in_this_process

DOCS = ROOT / "docs"
# Pages whose blocks run one after another; docs/checkpoints.md is run with the README.
RUN = (
    "index",
    "tutorial",
    "notation",
    "plans",
    "transfers",
    "cost-queries",
    "deltas",
    "digest",
    "jobs",
    "models",
    "explore",
    "comparison",
    "from-torch",
    "from-jax",
    "from-colossal-alpa",
)


def of_any_size(text):
    """Leave out how large a written page is: that changes with every touch of its style."""
    return re.sub(r"[\d.]+ KiB; open it", "…", steady(text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all pages, as somebody has who works through them one after another."""
    return tmp_path_factory.mktemp("pages")


@pytest.mark.parametrize("name", RUN)
def test_snippets_and_commands_print_what_is_shown(folder, name):
    text = (DOCS / f"{name}.md").read_text("utf-8")
    assert any(kind in ("python", "console") for kind, _ in BLOCK.findall(text))
    printed = rewritten(text, folder, shared=True, command=in_this_process)
    assert of_any_size(printed) == of_any_size(text)


def test_links_between_pages_lead_somewhere():
    pages = sorted(DOCS.glob("*.md"))
    assert len(pages) >= 10
    settings = (DOCS / "conf.py").read_text("utf-8")
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if not link.startswith("https:"):
                made = f"docs/{link}" in settings  # sphinx draws it
                assert made or (DOCS / link).is_file(), (page.name, link)


def test_the_limits_of_the_page_are_as_written():
    from shardspec.explorer import (
        MAX_CONVERSIONS,
        MAX_PAGE_BYTES,
        MAX_PAGE_DEVICES,
        MAX_PAGE_DIMS,
    )

    text = (DOCS / "explore.md").read_text("utf-8")
    assert f"| devices of a mesh | {MAX_PAGE_DEVICES} |" in text
    assert f"| dims of a tensor | 1 to {MAX_PAGE_DIMS} |" in text
    assert f"together | {MAX_CONVERSIONS:,} |" in text
    assert f"| bytes of the page | {MAX_PAGE_BYTES // 2**20} MiB |" in text


def module_of(name):
    """Import a file of docs/, which is no package."""
    spec = util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_has_its_place_on_the_page_of_commands():
    assert "<!-- commands -->" in (DOCS / "commands.md").read_text("utf-8")
    text = module_of("conf")._commands()
    sections = dict(
        re.findall(r"^## shardspec ([^\n]+)\n\n```text\n(.*?)\n```", text, re.M | re.DOTALL)
    )
    commands = cli.list_commands(click.Context(cli))
    assert list(dict.fromkeys(name.split()[0] for name in sections)) == commands
    for name, usage in sections.items():
        assert usage.startswith(f"Usage: shardspec {name} ")
        assert ("Examples:" in usage) != ("COMMAND [ARGS]" in usage)
        assert not re.findall(r"^ +--\S+ [A-Z]+_", usage, re.MULTILINE)  # a name of the code


def test_the_drawings_are_as_they_would_be_drawn():
    drawings = module_of("drawings")
    pages = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *DOCS.glob("*.md")])
    # Two need a browser (tests/explorer/picture.py) and matplotlib (docs/cost-queries.md).
    names = {*drawings.DRAWINGS, "explorer.png", "cost-by-mesh-shape.svg"}
    assert {path.name for path in drawings.IMAGES.iterdir()} == names
    for name, drawn in drawings.DRAWINGS.items():
        assert (drawings.IMAGES / name).read_text("utf-8") == f"{drawn()}\n", name
        assert f"images/{name})" in pages, name


def test_every_public_name_has_its_place_in_the_reference():
    conf = module_of("conf")
    text = conf._public_names()
    assert "<!-- public names -->" in (DOCS / "reference.md").read_text("utf-8")
    ours = {name: home for name, home in shardspec._HOME.items() if home.startswith("shardspec.")}
    for name, home in ours.items():
        assert re.search(rf"\.\. auto(class|function):: {home}\.{name}$", text, re.MULTILINE)
        assert "\nExamples\n--------\n" in (inspect.getdoc(getattr(shardspec, name)) or ""), name
    assert "<!-- names beside -->" in (DOCS / "reference.md").read_text("utf-8")
    beside = conf._names_beside()
    for name in ("parallel.inputs_as", "comm.steps.AllToAll", "errors.LayoutError"):
        assert f":: shardspec.{name}\n" in beside
    for home, name in re.findall(r"\.\. auto\w+:: (.*)\.(\w+)$", beside, re.MULTILINE):
        assert getattr(import_module(home), name).__doc__, name


if __name__ == "__main__":
    for each in RUN:
        path = DOCS / f"{each}.md"
        text = path.read_text("utf-8")
        with tempfile.TemporaryDirectory() as temporary:
            path.write_text(rewritten(text, Path(temporary), shared=True), "utf-8")
