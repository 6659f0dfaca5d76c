"""The sharding info: what `sharding_info.json` says about a checkpoint. See ``docs/format.md``."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.formats.names import INFO_NAME
from shardspec.checkpoint.formats.safetensors_header import MAX_DIMS
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.state_dict import (
    KeyPath,
    decode_path,
    decode_value,
    encode_path,
    encode_value,
)
from shardspec.checkpoint.store import file_inside, path_exists
from shardspec.checkpoint.strict_json import (
    as_list,
    as_object,
    as_size,
    as_sizes,
    as_text,
    field,
    member,
    parse_json,
)
from shardspec.dtypes import from_safetensors, to_safetensors
from shardspec.errors import CheckpointError, ShardSpecError, SpecSyntaxError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

__all__ = [
    "SAVE_KEY",
    "VERSION",
    "BoxEntry",
    "FileEntry",
    "ShardingInfo",
    "format_info",
    "parse_info",
    "read_info",
]

_T = TypeVar("_T")

SAVE_KEY: Final = "shardspec.save"
"""By which the metadata of every file says which save it is of."""
VERSION: Final = 1
"""The version of the format that this code reads and writes."""
_FORMAT: Final = "shardspec"
_CRC: Final = re.compile("[0-9a-f]{8}")
_MOST_SPEC: Final = 4096
"""Characters of a spec, in which axes stand by number."""
_MOST_BYTES: Final = 2 << 30
"""A checkpoint of 10,000 tensors on 1,024 ranks takes some 50 MB."""


class BoxEntry(NamedTuple):
    """One box in a file, stored under the name of its tensor."""

    tensor: str
    box: Box
    """Never empty."""
    addend: tuple[int, ...]
    """Which addend of a pending reduction: one index per pending axis, in the order of the spec."""
    crc32: int | None = None
    """CRC-32 of its bytes; None where it was saved without."""


class FileEntry(NamedTuple):
    """One file and the boxes it holds, at most one of each tensor."""

    name: str
    """A plain name in the directory of the checkpoint."""
    rank: int
    """Physical id of the device whose boxes these are."""
    num_bytes: int
    """Size of the file."""
    boxes: tuple[BoxEntry, ...]


class ShardingInfo(NamedTuple):
    """A whole checkpoint: the mesh, how each tensor is cut, and which file holds which boxes."""

    save: str
    """Names this save; every file of it carries the same text in its metadata."""
    mesh: DeviceMesh
    tensors: Mapping[str, Layout]
    files: tuple[FileEntry, ...]
    values: Mapping[str, object] = MappingProxyType({})
    """Plain values of the state dict that was saved, by name."""
    paths: Mapping[str, KeyPath] = MappingProxyType({})
    """Names that were no keys of it, but joined: the keys that led there."""


def format_info(info: ShardingInfo) -> str:
    """Return the text of `sharding_info.json`: one line per tensor and per box.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> box = BoxEntry("w", ((0, 2),), ())
    >>> info = ShardingInfo("a1", mesh, {"w": Layout(mesh, "[S0]", (3,), "bf16")},
    ...                     (FileEntry("x.safetensors", 0, 99, (box,)),))
    >>> print(format_info(info))
    {
    "format": "shardspec",
    "version": 1,
    "save": "a1",
    "mesh": {"ids": [0, 1], "shape": [2], "axis_names": null},
    "tensors": {
      "w": {"shape": [3], "dtype": "BF16", "spec": "[S0]"}
    },
    "files": [
      {"name": "x.safetensors", "rank": 0, "bytes": 99, "boxes": {
        "w": {"box": [[0, 2]]}
      }}
    ]
    }
    <BLANKLINE>
    """
    mesh = {"ids": info.mesh.ids, "shape": info.mesh.shape, "axis_names": info.mesh.axis_names}
    tensors = []
    for name, layout in info.tensors.items():
        dtype, spec = to_safetensors(layout.dtype), str(layout.spec)
        stated = {"shape": layout.global_shape, "dtype": dtype, "spec": spec}
        tensors.append(f"  {_dump(name)}: {_dump(stated)}")
    files = []
    for file in info.files:
        head = _dump({"name": file.name, "rank": file.rank, "bytes": file.num_bytes})
        boxes = [f"    {_dump(entry.tensor)}: {_dump(_box_json(entry))}" for entry in file.boxes]
        files.append(f'  {head[:-1]}, "boxes": {{{_lines(boxes, "  ")}}}}}')
    members = [
        f'"format": {_dump(_FORMAT)}',
        f'"version": {VERSION}',
        f'"save": {_dump(info.save)}',
        f'"mesh": {_dump(mesh)}',
        f'"tensors": {{{_lines(tensors, "")}}}',
        f'"files": [{_lines(files, "")}]',
    ]
    for key, encoded in (
        ("values", {name: encode_value(value, name) for name, value in info.values.items()}),
        ("paths", {name: encode_path(path) for name, path in info.paths.items()}),
    ):
        if encoded:
            entries = [f"  {_dump(name)}: {_dump(value)}" for name, value in encoded.items()]
            members.append(f'"{key}": {{{_lines(entries, "")}}}')
    return f"{{{_lines(members, '')}}}\n"


def _lines(items: list[str], indent: str) -> str:
    """Put each item on a line of its own between brackets that stand at `indent`."""
    return "\n" + ",\n".join(items) + "\n" + indent if items else ""


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _box_json(entry: BoxEntry) -> dict[str, object]:
    box: dict[str, object] = {"box": entry.box}
    if entry.addend:
        box["addend"] = entry.addend
    if entry.crc32 is not None:
        box["crc32"] = f"{entry.crc32:08x}"
    return box


def read_info(directory: Path) -> ShardingInfo:
    """Read and check the sharding info of a checkpoint directory."""
    if not path_exists(directory):
        raise CheckpointError(f"{directory}: there is no such checkpoint directory; check the path")
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is a file; give the directory that holds {INFO_NAME}")
    path = file_inside(directory, INFO_NAME, directory)
    if not path_exists(path):
        raise CheckpointError(
            f"{directory}: has no {INFO_NAME}, which is written last; the save did not finish, or "
            "this is no checkpoint; save again"
        )
    with SourceFile(path) as file:
        if file.num_bytes > _MOST_BYTES:
            raise CheckpointError(
                f"{path}: has {file.num_bytes} bytes, past the {_MOST_BYTES} that it may have; it "
                "is damaged, restore it"
            )
        return parse_info(file.read(0, file.num_bytes), path)


def parse_info(data: bytes, path: Path) -> ShardingInfo:
    """Check the bytes of a `sharding_info.json` and return what they say."""
    info = as_object(parse_json(data, path, "sharding info"), path, "the sharding info")
    stated = field(info, "format", as_text, path, "")
    if stated != _FORMAT:
        raise CheckpointError(f"{path}: format is {stated!r}, not {_FORMAT!r}")
    version = field(info, "version", as_size, path, "")
    if version != VERSION:
        remedy = "upgrade shardspec" if version > VERSION else "the file is damaged, restore it"
        raise CheckpointError(
            f"{path}: has version {version}, but this shardspec reads version {VERSION}; {remedy}"
        )
    mesh = _parse_mesh(field(info, "mesh", as_object, path, ""), path)
    known: dict[tuple[str, tuple[int, ...], str], _Boxes] = {}
    tensors = {
        name: _parse_layout(mesh, name, at, path, known)
        for name, at in field(info, "tensors", as_object, path, "").items()
    }
    files: dict[str, FileEntry] = {}
    for place, value in enumerate(field(info, "files", as_list, path, "")):
        file = _parse_file(value, f"files[{place}]", mesh, tensors, path)
        if file.name in files:
            raise CheckpointError(f"{path}: files[{place}] repeats the file name {file.name!r}")
        files[file.name] = file
    save = field(info, "save", as_text, path, "")
    layouts = {name: boxes.layout for name, boxes in tensors.items()}
    values = _parse_each(info, "values", decode_value, path)
    for name in values.keys() & layouts.keys():
        raise CheckpointError(f"{path}: {name!r} is both a tensor and a value")
    paths = _parse_each(info, "paths", decode_path, path)
    for name in paths.keys() - layouts.keys() - values.keys():
        raise CheckpointError(f"{path}: paths[{name!r}] is of nothing that the info lists")
    return ShardingInfo(save, mesh, layouts, tuple(files.values()), values, paths)


def _parse_each(
    info: dict[str, object], key: str, decode: Callable[[object], _T], path: Path
) -> dict[str, _T]:
    """Return the decoded values of a member that may be left out."""
    found = {}
    for name, stated in as_object(info.get(key, {}), path, key).items():
        try:
            found[name] = decode(stated)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: {key}[{name!r}] {error}") from None
    return found


class _Boxes:
    """A layout that many tensors have, and the box that it gives each device."""

    __slots__ = ("_boxes", "layout")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._boxes: dict[int, tuple[object, Box]] = {}

    def of(self, rank: int) -> tuple[object, Box]:
        """Return the box of a device: as JSON has it, None if it is empty; and as a value."""
        found = self._boxes.get(rank)
        if found is None:
            box = self.layout.box(rank)
            stated = [list(side) for side in box] if box_size(box) else None
            found = self._boxes[rank] = stated, box
        return found


def _parse_mesh(stated: dict[str, object], path: Path) -> DeviceMesh:
    ids = field(stated, "ids", as_sizes, path, "mesh")
    shape = field(stated, "shape", as_sizes, path, "mesh")
    key = "mesh.axis_names"
    names = member(stated, "axis_names", path, key)
    texts = None if names is None else [as_text(n, path, key) for n in as_list(names, path, key)]
    try:
        return DeviceMesh(ids, shape, axis_names=texts)
    except ShardSpecError as error:
        raise CheckpointError(f"{path}: mesh: {error}") from None


def _parse_layout(
    mesh: DeviceMesh,
    name: str,
    value: object,
    path: Path,
    known: dict[tuple[str, tuple[int, ...], str], _Boxes],
) -> _Boxes:
    key = f"tensors[{name!r}]"
    stated = as_object(value, path, key)
    shape = field(stated, "shape", as_sizes, path, key)
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{path}: {key}.shape has {len(shape)} dims, at most {MAX_DIMS}")
    dtype = field(stated, "dtype", as_text, path, key)
    spec = field(stated, "spec", as_text, path, key)
    if len(spec) > _MOST_SPEC:
        raise CheckpointError(
            f"{path}: {key}.spec has {len(spec)} characters, at most {_MOST_SPEC}"
        )
    # Many tensors are sharded alike.
    alike = spec, shape, dtype
    if alike in known:
        return known[alike]
    try:
        known[alike] = found = _Boxes(Layout(mesh, spec, shape, from_safetensors(dtype)))
        return found
    except SpecSyntaxError as error:
        raise CheckpointError(f"{path}: {key}.spec {shown(spec)}: {error.problem}") from None
    except ShardSpecError as error:
        raise CheckpointError(f"{path}: {key}: {error}") from None


def _parse_file(
    value: object, key: str, mesh: DeviceMesh, tensors: Mapping[str, _Boxes], path: Path
) -> FileEntry:
    stated = as_object(value, path, key)
    name = field(stated, "name", as_text, path, key)
    file_inside(path.parent, name, path)
    rank = field(stated, "rank", as_size, path, key)
    if rank not in mesh:
        raise CheckpointError(f"{path}: {key}.rank is {rank}, which is no device of the mesh")
    num_bytes = field(stated, "bytes", as_size, path, key)
    entries = []
    for tensor, box in field(stated, "boxes", as_object, path, key).items():
        at = f"{key}.boxes[{tensor!r}]"
        if tensor not in tensors:
            raise CheckpointError(f"{path}: {at} is of a tensor that 'tensors' does not list")
        entries.append(
            _parse_box(tensor, as_object(box, path, at), at, tensors[tensor], rank, path)
        )
    return FileEntry(name, rank, num_bytes, tuple(entries))


def _parse_box(
    tensor: str, value: object, key: str, boxes: _Boxes, rank: int, path: Path
) -> BoxEntry:
    stated = value if type(value) is dict else as_object(value, path, key)
    expected, box = boxes.of(rank)
    # What is not as it should be is looked at closely.
    if expected is None or stated.get("box") != expected:
        box = _parse_sides(stated, key, boxes.layout, path)
    addend = field(stated, "addend", as_sizes, path, key) if "addend" in stated else ()
    crc = stated.get("crc32")
    if crc is None and "crc32" not in stated:
        return BoxEntry(tensor, box, addend, None)
    if type(crc) is not str or _CRC.fullmatch(crc) is None:
        raise CheckpointError(
            f"{path}: {key}.crc32 is {shown(crc)}, not a string of eight hexadecimal digits"
        )
    return BoxEntry(tensor, box, addend, int(crc, 16))


def _parse_sides(stated: dict[str, object], key: str, layout: Layout, path: Path) -> Box:
    key_box = f"{key}.box"
    sides = []
    for side in field(stated, "box", as_list, path, key):
        interval = as_sizes(side, path, key_box)
        if len(interval) != 2:
            raise CheckpointError(f"{path}: {key_box} has {side}, which is no [low, high] pair")
        sides.append((interval[0], interval[1]))
    if len(sides) != len(layout.global_shape) or not all(
        lo < hi <= size for (lo, hi), size in zip(sides, layout.global_shape, strict=False)
    ):
        raise CheckpointError(
            f"{path}: {key_box} {[list(side) for side in sides]} is empty or does not lie in the "
            f"tensor of shape {list(layout.global_shape)}"
        )
    return tuple(sides)
