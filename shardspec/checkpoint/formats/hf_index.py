"""Hugging Face's safetensors: whole tensors, spread over files that an index lists, or none lists.

The index is ``model.safetensors.index.json``, ``{"metadata": {"total_size": bytes}, "weight_map":
{tensor name: file name}}``. It is compared with the headers of the files both ways. `total_size`
is not: writers count tied tensors once or twice. Files beside those that the index names
(``consolidated.safetensors``, adapters) are left alone. Files may be links into the ``blobs`` of a
hub cache, as its ``snapshots`` have them, and into nothing else.

Without an index, all ``*.safetensors`` of the directory make up the checkpoint. No tensor may stand
in two of them, and where files are numbered ``-00001-of-00003`` all three have to be there. That an
unnumbered file is missing cannot be told.

Source: ``save_pretrained`` of transformers and ``split_torch_state_dict_into_shards`` of
huggingface_hub.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Set
from pathlib import Path
from typing import Final

from shardspec.checkpoint.formats.listed import ListedCheckpoint, whole_tensor
from shardspec.checkpoint.formats.saved_offsets import saved_offsets
from shardspec.checkpoint.reading.form_names import (
    INDEX_SUFFIX,
    INFO_NAME,
    SAFETENSORS,
    is_data_file,
)
from shardspec.checkpoint.reading.info import SAVE_KEY
from shardspec.checkpoint.reading.safetensors_file import Header, read_header
from shardspec.checkpoint.reading.source import StoredTensor
from shardspec.checkpoint.reading.strict_json import as_object, as_text, member, parse_json
from shardspec.checkpoint.storage.aside import in_turn, looks_ahead
from shardspec.checkpoint.storage.files import SourceFile, file_inside, is_there
from shardspec.checkpoint.storage.remote import RemotePath
from shardspec.errors import CheckpointError

__all__ = [
    "by_file",
    "check_listed",
    "check_numbering",
    "open_index_directory",
    "open_index_file",
    "open_plain",
    "whole_header",
]

_NUMBERED: Final = re.compile(r"(.*)-(\d+)-of-(\d+)(\.[a-z]+)", re.DOTALL)
_MOST_INDEX_BYTES: Final = 256 << 20


def open_index_directory(directory: Path) -> ListedCheckpoint:
    """Read the one index of a directory, as `open_index_file` does.

    Raises
    ------
    CheckpointError
        If there are several, or what `open_index_file` raises.
    """
    found = sorted(path.name for path in directory.iterdir() if path.name.endswith(INDEX_SUFFIX))
    if len(found) != 1:
        raise CheckpointError(
            f"{directory}: has the indexes {', '.join(found)}; name the one to read instead of "
            "the directory"
        )
    return open_index_file(_file(directory, found[0], directory))


def open_index_file(index: Path) -> ListedCheckpoint:
    """Read an index and the headers of its files, and check that they agree.

    Raises
    ------
    CheckpointError
        If the index is damaged, a file that it names is missing or damaged, or files and index
        disagree about which tensor lies where.
    """
    tensors: dict[str, StoredTensor] = {}
    files = by_file(index)
    with in_turn(files, whole_header, looks_ahead(index)) as headers:
        for (path, names), header in zip(files.items(), headers, strict=True):
            entries = {entry.name: entry for entry in header.entries}
            check_listed(path, entries, names, index)
            for name, entry in entries.items():
                tensors[name] = whole_tensor(name, entry.shape, entry.dtype, path, entry.offset)
    return ListedCheckpoint(SAFETENSORS, index.parent, tensors, (index, *files))


def by_file(index: Path) -> dict[Path, set[str]]:
    """Read an index and return what it puts into every file; all files are there.

    Raises
    ------
    CheckpointError
        If the index is damaged, or a file is missing or does not lie in its directory.
    """
    names: dict[str, set[str]] = {}
    for name, file in _weight_map(index).items():
        names.setdefault(file, set()).add(name)
    found = {}
    for file, listed in sorted(names.items()):
        path = _file(index.parent, file, index)
        if not is_there(path):
            raise CheckpointError(
                f"{path}: is missing, but {index.name} puts {len(listed)} tensors into it, "
                f"{min(listed)!r} first; restore it"
            )
        found[path] = listed
    return found


def check_listed(path: Path, held: Collection[str], listed: Set[str], index: Path) -> None:
    """Check that a file holds what its index says.

    Raises
    ------
    CheckpointError
        If it holds or lacks a tensor; names it.
    """
    for name in held:
        if name not in listed:
            raise CheckpointError(
                f"{path}: holds tensor {name!r}, which {index.name} does not list for it; index "
                "and files are not of one save, restore them"
            )
    if len(held) < len(listed):
        raise CheckpointError(
            f"{path}: lacks tensor {min(listed - set(held))!r}, which {index.name} lists for it; "
            "index and files are not of one save, restore them"
        )


def open_plain(directory: Path) -> ListedCheckpoint:
    """Read the headers of all safetensors files of a directory that has no index.

    Raises
    ------
    CheckpointError
        If a file is damaged or one of a numbered row is missing, if two files hold a tensor of
        the same name, or if the files are an unfinished save of shardspec's own.
    """
    names = sorted(path.name for path in directory.iterdir() if is_data_file(path.name))
    check_numbering(directory, names)
    paths = [_file(directory, name, directory) for name in names]
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, Path] = {}
    with in_turn(paths, whole_header, looks_ahead(directory)) as headers:
        for path, header in zip(paths, headers, strict=True):
            if SAVE_KEY in header.metadata:
                raise CheckpointError(
                    f"{directory}: has no {INFO_NAME}, which is written last; the save did not "
                    "finish, or that file was lost; save again"
                )
            for entry in header.entries:
                if entry.name in home:
                    raise CheckpointError(
                        f"{directory}: {home[entry.name].name} and {path.name} both hold tensor "
                        f"{entry.name!r}, and no index says which counts; name the file to read, "
                        "or move the other away"
                    )
                home[entry.name] = path
                tensors[entry.name] = whole_tensor(
                    entry.name, entry.shape, entry.dtype, path, entry.offset
                )
    return ListedCheckpoint(SAFETENSORS, directory, tensors, tuple(paths))


def check_numbering(directory: Path, names: Iterable[str]) -> None:
    """Check that of files named ``x-00001-of-00003.safetensors`` all are there.

    Raises
    ------
    CheckpointError
        If one is missing, or some number is past the last.

    Examples
    --------
    >>> check_numbering(Path("ckpt"), ["m-00001-of-00002.bin"])
    Traceback (most recent call last):
    shardspec.errors.CheckpointError: ckpt: m-00002-of-00002.bin is missing, by the numbers of the \
