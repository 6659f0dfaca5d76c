"""From a path to a checkpoint that can be read, whatever wrote it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import PurePath
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats import names
from shardspec.checkpoint.formats.names import FORMATS, MEGATRON_TRACKER, Format, format_of_names
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.storage.path import StoragePath, file_inside, reason
from shardspec.checkpoint.storage.snapshot import Snapshot
from shardspec.errors import CheckpointError
from shardspec.text import Argument

_ZIP: Final = b"PK"
_OLD_TORCH: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""Start of a file of torch.save that is not a zip: a number in a pickle."""
_MOST_TRACKER_BYTES: Final = 4096
_DEPTH: Final = 2
_MOST_DIRECTORIES: Final = 256
"""Directories that are searched: a wrong path may be that of a whole disk."""
_SHOWN: Final = 3
_FILE: Final = Format("a single file", "", "")
"""What is a checkpoint by itself; its content says which format it is."""


class _Found(NamedTuple):
    """A checkpoint that is not open yet."""

    place: StoragePath
    home: StoragePath
    """Where all its files lie."""
    format: Format
    note: str = ""
    """For the user: how it was found."""


def open_checkpoint(
    path: PurePath | str,
    *,
    ranks: int | None = None,
    source_rules: Mapping[str, object] | PurePath | str | None = None,
) -> Catalog:
    """Open a checkpoint; what describes it is read and checked, its data is not.

    `path` is a directory in any of the formats that are read, a file of one rank of those, one
    safetensors file, one file of `torch.save`, or the index of several; here, or in a store by its
    URL. For formats that do not say it themselves, `ranks` is how many ranks have written files,
    and `source_rules` how they have sharded tensors: pattern of names to spec, or the path of a
    TOML file (`shardspec.checkpoint.formats.tensor_parallel`). Raises `CheckpointError` if it is
    missing, holds no finished save, contradicts itself, or says itself what the caller has added.
    """
    return open_checkpoints((path,), ranks=ranks, source_rules=source_rules)[0]


def open_checkpoints(
    paths: Sequence[PurePath | str],
    *,
    ranks: int | None = None,
    source_rules: Mapping[str, object] | PurePath | str | None = None,
) -> list[Catalog]:
    """Open several checkpoints; each gets the options that its format takes."""
    options = (("ranks", ranks), ("source_rules", source_rules))
    added = {name: value for name, value in options if value is not None}
    found = []
    for path in map(storage_path, paths):
        with _reported(path):
            found.append(_find(path))
    for name in sorted(added):
        if not any(name in one.format.takes for one in found):
            raise CheckpointError(
                f"{found[0].place}: ",
                Argument(name),
                f" was given, but a checkpoint of this format ({found[0].format.name}) needs none: "
                "it says so itself; leave it out",
            )
    return [_open(one, {n: added[n] for n in added.keys() & one.format.takes}) for one in found]


def as_catalog(checkpoint: PurePath | str | Catalog) -> Catalog:
    """Return a checkpoint that may be open already."""
    return open_checkpoint(checkpoint) if isinstance(checkpoint, PurePath | str) else checkpoint


def _open(found: _Found, added: Mapping[str, object]) -> Catalog:
    # Before anything is read: changes from now on are detected at the end.
    snapshot = Snapshot.of(found.home, nested=found.format.nested)
    module, _, function = (found.format.reader or _reader_of_file(found.place)).partition(":")
    read: Callable[..., Catalog] = getattr(
        import_module(f"shardspec.checkpoint.formats.{module}"), function
    )
    with _reported(found.place):
        opened = read(found.place, **added)
    opened.snapshot = snapshot
    opened.notes += (found.note,) if found.note else ()
    return opened


