"""From a path to a checkpoint that can be read, whatever wrote it.

A format is one module of `shardspec.checkpoint.formats` and one line in `FORMATS`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats.names import (
    BIN_INDEX,
    BIN_NAME,
    BIN_NUMBERED,
    DCP,
    DCP_HF,
    DCP_HF_SHARD,
    DEEPSPEED,
    DEEPSPEED_UNIVERSAL,
    INDEX_SUFFIX,
    INFO_NAME,
    MEGATRON,
    MEGATRON_FILE,
    MEGATRON_ITERATION,
    MEGATRON_RANK,
    MEGATRON_TRACKER,
    META,
    META_FILE,
    METADATA_NAME,
    NATIVE,
    RANK_FILES,
    RUN_STEP,
    SAFETENSORS,
    TORCH_FILE,
    find_dcp,
    find_deepspeed,
    find_index,
    find_megatron,
    find_universal,
    is_data_file,
    is_rank_file,
    not_read,
    part_of_several,
    part_text,
)
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import RemotePath, Snapshot, as_path, file_inside, reason
from shardspec.errors import CheckpointError

__all__ = [
    "FORMATS",
    "Format",
    "as_catalog",
    "format_of_names",
    "open_checkpoint",
    "open_checkpoints",
]

_ZIP: Final = b"PK"
_OLD_TORCH: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""How a file of torch.save starts that is no zip: a number in a pickle."""


class Format(NamedTuple):
    """A way to write checkpoints that can be read here."""

    name: str
    """What the user calls it."""
    known_by: str
    """What lies in its directories, for errors."""
    finds: Callable[[frozenset[str]], bool]
    """Whether a directory with entries of these names is one."""
    reader: str
    """Module of `shardspec.checkpoint.formats` and the function in it that reads what describes a
    checkpoint, not its data. It is called with the directory and what `takes` names."""
    takes: frozenset[str] = frozenset()
    """What the caller may add: options of `open_checkpoint`."""
    in_parts: bool = False
    """Whether no file that `finds` knows is a checkpoint by itself, so that it means all of it."""
    nested: bool = False
    """Whether its files lie in directories below."""


FORMATS: Final = (
    Format(
        NATIVE, INFO_NAME, lambda names: INFO_NAME in names, "native:open_native", in_parts=True
    ),
    Format(DCP, METADATA_NAME, find_dcp, "dcp:open_dcp", in_parts=True),
    Format(
        MEGATRON,
        "mp_rank_00",
        find_megatron,
        "megatron:open_megatron",
        frozenset(("ranks", "rules")),
        in_parts=True,
        nested=True,
    ),
    Format(
        DCP_HF,
        "shard-00001-model-….safetensors",
        lambda names: any(map(DCP_HF_SHARD.fullmatch, names)),
        "dcp_hf:open_dcp_hf",
        frozenset(("ranks",)),
        in_parts=True,
    ),
    Format(SAFETENSORS, "an index", find_index, "safetensors:open_index_directory"),
    Format(
        SAFETENSORS,
        "*.safetensors",
        lambda names: any(map(is_data_file, names)),
        "safetensors:open_without_index",
    ),
    Format(
        DEEPSPEED_UNIVERSAL,
        "zero beside mp_rank_00_model_states.pt",
        find_universal,
        "deepspeed_universal:open_universal",
        nested=True,
    ),
    Format(
        DEEPSPEED,
        "zero_pp_rank_0_…_states.pt",
        find_deepspeed,
        "deepspeed:open_deepspeed",
        in_parts=True,
        nested=True,
    ),
    Format(
        META,
        "consolidated.00.pth",
        lambda names: any(map(META_FILE.fullmatch, names)),
        "meta:open_meta",
        frozenset(("rules",)),
        in_parts=True,
    ),
    Format(
        RANK_FILES,
        "…_rank_0.pt",
        lambda names: any(map(is_rank_file, names)),
        "rank_files:open_rank_files",
    ),
    Format(
        TORCH_FILE,
        BIN_NAME,
        lambda names: (
            bool({BIN_INDEX, BIN_NAME} & names) or any(map(BIN_NUMBERED.fullmatch, names))
        ),
        "torch_file:open_bin_directory",
    ),
)
"""Asked in this order."""


