"""The command `shardspec graph`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Unpack

import click

from shardspec.cli.options import (
    ClusterOptions,
    build_cluster,
    cluster_options,
    dtype_option,
    file_output,
    json_option,
    overwrite_option,
    shape_option,
)
from shardspec.cli.output import path_text, say, write_file
from shardspec.errors import LayoutError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.drawing import Drawing, dot_text, draw_transitions, svg_text
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import counted

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
@cluster_options
@click.option(
    "--dims",
    type=click.IntRange(0),
    metavar="COUNT",
    help="Dims of the tensor, where no FROM and TO are given.",
)
@shape_option('Sizes of the whole tensor, for the path: 4096x4096; "" for a scalar.')
@dtype_option()
@file_output("Write FILE.dot, for Graphviz, or FILE.svg; without it DOT is printed.", _parse_output)
@overwrite_option()
@json_option("Print nodes, edges and path as JSON.")
def command(
    specs: tuple[str, ...],
    dims: int | None,
    shape: tuple[int, ...] | None,
    dtype: str,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    **cluster: Unpack[ClusterOptions],
) -> None:
    """Draw which step leads from which spec to which, with the plan from FROM to TO marked.

    A spec is a node, and each slice, gather, all-to-all or reduction an edge. Permute and exchange
    join any two specs with nothing pending; they are drawn where the plan takes them.
    """
    devices, model = build_cluster(**cluster)
    converter = LayoutConverter(model)
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
        write_file(output, text, overwrite=overwrite)
    if as_json:
        say(json.dumps(drawing.as_dict()))
    elif output is None:
        click.echo(text, nl=False)
    else:
        say(f"{path_text(output)}: {drawing.title}")
        if drawing.known_error:
            say(f"known error: {drawing.known_error}")


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
        raise click.UsageError(f"{counted(len(specs), 'spec')} where two are needed, FROM and TO")
    if shape is None:
        raise click.UsageError("a path from FROM to TO depends on the tensor; give its --shape")
    if dims is not None:
        raise click.UsageError("--dims follows from FROM and TO; leave it out")
    source = Layout(mesh, specs[0], shape, dtype)
    target = source.with_spec(specs[1])
    return draw_transitions(mesh, len(shape), converter.plan(source, target))
