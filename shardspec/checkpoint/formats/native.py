"""Reads and writes shardspec's own format: `sharding_info.json`, and a safetensors file per rank.

`sharding_info.json` records the mesh, the spec of each tensor, and the boxes in each file. See
``docs/format.md``.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shardspec.boxes import box_size
from shardspec.checkpoint import catalog
from shardspec.checkpoint.catalog import (
    BoxEntry,
    Catalog,
    FileEntry,
    OutputFile,
    OutputTensor,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    Target,
)
from shardspec.checkpoint.formats import Format, OpenOptions, Wanted, safetensors
from shardspec.checkpoint.state import state_dict
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.checkpoint.storage.strict_json import (
    ROOM_BYTES,
    checked,
    fields,
    is_size,
    read_json,
    values_bytes,
)
from shardspec.dtypes import from_safetensors, item_bytes, to_safetensors
from shardspec.errors import CheckpointError, ShardSpecError, SpecSyntaxError
from shardspec.layout.layout import Layout
from shardspec.layout.picture import ids_text
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import KeyPath
from shardspec.text import shown

VERSION: Final = 1
"""Version of the format that this code reads and writes."""
INFO_NAME: Final = "sharding_info.json"
_FORMAT: Final = "shardspec"
_SHARD: Final = re.compile(r"shard-(\d{5,})-([0-9a-f]{16})\.safetensors")
is_shard: Final = _SHARD.fullmatch
"""Matches the names of files with the shards of a rank."""
_CRC: Final = re.compile("[0-9a-f]{8}")
_MAX_SPEC: Final = 4096
_BOX: Final = re.compile(
    rb'\{"box": (\[(?:\[\d{1,18}, \d{1,18}\](?:, )?)*\]'
    rb'(?:, "addend": \[\d{1,18}(?:, \d{1,18})*\])?)(?:, "crc32": "[0-9a-f]{8}")?\}'
)
"""Matches a box as `info_lines` writes it."""
_ENTRY_BYTES: Final = 140
"""Memory of a box without its intervals, which equal boxes share."""
_MESH: Final = {"ids": tuple, "shape": tuple, "axis_names": object}
_TENSOR: Final = {"shape": tuple, "dtype": str, "spec": str}
_FILE: Final = {"name": str, "rank": int, "bytes": int, "boxes": dict}


class ShardingInfo(NamedTuple):
    """Content of `sharding_info.json`: mesh, layout of each tensor, and boxes of each file."""

    save: str
    """Id of this save, in the metadata of all its files."""
    mesh: DeviceMesh
    tensors: Mapping[str, Layout]
    files: tuple[FileEntry, ...]
    values: Mapping[str, object] = MappingProxyType({})
    """Plain values of the state dict that was saved, by name."""
    paths: Mapping[str, KeyPath] = MappingProxyType({})
    """Dotted name -> keys in the nested state dict."""
    file_metadata: Mapping[str, str] = MappingProxyType({})
    """Metadata of the safetensors files that the checkpoint was converted from."""


def info_lines(info: ShardingInfo) -> Iterator[str]:
    """Yield the lines of `sharding_info.json`: one for each tensor, and one for each box."""
    ids, shape, axis_names = info.mesh.ids, info.mesh.shape, info.mesh.axis_names
    mesh = {"ids": ids, "shape": shape, "axis_names": axis_names}
    tensors = (
        (
            name,
            {"shape": at.global_shape, "dtype": to_safetensors(at.dtype), "spec": str(at.spec)},
        )
        for name, at in info.tensors.items()
    )
    yield f'{{\n"format": {_dump(_FORMAT)},\n"version": {VERSION},\n"save": {_dump(info.save)},\n'
    yield f'"mesh": {_dump(mesh)},\n"tensors": {_members(tensors)},\n"files": ['
    for place, file in enumerate(info.files):
        head = _dump({"name": file.name, "rank": file.rank, "bytes": file.num_bytes})
        boxes = groupby(file.boxes, attrgetter("tensor"))
        text = _members(((name, _boxes_json(entries)) for name, entries in boxes), "    ")
        yield f'{"," if place else ""}\n  {head[:-1]}, "boxes": {text}}}'
    yield "\n]" if info.files else "]"
    for key, (encode, _) in _NAMED.items():
        if members := getattr(info, key):
            encoded = ((name, encode(value, name)) for name, value in members.items())
            yield f',\n"{key}": {_members(encoded)}'
    yield "\n}\n"


def _boxes_json(entries: Iterable[BoxEntry]) -> object:
    """Return the JSON of a tensor's boxes: an object for one box, a list of objects for several."""
    boxes = []
    for entry in entries:
        box: dict[str, object] = {"box": entry.box}
        if entry.addend:
            box["addend"] = entry.addend
        if entry.crc32 is not None:
            box["crc32"] = f"{entry.crc32:08x}"
        boxes.append(box)
    return boxes[0] if len(boxes) == 1 else boxes


