"""All formats: those that come along, and those of other packages.

Another package has a format by an entry point of the group ``shardspec.formats`` that leads to a
`Format`. Those that come along are asked first, so a package does not change how they are read, and
modules are imported as they are asked.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

from shardspec.checkpoint.format import Format, Way
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.errors import CheckpointError
from shardspec.text import Argument

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "shardspec.formats"
MODULES: Final = (
    "safetensors",
    "native",
    "dcp",
    "megatron",
    "dcp_hf",
    "huggingface",
    "deepspeed_universal",
    "deepspeed",
    "meta",
    "rank_files",
    "torch_file",
)
"""In the order in which they are asked: what names of files say most about comes first."""
DEFAULTS: Final = {"file": "safetensors", "directory": "huggingface", "shards": "native"}
"""By modules: what is written where the caller names no format."""


@cache
def _module(name: str) -> Format:
    found: object = import_module(f"shardspec.checkpoint.formats.{name}").FORMAT
    assert isinstance(found, Format), name
    return found


def formats() -> Iterator[Format]:
    """Yield all formats, in the order in which they are asked."""
    yield from built_in()
    yield from installed()


def built_in() -> Iterator[Format]:
    """Yield the formats that come along."""
    yield from map(_module, MODULES)


@cache
def installed() -> tuple[Format, ...]:
    """Return the formats of other packages, sorted by the names of their entry points.

    Raises `CheckpointError` if one cannot be loaded, or has a name or extension that is taken.
    """
    # Importing it takes as long as reading a small checkpoint.
    from importlib.metadata import entry_points

    taken = {known for own in built_in() for known in _names(own)}
    found = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        format = _loaded(point)
        for known in _names(format):
            if known in taken:
                raise CheckpointError(
                    f"{_called(point)}: {known!r} is taken by another format; uninstall one of the "
                    "packages"
                )
        taken.update(_names(format))
        found.append(format)
    return tuple(found)


def _names(format: Format) -> tuple[str, ...]:
    """Return what only one format may have."""
    return (format.name, *(format.extensions if format.writes else ()))


def _loaded(point: "EntryPoint") -> Format:
    try:
        format: object = point.load()
    except Exception as error:  # importing another package may raise anything
        raise CheckpointError(
            f"{_called(point)} cannot be loaded ({type(error).__name__}: {error}); mend or "
            "uninstall that package"
        ) from error
    if not isinstance(format, Format):
        raise CheckpointError(
            f"{_called(point)} leads to a {type(format).__name__}; it should lead to a "
            "shardspec.checkpoint.format.Format"
        )
    return format


def _called(point: "EntryPoint") -> str:
    package = "" if point.dist is None else f" of the package {point.dist.name}"
    return f"the format {point.name!r}{package}"


def format_of(names: Sequence[str]) -> Format | None:
    """Return the format of a directory with these names."""
    return next((format for format in formats() if format.recognises(names)), None)


def format_called(title: str) -> Format | None:
    """Return the format of a catalog, by what it is called."""
    return next((format for format in formats() if format.called == title), None)


def written_names(way: Way) -> list[str]:
    """Return the names of the formats that are written that way."""
    return [format.name for format in formats() if way in format.writes]


def written_format(name: str, way: Way) -> Format:
    """Return a format by its name; raises `CheckpointError` if it is not written that way."""
    format = next((format for format in formats() if format.name == name), None)
    if format is not None and way in format.writes:
        return format
    problem = f"there is no format {name!r}"
    if format is not None:
        other = "is not for whole tensors" if way == "merged" else "is not for shards"
        problem = f"the format {name!r} {other if format.writes else 'is only read'}"
        problem += f"; {format.instead}" if format.instead else ""
    raise CheckpointError(f"{problem}; choose one of {', '.join(written_names(way))}")


def default_format(way: Way, suffix: str = "", *, directory: bool = False) -> Format:
    """Return what is written where the caller names no format.

    That is the one whose files end in `suffix`, unless a `directory` is wanted.
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
    """Return the format of an output; `in_directory` says whether it is named as a directory."""
    if name is None:
        suffix = output.suffix.lower()
        by_default = default_format("merged", suffix, directory=in_directory)
        limited = max_shard_bytes is not None and suffix not in by_default.extensions
        chosen = default_format("merged", directory=True) if limited else by_default
    else:
        chosen = written_format(name, "merged")
    if max_shard_bytes is not None and (max_shard_bytes < 1 or not chosen.limits_files):
        other = default_format("merged", directory=True).name
        raise CheckpointError(
            f"{output}: a limit of {max_shard_bytes} bytes a file (",
            Argument("max_shard_bytes"),
            f") is not for the format {chosen.name!r}, or below 1; leave it out, or choose the "
            f"format {other!r} and name a directory",
        )
    if in_directory and chosen.one_file:
        raise CheckpointError(
            f"{output}/: is named as a directory, but the format {chosen.name!r} is one file; "
            "leave out the slash, or choose another format"
        )
    return chosen
