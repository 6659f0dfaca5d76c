"""torch's distributed checkpoint: `.metadata` and a file for each rank that stores anything.

Source: torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.formats.names import METADATA_NAME
from shardspec.checkpoint.writers.pickles import Call, Made, Name, Pairs, pickled
from shardspec.checkpoint.writers.torch_file import add_state, tensor_value
from shardspec.checkpoint.writers.zips import ZipPlan
from shardspec.checkpoint.writing.assign import assign_boxes
from shardspec.checkpoint.writing.targets import OutputFile, Piece, Slot, Target, Wanted
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

__all__ = ["dcp_target"]

_MODULE: Final = "torch.distributed.checkpoint.metadata"


def dcp_target(
    mesh: DeviceMesh,
    tensors: Sequence[Wanted],
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
    boxes_of: dict[str, list[Box]] = {tensor.name: [] for tensor in tensors}
    stored: list[tuple[object, object]] = []
    files = []
    for rank, boxes in assign_boxes(mesh, layouts).items():
        file = _File(f"__{rank}_0.distcp")
        for entry in boxes:
            tensor = by_name[entry.tensor]
            place = file.add_box(tensor, entry.box)
            stored.append((_index(entry.tensor, entry.box, len(boxes_of[entry.tensor])), place))
            boxes_of[entry.tensor].append(entry.box)
        if rank == mesh.ids[0]:
            for key, value in others.items():
                stored.append((_index(key, None, None), file.add_value(value)))
        if file.num_bytes:
            files.append(file.planned())
    entries = {name: _tensor(by_name[name], boxes) for name, boxes in boxes_of.items()}
    entries |= {key: Made(Name(_MODULE, "BytesStorageMetadata")) for key in others}
    metadata = Made(
        Name(_MODULE, "Metadata"),
        {
            "state_dict_metadata": entries,
            "planner_data": {name: (name,) for name in entries},
            "storage_data": Pairs(tuple(stored)),
            "storage_meta": None,
            "version": "1.0.0",
        },
    )
    data = pickled(metadata, numbered=True)
    return Target(
        tuple(files),
        directory=True,
        last=lambda _: [(METADATA_NAME, data)],
        digested=True,
    )


class _File:
    """A file in the making: what torch.save writes for each item, one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_bytes = 0
        self._pieces: list[Piece] = []
        self._slots: list[Slot] = []
        self._plans: list[ZipPlan] = []
        """Of each slot."""

    def add_box(self, tensor: Wanted, box: Box) -> Made:
        """Add a box of a tensor; return where it is stored."""
        plan = ZipPlan(self.num_bytes)
        value = tensor_value(box_shape(box), tensor.dtype, "0")
        size = box_size(box) * item_bytes(tensor.dtype)
        (offset,) = add_state(plan, value, [("0", size)])
        self._slots.append(Slot(tensor, box, offset))
        self._plans.append(plan)
        return self._added(plan)

    def add_value(self, value: object) -> Made:
        """Add something that is no tensor; return where it is stored."""
        plan = ZipPlan(self.num_bytes)
        add_state(plan, value, [])
        return self._added(plan)

    def _added(self, plan: ZipPlan) -> Made:
        self._pieces += plan.pieces()
        place = {
            "relative_path": self.name,
            "offset": self.num_bytes,
            "length": plan.num_bytes,
        }
        self.num_bytes += plan.num_bytes
        return Made(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), place)

    def planned(self) -> OutputFile:
        """Return the file."""
        plans = tuple(self._plans)

        def late(crcs: Sequence[int], first: int = 0) -> list[Piece]:
            numbers = range(first, len(crcs))
            return [piece for number in numbers for piece in plans[number].late([crcs[number]])]

        return OutputFile(self.name, self.num_bytes, tuple(self._pieces), tuple(self._slots), late)


def _size(sizes: Sequence[int]) -> Call:
    return Call(Name("torch", "Size"), (tuple(sizes),))


def _index(name: str, box: Box | None, place: int | None) -> Made:
    """Return the name of an item."""
    state: dict[str, object] = {"fqn": name, "index": place}
    if box is not None:
        state["offset"] = _size([lo for lo, _ in box])
    return Made(Name(_MODULE, "MetadataIndex"), state)


def _tensor(tensor: Wanted, boxes: Sequence[Box]) -> Made:
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
