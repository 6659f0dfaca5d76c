"""Reads DTensors from `torch.save` files: local tensor, global shape and placements.

torch has stored the mesh of a DTensor in three ways, and all are read: a tensor of ids, one layout
over a list of ids, and one such layout per axis. Source: ``device_mesh.py``, ``_mesh_layout.py``
and ``tensor/_dtensor_spec.py`` of ``torch/distributed``. The unpickler reports a `ValueError` of
these functions as a call with wrong arguments in the pickle.
"""

import struct
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Final, TypeGuard

from shardspec.checkpoint.torch_files.unpickler import (
    Foreign,
    Global,
    Record,
    UnsupportedError,
    made_by,
    unpickle,
)
from shardspec.checkpoint.torch_files.values import (
    TORCH_NAMES,
    Placed,
    TorchTensor,
    UnreadTensor,
    check_record,
    sizes_of,
    storage_of,
)
from shardspec.checkpoint.torch_files.zip_reader import TorchZip
from shardspec.dtypes import item_bytes
from shardspec.layout.placements import REDUCE_OPS, Placement, Split
from shardspec.mesh.device_mesh import DeviceMesh

_MAX_DEVICES: Final = 1 << 20
_MAX_NESTED: Final = 256
_LAYOUTS: Final = ("_MeshLayout", "_FlatLayout")
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_WRAPPER: Final = TORCH_NAMES["torch._utils._rebuild_wrapper_subclass"]
_PLAIN: Final = TORCH_NAMES["torch.Tensor"]


def read_torch(
    archive: TorchZip,
    data: bytes,
    rank: int | None = None,
) -> object:
    """Return the value that `torch.save` wrote, with a `TorchTensor` for each tensor or DTensor.

    `data` is the pickle. Objects of classes beyond `TORCH_NAMES` are `Foreign`. `rank` wrote the
    file; it shows on which slice of a mesh a DTensor was, which torch up to 2.10 does not record.
    """
    from_type = made_by(_FROM_TYPE, _DTensors(archive, rank).from_type)
    names = {**TORCH_NAMES, _FROM_TYPE: from_type}
    return unpickle(data, names, archive.label, "pickle", storage_of, foreign=True)


class _DTensors:
    """Decodes the DTensors in one file; a mesh that many of them share is read once."""

    def __init__(self, archive: TorchZip, rank: int | None) -> None:
        self._archive = archive
        self._rank = rank
        self._meshes: dict[Record, tuple[DeviceMesh, int | None]] = {}
        """The mesh of each record, and the rank that saved it, if recorded."""

    def from_type(self, function: object, kind: object, inner: object, state: object) -> object:
        """Return the result of ``_rebuild_from_type_v2``: a DTensor or tensor with attributes."""
        if not (
            isinstance(function, Global) and isinstance(kind, Global) and isinstance(inner, tuple)
        ):
            raise ValueError("a tensor has not two names, arguments and a state")
        if Foreign in kind.__mro__:
            return kind(inner, state)
        if function is not _WRAPPER:
            if kind is not _PLAIN:
                raise ValueError(f"{kind.name} is not a tensor")
            return function(*inner)
        members: dict[object, object] = {}
        # The state is the object's dict, or a pair of that and its slots.
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                members |= part
            elif part is not None:
                raise ValueError("the state of a tensor is not a dict")
        spec, local = members.get("_spec"), members.get("_local_tensor")
        if kind.name != "DTensor" or not _is_record(spec, "DTensorSpec"):
            raise ValueError(f"a {kind.name} is not a DTensor with a spec")
        if isinstance(local, UnreadTensor):
            return local
        mesh, placements = spec.get("mesh"), spec.get("placements")
        if (
            not isinstance(local, TorchTensor)
            or not _is_record(mesh, "DeviceMesh")
            or not isinstance(placements, (tuple, list))
        ):
            raise ValueError("a DTensor lacks its local tensor, its mesh or its placements")
        if mesh not in self._meshes:
            made = self._mesh(mesh)
            # The rank that saved it, or its place in the mesh, may be recorded.
            writer, at = mesh.get("_rank"), _position(mesh, made.shape)
            if not isinstance(writer, int):
                writer = None if at is None else made.ids[at]
            self._meshes[mesh] = made, None if writer == self._rank else writer
        on, saver = self._meshes[mesh]
        order = _shard_order(spec.get("shard_order"))
        placed = Placed(sizes_of(inner[2]), on, tuple(map(_placement, placements)), order, saver)
        return TorchTensor(*local[:5], placed)

    def _mesh(self, mesh: Record) -> DeviceMesh:
        names = mesh.get("_mesh_dim_names") or mesh.get("mesh_dim_names")
        axis_names = tuple(names) if isinstance(names, tuple | list) else None
        if {*map(type, axis_names or ())} - {str, int}:
            raise ValueError("the names of a mesh's axes are not text")
        tensor = mesh.get("mesh")
        if isinstance(tensor, TorchTensor):
            return _make_mesh(self._ids(tensor), tensor.shape, axis_names)
        layout, ids, listed = map(mesh.get, ("_layout", "_flatten_rank_map", "_rank_map"))
        if not isinstance(ids, tuple) and isinstance(listed, TorchTensor):
            ids = self._ids(listed)
        if (
            not _is_record(layout, *_LAYOUTS)
            or not isinstance(ids, tuple)
            or {*map(type, ids)} != {int}
        ):
            raise ValueError("a mesh has no ids where known versions of torch save them")
        axes = _axes(layout)
        shape = tuple(prod(sizes) for sizes, _ in axes)
        if not 0 < prod(shape) <= len(ids):
            raise ValueError(f"a mesh of shape {shape} has {len(ids)} ids")
        offsets = _offsets(*(tuple(chain(*parts)) for parts in zip(*axes, strict=True)))
        first = 0
        if prod(shape) < len(ids):
            # A slice of a larger mesh: the slice with the rank that wrote the file.
            rank = self._rank if mesh.get("_rank") is None else mesh.get("_rank")
            at = _position(mesh, shape)
            if at is None or rank not in ids:
                raise ValueError(
                    "a mesh is a slice of a larger mesh, but which slice is not recorded; "
                    "distribute over the full mesh, or save with torch 2.11 or later"
                )
            first = ids.index(rank) - offsets[at]
        if first + min(offsets) < 0 or first + max(offsets) >= len(ids):
            raise ValueError(f"a mesh of shape {shape} reaches past its {len(ids)} ids")
        return _make_mesh(tuple(ids[first + offset] for offset in offsets), shape, axis_names)

    def _ids(self, tensor: TorchTensor) -> tuple[int, ...]:
        """Return the device ids that `tensor` contains; raises ValueError if it is too large."""
        letter = {"int32": "i", "int64": "q"}.get(tensor.dtype)
        name = f"data/{tensor.storage.key}"
        num_bytes = self._archive.record(name).num_bytes
        most = 0 < prod(tensor.shape) <= _MAX_DEVICES and num_bytes <= 8 * _MAX_DEVICES
        if letter is None or not most:
            raise ValueError(f"ids of a mesh have shape {list(tensor.shape)}, dtype {tensor.dtype}")
        check_record(tensor, self._archive)
        with self._archive.path.open() as file:
            data = self._archive.read(file, name)
        # Files of big-endian machines are refused.
        ids = struct.unpack(f"<{num_bytes // item_bytes(tensor.dtype)}{letter}", data)
        return tuple(ids[tensor.start + at] for at in _offsets(tensor.shape, tensor.strides))


