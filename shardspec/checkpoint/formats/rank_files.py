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

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import (
    Catalog,
    FileBox,
    LazyTensorCache,
    OpaqueValue,
    Outline,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    replica_keys,
    stored_reductions,
)
from shardspec.checkpoint.formats.names import RANK_FILE, RANK_FILES, is_rank_file
from shardspec.checkpoint.source_files import HeaderFiles, SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.torch_files.state import plain_value, read_contents
from shardspec.checkpoint.torch_files.unpickler import AlikeScreen
from shardspec.checkpoint.torch_files.values import (
    TensorPlace,
    TorchTensor,
    check_record,
    row_major,
    tensor_place,
)
from shardspec.checkpoint.torch_files.zip_reader import TorchZip, read_torch_zip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.layout.layout import Layout, LayoutCell
from shardspec.layout.placements import spec_of_placements
from shardspec.layout.spec import DimSpec, ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.text import counted, shown

_PREFERRED: Final = "model"
_SHOWN: Final = 8
_AHEAD: Final = 3
"""Files of this machine that are read while one is made sense of."""


# --- the names of files


class _RankFile(NamedTuple):
    """What the name of a file says."""

    name: str
    world: int | None
    rank: int


def open_rank_files(directory: Path) -> "RankFilesCheckpoint":
    """Read the files of all ranks of the model in a directory; not their data."""
    families = _families(directory)
    if len(families) > 1 and _PREFERRED not in families:
        raise CheckpointError(
            f"{directory}: has files of several families ("
            f"{', '.join(files[0].name for files in families.values())}); name a file of the one "
            "to read instead of the directory"
        )
    return _open(directory, families, _PREFERRED if len(families) > 1 else next(iter(families)))


def open_family(path: Path) -> "RankFilesCheckpoint":
    """Read the files of all ranks of the family that one of them belongs to."""
    families = _families(path.parent)
    family = next(f for f, files in families.items() if path.name in (at.name for at in files))
    return _open(path.parent, families, family)


def _families(directory: Path) -> dict[str, list[_RankFile]]:
    families: dict[str, list[_RankFile]] = {}
    for name in sorted(path.name for path in directory.iterdir()):
        match = RANK_FILE.fullmatch(name)
        if match is not None and is_rank_file(name):
            file = _RankFile(name, None if match[2] is None else int(match[2]), int(match[3]))
            families.setdefault(match[1].rstrip("_.-"), []).append(file)
    return families


def _open(
    directory: Path, families: Mapping[str, list[_RankFile]], family: str
) -> "RankFilesCheckpoint":
    files = sorted(families[family], key=lambda file: file.rank)
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
    paths = [file_inside(directory, file.name, directory) for file in files]
    states = read_states(zip(paths, (file.rank for file in files), strict=True))
    held = {id(state.tensors): state.tensors for state in states}
    placed = [tensor.placed for tensors in held.values() for tensor in tensors.values()]
    meshes = {id(one.mesh): one.mesh for one in placed if one is not None}
    last = max(files[-1].rank, *(max(mesh.ids) for mesh in meshes.values()), 0)
    _check_all(directory, files, max(last + 1, *worlds, 0))
    others = _others(states)
    for kind, beside in families.items():
        if kind != family:
            others[f"({beside[0].name})"] = OpaqueValue(
                f"{counted(len(beside), 'file')} of another family; name one to read it"
            )
    return RankFilesCheckpoint(directory, states, others)


def _check_all(directory: Path, files: list[_RankFile], world: int) -> None:
    """Check that the files are those of so many ranks."""
    ranks = {file.rank for file in files}
    past = [file.name for file in files if file.rank >= world]
    if past:
        raise CheckpointError(
            f"{directory}: {past[0]} is of a rank that {world} ranks do not have; it belongs "
            "elsewhere, move it away"
        )
    missing = list(islice((rank for rank in range(world) if rank not in ranks), _SHOWN))
    if missing:
        more = ", …" if world - len(ranks) > len(missing) else ""
        raise CheckpointError(
            f"{directory}: the files of {len(ranks)} ranks are there, but {world} ranks saved; "
            f"missing: rank {', '.join(map(str, missing))}{more}; restore them"
        )


