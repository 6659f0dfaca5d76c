"""DTensors that `torch.save` wrote: the local tensor, the global shape, mesh and placements.

How torch keeps a mesh has changed twice: as a tensor of ids, as one layout over a list of ids, and
as one such layout per axis. All are read. Source: ``torch/distributed/device_mesh.py``,
``torch/distributed/_mesh_layout.py`` and ``torch/distributed/tensor/_dtensor_spec.py``.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final, NamedTuple, Never, TypeAlias

from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.pickle_screen import AlikeScreen
from shardspec.checkpoint.torch_files.torch_values import (
    TORCH_NAMES,
    TorchTensor,
    read_torch_pickle,
    sizes_of,
    tensor_place,
)
from shardspec.checkpoint.torch_files.unpickler import Global, Names, Record, made_by
from shardspec.checkpoint.torch_files.zip_files import TorchZip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.placements import (
    PartialPlacement,
    Placement,
    Split,
    Whole,
    spec_of_placements,
)
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = [
    "AlikeFiles",
    "ShardOrder",
    "TorchDTensor",
    "dtensor_spec",
    "local_of",
    "read_dtensors",
]

ShardOrder: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""Per dim the axes that split it, the major one first."""

_MeshMaker: TypeAlias = Callable[
    [tuple[int, ...], tuple[int, ...], tuple[str, ...] | None], DeviceMesh
]

_MOST_DEVICES: Final = 1 << 20
_MOST_NESTED: Final = 256
_MOST_MESHES: Final = 4096
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_WRAPPER: Final = TORCH_NAMES["torch._utils._rebuild_wrapper_subclass"]
_PLAIN: Final = TORCH_NAMES["torch.Tensor"]
_WHOLE: Final = Whole()


class TorchDTensor(NamedTuple):
    """A DTensor as one rank saved it."""

    local: TorchTensor
    """What the rank held."""
    shape: tuple[int, ...]
    """Sizes of the global tensor."""
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    """One per mesh axis."""
    shard_order: ShardOrder | None
    """Where torch says so."""
    rank: int | None = None
    """The rank that saved it, where its mesh says so and it is not the one it was read for."""

    def __hash__(self) -> int:
        # A mesh may have very many ids.
        return id(self)


def dtensor_spec(dtensor: TorchDTensor) -> ShardingSpec:
    """Return the spec of a DTensor, axes by number."""
    order = dict(dtensor.shard_order or ()) or None
    return spec_of_placements(dtensor.placements, dtensor.shape, dtensor.mesh.shape, order)


def local_of(tensor: "TorchTensor | TorchDTensor") -> TorchTensor:
    """Return what a file holds of a tensor."""
    return tensor.local if isinstance(tensor, TorchDTensor) else tensor


class AlikeFiles:
    """What files of one checkpoint share while they are read: meshes, and what was screened."""

    def __init__(self) -> None:
        self.screen = AlikeScreen()

        @lru_cache(_MOST_MESHES)
        def make_mesh(
            ids: tuple[int, ...], shape: tuple[int, ...], axis_names: tuple[str, ...] | None
        ) -> DeviceMesh:
            return DeviceMesh(ids, shape, axis_names=axis_names)

        self.make_mesh: _MeshMaker = make_mesh


def _refuse(problem: str) -> Never:
    raise ValueError(problem)


def read_dtensors(
    file: SourceFile,
    found: TorchZip,
    more: Names | None = None,
    rank: int | None = None,
    alike: "AlikeFiles | None" = None,
    data: bytes | None = None,
) -> object:
    """Read what `torch.save` wrote, with a `TorchDTensor` where each DTensor was.

    Parameters
    ----------
    file, found, more
        As for `shardspec.checkpoint.torch_files.torch_values.read_torch`.
    rank
        The rank that wrote it, if known: versions of torch up to 2.10 need it to tell which slice
        of a mesh a DTensor was on.
    alike
        What is known of files that may be alike.
    data
        The pickle, where it has been read.
    """
    alike = alike or AlikeFiles()
    reader = _Reader(file, found, rank, alike.make_mesh)
    names = {**(more or {}), _FROM_TYPE: made_by(_FROM_TYPE, reader.from_type)}
    data = found.pickle(file) if data is None else data
    return read_torch_pickle(data, found.what, names, alike.screen)