class _Found(NamedTuple):
    """A checkpoint that is there, but not open yet."""

    place: Path
    format: str
    takes: frozenset[str]
    reader: str
    home: Path
    """Where all its files lie."""
    nested: bool
    note: str = ""
    """What the user is to be told of how it was found."""


def open_checkpoint(
    path: Path | str,
    *,
    ranks: int | None = None,
    rules: Mapping[str, object] | Path | str | None = None,
) -> Catalog:
    """Open a checkpoint; what describes it is read and checked, its data is not.

    Parameters
    ----------
    path
        A directory in any of the formats of `FORMATS`, a file of one rank of those, one safetensors
        file, one file of `torch.save`, or the index of several; here, or in a store by its URL.
    ranks
        How many ranks have written files, for formats that do not say it.
    rules
        How ranks have cut tensors, for formats that do not say it: pattern of names to spec, or the
        path of a TOML file (`shardspec.checkpoint.formats.tensor_parallel`).

    Raises
    ------
    CheckpointError
        If it is missing, holds no finished save, contradicts itself, or knows by itself what the
        caller has added.
    """
    return open_checkpoints((path,), ranks=ranks, rules=rules)[0]


def open_checkpoints(
    paths: Sequence[Path | str],
    *,
    ranks: int | None = None,
    rules: Mapping[str, object] | Path | str | None = None,
) -> list[Catalog]:
    """Open several checkpoints; each is told what its format does not say, the others are not.

    Raises
    ------
    CheckpointError
        As `open_checkpoint`; of what was added, if none of them needs it.
    """
    options = (("ranks", ranks), ("rules", rules))
    added = {name: value for name, value in options if value is not None}
    found = []
    for path in map(as_path, paths):
        with _told_as_unreadable(path):
            found.append(_find(path))
    for name in sorted(added):
        if not any(name in one.takes for one in found):
            raise CheckpointError(
                f"{found[0].place}: {name} was given, but a checkpoint of this format "
                f"({found[0].format}) needs none: it says so itself; leave {name} out"
            )
    return [_open(one, {name: added[name] for name in added.keys() & one.takes}) for one in found]


def as_catalog(checkpoint: Path | str | Catalog) -> Catalog:
    """Return a checkpoint that may be open already."""
    return open_checkpoint(checkpoint) if isinstance(checkpoint, Path | str) else checkpoint


def _open(found: _Found, added: Mapping[str, object]) -> Catalog:
    # Before anything is read: what is written from now on is found out at the end.
    snapshot = Snapshot.of(found.home, nested=found.nested)
    module, _, function = (found.reader or _reader_of_file(found.place)).partition(":")
    reader = getattr(import_module(f"shardspec.checkpoint.formats.{module}"), function)
    with _told_as_unreadable(found.place):
        opened: Catalog = reader(found.place, **added)
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
        names = frozenset(path.name for path in place.iterdir())
    except NotADirectoryError:
        return _find_file(place)
    except FileNotFoundError:
        raise CheckpointError(f"{place}: there is no such checkpoint; check the path") from None
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {reason(error)}") from None
    if not names:
        raise CheckpointError(f"{place}: is empty, there is no checkpoint in it")
    iteration, note = _iteration(place, names)
    if iteration is not None:
        return _find(iteration)._replace(note=note)
    known = format_of_names(names)
    if known is not None:
        return _Found(place, known.name, known.takes, known.reader, place, known.nested)
    for name in sorted(names):
        part = part_of_several(name, lambda: names)
        if part is not None:
            raise CheckpointError(f"{place}: {name} is {part_text(part)}")
    other = not_read(names)
    if other is not None:
        raise CheckpointError(f"{place}: {other}")
    hint = _nearby(place, names)
    if hint is not None:
        raise CheckpointError(f"{place}: is no checkpoint itself, but {hint}")
    *others, last = dict.fromkeys(one.known_by for one in FORMATS)
    raise CheckpointError(
        f"{place}: has no {', '.join(others)} or {last}; this is no checkpoint of a format that is "
        "known, or its save did not finish"
    )


_MOST_TRACKER_BYTES: Final = 32