def _members(items: Iterable[tuple[str, object]], indent: str = "  ") -> str:
    """Return a JSON object as text, with one member a line."""
    lines = ",\n".join(f"{indent}{_dump(name)}: {_dump(value)}" for name, value in items)
    return f"{{\n{lines}\n{indent[2:]}}}" if lines else "{}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_info(directory: StoragePath) -> ShardingInfo:
    """Read and check the sharding info of a checkpoint directory."""
    path = file_inside(directory, INFO_NAME, directory)
    if not path.exists():
        raise CheckpointError(
            f"{directory}: has no {INFO_NAME}, which is written last; the save did not finish, or "
            "this is not a checkpoint; save again"
        )
    shrink = partial(_box_entry, {})
    content = read_json(path, "sharding info", _values_bytes, shrink)
    form, version = fields(content, {"format": str, "version": int}, path, "")
    if (form, version) != (_FORMAT, VERSION):
        raise CheckpointError(
            f"{path}: has format {shown(form)} and version {version}, but this shardspec reads "
            f"{_FORMAT!r} version {VERSION}; upgrade shardspec, or restore a damaged file"
        )
    kinds = {"save": str, "mesh": dict, "tensors": dict, "files": list}
    save, mesh_fields, tensors, files = fields(content, kinds, path, "")
    ids, shape, axes = fields(mesh_fields, _MESH, path, "mesh")
    for axis in () if axes is None else checked(axes, list, path, "mesh.axis_names"):
        checked(axis, str, path, "mesh.axis_names")
    try:
        mesh = DeviceMesh(ids, shape, axis_names=axes)
    except ShardSpecError as error:
        raise CheckpointError(f"{path}: mesh is invalid: {error}") from None
    layouts = _parse_tensors(tensors, mesh, path)
    entries = tuple(
        _parse_file(file, f"files[{place}]", mesh, layouts, path)
        for place, file in enumerate(files)
    )
    for name, count in Counter(entry.name for entry in entries).most_common(1):
        if count > 1:
            raise CheckpointError(f"{path}: files repeats the file name {name!r}")
    if isinstance(values := content.get("values"), BoxEntry):  # values named like members of a box
        content["values"] = json.loads(_dump(_boxes_json([values])))
    decoded: dict[str, dict[str, Any]] = {}
    for key, (_, decode) in _NAMED.items():
        decoded[key] = {}
        for name, value in checked(content.get(key, {}), dict, path, key).items():
            try:
                decoded[key][name] = decode(value)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{path}: {key}[{name!r}] {error}") from None
    for name in decoded["values"].keys() & layouts.keys():
        raise CheckpointError(f"{path}: {name!r} is both a tensor and a value")
    for name in decoded["paths"].keys() - layouts.keys() - decoded["values"].keys():
        raise CheckpointError(f"{path}: paths[{name!r}] is neither a tensor nor a value")
    return ShardingInfo(save, mesh, layouts, entries, **decoded)


def _parse_tensors(
    tensors: Mapping[str, object], mesh: DeviceMesh, path: StoragePath
) -> dict[str, Layout]:
    """Return the layout of each tensor from the parsed JSON; equal layouts share one object."""
    layout_of: dict[tuple[object, ...], Layout] = {}
    layouts = {}
    for name, value in tensors.items():
        key = f"tensors[{name!r}]"
        shape, code, spec = kind = tuple(fields(value, _TENSOR, path, key))
        if kind not in layout_of:
            try:
                if len(shape) > safetensors.MAX_DIMS or len(spec) > _MAX_SPEC:
                    raise CheckpointError(
                        f"has {len(shape)} dims and a spec of {len(spec)} characters, more than "
                        f"the limits {safetensors.MAX_DIMS} and {_MAX_SPEC}"
                    )
                layout_of[kind] = Layout(mesh, spec, shape, from_safetensors(code))
            except ShardSpecError as error:
                problem = error.problem if isinstance(error, SpecSyntaxError) else error
                why = f"{path}: {key} with spec {shown(spec)} is invalid: {problem}"
                raise CheckpointError(why) from None
        layouts[name] = layout_of[kind]
    return layouts


