"""Options that commands share, each written once, and what they stand for.

A command takes what a group of options adds as ``**options`` and hands it on as it is: the names
are those of the functions here, or those that `merge` and `reshard` give their parameters.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack, get_args

import click

from shardspec.cli.arguments import (
    MeshShape,
    parse_ids,
    parse_memory,
    parse_mesh,
    parse_numbers,
    parse_shape,
    parsed,
)
from shardspec.comm.cost import CostModel
from shardspec.comm.presets import DEFAULT_PRESET, link_preset, preset_copy_s
from shardspec.dtypes import dtype_name
from shardspec.mesh import DeviceMesh, LinkModel

if TYPE_CHECKING:
    from shardspec.profiling.profile import Profile

__all__ = [
    "ClusterOptions",
    "Command",
    "build_cluster",
    "cluster_options",
    "dtype_option",
    "file_output",
    "ids_option",
    "json_option",
    "mesh_option",
    "overwrite_option",
    "parse_links",
    "plain_mesh",
    "shape_option",
    "tensor_options",
    "together",
]

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return what adds several options to a command, in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def json_option(what: str = "Print JSON.") -> Callable[[Command], Command]:
    """Return the option to print JSON."""
    return click.option("--json", "as_json", is_flag=True, help=what)


# Meshes, tensors and links

_MESH_HELP: Final = "Devices along each axis, outermost first: 2x4, or with names dp=2,tp=4"

mesh_option = click.option(
    "--mesh", required=True, callback=parsed(parse_mesh), metavar="SHAPE", help=f"{_MESH_HELP}."
)
ids_option = click.option(
    "--ids",
    callback=parsed(parse_ids),
    metavar="IDS",
    help="Physical ids in row-major order, 3,1,0,2; counted from 0 if left out.",
)


def shape_option(what: str, *, required: bool = False) -> Callable[[Command], Command]:
    """Return the option for the sizes of a tensor."""
    return click.option(
        "--shape", required=required, callback=parsed(parse_shape), metavar="SIZES", help=what
    )


def dtype_option(default: str = "float32") -> Callable[[Command], Command]:
    """Return the option for an element type."""
    return click.option(
        "--dtype",
        default=default,
        show_default=True,
        callback=parsed(dtype_name),
        metavar="NAME",
        help="Element type: bf16, float32, int8, …",
    )


tensor_options = together(
    shape_option('Sizes of the whole tensor: 4096x4096; "" for a scalar.', required=True),
    dtype_option(),
)


def plain_mesh(mesh: MeshShape, ids: tuple[int, ...] | None = None) -> DeviceMesh:
    """Return a mesh without links.

    Examples
    --------
    >>> str(plain_mesh(((2, 2), ("dp", "tp"))))
    'dp=2,tp=2'
    """
    shape, names = mesh
    return DeviceMesh(range(math.prod(shape)) if ids is None else ids, shape, axis_names=names)


def parse_links(text: str) -> tuple[str, ...]:
    """Read names of link presets, separated by commas.

    Raises
    ------
    MeshError
        If one is not known.

    Examples
    --------
    >>> parse_links("ib-ndr-per-gpu,h100-nvswitch")
    ('ib-ndr-per-gpu', 'h100-nvswitch')
    """
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        link_preset(name)
    return names


def _read_profile(_: click.Context, __: click.Parameter, path: Path | None) -> "Profile | None":
    if path is None:
        return None
    from shardspec.profiling.profile import Profile

    return Profile.load(path)


class ClusterOptions(TypedDict):
    """What `cluster_options` adds."""

    mesh: MeshShape | None
    ids: tuple[int, ...] | None
    alpha: tuple[float, ...] | None
    beta: tuple[float, ...] | None
    links: tuple[str, ...] | None
    link_model: LinkModel | None
    memory: float | None
    profile: "Profile | None"


cluster_options = together(
    click.option(
        "--mesh",
        callback=parsed(parse_mesh),
        metavar="SHAPE",
        help=f"{_MESH_HELP}; that of the profile if left out.",
    ),
    ids_option,
    click.option(
        "--alpha",
        callback=parsed(parse_numbers),
        metavar="SECONDS",
        help="Start-up latency of a message, per axis (1e-5,3e-6) or one for all.",
    ),
    click.option(
        "--beta",
        callback=parsed(parse_numbers),
        metavar="SECONDS",
        help="Transfer time of a byte, per axis or one for all; 4e-11 is 25 GB/s.",
    ),
    click.option(
        "--links",
        callback=parsed(parse_links),
        metavar="PRESETS",
        help="Known links in place of --alpha and --beta, per axis or one for all: "
        "ib-ndr-per-gpu,h100-nvswitch. 'shardspec presets' lists them.",
    ),
    click.option(
        "--link-model",
        type=click.Choice(get_args(LinkModel)),
        help="Each group has links of its own (ring, the default), or all devices share one bus.",
    ),
    click.option(
        "--memory",
        callback=parsed(parse_memory),
        metavar="RATE",
        help="The rate of a device's memory in 10^9 bytes a second, by which local copies are "
        "priced: 'preset', that of --links (the default where it is known), or 'none'.",
    ),
    click.option(
        "--profile",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_read_profile,
        metavar="FILE",
        help="Links as 'shardspec profile' measured them, in place of --alpha, --beta, --links "
        "and --link-model.",
    ),
)


def build_cluster(**options: Unpack[ClusterOptions]) -> tuple[DeviceMesh, CostModel]:
    """Return the mesh that options describe, and the cost model of its links.

    Raises
    ------
    click.UsageError
        If there is neither a mesh nor a profile, or both and they differ; if links are given in
        two ways, or their number is not that of the axes.
    MeshError
        If ids repeat or do not fill the mesh, or a name is none.

    Examples
    --------
    >>> given = dict.fromkeys(ClusterOptions.__annotations__)
    >>> mesh, model = build_cluster(**{**given, "mesh": ((2, 2), None), "links": ("unit",)})
    >>> mesh.ids, [link.name for link in model.links]
    ((0, 1, 2, 3), ['unit', 'unit'])
    """
    mesh, profile, links = options["mesh"], options["profile"], options["links"]
    alpha, beta, link_model = options["alpha"], options["beta"], options["link_model"]
    if profile is not None:
        if links is not None:
            raise click.UsageError("give --links or --profile, not both")
        if alpha is not None or beta is not None or link_model is not None:
            raise click.UsageError(
                "--profile has measured links; leave out --alpha, --beta and --link-model"
            )
        if mesh is not None and mesh[0] != profile.mesh_shape:
            raise click.UsageError(
                f"--mesh has the shape {'x'.join(map(str, mesh[0]))}, but the profile was measured "
                f"on {'x'.join(map(str, profile.mesh_shape))}; leave out --mesh, or measure again"
            )
        if options["memory"] is not None:
            raise click.UsageError(
                "--profile has timed steps with their copies; leave out --memory"
            )
        mesh = mesh or (profile.mesh_shape, profile.axis_names)
    if mesh is None:
        raise click.UsageError("give --mesh, or --profile with the profile of a mesh")
    shape, names = mesh
    if (alpha is None) != (beta is None):
        raise click.UsageError("give both --alpha and --beta, or neither")
    devices = DeviceMesh(
        range(math.prod(shape)) if options["ids"] is None else options["ids"],
        shape,
        mesh_alpha=None if alpha is None else _per_axis("--alpha", alpha, len(shape)),
        mesh_beta=None if beta is None else _per_axis("--beta", beta, len(shape)),
        axis_names=names,
        link_model=link_model or "ring",
    )
    if alpha is not None and links is not None:
        raise click.UsageError("give --links, or --alpha and --beta, not both")
    if profile is not None:
        model = profile.cost_model
    elif links is None:
        model = CostModel.of_mesh(devices)
    else:
        model = CostModel.from_presets(devices, _per_axis("--links", links, len(shape)))
    if options["memory"] is None:
        return devices, model
    known = links or ((DEFAULT_PRESET,) if alpha is None else ())
    rate = options["memory"] or 0.0
    if not (rate or known):
        raise click.UsageError("--memory preset is for --links; give the rate in GB/s")
    return devices, replace(model, copy_s=2 / (rate * 1e9) if rate else preset_copy_s(known))


def _per_axis(option: str, values: tuple[T, ...], axes: int) -> tuple[T, ...]:
    if len(values) == axes:
        return values
    if len(values) == 1:
        return values * axes
    raise click.UsageError(
        f"{option} has {len(values)} values for {axes} {'axis' if axes == 1 else 'axes'}; give one "
        "per axis, or one for all"
    )


def overwrite_option(name: str = "overwrite") -> Callable[[Command], Command]:
    """Return the option to replace an output."""
    return click.option(
        "--overwrite", "--force", name, is_flag=True, help="Replace the output if it exists."
    )


def file_output(
    what: str,
    read: Callable[[str], Path] | None = None,
    *,
    required: bool = False,
    option: str = "--output",
) -> Callable[[Command], Command]:
    """Return the option that names a file to write."""
    return click.option(
        *(("-o",) if option == "--output" else ()),
        option,
        required=required,
        callback=parsed(read or Path),
        metavar="FILE",
        help=what,
    )
