"""From a path to a checkpoint that can be read, whatever wrote it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats.names import (
    BIN_INDEX,
    FORMATS,
    MEGATRON_FILE,
    MEGATRON_ITERATION,
    MEGATRON_RANK,
    MEGATRON_TRACKER,
    RUN_STEP,
    Format,
    find_megatron,
    format_of_names,
    is_data_file,
    is_index,
    is_rank_file,
    not_read,
    part_of_several,
    part_text,
)
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import RemotePath, Snapshot, as_path, file_inside, reason
from shardspec.errors import CheckpointError

_ZIP: Final = b"PK"
_OLD_TORCH: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""How a file of torch.save starts that is no zip: a number in a pickle."""
_MOST_TRACKER_BYTES: Final = 32
_DEPTH: Final = 2
_MOST_DIRECTORIES: Final = 256
"""Directories that are looked into: a wrong path may be that of a whole disk."""
_SHOWN: Final = 3
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
_FILE: Final = Format("a single file", "", re.compile("(?!)"), "")
"""What is a checkpoint by itself; who reads it is known once it is opened."""


class _Found(NamedTuple):
    """A checkpoint that is there, but not open yet."""

    place: Path
    home: Path
    """Where all its files lie."""
    format: Format
    note: str = ""
    """What the user is to be told of how it was found."""


def open_checkpoint(
    path: Path | str,
    *,
    ranks: int | None = None,
    rules: Mapping[str, object] | Path | str | None = None,
) -> Catalog:
    """Open a checkpoint; what describes it is read and checked, its data is not.

    `path` is a directory in any of the formats that are read, a file of one rank of those, one
    safetensors file, one file of `torch.save`, or the index of several; here, or in a store by its
    URL. For formats that do not say it themselves, `ranks` is how many ranks have written files,
    and `rules` how they have cut tensors: pattern of names to spec, or the path of a TOML file
    (`shardspec.checkpoint.formats.tensor_parallel`). Raises `CheckpointError` if it is missing,
    holds no finished save, contradicts itself, or knows by itself what the caller has added.
    """
    return open_checkpoints((path,), ranks=ranks, rules=rules)[0]


def open_checkpoints(
    paths: Sequence[Path | str],
    *,
    ranks: int | None = None,
    rules: Mapping[str, object] | Path | str | None = None,
) -> list[Catalog]:
    """Open several checkpoints; each is told what its format does not say, the others are not."""
    options = (("ranks", ranks), ("rules", rules))
    added = {name: value for name, value in options if value is not None}
    found = []
    for path in map(as_path, paths):
        with _told_as_unreadable(path):
            found.append(_find(path))
    for name in sorted(added):
        if not any(name in one.format.takes for one in found):
            raise CheckpointError(
                f"{found[0].place}: {name} was given, but a checkpoint of this format "
                f"({found[0].format.name}) needs none: it says so itself; leave {name} out"
            )
    return [_open(one, {n: added[n] for n in added.keys() & one.format.takes}) for one in found]


def as_catalog(checkpoint: Path | str | Catalog) -> Catalog:
    """Return a checkpoint that may be open already."""
    return open_checkpoint(checkpoint) if isinstance(checkpoint, Path | str) else checkpoint


def _open(found: _Found, added: Mapping[str, object]) -> Catalog:
    # Before anything is read: what is written from now on is found out at the end.
    snapshot = Snapshot.of(found.home, nested=found.format.nested)
    reader = found.format.reader or _reader_of_file(found.place)
    module, _, function = reader.partition(":")
    read = getattr(import_module(f"shardspec.checkpoint.formats.{module}"), function)
    with _told_as_unreadable(found.place):
        opened: Catalog = read(found.place, **added)
    opened.snapshot = snapshot
    opened.notes += (found.note,) if found.note else ()
    return opened


