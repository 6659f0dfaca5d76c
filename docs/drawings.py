"""The drawings of the README and of docs/, made from layouts: ``python docs/drawings.py``.

They lie in docs/images, since a README is shown where nothing can be run.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from click.testing import CliRunner
from rich.console import Console
from rich.text import Text
from safetensors.numpy import save_file

from shardspec import DeviceMesh, Layout, LayoutConverter
from shardspec.cli.main import cli
from shardspec.layout.picture import row_svg

IMAGES: Final = Path(__file__).parent / "images"
MESH: Final = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
SHAPE: Final = (4, 8)


def layout() -> str:
    """Return one tensor on a mesh of two axes."""
    return Layout(MESH, "[S(dp),S(tp)]", SHAPE, "float32").drawing().svg()


def conversion() -> str:
    """Return a conversion by one all-to-all, before and after."""
    line = DeviceMesh(range(4), axis_names=("tp",))
    source = Layout(line, "[S(tp),R]", (4096, 8192), "bf16")
    return LayoutConverter().plan(source, "[R,S(tp)]").svg()


def specs(texts: Sequence[str], per_row: int) -> str:
    """Return the same tensor under several specs."""
    layouts = [Layout(MESH, text, SHAPE, "float32") for text in texts]
    pictures = [replace(one.drawing(), title=str(one.labelled_spec)) for one in layouts]
    return row_svg(pictures, per_row=per_row)


def screen(*words: str, columns: int = 80) -> str:
    """Return what a command prints on a terminal."""
    env = {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": None}
    done = CliRunner().invoke(cli, words, color=True, env=env, prog_name="shardspec")
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True)
    command = " ".join(map(shlex.quote, ("shardspec", *words)))
    console.print(Text.from_ansi(f"$ {command}\n{done.output}"))
    return console.export_svg(title="", unique_id=words[0])


def differing() -> str:
    """Return the screen of a comparison of two steps of a run."""
    sizes = {"embed.weight": (64, 16), "layers.0.up.weight": (32, 16), "norm.weight": (16,)}
    with TemporaryDirectory() as folder, chdir(folder):
        for step in (100, 200):
            rng = np.random.default_rng(0)
            tensors = {name: rng.normal(size=size).astype("f4") for name, size in sizes.items()}
            tensors["embed.weight"][3] += step / 1e5
            tensors["layers.0.up.weight"] *= 1 + step / 1e4
            save_file(tensors, f"step-{step}.safetensors")
        return screen("diff", "step-100.safetensors", "step-200.safetensors")


def inspected() -> str:
    """Return the screen of the checkpoint of the examples."""
    with chdir(IMAGES.parent.parent):
        return screen("inspect", "examples/checkpoint")


PLAN: Final = shlex.split(
    "plan '[S(dp),R]' '[R,S(dp,tp)]' --mesh dp=2,tp=4 --shape 4096x4096 --dtype bf16 "
    "--alternatives 2 --explain"
)


DRAWINGS: Final[Mapping[str, Callable[[], str]]] = {
    "layout.svg": layout,
    "conversion.svg": conversion,
    "one-axis.svg": lambda: specs(["[R,R]", "[S(dp),R]", "[R,S(tp)]"], 3),
    "two-axes.svg": lambda: specs(["[S(dp),S(tp)]", "[S(dp,tp),R]", "[S(tp,dp),R]"], 3),
    "screen-plan.svg": lambda: screen(*PLAN),
    "screen-inspect.svg": inspected,
    "screen-diff.svg": differing,
    "pending.svg": lambda: specs(["[S(dp),R|P(tp)]", "[S(dp),R]"], 2),
}
"""File name to what draws it."""


def main() -> None:
    """Write all drawings."""
    for name, drawn in DRAWINGS.items():
        (IMAGES / name).write_text(f"{drawn()}\n", "utf-8")


if __name__ == "__main__":
    main()
