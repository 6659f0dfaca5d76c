"""Reads and writes safetensors files, each a checkpoint by itself.

A file is 8 bytes with the length of the header (little endian), the header (JSON), and the bytes
of the tensors. Every rule of the specification for headers is checked.

Source: https://github.com/huggingface/safetensors, section "Format".
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import (
    Catalog,
    CheckpointFacts,
    Extent,
    FileMetadata,
    OutputFile,
    OutputTensor,
    RawBytes,
    StoredTensor,
    Target,
    unsharded_tensor,
    whole_box,
)
from shardspec.checkpoint.formats import FileStart, Format, OpenOptions, Wanted, never
from shardspec.checkpoint.formats.model_files import ModelFiles, check_alone, is_data_file
from shardspec.checkpoint.storage.path import SourceFile, StoragePath
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.checkpoint.storage.strict_json import checked, fields, parse_json
from shardspec.dtypes import from_safetensors, item_bytes, packed, to_safetensors
from shardspec.errors import CheckpointError, DTypeError
from shardspec.text import shown

METADATA: Final = {"format": "pt"}
"""Metadata that transformers and other tools expect in a file."""
SAVE_KEY: Final = "shardspec.save"
"""Metadata key of the id of the save, in files of shardspec's own format."""
MAX_DIMS: Final = 64
"""Maximum number of dims of a tensor in numpy and torch."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the format."""
_METADATA: Final = "__metadata__"
_FIELDS: Final = {"dtype": str, "shape": tuple, "data_offsets": tuple}
_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
"""Order of the dtypes in a file, as safetensors 0.8 writes it: wide ones first, so that every
tensor starts at a multiple of its item size. Tensors of one dtype are sorted by name."""
_INFO: Final = "DCP_SHARDING_INFO"
_VERSION: Final = "DCP_VERSION"
_OWN_KEYS: Final = frozenset(("format", _INFO, _VERSION))
"""Metadata keys that may differ between the files of one checkpoint."""


TensorSlot: TypeAlias = tuple[str, str, tuple[int, ...]]
"""A tensor to be written: its name, dtype and shape, as in `HeaderEntry`."""


class HeaderEntry(NamedTuple):
    """A tensor in the header of a file."""

    name: str
    dtype: str
    """Name of the element type in torch."""
    shape: tuple[int, ...]
    """Shape in elements of torch; a header counts numbers, and an element of F4 has two."""
    offset: int
    """Position of the first byte, from the start of the file."""
    num_bytes: int


class Header(NamedTuple):
    """The tensors of a file in the order of their bytes, its metadata and its size."""

    entries: Sequence[HeaderEntry]
    metadata: Mapping[str, str]
    file_bytes: int
    """Size of the file."""


def read_header(file: SourceFile) -> Header:
    """Return the parsed header of a file; raises CheckpointError if it breaks the format."""
    path, file_bytes = file.path, file.num_bytes
    if not file_bytes:
        raise CheckpointError(f"{path}: is empty; restore it")
    length = int.from_bytes(file.read(0, min(8, file_bytes)), "little")
    most = min(_MAX_HEADER_BYTES, file_bytes - 8)
    if length > most:
        raise CheckpointError(
            f"{path}: has {file_bytes} bytes and a header of {length}, but at most "
            f"{max(most, 0)} fit; it is not a safetensors file, or truncated"
        )
    if file.read(8, min(length, 1)) != b"{":
        raise CheckpointError(f"{path}: the header does not start with '{{'; it is damaged")
    content = checked(parse_json(file.read(8, length), path, "header"), dict, path, "the header")
    metadata = content.pop(_METADATA, None)
    metadata = {} if metadata is None else checked(metadata, dict, path, _METADATA)
    for key, text in metadata.items():
        checked(text, str, path, f"{_METADATA}[{shown(key)}]")
    entries = []
    for name in list(content):
        value, label = content.pop(name), f"tensor {shown(name, 200)}"
        code, shape, span = fields(value, _FIELDS, path, label)
        if len(value) > len(_FIELDS):
            raise CheckpointError(
                f"{path}: {label} should have {', '.join(_FIELDS)} but has {shown(list(value))}"
            )
        try:
            dtype, shape, num_bytes = _in_elements(code, shape)
        except DTypeError as error:
            raise CheckpointError(f"{path}: {label} cannot be read: {error}") from None
        if len(span) != 2 or span[1] - span[0] != num_bytes:
            raise CheckpointError(
                f"{path}: {label} of shape {list(shape)} and dtype {dtype} takes {num_bytes} "
                f"bytes, which its data_offsets {shown(list(span))} do not span"
            )
        entries.append(HeaderEntry(name, dtype, shape, 8 + length + span[0], num_bytes))
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end = 8 + length
    for entry in entries:
        if entry.offset != end:
            raise CheckpointError(
                f"{path}: tensor {shown(entry.name, 200)} starts at byte {entry.offset} instead of "
                f"{end}; the data {'overlaps' if entry.offset < end else 'has a hole'}"
            )
        end += entry.num_bytes
    if end != file_bytes:
        problem = "it is truncated" if file_bytes < end else "there are bytes past its end"
        raise CheckpointError(
            f"{path}: has {file_bytes} bytes but its header describes {end}; {problem}"
        )
    return Header(entries, metadata, file_bytes)