def _parse_file(
    value: object, key: str, mesh: DeviceMesh, layouts: Mapping[str, Layout], path: StoragePath
) -> FileEntry:
    name, rank, num_bytes, boxes = fields(value, _FILE, path, key)
    if rank not in mesh:
        raise CheckpointError(f"{path}: {key}.rank is {rank}, which is not a device of the mesh")
    entries = []
    for tensor in list(boxes):
        listed = boxes.pop(tensor)
        at = f"{key}.boxes[{tensor!r}]"
        if tensor not in layouts:
            raise CheckpointError(f"{path}: {at} is of a tensor that 'tensors' does not list")
        for entry in listed if isinstance(listed, list) and listed else (listed,):
            if not isinstance(entry, BoxEntry):
                raise CheckpointError(
                    f"{path}: {at} should have a box of [low, high] pairs, an addend of whole "
                    "numbers if any, and a crc32 of eight hexadecimal digits if any, but is "
                    f"{shown(entry, 200)}"
                )
            entries.append(entry._replace(tensor=tensor))
    return FileEntry(name, rank, num_bytes, entries)


def _values_bytes(data: bytes) -> int:
    """Return an estimate of the memory in bytes that a parsed `sharding_info.json` takes."""
    num_bytes = values_bytes(data)
    if num_bytes <= ROOM_BYTES:
        return num_bytes
    num_bytes, sides = 0, set()
    for match in _BOX.finditer(data):
        num_bytes += _ENTRY_BYTES
        if match[1] not in sides:
            sides.add(match[1])
            num_bytes += 300 + 100 * match[1].count(b",")
        if num_bytes > ROOM_BYTES:
            return num_bytes
    return num_bytes + values_bytes(_BOX.sub(b"", data))


def _box_entry(shared: dict[ReplicaKey, ReplicaKey], value: dict[str, Any]) -> object:
    """Return a parsed box as a `BoxEntry`, which takes less memory; other objects unchanged."""
    box, addend, crc = value.get("box"), value.get("addend", [0]), value.get("crc32", "0" * 8)
    try:
        if isinstance(box, list) and isinstance(addend, list) and addend and _CRC.fullmatch(crc):
            part = tuple([(lo, hi) for lo, hi in box]), tuple(value.get("addend", ()))
            if all(map(is_size, chain(*part[0], part[1]))):
                crc32 = int(crc, 16) if "crc32" in value else None
                return BoxEntry("", *shared.setdefault(part, part), crc32)
    except (TypeError, ValueError):
        pass
    return value


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"should be a string but is {shown(value)}")


_NAMED: Final[Mapping[str, tuple[Callable[[Any, str], object], Callable[[object], Any]]]] = {
    "values": (state_dict.encode_value, state_dict.decode_value),
    "paths": (lambda path, _: state_dict.encode_path(path), state_dict.decode_path),
    "file_metadata": (lambda text, _: text, _text),
}
"""Members of the info that are omitted if empty -> functions that encode and decode a value."""


def _open(directory: StoragePath, _: OpenOptions) -> Catalog:
    """Read the sharding info and the headers of all files, and check that they agree."""
    info = read_info(directory)
    info_path = directory / INFO_NAME
    paths = [file_inside(directory, file.name, info_path) for file in info.files]
    _check_boxes(info, directory)
    boxes: dict[str, list[StoredBox]] = {name: [] for name in info.tensors}
    with prefetch_map(
        zip(paths, info.files, strict=True),
        lambda look: _stored_boxes(*look, info),
        directory.files_ahead(),
    ) as found_boxes:
        for name, box in chain.from_iterable(found_boxes):
            boxes[name].append(box)
    tensors = {}
    for name, at in info.tensors.items():
        pending, stored = catalog.stored_reductions(at), tuple(boxes.pop(name))
        tensors[name] = StoredTensor(name, at.global_shape, at.dtype, at.spec, pending, stored)
    files = (info_path, *paths)
    metadata = catalog.FileMetadata(info.file_metadata)
    facts = catalog.CheckpointFacts(file_metadata=metadata, paths=info.paths, restored=True)
    return Catalog(FORMAT.called, directory, tensors, files, info.mesh, info.values, facts)


