"""torch's distributed checkpoint: `.metadata` and a file for each rank that stores anything.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import chain
from math import prod
from typing import Final, NamedTuple
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.catalog import StoredObject
from shardspec.checkpoint.formats.names import METADATA_NAME
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.targets import (
    Extent,
    OutputFile,
    OutputTensor,
    Put,
    RawBytes,
    Target,
    assign_boxes,
    made_bytes,
)
from shardspec.checkpoint.torch_files.writer import (
    Call,
    Made,
    Name,
    Pairs,
    ZipPlan,
    add_state,
    check_text,
    pickle_into,
    tensor_value,
)
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

_MODULE: Final = "torch.distributed.checkpoint.metadata"


def dcp_target(
    mesh: DeviceMesh,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
    others: Mapping[str, object],
) -> Target:
    """Return the output that is a directory which `torch.distributed.checkpoint.load` reads.

    Every device of the mesh that stores a box has a file. Layouts by name in the output have no
    reductions pending. `others` are no tensors and go along, in the file of the first device.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in chain(by_name, others):
        check_text(name)
    assigned = assign_boxes(mesh, layouts)
    values: list[tuple[object, object]] = []
    files = []
    for rank in mesh.ids:
        name, end = f"__{rank}_0.distcp", 0
        extents: list[Extent] = []
        # Let go of one by one: together they take as much memory as what is made of them.
        for entry in assigned.pop(rank):
            tensor = by_name[entry.tensor]
            archive = _archive(box_shape(entry.box), tensor.dtype)
            extents.append(Extent(tensor, entry.box, end + archive.start))
            end += archive.num_bytes
        raw = []
        for key, value in others.items() if rank == mesh.ids[0] else ():
            data = _value_bytes(value)
            raw.append(RawBytes(end, data))
            values.append((_index(key, None, None), _place(name, end, len(data))))
            end += len(data)
        if end:
            files.append(_output_file(name, end, extents, raw))

    def last(_: Mapping[str, Sequence[int]], put: Put) -> None:
        metadata = _metadata(tensors, files, list(others), values)
        put(METADATA_NAME, lambda write: pickle_into(metadata, write))

    return Target(tuple(files), directory=True, last=last, digested=True)


class _Archive(NamedTuple):
    """What torch.save writes for a tensor; it depends on shape and dtype only."""

    plan: ZipPlan
    start: int
    """Where the bytes of the tensor begin."""
    num_bytes: int


# A model has few shapes, and an archive has a kilobyte: it is not kept for every tensor.
@lru_cache(64)
def _archive(shape: tuple[int, ...], dtype: str) -> _Archive:
    plan = ZipPlan()
    size = prod(shape) * item_bytes(dtype)
    (start,) = add_state(plan, tensor_value(shape, dtype, "0"), [("0", size)])
    return _Archive(plan, start, plan.num_bytes)


def _around(extent: Extent) -> tuple[_Archive, int]:
    """Return the archive that an extent lies in, and where in the file it starts."""
    archive = _archive(box_shape(extent.box), extent.tensor.dtype)
    return archive, extent.offset - archive.start


def _output_file(
    name: str, num_bytes: int, extents: Sequence[Extent], values: Sequence[RawBytes]
) -> OutputFile:
    def head(number: int) -> RawBytes:
        if number >= len(extents):
            return values[number - len(extents)]
        archive, at = _around(extents[number])
        return RawBytes(at, archive.plan.pieces()[0].data)

    def trailer(crcs: Sequence[int], first: int = 0) -> Sequence[RawBytes]:
        def tail(number: int) -> RawBytes:
            archive, at = _around(extents[first + number])
            (after,) = archive.plan.late([crcs[first + number]])
            return RawBytes(at + after.offset, after.data)

        return made_bytes(len(crcs) - first, tail)

    raw = made_bytes(len(extents) + len(values), head)
    return OutputFile(name, num_bytes, raw, extents, trailer)


def _value_bytes(value: object) -> bytes:
    """Return what is written for something that is no tensor."""
    if not isinstance(value, StoredObject):
        plan = ZipPlan()
        add_state(plan, value, [])
        return b"".join(piece.data for piece in plan.pieces())
    # As it is, but its digests are checked.
    with SourceFile(value.path) as file:
        data = file.read(value.offset, value.num_bytes)
    try:
        with ZipFile(BytesIO(data)) as archive:
            spoiled = archive.testzip()
    # What zipfile raises for damaged bytes; the third for a compression that it does not know.
    except (BadZipFile, EOFError, NotImplementedError, ZlibError) as error:
        spoiled = str(error)
    if spoiled is not None:
        raise CheckpointError(
            f"{value.path}: the object at byte {value.offset} is damaged ({spoiled}); restore it"
        )
    return data


def _metadata(
    tensors: Sequence[OutputTensor],
    files: Sequence[OutputFile],
    others: Sequence[str],
    values: Sequence[tuple[object, object]],
) -> Made:
    """Return what `.metadata` says; its items are made as they are written."""
    boxes: dict[str, list[Box]] = {tensor.name: [] for tensor in tensors}
    for file in files:
        for extent in file.extents:
            boxes[extent.tensor.name].append(extent.box)

    def stored() -> Iterator[tuple[object, object]]:
        numbers: Counter[str] = Counter()
        for file in files:
            for extent in file.extents:
                name, (archive, at) = extent.tensor.name, _around(extent)
                yield (
                    _index(name, extent.box, numbers[name]),
                    _place(file.name, at, archive.num_bytes),
                )
                numbers[name] += 1

    bytes_kind = Made(Name(_MODULE, "BytesStorageMetadata"))
    listed = chain(
        ((tensor.name, _tensor(tensor, boxes[tensor.name])) for tensor in tensors),
        ((key, bytes_kind) for key in others),
    )
    state = {
        "state_dict_metadata": Pairs(listed),
        "planner_data": Pairs((name, (name,)) for name in chain(boxes, others)),
        "storage_data": Pairs(chain(stored(), values)),
        "storage_meta": None,
        "version": "1.0.0",
    }
    return Made(Name(_MODULE, "Metadata"), state)


def _place(name: str, offset: int, num_bytes: int) -> Made:
    """Return where an item is stored."""
    place = {"relative_path": name, "offset": offset, "length": num_bytes}
    return Made(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), place)


def _size(sizes: Sequence[int]) -> Call:
    return Call(Name("torch", "Size"), (tuple(sizes),))


def _index(name: str, box: Box | None, place: int | None) -> Made:
    """Return the name of an item."""
    state: dict[str, object] = {"fqn": name, "index": place}
    if box is not None:
        state["offset"] = _size([lo for lo, _ in box])
    return Made(Name(_MODULE, "MetadataIndex"), state)


def _tensor(tensor: OutputTensor, boxes: Sequence[Box]) -> Made:
    """Return what the metadata says about a tensor."""
    encoding = Call(Name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    layout = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    properties = Made(
        Name(_MODULE, "TensorProperties"),
        (Name("torch", tensor.dtype), layout, False, encoding, False),
    )
    chunks = [
        Made(
            Name(_MODULE, "ChunkStorageMetadata"),
            {"offsets": _size([lo for lo, _ in box]), "sizes": _size(box_shape(box))},
        )
        for box in boxes
    ]
    return Made(
        Name(_MODULE, "TensorStorageMetadata"),
        {"properties": properties, "size": _size(tensor.shape), "chunks": chunks},
    )
