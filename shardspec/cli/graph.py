"""The command `shardspec graph`."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import click

from shardspec.checkpoint.writing.output import write_atomically
from shardspec.cli.arguments import MeshShape, parse_shape, parsed
from shardspec.cli.cluster import build_mesh, build_model, mesh_options
from shardspec.dtypes import dtype_name
from shardspec.errors import LayoutError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.drawing import Drawing, dot_text, draw_transitions
from shardspec.layout.graph_svg import svg_text
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh, LinkModel

if TYPE_CHECKING:
    from shardspec.profiling.profile import Profile

__all__ = ["command"]

_MOST_IN_SVG: Final = 200
"""Specs that can be told apart on one page."""

_WRITERS: Final[Mapping[str, Callable[[Drawing], str]]] = MappingProxyType(
    {".dot": dot_text, ".gv": dot_text, ".svg": svg_text}
)
"""By the end of the file's name."""


def _parse_output(text: str) -> Path:
    path = Path(text)
    kind = path.suffix.lower()
    if kind == ".png":
        dot = path.with_suffix(".dot")
        raise ValueError(
            f"{text}: .png needs Graphviz; write {dot.name}, then 'dot -Tpng {dot.name} -o "
            f"{path.name}'"
        )
    if kind not in _WRITERS:
        raise ValueError(f"{text}: give a name that ends in {', '.join(_WRITERS)}")
    return path


@click.command(
    "graph",
    epilog="""\b
Examples:
  shardspec graph --mesh 2x2 --dims 2
  shardspec graph --mesh dp=2,tp=4 --dims 2 -o graph.svg
  shardspec graph "[S10,R]" "[R,S1]" --mesh 2x4 --shape 4096x4096 --dtype bf16 -o path.svg
  shardspec graph "[R|P0]" "[S0]" --mesh 2 --shape 64 --links unit -o path.dot --force --json

\b
With Graphviz, 'dot -Tpng path.dot -o path.png' makes a PNG.
""",
)
@click.argument("specs", nargs=-1, metavar="[FROM TO]")
@mesh_options
@click.option(
    "--dims",
    type=click.IntRange(0),
    metavar="COUNT",
    help="Dims of the tensor, where no FROM and TO are given.",
)
@click.option(
    "--shape",
    callback=parsed(parse_shape),
    metavar="SIZES",
    help='Sizes of the whole tensor, for the path: 4096x4096; "" for a scalar.',
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    callback=parsed(dtype_name),
    metavar="NAME",
    help="Element type, for the path: bf16, float32, int8, …",
)
@click.option(
    "-o",
    "--output",
    callback=parsed(_parse_output),
    metavar="FILE",
    help="Write FILE.dot, for Graphviz, or FILE.svg; without it DOT is printed.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print nodes, edges and path as JSON.")
def command(
    specs: tuple[str, ...],
    mesh: MeshShape | None,
    ids: tuple[int, ...] | None,
    alpha: tuple[float, ...] | None,
    beta: tuple[float, ...] | None,
    links: tuple[str, ...] | None,
    link_model: LinkModel | None,
    profile: "Profile | None",
    dims: int | None,
    shape: tuple[int, ...] | None,
    dtype: str,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Draw which step leads from which spec to which, with the plan from FROM to TO marked.

    A spec is a node, and each slice, gather, all-to-all or reduction an edge. Permute and exchange
    join any two specs with nothing pending; they are drawn where the plan takes them.
    """
    devices = build_mesh(mesh, ids, alpha, beta, link_model, profile)
    converter = LayoutConverter(build_model(devices, links, profile))
    drawing = _drawing(converter, devices, specs, dims, shape, dtype)
    writer = _WRITERS[".dot" if output is None else output.suffix.lower()]
    nodes = sum(map(len, drawing.columns))
    if writer is svg_text and nodes > _MOST_IN_SVG:
        raise LayoutError(
            f"{nodes} specs are too many for one picture, the limit is {_MOST_IN_SVG}; write a "
            ".dot file, or draw fewer mesh axes or dims"
        )
    text = writer(drawing)
    if output is not None:
        _write(output, text.encode(), force)
    if as_json:
        click.echo(json.dumps(drawing.as_dict()))
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"{output}: {drawing.title}")
        if drawing.known_error:
            click.echo(f"known error: {drawing.known_error}")


def _drawing(
    converter: LayoutConverter,
    mesh: DeviceMesh,
    specs: tuple[str, ...],
    dims: int | None,
    shape: tuple[int, ...] | None,
    dtype: str,
) -> Drawing:
    if not specs:
        if dims is None:
            raise click.UsageError("nothing to draw; give --dims, or FROM, TO and --shape")
        if shape is not None:
            raise click.UsageError("--shape is for the path; give FROM and TO too, or leave it out")
        return draw_transitions(mesh, dims)
    if len(specs) != 2:
        count = f"{len(specs)} spec{'' if len(specs) == 1 else 's'}"
        raise click.UsageError(f"{count} where two are needed, FROM and TO")
    if shape is None:
        raise click.UsageError("a path from FROM to TO depends on the tensor; give its --shape")
    if dims is not None:
        raise click.UsageError("--dims follows from FROM and TO; leave it out")
    source = Layout(mesh, specs[0], shape, dtype)
    target = source.with_spec(specs[1])
    return draw_transitions(mesh, len(shape), converter.plan(source, target))


def _write(path: Path, data: bytes, force: bool) -> None:
    def fill(descriptor: int) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]

    write_atomically(path, len(data), fill, overwrite=force)
