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
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import (
    FileMetadata,
    ListedCatalog,
    StoredTensor,
    unsharded_tensor,
)
from shardspec.checkpoint.formats.names import INDEX_SUFFIX, INFO_NAME, SAFETENSORS, is_data_file
from shardspec.checkpoint.formats.safetensors_header import (
    Header,
    TensorSlot,
    encode_header,
    read_header,
)
from shardspec.checkpoint.sharding_info import SAVE_KEY
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.strict_json import as_object, as_sizes, as_text, member, parse_json
from shardspec.checkpoint.targets import (
    Extent,
    OutputFile,
    OutputTensor,
    Put,
    RawBytes,
    Target,
    whole_box,
)
from shardspec.errors import CheckpointError

__all__ = [
    "INDEX_NAME",
    "METADATA",
    "by_file",
    "check_listed",
    "check_numbering",
    "huggingface_target",
    "one_file",
    "open_index_directory",
    "open_index_file",
    "open_single_file",
    "open_without_index",
    "safetensors_target",
    "saved_offsets",
    "whole_header",
]

_INFO: Final = "DCP_SHARDING_INFO"
_VERSION: Final = "DCP_VERSION"
_KNOWN_VERSION: Final = "1.0"
_NUMBERED: Final = re.compile(r"(.*)-(\d+)-of-(\d+)(\.[a-z]+)", re.DOTALL)
_MOST_INDEX_BYTES: Final = 256 << 20


def open_index_directory(directory: Path) -> ListedCatalog:
    """Read the one index of a directory, as `open_index_file` does."""
    found = sorted(path.name for path in directory.iterdir() if path.name.endswith(INDEX_SUFFIX))
    if len(found) != 1:
        raise CheckpointError(
            f"{directory}: has the indexes {', '.join(found)}; name the one to read instead of "
            "the directory"
        )
    return open_index_file(file_inside(directory, found[0], directory))


def open_index_file(index: Path) -> ListedCatalog:
    """Read an index and the headers of its files, and check that they agree."""
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[Path, Mapping[str, str]] = {}
    files = by_file(index)
    with prefetch_map(files, whole_header, prefetch_depth(index)) as headers:
        for (path, names), header in zip(files.items(), headers, strict=True):
            found = _tensors(path, header)
            check_listed(path, found, names, index)
            tensors |= found
            metadata[path] = header.metadata
    return _listed(index.parent, tensors, (index, *files), metadata)


def by_file(index: Path) -> dict[Path, set[str]]:
    """Read an index and return what it puts into every file; all files are there."""
    names: dict[str, set[str]] = {}
    for name, file in _weight_map(index).items():
        names.setdefault(file, set()).add(name)
    found = {}
    for file, listed in sorted(names.items()):
        path = file_inside(index.parent, file, index)
        if not path_exists(path):
            raise CheckpointError(
                f"{path}: is missing, but {index.name} puts {len(listed)} tensors into it, "
                f"{min(listed)!r} first; restore it"
            )
        found[path] = listed
    return found


def check_listed(path: Path, held: Collection[str], listed: Set[str], index: Path) -> None:
    """Check that a file holds what its index says."""
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


def open_without_index(directory: Path) -> ListedCatalog:
    """Read the headers of all safetensors files of a directory that has no index."""
    names = sorted(path.name for path in directory.iterdir() if is_data_file(path.name))
    check_numbering(directory, names)
    paths = [file_inside(directory, name, directory) for name in names]
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[Path, Mapping[str, str]] = {}
    home: dict[str, Path] = {}
    with prefetch_map(paths, whole_header, prefetch_depth(directory)) as headers:
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
            tensors |= _tensors(path, header)
            metadata[path] = header.metadata
    return _listed(directory, tensors, tuple(paths), metadata)


