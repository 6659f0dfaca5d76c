"""The commands that say what one spec means: `shardspec show` and `shardspec convert`."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

import click

from shardspec.cli.arguments import SIZES, MeshShape
from shardspec.cli.options import (
    TensorOptions,
    argument,
    command,
    ids_option,
    json_flag,
    mesh_option,
    option,
    output_option,
    overwrite_flag,
    plain_mesh,
)
from shardspec.cli.output import path_text, say, write_file
from shardspec.errors import LossyConversionError
from shardspec.layout.layout import Layout
from shardspec.layout.picture import Paint, box_rgb
from shardspec.mesh import DeviceMesh
from shardspec.text import printable

_MOST_DEVICES: Final = 4096


@command
def show_command(
    *,
    spec: str = argument("SPEC"),
    mesh: MeshShape = mesh_option(),
    ids: tuple[int, ...] | None = ids_option(),
    tensor: TensorOptions,
    output: Path | None = output_option("Write a picture instead: FILE ends in .svg or .html."),
    overwrite: bool = overwrite_flag(),
) -> None:
    """Show which devices hold which part of a tensor that is cut as SPEC.

    In the terminal every box has a colour of its own; where the output is piped it is plain.

    Examples:
      shardspec show "[S01,R]" --mesh 2x2 --shape 4x4
      shardspec show "[S(tp),S(dp)]" --mesh dp=2,tp=4 --shape 1001x64 -o layout.svg
      shardspec show "[S0,S1,S2]" --mesh 2x2x2 --shape 4x4x5 -o layout.html
    """
    devices = prod(mesh[0])
    if devices > _MOST_DEVICES:
        raise click.UsageError(
            f"a mesh of {devices} devices is too large to draw; up to {_MOST_DEVICES} can be"
        )
    layout = Layout(plain_mesh(mesh, ids), spec, tensor.shape, tensor.dtype)
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


_Words: TypeAlias = Callable[[str, DeviceMesh, tuple[int, ...] | None], str]


def _languages() -> dict[str, _Words]:
    """Return what says a spec, given a mesh and perhaps a shape, by whose words it uses."""
    from shardspec.interop.other_specs import (
        partition_spec_text,
        sbp_text,
        shardy_mesh_text,
        shardy_text,
        to_colossal,
    )
    from shardspec.interop.torch_placements import placements_text

    return {
        "torch": lambda spec, mesh, _: placements_text(spec, mesh),
        "jax": partition_spec_text,
        "shardy": lambda spec, mesh, _: f"{shardy_text(spec, mesh)}   {shardy_mesh_text(mesh)}",
        "oneflow": lambda spec, mesh, _: sbp_text(spec, mesh),
        "colossal": lambda spec, mesh, _: str(to_colossal(spec, mesh)),
    }


@command
def convert_command(
    *,
    spec: str = argument("SPEC"),
    mesh: MeshShape = mesh_option(),
    to: str | None = option(
        click.Choice(["torch", "jax", "shardy", "oneflow", "colossal"]),
        "Whose words; all of them if left out.",
    ),
    shape: tuple[int, ...] | None = option(
        SIZES, "Sizes of the tensor, 4096x4096, to find out whether they can be cut so."
    ),
    as_json: bool = json_flag(),
) -> None:
    """Say the spec SPEC in the words of other libraries.

    Where a library has no word for a part of it, this says so; nothing is approximated.

    Examples:
      shardspec convert "[S10,R]" --mesh x=2,y=2
      shardspec convert "[S(x),R|P(y)]" --mesh x=2,y=2 --to jax
      shardspec convert "[S01,R]" --mesh x=2,y=4 --to jax --shape 4096x4096
    """
    devices, languages = plain_mesh(mesh), _languages()
    if shape is not None:
        Layout(devices, spec, shape, "float32")  # the spec must fit the tensor
    if to is not None:
        text = languages[to](spec, devices, shape)
        say(json.dumps({to: text}) if as_json else text)
        return
    said: dict[str, str | None] = {}
    refused = {}
    for name, words in languages.items():
        try:
            said[name] = words(spec, devices, shape)
        except LossyConversionError as error:
            said[name], refused[name] = None, str(error)
    if as_json:
        say(json.dumps({**said, "refused": refused}))
        return
    for name, found in said.items():
        text = printable(found or f"– {refused[name]}")
        click.echo(f"{name:<10}{text if found else click.style(text, dim=True)}")