@contextmanager
def _told_as_unreadable(place: Path) -> Iterator[None]:
    """Turn what goes wrong with directories into an error of ours."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else place
        raise CheckpointError(f"{where}: cannot be read: {reason(error)}") from None


def _find(place: Path) -> _Found:
    """Find out what lies somewhere."""
    if "\0" in str(place):
        raise CheckpointError(f"{str(place)!r}: a path cannot hold a NUL; check it")
    try:
        names = [path.name for path in place.iterdir()]
    except NotADirectoryError:
        return _find_file(place)
    except FileNotFoundError:
        raise CheckpointError(f"{place}: there is no such checkpoint; check the path") from None
    if not names:
        raise CheckpointError(f"{place}: is empty, there is no checkpoint in it")
    iteration, note = _iteration(place, names)
    if iteration is not None:
        return _find(iteration)._replace(note=note)
    known = format_of_names(names)
    if known is not None:
        return _Found(place, place, known)
    for name in sorted(names):
        part = part_of_several(name, lambda: names)
        if part is not None:
            raise CheckpointError(f"{place}: {name} is {part_text(part)}")
    problem = not_read(names) or _nearby(place, names)
    if not problem:
        *others, last = dict.fromkeys(one.known_by for one in FORMATS)
        problem = (
            f"has no {', '.join(others)} or {last}; this is no checkpoint of a format that is "
            "known, or its save did not finish"
        )
    raise CheckpointError(f"{place}: {problem}")


def _iteration(place: Path, names: Sequence[str]) -> tuple[Path | None, str]:
    """Return the checkpoint of a run that counts, if a directory is that of a run, and say so."""
    found = sorted(name for name in names if MEGATRON_ITERATION.fullmatch(name))
    tracked = MEGATRON_TRACKER in names
    if any(map(MEGATRON_RANK.fullmatch, names)) or (not tracked and found in ([], ["release"])):
        return None, ""
    if tracked:
        path = file_inside(place, MEGATRON_TRACKER, place)
        with SourceFile(path) as file:
            said = file.read(0, min(file.num_bytes, _MOST_TRACKER_BYTES)).strip().decode("latin1")
        due = [said] if said in found else []
        if said.isdecimal() and said.isascii():
            due = [f"iter_{int(said):07d}", f"{RUN_STEP}{int(said)}"]
        name = next((name for name in due if name in names), "")
        if not name:
            raise CheckpointError(
                f"{path}: says {said!r}, but no such checkpoint is beside it; name the directory "
                "of the iteration itself"
            )
        note = f"reading {name}, which {MEGATRON_TRACKER} names"
    elif len(found) == 1:
        name, note = found[0], f"reading {found[0]}, which is the only one"
    else:
        raise CheckpointError(
            f"{place}: has the iterations {', '.join(found)} and no {MEGATRON_TRACKER} that says "
            "which counts; name the directory of one"
        )
    return file_inside(place, name, place), note


def _find_file(place: Path) -> _Found:
    """Find out what a file is, or is a part of."""
    if place.name == MEGATRON_TRACKER:
        return _find(place.parent)
    other = not_read((place.name,))
    if other is not None:
        raise CheckpointError(f"{place}: {other}")
    part = place
    if place.name == MEGATRON_FILE and find_megatron((place.parent.name,)):
        part = place.parent
    for one in FORMATS:
        if one.in_parts and one.finds((part.name,)):
            return _Found(part.parent, part.parent, one)
    alone = not (is_index(place.name) or place.name == BIN_INDEX or is_rank_file(place.name))
    return _Found(place, place if alone else place.parent, _FILE)


def _reader_of_file(place: Path) -> str:
    """Return who reads what is a checkpoint by itself."""
    if is_index(place.name):
        return "safetensors:open_index_file"
    if place.name == BIN_INDEX:
        return "torch_file:open_bin_index"
    with SourceFile(place) as file:
        head = file.read(0, min(file.num_bytes, 16))
    if head.startswith(_ZIP):
        return (
            "rank_files:open_family" if is_rank_file(place.name) else "torch_file:open_torch_file"
        )
    if head.startswith(_OLD_TORCH):
        raise CheckpointError(
            f"{place}: is in the format that torch.save had before torch 1.6, which cannot be read "
            "in place; load it with torch.load(weights_only=True) and save it again"
        )
    if not is_data_file(place.name) and int.from_bytes(head[:8], "little") >= file.num_bytes:
        raise CheckpointError(
            f"{place}: is neither a safetensors file nor one of torch.save; name one of these, or "
            "the directory of a checkpoint"
        )
    return "safetensors:open_single_file"


def _nearby(place: Path, names: Iterable[str]) -> str:
    """Say which checkpoints lie in a directory that is none, or which files could be ones."""
    start = "is no checkpoint itself, but there"
    level = [place]
    # In a store every look would be a request.
    for _ in range(0 if isinstance(place, RemotePath) else _DEPTH):
        below = (at / name for at in level for name in _names(at) if not name.startswith("."))
        level = list(islice((path for path in below if path.is_dir()), _MOST_DIRECTORIES))
        known = [(path, found.name) for path in level if (found := format_of_names(_names(path)))]
        if len(known) == 1:
            return f"{start} is one in it: name {known[0][0]} ({known[0][1]})"
        if known:
            some = [f"{path.relative_to(place)} ({name})" for path, name in known]
            return f"{start} are some in it: {_some(some)}"
    files = sorted((name for name in names if name.endswith(_TORCH_SUFFIXES)), key=_by_numbers)
    return f"{start} are files of torch in it: {_some(files)}" if files else ""


def _some(found: Sequence[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}; name one of them"


def _names(directory: Path) -> list[str]:
    try:
        return sorted((path.name for path in directory.iterdir()), key=_by_numbers)
    except OSError:
        return []


def _by_numbers(name: str) -> str:
    """Return a key by which step-9 comes before step-10."""
    return re.sub(r"[0-9]{1,18}", lambda number: number[0].zfill(18), name)