@contextmanager
def _reported(place: StoragePath) -> Iterator[None]:
    """Turn errors of the system into a CheckpointError."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else place
        raise CheckpointError(f"{where}: cannot be read: {reason(error)}") from None


def _find(place: StoragePath, run: Format | None = None) -> _Found:
    """Find out what a path is, perhaps a checkpoint that the directory of a run names."""
    if "\0" in str(place):
        raise CheckpointError(f"{str(place)!r}: a path cannot hold a NUL; check it")
    try:
        there = place.names()
    except NotADirectoryError:
        return _find_file(place)
    except FileNotFoundError:
        raise CheckpointError(f"{place}: there is no such checkpoint; check the path") from None
    if not there:
        raise CheckpointError(f"{place}: is empty, there is no checkpoint in it; check the path")
    known = format_of_names(there)
    if run is None:
        if newest := _newest(place, there, known):
            return _find(newest[0], known or _FILE)._replace(note=newest[1])
    elif run.name == names.DEEPSPEED:
        known = known or run  # the files of model states alone may be of other tools
    if known is not None:
        return _Found(place, place, known)
    for name in there:
        part = names.part_of_several(name, lambda: there)
        if part is not None:
            raise CheckpointError(f"{place}: {name} is {names.part_text(part)}")
    problem = names.not_read(there) or _nearby(place, there)
    if not problem:
        *others, last = dict.fromkeys(one.known_by for one in FORMATS)
        problem = (
            f"has no {', '.join(others)} or {last}; this is not a checkpoint of a format that is "
            "known, or its save did not finish"
        )
    raise CheckpointError(f"{place}: {problem}")


def _newest(
    place: StoragePath, there: Sequence[str], known: Format | None
) -> tuple[StoragePath, str] | None:
    """Return the checkpoint that counts if a directory is that of a run, and a note of it."""
    deepspeed = known is not None and known.name == names.DEEPSPEED
    tracker = names.DEEPSPEED_LATEST if deepspeed else MEGATRON_TRACKER
    of_ranks = (
        (names.DEEPSPEED_OPTIMIZER, names.DEEPSPEED_MODEL) if deepspeed else (names.MEGATRON_RANK,)
    )
    if any(pattern.fullmatch(name) for pattern in of_ranks for name in there):
        return None
    if tracker in there:
        path = file_inside(place, tracker, place)
        with path.open() as file:
            said = file.read(0, min(file.num_bytes, _MOST_TRACKER_BYTES)).strip().decode("latin1")
        due = [said] if deepspeed or names.MEGATRON_ITERATION.fullmatch(said) else []
        if said.isdecimal() and said.isascii() and not deepspeed:
            due = [f"iter_{int(said):07d}", f"{names.VERL_STEP}{int(said)}"]
        name = next((name for name in due if name in there), "")
        if not name or not file_inside(place, name, path).is_dir():
            raise CheckpointError(
                f"{path}: says {said!r:.200}, but no such checkpoint is beside it; name the "
                "directory of the checkpoint itself"
            )
        return place / name, f"reading {name}, which {tracker} names"
    if deepspeed:
        folders = (name for name in there if (place / name).is_dir())
        found = [name for name in folders if known and known.finds(_names(place / name))]
    else:
        found = [name for name in there if names.MEGATRON_ITERATION.fullmatch(name)]
        if found in ([], ["release"]):
            return None
    if len(found) != 1:
        raise CheckpointError(
            f"{place}: has the checkpoints {', '.join(found) or '(none)'} and no {tracker} that "
            "says which counts; name the directory of one"
        )
    return file_inside(place, found[0], place), f"reading {found[0]}, which is the only one"


def _find_file(place: StoragePath) -> _Found:
    """Find out what a file is, or is a part of."""
    if place.name in (MEGATRON_TRACKER, names.DEEPSPEED_SCRIPT):
        return _find(place.parent)
    if other := names.not_read((place.name,)):
        raise CheckpointError(f"{place}: {other}")
    in_rank = names.MEGATRON_RANK.fullmatch(place.parent.name)
    part = place.parent if place.name == names.MEGATRON_FILE and in_rank else place
    for one in FORMATS:
        if one.in_parts and one.finds((part.name,)):
            return _Found(part.parent, part.parent, one)
    listing = names.is_index(place.name) or names.is_bin_index(place.name)
    alone = not (listing or names.is_rank_file(place.name))
    return _Found(place, place if alone else place.parent, _FILE)


def _reader_of_file(place: StoragePath) -> str:
    """Return who reads what is a checkpoint by itself."""
    if names.is_index(place.name):
        return "safetensors:open_index_file"
    if names.is_bin_index(place.name):
        return "torch_file:open_bin_index"
    with place.open() as file:
        head = file.read(0, min(file.num_bytes, 16))
    if not head:
        raise CheckpointError(f"{place}: is empty; restore it")
    if head.startswith(_ZIP):
        family = names.is_rank_file(place.name)
        return "rank_files:open_family" if family else "torch_file:open_torch_file"
    if head.startswith(_OLD_TORCH):
        raise CheckpointError(
            f"{place}: is in the format that torch.save had before torch 1.6, which cannot be read "
            "in place; load it with torch.load(weights_only=True) and save it again"
        )
    if not names.is_data_file(place.name) and int.from_bytes(head[:8], "little") >= file.num_bytes:
        raise CheckpointError(
            f"{place}: is neither a safetensors file nor one of torch.save; name one of these, or "
            "the directory of a checkpoint"
        )
    return "safetensors:open_single_file"


def _nearby(place: StoragePath, there: Sequence[str]) -> str:
    """Return which checkpoints lie in a directory that is none, or which files could be ones."""
    start = "is not a checkpoint itself, but there"
    level = [place]
    # In a store every look would be a request.
    for _ in range(0 if place.requests else _DEPTH):
        below = (at / name for at in level for name in _names(at) if not name.startswith("."))
        level = list(islice((path for path in below if path.is_dir()), _MOST_DIRECTORIES))
        known = [(path, found.name) for path in level if (found := format_of_names(_names(path)))]
        if len(known) == 1:
            return f"{start} is one in it: name {known[0][0]} ({known[0][1]})"
        if known:
            return f"{start} are some in it: " + _some(
                [f"{path.relative_to(place)} ({name})" for path, name in known]
            )
    files = [name for name in there if name.endswith((".pt", ".pth", ".bin", ".ckpt"))]
    return f"{start} are files of torch in it: {_some(files)}" if files else ""


def _some(found: Sequence[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}; name one of them"


def _names(directory: StoragePath) -> list[str]:
    """Return the names in a directory; step-9 comes before step-10."""
    try:
        return sorted(
            directory.names(),
            key=lambda name: re.sub(r"[0-9]{1,18}", lambda number: number[0].zfill(18), name),
        )
    except OSError:
        return []