# --- what the files hold


class RankState(NamedTuple):
    """What the file of one rank holds."""

    path: Path
    rank: int
    """As the name of the file says."""
    tensors: Mapping[str, TorchTensor]
    """One object for all files that say the same of tensors."""
    extras: Mapping[str, object]
    """What is no tensor, as plain values."""
    found: TorchZip
    """Where in the file it lies."""


def read_states(files: Iterable[tuple[Path, int]]) -> list[RankState]:
    """Return what describes the state in files of `torch.save`, each with its rank."""
    files = list(files)
    ahead = prefetch_depth(files[0][0], here=_AHEAD) if files else 0
    screened = AlikeScreen()
    distinct: list[Mapping[str, TorchTensor]] = []
    states: list[RankState] = []
    with prefetch_map([path for path, _ in files], _look, ahead) as looks:
        for (path, rank), (found, data) in zip(files, looks, strict=True):
            tensors, extras = read_contents(found, data, None, rank, screened)
            for tensor in tensors.values():
                check_record(tensor, found)
            shared = next((other for other in distinct if other == tensors), tensors)
            if shared is tensors:
                distinct.append(tensors)
            for state in states:
                if found.share(state.found):
                    break
            plain = {name: plain_value(one) for name, one in extras.items()}
            states.append(RankState(path, rank, shared, plain, found))
    return states


def _look(path: Path) -> tuple[TorchZip, bytes]:
    """Return what is where in a file, and its pickle."""
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        return found, found.pickle(file)


def _grouped(states: Sequence[RankState]) -> list[list[RankState]]:
    """Return ranks by what they hold, in the order of the first of each."""
    groups: dict[int, list[RankState]] = {}
    for state in states:
        groups.setdefault(id(state.tensors), []).append(state)
    return list(groups.values())


def _others(states: Sequence[RankState]) -> dict[str, object]:
    """Return what is no tensor: a value that all ranks share, or else one per rank."""
    found: dict[str, dict[int, object]] = {}
    for state in states:
        for name, value in state.extras.items():
            found.setdefault(name, {})[state.rank] = value
    others: dict[str, object] = {}
    for name, by_rank in found.items():
        first, *rest = by_rank.values()
        # What is no number is not equal to itself.
        alike = all(value == first or repr(value) == repr(first) for value in rest)
        if len(by_rank) == len(states) and alike:
            others[name] = first
        else:
            others[name] = {f"rank {rank}": by_rank[rank] for rank in sorted(by_rank)}
    return others


# --- the tensors, on which all ranks have to agree, and of which each holds its part


def _layouts_of(
    groups: Sequence[Sequence[RankState]], everywhere: DeviceMesh
) -> dict[str, tuple[Layout, ...]]:
    """Return how every tensor is cut, as each group says; a plain one is whole `everywhere`."""
    first = groups[0][0]
    for group in groups:
        for has, lacks in ((first, group[0]), (group[0], first)):
            lacking = has.tensors.keys() - lacks.tensors.keys()
            if lacking:
                raise CheckpointError(
                    f"{lacks.path}: lacks tensor {min(lacking)!r}, which {has.path} holds; the "
                    "files are not of one save"
                )
    known: dict[Hashable, Layout] = {}
    right: set[Hashable] = set()

    def layout_of(name: str, group: Sequence[RankState]) -> Layout:
        tensor, placed = group[0].tensors[name], group[0].tensors[name].placed
        key = placed, tensor.global_shape, tensor.dtype
        if key not in known:
            mesh, spec = everywhere, ShardingSpec(len(tensor.shape), {})
            try:
                if placed is not None:
                    mesh, order = placed.mesh, dict(placed.shard_order or ()) or None
                    spec = spec_of_placements(placed.placements, placed.shape, mesh.shape, order)
                known[key] = Layout(mesh, spec, tensor.global_shape, tensor.dtype)
            except ShardSpecError as error:
                raise CheckpointError(f"{group[0].path}: tensor {name!r}: {error}") from None
        layout = known[key]
        # What all ranks of a group hold of tensors that are cut alike is looked at once.
        part = key, tensor.shape, id(group[0].tensors)
        if placed is not None and part not in right:
            for state in group:
                _check_part(state, name, layout)
            right.add(part)
        return layout

    def shown_of(layout: Layout) -> str:
        how = "plain" if layout.mesh is everywhere else _on(layout)
        return f"{layout.dtype} of shape {list(layout.global_shape)}, {how}"

    layouts = {}
    for name in sorted(first.tensors):
        layouts[name] = found = tuple(layout_of(name, group) for group in groups)
        for layout, group in zip(found, groups, strict=True):
            if layout is not found[0] and shown_of(layout) != shown_of(found[0]):
                raise CheckpointError(
                    f"tensor {name!r} is {shown_of(found[0])} in {first.path}, but "
                    f"{shown_of(layout)} in {group[0].path}; the files are not of one save"
                )
    return layouts


