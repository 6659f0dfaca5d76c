"""The command `shardspec show`."""

import os
import shutil
import sys
from math import prod
from pathlib import Path

import click

from shardspec.cli.arguments import MeshShape
from shardspec.cli.options import (
    file_output,
    ids_option,
    mesh_option,
    overwrite_option,
    plain_mesh,
    tensor_options,
)
from shardspec.cli.output import path_text, say, write_file
from shardspec.layout.layout import Layout
from shardspec.layout.picture import Paint, box_rgb

__all__ = ["command"]

_MOST_DEVICES = 4096


@click.command(
    "show",
    epilog="""\b
Examples:
  shardspec show "[S01,R]" --mesh 2x2 --shape 4x4
  shardspec show "[S(tp),S(dp)]" --mesh dp=2,tp=4 --shape 1001x64 -o layout.svg
  shardspec show "[S0,S1,S2]" --mesh 2x2x2 --shape 4x4x5 -o layout.html
""",
)
@click.argument("spec", metavar="SPEC")
@mesh_option
@ids_option
@tensor_options
@file_output("Write a picture instead: FILE ends in .svg or .html.")
@overwrite_option()
def command(
    spec: str,
    mesh: MeshShape,
    ids: tuple[int, ...] | None,
    shape: tuple[int, ...],
    dtype: str,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Show which devices hold which part of a tensor that is cut as SPEC.

    In the terminal every box has a colour of its own; where the output is piped it is plain.
    """
    if prod(mesh[0]) > _MOST_DEVICES:
        raise click.UsageError(
            f"a mesh of {prod(mesh[0])} devices is too large to draw; up to {_MOST_DEVICES} can be"
        )
    layout = Layout(plain_mesh(mesh, ids), spec, shape, dtype)
    if output is None:
        click.echo(layout.drawing().text(_paint()))
        _say_if_too_wide(layout.picture())
        return
    if output.suffix not in (".svg", ".html"):
        raise click.UsageError(f"{path_text(output)}: give a file that ends in .svg or .html")
    drawing = layout.drawing()
    drawn = drawing.svg() if output.suffix == ".svg" else drawing.html()
    write_file(output, drawn, overwrite=overwrite)
    say(f"{path_text(output)}: {layout.title}")


def _paint() -> Paint:
    """Return what colours a piece of a cell as this terminal can.

    Click leaves colours out where nobody sees them; people who want none say so in ``NO_COLOR``.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda _box, text: text
    # Terminals that know more than 256 colours say so; the others would show anything.
    every = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    return lambda box, text: click.style(
        text, fg="black" if every else 16, bg=box_rgb(box) if every else _nearest(box_rgb(box))
    )


def _nearest(rgb: tuple[int, int, int]) -> int:
    """Return the nearest colour of the 6×6×6 that terminals have from number 16 on.

    Examples
    --------
    >>> _nearest((255, 255, 255)), _nearest((0, 0, 0)), _nearest((172, 209, 246))
    (231, 16, 153)
    """
    red, green, blue = (
        min(range(6), key=lambda level: abs((0, 95, 135, 175, 215, 255)[level] - part))
        for part in rgb
    )
    return 16 + 36 * red + 6 * green + blue


def _say_if_too_wide(text: str) -> None:
    if not sys.stdout.isatty():
        return
    wide, here = max(map(len, text.splitlines())), shutil.get_terminal_size().columns
    if wide > here:
        say(
            f"the picture is {wide} columns wide, this terminal {here}: give -o layout.svg, or "
            "pipe it to 'less -S'",
            err=True,
        )
