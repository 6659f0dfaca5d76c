"""Lists the formats of checkpoints that can be read and written, and recognizes them by file names.

Each format is a module of this folder with a `Format` named `FORMAT`. Another package provides a
format through an entry point of the group ``shardspec.formats`` that resolves to a `Format`.
Built-in formats are tried first, so a package cannot change how they are read.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

from shardspec.checkpoint.catalog import Carried, Catalog, OutputTensor, Target
from shardspec.checkpoint.convert.sidecars import model_sidecars
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import Argument, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "shardspec.formats"
MODULES: Final = {
    "safetensors": (".safetensors",),
    "native": ("sharding_info.json",),
    "dcp": (".metadata", ".distcp"),
    "megatron": ("mp_rank_", "iter_", "latest_checkpointed_iteration.txt", "model_optim_rng.pt"),
    "dcp_hf": ("shard-",),
    "huggingface": (".safetensors",),
    "deepspeed": ("zero", "global_step"),
    "meta": ("consolidated.",),
    "rank_files": ("rank",),
    "torch_file": (".pt", ".bin"),
}
"""Formats in order of recognition, the most specific file names first. A module is imported and
tried only if a file name contains one of these texts."""
DEFAULTS: Final = {"file": "safetensors", "directory": "huggingface", "shards": "native"}
"""Modules of the formats that are written by default."""
_MOST_TRACKER_BYTES: Final = 4096

Way: TypeAlias = Literal["merged", "sharded"]
"""Kind of output: whole tensors, by `merge`, or shards of a mesh, by `reshard`."""


Keeps: TypeAlias = Literal["tensors", "notes", "values", "objects"]
"""Entries beside tensors that a format has; see `Format.keeps`."""


class OpenOptions(NamedTuple):
    """Arguments of `open_checkpoint` for formats that do not record how tensors are sharded."""

    ranks: int | None = None
    """Number of ranks that wrote the checkpoint."""
    source_rules: Mapping[str, object] | PurePath | str | None = None
    """Name pattern -> spec that sharded these tensors, or a TOML file of these."""


class FileStart(NamedTuple):
    """A file that may be a checkpoint: its name, first bytes and size."""

    name: str
    head: bytes
    """First 16 bytes."""
    num_bytes: int

    @property
    def is_zip(self) -> bool:
        """True for a zip, but not for a safetensors file whose header length looks like one."""
        return self.head.startswith(b"PK\3\4") and self.head[8:9] != b"{"


class Wanted(NamedTuple):
    """Everything that `Format.lay_out` needs: tensors, values, mesh and layouts of an output."""

    name: str
    """Last part of the output's path."""
    way: Way
    tensors: Sequence[OutputTensor]
    """Tensors, sorted by their names in the output."""
    carried: Carried
    """Entries that are not tensors."""
    mesh: DeviceMesh
    """Devices to shard for; one device for whole tensors."""
    layouts: Mapping[str, Layout]
    """Layout of each tensor by its name in the output, without pending reductions."""
    save: str
    """Unique id of this save: 16 hexadecimal digits."""
    metadata: bool = True
    """True if the metadata of safetensors files is copied."""
    sidecars: bool = True
    """True if non-weight files are copied."""
    max_shard_bytes: int | None = None
    """Maximum bytes of tensors in a file, if the format takes a limit."""


class Newest(NamedTuple):
    """The checkpoint to open in the directory of a run, such as ``iter_0000010``."""

    place: StoragePath
    note: str
    """Note for the user about how the checkpoint was found."""
    of_run: bool = False
    """True to read it in the format of the run if its own file names match no format."""


