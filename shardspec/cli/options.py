"""Arguments and options of commands: read from text, and declared as defaults of parameters.

A parameter without a default is a dataclass of options that several commands share, declared as
defaults of its fields.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, get_args

import click

from shardspec.comm.cost import CostModel
from shardspec.comm.presets import DEFAULT_PRESET, link_preset, preset_copy_s
from shardspec.comm.profile_file import ProfileFile, read_profile
from shardspec.dtypes import dtype_name
from shardspec.errors import CheckpointError, DTypeError, ProfileError
from shardspec.mesh import DeviceMesh, LinkModel
from shardspec.text import shown

T = TypeVar("T")
MeshShape: TypeAlias = tuple[tuple[int, ...], tuple[str, ...] | None]
"""Devices along each axis, and the names of the axes where they have any."""
Declared: TypeAlias = Any
"""The default of a field that declares an option, whatever the field's type."""

MAX_DEVICES: Final = 2**20
"""A larger mesh is taken for a typing error; its ids alone would fill the memory."""
_MAX_SIZE: Final = 2**63 - 1
_UNITS: Final[Mapping[str, int]] = {"": 1, "b": 1} | {
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}


def parse_mesh(text: str) -> MeshShape:
    """Read a mesh: sizes as in ``2x4``, or named axes as in ``dp=2,tp=4``."""
    names: tuple[str, ...] | None = None
    sizes = text.lower().split("x")
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        names = tuple(name.strip() for name, _, _ in pairs)
        sizes = [size for _, _, size in pairs]
    shape = _whole_numbers(
        "mesh", "give sizes as in 2x4, or named axes as in dp=2,tp=4", text, sizes
    )
    if math.prod(shape) > MAX_DEVICES:
        raise ValueError(f"mesh {shown(text)} has more than {MAX_DEVICES:,} devices")
    return shape, names


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a tensor's shape as in ``4096x1024``; an empty text is a scalar."""
    if not text.strip():
        return ()
    remedy = 'give sizes as in 4096x4096, or "" for a scalar'
    shape = _whole_numbers("shape", remedy, text, text.lower().split("x"))
    if math.prod(size for size in shape if size) > _MAX_SIZE:
        raise ValueError(f"shape {shown(text)} has more elements than a tensor can have, 2^63 - 1")
    return shape


def parse_numbers(text: str) -> tuple[float, ...]:
    """Read finite numbers from 0, separated by commas."""
    numbers = []
    for part in map(str.strip, text.split(",")):
        try:
            number = float(part)
        except ValueError:
            raise ValueError(f"{shown(part)} is not a number; give them as in 1e-5,3e-6") from None
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{shown(part)} must be finite and not negative")
        numbers.append(number)
    return tuple(numbers)


def parse_links(text: str) -> tuple[str, ...]:
    """Read names of link presets, separated by commas; `MeshError` if one is not known."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        link_preset(name)
    return names


def parse_bytes(text: str) -> int:
    """Read a size in bytes, perhaps with a unit of 1,000 or of 1,024: ``64MiB``, ``1.5 kB``."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(
            f"{shown(text)} is not a size; give bytes as in 1000000, or as in 64MiB or 1.5GB"
        )
    return math.floor(float(found[1]) * _UNITS[found[2].lower()])


def _memory_rate(text: str) -> float:
    """Read a rate above 0 in GB/s; 0.0 for ``preset``, infinity for ``none``."""
    if text in ("preset", "none"):
        return 0.0 if text == "preset" else math.inf
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"{shown(text)}: give a rate above 0 in GB/s, 'preset' or 'none'")
    return rate


def _whole_numbers(
    what: str, remedy: str, text: str, parts: list[str] | None = None
) -> tuple[int, ...]:
    numbers = []
    for digits in map(str.strip, text.split(",") if parts is None else parts):
        # int() also takes '1_000' and digits of other scripts, and refuses thousands of digits.
        if not (digits.isascii() and digits.isdecimal()):
            raise ValueError(
                f"{what} {shown(text)}: {shown(digits)} is not a whole number; {remedy}"
            )
        if len(digits) > len(str(_MAX_SIZE)) or int(digits) > _MAX_SIZE:
            raise ValueError(
                f"{what} {shown(text)}: {digits[:24]} is too large, the limit is 2^63 - 1"
            )
        numbers.append(int(digits))
    return tuple(numbers)


