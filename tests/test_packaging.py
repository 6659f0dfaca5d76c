"""What has to be installed: little for planning and merging, torch where tensors are."""

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

from tests.distribution import absolute_links
from tests.sources import FILES, nodes_of

ROOT = Path(__file__).parent.parent
# Installed by those who need them.
OPTIONAL = {"torch", "fsspec", "xxhash", "zstandard"}


def options():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    return config


def named(requirements):
    lines = (line.partition(";")[0].strip() for line in requirements.splitlines())
    return {re.split(r"[<>=]", line)[0] for line in lines if line}


def test_what_is_imported_is_what_is_required():
    imported = set()
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    others = imported - sys.stdlib_module_names - {"shardspec"}
    required = named(options()["options"]["install_requires"])
    assert others - required <= OPTIONAL | {"jax", "transformers"}
    assert required <= others
    extras = options()["options.extras_require"]
    assert "torch" in named(extras["torch"])
    optional = ("torch", "remote", "delta")
    assert set.union(*(named(extras[extra]) for extra in optional)) == OPTIONAL


def test_names_that_need_torch_say_so_where_it_is_missing():
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from shardspec import DeviceMesh, Layout, LayoutConverter, merge, reshard\n"
        "layout = Layout(DeviceMesh(range(4), (2, 2)), '[S0,R]', (8, 8), 'bf16')\n"
        "print(LayoutConverter().cost(layout, '[R,S0]') > 0)\n"
        "try:\n"
        "    from shardspec import DTensor\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "True\nshardspec.DTensor needs torch: pip install 'torch>=2.10'\n"


def test_everything_is_pinned_once():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    names = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert len(names) == len(set(names))
    needed = set()
    for extra in options()["options.extras_require"].values():
        needed |= named(extra)
    needed |= named(options()["options"]["install_requires"])
    assert {name.lower() for name in needed} <= set(names)


def test_links_of_the_readme_are_absolute_in_a_release():
    page = '![a](docs/a.svg) [b](docs/b.md#c) [c](https://d) [e](#f) <img src="docs/g.png">'
    assert absolute_links(page, "https://h") == (
        "![a](https://h/raw/main/docs/a.svg) [b](https://h/blob/main/docs/b.md#c) [c](https://d) "
        '[e](#f) <img src="https://h/raw/main/docs/g.png">'
    )
