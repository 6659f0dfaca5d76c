"""The tensors of a checkpoint with one file per rank, put together from what the ranks hold.

All ranks have to agree on how a tensor is cut, and every one holds just the part that this gives
it. Both are looked at once for tensors that are cut alike, and for ranks whose files say the same.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import (
    Catalog,
    FileBox,
    LazyTensorCache,
    Outline,
    ReplicaKey,
    StoredBox,
    StoredReduction,
    StoredTensor,
    replica_keys,
    stored_reductions,
)
from shardspec.checkpoint.formats.names import RANK_FILES
from shardspec.checkpoint.source_files import HeaderFiles, prefetch_depth, prefetch_map
from shardspec.checkpoint.torch_files.torch_dtensors import (
    ShardOrder,
    TorchDTensor,
    dtensor_spec,
    local_of,
)
from shardspec.checkpoint.torch_files.torch_state import TorchContents
from shardspec.checkpoint.torch_files.torch_values import TensorPlace, TorchTensor, row_major
from shardspec.checkpoint.torch_files.zip_files import TorchZip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.layout.layout import Layout, LayoutCell
from shardspec.layout.placements import Placement
from shardspec.layout.spec import DimSpec, ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

__all__ = ["RankFilesCheckpoint", "RankGroup", "RankState", "RankTensor", "grouped", "tensors_of"]


class RankState(NamedTuple):
    """What the file of one rank holds."""

    path: Path
    rank: int
    """As the name of the file says."""
    contents: TorchContents
    """One object for all files that say the same of tensors."""
    extras: Mapping[str, object]
    """What is no tensor, as plain values."""
    found: TorchZip
    """Where in the file it lies."""


_Placed: TypeAlias = tuple[
    DeviceMesh, tuple[Placement, ...], ShardOrder | None, tuple[int, ...], str
]
"""What the layout of a DTensor follows from."""


class Kind(NamedTuple):
    """What all ranks have to agree on about a tensor."""

    shape: tuple[int, ...]
    dtype: str
    spec: ShardingSpec | None
    """None if it is a plain tensor."""
    mesh_shape: tuple[int, ...]
    pending: tuple[StoredReduction, ...]

    def __str__(self) -> str:
        how = "plain" if self.spec is None else f"{self.spec} on {list(self.mesh_shape)} devices"
        return f"{self.dtype} of shape {list(self.shape)}, {how}"


class Cut:
    """How a tensor is cut, and what ranks hold of it; one for all that are cut alike."""

    __slots__ = ("_held", "kind", "layout", "mesh")

    def __init__(self, kind: Kind, layout: Layout | None) -> None:
        self.kind = kind
        self.layout = layout
        """None if it is a plain tensor, as is the mesh."""
        self.mesh = None if layout is None else layout.mesh
        self._held: dict[int, tuple[ReplicaKey, ...]] = {}

    def held(self, rank: int) -> tuple[ReplicaKey, ...]:
        """Return what a rank holds: a box, or with parts one a part; none where that is nothing."""
        found = self._held.get(rank)
        if found is None:
            shape = self.kind.shape
            found = () if 0 in shape else ((tuple((0, size) for size in shape), ()),)
            if self.layout is not None:
                found = replica_keys(self.layout, rank)
            self._held[rank] = found
        return found

    def shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what a rank holds."""
        return self.kind.shape if self.layout is None else self.layout.local_shape(rank)

    def place(self, rank: int, box: Box, local: TensorPlace) -> TensorPlace:
        """Return where one of the boxes of a rank lies, of which the others are beside it."""
        if self.layout is None or self.layout.spec.is_plain:
            return local
        index = LayoutCell(self.layout, box).index(rank)
        strides = local.strides
        if strides is None:
            item = item_bytes(self.kind.dtype)
            shape = self.shape(rank)
            strides = tuple(item * prod(shape[dim + 1 :]) for dim in range(len(shape)))
        before = sum(side.start * step for side, step in zip(index, strides, strict=True))
        return local._replace(offset=local.offset + before, strides=strides)


