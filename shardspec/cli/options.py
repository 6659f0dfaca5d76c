"""Arguments and options of commands: declared as defaults of parameters; click's are made of them.

A parameter that has no default is a dataclass, of options that several commands share, declared as
defaults of its fields.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, get_args

import click

from shardspec.cli.arguments import (
    DTYPE,
    FILE,
    IDS,
    MESH,
    PRESETS,
    SIZES,
    Kind,
    MeshShape,
    parse_memory,
    parse_numbers,
)
from shardspec.comm.cost import CostModel
from shardspec.comm.presets import DEFAULT_PRESET, preset_copy_s
from shardspec.errors import CheckpointError, DTypeError, ProfileError
from shardspec.mesh import DeviceMesh, LinkModel

if TYPE_CHECKING:
    from shardspec.profiling.profile import Profile

T = TypeVar("T")

Declared: TypeAlias = Any
"""Stands where a dataclass has the default of a field, whatever the field's type."""
_Kind: TypeAlias = "Kind | click.ParamType[Any] | str"
"""What is read, or what click reads; text stands for any text, by its name in the help."""
_ForClick: TypeAlias = Any


def argument(kind: Kind | str, **more: _ForClick) -> Declared:
    """Declare a field as an argument; `more` is click's."""
    return field(metadata={"click": lambda name: click.Argument([name], **_typed(kind), **more)})


def option(kind: _Kind, text: str, *names: str, **more: _ForClick) -> Declared:
    """Declare a field as an option, called as the field is unless names are given."""

    def made(name: str) -> click.Parameter:
        called = names or (f"--{name.replace('_', '-')}",)
        return click.Option([name, *called], help=text, **_typed(kind), **more)

    default = more.get("default", () if more.get("multiple") else None)
    return field(default=default, metadata={"click": made})


def _typed(kind: _Kind) -> dict[str, Any]:
    """Return the arguments by which click is told of a kind."""
    if isinstance(kind, str):
        return {"metavar": kind}
    if not isinstance(kind, Kind):
        return {"type": kind}
    path = {"type": click.Path()} if kind.completed else {}
    return {"metavar": kind.name, "callback": partial(_read, kind.read), **path}


def _read(
    read: Callable[[Any], object], ctx: click.Context, param: click.Parameter, value: _ForClick
) -> object:
    """Read what was given; an error names the argument."""
    if value is None:
        return None
    try:
        return tuple(map(read, value)) if param.multiple else read(value)
    except (CheckpointError, ProfileError):
        raise  # of another exit code: about what is named, not about how
    except (ValueError, DTypeError) as error:
        raise click.BadParameter(str(error), ctx, param) from None


def flag(text: str, *names: str) -> Declared:
    """Declare a field as an option without a value, which makes it true."""
    return option(click.BOOL, text, *names, is_flag=True, default=False)


def unless(text: str) -> Declared:
    """Declare a field that is true unless there is the option of its name after ``--no-``."""

    def made(name: str) -> click.Parameter:
        return click.Option([name, f"--no-{name}"], help=text, flag_value=False, default=True)

    return field(default=True, metadata={"click": made})


def command(run: Callable[..., None]) -> click.Command:
    """Make a command of a function ``name_command``, whose parameters are declared as above.

    What its docstring says from "Examples:" on stands below the options in the help.
    """
    text, _, examples = (inspect.getdoc(run) or "").partition("\n\nExamples:\n")
    paragraphs = f"Examples:\n{examples}".split("\n\n")
    parameters = inspect.signature(run).parameters.values()
    declared = {p.name: p.annotation if p.default is p.empty else p.default for p in parameters}
    return click.Command(
        run.__name__.removesuffix("_command").replace("_", "-"),
        params=list(_parameters(declared)),
        callback=lambda **given: run(**_filled(declared, given)),
        help=text,
        epilog="\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs),
    )


_Declarations: TypeAlias = Mapping[str, Declared]
"""Name to a declared field, or to a dataclass of more of them."""


def _parameters(declared: _Declarations) -> Iterator[click.Parameter]:
    for name, one in declared.items():
        if isinstance(one, Field):
            yield one.metadata["click"](name)
        else:
            yield from _parameters(_members(one))


def _members(kind: type[Any]) -> _Declarations:
    return {one.name: one if "click" in one.metadata else one.type for one in fields(kind)}


def _filled(declared: _Declarations, given: Mapping[str, object]) -> dict[str, object]:
    """Return what click has found, that of a dataclass as one value."""
    return {
        name: given[name] if isinstance(one, Field) else one(**_filled(_members(one), given))
        for name, one in declared.items()
    }


# Options that several commands have


def json_flag(text: str = "Print JSON.") -> Declared:
    """Declare the option to print JSON."""
    return flag(text, "--json")


def overwrite_flag() -> Declared:
    """Declare the option to replace an output."""
    return flag("Replace the output if it exists.", "--overwrite", "--force")


def output_option(text: str, kind: Kind = FILE, **more: _ForClick) -> Declared:
    """Declare the option that names the file to write."""
    return option(kind, text, "-o", "--output", **more)


_MESH_HELP: Final = "Devices along each axis, outermost first: 2x4, or with names dp=2,tp=4"


def mesh_option() -> Declared:
    """Declare the option for the mesh that a command is about."""
    return option(MESH, f"{_MESH_HELP}.", required=True)


