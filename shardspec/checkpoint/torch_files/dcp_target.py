"""Writes torch's distributed checkpoints: `.metadata`, and a file per rank with boxes.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Final, TypeAlias

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint import catalog
from shardspec.checkpoint.catalog import StoredObject
from shardspec.checkpoint.torch_files import writer
from shardspec.checkpoint.torch_files.dcp_metadata import METADATA_NAME
from shardspec.checkpoint.torch_files.states import state_file
from shardspec.checkpoint.torch_files.writer import Made, Name, Pairs, PickledCall
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import KeyPath

_MODULE: Final = "torch.distributed.checkpoint.metadata"
_INFO: Final = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")

_Place: TypeAlias = tuple[str, int, int]
"""File, offset and number of bytes."""


def dcp_target(
    mesh: DeviceMesh,
    tensors: Sequence[catalog.OutputTensor],
    layouts: Mapping[str, Layout],
    extras: Mapping[str, object],
    paths: Mapping[str, KeyPath] = MappingProxyType({}),
) -> catalog.Target:
    """Return an output directory that `torch.distributed.checkpoint.load` reads.

    `layouts`, by name in the output, have no pending reductions. `extras` are entries that are not
    tensors, stored in the file of the first device. `paths` are the nested keys of both.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in chain(by_name, extras):
        writer.check_text(name)
    assigned = catalog.assign_boxes(mesh, layouts)
    chunks: dict[str, list[tuple[Box, _Place]]] = {name: [] for name in by_name}
    values: dict[str, _Place] = {}
    files = []
    for rank in mesh.ids:
        file, end = f"__{rank}_0.distcp", 0
        extents: list[catalog.Extent] = []
        raw: list[catalog.RawBytes] = []
        # Entries are released rank by rank: they take as much memory as the extents.
        for entry in assigned.pop(rank):
            tensor = by_name[entry.tensor]
            archive = _archive(box_shape(entry.box), tensor.dtype)
            extents.append(catalog.Extent(tensor, entry.box, end + archive.extents[0].offset))
            raw.append(catalog.RawBytes(end, archive.raw[0].data))
            chunks[tensor.name].append((entry.box, (file, end, archive.num_bytes)))
            end += archive.num_bytes
        for name, value in extras.items() if rank == mesh.ids[0] else ():
            start = end
            raw += _raw_value(value, start)
            if isinstance(value, StoredObject):
                end += value.num_bytes
            else:
                end = raw[-1].offset + len(raw[-1].made())
            values[name] = (file, start, end - start)
        if end:
            files.append(catalog.OutputFile(file, end, raw, extents, partial(_trailer, extents)))

    def fill(_: Mapping[str, Sequence[int]], write: catalog.Write) -> None:
        writer.pickle_into(_metadata(tensors, chunks, values, paths), write)

    listing = catalog.Listing(METADATA_NAME, fill)
    return catalog.Target(tuple(files), True, tensors, listing, digested=True)


@lru_cache(64)  # a model has few shapes
def _archive(shape: tuple[int, ...], dtype: str) -> catalog.OutputFile:
    """Return the file that torch.save writes for a tensor; it depends on shape and dtype only."""
    tensor = catalog.OutputTensor("", "", shape, dtype)
    return state_file("", writer.tensor_value(shape, dtype, "0"), [tensor])


def _trailer(extents: Sequence[catalog.Extent], crcs: Sequence[int]) -> Iterator[catalog.RawBytes]:
    """Yield the end of each tensor's zip, a kilobyte that is made when it is written."""

    def after(number: int, extent: catalog.Extent) -> bytes:
        archive = _archive(box_shape(extent.box), extent.tensor.dtype)
        assert archive.trailer is not None, "it has a tensor"
        (late,) = archive.trailer([crcs[number]])
        return late.made()

    for number, extent in enumerate(extents):
        end = extent.offset + extent.num_bytes
        yield catalog.RawBytes(end, partial(after, number, extent))


def _raw_value(value: object, start: int) -> list[catalog.RawBytes]:
    """Return the bytes of a value that is not a tensor, to be written from position `start` on."""
    if not isinstance(value, StoredObject):
        return [raw._replace(offset=start + raw.offset) for raw in state_file("", value).raw]
    first, *rest = catalog.copied_bytes(*value, start)

    def checked() -> bytes:
        with value.path.open() as file:
            archive = read_torch_zip(file, value.offset, value.num_bytes)
            if not all(archive.is_intact(file, name) for name in archive.directory):
                raise CheckpointError(
                    f"{value.path}: the object at byte {value.offset} is damaged (CRC-32); "
                    "restore it"
                )
        return first.made()

    return [first._replace(data=checked), *rest]


def _metadata(
    tensors: Sequence[catalog.OutputTensor],
    chunks: Mapping[str, Sequence[tuple[Box, _Place]]],
    values: Mapping[str, _Place],
    paths: Mapping[str, KeyPath],
) -> Made:
    """Return the content of `.metadata`, whose items are made while they are written."""

    def made(kind: str, **state: object) -> Made:
        return Made(Name(_MODULE, kind), state or None)

    def size(sizes: Iterable[int]) -> PickledCall:
        return PickledCall(Name("torch", "Size"), (tuple(sizes),))

    def described(tensor: catalog.OutputTensor) -> Made:
        encoding = PickledCall(Name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
        layout = PickledCall(Name("torch.serialization", "_get_layout"), ("torch.strided",))
        fields = (Name("torch", tensor.dtype), layout, False, encoding, False)
        listed = [
            made(
                "ChunkStorageMetadata",
                offsets=size(lo for lo, _ in box),
                sizes=size(box_shape(box)),
            )
            for box, _ in chunks[tensor.name]
        ]
        properties = Made(Name(_MODULE, "TensorProperties"), fields)
        return made(
            "TensorStorageMetadata", properties=properties, size=size(tensor.shape), chunks=listed
        )

    def stored(place: _Place, **index: object) -> tuple[Made, Made]:
        info = dict(zip(("relative_path", "offset", "length"), place, strict=True))
        return made("MetadataIndex", **index), Made(_INFO, info)

    def keys(name: str) -> tuple[str | int, ...]:
        """Return the keys of an entry as torch writes them: numbers are positions in lists."""
        path = paths.get(name, (name,))
        return tuple(key[0] if isinstance(key, tuple) else str(key) for key in path)

    def places() -> Iterator[tuple[Made, Made]]:
        for name, of_tensor in chunks.items():
            for number, (box, place) in enumerate(of_tensor):
                yield stored(place, fqn=name, index=number, offset=size(lo for lo, _ in box))
        for name, place in values.items():
            yield stored(place, fqn=name, index=None)

    kind = made("BytesStorageMetadata")
    entries = chain(((t.name, described(t)) for t in tensors), ((name, kind) for name in values))
    return made(
        "Metadata",
        state_dict_metadata=Pairs(entries),
        planner_data=Pairs((name, keys(name)) for name in chain(chunks, values)),
        storage_data=Pairs(places()),
        storage_meta=None,
        version="1.0.0",
    )