def never(_: object) -> bool:
    """Return False; the default of optional tests."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A checkpoint format: how to recognize, open and write it.

    Reading needs the first three members, writing needs `lay_out` and `writes`.

    Examples
    --------
    >>> from shardspec.checkpoint.formats import formats
    >>> [format.name for format in formats() if format.recognizes(["model.safetensors"])]
    ['huggingface']
    """

    name: str
    """Name in `merge(format=)` and on the command line."""
    recognizes: Callable[[Collection[str]], bool]
    """Returns True if a directory with these file names has this format."""
    open: Callable[[StoragePath, OpenOptions], Catalog]
    """Opens a checkpoint at a directory or file; reads its metadata, not its data."""
    lay_out: Callable[[Catalog, Wanted], Target] | None = None
    """Returns the files of an output and the boxes in each; None if the format is only read."""
    writes: tuple[Way, ...] = ()
    """Kinds of output that `lay_out` supports."""
    title: str = ""
    """Name in messages and in the catalogs that `open` returns; by default `name`."""
    extensions: tuple[str, ...] = ()
    """Extensions of files that are checkpoints by themselves. If there are any, whole tensors are
    written into one such file, else into a directory."""
    owns: Callable[[str], bool] = never
    """Returns True for relative names of further files of a checkpoint that its catalog does not
    list: they are replaced with the checkpoint."""
    sidecars: Callable[[StoragePath, Collection[str]], set[str]] = model_sidecars
    """Returns the non-weight files that belong to a checkpoint, given the names in its directory;
    they are copied into outputs that are directories."""
    keeps: Keeps = "values"
    """Entries besides tensors: none; notes of a run; plain values of the state dict; or all, which
    are then copied unread."""
    limits_files: bool = False
    """True if `lay_out` uses `Wanted.max_shard_bytes`."""
    stacks_layers: bool = False
    """True if Megatron-core saves in this format, with one tensor per weight of all layers."""
    instead: str = ""
    """Format to write instead, if this one is only read."""
    reads_file: Callable[[FileStart], bool] = never
    """Returns True if a file is a checkpoint by itself, or lists the files of one."""
    names_others: Callable[[str], bool] = never
    """Returns True if a file of this name lists the other files of a checkpoint beside it."""
    part_of: Callable[[StoragePath], StoragePath | None] | None = None
    """Returns the directory of the checkpoint that a file is a part of. By default that is the
    directory of any file whose name is recognized, if `reads_file` is not given."""
    newest: Callable[[StoragePath, Sequence[str]], Newest | None] | None = None
    """Returns the current checkpoint in a directory with these names, if it is that of a run."""
    nested: bool = False
    """True if files may be in subdirectories."""
    takes: tuple[str, ...] = ()
    """Names of the `OpenOptions` that `open` uses; others are refused."""
    known_by: str = ""
    """Example of a file name in directories of this format, for errors."""

    def __post_init__(self) -> None:
        if self.keeps not in get_args(Keeps):
            raise CheckpointError(
                f"the format {self.name!r} keeps={shown(self.keeps)}; give one of "
                f"{', '.join(get_args(Keeps))}"
            )
        if unknown := set(self.writes) - {*get_args(Way)}:
            raise CheckpointError(
                f"the format {self.name!r} writes={shown(min(unknown))}; give "
                f"{' or '.join(get_args(Way))}"
            )

    @property
    def called(self) -> str:
        """Name of the format in messages, such as "Megatron-LM"."""
        return self.title or self.name

    def directory_of(self, path: StoragePath) -> StoragePath | None:
        """Return the directory to open for a named file; None to open the file by itself."""
        if self.part_of is not None:
            return self.part_of(path)
        is_part = self.reads_file is never and self.recognizes((path.name,))
        return path.parent if is_part else None


@cache
def _module(name: str) -> Format:
    format: object = import_module(f"shardspec.checkpoint.formats.{name}").FORMAT
    assert isinstance(format, Format), name
    return format


def formats(names: Collection[str] | None = None) -> Iterator[Format]:
    """Yield built-in, then installed formats; given file names, only those that may match."""
    yield from built_in(names)
    yield from installed()


def built_in(names: Collection[str] | None = None) -> Iterator[Format]:
    """Yield the built-in formats; given file names, only those that may match."""
    for module, markers in MODULES.items():
        if names is None or any(marker in name for marker in markers for name in names):
            yield _module(module)


@cache
def installed() -> tuple[Format, ...]:
    """Return the formats of other packages, sorted by the names of their entry points.

    Raises `CheckpointError` if one cannot be loaded, or has the name or extension of another.
    """
    # Imported here, as it takes as long as reading a small checkpoint.
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    earlier = list(built_in()) if points else []
    for point in points:
        format = _loaded(point)
        used = {name for format_before in earlier for name in _names(format_before)}
        for name in _names(format):
            if name in used:
                raise CheckpointError(
                    f"{_called(point)}: {name!r} is taken by another format; uninstall one of the "
                    "packages"
                )
        earlier.append(format)
    return tuple(earlier[len(MODULES) :])


def _names(format: Format) -> tuple[str, ...]:
    """Return the name and the extensions of a format; two formats may not share any."""
    return (format.name, *(format.extensions if format.writes else ()))


def _loaded(point: "EntryPoint") -> Format:
    try:
        format: object = point.load()
    except Exception as error:  # importing another package may raise anything
        raise CheckpointError(
            f"{_called(point)} cannot be loaded ({type(error).__name__}: {error}); repair or "
            "uninstall that package"
        ) from error
    if not isinstance(format, Format):
        raise CheckpointError(
            f"{_called(point)} leads to a {type(format).__name__}; it should lead to a "
            "shardspec.checkpoint.formats.Format"
        )
    return format


def _called(point: "EntryPoint") -> str:
    package = "" if point.dist is None else f" of the package {point.dist.name}"
    return f"the format {point.name!r}{package}"


