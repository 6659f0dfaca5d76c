"""The sharding info: what `sharding_info.json` says about a checkpoint. See ``docs/format.md``."""

import json
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
from shardspec.checkpoint.store import file_inside, reason
from shardspec.checkpoint.strict_json import (
    as_list,
    as_object,
    as_size,
    as_sizes,
    as_text,
    member,
    parse_json,
)
from shardspec.dtypes import from_safetensors, to_safetensors
from shardspec.errors import CheckpointError, ShardSpecError, SpecSyntaxError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

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
    tensors = [f"  {_dump(name)}: {_dump(_layout_json(at))}" for name, at in info.tensors.items()]
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


def _layout_json(layout: Layout) -> dict[str, object]:
    return {
        "shape": layout.global_shape,
        "dtype": to_safetensors(layout.dtype),
        "spec": str(layout.spec),
    }


def _box_json(entry: BoxEntry) -> dict[str, object]:
    box: dict[str, object] = {"box": entry.box}
    if entry.addend:
        box["addend"] = entry.addend
    if entry.crc32 is not None:
        box["crc32"] = f"{entry.crc32:08x}"
    return box


def read_info(directory: Path) -> ShardingInfo:
    """Read and check the sharding info of a checkpoint directory."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory}: there is no such checkpoint directory; check the path"
        ) from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{directory}: is a file; give the directory that holds {INFO_NAME}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {reason(error)}") from None
    if not names:
        raise CheckpointError(f"{directory}: is empty, there is no checkpoint in it")
    if INFO_NAME not in names:
        raise CheckpointError(
            f"{directory}: has no {INFO_NAME}, which is written last; the save did not finish, or "
            "this is no checkpoint; save again"
        )
    path = file_inside(directory, INFO_NAME, directory)
    with SourceFile(path) as file:
        return parse_info(file.read(0, file.num_bytes), path)


def parse_info(data: bytes, path: Path) -> ShardingInfo:
    """Check the bytes of a `sharding_info.json` and return what they say.

    Parameters
    ----------
    data
        The bytes.
    path
        Where they come from, for errors.
    """
    info = as_object(parse_json(data, path, "sharding info"), path, "the sharding info")
    stated = as_text(member(info, "format", path, "format"), path, "format")
    if stated != _FORMAT:
        raise CheckpointError(f"{path}: format is {stated!r}, not {_FORMAT!r}")
    version = as_size(member(info, "version", path, "version"), path, "version")
    if version != VERSION:
        remedy = "upgrade shardspec" if version > VERSION else "the file is damaged, restore it"
        raise CheckpointError(
            f"{path}: has version {version}, but this shardspec reads version {VERSION}; {remedy}"
        )
    mesh = _parse_mesh(as_object(member(info, "mesh", path, "mesh"), path, "mesh"), path)
    stated_tensors = as_object(member(info, "tensors", path, "tensors"), path, "tensors")
    cuts: dict[Layout, _Cut] = {}
    known: dict[tuple[str, tuple[int, ...], str], Layout] = {}
    tensors = {
        name: cuts.setdefault(layout, _Cut(layout))
        for name, at in stated_tensors.items()
        for layout in (_parse_layout(mesh, name, at, path, known),)
    }
    files = tuple(
        _parse_file(value, f"files[{place}]", mesh, tensors, path)
        for place, value in enumerate(as_list(member(info, "files", path, "files"), path, "files"))
    )
    seen: set[str] = set()
    for place, file in enumerate(files):
        if file.name in seen:
            raise CheckpointError(f"{path}: files[{place}] repeats the file name {file.name!r}")
        seen.add(file.name)
    save = as_text(member(info, "save", path, "save"), path, "save")
    layouts = {name: cut.layout for name, cut in tensors.items()}
    values = _parse_each(info, "values", decode_value, path)
    for name in values.keys() & layouts.keys():
        raise CheckpointError(f"{path}: {name!r} is both a tensor and a value")
    paths = _parse_each(info, "paths", decode_path, path)
    for name in paths.keys() - layouts.keys() - values.keys():
        raise CheckpointError(f"{path}: paths[{name!r}] is of nothing that the info lists")
    return ShardingInfo(save, mesh, layouts, files, values, paths)


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


class _Cut:
    """A layout that many tensors have, and what it gives each device."""

    __slots__ = ("_due", "layout")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._due: dict[int, tuple[object, Box]] = {}

    def due(self, rank: int) -> tuple[object, Box]:
        """Return the box of a device, as JSON has it and as a value."""
        found = self._due.get(rank)
        if found is None:
            box = self.layout.box(rank)
            found = self._due[rank] = [list(side) for side in box], box
        return found


def _parse_mesh(stated: dict[str, object], path: Path) -> DeviceMesh:
    ids = as_sizes(member(stated, "ids", path, "mesh.ids"), path, "mesh.ids")
    shape = as_sizes(member(stated, "shape", path, "mesh.shape"), path, "mesh.shape")
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
    known: dict[tuple[str, tuple[int, ...], str], Layout],
) -> Layout:
    key = f"tensors[{name!r}]"
    stated = as_object(value, path, key)
    shape = as_sizes(member(stated, "shape", path, f"{key}.shape"), path, f"{key}.shape")
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{path}: {key}.shape has {len(shape)} dims, at most {MAX_DIMS}")
    code = as_text(member(stated, "dtype", path, f"{key}.dtype"), path, f"{key}.dtype")
    spec = as_text(member(stated, "spec", path, f"{key}.spec"), path, f"{key}.spec")
    # Many tensors are sharded alike.
    alike = spec, tuple(shape), code
    if alike in known:
        return known[alike]
    try:
        known[alike] = layout = Layout(mesh, spec, shape, from_safetensors(code))
        return layout
    except SpecSyntaxError as error:
        raise CheckpointError(f"{path}: {key}.spec {spec!r}: {error.problem}") from None
    except ShardSpecError as error:
        raise CheckpointError(f"{path}: {key}: {error}") from None


def _parse_file(
    value: object, key: str, mesh: DeviceMesh, tensors: Mapping[str, _Cut], path: Path
) -> FileEntry:
    stated = as_object(value, path, key)
    name = as_text(member(stated, "name", path, f"{key}.name"), path, f"{key}.name")
    file_inside(path.parent, name, path)
    rank = as_size(member(stated, "rank", path, f"{key}.rank"), path, f"{key}.rank")
    if rank not in mesh:
        raise CheckpointError(f"{path}: {key}.rank is {rank}, which is no device of the mesh")
    num_bytes = as_size(member(stated, "bytes", path, f"{key}.bytes"), path, f"{key}.bytes")
    boxes = as_object(member(stated, "boxes", path, f"{key}.boxes"), path, f"{key}.boxes")
    entries = []
    for tensor, box in boxes.items():
        at = f"{key}.boxes[{tensor!r}]"
        if tensor not in tensors:
            raise CheckpointError(f"{path}: {at} is of a tensor that 'tensors' does not list")
        cut = tensors[tensor]
        entries.append(_parse_box(tensor, as_object(box, path, at), at, cut, rank, path))
    return FileEntry(name, rank, num_bytes, tuple(entries))


def _parse_box(
    tensor: str, stated: dict[str, object], key: str, cut: _Cut, rank: int, path: Path
) -> BoxEntry:
    due, box = cut.due(rank)
    # What is not as it should be is looked at closely.
    if stated.get("box") != due or not box_size(box):
        box = _parse_sides(stated, key, cut.layout, path)
    addend = as_sizes(stated["addend"], path, f"{key}.addend") if "addend" in stated else ()
    return BoxEntry(tensor, box, addend, _parse_crc(stated, f"{key}.crc32", path))


def _parse_sides(stated: dict[str, object], key: str, layout: Layout, path: Path) -> Box:
    key_box = f"{key}.box"
    sides = []
    for side in as_list(member(stated, "box", path, key_box), path, key_box):
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


def _parse_crc(stated: dict[str, object], key: str, path: Path) -> int | None:
    if "crc32" not in stated:
        return None
    text = as_text(stated["crc32"], path, key)
    if len(text) != 8 or set(text) - set("0123456789abcdef"):
        raise CheckpointError(f"{path}: {key} is {text!r}, not eight hexadecimal digits")
    return int(text, 16)
