"""Defines the arguments and options that several commands share, such as ``--mesh``."""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final, TypeAlias, TypeVar, get_args

import click
from click.shell_completion import CompletionItem

from shardspec.cli.command import Option, flag, grouped, refuse_if
from shardspec.comm.cost import CostModel, Links, models_on
from shardspec.comm.presets import DEFAULT_PRESET, link_preset, memory_copy_s, preset_cluster
from shardspec.dtypes import dtype_name
from shardspec.errors import CheckpointError, DTypeError, ProfileError
from shardspec.mesh.device_ids import SECONDS_RULE, seconds
from shardspec.mesh.device_mesh import DeviceMesh, LinkModel
from shardspec.text import shown

T = TypeVar("T")
MeshShape: TypeAlias = tuple[tuple[int, ...], tuple[str, ...] | None]
"""Devices along each axis, and the names of the axes, if any."""
MAX_DEVICES: Final = 2**20
"""Larger meshes are taken for typing errors, since their ids would fill the memory."""
_MAX_SIZE: Final = 2**63 - 1
_UNITS: Final[Mapping[str, int]] = {"": 1, "b": 1} | {
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}


def parse_mesh(text: str) -> MeshShape:
    """Parse a mesh: sizes as in ``2x4``, or named axes as in ``dp=2,tp=4``."""
    names: tuple[str, ...] | None = None
    sizes = text.lower().split("x")
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        names = tuple(name.strip() for name, _, _ in pairs)
        sizes = [size for _, _, size in pairs]
    remedy = "give sizes as in 2x4, or named axes as in dp=2,tp=4"
    shape = _whole_numbers("mesh", remedy, text, sizes)
    if math.prod(shape) > MAX_DEVICES:
        raise ValueError(f"mesh {shown(text)} has more than {MAX_DEVICES:,} devices; give fewer")
    return shape, names


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse a tensor's shape as in ``4096x1024``; an empty text is a scalar."""
    if not text.strip():
        return ()
    remedy = 'give sizes as in 4096x4096, or "" for a scalar'
    shape = _whole_numbers("shape", remedy, text, text.lower().split("x"))
    if math.prod(size for size in shape if size) > _MAX_SIZE:
        raise ValueError(f"shape {shown(text)} has more elements than a tensor can have, 2^63 - 1")
    return shape


def parse_number(text: str, remedy: str = "give one as in 1e-5") -> float:
    """Parse a finite number that is not negative."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number; {remedy}") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{shown(text)} must be finite and not negative")
    return number


def parse_links(text: str) -> tuple[str, ...]:
    """Parse names of link presets, or files of links; raises `MeshError` for unknown ones."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        link_preset(name)
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterLinks:
    """Links of a cluster: presets or files of links, or numbers per axis."""

    names: tuple[str, ...] = ()
    numbers: tuple[tuple[float, float], ...] = ()
    """Seconds of latency and seconds per byte."""


def parse_cluster_links(text: str) -> ClusterLinks:
    """Parse presets, files of links, or numbers as in ``1e-5:4e-11``."""
    if ":" in text and not text.endswith(".toml"):
        return ClusterLinks(numbers=tuple(map(_latency_and_rate, text.split(","))))
    return ClusterLinks(names=parse_links(text))


def _latency_and_rate(text: str) -> tuple[float, float]:
    """Parse seconds of latency and seconds per byte."""
    remedy = "give SECONDS:SECONDS_PER_BYTE as in 1e-5:4e-11"
    latency, _, per_byte = text.partition(":")
    pair = parse_number(latency.strip(), remedy), parse_number(per_byte.strip(), remedy)
    if None in map(seconds, pair):
        raise ValueError(f"{shown(text)}: give seconds that are {SECONDS_RULE}")
    return pair