def check_numbering(directory: Path, names: Iterable[str]) -> None:
    """Check that of files named ``x-00001-of-00003.safetensors`` all are there.

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


def whole_header(path: Path) -> Header:
    """Return the header of a file that should hold whole tensors."""
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


def open_single_file(path: Path) -> ListedCatalog:
    """Read the header of one safetensors file."""
    header = whole_header(path)
    if SAVE_KEY in header.metadata:
        raise CheckpointError(
            f"{path}: holds what one rank has saved, which may be parts of tensors; name its "
            f"directory, {path.parent}"
        )
    return _listed(path, _tensors(path, header), (path,), {path: header.metadata})


_OWN_KEYS: Final = ("format", "DCP_SHARDING_INFO", "DCP_VERSION")
"""What a writer says of its own file, and of no other that holds the same tensors."""


def _listed(
    place: Path,
    tensors: Mapping[str, StoredTensor],
    files: Sequence[Path],
    metadata: Mapping[Path, Mapping[str, str]],
) -> ListedCatalog:
    """Return the catalog of files that hold whole tensors, and what they say besides."""
    said: dict[str, tuple[str, Path]] = {}
    contradictions: dict[str, tuple[Path, Path]] = {}
    for path, values in metadata.items():
        for key, value in values.items():
            known, other = said.setdefault(key, (value, path))
            if known != value:
                contradictions.setdefault(key, (other, path))
    agreed = {
        key: value
        for key, (value, _) in said.items()
        if key not in _OWN_KEYS and key not in contradictions
    }
    found = ListedCatalog(SAFETENSORS, place, tensors, files)
    for key in _OWN_KEYS:
        contradictions.pop(key, None)
    found.file_metadata = FileMetadata(agreed, contradictions)
    return found


def _tensors(path: Path, header: Header) -> dict[str, StoredTensor]:
    """Return the tensors of a file, each whole."""
    return {
        entry.name: unsharded_tensor(entry.name, entry.shape, entry.dtype, path, entry.offset)
        for entry in header.entries
    }


METADATA: Final = {"format": "pt"}
"""What transformers and others want to find in a file."""


def one_file(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str] = METADATA
) -> OutputFile:
    """Return a safetensors file that holds whole tensors.

    Examples
    --------
    >>> file = one_file("a.safetensors", [OutputTensor("w", "w", (2, 3), "float32")])
    >>> file.num_bytes, [(e.offset, e.num_bytes) for e in file.extents]
    (120, [(96, 24)])
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    head, header = encode_header(
        (TensorSlot(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors), metadata
    )
    slots = (
        Extent(by_name[entry.name], whole_box(entry.shape), entry.offset)
        for entry in header.entries
    )
    return OutputFile(name, header.file_bytes, (RawBytes(0, head),), tuple(slots))


def safetensors_target(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str] = METADATA
) -> Target:
    """Return the output that is one safetensors file; see `one_file`."""
    return Target((one_file(name, tensors, metadata),), directory=False)


INDEX_NAME: Final = "model.safetensors.index.json"


def huggingface_target(
    tensors: Sequence[OutputTensor],
    max_shard_bytes: int,
    metadata: Mapping[str, str] = METADATA,
    alone: str = "model.safetensors",
) -> Target:
    """Return the output that is a directory of safetensors files with an index.

    Tensors are put into files in their order; none has more than `max_shard_bytes` of several. If
    there is one only, its name is `alone`.

    Examples
    --------
    >>> tensors = [OutputTensor(name, name, (3,), "float32") for name in "abc"]
    >>> [file.name for file in huggingface_target(tensors, 24).files]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    shards: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    if len(shards) == 1:
        return Target((one_file(alone, shards[0], metadata),), directory=True)
    names = [
        f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)
    ]

    def last(_: Mapping[str, Sequence[int]], put: Put) -> None:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {
                tensor.name: name
                for name, shard in zip(names, shards, strict=True)
                for tensor in shard
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        put(INDEX_NAME, lambda write: write(text.encode()))

    files = (one_file(name, shard, metadata) for name, shard in zip(names, shards, strict=True))
    return Target(tuple(files), directory=True, last=last)


def saved_offsets(path: Path, header: Header) -> Mapping[str, tuple[int, ...]] | None:
    """Return per tensor of a file its first index in the whole tensor; None if none are noted.

    torch's ``HuggingFaceStorageWriter`` puts ``"DCP_VERSION": "1.0"`` into the metadata of a file,
    and ``"DCP_SHARDING_INFO"``, the JSON text ``{tensor name: {"saved_offsets": [first index per
    dim]}}``. Source: torch/distributed/checkpoint/filesystem.py, torch 2.8 to 2.13.
    """
    text = header.metadata.get(_INFO)
    if text is None:
        return None
    version = header.metadata.get(_VERSION)
    if version != _KNOWN_VERSION:
        raise CheckpointError(
            f"{path}: its metadata says {_VERSION} {version!r}, but {_KNOWN_VERSION!r} is the one "
            "that can be read; save again with a torch that writes it"
        )
    notes = as_object(parse_json(text.encode("utf-8"), path, _INFO), path, _INFO)
    offsets: dict[str, tuple[int, ...]] = {}
    for entry in header.entries:
        if entry.name not in notes:
            raise CheckpointError(
                f"{path}: {_INFO} says nothing of tensor {entry.name!r}; the file was changed, "
                "restore it"
            )
        what = f"{_INFO}[{entry.name!r}]"
        note = as_object(notes.pop(entry.name), path, what)
        key = f"{what}.saved_offsets"
        found = as_sizes(member(note, "saved_offsets", path, key), path, key)
        if len(found) != len(entry.shape):
            raise CheckpointError(
                f"{path}: {key} is {list(found)}, but the tensor has shape {list(entry.shape)}; "
                "the file was changed, restore it"
            )
        offsets[entry.name] = found
    for name in notes:
        raise CheckpointError(
            f"{path}: {_INFO} speaks of tensor {name!r}, which the file does not hold; the file "
            "was changed, restore it"
        )
    return offsets
