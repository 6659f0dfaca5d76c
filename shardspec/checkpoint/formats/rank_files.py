"""Directories with one file of `torch.save` per rank, as trainers and RL stacks write them.

**The names.** A file belongs to a family and a rank by the end of its name: ``rank``, perhaps
``_`` or ``-``, a number, and ``.pt``, ``.pth`` or ``.bin``; before it may stand ``world_size_W_``.
What is left in front is the family and must be empty or end in ``_``, ``-`` or ``.``. So
``model_world_size_4_rank_2.pt`` (verl) is rank 2 of 4 of the family ``model``, and ``rank-2.pt`` is
rank 2 of the family without a name. The family ``model`` is read if there is one, or else the only
one there is; other families are listed among `others`. A path to a file means its family.

**The ranks.** All W files must be there. Where no name says W, it is one more than the largest rank
found in the names or in any mesh.

**The tensors.** What a rank holds of a DTensor follows from the mesh, the placements and the shard
order saved with it (FSDP2, tensor parallel, both (``_StridedShard``), HSDP, pending sums). Plain
tensors have to be whole and alike on all ranks. All ranks must agree on names, shapes, dtypes and
placements, and every copy is kept, to be compared. torch notes in each mesh which rank saved it,
so that swapped files are found out; where only plain tensors were saved, nothing depends on it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.formats.listed import ListedCheckpoint
from shardspec.checkpoint.reading.form_names import RANK_FILE, RANK_FILES, is_rank_file
from shardspec.checkpoint.reading.holders import Part, part_of, pending_of
from shardspec.checkpoint.reading.plain import plain_value
from shardspec.checkpoint.reading.source import Described, Pending, StoredBox, StoredTensor
from shardspec.checkpoint.storage.files import file_inside
from shardspec.checkpoint.torch_files.torch_dtensors import ShardOrder, TorchDTensor, dtensor_spec
from shardspec.checkpoint.torch_files.torch_state import StateTensor, TorchState, read_torch_state
from shardspec.checkpoint.torch_files.torch_values import TorchTensor
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.layout.layout import Layout
from shardspec.layout.placements import Placement
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.text import counted

__all__ = ["open_family", "open_rank_files"]

_PREFERRED: Final = "model"
_SHOWN: Final = 8

_Placed: TypeAlias = tuple[
    DeviceMesh, tuple[Placement, ...], ShardOrder | None, tuple[int, ...], str
]
"""What the layout of a DTensor follows from."""
_MOST_KEPT: Final = 1 << 16
"""What ranks hold under layouts, kept while tensors are put together: many are cut alike."""


class _RankFile(NamedTuple):
    """What the name of a file says."""

    name: str
    family: str
    world: int | None
    rank: int


class _Kind(NamedTuple):
    """What all ranks have to agree on about a tensor."""

    shape: tuple[int, ...]
    dtype: str
    spec: ShardingSpec | None
    """None if it is a plain tensor."""
    mesh_shape: tuple[int, ...]
    pending: tuple[Pending, ...]

    def __str__(self) -> str:
        how = "plain" if self.spec is None else f"{self.spec} on {list(self.mesh_shape)} devices"
        return f"{self.dtype} of shape {list(self.shape)}, {how}"


def open_rank_files(directory: Path) -> ListedCheckpoint:
    """Read the files of all ranks of the model in a directory; not their data.

    Raises
    ------
    CheckpointError
        If there are several families and none is called ``model``; or as `open_family`.
    """
    families = _families(directory)
    if len(families) > 1 and _PREFERRED not in families:
        raise CheckpointError(
            f"{directory}: has files of several families ("
            f"{', '.join(files[0].name for files in families.values())}); name a file of the one "
            "to read instead of the directory"
        )
    family = _PREFERRED if _PREFERRED in families else next(iter(families))
    return _open(directory, family, families)


def open_family(path: Path) -> ListedCheckpoint:
    """Read the files of all ranks of the family that one of them belongs to.

    Raises
    ------
    CheckpointError
        If the file of a rank is missing or damaged, if files contradict each other or their own
        names, or if they name what does not belong in a checkpoint.
    """
    file = _parse(path.name)
    assert file is not None, "is_rank_file is asked first"
    return _open(path.parent, file.family, _families(path.parent))


def _parse(name: str) -> _RankFile | None:
    match = RANK_FILE.fullmatch(name)
    if match is None or not is_rank_file(name):
        return None
    family, world, rank = match.groups()
    return _RankFile(name, family.rstrip("_.-"), None if world is None else int(world), int(rank))


def _families(directory: Path) -> dict[str, list[_RankFile]]:
    families: dict[str, list[_RankFile]] = {}
    for name in sorted(path.name for path in directory.iterdir()):
        file = _parse(name)
        if file is not None:
            families.setdefault(file.family, []).append(file)
    return families


def _open(
    directory: Path, family: str, families: Mapping[str, list[_RankFile]]
) -> ListedCheckpoint:
    files = sorted(families[family], key=lambda file: file.rank)
    world = _world(directory, files)
    states = {
        file.rank: read_torch_state(file_inside(directory, file.name, directory), rank=file.rank)
        for file in files
    }
    _check_all(directory, files, max(world, _reach(states)))
    mesh, tensors = _tensors(states)
    others = _others(states)
    for other, beside in families.items():
        if other != family:
            others[f"({beside[0].name})"] = Described(
                f"{counted(len(beside), 'file')} of another family; name one to read it"
            )
    paths = tuple(state.path for state in states.values())
    return ListedCheckpoint(RANK_FILES, directory, tensors, paths, mesh, others)


def _world(directory: Path, files: list[_RankFile]) -> int:
    """Return how many ranks the names say there are, once all of them are there; 0 if none."""
    worlds = sorted({file.world for file in files if file.world is not None})
    unsaid = any(file.world is None for file in files)
    if len(worlds) > 1 or (worlds and unsaid):
        raise CheckpointError(
            f"{directory}: {files[0].name} and others like it are of saves by "
            f"{' and '.join(map(str, worlds))} ranks{' and of another' if unsaid else ''}; move "
            "all but one save away"
        )
    for one, other in pairwise(files):
        if one.rank == other.rank:
            raise CheckpointError(
                f"{directory}: {one.name} and {other.name} are both of rank {one.rank}; move one "
                "of them away"
            )
    if worlds:
        _check_all(directory, files, worlds[0])
    return worlds[0] if worlds else 0


def _check_all(directory: Path, files: list[_RankFile], world: int) -> None:
    ranks = {file.rank for file in files}
    past = [file.name for file in files if file.rank >= world]
    if past:
        raise CheckpointError(
            f"{directory}: {past[0]} is of a rank that {world} ranks do not have; it belongs "
            "elsewhere, move it away"
        )
    missing: list[int] = []
    for rank in range(world):
        if len(missing) >= _SHOWN:
            break
        if rank not in ranks:
            missing.append(rank)
    if missing:
        more = ", …" if world - len(ranks) > len(missing) else ""
        raise CheckpointError(
            f"{directory}: the files of {len(ranks)} ranks are there, but {world} ranks saved; "
            f"missing: rank {', '.join(map(str, missing))}{more}; restore them"
        )


def _reach(states: Mapping[int, TorchState]) -> int:
    """Return how many ranks there are by the largest one that any file knows of."""
    known = set(states)
    for state in states.values():
        for found in state.tensors.values():
            if isinstance(found.tensor, TorchDTensor):
                known.update(found.tensor.mesh.ids)
    return max(known) + 1


def _tensors(
    states: Mapping[int, TorchState],
) -> tuple[DeviceMesh | None, dict[str, StoredTensor]]:
    """Return the mesh of all ranks, if tensors are on one, and every tensor."""
    first_rank, first = next(iter(states.items()))
    for state in states.values():
        for a, b in ((first, state), (state, first)):
            lacking = a.tensors.keys() - b.tensors.keys()
            if lacking:
                raise CheckpointError(
                    f"{b.path}: lacks tensor {min(lacking)!r}, which {a.path} holds; the files are "
                    "not of one save"
                )
    layouts = _Layouts()
    tensors: dict[str, StoredTensor] = {}
    mesh_of: dict[str, DeviceMesh | None] = {}
    slices: dict[str, DeviceMesh | None] = {}
    for name in sorted(first.tensors):
        found = first.tensors[name]
        kind, first_box, mesh_of[name] = _box(name, found, first_rank, first.path, layouts)
        slices[name] = mesh_of[name]
        boxes = [] if first_box is None else [first_box]
        for rank, state in islice(states.items(), 1, None):
            other, box, mesh = _box(name, state.tensors[name], rank, state.path, layouts)
            if other is not kind and other != kind:
                raise CheckpointError(
                    f"tensor {name!r} is {kind} in {first.path}, but {other} in {state.path}; the "
                    "files are not of one save"
                )
            if mesh is not mesh_of[name] and mesh != mesh_of[name]:
                mesh_of[name] = None
            if box is not None:
                boxes.append(box)
        tensors[name] = StoredTensor(
            name, kind.shape, kind.dtype, kind.spec, kind.pending, tuple(boxes)
        )
    mesh = next((m for m in mesh_of.values() if m is not None and m.size == len(states)), None)
    # A spec counts axes, so that it says nothing beside another mesh, such as a slice of this one.
    for name, tensor in tensors.items():
        if mesh_of[name] != mesh:
            spec = None if mesh is None else _spec_on(mesh, tensor, slices[name])
            tensors[name] = replace(tensor, spec=spec)
    return mesh, tensors


def _spec_on(
    mesh: DeviceMesh, tensor: StoredTensor, part: DeviceMesh | None
) -> ShardingSpec | None:
    """Return how a tensor is cut over the mesh of all ranks, though it was saved on a part of it.

    A plain tensor is whole on all ranks; what lies on a slice, as on the axis ``dp`` of a mesh of
    ``dp`` and ``tp``, is cut over the axes of the same names. That counts if it gives every rank
    just the box that it has stored.
    """
    cuts: dict[int, list[int]] = {}
    if tensor.pending or (part is not None and None in (part.axis_names, mesh.axis_names)):
        return None
    if part is not None and tensor.spec is not None:
        labels = {
            dim: [part.axis_label(part.axis(axis)) for axis in axes]
            for dim, axes in tensor.spec.dim_partition_dict.items()
        }
        if not {label for axes in labels.values() for label in axes} <= set(mesh.axis_names or ()):
            return None
        cuts = {dim: [mesh.axis(label) for label in axes] for dim, axes in labels.items()}
    spec = ShardingSpec(len(tensor.shape), cuts)
    whole = tuple((0, size) for size in tensor.shape)
    boxes: Mapping[int, Box] = dict.fromkeys(mesh.ids, whole)
    if cuts:
        boxes = Layout(mesh, spec, tensor.shape, tensor.dtype).boxes()
    held = {rank: box for rank, box in boxes.items() if box_size(box)}
    return spec if held == {stored.rank: stored.box for stored in tensor.boxes} else None


def _box(
    name: str,
    found: StateTensor,
    rank: int,
    path: Path,
    layouts: "_Layouts",
) -> tuple[_Kind, StoredBox | None, DeviceMesh | None]:
    """Return what a rank holds of a tensor."""
    tensor, place = found.tensor, found.place
    if isinstance(tensor, TorchTensor):
        whole = tuple((0, size) for size in tensor.shape)
        stored = StoredBox(whole, (), rank, path, place.offset, place.digest, place.strides)
        kind = _Kind(tensor.shape, tensor.dtype, None, (), ())
        return kind, None if 0 in tensor.shape else stored, None
    mesh = tensor.mesh
    if rank not in mesh or tensor.rank not in (None, rank):
        wrote = f"rank {tensor.rank}" if tensor.rank is not None else f"ranks {list(mesh.ids)}"
        raise CheckpointError(
            f"{path}: tensor {name!r} was saved by {wrote}, not by rank {rank} as the name of the "
            "file says; the file belongs elsewhere, restore its name"
        )
    try:
        kind, layout = layouts.of(tensor)
    except ShardSpecError as error:
        raise CheckpointError(f"{path}: tensor {name!r}: {error}") from None
    (box, addend), shape = layouts.part(layout, rank)
    if shape != tensor.local.shape:
        raise CheckpointError(
            f"{path}: rank {rank} holds a part of shape {list(tensor.local.shape)} of tensor "
            f"{name!r}, but of shape {list(tensor.shape)} under {layout.spec} on "
            f"{list(mesh.shape)} devices it has {list(shape)}; the file contradicts itself"
        )
    stored = StoredBox(box, addend, rank, path, place.offset, place.digest, place.strides)
    return kind, None if 0 in shape else stored, layout.mesh


class _Layouts:
    """Layouts of DTensors and what ranks hold under them, made once for those that are alike."""

    def __init__(self) -> None:
        self._known: dict[_Placed, tuple[_Kind, Layout]] = {}
        self.part = lru_cache(_MOST_KEPT)(_part)
        """What a rank holds under a layout, and its shape."""

    def of(self, tensor: TorchDTensor) -> tuple[_Kind, Layout]:
        """Return what ranks agree on about a tensor, and how it is cut.

        Raises
        ------
        ShardSpecError
            If there is no such layout.
        """
        mesh, shape, dtype = tensor.mesh, tensor.shape, tensor.local.dtype
        key = mesh, tensor.placements, tensor.shard_order, shape, dtype
        found = self._known.get(key)
        if found is None:
            layout = Layout(mesh, dtensor_spec(tensor), shape, dtype)
            kind = _Kind(shape, dtype, layout.spec, mesh.shape, pending_of(layout))
            found = self._known[key] = kind, layout
        return found


def _part(layout: Layout, rank: int) -> tuple[Part, tuple[int, ...]]:
    part = part_of(layout, rank)
    return part, box_shape(part[0])


def _others(states: Mapping[int, TorchState]) -> dict[str, object]:
    """Return what is no tensor: a value that all ranks share, or else one per rank."""
    found: dict[str, dict[str, object]] = {}
    for rank, state in states.items():
        for name, value in state.others.items():
            found.setdefault(name, {})[f"rank {rank}"] = plain_value(value)
    others: dict[str, object] = {}
    for name, by_rank in found.items():
        values = list(by_rank.values())
        alike = len(values) == len(states) and all(value == values[0] for value in values)
        others[name] = values[0] if alike else by_rank
    return others
