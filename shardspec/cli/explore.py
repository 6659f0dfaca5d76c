"""The command `shardspec explore`."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Final, TypeVar

import click

from shardspec.cli.arguments import MeshShape, parse_mesh, parse_shape, parsed
from shardspec.cli.options import (
    dtype_option,
    file_output,
    overwrite_option,
    parse_links,
    plain_mesh,
)
from shardspec.cli.output import path_text, say, write_file
from shardspec.explorer.page import MAX_DEVICES, explorer_page
from shardspec.text import bytes_text

__all__ = ["command"]

T = TypeVar("T")

_MESHES: Final = ("4", "2x2", "2x4")
_SHAPES: Final = ("4096x4096", "64x64", "6x7")
_LINKS: Final = ("h100-nvswitch", "ib-ndr-per-gpu", "ib-ndr-per-gpu,h100-nvswitch")


def _each(
    read: Callable[[str], T],
) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], tuple[T, ...]]:
    """Return a click callback that reads every text of an option, each value once."""
    one = parsed(read)

    def callback(
        ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
    ) -> tuple[T, ...]:
        values = (one(ctx, param, text) for text in texts)
        return tuple(dict.fromkeys(value for value in values if value is not None))

    return callback


@click.command(
    "explore",
    epilog="""\b
Examples:
  shardspec explore -o page.html
  shardspec explore --mesh dp=2,tp=4 --shape 4096x1024 --dtype bf16 -o page.html
  shardspec explore --mesh 2x2x2 --shape 8x8 --links tpu-v5e --links tpu-v5p -o page.html
""",
)
@click.option(
    "--mesh",
    "meshes",
    multiple=True,
    default=_MESHES,
    show_default=True,
    callback=_each(parse_mesh),
    metavar="SHAPE",
    help="A mesh to pick, 2x4 or dp=2,tp=4; may be given several times.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=_SHAPES,
    show_default=True,
    callback=_each(parse_shape),
    metavar="SIZES",
    help="A tensor to pick, of 1 to 3 dims; may be given several times.",
)
@click.option(
    "--links",
    multiple=True,
    callback=_each(parse_links),
    metavar="PRESETS",
    help="Links to pick, one preset for all axes or one per axis; may be given several times. "
    f"'shardspec presets' lists them.  [default: {', then '.join(_LINKS)}]",
)
@dtype_option("bfloat16")
@file_output("Write the page here.", required=True)
@overwrite_option()
def command(
    meshes: tuple[MeshShape, ...],
    shapes: tuple[tuple[int, ...], ...],
    links: tuple[tuple[str, ...], ...],
    dtype: str,
    output: Path,
    overwrite: bool,
) -> None:
    """Write one page in which to pick conversions and to watch their plans step by step.

    The page holds every pair of layouts of the meshes and tensors, planned here: sums that are
    pending, the next best plans and the naive one included. It opens in any browser, by itself,
    without a network. Up to 32 devices a mesh, 3 dims a tensor and 50,000 conversions can be shown.
    """
    for sizes, _ in meshes:
        # Before the mesh is made: its ids alone may be a million.
        if prod(sizes) > MAX_DEVICES:
            raise click.UsageError(
                f"a mesh of {prod(sizes)} devices is too large to draw; up to {MAX_DEVICES} can be"
            )
    built = [plain_mesh(mesh) for mesh in meshes]
    if not links:
        choices = (parse_links(text) for text in _LINKS)
        links = tuple(c for c in choices if len(c) == 1 or any(len(c) == m.ndim for m in built))
    page = explorer_page(built, shapes, links, dtype)
    write_file(output, page, overwrite=overwrite)
    size = bytes_text(len(page.encode()))
    say(f"{path_text(output)}: every conversion on {', '.join(map(str, built))}, {size}; open it")
