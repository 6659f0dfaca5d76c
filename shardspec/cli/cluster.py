"""Options that describe a cluster: a mesh, and the links along its axes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, get_args

import click

from shardspec.cli.arguments import MeshShape, parse_ids, parse_mesh, parse_numbers, parsed
from shardspec.comm.cost import FITTED_ERROR, CostModel
from shardspec.comm.presets import link_preset
from shardspec.mesh import DeviceMesh, LinkModel

if TYPE_CHECKING:
    from shardspec.profiling.profile import Profile

__all__ = ["build_mesh", "build_model", "mesh_options", "parse_links"]

T = TypeVar("T")
_Command: TypeAlias = Callable[..., None]


def parse_links(text: str) -> tuple[str, ...]:
    """Read names of link presets, separated by commas.

    Raises
    ------
    ValueError
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


def mesh_options(command: _Command) -> _Command:
    """Give a command the options that `build_mesh` and `build_model` take."""
    options = (
        click.option(
            "--mesh",
            callback=parsed(parse_mesh),
            metavar="SHAPE",
            help="Devices along each axis, outermost first: 2x4, or with names dp=2,tp=4; that of "
            "the profile if left out.",
        ),
        click.option(
            "--ids",
            callback=parsed(parse_ids),
            metavar="IDS",
            help="Physical ids in row-major order, 3,1,0,2; counted from 0 if left out.",
        ),
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
            help="Links of its own for every group (ring, the default), or one bus that all "
            "devices share.",
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
    for option in reversed(options):
        command = option(command)
    return command


def _read_profile(
    ctx: click.Context,  # noqa: ARG001  # named by click
    param: click.Parameter,  # noqa: ARG001
    path: Path | None,
) -> "Profile | None":
    if path is None:
        return None
    from shardspec.profiling.profile import Profile

    return Profile.load(path)


def build_mesh(
    mesh: MeshShape | None,
    ids: tuple[int, ...] | None,
    alpha: tuple[float, ...] | None,
    beta: tuple[float, ...] | None,
    link_model: LinkModel | None,
    profile: "Profile | None" = None,
) -> DeviceMesh:
    """Return the mesh that the options of `mesh_options` describe.

    Raises
    ------
    click.UsageError
        If only one of alpha and beta is given, or their number does not fit; if there is neither
        a mesh nor a profile, or both and they differ, or links beside a profile.
    MeshError
        If ids repeat or do not fill the mesh, or a name is none.

    Examples
    --------
    >>> mesh = build_mesh(((2, 2), None), (3, 1, 0, 2), (1e-5,), (4e-11, 3e-12), "ring")
    >>> mesh.ids, mesh.mesh_alpha
    ((3, 1, 0, 2), (1e-05, 1e-05))
    """
    if profile is not None:
        if alpha is not None or beta is not None or link_model is not None:
            raise click.UsageError(
                "--profile has measured links; leave out --alpha, --beta and --link-model"
            )
        if mesh is not None and mesh[0] != profile.mesh_shape:
            raise click.UsageError(
                f"--mesh has the shape {'x'.join(map(str, mesh[0]))}, but the profile was measured "
                f"on {'x'.join(map(str, profile.mesh_shape))}; leave out --mesh, or measure again"
            )
        mesh = mesh or (profile.mesh_shape, profile.axis_names)
    if mesh is None:
        raise click.UsageError("give --mesh, or --profile with the profile of a mesh")
    shape, names = mesh
    if (alpha is None) != (beta is None):
        raise click.UsageError("give both --alpha and --beta, or neither")
    return DeviceMesh(
        range(math.prod(shape)) if ids is None else ids,
        shape,
        mesh_alpha=None if alpha is None else _per_axis("--alpha", alpha, len(shape)),
        mesh_beta=None if beta is None else _per_axis("--beta", beta, len(shape)),
        axis_names=names,
        link_model=link_model or "ring",
    )


def build_model(
    mesh: DeviceMesh, links: tuple[str, ...] | None, profile: "Profile | None" = None
) -> CostModel:
    """Return the cost model of a mesh: with presets or measured links, or else its own.

    Raises
    ------
    click.UsageError
        If links are given in two ways, or the number of presets does not fit.

    Examples
    --------
    >>> model = build_model(DeviceMesh(range(8), (2, 4)), ("ib-ndr-per-gpu", "h100-nvswitch"))
    >>> [link.name for link in model.links]
    ['ib-ndr-per-gpu', 'h100-nvswitch']
    """
    if profile is not None:
        if links is not None:
            raise click.UsageError("give --links or --profile, not both")
        return profile.cost_model
    if links is None:
        return CostModel.of_mesh(mesh)
    if mesh.mesh_alpha is not None:
        raise click.UsageError("give --links, or --alpha and --beta, not both")
    names = _per_axis("--links", links, mesh.ndim)
    presets = tuple(map(link_preset, names, mesh.shape))
    return CostModel(mesh.shape, presets, mesh.link_model, FITTED_ERROR)


def _per_axis(option: str, values: tuple[T, ...], axes: int) -> tuple[T, ...]:
    if len(values) == axes:
        return values
    if len(values) == 1:
        return values * axes
    raise click.UsageError(
        f"{option} has {len(values)} values for {axes} {'axis' if axes == 1 else 'axes'}; give one "
        "per axis, or one for all"
    )