def parse_bytes(text: str) -> int:
    """Parse a size in bytes, perhaps with a decimal or binary unit: ``64MiB``, ``1.5 kB``."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{shown(text)} is not a size; give bytes as in 1000000, or as in 64MiB or 1.5GB"
        )
    return math.floor(float(match[1]) * _UNITS[match[2].lower()])


def _memory_rate(text: str) -> float:
    """Parse a rate above 0 in GB/s; 0.0 for ``preset``, infinity for ``none``."""
    if text in ("preset", "none"):
        return 0.0 if text == "preset" else math.inf
    rate = 0.0
    with suppress(ValueError):
        rate = parse_number(text)
    if not rate or seconds(2 / (rate * 1e9)) is None:
        raise ValueError(f"{shown(text)}: give a rate above 0 in GB/s, 'preset' or 'none'")
    return rate


def _whole_numbers(what: str, remedy: str, text: str, parts: list[str]) -> tuple[int, ...]:
    numbers = []
    for digits in map(str.strip, parts):
        # int() also accepts '1_000' and digits of other scripts, and fails on thousands of digits.
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


class Kind(click.ParamType[Any]):
    """The type of an argument or option: its name in the help, and the function that parses it.

    `completes` is ``"file"`` if the shell completes names of files.
    """

    def __init__(self, name: str, read: Callable[[str], object], completes: str = "") -> None:
        self.name, self.read, self.completes = name, read, completes

    def shell_complete(
        self, _ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Tell the shell to complete names of files and directories."""
        return [CompletionItem(incomplete, type=self.completes)] if self.completes else []

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return the parsed value of a text; a `ValueError` is a usage error."""
        try:
            return self.read(value)
        except (CheckpointError, ProfileError):
            raise  # of another exit code: the file is bad, not the usage
        except (ValueError, DTypeError) as error:
            self.fail(str(error), param, ctx)


def numbers_kind(name: str, what: str, remedy: str) -> Kind:
    """Return the type of an option that takes whole numbers, as ``4,2``."""
    return Kind(name, lambda text: _whole_numbers(what, remedy, text, text.split(",")))


def _local(text: str) -> Path:
    if "://" in text:
        raise ValueError(f"{shown(text)}: give a local path instead of a URL; copy the file first")
    return Path(text)


def _existing(text: str) -> Path:
    path = _local(text)
    if not path.exists():
        raise ValueError(f"path {shown(text)} does not exist; check it")
    return path


def _stored(text: str) -> PurePath:
    from shardspec.checkpoint.storage import storage_path

    return storage_path(text) if "://" in text else Path(text)


BYTES: Final = Kind("SIZE", parse_bytes)
FILE_PATH: Final = Kind("FILE", _local, "file")
EXISTING_PATH: Final = Kind("DIR", _existing, "file")
STORED_FILE: Final = Kind("FILE", _stored, "file")
"""A path, or a URL of an object store."""
PLACE: Final = Kind("CKPT", str, "file")
IDS: Final = numbers_kind("IDS", "ids", "give them as in 3,1,0,2")
MESH: Final = Kind("SHAPE", parse_mesh)
CLUSTER_LINKS: Final = Kind("LINKS", parse_cluster_links, "file")
PRESET_NAMES: Final = Kind("PRESETS", parse_links)
SHAPE: Final = Kind("SIZES", parse_shape)


# --- options that several commands share

as_json: Final = flag("as_json", "Output", "Print JSON.", "--json")
output: Final = Option(
    "output", "Output", "The output.", {"type": FILE_PATH, "required": True}, ("-o", "--output")
)
overwrite: Final = flag("overwrite", "Output", "Replace the output if it exists.")
mesh: Final = Option(
    "mesh",
    "Input",
    "Devices along each axis, outermost first: 2x4, or with names dp=2,tp=4.",
    {"type": MESH},
)
ids: Final = Option(
    "ids", "Input", "Physical ids in row-major order, 3,1,0,2; by default from 0.", {"type": IDS}
)
shape: Final = Option(
    "shape",
    "Input",
    'Sizes of the global tensor: 4096x4096; "" for a scalar.',
    {"type": SHAPE, "required": True},
)
dtype: Final = Option(
    "dtype",
    "Input",
    "Element type: bf16, float32, int8, …",
    {"type": Kind("NAME", dtype_name), "default": "float32", "show_default": True},
)
links: Final = Option(
    "links",
    "Input",
    "Links per axis or one for all: names of 'shardspec links list' "
    "(ib-ndr-per-gpu,h100-nvswitch), or seconds of latency and per byte (1e-5:4e-11); or a file "
    "of 'shardspec links import' or 'shardspec profile' (cluster.toml).",
    {"type": CLUSTER_LINKS},
)
between: Final = Option(
    "between",
    "Input",
    "The link between hosts, by default the vendor's, where --links names one preset.",
    {"metavar": "PRESET"},
)
per_node: Final = Option(
    "per_node",
    "Input",
    "Devices that share a host, in the order of ids; by default those of the preset.",
    {"type": click.IntRange(1, MAX_DEVICES)},
)
to: Final = Option("to", "Output", "The format of OUT.")
digests: Final = Option("digests", "Input", "A file of digests.", {"type": STORED_FILE})
max_bytes: Final = Option("max_bytes", "Running", "Limit the bytes of a device.", {"type": BYTES})
threads: Final = Option(
    "threads", "Running", "Copy with N threads.", {"metavar": "N", "type": click.IntRange(1)}
)


def plain_mesh(
    mesh: MeshShape,
    ids: tuple[int, ...] | None = None,
    **links: Any,  # noqa: ANN401
) -> DeviceMesh:
    """Return a mesh without links or with `links`; ids are 0, 1, 2, ... by default."""
    shape, names = mesh
    numbers = range(math.prod(shape)) if ids is None else ids
    return DeviceMesh(numbers, shape, axis_names=names, **links)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options for a mesh and its links."""

    mesh: MeshShape | None = None
    ids: tuple[int, ...] | None = None
    links: ClusterLinks | None = None
    between: str | None = None
    per_node: int | None = None
    link_model: LinkModel | None = None
    memory: float | None = None

    def build(self) -> tuple[DeviceMesh, CostModel]:
        """Return the mesh in the options, and the cost model of its links; see `build_all`."""
        return self.build_all()[0]

    def build_all(
        self, *others: tuple[MeshShape, tuple[int, ...] | None]
    ) -> list[tuple[DeviceMesh, CostModel]]:
        """Return the mesh in the options and other meshes of the same cluster, with cost models.

        Links per axis imply which devices share a host, and a mesh with another number of axes gets
        the links of these hosts. Raises `click.UsageError` if options contradict each other.
        """
        if self.mesh is None:
            raise click.UsageError("Missing option '--mesh'")
        links, axes = self.links or ClusterLinks(names=(DEFAULT_PRESET,)), len(self.mesh[0])
        nothing = self.memory == 0 and not links.names
        refuse_if(nothing, "--memory preset is for known --links; give the rate in GB/s")
        meshes: list[DeviceMesh] = []
        fitting: list[DeviceMesh] = []
        for shape, ids in ((self.mesh, self.ids), *others):
            each = links.numbers or links.names
            fits = not meshes or len(each) == 1 or len(shape[0]) == axes
            numbers = _per_axis(links.numbers, len(shape[0])) if fits else ()
            more = {"mesh_alpha": [a for a, _ in numbers], "mesh_beta": [b for _, b in numbers]}
            bus = self.link_model or "ring"
            meshes.append(plain_mesh(shape, ids, link_model=bus, **(more if numbers else {})))
            fitting += meshes[-1:] if fits else []
        models = dict(models_on(fitting, self._said(links, axes)))
        cluster = models[meshes[0]].cluster
        for mesh in meshes:
            if mesh not in models:
                models[mesh] = replace(CostModel.of_mesh(mesh, cluster), cluster=cluster)
        if self.memory is not None:
            copy_s = 2 / (self.memory * 1e9) if self.memory else memory_copy_s(links.names)
            models = {mesh: replace(model, copy_s=copy_s) for mesh, model in models.items()}
        return [(mesh, models[mesh]) for mesh in meshes]

    def _said(self, links: ClusterLinks, axes: int) -> Links | None:
        """Return the links in the options; None without any."""
        if self.between is not None or self.per_node is not None:
            alone = self.links is not None and len(links.names) == 1
            refuse_if(not alone, "--between and --per-node need one name as --links")
            return preset_cluster(links.names[0], self.between, self.per_node)
        names = _per_axis(links.names, axes) if self.links else ()
        return (names[0] if len(links.names) == 1 else names) if names else None


cluster_options: Final = grouped(
    "cluster",
    ClusterOptions,
    mesh,
    ids,
    links,
    between,
    per_node,
    Option(
        "link_model",
        "Input",
        "Each group has links of its own (ring, the default), or all devices share one bus.",
        {"type": click.Choice(get_args(LinkModel))},
    ),
    Option(
        "memory",
        "Input",
        "The rate of a device's memory in 10^9 bytes a second, which prices local copies; "
        "'preset' for that of --links (the default if they have one), or 'none'.",
        {"type": Kind("RATE", _memory_rate)},
    ),
)


def _per_axis(values: tuple[T, ...], axes: int) -> tuple[T, ...]:
    """Return one value per axis; a single value is repeated, and () stays ()."""
    if len(values) in (0, axes):
        return values
    if len(values) == 1:
        return values * axes
    raise click.UsageError(
        f"--links has {len(values)} values for {axes} {'axis' if axes == 1 else 'axes'}; give one "
        "per axis, or one for all"
    )
