"""The commands that draw and translate: `shardspec show`, `convert`, `graph` and `explore`."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

import click

from shardspec.cli import options as opts
from shardspec.cli.options import MeshShape
from shardspec.cli.output import path_text, say, say_json, say_styled, write_file
from shardspec.errors import LossyConversionError
from shardspec.layout.layout import Layout
from shardspec.layout.picture import Paint, box_rgb
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import bytes_text, counted, printable

_MAX_DEVICES: Final = 4096
_LINKS: Final = ("h100-nvswitch", "ib-ndr-per-gpu", "ib-ndr-per-gpu,h100-nvswitch")


@click.command(cls=opts.Command)
@click.argument("spec", metavar="SPEC")
@opts.mesh_option(required=True)
@opts.ids_option
@opts.shape_option
@opts.dtype_option()
@opts.output_option("Write a picture instead: FILE ends in .svg or .html.")
@opts.overwrite_option
def show_command(
    spec: str,
    mesh: MeshShape,
    ids: tuple[int, ...] | None,
    shape: tuple[int, ...],
    dtype: str,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Show which devices hold which part of a tensor that is sharded as SPEC.

    In a terminal every box has its own colour; piped output is plain.

    Examples:
      shardspec show "[S01,R]" --mesh 2x2 --shape 4x4
      shardspec show "[S(tp),S(dp)]" --mesh dp=2,tp=4 --shape 1001x64 -o layout.svg
      shardspec show "[S0,S1,S2]" --mesh 2x2x2 --shape 4x4x5 -o layout.html
    """
    _check_devices(mesh, _MAX_DEVICES)
    layout = Layout(opts.plain_mesh(mesh, ids), spec, shape, dtype)
    if output is None:
        say_styled(layout.drawing().text(_paint()))
        wide = max(map(len, layout.picture().splitlines()))
        columns = shutil.get_terminal_size().columns
        if sys.stdout.isatty() and wide > columns:
            say(
                f"the picture is {wide} columns wide, this terminal {columns}: give -o layout.svg, "
                "or pipe it to 'less -S'",
                err=True,
            )
        return
    if output.suffix not in (".svg", ".html"):
        raise click.UsageError(f"{path_text(output)}: give a file that ends in .svg or .html")
    drawing = layout.drawing()
    drawn = drawing.svg() if output.suffix == ".svg" else drawing.html()
    write_file(output, drawn, overwrite=overwrite)
    say(f"{path_text(output)}: {layout.title}")


