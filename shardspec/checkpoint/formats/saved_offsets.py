"""The note by which torch says where the tensors of a safetensors file belong.

``torch.distributed.checkpoint.HuggingFaceStorageWriter`` puts three strings into the metadata of
every file: ``"format": "pt"``, ``"DCP_VERSION": "1.0"`` and ``"DCP_SHARDING_INFO"``, the JSON text
``{tensor name: {"saved_offsets": [first index per dim]}}``. Source: ``_write_files_from_queue`` of
torch/distributed/checkpoint/filesystem.py, torch 2.8 to 2.13.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shardspec.checkpoint.formats.safetensors_header import Header
from shardspec.checkpoint.strict_json import as_object, as_sizes, member, parse_json
from shardspec.errors import CheckpointError

__all__ = ["saved_offsets"]

_INFO: Final = "DCP_SHARDING_INFO"
_VERSION: Final = "DCP_VERSION"
_KNOWN_VERSION: Final = "1.0"


def saved_offsets(path: Path, header: Header) -> Mapping[str, tuple[int, ...]] | None:
    """Return per tensor of a file its first index in the whole tensor; None if none are noted."""
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