class Kind(NamedTuple):
    """What an argument is."""

    name: str
    """As help calls it."""
    read: Callable[[Any], object]
    """Reads its text; a `ValueError` says what is wrong."""
    is_file: bool = False
    """Whether shells may complete it to the name of a file."""


BYTES: Final = Kind("SIZE", parse_bytes)
FILE: Final = Kind("FILE", Path)
IDS: Final = Kind("IDS", partial(_whole_numbers, "ids", "give them as in 3,1,0,2"))
MESH: Final = Kind("SHAPE", parse_mesh)
PRESETS: Final = Kind("PRESETS", parse_links)
SHAPE: Final = Kind("SIZES", parse_shape)
INDEX: Final = Kind(
    "I,J,…",
    partial(
        _whole_numbers, "index", "give one position for each of the first dims, as in 17 or 3,0"
    ),
)


def argument(kind: Kind | str, **more: Declared) -> Declared:
    """Declare a field as an argument; `more` is for click."""
    return field(metadata={"click": lambda name: click.Argument([name], **_typed(kind), **more)})


def option(
    kind: Kind | click.ParamType[Any] | str, text: str, *names: str, **more: Declared
) -> Declared:
    """Declare a field as an option, called as the field is unless names are given."""

    def made(name: str) -> click.Parameter:
        called = names or (f"--{name.replace('_', '-')}",)
        return click.Option([name, *called], help=text, **_typed(kind), **more)

    default = more.get("default", () if more.get("multiple") else None)
    return field(default=default, metadata={"click": made})


def flag(text: str, *names: str) -> Declared:
    """Declare a field as an option without a value, which makes it true."""
    return option(click.BOOL, text, *names, is_flag=True, default=False)


def unless(text: str) -> Declared:
    """Declare a field that is true unless there is the option of its name after ``--no-``."""

    def made(name: str) -> click.Parameter:
        return click.Option([name, f"--no-{name}"], help=text, flag_value=False, default=True)

    return field(default=True, metadata={"click": made})


def _typed(kind: Kind | click.ParamType[Any] | str) -> dict[str, Any]:
    """Return click's arguments for a kind; text stands for any text, by its name in the help."""
    if isinstance(kind, str):
        return {"metavar": kind}
    if not isinstance(kind, Kind):
        return {"type": kind}

    def read(ctx: click.Context, param: click.Parameter, value: Declared) -> object:
        if value is None:
            return None
        try:
            return tuple(map(kind.read, value)) if param.multiple else kind.read(value)
        except (CheckpointError, ProfileError):
            raise  # of another exit code: what is named is bad, not how
        except (ValueError, DTypeError) as error:
            raise click.BadParameter(str(error), ctx, param) from None

    path = {"type": click.Path()} if kind.is_file else {}
    return {"metavar": kind.name, "callback": read, **path}


