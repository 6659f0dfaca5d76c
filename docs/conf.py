"""How the pages under docs/ become a site: `make docs`, strictly and without a network."""

from importlib import import_module
from inspect import isclass
from itertools import groupby

from sphinx.application import Sphinx

import shardspec

project = "shardspec"
author = "the authors of shardspec"
copyright = "the authors of shardspec, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "shardspec"
html_show_copyright = False
html_copy_source = False
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
    "checkpoint": "Checkpoints",
    "errors": "Errors",
}


def _public_names() -> str:
    """Return a section for each part of the package, with its public names, from the code."""

    def place(name: str) -> tuple[int, str]:
        part = shardspec._HOME[name].split(".")[1]
        known = list(_TITLES)
        return (known.index(part) if part in known else len(known), part)

    lines = []
    for (_, part), names in groupby(sorted(shardspec.__all__, key=place), key=place):
        lines += [f"## {_TITLES.get(part, part.replace('_', ' ').capitalize())}", ""]
        for name in names:
            home = shardspec._HOME[name]
            kind = "class" if isclass(getattr(import_module(home), name)) else "function"
            members = ["   :members:"] if kind == "class" else []
            lines += ["```{eval-rst}", f".. auto{kind}:: {home}.{name}", *members, "```", ""]
    return "\n".join(lines)


def setup(app: Sphinx) -> None:
    """Put the public names where the reference says so."""

    def fill(_app: Sphinx, name: str, source: list[str]) -> None:
        if name == "reference":
            source[0] = source[0].replace("<!-- public names -->", _public_names())

    app.connect("source-read", fill)
