"""The commands that draw: `shardspec show` and `shardspec explore`."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from shardspec.cli import options as opts
from shardspec.cli.checkpoint_options import layout_option, model_option, rule_options
from shardspec.cli.command import Command, Option, refuse_if
from shardspec.cli.options import MeshShape
from shardspec.cli.output import path_text, say, say_styled, write_file
from shardspec.errors import InputFileError, LayoutError
from shardspec.families.glance import glance
from shardspec.layout.layout import Layout
from shardspec.layout.picture import Paint, box_rgb
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import bytes_text

if TYPE_CHECKING:
    from shardspec.resharding.plan import ReshardPlan

_MAX_DEVICES: Final = 4096
_LINKS: Final = ("h100-nvswitch", "ib-ndr-per-gpu", "ib-ndr-per-gpu,h100-nvswitch")


@click.command(cls=Command)
@click.argument("spec", metavar="SPEC", required=False)
@opts.mesh
@opts.ids
@opts.shape.but(required=False)
@opts.dtype.but(
    "Element type: bf16, int8, …; by default float32, and bf16 of a model.",
    default=None,
    show_default=False,
)
@model_option.but("Summarize this model, a directory or its config.json, under --layout.")
@layout_option.but(
    "How the model is sharded: hf-tp:N, fsdp:N, megatron:tp=2,ep=4,etp=1,pp=2 or vllm:tp=8,ep=8; "
    "or a checkpoint that says it. Instead, --mesh and --rules may say it."
)
@rule_options
@opts.to.but(
    "Plan the move of the model to this layout or checkpoint: who sends how much, and how long.",
    metavar="LAYOUT",
)
@opts.links
@Option(
    "optimizer",
    "Output",
    "Add the states of this optimizer to the summary of a model.",
    {"type": click.Choice(("adamw",))},
)
@opts.output.but("Write a picture instead: FILE ends in .svg or .html.", required=False)
@opts.overwrite
def show_command(
    spec: str | None,
    mesh: MeshShape | None,
    ids: tuple[int, ...] | None,
    shape: tuple[int, ...] | None,
    dtype: str | None,
    model: Path | None,
    layout: str | None,
    rules: dict[str, str] | None,
    to: str | None,
    links: opts.ClusterLinks | None,
    optimizer: str | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Show which devices hold which part of a tensor that is sharded as SPEC, or of a model.

    In a terminal every box has its own color; piped output is plain.

    Examples:
      shardspec show "[S01,R]" --mesh 2x2 --shape 4x4
      shardspec show --model Qwen3-30B-A3B/ --layout megatron:tp=2,pp=2,ep=4 --optimizer adamw
      shardspec show --model Qwen3-8B/ --layout megatron:tp=4,pp=2 --to vllm:tp=8
      shardspec show "[S(tp),S(dp)]" --mesh dp=2,tp=4 --shape 1001x64 -o layout.svg
      shardspec show "[S0,S1,S2]" --mesh 2x2x2 --shape 4x4x5 -o layout.html
    """
    if any(value is not None for value in (model, layout, rules, to, links, optimizer)):
        refuse_if(
            model is None or any(x is not None for x in (spec, shape, output)),
            "a model is shown by --model and --layout, without SPEC, --shape and -o",
        )
        refuse_if(
            (layout is None) == (rules is None) or (rules is not None and mesh is None),
            "give either --layout, or --rules and --mesh",
        )
        refuse_if(links is not None and to is None, "--links price a move; give --to")
        assert model is not None
        devices = None if mesh is None else opts.plain_mesh(mesh, ids)
        try:
            layouts = _layouts(model, layout, rules, devices, dtype or "bfloat16")
            text = str(glance(layouts, optimizer=optimizer or ""))
            if to is not None:
                other = _layouts(model, to, None, None, dtype or "bfloat16")
                text += f"\n\nto {to}: {_move(model, layouts, other, (layout, to), links)}"
            say(text)
        except LayoutError as error:
            raise InputFileError(f"{path_text(model)}: ", *error.parts) from None
        return
    if spec is None or mesh is None or shape is None:
        raise click.UsageError("give SPEC, --mesh and --shape; or --model and --layout")
    _check_devices(mesh, _MAX_DEVICES)
    sharded = Layout(opts.plain_mesh(mesh, ids), spec, shape, dtype or "float32")
    if output is None:
        say_styled(sharded.drawing().text(_paint()))
        wide = max(map(len, sharded.picture().splitlines()))
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
    drawing = sharded.drawing()
    drawn = drawing.svg() if output.suffix == ".svg" else drawing.html()
    write_file(output, drawn, overwrite=overwrite)
    say(f"{path_text(output)}: {sharded.title}")