others; restore it
    """
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            stem, number, count, suffix = match.groups()
            rows.setdefault((stem, count, suffix), {})[int(number)] = number
    for (stem, count, suffix), found in rows.items():
        due = int(count)
        for number in range(1, due + 1):
            if number not in found:
                shown = f"{stem}-{number:0{len(count)}d}-of-{count}{suffix}"
                raise CheckpointError(
                    f"{directory}: {shown} is missing, by the numbers of the others; restore it"
                )
        for number in found:
            if not 1 <= number <= due:
                raise CheckpointError(
                    f"{directory}: {stem}-{found[number]}-of-{count}{suffix} has a number that is "
                    f"not from 1 to {due}; it belongs elsewhere, move it away"
                )


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of every tensor of an index."""
    with SourceFile(index) as file:
        if file.num_bytes > _MOST_INDEX_BYTES:
            raise CheckpointError(
                f"{index}: has {file.num_bytes} bytes, past the {_MOST_INDEX_BYTES} that an index "
                "may have; it is damaged"
            )
        data = file.read(0, file.num_bytes)
    table = as_object(parse_json(data, index, "index"), index, "the index")
    entries = as_object(member(table, "weight_map", index, "weight_map"), index, "weight_map")
    return {
        name: as_text(file, index, f"weight_map[{json.dumps(name)}]")
        for name, file in entries.items()
    }


def _file(directory: Path, name: str, stated_by: Path) -> Path:
    """Return the path of a file of the checkpoint, a link into a hub cache's blobs followed."""
    path = directory / name
    if isinstance(path, RemotePath):
        return file_inside(directory, name, stated_by)
    plain = name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
    if plain and os.path.islink(path) and directory.resolve().parent.name == "snapshots":
        real = Path(os.path.realpath(path))
        if real.parent == directory.resolve().parent.parent / "blobs":
            return path
    return file_inside(directory, name, stated_by)


def whole_header(path: Path) -> Header:
    """Return the header of a file that should hold whole tensors.

    Raises
    ------
    CheckpointError
        If it is damaged, or says that it holds shards.
    """
    with SourceFile(path) as file:
        header = read_header(file)
    for name, offsets in (saved_offsets(path, header) or {}).items():
        if any(offsets):
            raise CheckpointError(
                f"{path}: says that it holds a shard of tensor {name!r} from index {list(offsets)} "
                "on, but its name is not that of a shard; give it its name back, such as "
                "shard-00001-model-00001-of-00001.safetensors"
            )
    return header