def ids_option() -> Declared:
    """Declare the option for the ids of a mesh."""
    text = "Physical ids in row-major order, 3,1,0,2; counted from 0 if left out."
    return option(IDS, text)


def dtype_option(default: str = "float32") -> Declared:
    """Declare the option for an element type."""
    text = "Element type: bf16, float32, int8, …"
    return option(DTYPE, text, default=default, show_default=True)


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """What a tensor is like."""

    shape: tuple[int, ...] = option(
        SIZES, 'Sizes of the whole tensor: 4096x4096; "" for a scalar.', required=True
    )
    dtype: str = dtype_option()


def _read_profile(path: str) -> "Profile":
    from shardspec.profiling.profile import Profile

    return Profile.load(Path(path))


def plain_mesh(mesh: MeshShape, ids: tuple[int, ...] | None = None) -> DeviceMesh:
    """Return a mesh without links; its ids are counted from 0 unless they are given."""
    shape, names = mesh
    return DeviceMesh(range(math.prod(shape)) if ids is None else ids, shape, axis_names=names)


_SECONDS: Final = Kind("SECONDS", parse_numbers)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A mesh, and its links."""

    mesh: MeshShape | None = option(MESH, f"{_MESH_HELP}; that of the profile if left out.")
    ids: tuple[int, ...] | None = ids_option()
    alpha: tuple[float, ...] | None = option(
        _SECONDS, "Start-up latency of a message, per axis (1e-5,3e-6) or one for all."
    )
    beta: tuple[float, ...] | None = option(
        _SECONDS, "Transfer time of a byte, per axis or one for all; 4e-11 is 25 GB/s."
    )
    links: tuple[str, ...] | None = option(
        PRESETS,
        "Known links in place of --alpha and --beta, per axis or one for all: "
        "ib-ndr-per-gpu,h100-nvswitch. 'shardspec presets' lists them.",
    )
    link_model: LinkModel | None = option(
        click.Choice(get_args(LinkModel)),
        "Each group has links of its own (ring, the default), or all devices share one bus.",
    )
    memory: float | None = option(
        Kind("RATE", parse_memory),
        "The rate of a device's memory in 10^9 bytes a second, by which local copies are "
        "priced: 'preset', that of --links (the default where it is known), or 'none'.",
    )
    profile: "Profile | None" = option(
        Kind("FILE", _read_profile, completed=True),
        "Links as 'shardspec profile' measured them, in place of --alpha, --beta, --links "
        "and --link-model.",
    )

    def build(self) -> tuple[DeviceMesh, CostModel]:
        """Return the mesh, and the cost model of its links.

        Options that contradict each other or leave something open are a `click.UsageError`.
        """
        mesh, links = self._mesh(), self.links
        if (self.alpha is None) != (self.beta is None):
            raise click.UsageError("give both --alpha and --beta, or neither")
        shape, names = mesh
        devices = DeviceMesh(
            range(math.prod(shape)) if self.ids is None else self.ids,
            shape,
            mesh_alpha=_per_axis("--alpha", self.alpha, len(shape)),
            mesh_beta=_per_axis("--beta", self.beta, len(shape)),
            axis_names=names,
            link_model=self.link_model or "ring",
        )
        if self.alpha is not None and links is not None:
            raise click.UsageError("give --links, or --alpha and --beta, not both")
        per_axis = _per_axis("--links", links, len(shape))
        if self.profile is not None:
            model = self.profile.cost_model
        elif per_axis is None:
            model = CostModel.of_mesh(devices)
        else:
            model = CostModel.from_presets(devices, per_axis)
        if self.memory is None:
            return devices, model
        if self.memory:
            return devices, replace(model, copy_s=2 / (self.memory * 1e9))
        known = links or ((DEFAULT_PRESET,) if self.alpha is None else ())
        if not known:
            raise click.UsageError("--memory preset is for --links; give the rate in GB/s")
        return devices, replace(model, copy_s=preset_copy_s(known))

    def _mesh(self) -> MeshShape:
        """Return the shape and names of the mesh, that of the profile if there is one."""
        profile = self.profile
        if profile is None:
            if self.mesh is None:
                raise click.UsageError("give --mesh, or --profile with the profile of a mesh")
            return self.mesh
        if self.links is not None:
            raise click.UsageError("give --links or --profile, not both")
        if (self.alpha, self.beta, self.link_model) != (None, None, None):
            raise click.UsageError(
                "--profile has measured links; leave out --alpha, --beta and --link-model"
            )
        if self.mesh is not None and self.mesh[0] != profile.mesh_shape:
            raise click.UsageError(
                f"--mesh has the shape {'x'.join(map(str, self.mesh[0]))}, but the profile was "
                f"measured on {'x'.join(map(str, profile.mesh_shape))}; leave out --mesh, or "
                "measure again"
            )
        if self.memory is not None:
            raise click.UsageError(
                "--profile has timed steps with their copies; leave out --memory"
            )
        return self.mesh or (profile.mesh_shape, profile.axis_names)


def _per_axis(name: str, values: tuple[T, ...] | None, axes: int) -> tuple[T, ...] | None:
    """Return a value for each axis, of as many or of one for all."""
    if values is None or len(values) == axes:
        return values
    if len(values) == 1:
        return values * axes
    raise click.UsageError(
        f"{name} has {len(values)} values for {axes} {'axis' if axes == 1 else 'axes'}; give one "
        "per axis, or one for all"
    )