def _layouts(
    model: Path,
    layout: str | None,
    rules: dict[str, str] | None,
    devices: DeviceMesh | None,
    dtype: str,
) -> Mapping[str, Layout]:
    """Return the layouts of a model: by a named layout, by rules, or as in a checkpoint."""
    from shardspec.checkpoint.catalog import OutputTensor
    from shardspec.checkpoint.convert.layout import layouts_by_rules, layouts_like
    from shardspec.checkpoint.open import open_checkpoint
    from shardspec.families.layouts import model_layouts

    if layout is not None and not Path(layout).exists():
        return model_layouts(model, layout, device_mesh=devices, dtype=dtype)
    if layout is not None:
        source = open_checkpoint(layout)
        outlines = map(source.outline, source.names)
        tensors = [OutputTensor(at.name, at.name, at.shape, at.dtype) for at in outlines]
        return layouts_like(source, tensors)[1]
    assert devices is not None
    whole = model_layouts(model, "fsdp:1", dtype=dtype).items()
    tensors = [OutputTensor(name, name, at.global_shape, at.dtype) for name, at in whole]
    return layouts_by_rules(devices, rules or {}, tensors)


def _move(
    model: Path,
    source: Mapping[str, Layout],
    target: Mapping[str, Layout],
    texts: tuple[str | None, str],
    links: opts.ClusterLinks | None,
) -> "ReshardPlan":
    """Return the plan that moves a model from one layout to another; `texts` name the two."""
    from shardspec.checkpoint.convert.model_names import model_names
    from shardspec.checkpoint.job.plan import plan_reshard
    from shardspec.families.layouts import padded_config, parse_layout

    names = None
    if source.keys() != target.keys():
        names = model_names(model, parse_layout(texts[1]).place)
        for text in texts:
            if text is not None and not Path(text).exists():
                names = replace(names, config=padded_config(names.config, parse_layout(text)))
    presets = links.names if links is not None else ()
    refuse_if(links is not None and not presets, "--links with --to takes names of presets only")
    cluster = presets[0] if len(presets) == 1 else presets or None
    return plan_reshard(source, target, names=names, links=cluster)


def _paint() -> Paint:
    """Return a function that colors the text of a box, with the colors of this terminal.

    Click removes them if stdout is not a terminal.
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda _box, text: text
    # Terminals with more than 256 colors set this; others show arbitrary colors.
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
    refuse_if(devices > limit, text)


@click.command(cls=Command)
@opts.mesh.but(
    "A mesh to pick, 2x4 or dp=2,tp=4; may be given several times.",
    multiple=True,
    default=("4", "2x2", "2x4"),
    show_default=True,
)
@opts.shape.but(
    "A tensor to pick, of 1 to 3 dims; may be given several times.",
    required=False,
    multiple=True,
    default=("4096x4096", "64x64", "6x7"),
    show_default=True,
)
@opts.links.but(
    "Links to pick, one preset for all axes or one per axis; may be given several times. "
    f"'shardspec links list' lists them.  [default: {', then '.join(_LINKS)}]",
    multiple=True,
    type=opts.PRESET_NAMES,
)
@opts.dtype.but(default="bfloat16")
@opts.output.but("Write the page here.")
@opts.overwrite
def explore_command(
    mesh: tuple[MeshShape, ...],
    shape: tuple[tuple[int, ...], ...],
    links: tuple[tuple[str, ...], ...],
    dtype: str,
    output: Path,
    overwrite: bool,
) -> None:
    """Write an HTML page that shows the plan of any chosen conversion step by step.

    The page has the plans between all layouts of the meshes and tensors, including pending sums,
    the next best plans and the naive plan. It opens in any browser without a network. Limits are 32
    devices a mesh, 3 dims a tensor and 50,000 conversions.

    Examples:
      shardspec explore -o page.html
      shardspec explore --mesh dp=2,tp=4 --shape 4096x1024 --dtype bf16 -o page.html
      shardspec explore --mesh 2x2x2 --shape 8x8 --links tpu-v5e --links tpu-v5p -o page.html
    """
    from shardspec.explorer import MAX_PAGE_DEVICES, explorer_page

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