@lru_cache(1024)
def _in_elements(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """Convert a header's dtype code and shape to torch's dtype name, shape, and bytes."""
    dtype = from_safetensors(code)
    numbers = packed(dtype)
    if len(shape) > MAX_DIMS or (numbers > 1 and (not shape or shape[-1] % numbers)):
        raise DTypeError(
            f"has {len(shape)} dims {shown(list(shape))}; give at most {MAX_DIMS} dims, the last a "
            f"multiple of {numbers} for {code}"
        )
    if numbers > 1:
        shape = (*shape[:-1], shape[-1] // numbers)
    return dtype, shape, prod(shape) * item_bytes(dtype)


def encode_header(slots: Iterable[TensorSlot], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """Return the encoded header with its length, as safetensors writes it, and the `Header`.

    Raises CheckpointError for a name or shape that the format cannot express.

    >>> encode_header([("w", "float32", (2,))], {})[0][8:]
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    """
    slots = list(slots)
    for name, dtype, _ in slots:
        if to_safetensors(dtype) not in _ORDER:
            raise CheckpointError(
                f"tensor {name!r} is {dtype}, which safetensors files cannot contain; "
                "write a .pt file or a DCP checkpoint, or cast it to complex64"
            )
    ordered = sorted(slots, key=lambda slot: (_ORDER.index(to_safetensors(slot[1])), slot[0]))
    described: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    placed, end = [], 0
    for name, dtype, shape in ordered:
        numbers = packed(dtype)
        if name == _METADATA:
            raise CheckpointError(
                f"a tensor cannot be named {_METADATA!r}: the safetensors format keeps that name "
                "for itself; rename the tensor"
            )
        if numbers > 1 and not shape:
            raise CheckpointError(
                f"tensor {name!r} is a scalar of {dtype}, which the safetensors format "
                "cannot express: it counts the numbers along the last dim; give it the shape [1]"
            )
        counted = [*shape[:-1], shape[-1] * numbers] if shape else []
        num_bytes = prod(shape) * item_bytes(dtype)
        entry = to_safetensors(dtype), counted, [end, end + num_bytes]
        described[name] = dict(zip(_FIELDS, entry, strict=True))
        placed.append(HeaderEntry(name, dtype, shape, end, num_bytes))
        end += num_bytes
    try:
        text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"a tensor name contains {error.object[error.start]!r}, which UTF-8 cannot express; "
            "rename the tensor"
        ) from None
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the names of {len(ordered)} tensors need a header of {len(text)} bytes, past the "
            f"safetensors format's limit of {_MAX_HEADER_BYTES}; write fewer tensors to a file"
        )
    start = 8 + len(text)
    entries = [entry._replace(offset=start + entry.offset) for entry in placed]
    return len(text).to_bytes(8, "little") + text, Header(entries, dict(metadata), start + end)


def open_files(place: StoragePath, model: ModelFiles) -> Catalog:
    """Return the catalog of the safetensors files of a model; each tensor is in one file."""
    tensors: dict[str, StoredTensor] = {}
    home: dict[str, StoragePath] = {}
    metadata: dict[str, tuple[str, StoragePath]] = {}
    contradictions: dict[str, tuple[StoragePath, StoragePath]] = {}
    with prefetch_map(model.files, _unsharded_header, place.files_ahead()) as headers:
        for path, header in zip(model.files, headers, strict=True):
            if model.index_path is None and SAVE_KEY in header.metadata:
                raise CheckpointError(
                    f"{path}: has the tensors of one rank, which may be shards; name its "
                    f"directory, {path.parent}"
                    if place == path
                    else f"{place}: has no sharding_info.json, which is written last; the save did "
                    "not finish; save again"
                )
            chosen = model.names_to_read(path, {entry.name for entry in header.entries})
            for name, dtype, shape, offset, _ in header.entries:
                if name not in chosen:
                    continue  # the index sends it to another file
                if name in home:
                    raise CheckpointError(
                        f"{place}: {home[name].name} and {path.name} both have tensor {name!r}, "
                        "and no index says which to read; name the file to read, or move the other "
                        "away"
                    )
                home[name] = path
                tensors[name] = unsharded_tensor(name, shape, dtype, path, offset)
            for key, text in header.metadata.items():
                first, first_path = metadata.setdefault(key, (text, path))
                if first != text and key not in _OWN_KEYS:
                    contradictions.setdefault(key, (first_path, path))
    skipped = contradictions.keys() | _OWN_KEYS
    agreed = {key: text for key, (text, _) in metadata.items() if key not in skipped}
    facts = CheckpointFacts(
        notes=model.notes, below=model.below, file_metadata=FileMetadata(agreed, contradictions)
    )
    return Catalog(FORMAT.called, place, tensors, model.paths, facts=facts)


def _unsharded_header(path: StoragePath) -> Header:
    """Return the header of a file; raises CheckpointError if DCP wrote parts of tensors into it."""
    header, offsets = read_offsets(path)
    for name, first in (offsets or {}).items():
        if any(first):
            raise CheckpointError(
                f"{path}: has a shard of tensor {name!r} from index {list(first)} on, but is not "
                "named as one; rename it, as shard-00001-model-00001-of-00001.safetensors"
            )
    return header


def read_offsets(path: StoragePath) -> tuple[Header, dict[str, tuple[int, ...]] | None]:
    """Return a header, and name -> offsets in the global tensor; None without offsets.

    Offsets are JSON in the metadata, ``{tensor name: {"saved_offsets": [index per dim]}}``.
    Source: torch/distributed/checkpoint/filesystem.py, torch 2.8 to 2.13.
    """
    with path.open() as file:
        header = read_header(file)
    text, version = header.metadata.get(_INFO), header.metadata.get(_VERSION)
    if text is None:
        return header, None
    if version != "1.0":
        raise CheckpointError(
            f"{path}: its metadata has {_VERSION} {version!r}, but only '1.0' can be read; save "
            "again with a version of torch that writes it"
        )
    notes = checked(parse_json(text.encode(), path, _INFO), dict, path, _INFO)
    for name in sorted(notes.keys() ^ {entry.name for entry in header.entries}):
        says = "names" if name in notes else "lacks"
        lacks = ", which the file lacks" if name in notes else ""
        raise CheckpointError(
            f"{path}: {_INFO} {says} tensor {name!r}{lacks}; the file was changed, restore it"
        )
    offsets: dict[str, tuple[int, ...]] = {}
    for entry in header.entries:
        label = f"{_INFO}[{entry.name!r}]"
        (saved,) = fields(notes[entry.name], {"saved_offsets": tuple}, path, label)
        if len(saved) != len(entry.shape):
            raise CheckpointError(
                f"{path}: {label}.saved_offsets is {list(saved)}, but the tensor has shape "
                f"{list(entry.shape)}; the file was changed, restore it"
            )
        offsets[entry.name] = saved
    return header, offsets


def output_file(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]
) -> OutputFile:
    """Return a safetensors file to be written that contains these tensors unsharded."""
    by_name = {tensor.name: tensor for tensor in tensors}
    slots = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    head, header = encode_header(slots, metadata)
    extents = tuple(
        Extent(by_name[entry.name], whole_box(entry.shape), entry.offset)
        for entry in header.entries
    )
    return OutputFile(name, header.file_bytes, (RawBytes(0, head),), extents)