def _paint() -> Paint:
    """Return a function that colours a piece of a cell in the colours that this terminal has.

    Click removes them if stdout is not a terminal.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda _box, text: text
    # Terminals with more than 256 colours set this; others show arbitrary colours.
    if os.environ.get("COLORTERM", "") in ("truecolor", "24bit"):
        return lambda box, text: click.style(text, fg="black", bg=box_rgb(box))
    from rich.color import Color, ColorSystem

    def nearest(box: int) -> int | None:
        return Color.from_rgb(*box_rgb(box)).downgrade(ColorSystem.EIGHT_BIT).number

    return lambda box, text: click.style(text, fg=16, bg=nearest(box))


def _check_devices(mesh: MeshShape, limit: int) -> None:
    # Before the mesh is made: it may have a million ids.
    devices = prod(mesh[0])
    text = f"a mesh of {devices} devices is too large to draw; the limit is {limit}"
    opts.refuse_if(devices > limit, text)


_Words: TypeAlias = Callable[[str, DeviceMesh, tuple[int, ...] | None], str]


def _languages() -> dict[str, _Words]:
    """Return, by library, the function that writes a spec for a mesh and perhaps a shape."""
    from shardspec.interop import notations

    return {
        "torch": lambda spec, mesh, _: notations.placements_text(spec, mesh),
        "jax": notations.partition_spec_text,
        "shardy": lambda spec, mesh, _: (
            f"{notations.shardy_text(spec, mesh)}   {notations.shardy_mesh_text(mesh)}"
        ),
        "oneflow": lambda spec, mesh, _: notations.sbp_text(spec, mesh),
        "colossal": lambda spec, mesh, _: str(notations.to_colossal(spec, mesh)),
    }


@click.command(cls=opts.Command)
@click.argument("spec", metavar="SPEC")
@opts.mesh_option(required=True)
@click.option(
    "--to",
    type=click.Choice(["torch", "jax", "shardy", "oneflow", "colossal"]),
    help="The library; all of them if left out.",
)
@click.option(
    "--shape",
    type=opts.SHAPE,
    help="Sizes of the tensor, 4096x4096, to check that JAX can shard them so.",
)
@opts.json_option()
def convert_command(
    spec: str, mesh: MeshShape, to: str | None, shape: tuple[int, ...] | None, as_json: bool
) -> None:
    """Write the spec SPEC in the notation of other libraries.

    If a notation cannot express the spec, the reason is printed; nothing is approximated.

    Examples:
      shardspec convert "[S10,R]" --mesh x=2,y=2
      shardspec convert "[S(x),R|P(y)]" --mesh x=2,y=2 --to jax
      shardspec convert "[S01,R]" --mesh x=2,y=4 --to jax --shape 4096x4096
    """
    devices, languages = opts.plain_mesh(mesh), _languages()
    if shape is not None:
        Layout(devices, spec, shape, "float32")  # the spec must fit the tensor
    if to is not None:
        text = languages[to](spec, devices, shape)
        say(json.dumps({to: text}) if as_json else text)
        return
    texts, refused = dict.fromkeys(languages, ""), {}
    for name, words in languages.items():
        try:
            texts[name] = words(spec, devices, shape)
        except LossyConversionError as error:
            refused[name] = str(error)
    if as_json:
        say_json({**texts, **dict.fromkeys(refused), "refused": refused})
        return
    for name, notation in texts.items():
        text = printable(notation or f"– {refused[name]}")
        say_styled(f"{name:<10}{text if notation else click.style(text, dim=True)}")


def _parse_output(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".dot", ".gv"):
        dot = path.with_suffix(".dot").name
        raise ValueError(
            f"{text}: give a name that ends in .dot or .gv; Graphviz makes pictures of it: "
            f"'dot -Tsvg {dot} -o {path.stem}.svg'"
        )
    return path


@click.command(cls=opts.Command)
@click.argument("specs", metavar="[FROM TO]", nargs=-1)
@opts.cluster_options
@click.option(
    "--dims",
    metavar="COUNT",
    type=click.IntRange(0),
    help="Dims of the tensor, if FROM and TO are not given.",
)
@click.option(
    "--shape",
    type=opts.SHAPE,
    help='Sizes of the global tensor, for the path: 4096x4096; "" for a scalar.',
)
@opts.dtype_option()
@opts.output_option(
    "Write FILE.dot, for Graphviz; without it DOT is printed.",
    type=opts.Kind("FILE", _parse_output),
)
@opts.overwrite_option
@opts.json_option("Print nodes, edges and path as JSON.")
def graph_command(
    specs: tuple[str, ...],
    cluster: opts.ClusterOptions,
    dims: int | None,
    shape: tuple[int, ...] | None,
    dtype: str,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Draw which steps lead from which spec to which, with the plan from FROM to TO marked.

    A spec is a node, and each slice, gather, all-to-all or reduction an edge. Permute and exchange
    join any two specs with nothing pending; they are drawn if they are part of the plan.

    Examples:
      shardspec graph --mesh 2x2 --dims 2
      shardspec graph --mesh dp=2,tp=4 --dims 2 -o graph.dot
      shardspec graph "[S10,R]" "[R,S1]" --mesh 2x4 --shape 4096x4096 --dtype bf16 -o path.dot
      shardspec graph "[R|P0]" "[S0]" --mesh 2 --shape 64 --links unit --json

    With Graphviz, 'dot -Tsvg path.dot -o path.svg' makes a picture. In Python,
    LayoutConverter().graph(layout) returns the graph with the price of every step.
    """
    from shardspec.layout.converter import LayoutConverter
    from shardspec.layout.dot import dot_text, draw_graph
    from shardspec.layout.transitions import transitions

    devices, model = cluster.build()
    plan = None
    if specs:
        text = f"{counted(len(specs), 'spec')} where two are needed, FROM and TO"
        opts.refuse_if(len(specs) != 2, text)
        if shape is None:
            raise click.UsageError("a path from FROM to TO depends on the tensor; give its --shape")
        opts.refuse_if(dims is not None, "--dims follows from FROM and TO; leave it out")
        source, dims = Layout(devices, specs[0], shape, dtype), len(shape)
        plan = LayoutConverter(model).plan(source, source.with_spec(specs[1]))
    elif dims is None:
        raise click.UsageError("nothing to draw; give --dims, or FROM, TO and --shape")
    elif shape is not None:
        raise click.UsageError("--shape is for the path; give FROM and TO too, or leave it out")
    pending = plan.source.spec.partial if plan is not None else {}
    drawing = draw_graph(transitions(devices, dims, pending), devices, dims, plan)
    text = dot_text(drawing)
    if output is not None:
        write_file(output, text, overwrite=overwrite)
    if as_json:
        say_json(drawing.as_dict())
    elif output is None:
        say_styled(text, nl=False)
    else:
        say(f"{path_text(output)}: {drawing.title}")
        if drawing.known_error:
            say(f"accuracy: {drawing.known_error}")


