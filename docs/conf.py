"""Settings of sphinx, which builds the site from docs/ without a network: `make docs`."""

import subprocess
import sys
from importlib import import_module
from inspect import isclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

import shardspec
from shardspec.cli.main import cli

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "shardspec"
author = "the authors of shardspec"
copyright = "the authors of shardspec, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "shardspec"
html_show_copyright = False
html_copy_source = False
html_static_path = ["style"]
html_css_files = ["site.css"]
myst_heading_anchors = 3
# Links out of docs/ are to files of the checkout; they are checked by the tests, as are those
# of the README, and are left as they are.
suppress_warnings = ["myst.xref_missing"]
default_role = "code"
napoleon_google_docstring = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False
pygments_dark_style = "github-dark"

_TITLES = {
    "mesh": "Meshes",
    "layout": "Layouts and plans",
    "comm": "Costs and communicators",
    "dtensor": "Tensors",
    "factories": "Tensors from nothing",
    "torch_dtensors": "DTensors of torch",
    "parallel": "Modules",
    "checkpoint": "Checkpoints",
    "tracing": "Traces",
    "errors": "Errors",
}

_BESIDE = {
    "Modules": ("parallel",),
    "Links, plans and parts of specs": ("comm.curves", "layout.plan", "layout.spec"),
    "Steps of plans": ("comm.steps",),
    "Communicators": ("comm.communicator", "comm.process_group"),
    "Other notations": ("interop.notations", "interop.torch_dtensor"),
    "What a trace holds": ("tracing",),
    "Kinds of errors": ("errors",),
}
"""What else is there, by the modules it is imported from."""


def _public_names() -> str:
    """Return a section for each part of the package, with its public names, from the code."""

    def place(name: str) -> tuple[int, str]:
        part = shardspec._HOME[name].split(".")[1]
        known = list(_TITLES)
        return (known.index(part) if part in known else len(known), part)

    lines = []
    ours = [name for name, home in shardspec._HOME.items() if home.startswith("shardspec.")]
    for (_, part), names in groupby(sorted(ours, key=place), key=place):
        lines += [f"## {_TITLES.get(part, part.replace('_', ' ').capitalize())}", ""]
        for name in names:
            lines += _entry(shardspec._HOME[name], name)
    return "\n".join(lines)


def _names_beside() -> str:
    """Return sections for what is imported from modules of the package."""
    lines = []
    for title, parts in _BESIDE.items():
        lines += [f"## {title}", ""]
        for part in parts:
            module = import_module(f"shardspec.{part}")
            lines += [f"From `shardspec.{part}`:", ""]
            for name in getattr(module, "__all__", vars(module)):
                described = getattr(module, name)
                own = getattr(described, "__module__", "") == module.__name__
                beside = not name.startswith("_") and name not in shardspec._HOME
                if own and beside and callable(described):
                    lines += _entry(module.__name__, name)
    return "\n".join(lines)


def _entry(home: str, name: str) -> list[str]:
    kind = "class" if isclass(getattr(import_module(home), name)) else "function"
    members = ["   :members:"] if kind == "class" else []
    return ["```{eval-rst}", f".. auto{kind}:: {home}.{name}", *members, "```", ""]


def _commands() -> str:
    """Return a section for each command, with its help."""
    group = click.Context(cli, info_name="shardspec", max_content_width=100)
    lines = []
    commands = {name: cli.get_command(group, name) for name in cli.list_commands(group)}
    for name, command in commands.items():
        members = command.commands if isinstance(command, click.Group) else {}
        for words, each in [(name, command), *((f"{name} {m}", c) for m, c in members.items())]:
            assert each is not None
            context = click.Context(each, group, words, max_content_width=100, terminal_width=100)
            lines += [f"## shardspec {words}", "", "```text", each.get_help(context), "```", ""]
    return "\n".join(lines)


def _draw_links() -> None:
    """Draw the picture that docs/plans.md shows and that is not kept in the repository."""
    root = Path(__file__).parent.parent
    command = ["benchmarks.links", "benchmarks/nccl-single-node.csv", "--plot", "docs/links.svg"]
    subprocess.run(
        [sys.executable, "-m", *command], cwd=root, check=True, stdout=subprocess.DEVNULL
    )


def setup(app: "Sphinx") -> None:
    """Draw what is not kept; put the public names and the help of commands where pages say so."""
    _draw_links()

    def fill(_app: "Sphinx", name: str, source: list[str]) -> None:
        if name == "commands":
            source[0] = source[0].replace("<!-- commands -->", _commands())
        if name == "reference":
            source[0] = source[0].replace("<!-- public names -->", _public_names())
            source[0] = source[0].replace("<!-- names beside -->", _names_beside())

    app.connect("source-read", fill)