def agreed_metadata(source: Catalog, output: Wanted) -> dict[str, str]:
    """Return the ``__metadata__`` of the source's files, to copy it into the output's.

    Raises CheckpointError if two files have different metadata under one key.
    """
    if not output.metadata:
        return {}
    for key, (first, other) in source.facts.file_metadata.contradictions.items():
        raise CheckpointError(
            f"{source.directory}: {first.name} and {other.name} have different metadata under "
            f"{shown(key, 100)}; make them equal, or call merge(..., metadata=False) in Python"
        )
    return dict(source.facts.file_metadata.values)


def _open(path: StoragePath, _: OpenOptions) -> Catalog:
    """Return the catalog of a single safetensors file; reads its header."""
    check_alone(path)
    return open_files(path, ModelFiles({path: frozenset()}))


def _lay_out(source: Catalog, output: Wanted) -> Target:
    metadata = agreed_metadata(source, output)
    file = output_file(output.name, output.tensors, {**METADATA, **metadata})
    return Target((file,), False, output.tensors, carried=frozenset(metadata))


def _reads_file(start: FileStart) -> bool:
    fits = int.from_bytes(start.head[:8], "little") < start.num_bytes
    return not start.is_zip and (fits or is_data_file(start.name) is not None)


FORMAT: Final = Format(
    name="safetensors",
    recognizes=never,  # directories have the format huggingface
    open=_open,
    lay_out=_lay_out,
    writes=("merged",),
    extensions=(".safetensors",),
    keeps="tensors",
    reads_file=_reads_file,
)
