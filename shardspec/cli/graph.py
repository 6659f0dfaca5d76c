"""The commands that draw conversions: `shardspec graph` and `shardspec explore`."""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Final

import click

from shardspec.cli.arguments import MESH, PRESETS, SIZES, Kind, MeshShape, parse_links
from shardspec.cli.options import (
    ClusterOptions,
    argument,
    command,
    dtype_option,
    json_flag,
    option,
    output_option,
    overwrite_flag,
    plain_mesh,
)
from shardspec.cli.output import path_text, say, write_file
from shardspec.errors import LayoutError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.drawing import Drawing, dot_text, draw_transitions, svg_text
from shardspec.layout.layout import Layout
from shardspec.text import bytes_text, counted

_MOST_IN_SVG: Final = 200
"""Specs that can be told apart on one page."""

_WRITERS: Final[Mapping[str, Callable[[Drawing], str]]] = {
    ".dot": dot_text,
    ".gv": dot_text,
    ".svg": svg_text,
}
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


@command
def graph_command(
    *,
    specs: tuple[str, ...] = argument("[FROM TO]", nargs=-1),
    cluster: ClusterOptions,
    dims: int | None = option(
        "COUNT", "Dims of the tensor, where no FROM and TO are given.", type=click.IntRange(0)
    ),
    shape: tuple[int, ...] | None = option(
        SIZES, 'Sizes of the whole tensor, for the path: 4096x4096; "" for a scalar.'
    ),
    dtype: str = dtype_option(),
    output: Path | None = output_option(
        "Write FILE.dot, for Graphviz, or FILE.svg; without it DOT is printed.",
        Kind("FILE", _parse_output),
    ),
    overwrite: bool = overwrite_flag(),
    as_json: bool = json_flag("Print nodes, edges and path as JSON."),
) -> None:
    """Draw which step leads from which spec to which, with the plan from FROM to TO marked.

    A spec is a node, and each slice, gather, all-to-all or reduction an edge. Permute and exchange
    join any two specs with nothing pending; they are drawn where the plan takes them.

    Examples:
      shardspec graph --mesh 2x2 --dims 2
      shardspec graph --mesh dp=2,tp=4 --dims 2 -o graph.svg
      shardspec graph "[S10,R]" "[R,S1]" --mesh 2x4 --shape 4096x4096 --dtype bf16 -o path.svg
      shardspec graph "[R|P0]" "[S0]" --mesh 2 --shape 64 --links unit -o path.dot --force --json

    With Graphviz, 'dot -Tpng path.dot -o path.png' makes a PNG.
    """
    devices, model = cluster.build()
    if not specs:
        if dims is None:
            raise click.UsageError("nothing to draw; give --dims, or FROM, TO and --shape")
        if shape is not None:
            raise click.UsageError("--shape is for the path; give FROM and TO too, or leave it out")
        drawing = draw_transitions(devices, dims)
    elif len(specs) != 2:
        raise click.UsageError(f"{counted(len(specs), 'spec')} where two are needed, FROM and TO")
    elif shape is None:
        raise click.UsageError("a path from FROM to TO depends on the tensor; give its --shape")
    elif dims is not None:
        raise click.UsageError("--dims follows from FROM and TO; leave it out")
    else:
        source = Layout(devices, specs[0], shape, dtype)
        plan = LayoutConverter(model).plan(source, source.with_spec(specs[1]))
        drawing = draw_transitions(devices, len(shape), plan)
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


_LINKS: Final = ("h100-nvswitch", "ib-ndr-per-gpu", "ib-ndr-per-gpu,h100-nvswitch")


@command
def explore_command(
    *,
    mesh: tuple[MeshShape, ...] = option(
        MESH,
        "A mesh to pick, 2x4 or dp=2,tp=4; may be given several times.",
        multiple=True,
        default=("4", "2x2", "2x4"),
        show_default=True,
    ),
    shape: tuple[tuple[int, ...], ...] = option(
        SIZES,
        "A tensor to pick, of 1 to 3 dims; may be given several times.",
        multiple=True,
        default=("4096x4096", "64x64", "6x7"),
        show_default=True,
    ),
    links: tuple[tuple[str, ...], ...] = option(
        PRESETS,
        "Links to pick, one preset for all axes or one per axis; may be given several times. "
        f"'shardspec presets' lists them.  [default: {', then '.join(_LINKS)}]",
        multiple=True,
    ),
    dtype: str = dtype_option("bfloat16"),
    output: Path = output_option("Write the page here.", required=True),
    overwrite: bool = overwrite_flag(),
) -> None:
    """Write one page in which to pick conversions and to watch their plans step by step.

    The page holds every pair of layouts of the meshes and tensors, planned here: sums that are
    pending, the next best plans and the naive one included. It opens in any browser, by itself,
    without a network. Up to 32 devices a mesh, 3 dims a tensor and 50,000 conversions can be shown.

    Examples:
      shardspec explore -o page.html
      shardspec explore --mesh dp=2,tp=4 --shape 4096x1024 --dtype bf16 -o page.html
      shardspec explore --mesh 2x2x2 --shape 8x8 --links tpu-v5e --links tpu-v5p -o page.html
    """
    from shardspec.explorer.page import MAX_DEVICES, explorer_page

    for sizes, _ in mesh:
        # Before the mesh is made: its ids alone may be a million.
        if prod(sizes) > MAX_DEVICES:
            raise click.UsageError(
                f"a mesh of {prod(sizes)} devices is too large to draw; up to {MAX_DEVICES} can be"
            )
    meshes = [plain_mesh(one) for one in dict.fromkeys(mesh)]
    links = tuple(dict.fromkeys(links))
    if not links:
        known, axes = map(parse_links, _LINKS), {one.ndim for one in meshes}
        links = tuple(names for names in known if len(names) in {1, *axes})
    page = explorer_page(meshes, tuple(dict.fromkeys(shape)), links, dtype)
    write_file(output, page, overwrite=overwrite)
    size, on = bytes_text(len(page.encode())), ", ".join(map(str, meshes))
    say(f"{path_text(output)}: every conversion on {on}, {size}; open it")