def _is_record(value: object, *names: str) -> TypeGuard[Record]:
    """Return True for a record of a class with one of these names."""
    return isinstance(value, Record) and value.name in names


@lru_cache(_MAX_NESTED)
def _make_mesh(
    ids: tuple[int, ...], shape: tuple[int, ...], axis_names: tuple[str, ...] | None
) -> DeviceMesh:
    """Return a mesh; calls with equal arguments return the same object."""
    return DeviceMesh(ids, shape, axis_names=axis_names)


def _position(mesh: Record, shape: tuple[int, ...]) -> int | None:
    """Return the row-major position in a mesh of the rank that saved it; None if not recorded."""
    coordinate = mesh.get("_coordinate_on_dim")
    if not isinstance(coordinate, tuple | list) or len(coordinate) != len(shape):
        return None
    place = 0
    for size, step in zip(shape, coordinate, strict=True):
        if not isinstance(step, int) or not 0 <= step < size:
            return None
        place = place * size + step
    return place


def _offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return the row-major offsets of all elements with these sizes and strides."""
    steps = zip(sizes, strides, strict=True)
    return list(map(sum, product(*([stride * at for at in range(n)] for n, stride in steps))))


def _axes(layout: Record) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (sizes, strides) of each mesh axis, as steps through the list of device ids."""
    axes, shape, stride = map(layout.get, ("axes", "shape", "stride"))
    parts: list[tuple[object, ...]] = [(shape, stride)]
    if isinstance(axes, tuple):
        parts = [
            (part.get("shape"), part.get("stride")) if _is_record(part, *_LAYOUTS) else (None, None)
            for part in axes
        ]
    elif isinstance(shape, tuple) and isinstance(stride, tuple):
        parts = list(zip(shape, stride, strict=True))
    flattened = [(_flat(sizes), _flat(strides)) for sizes, strides in parts]
    for sizes, strides in flattened:
        if len(sizes) != len(strides):
            raise ValueError(f"a mesh axis has {len(sizes)} sizes, but {len(strides)} strides")
    return flattened


def _flat(value: object) -> tuple[int, ...]:
    """Return the numbers in nested tuples; raises ValueError if there are too many."""
    numbers: list[object] = []
    todo = [value]
    for _ in range(_MAX_NESTED):
        if not todo:
            return sizes_of(numbers)
        part = todo.pop()
        if isinstance(part, tuple):
            todo.extend(reversed(part))
        else:
            numbers.append(part)
    raise ValueError("the layout of a mesh is too deep")


# Equal placements are one object, so that comparing them is fast.
_split: Final = lru_cache(_MAX_NESTED)(Split)


def _placement(value: object) -> Placement:
    name, state = (value.name, value.state) if isinstance(value, Record) else ("", None)
    if name == "Replicate":
        return None
    if isinstance(state, dict):
        dim, factor, op = map(state.get, ("dim", "split_factor", "reduce_op"))
        if name == "Shard" and isinstance(dim, int):
            return _split(dim, 1)
        if name == "_StridedShard" and isinstance(dim, int) and isinstance(factor, int):
            return _split(dim, factor)
        if name in ("Partial", "_Partial") and isinstance(op, str) and op in REDUCE_OPS:
            return REDUCE_OPS[op]
    raise UnsupportedError(
        f"placement {value!r:.60} is unknown or lacks a member; redistribute to Shard, "
        "Replicate or Partial of a named operation before saving"
    )


def _shard_order(value: object) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    if value is None:
        return None
    order = []
    for entry in value if isinstance(value, (tuple, list)) else (value,):
        match entry.args if _is_record(entry, "ShardOrderEntry") else entry:
            case int() as dim, tuple() as axes:
                order.append((dim, sizes_of(axes)))
            case _:
                raise ValueError("a shard order is not a list of dims and axes")
    return tuple(order)
