"""torch's distributed checkpoint: `.metadata` and a file for each rank that stores anything.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import chain
from math import prod
from typing import Final
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.catalog import StoredObject
from shardspec.checkpoint.columns import Columns
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
    extent_columns,
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

__all__ = ["dcp_target"]

_MODULE: Final = "torch.distributed.checkpoint.metadata"


def dcp_target(
    mesh: DeviceMesh,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
    others: Mapping[str, object],
) -> Target:
    """Return the output that is a directory which `torch.distributed.checkpoint.load` reads.

    Parameters
    ----------
    mesh
        The devices; each that stores a box has a file.
    tensors
        What to write.
    layouts
        Output name to how it is cut; no reductions pending.
    others
        Values that are no tensors and go along, in the file of the first device.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in chain(by_name, others):
        check_text(name)
    values: list[tuple[object, object]] = []
    files = []
    assigned = assign_boxes(mesh, layouts)
    for rank in mesh.ids:
        file = _File(f"__{rank}_0.distcp")
        # Let go of one by one: together they take as much memory as what is made of them.
        for entry in assigned.pop(rank):
            file.add_box(by_name[entry.tensor], entry.box)
        if rank == mesh.ids[0]:
            for key, value in others.items():
                values.append((_index(key, None, None), file.add_value(value)))
        if file.num_bytes:
            files.append(file.planned())

    def last(_: Mapping[str, Sequence[int]], put: Put) -> None:
        metadata = _metadata(tensors, files, list(others), values)
        put(METADATA_NAME, lambda write: pickle_into(metadata, write))

    return Target(tuple(files), directory=True, last=last, digested=True)


def _metadata(
    tensors: Sequence[OutputTensor],
    files: Sequence[OutputFile],
    others: Sequence[str],
    values: Sequence[tuple[object, object]],
) -> Made:
    """Return what `.metadata` says; its items are made as they are written."""
    # Most tensors of a merged checkpoint have one box, and a tuple is half a list.
    boxes_of: dict[str, tuple[Box, ...] | list[Box]] = {tensor.name: () for tensor in tensors}
    for file in files:
        for extent in file.extents:
            boxes = boxes_of[extent.tensor.name]
            if isinstance(boxes, list):
                boxes.append(extent.box)
            else:
                boxes_of[extent.tensor.name] = [*boxes, extent.box] if boxes else (extent.box,)

    def stored() -> Iterator[tuple[object, object]]:
        numbers: Counter[str] = Counter()
        for file in files:
            for extent in file.extents:
                name, archive = extent.tensor.name, _archive_of(extent)
                if len(boxes_of[name]) > 1:
                    numbers[name] += 1
                place = _place(file.name, extent.offset - archive.start, archive.num_bytes)
                yield _index(name, extent.box, max(0, numbers[name] - 1)), place

    return Made(
        Name(_MODULE, "Metadata"),
        {
            "state_dict_metadata": Pairs(
                chain(
                    ((tensor.name, _tensor(tensor, boxes_of[tensor.name])) for tensor in tensors),
                    ((key, Made(Name(_MODULE, "BytesStorageMetadata"))) for key in others),
                )
            ),
            "planner_data": Pairs((name, (name,)) for name in chain(boxes_of, others)),
            "storage_data": Pairs(chain(stored(), values)),
            "storage_meta": None,
            "version": "1.0.0",
        },
    )


class _File:
    """A file in the making: what torch.save writes for each item, one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_bytes = 0
        self._values: list[RawBytes] = []
        self.extents: Columns[Extent] = extent_columns()

    def add_box(self, tensor: OutputTensor, box: Box) -> None:
        """Add a box of a tensor."""
        archive = _archive(box_shape(box), tensor.dtype)
        self.extents.append(tensor, box, self.num_bytes + archive.start)
        self.num_bytes += archive.num_bytes

    def add_value(self, value: object) -> Made:
        """Add something that is no tensor; return where it is stored."""
        if isinstance(value, StoredObject):
            data = _checked(value)
            self._values.append(RawBytes(self.num_bytes, data))
            self.num_bytes += len(data)
            return _place(self.name, self.num_bytes - len(data), len(data))
        plan = ZipPlan(self.num_bytes)
        add_state(plan, value, [])
        self._values += plan.pieces()
        place = _place(self.name, self.num_bytes, plan.num_bytes)
        self.num_bytes += plan.num_bytes
        return place

    def planned(self) -> OutputFile:
        """Return the file."""

        def piece(number: int) -> RawBytes:
            # Values are in one file only, after its tensors.
            if number >= len(self.extents):
                return self._values[number - len(self.extents)]
            extent = self.extents[number]
            archive = _archive_of(extent)
            return RawBytes(extent.offset - archive.start, archive.head)

        def late(crcs: Sequence[int], first: int = 0) -> Sequence[RawBytes]:
            def tail(number: int) -> RawBytes:
                extent = self.extents[first + number]
                archive = _archive_of(extent)
                offset, data = archive.tail(crcs[first + number])
                return RawBytes(extent.offset - archive.start + offset, data)

            return made_bytes(len(crcs) - first, tail)

        pieces = made_bytes(len(self.extents) + len(self._values), piece)
        return OutputFile(self.name, self.num_bytes, pieces, self.extents, late)


class _Archive:
    """What torch.save writes for a tensor; it depends on shape and dtype only."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self._plan = ZipPlan()
        size = prod(shape) * item_bytes(dtype)
        (self.start,) = add_state(self._plan, tensor_value(shape, dtype, "0"), [("0", size)])
        self.num_bytes = self._plan.num_bytes
        (before,) = self._plan.pieces()
        self.head = before.data

    def tail(self, crc: int) -> RawBytes:
        """Return what follows the tensor."""
        (after,) = self._plan.late([crc])
        return after


# A model has few shapes, and an archive has a kilobyte: it is not kept for every tensor.
_archive = lru_cache(64)(_Archive)


def _archive_of(slot: Extent) -> _Archive:
    """Return what surrounds a slot."""
    return _archive(box_shape(slot.box), slot.tensor.dtype)


def _checked(value: StoredObject) -> bytes:
    """Read an object as it is; its digests are checked."""
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
