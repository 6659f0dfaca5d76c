"""Contents of an output as plain values: files, and the boxes of tensors in them.

A format says what goes where. How the bytes get there, are checked and committed is the same for
all formats, as is what goes along of the files beside the weights.
"""

import json
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import Catalog, replica_holders, whole_box
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.strict_json import parse_json
from shardspec.comm.senders import whole_senders
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import KeyPath
from shardspec.text import Argument

_PIECE_BYTES: Final = 1 << 20
_CONFIG: Final = "config.json"
_STATE_DTYPES: Final = frozenset({_CONFIG, "generation_config.json"})
"""Files whose configs state the dtype of weights, also nested: ``dtype`` or ``torch_dtype``."""
_WEIGHTS: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Dtypes of weights, by the names that configs have for them."""
_OF_MODELS: Final = frozenset({_CONFIG, "adapter_config.json"})
_HUGGING_FACE: Final = re.compile(
    r"(\w{1,60}_)?config\.json|params\.json|chat_template\.\w{1,10}"
    r"|(tokenizer|tekken|special_tokens_map|added_tokens|normalizer|emoji|encoder)\.json"
    r"|((entity|target)_)?vocab(-src|-tgt)?\.(json|txt|bpe)|(word_\w{1,20}|byte_maps)\.json"
    r"|merges\.txt|dict\.txt|bpe\.codes|prophetnet\.tokenizer|[\w.-]{1,60}\.(tiktoken|spm)"
    r"|(tokenizer|spiece|sentencepiece(\.bpe)?|spm(_char)?|tiktoken)\.model(\.v\w{1,10})?"
    r"|(configuration|modeling|tokenization|(image_|video_)?processing|feature_extraction)_\w{1,60}"
    r"\.py"
)
"""Of `transformers` and PEFT: configs, the files of every tokenizer, and code."""
_OWN_CODE: Final = b'"auto_map"'
"""Says in a config that a model brings code, which may import what lies beside it."""
SECTIONS: Final = frozenset({"quantization_config", "quantization", "compression_config"})
QUANTIZED_BY: Final = frozenset(
    {
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
    }
)
"""Files about nothing but how weights are quantized."""
_MOST_BYTES: Final = 2**28
"""Of one file; tokenizers have some ten million."""
WITHOUT_SIDECARS: Final = Argument("sidecars", value=False)


class BoxEntry(NamedTuple):
    """One box in a file, stored under the name of its tensor."""

    tensor: str
    box: Box  # never empty
    addend: tuple[int, ...]  # of pending reductions: an index per axis, in the order of the spec
    crc32: int | None = None


def stored_shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the shape under which a file stores boxes of one tensor, one after the other.

    It is that of a single box, else, as for parts, the number of elements.
    """
    return _shape(boxes[0]) if len(boxes) == 1 else (sum(map(box_size, boxes)),)


_shape = lru_cache(1024)(box_shape)
"""One object for equal boxes."""


class FileEntry(NamedTuple):
    """One file of a rank; boxes of one tensor follow each other, as their bytes do."""

    name: str
    rank: int
    num_bytes: int
    boxes: Sequence[BoxEntry]


class OutputTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    source: str  # its name in the checkpoint that is read
    shape: tuple[int, ...]
    dtype: str  # in the output

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return box_size(whole_box(self.shape)) * item_bytes(self.dtype)


class Extent(NamedTuple):
    """A box of a tensor in a file, row-major."""

    tensor: OutputTensor
    box: Box
    offset: int  # in the file

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return box_size(self.box) * item_bytes(self.tensor.dtype)


class RawBytes(NamedTuple):
    """Bytes of a file that belong to no tensor, such as a header."""

    offset: int
    data: bytes | Callable[[], bytes]
    """A function makes them when they are written."""

    def made(self) -> bytes:
        """Return the bytes."""
        return self.data if isinstance(self.data, bytes) else self.data()


Trailer: TypeAlias = Callable[[Sequence[int]], Iterable[RawBytes]]
"""Returns the bytes of a file that depend on the CRC-32 of its extents, in ascending order.

It is given a list that is filled meanwhile: bytes that follow an extent may be made from the CRC-32
of the extents before them."""


class OutputFile(NamedTuple):
    """A file to be written; raw bytes and extents are in ascending order."""

    name: str  # relative to the output, with slashes; that of the output if it is one file
    num_bytes: int
    raw: Sequence[RawBytes]
    extents: Sequence[Extent]
    trailer: Trailer | None = None

    @property
    def other_bytes(self) -> int:
        """Bytes that are no tensor's."""
        return self.num_bytes - sum(extent.num_bytes for extent in self.extents)