def command(run: Callable[..., None]) -> click.Command:
    """Make a command of a function ``name_command``, whose parameters are declared as above.

    What its docstring says from "Examples:" on is printed below the options in the help.
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
    """Return the values from click, those of a dataclass as one value."""
    return {
        name: given[name] if isinstance(one, Field) else one(**_filled(_members(one), given))
        for name, one in declared.items()
    }


def refuse_if(wrong: bool, text: str) -> None:
    """Raise `click.UsageError` if options do not go together."""
    if wrong:
        raise click.UsageError(text)


# Options that several commands have


def json_flag(text: str = "Print JSON.") -> Declared:
    """Declare the option to print JSON."""
    return flag(text, "--json")


def overwrite_flag() -> Declared:
    """Declare the option to replace an output."""
    return flag("Replace the output if it exists.", "--overwrite", "--force")


def output_option(text: str, kind: Kind | str = FILE, **more: Declared) -> Declared:
    """Declare the option that names the output."""
    return option(kind, text, "-o", "--output", **more)


def mesh_option(more: str = "", **required: bool) -> Declared:
    """Declare the option for the mesh that a command is about."""
    text = "Devices along each axis, outermost first: 2x4, or with names dp=2,tp=4"
    return option(MESH, f"{text}{more}.", **required)


def ids_option() -> Declared:
    """Declare the option for the ids of a mesh."""
    return option(IDS, "Physical ids in row-major order, 3,1,0,2; counted from 0 if left out.")


def dtype_option(default: str = "float32") -> Declared:
    """Declare the option for an element type."""
    kind = Kind("NAME", dtype_name)
    return option(kind, "Element type: bf16, float32, int8, …", default=default, show_default=True)


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...] = option(
        SHAPE, 'Sizes of the global tensor: 4096x4096; "" for a scalar.', required=True
    )
    dtype: str = dtype_option()


def plain_mesh(mesh: MeshShape, ids: tuple[int, ...] | None = None) -> DeviceMesh:
    """Return a mesh without links; its ids are counted from 0 unless they are given."""
    shape, names = mesh
    return DeviceMesh(range(math.prod(shape)) if ids is None else ids, shape, axis_names=names)


_SECONDS: Final = Kind("SECONDS", parse_numbers)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A mesh, and its links."""

    mesh: MeshShape | None = mesh_option("; that of the profile if left out")
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
        Kind("RATE", _memory_rate),
        "The rate of a device's memory in 10^9 bytes a second, by which local copies are "
        "priced: 'preset', that of --links (the default where it is known), or 'none'.",
    )
    profile: ProfileFile | None = option(
        Kind("FILE", read_profile, is_file=True),
        "Links as 'shardspec profile' measured them, in place of --alpha, --beta, --links "
        "and --link-model.",
    )

    def build(self) -> tuple[DeviceMesh, CostModel]:
        """Return the mesh, and the cost model of its links.

        Options that contradict each other or leave something open are a `click.UsageError`.
        """
        profile, links, given = self.profile, self.links, self.mesh
        own = (self.alpha, self.beta, self.link_model) != (None, None, None)
        if profile is not None:
            measured = profile.mesh.shape, profile.mesh.axis_names
            refuse_if(links is not None, "give --links or --profile, not both")
            text = "--profile has measured links; leave out --alpha, --beta and --link-model"
            refuse_if(own, text)
            refuse_if(
                given is not None and given[0] != profile.mesh.shape,
                f"--mesh has the shape {_sizes(given or measured)}, but the profile was measured "
                f"on {_sizes(measured)}; leave out --mesh, or measure again",
            )
            text = "--profile has timed steps with their copies; leave out --memory"
            refuse_if(self.memory is not None, text)
            given = given or measured
        if given is None:
            raise click.UsageError("give --mesh, or --profile with the profile of a mesh")
        one = (self.alpha is None) != (self.beta is None)
        refuse_if(one, "give both --alpha and --beta, or neither")
        shape, names = given
        devices = DeviceMesh(
            range(math.prod(shape)) if self.ids is None else self.ids,
            shape,
            mesh_alpha=_per_axis("--alpha", self.alpha, len(shape)),
            mesh_beta=_per_axis("--beta", self.beta, len(shape)),
            axis_names=names,
            link_model=self.link_model or "ring",
        )
        both = self.alpha is not None and links is not None
        refuse_if(both, "give --links, or --alpha and --beta, not both")
        known = links or ((DEFAULT_PRESET,) if self.alpha is None else ())
        nothing = self.memory == 0 and not known
        refuse_if(nothing, "--memory preset is for --links; give the rate in GB/s")
        per_axis = _per_axis("--links", links, len(shape))
        if profile is not None:
            model = CostModel(*profile.model)
        elif per_axis is None:
            model = CostModel.of_mesh(devices)
        else:
            model = CostModel.from_presets(devices, per_axis)
        if self.memory is None:
            return devices, model
        copy_s = 2 / (self.memory * 1e9) if self.memory else preset_copy_s(known)
        return devices, replace(model, copy_s=copy_s)


def _sizes(mesh: MeshShape) -> str:
    return "x".join(map(str, mesh[0]))


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