class RankGroup(NamedTuple):
    """Ranks that hold the same."""

    contents: TorchContents
    states: list[RankState]


def grouped(states: Sequence[RankState]) -> list[RankGroup]:
    """Return ranks by what they hold, in the order of the first of each."""
    groups: dict[int, RankGroup] = {}
    for state in states:
        groups.setdefault(id(state.contents), RankGroup(state.contents, [])).states.append(state)
    return list(groups.values())


class Cuts:
    """How tensors are cut, made and compared with what ranks hold once for those that are alike."""

    def __init__(self) -> None:
        self._plain: dict[tuple[tuple[int, ...], str], Cut] = {}
        self._placed: dict[_Placed, Cut] = {}
        self._right: set[tuple[Cut, tuple[int, ...], int]] = set()
        """Cuts that give all ranks of a group a part of a shape."""

    def of(self, name: str, group: RankGroup) -> Cut:
        """Return how a tensor is cut, as ranks that hold the same say."""
        tensor, first = group.contents.tensors[name], group.states[0]
        if isinstance(tensor, TorchTensor):
            plain = tensor.shape, tensor.dtype
            if plain not in self._plain:
                self._plain[plain] = Cut(Kind(*plain, None, (), ()), None)
            return self._plain[plain]
        if tensor.rank not in (None, first.rank):
            raise _elsewhere(first, name, f"rank {tensor.rank}")
        mesh, shape, dtype = tensor.mesh, tensor.shape, tensor.local.dtype
        key = mesh, tensor.placements, tensor.shard_order, shape, dtype
        cut = self._placed.get(key)
        if cut is None:
            try:
                layout = Layout(mesh, dtensor_spec(tensor), shape, dtype)
                kind = Kind(shape, dtype, layout.spec, mesh.shape, stored_reductions(layout))
            except ShardSpecError as error:
                raise CheckpointError(f"{first.path}: tensor {name!r}: {error}") from None
            cut = self._placed[key] = Cut(kind, layout)
        of = cut, tensor.local.shape, id(group.contents)
        if of not in self._right:
            for state in group.states:
                _check_part(state, name, tensor, cut)
            self._right.add(of)
        return cut


def _check_part(state: RankState, name: str, tensor: TorchDTensor, cut: Cut) -> None:
    """Make sure that a rank could have saved what its file holds of a tensor."""
    if state.rank not in tensor.mesh:
        raise _elsewhere(state, name, f"ranks {shown(list(tensor.mesh.ids))}")
    shape = cut.shape(state.rank)
    if shape != tensor.local.shape:
        raise CheckpointError(
            f"{state.path}: rank {state.rank} holds a part of shape {list(tensor.local.shape)} of "
            f"tensor {name!r}, but of shape {list(tensor.shape)} under {cut.kind.spec} on "
            f"{list(cut.kind.mesh_shape)} devices it has {list(shape)}; the file contradicts itself"
        )


def _elsewhere(state: RankState, name: str, wrote: str) -> CheckpointError:
    return CheckpointError(
        f"{state.path}: tensor {name!r} was saved by {wrote}, not by rank {state.rank} as the name "
        "of the file says; the file belongs elsewhere, restore its name"
    )


class RankTensor(NamedTuple):
    """A tensor of all ranks."""

    kind: Kind
    spec: ShardingSpec | None
    """How it is cut over the mesh of all ranks."""
    cuts: tuple[Cut, ...]
    """One for each group of ranks that hold the same, in their order."""


