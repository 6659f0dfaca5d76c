"""The command `shardspec show`."""

from math import prod
from pathlib import Path

import click

from shardspec.checkpoint.output import write_atomically
from shardspec.cli.arguments import (
    MeshShape,
    mesh_option,
    parse_ids,
    parsed,
    tensor_options,
)
from shardspec.layout.layout import Layout
from shardspec.layout.picture import picture
from shardspec.layout.svg import box_rgb, layout_html, layout_svg
from shardspec.mesh import DeviceMesh

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
@click.option(
    "--ids",
    callback=parsed(parse_ids),
    metavar="IDS",
    help="Physical ids in row-major order, 3,1,0,2; counted from 0 if left out.",
)
@tensor_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a picture instead: FILE ends in .svg or .html.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def command(
    spec: str,
    mesh: MeshShape,
    ids: tuple[int, ...] | None,
    shape: tuple[int, ...],
    dtype: str,
    output: Path | None,
    force: bool,
) -> None:
    """Show which devices hold which part of a tensor that is cut as SPEC.

    In the terminal every box has a colour of its own; where the output is piped it is plain.
    """
    sizes, names = mesh
    if prod(sizes) > _MOST_DEVICES:
        raise click.UsageError(
            f"a mesh of {prod(sizes)} devices is too large to draw; up to {_MOST_DEVICES} can be"
        )
    devices = DeviceMesh(range(prod(sizes)) if ids is None else ids, sizes, axis_names=names)
    layout = Layout(devices, spec, shape, dtype)
    if output is None:
        click.echo(picture(layout, _paint))
        return
    draw = {".svg": layout_svg, ".html": layout_html}.get(output.suffix)
    if draw is None:
        raise click.UsageError(f"{output}: give a file that ends in .svg or .html")
    content = draw(layout).encode()

    def fill(fd: int) -> None:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)

    write_atomically(output, len(content), fill, overwrite=force)
    click.echo(f"{output}: {layout}")


def _paint(box: int, text: str) -> str:
    """Colour a piece of a cell; click leaves colours out where nobody sees them."""
    return click.style(text, fg="black", bg=box_rgb(box))