def _check_boxes(info: ShardingInfo, directory: StoragePath) -> None:
    """Check that the files of the ranks list all boxes that the specs give, and no others."""
    parts_of: dict[str, list[tuple[int, ReplicaKey]]] = {name: [] for name in info.tensors}
    for file in info.files:
        for entry in file.boxes:
            parts_of[entry.tensor].append((file.rank, (entry.box, entry.addend)))
    checked_cases = set()
    for name, layout in info.tensors.items():
        stored = parts_of.pop(name)
        case = layout, tuple(stored)
        if case in checked_cases:
            continue
        checked_cases.add(case)
        holders = catalog.replica_holders(layout)
        for rank, part in stored:
            if rank not in holders.get(part, ()):
                own = " and ".join(map(_part_text, catalog.replica_keys(layout, rank))) or "nothing"
                raise CheckpointError(
                    f"{directory / INFO_NAME}: tensor {name!r}: rank {rank} is listed with box "
                    f"{_part_text(part)}, but under spec {layout.spec} it has {own}; the file is "
                    "inconsistent, restore it"
                )
        for part in holders.keys() - {part for _, part in stored}:
            raise CheckpointError(
                f"{directory}: tensor {name!r}: no file contains box {_part_text(part)} (rank "
                f"{ids_text(holders[part])}); restore that file or save again"
            )


def _part_text(part: ReplicaKey) -> str:
    box, addend = part
    return f"{catalog.box_text(box)} of addend {list(addend)}" if addend else catalog.box_text(box)