def copied_bytes(path: StoragePath, start: int, num_bytes: int, offset: int) -> list[RawBytes]:
    """Return bytes of another file, to be written at `offset`; they are read by then."""

    def piece(at: int) -> bytes:
        with path.open() as file:
            return file.read(start + at, min(_PIECE_BYTES, num_bytes - at))

    return [RawBytes(offset + at, partial(piece, at)) for at in range(0, num_bytes, _PIECE_BYTES)]


def copied_file(path: StoragePath, name: str) -> OutputFile:
    """Return a file with the content of another one, which is read while this one is written."""
    with path.open() as file:
        size = file.num_bytes
    return OutputFile(name, size, copied_bytes(path, 0, size, 0), ())


Write: TypeAlias = Callable[[bytes], object]
"""Appends to a file."""


class Listing(NamedTuple):
    """The file that lists the others of an output; written last."""

    name: str
    fill: Callable[[Mapping[str, Sequence[int]], Write], object]
    """Writes it piece by piece, given the CRC-32 of every extent by file."""


class Carried(NamedTuple):
    """Entries that are not tensors and go along into an output."""

    names: frozenset[str]
    """In the checkpoint."""
    values: Mapping[str, object]
    """By their names in the output: plain ones, and those that are copied as they are stored."""
    paths: Mapping[str, KeyPath]
    """The keys of tensors and values in a nested state dict, by those names of the output."""


class Target(NamedTuple):
    """A whole output: one file, or a directory of files."""

    files: tuple[OutputFile, ...]
    directory: bool
    tensors: Sequence[OutputTensor]
    """All that are written; empty ones may be in no file."""
    listing: Listing | None = None
    digested: bool = False  # whether the format needs the CRC-32 of every extent
    carried: frozenset[str] = frozenset()  # names of the source's plain values that go along
    sidecars: tuple[str, ...] = ()  # names of the files beside the weights that go along
    beside: tuple[StoragePath, ...] = ()  # those of them that were there when it was opened
    not_copied: tuple[str, ...] = ()  # names of what stays behind
    sharding: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Tensor to the rule for it, empty where none matches, and its spec; if it is for a mesh."""
    same: Mapping[str, str] = MappingProxyType({})
    """Tensor to the one whose bytes it shares in the files, which are written once."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the files with tensors."""
        return sum(file.num_bytes for file in self.files)


def assign_boxes(
    mesh: DeviceMesh, tensors: Mapping[str, Layout], *, spread: bool = True
) -> dict[int, list[BoxEntry]]:
    """Choose the device that stores each box, among those that hold it.

    Every rank computes the same answer. Boxes with a single holder come first, then the others from
    the largest down: each for the holder with the fewest bytes so far, or without `spread` for the
    first.
    Returns for every device its boxes, by tensor name.

    >>> mesh = DeviceMesh(range(2), (2,))
    >>> chosen = assign_boxes(mesh, {name: Layout(mesh, "[R]", (3,), "int8") for name in "abc"})
    >>> [[entry.tensor for entry in chosen[rank]] for rank in mesh.ids]
    [['a', 'c'], ['b']]
    """
    parts_of = lru_cache(None)(replica_holders)
    load = dict.fromkeys(mesh.ids, 0)
    names = sorted(tensors)
    shared: list[tuple[int, ...]] = []  # the holders of every box that has several
    sizes = array("q")  # its bytes
    for name in names:
        layout = tensors[name]
        for (box, _), ranks in parts_of(layout).items():
            num_bytes = box_size(box) * item_bytes(layout.dtype)
            if len(ranks) > 1 and spread:
                shared.append(ranks)
                sizes.append(num_bytes)
            else:
                load[ranks[0]] += num_bytes
    # A stable sort: boxes of equal size keep their order, by name and then by holder.
    order = sorted(range(len(shared)), key=lambda number: -sizes[number])
    chosen = array("q", bytes(8 * len(shared)))
    for number, rank in zip(
        order, whole_senders(((shared[n], sizes[n]) for n in order), load), strict=True
    ):
        chosen[number] = rank
    assigned: dict[int, list[BoxEntry]] = {rank: [] for rank in mesh.ids}
    several = iter(chosen)
    for name in names:
        parts = [
            (part, next(several) if len(ranks) > 1 and spread else ranks[0])
            for part, ranks in parts_of(tensors[name]).items()
        ]
        for part, rank in sorted(parts):
            assigned[rank].append(BoxEntry(name, *part))
    return assigned


# --- files beside the weights, which tools need to load them


