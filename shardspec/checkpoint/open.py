"""From a path to a checkpoint that can be read, whatever wrote it.

A format is one module of `shardspec.checkpoint.formats` and one line in `FORMATS`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats.names import (
    BIN_INDEX,
    BIN_NAME,
    DCP,
    DCP_HF,
    INDEX_SUFFIX,
    INFO_NAME,
    MEGATRON,
    MEGATRON_FILE,
    METADATA_NAME,
    NATIVE,
    RANK_FILES,
    SAFETENSORS,
    TORCH_FILE,
    find_bin,
    find_dcp,
    find_dcp_hf,
    find_index,
    find_megatron,
    find_native,
    find_plain,
    find_rank_files,
    is_data_file,
    is_rank_file,
    is_torch_file,
)
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import RemotePath, Snapshot, as_path, reason
from shardspec.errors import CheckpointError

__all__ = [
    "FORMATS",
    "Format",
    "as_catalog",
    "nearby",
    "open_checkpoint",
    "open_checkpoints",
]

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
    """What the caller may add of his own: options of `open_checkpoint`."""
    in_parts: bool = False
    """Whether no file that `finds` knows is a checkpoint by itself, so that it means all of it."""

    def opens(self, place: Path, **added: object) -> Catalog:
        """Import the reader, and read."""
        module, function = self.reader.split(":")
        opens = getattr(import_module(f"shardspec.checkpoint.formats.{module}"), function)
        opened: Catalog = opens(place, **added)
        return opened


FORMATS: Final = (
    Format(NATIVE, INFO_NAME, find_native, "native:open_native", in_parts=True),
    Format(DCP, METADATA_NAME, find_dcp, "dcp:open_dcp", in_parts=True),
    Format(
        MEGATRON,
        "mp_rank_00",
        find_megatron,
        "megatron:open_megatron",
        frozenset(("ranks", "rules")),
        in_parts=True,
    ),
    Format(
        DCP_HF,
        "shard-00001-model-….safetensors",
        find_dcp_hf,
        "dcp_hf:open_dcp_hf",
        frozenset(("ranks",)),
        in_parts=True,
    ),
    Format(SAFETENSORS, "an index", find_index, "safetensors:open_index_directory"),
    Format(SAFETENSORS, "*.safetensors", find_plain, "safetensors:open_plain"),
    Format(RANK_FILES, "…_rank_0.pt", find_rank_files, "rank_files:open_rank_files"),
    Format(TORCH_FILE, BIN_NAME, find_bin, "torch_file:open_bin_directory"),
)
"""Asked in this order."""


class _Found(NamedTuple):
    """A checkpoint that is there, but not open yet."""

    place: Path
    form: str
    takes: frozenset[str]
    opens: Callable[..., Catalog]
    snapshot_of: Path
    """Where all its files lie."""


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
        A directory in any of the forms of `FORMATS`, a file of one rank of those, one safetensors
        file, one file of `torch.save`, or the index of several; here, or in a store by its URL.
    ranks
        How many ranks have written files, for forms that do not say it.
    rules
        How ranks have cut tensors, for forms that do not say it: pattern of names to spec, or the
        path of a TOML file (`shardspec.checkpoint.formats.cut_rules`).

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
    """Open several checkpoints; each is told what its form does not say, the others are not.

    Raises
    ------
    CheckpointError
        As `open_checkpoint`; of what was added, if none of them needs it.
    """
    options = (("ranks", ranks), ("rules", rules))
    added = {name: value for name, value in options if value is not None}
    found = [_find(as_path(path)) for path in paths]
    for name in sorted(added):
        if not any(name in one.takes for one in found):
            raise CheckpointError(
                f"{found[0].place}: {name} was given, but a checkpoint of this form "
                f"({found[0].form}) needs none: it says so itself; leave {name} out"
            )
    return [_open(one, {name: added[name] for name in added.keys() & one.takes}) for one in found]


def _open(found: _Found, added: Mapping[str, object]) -> Catalog:
    # Before anything is read: what is written from now on is found out at the end.
    snapshot = Snapshot.of(found.snapshot_of, nested=found.form == MEGATRON)
    opened = found.opens(found.place, **added)
    opened.snapshot = snapshot
    return opened


def as_catalog(checkpoint: Path | str | Catalog) -> Catalog:
    """Return a checkpoint that may be open already."""
    return open_checkpoint(checkpoint) if isinstance(checkpoint, Path | str) else checkpoint


def _find(place: Path) -> _Found:
    """Find out what lies somewhere.

    Raises
    ------
    CheckpointError
        If it is no checkpoint.
    """
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
    for form in FORMATS:
        if form.finds(names):
            return _Found(place, form.name, form.takes, form.opens, place)
    hint = nearby(place, names, _form_of)
    if hint is not None:
        raise CheckpointError(f"{place}: is no checkpoint itself, but {hint}")
    *known, last = dict.fromkeys(form.known_by for form in FORMATS)
    raise CheckpointError(
        f"{place}: has no {', '.join(known)} or {last}; this is no checkpoint of a form that is "
        "known, or its save did not finish"
    )


def _form_of(names: frozenset[str]) -> str | None:
    return next((form.name for form in FORMATS if form.finds(names)), None)


def _find_file(place: Path) -> _Found:
    """Find out what a file is, or is a part of."""
    part = place
    if place.name == MEGATRON_FILE and find_megatron(frozenset((place.parent.name,))):
        part = place.parent
    for form in FORMATS:
        if form.in_parts and form.finds(frozenset((part.name,))):
            return _Found(part.parent, form.name, form.takes, form.opens, part.parent)
    alone = not (place.name.endswith(INDEX_SUFFIX) or place.name == BIN_INDEX)
    alone = alone and not is_rank_file(place.name)
    where = place if alone else place.parent
    return _Found(place, "a single file", frozenset(), _open_file, where)


def _open_file(place: Path) -> Catalog:
    """Open what is a checkpoint by itself."""
    if place.name.endswith(INDEX_SUFFIX):
        from shardspec.checkpoint.formats.safetensors import open_index_file

        return open_index_file(place)
    if place.name == BIN_INDEX:
        from shardspec.checkpoint.formats.torch_file import open_bin_index

        return open_bin_index(place)
    with SourceFile(place) as file:
        size = file.num_bytes
        head = file.read(0, min(size, 16))
    if is_torch_file(head):
        if is_rank_file(place.name):
            from shardspec.checkpoint.formats.rank_files import open_family

            return open_family(place)
        from shardspec.checkpoint.formats.torch_file import open_torch_file

        return open_torch_file(place)
    wrong = _no_safetensors(place, head, size)
    if wrong is not None:
        raise CheckpointError(f"{place}: {wrong}")
    from shardspec.checkpoint.formats.safetensors import open_single_file

    return open_single_file(place)


def _no_safetensors(place: Path, head: bytes, num_bytes: int) -> str | None:
    """Say what is wrong with a file that is not even a damaged safetensors file."""
    if head.startswith(_OLD_TORCH):
        return (
            "is in the form that torch.save had before torch 1.6, which cannot be read in place; "
            "load it with torch.load(weights_only=True) and save it again"
        )
    if is_data_file(place.name) or int.from_bytes(head[:8], "little") < num_bytes:
        return None
    return (
        "is neither a safetensors file nor one of torch.save; name one of these, or the directory "
        "of a checkpoint"
    )


_DEPTH: Final = 2
_MOST_DIRECTORIES: Final = 256
"""Directories that are looked into: a wrong path may be that of a whole disk."""
_SHOWN: Final = 3
_NUMBERED: Final = re.compile(r"-[0-9]+-of-[0-9]+\.")
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


def nearby(
    place: Path, names: Iterable[str], form_of: Callable[[frozenset[str]], str | None]
) -> str | None:
    """Say which checkpoints lie in a directory that is none, or which files could be ones.

    Parameters
    ----------
    place, names
        The directory, and what lies in it.
    form_of
        Says, of a directory with these names, what it is.

    Returns
    -------
    str or None
        The second half of an error; None if there is nothing to say.

    Examples
    --------
    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> for step in (9, 10):
    ...     _ = (run / f"step-{step}").mkdir(), (run / f"step-{step}" / "m").touch()
    >>> print(nearby(run, ["step-9", "step-10"], lambda names: "m form" if "m" in names else None))
    there are some in it: step-9 (m form), step-10 (m form); name one of them
    """
    found = _inside(place, form_of)
    if len(found) == 1:
        return f"there is one in it: name {place / found[0][0]} ({found[0][1]})"
    if found:
        shown = ", ".join(f"{name} ({form})" for name, form in found[:_SHOWN])
        return f"there are some in it: {shown}{_more(found)}; name one of them"
    files = sorted((n for n in names if n.endswith(_TORCH_SUFFIXES)), key=_by_numbers)
    numbered = [name for name in files if _NUMBERED.search(name)]
    if numbered:
        return (
            f"there are parts of one in it, such as {numbered[0]}, without the index that lists "
            "them; restore it"
        )
    if files:
        shown = ", ".join(files[:_SHOWN])
        return f"there are files of torch in it: {shown}{_more(files)}; name one of them"
    return None


def _more(found: list[str] | list[tuple[str, str]]) -> str:
    return f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""


def _inside(place: Path, form_of: Callable[[frozenset[str]], str | None]) -> list[tuple[str, str]]:
    """Return the nearest checkpoints below a directory: their paths from there, and forms."""
    if isinstance(place, RemotePath):
        # Every look would be a request.
        return []
    level = [place]
    for _ in range(_DEPTH):
        level = list(islice(_directories(level), _MOST_DIRECTORIES))
        found = [
            (str(directory.relative_to(place)), form)
            for directory in level
            if (form := form_of(frozenset(_names(directory)))) is not None
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