class _Reader:
    """Builds DTensors of one file; a mesh that many of them share is built once."""

    def __init__(
        self, file: SourceFile, found: TorchZip, rank: int | None, make_mesh: _MeshMaker
    ) -> None:
        self._file = file
        self._found = found
        self._rank = rank
        self._meshes: dict[Record, tuple[DeviceMesh, int | None]] = {}
        """Every mesh that a DTensor was on, and who saved it, where it says so."""
        self._make_mesh = make_mesh

    def from_type(self, function: object, kind: object, inner: object, state: object) -> object:
        """Build what ``_rebuild_from_type_v2`` would: a DTensor, or a tensor with attributes."""
        match function, kind, inner:
            case Global(), Global(), tuple():
                pass
            case _:
                _refuse("it takes two names, arguments and a state")
        if function is not _WRAPPER:
            return function(*inner) if kind is _PLAIN else _refuse(f"{kind.name} is no tensor")
        members = _members(state)
        match kind.name, members.get("_spec"), members.get("_local_tensor"):
            case "DTensor", Record(name="DTensorSpec") as spec, TorchTensor() as local:
                pass
            case _:
                _refuse(f"a {kind.name} is no DTensor with a local tensor and a spec")
        shape = sizes_of(inner[2])
        match spec.get("mesh"), spec.get("placements"):
            case Record(name="DeviceMesh") as mesh, (tuple() | list()) as placements:
                pass
            case _:
                _refuse("the spec of a DTensor lacks its mesh or its placements")
        if mesh not in self._meshes:
            found = self._mesh(mesh)
            writer = _writer(mesh, found)
            self._meshes[mesh] = found, None if writer == self._rank else writer
        on, saver = self._meshes[mesh]
        order = _shard_order(spec.get("shard_order"))
        return TorchDTensor(local, shape, on, tuple(map(_placement, placements)), order, saver)

    def _mesh(self, mesh: Record) -> DeviceMesh:
        names = mesh.get("_mesh_dim_names") or mesh.get("mesh_dim_names")
        axis_names = tuple(names) if isinstance(names, tuple | list) else None
        if any(not isinstance(name, str) for name in axis_names or (names or "",)):
            _refuse("the names of a mesh are no texts")
        tensor = mesh.get("mesh")
        if isinstance(tensor, TorchTensor):
            return self._make_mesh(tuple(self._numbers(tensor)), tensor.shape, axis_names)
        layout, ids = mesh.get("_layout"), mesh.get("_flatten_rank_map")
        if not isinstance(ids, tuple):
            ids = mesh.get("_rank_map")
            ids = tuple(self._numbers(ids)) if isinstance(ids, TorchTensor) else None
        if not (ids and isinstance(layout, Record) and set(map(type, ids)) == {int}):
            _refuse("a mesh lacks its ids; its version of torch is not known")
        axes = [_offsets(*axis, len(ids)) for axis in _axes(layout)]
        shape = tuple(map(len, axes))
        if prod(shape) > len(ids):
            _refuse(f"a mesh of shape {shape} has {len(ids)} ids")
        base = self._base(mesh, ids, axes) if prod(shape) < len(ids) else 0
        places = [base + sum(offsets) for offsets in product(*axes)]
        if min(places) < 0 or max(places) >= len(ids):
            _refuse(f"a mesh of shape {shape} reaches past its {len(ids)} ids")
        return self._make_mesh(tuple(ids[place] for place in places), shape, axis_names)

    def _base(self, mesh: Record, ids: Sequence[object], axes: Sequence[Sequence[int]]) -> int:
        """Return where in the list of ids a slice of a mesh starts: the writer is part of it."""
        rank = mesh.get("_rank")
        rank = self._rank if rank is None else rank
        coordinate = mesh.get("_coordinate_on_dim")
        if (
            not isinstance(rank, int)
            or rank not in ids
            or not isinstance(coordinate, tuple | list)
            or len(coordinate) != len(axes)
        ):
            _refuse(
                "a mesh is a slice of a larger one and does not say which; distribute over the "
                "whole mesh, or save with torch 2.11 or later"
            )
        return ids.index(rank) - sum(
            axis[at] if isinstance(at, int) and 0 <= at < len(axis) else _refuse("no coordinate")
            for at, axis in zip(coordinate, axes, strict=True)
        )

    def _numbers(self, tensor: TorchTensor) -> list[int]:
        """Read a small tensor of ids."""
        count = prod(tensor.shape)
        letter = {"int32": "i", "int64": "q"}.get(tensor.dtype)
        if letter is None or not 0 < count <= _MOST_DEVICES:
            _refuse(f"a mesh of shape {list(tensor.shape)} and dtype {tensor.dtype}")
        place = tensor_place(tensor, self._file, self._found)
        # All of the storage, of which a slice of a mesh has some: the digest is of all.
        num_bytes = self._found.num_bytes(tensor.storage.key)
        if num_bytes > 8 * _MOST_DEVICES:
            _refuse(f"the ids of a mesh lie in {num_bytes} bytes")
        size = item_bytes(tensor.dtype)
        data = self._file.read(place.offset - tensor.start * size, num_bytes)
        if place.digest is not None and crc32(data) != place.digest.crc32:
            raise CheckpointError(
                f"{self._found.what}: the ids of a mesh are not as saved (CRC-32); restore the "
                "file or save again"
            )
        # Little endian, as everything that is read.
        ids = struct.unpack_from(f"<{num_bytes // size}{letter}", data)
        steps = zip(tensor.shape, tensor.strides, strict=True)
        axes = [[step * at for at in range(count)] for count, step in steps]
        return [ids[tensor.start + sum(offsets)] for offsets in product(*axes)]


