"""Hugging Face's safetensors: whole tensors, spread over files that an index lists, or none lists.

The index is ``model.safetensors.index.json``, ``{"metadata": {"total_size": bytes}, "weight_map":
{tensor name: file name}}``. It is compared with the headers of the files both ways, but for
`total_size`: writers count tied tensors once or twice. Other files beside those that it names are
left alone. Without an index, all ``*.safetensors`` of the directory make up the checkpoint. No
tensor may stand in two of them, and where files are numbered ``-00001-of-00003`` all three have to
be there. That an unnumbered file is missing cannot be told.

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
    whole_box,
)
from shardspec.checkpoint.formats.names import INFO_NAME, SAFETENSORS, is_data_file, is_index
from shardspec.checkpoint.formats.safetensors_header import (
    Header,
    TensorSlot,
    encode_header,
    read_header,
)
from shardspec.checkpoint.sharding_info import SAVE_KEY
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.strict_json import JSONStream, checked, field, parse_json
from shardspec.checkpoint.targets import Extent, OutputFile, OutputTensor, Put, RawBytes, Target
from shardspec.errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
METADATA: Final = {"format": "pt"}
"""What transformers and others want to find in a file."""
_INFO: Final = "DCP_SHARDING_INFO"
_VERSION: Final = "DCP_VERSION"
_KNOWN_VERSION: Final = "1.0"
_OWN_KEYS: Final = frozenset(("format", _INFO, _VERSION))
"""What a writer says of its own file, and of no other that holds the same tensors."""
_NUMBERED: Final = re.compile(r"(.*)-(\d+)-of-(\d+)(\.[a-z]+)", re.DOTALL)
_MOST_INDEX_BYTES: Final = 256 << 20


def open_index_directory(directory: Path) -> ListedCatalog:
    """Read the one index of a directory, as `open_index_file` does."""
    found = sorted(path.name for path in directory.iterdir() if is_index(path.name))
    if len(found) != 1:
        raise CheckpointError(
            f"{directory}: has the indexes {', '.join(found)}; name the one to read instead of "
            "the directory"
        )
    return open_index_file(file_inside(directory, found[0], directory))


def open_index_file(index: Path) -> ListedCatalog:
    """Read an index and the headers of its files, and check that they agree."""
    return _opened(index.parent, by_file(index), index)


def open_without_index(directory: Path) -> ListedCatalog:
    """Read the headers of all safetensors files of a directory that has no index."""
    names = sorted(path.name for path in directory.iterdir() if is_data_file(path.name))
    check_numbering(directory, names)
    return _opened(directory, {file_inside(directory, name, directory): set() for name in names})


def open_single_file(path: Path) -> ListedCatalog:
    """Read the header of one safetensors file."""
    return _opened(path, {path: set()})


def _opened(
    place: Path, files: Mapping[Path, Set[str]], index: Path | None = None
) -> ListedCatalog:
    """Return the catalog of files that hold whole tensors: those that an index lists, or all."""
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, Path] = {}
    said: dict[str, tuple[str, Path]] = {}
    contradictions: dict[str, tuple[Path, Path]] = {}
    with prefetch_map(files, _whole_header, prefetch_depth(place)) as headers:
        for (path, listed), header in zip(files.items(), headers, strict=True):
            if index is not None:
                check_listed(path, [entry.name for entry in header.entries], listed, index)
            elif SAVE_KEY in header.metadata:
                raise CheckpointError(
                    f"{path}: holds what one rank has saved, which may be parts of tensors; name "
                    f"its directory, {path.parent}"
                    if place == path
                    else f"{place}: has no {INFO_NAME}, which is written last; the save did not "
                    "finish, or that file was lost; save again"
                )
            for name, dtype, shape, offset, _ in header.entries:
                if name in home:
                    raise CheckpointError(
                        f"{place}: {home[name].name} and {path.name} both hold tensor {name!r}, "
                        "and no index says which counts; name the file to read, or move the other "
                        "away"
                    )
                home[name] = path
                tensors[name] = unsharded_tensor(name, shape, dtype, path, offset)
            for key, value in header.metadata.items():
                known, other = said.setdefault(key, (value, path))
                if known != value and key not in _OWN_KEYS:
                    contradictions.setdefault(key, (other, path))
    found = ListedCatalog(SAFETENSORS, place, tensors, (index, *files) if index else tuple(files))
    unsaid = _OWN_KEYS | contradictions.keys()
    agreed = {key: value for key, (value, _) in said.items() if key not in unsaid}
    found.file_metadata = FileMetadata(agreed, contradictions)
    return found


def by_file(index: Path) -> dict[Path, set[str]]:
    """Read an index and return what it puts into every file; all files are there."""
    names: dict[str, set[str]] = {}
    with SourceFile(index) as file:
        if file.num_bytes > _MOST_INDEX_BYTES:
            raise CheckpointError(
                f"{index}: has {file.num_bytes} bytes, past the {_MOST_INDEX_BYTES} that an index "
                "may have; it is damaged"
            )
        stated: dict[str, object] = {}
        stream = JSONStream(file.read, file.num_bytes, index, "index")
        for key in stream.members("the index"):
            if key != "weight_map":
                stream.value()
                continue
            stated[key] = None
            for name in stream.members(key):
                home = checked(stream.value(), str, index, f"weight_map[{name!r}]")
                names.setdefault(home, set()).add(name)
        stream.end()
    field(stated, "weight_map", object, index, "")
    found = {}
    for home, listed in sorted(names.items()):
        path = file_inside(index.parent, home, index)
        if not path_exists(path):
            raise CheckpointError(
                f"{path}: is missing, but {index.name} puts {len(listed)} tensors into it, "
                f"{min(listed)!r} first; restore it"
            )
        found[path] = listed
    return found


def check_listed(path: Path, held: Iterable[str], listed: Set[str], index: Path) -> None:
    """Check that a file holds what its index says."""
    for name in sorted(listed ^ set(held), key=lambda name: (name in listed, name)):
        problem = f"holds tensor {name!r}, which {index.name} does not list for it"
        if name in listed:
            problem = f"lacks tensor {name!r}, which {index.name} lists for it"
        raise CheckpointError(
            f"{path}: {problem}; index and files are not of one save, restore them"
        )


def check_numbering(directory: Path, names: Collection[str]) -> None:
    """Check that of files named ``x-00001-of-00003.safetensors`` all are there, and some at all."""
    if not names:
        # There were some when the format was found; whoever replaces them has just removed them.
        raise CheckpointError(
            f"{directory}: its files were removed while it was opened; run again when nobody "
            "writes it"
        )
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            stem, number, count, suffix = match.groups()
            rows.setdefault((stem, count, suffix), {})[int(number)] = name
    for (stem, count, suffix), found in rows.items():
        due = range(1, int(count) + 1)
        missing = next((number for number in due if number not in found), None)
        if missing is not None:
            raise CheckpointError(
                f"{directory}: {stem}-{missing:0{len(count)}d}-of-{count}{suffix} is missing, by "
                "the numbers of the others; restore it"
            )
        for number, name in found.items():
            if number not in due:
                raise CheckpointError(
                    f"{directory}: {name} has a number that is not from 1 to {int(count)}; it "
                    "belongs elsewhere, move it away"
                )


def _whole_header(path: Path) -> Header:
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


def safetensors_target(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str] = METADATA
) -> Target:
    """Return the output that is one safetensors file."""
    return Target((_file(name, tensors, metadata),), directory=False)


def _file(name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> OutputFile:
    by_name = {tensor.name: tensor for tensor in tensors}
    slots = (TensorSlot(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    head, header = encode_header(slots, metadata)
    extents = tuple(
        Extent(by_name[entry.name], whole_box(entry.shape), entry.offset)
        for entry in header.entries
    )
    return OutputFile(name, header.file_bytes, (RawBytes(0, head),), extents)


def huggingface_target(
    tensors: Sequence[OutputTensor],
    max_shard_bytes: int,
    metadata: Mapping[str, str] = METADATA,
    alone: str = "model.safetensors",
) -> Target:
    """Return the output that is a directory of safetensors files with an index.

    Tensors are put into files in their order; none has more than `max_shard_bytes` of several. If
    there is one only, its name is `alone`.
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
        return Target((_file(alone, shards[0], metadata),), directory=True)
    files = tuple(
        _file(f"model-{place:05d}-of-{len(shards):05d}.safetensors", shard, metadata)
        for place, shard in enumerate(shards, 1)
    )

    def last(_: Mapping[str, Sequence[int]], put: Put) -> None:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {
                tensor.name: file.name
                for file, shard in zip(files, shards, strict=True)
                for tensor in shard
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        put(INDEX_NAME, lambda write: write(text.encode()))

    return Target(files, directory=True, last=last)


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
    notes = checked(parse_json(text.encode("utf-8"), path, _INFO), dict, path, _INFO)
    for name in sorted(notes.keys() ^ {entry.name for entry in header.entries}):
        problem = f"says nothing of tensor {name!r}"
        if name in notes:
            problem = f"speaks of tensor {name!r}, which the file does not hold"
        raise CheckpointError(f"{path}: {_INFO} {problem}; the file was changed, restore it")
    offsets: dict[str, tuple[int, ...]] = {}
    for entry in header.entries:
        what = f"{_INFO}[{entry.name!r}]"
        note = checked(notes[entry.name], dict, path, what)
        found = offsets[entry.name] = field(note, "saved_offsets", tuple, path, what)
        if len(found) != len(entry.shape):
            raise CheckpointError(
                f"{path}: {what}.saved_offsets is {list(found)}, but the tensor has shape "
                f"{list(entry.shape)}; the file was changed, restore it"
            )
    return offsets
