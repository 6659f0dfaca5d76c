"""Opens checkpoints: recognizes the format of a path, and finds the files to read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats import (
    FileStart,
    Format,
    Newest,
    OpenOptions,
    built_in,
    format_of,
    formats,
    installed,
)
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import StoragePath, reason
from shardspec.checkpoint.storage.reading import Snapshot
from shardspec.checkpoint.torch_files import part_of_several, part_text
from shardspec.errors import CheckpointError
from shardspec.text import Argument, first_of, natural_order

_HEAD_BYTES: Final = 16
_DEPTH: Final = 2
_MOST_DIRECTORIES: Final = 256
"""Maximum number of directories to search: a wrong path may be an entire disk."""
_SHOWN: Final = 3
_WHOLE_TENSORS: Final = "load it with the tool that wrote it, and save whole tensors as safetensors"
_NOT_READ: Final = (
    (
        "orbax (OCDBT)",
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_sharding",
        _WHOLE_TENSORS,
    ),
    (
        "zarr, as Megatron-core had it before torch_dist",
        r"\.zarray|\.zgroup",
        "load it with Megatron, and save it as torch_dist",
    ),
    ("Flax", r"flax_model.*\.msgpack", _WHOLE_TENSORS),
    (
        "TensorFlow",
        r"tf_model.*\.h5|model\.ckpt.*\.(index|meta)|saved_model\.pb",
        _WHOLE_TENSORS,
    ),
    ("llama.cpp (GGUF)", r".*\.gguf", "name the checkpoint that it was made of"),
    ("NeMo", r".*\.nemo", "unpack it with tar -xf FILE, and name the directory in it"),
    (
        "the optimizer of data parallel ranks, in buckets (Megatron's distrib_optim.pt)",
        r"distrib_optim\.pt",
        "name the model beside it, or save optimizers as torch_dist",
    ),
)
"""Formats that are recognized but not read: name, pattern of file names, and remedy."""


class _Place(NamedTuple):
    """A checkpoint that was found and is not open yet."""

    place: StoragePath
    home: StoragePath
    """Directory of all files of the checkpoint."""
    format: Format
    note: str = ""
    """Note for the user about how the checkpoint was found."""


def open_checkpoint(
    path: PurePath | str,
    *,
    ranks: int | None = None,
    source_rules: Mapping[str, object] | PurePath | str | None = None,
) -> Catalog:
    """Open a checkpoint: read and check the metadata, but read no data.

    `path` is a directory in a supported format, a file of one rank in it, one safetensors file, one
    file of `torch.save`, or the index of several; on this machine, or the URL of an object store.
    Some formats do not record the sharding. For these, `ranks` is the number of ranks that wrote
    files, and `source_rules` maps name patterns to specs, or is the path of a TOML file of rules
    (`shardspec.checkpoint.formats.cut_rules`). Raises `CheckpointError` if the checkpoint is
    missing, unfinished or inconsistent, or if the format needs none of these options.

    >>> import tempfile, torch
    >>> from shardspec import save_sharded
    >>> path = tempfile.mkdtemp()
    >>> save_sharded({"w": torch.ones(2, 3)}, path)
    >>> open_checkpoint(path).tensor("w").shape
    (2, 3)
    """
    return open_checkpoints((path,), ranks=ranks, source_rules=source_rules)[0]


def open_checkpoints(
    paths: Sequence[PurePath | str],
    *,
    ranks: int | None = None,
    source_rules: Mapping[str, object] | PurePath | str | None = None,
) -> list[Catalog]:
    """Open several checkpoints; each gets the options that its format takes."""
    options = OpenOptions(ranks, source_rules)
    places = []
    for path in map(storage_path, paths):
        with _reported(path):
            places.append(_find(path))
    for name, value in sorted(options._asdict().items()):
        if value is not None and not any(name in at.format.takes for at in places):
            raise CheckpointError(
                f"{places[0].place}: ",
                Argument(name),
                f" was given, but a checkpoint of this format ({places[0].format.called}) records "
                "it; omit this argument",
            )
    return [_open(at, options) for at in places]


def as_catalog(checkpoint: PurePath | str | Catalog) -> Catalog:
    """Return a checkpoint; open it first if it is a path."""
    return open_checkpoint(checkpoint) if isinstance(checkpoint, PurePath | str) else checkpoint


def _open(at: _Place, options: OpenOptions) -> Catalog:
    # Before anything is read: changes from now on are detected at the end.
    snapshot = Snapshot.of(at.home, nested=at.format.nested)
    with _reported(at.place):
        opened = at.format.open(at.place, options)
    notes = (*opened.facts.notes, *([at.note] if at.note else ()))
    return opened.with_facts(replace(opened.facts, snapshot=snapshot, notes=notes))


@contextmanager
def _reported(place: StoragePath) -> Iterator[None]:
    """Turn an OSError about `place`, such as a missing permission, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else place
        raise CheckpointError(f"{where}: cannot be read: {reason(error)}") from None