def _check_part(state: RankState, name: str, layout: Layout) -> None:
    """Make sure that a rank could have saved what its file holds of a DTensor."""
    local, placed = state.tensors[name].shape, state.tensors[name].placed
    saver = None if placed is None else placed.saver
    if saver is not None or state.rank not in layout.mesh:
        wrote = f"ranks {shown(list(layout.mesh.ids))}" if saver is None else f"rank {saver}"
        raise CheckpointError(
            f"{state.path}: tensor {name!r} was saved by {wrote}, not by rank {state.rank} as the "
            "name of the file says; the file belongs elsewhere, restore its name"
        )
    due = layout.local_shape(state.rank)
    if due != local:
        raise CheckpointError(
            f"{state.path}: rank {state.rank} holds a part of shape {list(local)} of tensor "
            f"{name!r}, but of shape {list(layout.global_shape)} under {_on(layout)} it has "
            f"{list(due)}; the file contradicts itself"
        )


def _on(layout: Layout) -> str:
    return f"{layout.spec} on {list(layout.mesh.shape)} devices"


def _spec_on(
    mesh: DeviceMesh | None, layouts: Sequence[Layout], groups: Sequence[Sequence[RankState]]
) -> ShardingSpec | None:
    """Return how a tensor is cut over the mesh of all ranks, though it may lie on a part of it.

    What lies on a slice, as on the axis ``dp`` of a mesh of ``dp`` and ``tp``, is cut over the axes
    of the same names. That counts if it gives every rank just the box that it has stored.
    """
    spec, part = layouts[0].spec, layouts[0].mesh
    if mesh is not None and all(layout.mesh == mesh for layout in layouts):
        return spec
    if mesh is None or spec.partials:
        return None
    cuts: dict[int, DimSpec] = {}
    for dim, cut in enumerate(spec.dim_specs):
        labels = [part.axis_label(part.axis(axis)) for axis in cut.axes]
        if not {*(mesh.axis_names or ())}.issuperset(labels):
            return None
        if labels:
            cuts[dim] = DimSpec(tuple(map(mesh.axis, labels)), cut.parts, cut.block)
    over_all = Layout(
        mesh, ShardingSpec(spec.dims, cuts), layouts[0].global_shape, layouts[0].dtype
    )
    held = {
        state.rank: replica_keys(layout, state.rank)
        for layout, group in zip(layouts, groups, strict=True)
        for state in group
        if state.rank in layout.mesh
    }
    wanted = {rank: replica_keys(over_all, rank) for rank in mesh.ids}
    return over_all.spec if held == wanted else None