def _iteration(place: Path, names: frozenset[str]) -> tuple[Path | None, str]:
    """Return the checkpoint of a run that counts, if a directory is that of a run, and say so."""
    found = sorted(name for name in names if MEGATRON_ITERATION.fullmatch(name))
    if any(map(MEGATRON_RANK.fullmatch, names)):
        return None, ""
    if MEGATRON_TRACKER in names:
        path = file_inside(place, MEGATRON_TRACKER, place)
        with SourceFile(path) as file:
            said = file.read(0, min(file.num_bytes, _MOST_TRACKER_BYTES)).strip().decode("latin1")
        number = int(said) if said.isdecimal() and said.isascii() else None
        due = (said,) if number is None else (f"iter_{number:07d}", f"{RUN_STEP}{number}")
        name = next((name for name in due if name in found or name in names - {said}), "")
        if not name:
            raise CheckpointError(
                f"{path}: says {said!r}, but no such checkpoint is beside it; name the directory "
                "of the iteration itself"
            )
        note = f"reading {name}, which {MEGATRON_TRACKER} names"
    elif not found or found == ["release"]:
        return None, ""
    elif len(found) == 1:
        name, note = found[0], f"reading {found[0]}, which is the only one"
    else:
        raise CheckpointError(
            f"{place}: has the iterations {', '.join(found)} and no {MEGATRON_TRACKER} that says "
            "which counts; name the directory of one"
        )
    return file_inside(place, name, place), note


def format_of_names(names: frozenset[str]) -> Format | None:
    """Return the format of a directory with these names; the first that is met counts."""
    return next((one for one in FORMATS if one.finds(names)), None)


def _find_file(place: Path) -> _Found:
    """Find out what a file is, or is a part of."""
    if place.name == MEGATRON_TRACKER:
        return _find(place.parent)
    other = not_read((place.name,))
    if other is not None:
        raise CheckpointError(f"{place}: {other}")
    part = place
    if place.name == MEGATRON_FILE and find_megatron(frozenset((place.parent.name,))):
        part = place.parent
    home = part.parent
    for one in FORMATS:
        if one.in_parts and one.finds(frozenset((part.name,))):
            return _Found(home, one.name, one.takes, one.reader, home, one.nested)
    names_others = place.name.endswith(INDEX_SUFFIX) or place.name == BIN_INDEX
    if not (names_others or is_rank_file(place.name)):
        home = place
    return _Found(place, "a single file", frozenset(), "", home, nested=False)


def _reader_of_file(place: Path) -> str:
    """Return who reads what is a checkpoint by itself."""
    if place.name.endswith(INDEX_SUFFIX):
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


_DEPTH: Final = 2
_MOST_DIRECTORIES: Final = 256
"""Directories that are looked into: a wrong path may be that of a whole disk."""
_SHOWN: Final = 3
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


def _nearby(place: Path, names: Iterable[str]) -> str | None:
    """Say which checkpoints lie in a directory that is none, or which files could be ones."""
    found = _inside(place)
    if len(found) == 1:
        return f"there is one in it: name {place / found[0][0]} ({found[0][1]})"
    if found:
        return f"there are some in it: {_some([f'{at} ({name})' for at, name in found])}"
    files = sorted((name for name in names if name.endswith(_TORCH_SUFFIXES)), key=_by_numbers)
    return f"there are files of torch in it: {_some(files)}" if files else None


def _some(found: Sequence[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}; name one of them"


def _inside(place: Path) -> list[tuple[str, str]]:
    """Return the nearest checkpoints below a directory: their paths from there, and formats."""
    if isinstance(place, RemotePath):
        # Every look would be a request.
        return []
    level = [place]
    for _ in range(_DEPTH):
        level = list(islice(_directories(level), _MOST_DIRECTORIES))
        found = [
            (str(directory.relative_to(place)), known.name)
            for directory in level
            if (known := format_of_names(frozenset(_names(directory)))) is not None
        ]
        if found:
            return found
    return []


def _directories(level: Iterable[Path]) -> Iterator[Path]:
    for directory in level:
        for name in sorted(_names(directory), key=_by_numbers):
            inner = directory / name
            # What starts with a dot may be a save that was killed.
            if not name.startswith(".") and inner.is_dir():
                yield inner


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except OSError:
        return []


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key by which step-9 comes before step-10."""
    return [
        (int(part), "") if part.isdecimal() and part.isascii() else (-1, part)
        for part in re.split(r"([0-9]{1,18})", name)
    ]