def _find(place: StoragePath, named: Newest | None = None, run: Format | None = None) -> _Place:
    """Return the checkpoint at a path; `named` is set if a file like ``latest`` led to it."""
    if "\0" in str(place):
        raise CheckpointError(f"{str(place)!r}: a path cannot contain a NUL; check it")
    try:
        names = place.names()
    except NotADirectoryError:
        return _find_file(place)
    except FileNotFoundError:
        raise CheckpointError(f"{place}: there is no such checkpoint; check the path") from None
    if not names:
        raise CheckpointError(f"{place}: is empty, so there is no checkpoint in it; check the path")
    format = format_of(names) or (run if named and named.of_run else None)
    if format is not None and named is not None:
        return _Place(place, place, format, named.note)
    if format is not None:
        return _find_in(place, names, format)
    for name in names:
        part = part_of_several(name, lambda: names)
        if part is not None:
            raise CheckpointError(f"{place}: {name} is one of several files of {part_text(part)}")
    problem = _not_read(names) or _nearby(place, names)
    if not problem:
        *others, last = dict.fromkeys(other.known_by for other in formats() if other.known_by)
        problem = (
            f"has no {', '.join(others)} or {last}; this is not a checkpoint of a format that is "
            "known, or its save did not finish"
        )
    raise CheckpointError(f"{place}: cannot be opened: it {problem}")


def _find_in(place: StoragePath, names: Sequence[str], format: Format) -> _Place:
    """Return the checkpoint in a directory, or the newest one if this is the directory of a run."""
    newest = None if format.newest is None else format.newest(place, names)
    if newest is None:
        return _Place(place, place, format)
    return _find(newest.place, newest, format)


def _find_file(place: StoragePath) -> _Place:
    """Return the checkpoint at a file: the file, or the checkpoint of the directory around it."""
    if problem := _not_read((place.name,)):
        raise CheckpointError(f"{place}: cannot be opened: it {problem}")
    with place.open() as file:
        start = FileStart(
            place.name, file.read(0, min(file.num_bytes, _HEAD_BYTES)), file.num_bytes
        )
    names = (place.name,)
    for asked in partial(built_in, names), installed:
        for format in asked():
            directory = format.directory_of(place)
            if directory is not None:
                siblings = directory.names()
                return _find_in(directory, siblings, format)
        for format in asked():
            # The name goes before the first bytes: many formats are zips.
            if place.name.endswith(format.extensions) and format.reads_file(start):
                return _alone(place, format)
    if not start.head:
        raise CheckpointError(f"{place}: is empty; restore it")
    for format in formats():
        if format.reads_file(start):
            return _alone(place, format)
    raise CheckpointError(
        f"{place}: is neither a safetensors file nor one of torch.save; name one of these, or "
        "the directory of a checkpoint"
    )


def _alone(place: StoragePath, format: Format) -> _Place:
    """Return the checkpoint that consists of one file, or of the files that an index lists."""
    return _Place(place, place.parent if format.names_others(place.name) else place, format)


def _nearby(place: StoragePath, names: Sequence[str]) -> str:
    """Return the error for a directory without weights; it names the checkpoints further down."""
    start = "is not a checkpoint itself, but there"
    level = [place]
    # In an object store, each directory would cost a request.
    for _ in range(0 if place.requests else _DEPTH):
        below = (at / name for at in level for name in _names(at) if not name.startswith("."))
        level = list(islice((path for path in below if path.is_dir()), _MOST_DIRECTORIES))
        checkpoints = [(path, at.called) for path in level if (at := format_of(_names(path)))]
        if len(checkpoints) == 1:
            return f"{start} is one in it: name {checkpoints[0][0]} ({checkpoints[0][1]})"
        if checkpoints:
            return f"{start} are some in it: " + _some(
                [f"{path.relative_to(place)} ({name})" for path, name in checkpoints]
            )
    files = [name for name in names if name.endswith((".pt", ".pth", ".bin", ".ckpt"))]
    return f"{start} are files of torch in it: {_some(files)}" if files else ""


def _some(names: Sequence[str]) -> str:
    return f"{first_of(names, _SHOWN)}; name one of them"


def _names(directory: StoragePath) -> list[str]:
    """Return the names in a directory, step-9 before step-10; none if it cannot be listed."""
    try:
        return natural_order(directory.names())
    except (OSError, CheckpointError):
        return []


def _not_read(names: Sequence[str]) -> str | None:
    """Return an error that names a known but unsupported format, such as Orbax; else None."""
    for kind, pattern, remedy in _NOT_READ:
        if any(re.fullmatch(pattern, name) for name in names):
            return f"is of {kind}, which is not read; {remedy}"
    return None