class RankFilesCheckpoint(Catalog):
    """A `Catalog` over the files of all ranks; made by `open_rank_files`."""

    def __init__(
        self,
        directory: Path,
        states: Sequence[RankState],
        tensors: Mapping[str, RankTensor],
        mesh: DeviceMesh | None,
        others: Mapping[str, object],
    ) -> None:
        # Names inside nested dicts and lists are joined by dots.
        super().__init__(
            RANK_FILES, directory, tensors, (state.path for state in states), mesh, others
        )
        self._directory = directory
        self._states = states
        self._described = tensors
        self._groups = grouped(states)
        place = {id(group.contents): at for at, group in enumerate(self._groups)}
        self._places = [place[id(state.contents)] for state in states]
        """For every rank, which of the cuts of a tensor is its."""
        self._boxes: dict[Sequence[Cut], tuple[FileBox, ...]] = {}
        self._copies: dict[Sequence[Cut], list[list[int]]] = {}
        self._glances = HeaderFiles()
        self._tensors = LazyTensorCache(self._look_up)

    def outline(self, name: str) -> Outline[FileBox]:
        """Return a tensor by what the pickles say."""
        kind, spec, cuts = self._described[name]
        boxes = self._boxes.get(cuts)
        if boxes is None:
            boxes = self._boxes[cuts] = tuple(
                FileBox(box, addend, self._states[at].rank, self._states[at].path)
                for at, (box, addend) in self._held(cuts)
            )
        return Outline(name, kind.shape, kind.dtype, spec, kind.pending, boxes)

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor; what torch puts around its bytes in every file is read and checked."""
        return self._tensors(name)

    def _look_up(self, name: str) -> StoredTensor:
        def look(state: RankState) -> TensorPlace:
            with self._glances.file(state.path) as file:
                return state.contents.place(name, file, state.found)

        kind, spec, cuts = self._described[name]
        # Of what holds nothing, too, it is looked at what is around it.
        ahead = prefetch_depth(self._directory)
        boxes = []
        with prefetch_map(self._states, look, ahead) as places:
            for state, cut, place in zip(self._states, self._places, places, strict=True):
                for box, addend in cuts[cut].held(state.rank):
                    at = cuts[cut].place(state.rank, box, place)
                    where = state.rank, state.path, at.offset
                    boxes.append(StoredBox(box, addend, *where, at.digest, at.strides))
        return StoredTensor(name, kind.shape, kind.dtype, spec, kind.pending, tuple(boxes))

    def origin(self, name: str) -> Hashable:
        """Return where in storages the ranks have it."""
        tensors = [local_of(group.contents.tensors[name]) for group in self._groups]
        return tuple(
            None if 0 in tensor.shape else (tensor.storage.key, tensor.start) for tensor in tensors
        )

    def copies_agree(self, name: str) -> bool:
        """Say whether all that hold the same part note the same CRC-32 for it."""
        places: dict[tuple[int, int], int] = {}
        noted: list[int] = []
        for state in self._states:
            alike = id(state.contents), id(state.found.places)
            if alike not in places:
                local = local_of(state.contents.tensors[name])
                if not _fills(local):
                    return False
                places[alike] = state.found.place(local.storage.key)
            noted.append(state.found.crcs[places[alike]])
        # Where torch was told not to take it there is a 0.
        return all(
            noted[first] != 0 and all(noted[other] == noted[first] for other in others)
            for first, *others in self._copies_of(self._described[name].cuts)
        )

    def _copies_of(self, cuts: tuple[Cut, ...]) -> list[list[int]]:
        """Return ranks, by their places, that hold the same part, for each part that several do."""
        if cuts not in self._copies:
            by_part: dict[ReplicaKey, list[int]] = {}
            for at, part in self._held(cuts):
                by_part.setdefault(part, []).append(at)
            self._copies[cuts] = [holders for holders in by_part.values() if len(holders) > 1]
        return self._copies[cuts]

    def _held(self, cuts: Sequence[Cut]) -> Iterator[tuple[int, ReplicaKey]]:
        """Return what ranks, by their places, hold of a tensor; not those that hold nothing."""
        for at, (state, place) in enumerate(zip(self._states, self._places, strict=True)):
            for part in cuts[place].held(state.rank):
                yield at, part


def _fills(tensor: TorchTensor) -> bool:
    """Return whether a tensor is all that lies in its storage, in the order in which it does."""
    if 0 in tensor.shape:
        return True
    storage = tensor.storage
    num_bytes = prod(tensor.shape) * item_bytes(tensor.dtype)
    return num_bytes == storage.size * item_bytes(storage.dtype) and row_major(
        tensor.shape, tensor.strides
    )


def tensors_of(
    states: Sequence[RankState], groups: Sequence[RankGroup]
) -> tuple[DeviceMesh | None, dict[str, RankTensor]]:
    """Return the mesh of all ranks, if tensors are on one, and every tensor, sorted."""
    first = groups[0]
    for group in groups:
        for a, b in ((first, group), (group, first)):
            lacking = a.contents.tensors.keys() - b.contents.tensors.keys()
            if lacking:
                raise CheckpointError(
                    f"{b.states[0].path}: lacks tensor {min(lacking)!r}, which {a.states[0].path} "
                    "holds; the files are not of one save"
                )
    cuts = Cuts()
    of_all: dict[str, tuple[Cut, ...]] = {}
    for name in sorted(first.contents.tensors):
        of_all[name] = found = tuple(cuts.of(name, group) for group in groups)
        kind = found[0].kind
        for cut, group in zip(found, groups, strict=True):
            if cut.kind is not kind and cut.kind != kind:
                raise CheckpointError(
                    f"tensor {name!r} is {kind} in {first.states[0].path}, but {cut.kind} in "
                    f"{group.states[0].path}; the files are not of one save"
                )
    mesh_of = {found: _common_mesh(found) for found in of_all.values()}
    mesh = next((m for m in mesh_of.values() if m is not None and m.size == len(states)), None)
    # A spec counts axes, so that it says nothing beside another mesh, such as a slice.
    specs = {
        found: found[0].kind.spec if on == mesh else _spec_on(mesh, found, groups)
        for found, on in mesh_of.items()
    }
    return mesh, {
        name: RankTensor(found[0].kind, specs[found], found) for name, found in of_all.items()
    }


def _common_mesh(found: Sequence[Cut]) -> DeviceMesh | None:
    """Return the mesh that a tensor is on, as all ranks say; None if they say different ones."""
    mesh = found[0].mesh
    return mesh if all(cut.mesh == mesh for cut in found) else None


def _spec_on(
    mesh: DeviceMesh | None, found: Sequence[Cut], groups: Sequence[RankGroup]
) -> ShardingSpec | None:
    """Return how a tensor is cut over the mesh of all ranks, though it was saved on a part of it.

    A plain tensor is whole on all ranks; what lies on a slice, as on the axis ``dp`` of a mesh of
    ``dp`` and ``tp``, is cut over the axes of the same names. That counts if it gives every rank
    just the box that it has stored.
    """
    cuts: dict[int, DimSpec] = {}
    kind, part = found[0].kind, found[0].mesh
    if mesh is None or kind.pending or (part and None in (part.axis_names, mesh.axis_names)):
        return None
    if part is not None and kind.spec is not None:
        names = set(mesh.axis_names or ())
        for dim, cut in enumerate(kind.spec.dim_specs):
            labels = [part.axis_label(part.axis(axis)) for axis in cut.axes]
            if not names.issuperset(labels):
                return None
            if labels:
                cuts[dim] = DimSpec(tuple(map(mesh.axis, labels)), cut.parts, cut.block)
    spec = ShardingSpec(len(kind.shape), cuts)
    layout = Layout(mesh, spec, kind.shape, kind.dtype)
    whole = replica_keys(layout, mesh.ids[0])
    # Of a tensor that is whole on all ranks they are not made for each.
    wanted = {r: replica_keys(layout, r) if cuts else whole for r in mesh.ids}
    held = {
        state.rank: cut.held(state.rank)
        for cut, group in zip(found, groups, strict=True)
        for state in group.states
    }
    ranks = held.keys() | wanted.keys()
    return spec if all(held.get(rank, ()) == wanted.get(rank, ()) for rank in ranks) else None