def add_sidecars(
    source: Catalog,
    target: Target,
    sidecars: Callable[[StoragePath, Collection[str]], set[str]],
    dtype: str | None = None,
) -> Target:
    """Return an output with the files that lie beside the weights of a checkpoint.

    Into a directory go those that `sidecars` names; of what lies beside a single file, or describes
    the model elsewhere, those of a model. How weights are quantized is in a config in any case,
    and configs state the `dtype` of the weights, if they state any.
    """
    described_in = source.facts.described_in
    elsewhere = described_in is not None
    directory = source.home if described_in is None else described_in
    whole = not elsewhere and directory == source.directory
    weights = (file for file in source.files if directory in file.parents)
    beside = {*directory.names()} - {file.relative_to(directory).parts[0] for file in weights}
    wanted: set[str] = set()
    if target.directory and (whole or elsewhere or beside & _OF_MODELS):
        wanted = (sidecars if whole else model_sidecars)(directory, beside)
    section = source.facts.quantization
    if section is not None:
        wanted -= QUANTIZED_BY
    elif elsewhere and not _has_codes(target):
        section = {}
    if dtype is None and elsewhere:
        dtype = _one_dtype(target)
    taken = {file.name for file in target.files}
    files = []
    for name in sorted(wanted):
        path = file_inside(directory, name, directory)
        if not path.is_file():
            continue
        file = copied_file(path, name)
        problem = ""
        if name in taken:
            problem = "lies beside the weights, but the output has a file of that name already"
        elif file.num_bytes > _MOST_BYTES:
            problem = f"has {file.num_bytes} bytes, more than the {_MOST_BYTES} of a sidecar"
        if problem:
            raise CheckpointError(
                f"{path}: {problem}; leave such files behind with ", WITHOUT_SIDECARS
            )
        of_model = name in _STATE_DTYPES and dtype is not None
        if of_model or (name == _CONFIG and section is not None):
            file = _restated(file, path, section if name == _CONFIG else None, dtype)
        files.append(file)
    names = tuple(file.name for file in files)
    others = sorted(beside.difference(names)) if whole else ()
    not_copied = tuple(f"{name}/" if (directory / name).is_dir() else name for name in others)
    # Of a single file, the state was taken without what lies beside it.
    seen = tuple(directory / name for name in names) if whole else ()
    if section and target.directory and _CONFIG not in {*taken, *names}:
        data = json.dumps({"quantization_config": section}, indent=2).encode()
        files.append(OutputFile(_CONFIG, len(data), [RawBytes(0, data)], ()))
    return target._replace(
        files=(*target.files, *files), sidecars=names, beside=seen, not_copied=not_copied
    )


def _has_codes(target: Target) -> bool:
    dtypes = (extent.tensor.dtype for file in target.files for extent in file.extents)
    return any(dtype.startswith(("float8", "uint8", "int8")) for dtype in dtypes)


def _one_dtype(target: Target) -> str | None:
    """Return the dtype of the floating point weights of an output, if all have the same."""
    dtypes = {tensor.dtype for tensor in target.tensors if tensor.dtype in _WEIGHTS}
    return dtypes.pop() if len(dtypes) == 1 else None


def _restated(
    file: OutputFile, path: StoragePath, section: Mapping[str, object] | None, dtype: str | None
) -> OutputFile:
    """Return a config that states a section about quantization, and a dtype, of an output.

    An empty section removes the one that is there; None keeps it, as it does the dtype.
    """
    data = b"".join(raw.made() for raw in file.raw)
    config = parse_json(data, path, "config")
    if isinstance(config, dict):
        changed = False
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        for each in parts if section is not None else ():
            for key in SECTIONS & each.keys():
                changed = True
                del each[key]
        if section:
            config["quantization_config"], changed = section, True
        below: list[object] = [config] if dtype is not None else []
        while below:
            part = below.pop()
            if not isinstance(part, dict):
                continue
            for key, value in part.items():
                known = isinstance(value, str) and value.removeprefix("torch.") in _WEIGHTS
                if key in ("dtype", "torch_dtype") and known and value != dtype:
                    part[key], changed = dtype, True
                elif key not in SECTIONS:
                    below.append(value)
        if changed:
            data = json.dumps(config, indent=2).encode()
    return OutputFile(file.name, len(data), [RawBytes(0, data)], ())


def model_sidecars(directory: StoragePath, names: Collection[str]) -> set[str]:
    """Return which of the files in a directory are of a model of Hugging Face's."""
    sidecars = {name for name in names if _HUGGING_FACE.fullmatch(name)}
    if any(_has_code(directory, name) for name in sidecars if name.endswith("config.json")):
        sidecars |= {name for name in names if name.endswith(".py")}
    return sidecars


def _has_code(directory: StoragePath, name: str) -> bool:
    path = file_inside(directory, name, directory)
    if not path.is_file():
        return False
    with path.open() as file:
        return _OWN_CODE in file.read(0, min(file.num_bytes, _MOST_BYTES))