def _stored_boxes(
    path: StoragePath, file: FileEntry, info: ShardingInfo
) -> list[tuple[str, StoredBox]]:
    """Return (tensor name, box with offset) pairs of a file; checks them against its header."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: the file of rank {file.rank} is missing; restore it or save again"
        )
    with path.open() as opened:
        header = safetensors.read_header(opened)
    actual = {"bytes": header.file_bytes, **header.metadata}
    for key, expected in {"bytes": file.num_bytes, **shard_metadata(info.save, file.rank)}.items():
        if actual.get(key) != expected:
            raise CheckpointError(
                f"{path}: {key} is {actual.get(key)!r} but {INFO_NAME} says {expected!r}; the file "
                "was changed or belongs elsewhere, restore the right one"
            )
    entries_of = {name: list(group) for name, group in groupby(file.boxes, attrgetter("tensor"))}
    listed = {
        name: (info.tensors[name].dtype, catalog.stored_shape([entry.box for entry in entries]))
        for name, entries in entries_of.items()
    }
    stored = {name: (dtype, shape) for name, dtype, shape, *_ in header.entries}
    for name, _ in sorted(stored.items() ^ listed.items()):
        has, expected = (
            f"{side[name][0]} of shape {list(side[name][1])}" if name in side else "nothing"
            for side in (stored, listed)
        )
        raise CheckpointError(
            f"{path}: has tensor {shown(name, 200)} as {has}, but {INFO_NAME} says {expected}; "
            "the file was changed, restore it"
        )
    boxes = []
    for name, dtype, _, offset, _ in header.entries:
        for _, box, addend, crc32 in entries_of[name]:
            num_bytes = box_size(box) * item_bytes(dtype)
            digest = None if crc32 is None else catalog.Digest(crc32, offset, num_bytes)
            boxes.append((name, StoredBox(box, addend, file.rank, path, offset, digest)))
            offset += num_bytes
    return boxes


def shard_metadata(save: str, rank: int) -> dict[str, str]:
    """Return the metadata of a rank's file, which identifies the save.

    >>> shard_metadata("0123456789abcdef", 3)
    {'format': 'pt', 'shardspec.rank': '3', 'shardspec.save': '0123456789abcdef'}
    """
    return {"format": "pt", "shardspec.rank": str(rank), safetensors.SAVE_KEY: save}


def shard_name(rank: int, save: str) -> str:
    """Return the name of the file of a rank.

    >>> shard_name(3, "0123456789abcdef")
    'shard-00003-0123456789abcdef.safetensors'
    """
    return f"shard-{rank:05d}-{save}.safetensors"


def shard_file(
    tensors: Mapping[str, OutputTensor], boxes: Iterable[BoxEntry], rank: int, save: str
) -> OutputFile:
    """Return the output file of a rank: its boxes in the order of safetensors, and the header."""
    boxes_of, slots, extents = {}, [], []
    for name, entries in groupby(boxes, attrgetter("tensor")):
        boxes_of[name] = [entry.box for entry in entries]
        shape = catalog.stored_shape(boxes_of[name])
        slots.append((name, tensors[name].dtype, shape))
    head, header = safetensors.encode_header(slots, shard_metadata(save, rank))
    for entry in header.entries:
        offset = entry.offset
        for box in boxes_of[entry.name]:
            extents.append(catalog.Extent(tensors[entry.name], box, offset))
            offset += extents[-1].num_bytes
    raw = (catalog.RawBytes(0, head),)
    return OutputFile(shard_name(rank, save), header.file_bytes, raw, extents)


def sharded_target(
    mesh: DeviceMesh,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
    save: str | None = None,
    file_metadata: Mapping[str, str] = MappingProxyType({}),
    values: Mapping[str, object] = MappingProxyType({}),
    paths: Mapping[str, KeyPath] = MappingProxyType({}),
) -> Target:
    """Return the output directory that the ranks of a mesh would save.

    `layouts`, by name in the output, have no pending reductions. `save` is the id of the save,
    `values` are plain, and `paths` the keys of tensors and values.
    """
    values, paths = state_dict.spread(values, paths)
    for name, value in values.items():
        state_dict.encode_value(value, name)
        if name in layouts:
            raise CheckpointError(
                f"a tensor and a part of a value would both be named {name!r}; exclude one"
            )
    token = save or os.urandom(8).hex()
    by_name = {tensor.name: tensor for tensor in tensors}
    assigned = catalog.assign_boxes(mesh, layouts)
    files = {
        rank: shard_file(by_name, assigned.pop(rank), rank, token)
        for rank in mesh.ids
        if assigned[rank]
    }

    def fill(crcs: Mapping[str, Sequence[int]], write: catalog.Write) -> None:
        entries = tuple(_entry(rank, file, crcs[file.name]) for rank, file in files.items())
        by_names = dict(sorted(layouts.items()))
        info = ShardingInfo(token, mesh, by_names, entries, values, paths, file_metadata)
        for line in info_lines(info):
            write(line.encode())

    return Target(
        tuple(files.values()),
        directory=True,
        tensors=tensors,
        listing=catalog.Listing(INFO_NAME, fill),
        digested=True,
        carried=frozenset(file_metadata),
    )


def _entry(rank: int, file: OutputFile, crcs: Sequence[int]) -> FileEntry:
    """Return the entry of a file in `sharding_info.json`: its boxes with their digests, by name."""
    boxes = [
        BoxEntry(extent.tensor.name, extent.box, (), crc)
        for extent, crc in zip(file.extents, crcs, strict=True)
    ]
    return FileEntry(file.name, rank, file.num_bytes, sorted(boxes, key=attrgetter("tensor")))


def _lay_out(source: Catalog, output: Wanted) -> Target:
    of_files, carried = source.facts.file_metadata.values, output.carried
    for name, layout in output.layouts.items():
        if layout.mesh != output.mesh:
            raise CheckpointError(
                f"tensor {name!r} is on {layout.mesh}, others are on other meshes, and no "
                "common mesh exists; write them in the format 'dcp'"
            )
    return sharded_target(
        *(output.mesh, output.tensors, output.layouts, output.save),
        *(of_files, carried.values, carried.paths),
    )


FORMAT: Final = Format(
    name="shardspec",
    recognizes=lambda names: INFO_NAME in names,
    open=_open,
    lay_out=_lay_out,
    writes=("sharded",),
    owns=lambda name: name == INFO_NAME or is_shard(name) is not None,
    known_by=INFO_NAME,
)