def _writer(mesh: Record, found: DeviceMesh) -> int | None:
    """Return the rank that saved a mesh, which notes it, or at least its place in the mesh."""
    rank, at = mesh.get("_rank"), mesh.get("_coordinate_on_dim")
    if isinstance(rank, int):
        return rank
    if not isinstance(at, tuple | list) or len(at) != found.ndim:
        return None
    place = 0
    for size, step in zip(found.shape, at, strict=True):
        if not isinstance(step, int) or not 0 <= step < size:
            return None
        place = place * size + step
    return found.ids[place]


def _members(state: object) -> Mapping[object, object]:
    """Return the members of an object: its dict, and its slots beside it where it has some."""
    found: dict[object, object] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            found.update(part)
        elif part is not None:
            _refuse("the state of a tensor is no dict")
    return found


@lru_cache(_MOST_NESTED)
def _split(dim: int, factor: int) -> Split:
    """Return one object for all placements that are alike, which are then compared at once."""
    return Split(dim, factor)


def _placement(value: object) -> Placement:
    if not isinstance(value, Record):
        _refuse(f"a placement is a {type(value).__name__}")
    match value.name:
        case "Replicate":
            return _WHOLE
        case "Shard" | "_StridedShard":
            dim = value.get("dim")
            factor = 1 if value.name == "Shard" else value.get("split_factor")
            if isinstance(dim, int) and isinstance(factor, int):
                return _split(dim, factor)
        case "Partial" | "_Partial":
            match value.get("reduce_op"):
                case "sum" | "avg" | "min" | "max" as op:
                    return PartialPlacement(op)
                case "product" | "prod":
                    return PartialPlacement("prod")
    _refuse(
        f"placement {value.name} is not known, or not with its members; redistribute to Shard, "
        "Replicate or Partial of a named operation before saving"
    )


def _shard_order(value: object) -> ShardOrder | None:
    if value is None:
        return None
    order = []
    for entry in value if isinstance(value, tuple | list) else _refuse("a shard order"):
        if isinstance(entry, Record) and entry.name == "ShardOrderEntry":
            entry = entry.args
        match entry:
            case int() as dim, tuple() as axes:
                order.append((dim, sizes_of(axes)))
            case _:
                _refuse("a shard order is no list of dims and axes")
    return tuple(order)


def _axes(layout: Record) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return flat sizes and strides of every axis of a mesh."""
    axes = layout.get("axes")
    if isinstance(axes, tuple):
        parts = [
            (part.get("shape"), part.get("stride")) if isinstance(part, Record) else _refuse("axes")
            for part in axes
        ]
    else:
        shape, stride = layout.get("shape"), layout.get("stride")
        if isinstance(shape, int):
            shape, stride = (shape,), (stride,)
        if not isinstance(shape, tuple) or not isinstance(stride, tuple):
            _refuse("the layout of a mesh has no sizes and strides")
        parts = list(zip(shape, stride, strict=True))
    return [(_flat(shape), _flat(stride)) for shape, stride in parts]


def _flat(value: object) -> tuple[int, ...]:
    """Return the numbers of nested tuples; few of them, however they are nested."""
    found: list[object] = []
    todo: list[object] = [value]
    for _ in range(_MOST_NESTED):
        if not todo:
            return sizes_of(found)
        part = todo.pop()
        if isinstance(part, tuple):
            todo.extend(reversed(part))
        else:
            found.append(part)
    _refuse("the layout of a mesh is too deep")


def _offsets(shape: Sequence[int], stride: Sequence[int], most: int) -> list[int]:
    """Return what every step along an axis adds to the place in the list of ids."""
    if len(shape) != len(stride) or prod(shape) > most:
        _refuse(f"an axis of a mesh has sizes {list(shape)} and strides {list(stride)}")
    steps = zip(shape, stride, strict=True)
    return [
        sum(step) for step in product(*(range(0, n * s, s) if s else [0] * n for n, s in steps))
    ]