class RankFilesCheckpoint(Catalog):
    """A `Catalog` over the files of all ranks; made by `open_rank_files`."""

    def __init__(
        self, directory: Path, states: Sequence[RankState], others: Mapping[str, object]
    ) -> None:
        self._states = states
        self._groups = groups = _grouped(states)
        self._group_of = {
            state.rank: place for place, group in enumerate(groups) for state in group
        }
        everywhere = DeviceMesh([state.rank for state in states], (len(states),))
        self._layouts = _layouts_of(groups, everywhere)
        # Plain tensors do not say what mesh there was.
        meshes = (
            layouts[0].mesh
            for layouts in self._layouts.values()
            if all(layout.mesh == layouts[0].mesh is not everywhere for layout in layouts)
        )
        mesh = next((mesh for mesh in meshes if mesh.size == len(states)), None)
        distinct = set(self._layouts.values())
        self._specs = {layouts: _spec_on(mesh, layouts, groups) for layouts in distinct}
        self._boxes: dict[tuple[Layout, ...], tuple[FileBox, ...]] = {}
        self._glances = HeaderFiles()
        self._tensors = LazyTensorCache(self._look_up)
        # Names inside nested dicts and lists are joined by dots.
        paths = (state.path for state in states)
        super().__init__(RANK_FILES, directory, self._layouts, paths, mesh, others)

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor by what the pickles say."""
        layouts = self._layouts[name]
        if layouts not in self._boxes:
            self._boxes[layouts] = tuple(
                FileBox(box, addend, state.rank, state.path)
                for state in self._states
                for box, addend in replica_keys(layouts[self._group_of[state.rank]], state.rank)
            )
        shape, dtype = layouts[0].global_shape, layouts[0].dtype
        pending, boxes = stored_reductions(layouts[0]), self._boxes[layouts]
        return Outline(name, shape, dtype, self._specs[layouts], pending, boxes)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor; what torch puts around its bytes in every file is read and checked."""
        return self._tensors(name)

    def _look_up(self, name: str) -> StoredTensor:
        def look(state: RankState) -> TensorPlace:
            with self._glances.file(state.path) as file:
                return tensor_place(state.tensors[name], file, state.found)

        # Of what holds nothing, too, it is looked at what is around it.
        with prefetch_map(self._states, look, prefetch_depth(self.directory)) as found:
            places = dict(zip((state.rank for state in self._states), found, strict=True))
        outline = self.outline(name)
        boxes = []
        for part in outline.boxes:
            layout = self._layouts[name][self._group_of[part.rank]]
            at = _place_in(layout, part.rank, part.box, places[part.rank])
            where = part.rank, part.path, at.offset
            boxes.append(StoredBox(part.box, part.addend, *where, at.digest, at.strides))
        told = outline.shape, outline.dtype, outline.spec, outline.pending
        return StoredTensor(name, *told, tuple(boxes))

    def origin(self, name: str) -> Hashable:
        """Return where in storages the ranks have it."""
        tensors = [group[0].tensors[name] for group in self._groups]
        return tuple(
            None if 0 in tensor.shape else (tensor.storage.key, tensor.start) for tensor in tensors
        )

    def copies_agree(self, name: str) -> bool:
        """Say whether all that hold the same part note the same CRC-32 for it."""
        for group in self._groups:
            tensor = group[0].tensors[name]
            alone = row_major(tensor.shape, tensor.strides) and not tensor.is_part
            if not alone and 0 not in tensor.shape:
                # The CRC-32 is of something else than the tensor.
                return False
        of_rank = {
            state.rank: state.found.record(f"data/{state.tensors[name].storage.key}").crc32
            for state in self._states
        }
        noted: dict[ReplicaKey, list[int | None]] = {}
        for part in self.outline(name).boxes:
            noted.setdefault((part.box, part.addend), []).append(of_rank[part.rank])
        return all(
            len(values) == 1 or (None not in values and len({*values}) == 1)
            for values in noted.values()
        )


def _place_in(layout: Layout, rank: int, box: Box, local: TensorPlace) -> TensorPlace:
    """Return where one of the boxes of a rank lies, of which the others are beside it."""
    if layout.spec.is_plain:
        return local
    strides = local.strides
    if strides is None:
        shape, item = layout.local_shape(rank), item_bytes(layout.dtype)
        strides = tuple(item * prod(shape[dim + 1 :]) for dim in range(len(shape)))
    index = LayoutCell(layout, box).index(rank)
    before = sum(side.start * step for side, step in zip(index, strides, strict=True))
    return local._replace(offset=local.offset + before, strides=strides)