def format_of(names: Sequence[str]) -> Format | None:
    """Return the format that recognizes these names in a directory; None if no format does.

    >>> format_of(["config.json", "model.safetensors"]).name
    'huggingface'
    """
    return next((format for format in formats(names) if format.recognizes(names)), None)


def format_called(title: str) -> Format | None:
    """Return the format with this title, which catalogs have as their `format`; None if unknown.

    >>> format_called("Megatron-LM").name
    'megatron'
    """
    return next((format for format in formats() if format.called == title), None)


def written_names(way: Way) -> list[str]:
    """Return the names of the formats that can write this kind of output.

    >>> written_names("sharded")[:2]
    ['shardspec', 'dcp']
    """
    return [format.name for format in formats() if way in format.writes]


def written_format(name: str, way: Way) -> Format:
    """Return a format by name; raises `CheckpointError` if it cannot write this kind of output.

    >>> written_format("dcp", "sharded").title
    'torch distributed checkpoint'
    """
    format = next((format for format in formats() if format.name == name), None)
    if format is not None and way in format.writes:
        return format
    problem = f"there is no format {name!r}"
    if format is not None:
        refusal = "is not for whole tensors" if way == "merged" else "is not for shards"
        problem = f"the format {name!r} {refusal if format.writes else 'is only read'}"
        problem += f"; {format.instead}" if format.instead else ""
    names = ", ".join(written_names(way))
    raise CheckpointError(f"cannot write this output: {problem}; choose one of {names}")


def default_format(way: Way, suffix: str = "", *, directory: bool = False) -> Format:
    """Return the default format of an output.

    For a file it is the format with the extension `suffix`, if there is one.

    >>> default_format("merged", ".pt").name, default_format("sharded").name
    ('torch', 'shardspec')
    """
    if way == "sharded":
        return _module(DEFAULTS["shards"])
    for format in formats() if suffix and not directory else ():
        if suffix.lower() in format.extensions and way in format.writes:
            return format
    return _module(DEFAULTS["directory" if directory else "file"])


def merged_format(
    output: StoragePath, name: str | None, max_shard_bytes: int | None, in_directory: bool
) -> Format:
    """Return the format of a merged output; `in_directory` if its path ends in a slash.

    Raises `CheckpointError` if the format, the limit and the path contradict each other.
    """
    if name is None:
        suffix = output.suffix.lower()
        by_default = default_format("merged", suffix, directory=in_directory)
        limited = max_shard_bytes is not None and suffix not in by_default.extensions
        chosen = default_format("merged", directory=True) if limited else by_default
    else:
        chosen = written_format(name, "merged")
    if max_shard_bytes is not None and (max_shard_bytes < 1 or not chosen.limits_files):
        directory_format = default_format("merged", directory=True).name
        raise CheckpointError(
            f"{output}: files of at most {max_shard_bytes} bytes (",
            Argument("max_shard_bytes"),
            f"): the format {chosen.name!r} has no such limit, or it is below 1; omit it, or "
            f"choose the format {directory_format!r} and name a directory",
        )
    if in_directory and chosen.extensions:
        raise CheckpointError(
            f"{output}/: is named as a directory, but the format {chosen.name!r} is one file; omit "
            "the slash, or choose another format"
        )
    return chosen


# --- directories of runs, with several checkpoints


def named_by(
    tracker: StoragePath, names: Collection[str], folders_of: Callable[[str], Sequence[str]]
) -> Newest:
    """Return the checkpoint that a tracker names, such as ``latest`` with "global_step5" in it.

    `folders_of` returns the possible directory names for the text of the file. Raises
    `CheckpointError` if none of them is among `names`.
    """
    run = tracker.parent
    path = file_inside(run, tracker.name, run)
    with path.open() as file:
        text = file.read(0, min(file.num_bytes, _MOST_TRACKER_BYTES)).strip().decode("latin1")
    name = next((name for name in folders_of(text) if name in names), "")
    if not name or not file_inside(run, name, path).is_dir():
        raise CheckpointError(
            f"{path}: names {text!r:.200}, but no such checkpoint is beside this file; name the "
            "directory of a checkpoint"
        )
    return Newest(run / name, f"reading {name}, which {tracker.name} names")


def only_one(run: StoragePath, checkpoints: Sequence[str], tracker: str) -> Newest:
    """Return the only checkpoint in the directory of a run; CheckpointError if it has several."""
    if len(checkpoints) != 1:
        raise CheckpointError(
            f"{run}: has the checkpoints {', '.join(checkpoints) or '(none)'} and no {tracker} "
            "that names the latest; name the directory of one"
        )
    place = file_inside(run, checkpoints[0], run)
    return Newest(place, f"reading {checkpoints[0]}, which is the only one")