@click.command(cls=opts.Command)
@click.option(
    "--mesh",
    type=opts.MESH,
    multiple=True,
    default=("4", "2x2", "2x4"),
    show_default=True,
    help="A mesh to pick, 2x4 or dp=2,tp=4; may be given several times.",
)
@click.option(
    "--shape",
    type=opts.SHAPE,
    multiple=True,
    default=("4096x4096", "64x64", "6x7"),
    show_default=True,
    help="A tensor to pick, of 1 to 3 dims; may be given several times.",
)
@click.option(
    "--links",
    type=opts.PRESET_NAMES,
    multiple=True,
    help="Links to pick, one preset for all axes or one per axis; may be given several times. "
    f"'shardspec presets' lists them.  [default: {', then '.join(_LINKS)}]",
)
@opts.dtype_option("bfloat16")
@opts.output_option("Write the page here.", required=True)
@opts.overwrite_option
def explore_command(
    mesh: tuple[MeshShape, ...],
    shape: tuple[tuple[int, ...], ...],
    links: tuple[tuple[str, ...], ...],
    dtype: str,
    output: Path,
    overwrite: bool,
) -> None:
    """Write a page in which to pick conversions and watch their plans step by step.

    The page holds the plans between all layouts of the meshes and tensors, including pending sums,
    the next best plans and the naive plan. It opens in any browser without a network. Limits are 32
    devices a mesh, 3 dims a tensor and 50,000 conversions.

    Examples:
      shardspec explore -o page.html
      shardspec explore --mesh dp=2,tp=4 --shape 4096x1024 --dtype bf16 -o page.html
      shardspec explore --mesh 2x2x2 --shape 8x8 --links tpu-v5e --links tpu-v5p -o page.html
    """
    from shardspec.explorer.page import MAX_PAGE_DEVICES, explorer_page

    for shape_and_names in mesh:
        _check_devices(shape_and_names, MAX_PAGE_DEVICES)
    meshes = list(map(opts.plain_mesh, dict.fromkeys(mesh)))
    links = tuple(dict.fromkeys(links))
    if not links:
        defaults, counts = map(opts.parse_links, _LINKS), {1, *(each.ndim for each in meshes)}
        links = tuple(names for names in defaults if len(names) in counts)
    page = explorer_page(meshes, tuple(dict.fromkeys(shape)), links, dtype)
    write_file(output, page, overwrite=overwrite)
    size, on = bytes_text(len(page.encode())), ", ".join(map(str, meshes))
    say(f"{path_text(output)}: every conversion on {on}, {size}; open it")
