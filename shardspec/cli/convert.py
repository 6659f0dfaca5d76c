"""The command `shardspec convert`."""

import json
from collections.abc import Callable
from typing import Final, TypeAlias

import click

from shardspec.cli.arguments import MeshShape
from shardspec.cli.options import json_option, mesh_option, plain_mesh, shape_option
from shardspec.cli.output import say
from shardspec.errors import LossyConversionError
from shardspec.interop.jax_specs import partition_spec_text
from shardspec.interop.other_specs import sbp_text, shardy_mesh_text, shardy_text, to_colossal
from shardspec.interop.torch_placements import placements_text
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import printable

__all__ = ["command"]

_Shape: TypeAlias = tuple[int, ...] | None
_Words: TypeAlias = Callable[[str, DeviceMesh, _Shape], str]

_LANGUAGES: Final[dict[str, _Words]] = {
    "torch": lambda spec, mesh, _: placements_text(spec, mesh),
    "jax": partition_spec_text,
    "shardy": lambda spec, mesh, _: f"{shardy_text(spec, mesh)}   {shardy_mesh_text(mesh)}",
    "oneflow": lambda spec, mesh, _: sbp_text(spec, mesh),
    "colossal": lambda spec, mesh, _: str(to_colossal(spec, mesh)),
}


@click.command(
    "convert",
    epilog="""\b
Examples:
  shardspec convert "[S10,R]" --mesh x=2,y=2
  shardspec convert "[S(x),R|P(y)]" --mesh x=2,y=2 --to jax
  shardspec convert "[S01,R]" --mesh x=2,y=4 --to jax --shape 4096x4096
""",
)
@click.argument("spec", metavar="SPEC")
@mesh_option
@click.option(
    "--to",
    "language",
    type=click.Choice(list(_LANGUAGES)),
    help="Whose words; all of them if left out.",
)
@shape_option("Sizes of the tensor, 4096x4096, to find out whether they can be cut so.")
@json_option()
def command(spec: str, mesh: MeshShape, language: str | None, shape: _Shape, as_json: bool) -> None:
    """Say the spec SPEC in the words of other libraries.

    Where a library has no word for a part of it, this says so; nothing is approximated.
    """
    devices = plain_mesh(mesh)
    if shape is not None:
        Layout(devices, spec, shape, "float32")  # the spec must fit the tensor
    if language is not None:
        text = _LANGUAGES[language](spec, devices, shape)
        say(json.dumps({language: text}) if as_json else text)
        return
    said: dict[str, str | None] = {}
    reasons = {}
    for name, words in _LANGUAGES.items():
        try:
            said[name] = words(spec, devices, shape)
        except LossyConversionError as error:
            said[name], reasons[name] = None, str(error)
    if as_json:
        say(json.dumps({**said, "refused": reasons}))
        return
    for name, found in said.items():
        text = printable(found or f"– {reasons[name]}")
        click.echo(f"{name:<10}{text if found else click.style(text, dim=True)}")
