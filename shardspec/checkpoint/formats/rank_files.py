"""Reads directories with one `torch.save` file per rank, as trainers and RL stacks write them.

**Names.** A name is ``FAMILY[world_size_W_]rank[_|-]N.(pt|pth|bin)``: file N of the W files of a
family. ``FAMILY`` is empty or ends in ``_``, ``-`` or ``.``. So ``model_world_size_4_rank_2.pt``
(verl) is rank 2 of 4 of the family ``model``, and ``rank-2.pt`` is rank 2 of a family without a
name. Of several families in a directory, ``model`` is read; the files of the others are listed as
not read. To read another family, name any of its files.

**Ranks.** All W files must exist. If names do not have W, the number of ranks is one more than the
largest rank in the names or in any mesh.

**Tensors.** The part of a DTensor on a rank follows from the mesh, the placements and the shard
order saved with it (FSDP2, tensor parallel, both (``_StridedShard``), HSDP, pending sums). Plain
tensors must be complete and equal on all ranks. All ranks must agree on names, shapes, dtypes and
placements. Copies on several ranks are compared. torch records in each mesh which rank saved it, so
swapped files are detected; files of plain tensors alone are equal, so swapping does not matter.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from shardspec.checkpoint import catalog
from shardspec.checkpoint.catalog import replica_keys
from shardspec.checkpoint.formats import Format, OpenOptions
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.reading import HeaderFiles, prefetch_map
from shardspec.checkpoint.torch_files import states as torch_states
from shardspec.checkpoint.torch_files.unpickler import no_collection
from shardspec.checkpoint.torch_files.values import (
    TensorPlace,
    TorchTensor,
    check_record,
    row_major,
    tensor_place,
)
from shardspec.checkpoint.torch_files.zip_reader import Directory, TorchZip, read_torch_zip
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.layout.common_mesh import on_larger_mesh
from shardspec.layout.layout import Layout
from shardspec.layout.placements import spec_of_placements
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import KeyPath
from shardspec.text import counted, shown

_RANK_NAME: Final = re.compile(
    r"(?!\.)(|.*?[_.-])(?:world_size_(\d{1,9})_)?rank[_-]?(\d{1,9})\.(?:pt|pth|bin)", re.DOTALL
)
_PREFERRED: Final = "model"
_SHOWN: Final = 8
_AHEAD: Final = 3  # files of this machine that are read while one is parsed


class _RankFile(NamedTuple):
    """Parsed name of a file: ``model_world_size_4_rank_2.pt`` has world 4 and rank 2."""

    name: str
    world: int | None
    rank: int


def _open(place: StoragePath, _: OpenOptions) -> "RankFilesCheckpoint":
    """Return the catalog of rank files: of ``model_*`` in a directory, or of a file's siblings."""
    is_directory = place.is_dir()
    directory, chosen = (place, None) if is_directory else (place.parent, place.name)
    families: dict[str, list[_RankFile]] = {}
    family = None
    for name in directory.names():
        match = _RANK_NAME.fullmatch(name)
        if match is not None:
            of = match[1].rstrip("_.-")
            family = of if name == chosen or (chosen is None and of == _PREFERRED) else family
            file = _RankFile(name, None if match[2] is None else int(match[2]), int(match[3]))
            families.setdefault(of, []).append(file)
    if family is None and len(families) > 1:
        raise CheckpointError(
            f"{directory}: has rank files of several families "
            f"({', '.join(files[0].name for files in families.values())}); instead of the "
            "directory, name one file of the family to read"
        )
    family = next(iter(families)) if family is None else family
    files = sorted(families.pop(family), key=lambda file: file.rank)
    world, *more = sorted({file.world for file in files}, key=str)
    if more:
        sizes = sorted("an unknown number of" if n is None else str(n) for n in (world, *more))
        raise CheckpointError(
            f"{directory}: {files[0].name} and others are of saves by {' and '.join(sizes)} ranks; "
            "move all but one save away"
        )
    if world is not None:
        _check_ranks(directory, files, world)
    states = read_states(
        (file_inside(directory, file.name, directory), file.rank) for file in files
    )
    distinct = {id(state.tensors): state.tensors for state in states}
    for name in (name for tensors in distinct.values() for name in tensors):
        if name.rpartition(".")[2].endswith("_flat_param"):
            raise CheckpointError(
                f"{states[0].path}: {shown(name)} is a flat parameter of FSDP1, and no file "
                "records its shapes; save with SHARDED_STATE_DICT or FULL_STATE_DICT"
            )
    placed = (tensor.placed for tensors in distinct.values() for tensor in tensors.values())
    meshes = {id(at.mesh): at.mesh for at in placed if at is not None}
    last = max(files[-1].rank, *(max(mesh.ids) for mesh in meshes.values()), 0)
    _check_ranks(directory, files, max(last + 1, world or 0))
    extras = _merged_extras(states)
    for beside in families.values():
        extras[f"({beside[0].name})"] = catalog.OpaqueValue(
            f"{counted(len(beside), 'file')} of another family; name one to read it", inside=False
        )
    return RankFilesCheckpoint(directory, states, extras)


def _check_ranks(directory: StoragePath, files: list[_RankFile], world: int) -> None:
    """Check that the files are those of ranks 0 to `world` - 1, one file each."""
    count = Counter(file.rank for file in files)
    missing = list(islice((rank for rank in range(world) if rank not in count), _SHOWN + 1))
    odd = [file.name for file in files if file.rank >= world or count[file.rank] > 1]
    problems = []
    if missing:
        are, them = ("s", "them") if len(missing) > 1 else ("", "it")
        problems.append(
            f"the file{are} of rank{are} {_abbreviated(missing)} of {world} "
            f"{'are' if are else 'is'} missing; restore {them}"
        )
    if odd:
        problems.append(
            f"{_abbreviated(odd)}: not of a rank from 0 to {world - 1}, or of one that has two "
            "files; move away what is of another save"
        )
    if problems:
        raise CheckpointError(f"{directory}: rank files do not match: {'; '.join(problems)}")


def _abbreviated(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_SHOWN])) + ", …" * (len(values) > _SHOWN)


# --- contents of the files


class RankState(NamedTuple):
    """The pickle of one rank's file: its tensors, without their data, and values."""

    path: StoragePath
    rank: int  # in the name of the file
    tensors: Mapping[str, TorchTensor]  # one object for all files with equal descriptions
    extras: Mapping[str, object]  # all other entries, as plain values
    paths: Mapping[str, KeyPath]  # nested keys by name
    archive: TorchZip


def read_states(files: Iterable[tuple[StoragePath, int]]) -> list[RankState]:
    """Return the pickles of (path, rank) pairs, in order; reads no tensor data."""
    files = list(files)
    ahead = files[0][0].files_ahead(_AHEAD) if files else 0
    distinct: list[tuple[Mapping[str, TorchTensor], Directory]] = []
    states: list[RankState] = []
    with no_collection(), prefetch_map([path for path, _ in files], _look, ahead) as looks:
        for (path, rank), (archive, data) in zip(files, looks, strict=True):
            read = torch_states.read_contents(archive, data, rank)
            tensors = read.tensors
            description = tensors, archive.directory
            same = next((known for known in distinct if known == description), None)
            if same is None:
                for tensor in tensors.values():
                    check_record(tensor, archive)
                distinct.append(same := description)
            archive.directory = same[1]
            plain = {name: torch_states.plain_value(x, archive) for name, x in read.extras.items()}
            states.append(RankState(path, rank, same[0], plain, read.paths, archive))
    return states


def _look(path: StoragePath) -> tuple[TorchZip, bytes]:
    """Return the list of records in a `torch.save` file, and the bytes of its pickle."""
    with path.open() as file:
        archive = read_torch_zip(file)
        return archive, archive.pickle(file)


def _merged_extras(states: Sequence[RankState]) -> dict[str, object]:
    """Return the values that are not tensors; where ranks differ, as ``{"0": ..., "1": ...}``."""
    extras: dict[str, object] = {}
    for name in dict.fromkeys(name for state in states for name in state.extras):
        by_rank = {state.rank: state.extras[name] for state in states if name in state.extras}
        first, *rest = by_rank.values()
        # NaN is not equal to itself.
        all_equal = all(value == first or repr(value) == repr(first) for value in rest)
        if not all_equal or len(by_rank) < len(states):
            first = {f"rank {rank}": value for rank, value in by_rank.items()}
        extras[name] = first
    return extras


# --- tensors, on which all ranks must agree

_Groups: TypeAlias = Sequence[Sequence[RankState]]
"""Groups of ranks whose descriptions of tensors are equal, and stored as one object."""


def _layouts_of(groups: _Groups, everywhere: DeviceMesh) -> dict[str, tuple[Layout, ...]]:
    """Return each tensor's layout per group; plain tensors are replicated on `everywhere`."""
    first = groups[0][0]
    torch_states.check_same_names((group[0].path, group[0].tensors) for group in groups)
    made: dict[Hashable, Layout] = {}
    checked: set[Hashable] = set()

    def layout_of(name: str, group: Sequence[RankState]) -> Layout:
        tensor, placed = group[0].tensors[name], group[0].tensors[name].placed
        key = placed, tensor.global_shape, tensor.dtype
        if key not in made:
            mesh, spec = everywhere, ShardingSpec(len(tensor.shape), {})
            try:
                if placed is not None:
                    mesh, order = placed.mesh, dict(placed.shard_order or ()) or None
                    spec = spec_of_placements(placed.placements, placed.shape, mesh.shape, order)
                made[key] = Layout(mesh, spec, tensor.global_shape, tensor.dtype)
            except ShardSpecError as error:
                why = f"{group[0].path}: the layout of tensor {name!r} cannot be read: {error}"
                raise CheckpointError(why) from None
        layout = made[key]
        # Equally sharded tensors of a group are checked once.
        part = key, tensor.shape, id(group[0].tensors)
        if placed is not None and part not in checked:
            for state in group:
                _check_part(state, name, layout)
            checked.add(part)
        return layout

    layouts = {}
    for name in sorted(first.tensors):
        layouts[name] = of_groups = tuple(layout_of(name, group) for group in groups)
        for layout, group in zip(of_groups, groups, strict=True):
            # Ranks may name different slices of one mesh.
            if layout is not of_groups[0] and str(layout) != str(of_groups[0]):
                raise CheckpointError(
                    f"tensor {name!r} is {of_groups[0]} in {first.path}, but {layout} in "
                    f"{group[0].path}; the files are of different saves"
                )
    return layouts


def _check_part(state: RankState, name: str, layout: Layout) -> None:
    """Check that a rank's shard of a DTensor has the shape that `layout` gives that rank."""
    local, placed = state.tensors[name].shape, state.tensors[name].placed
    saver = None if placed is None else placed.saver
    if saver is not None or state.rank not in layout.mesh:
        wrote = f"ranks {shown(list(layout.mesh.ids))}" if saver is None else f"rank {saver}"
        raise CheckpointError(
            f"{state.path}: tensor {name!r} was saved by {wrote}, not by rank {state.rank} as the "
            "name of the file says; restore the name of the file"
        )
    expected = layout.local_shape(state.rank)
    if expected != local:
        raise CheckpointError(
            f"{state.path}: rank {state.rank} has a part of shape {list(local)} of tensor "
            f"{name!r}, but by {layout} it should have {list(expected)}; the file is inconsistent"
        )


def _spec_on(
    mesh: DeviceMesh | None, layouts: Sequence[Layout], groups: _Groups
) -> ShardingSpec | None:
    """Return the spec on `mesh`, of all ranks, of a tensor with `layouts` on meshes of groups.

    Returns None if no spec gives every rank exactly the boxes that the rank has stored.
    """
    if mesh is None:
        return None
    first = layouts[0]
    over_all = on_larger_mesh(first, mesh)
    if over_all is None and not first.spec.axes:
        over_all = Layout(mesh, first.spec, first.global_shape, first.dtype)
    stored = {
        state.rank: replica_keys(layout, state.rank)
        for layout, group in zip(layouts, groups, strict=True)
        for state in group
    }
    if over_all is None or any(stored[rank] != replica_keys(over_all, rank) for rank in mesh.ids):
        return None
    return over_all.spec


class RankFilesCheckpoint(catalog.Catalog):
    """Catalog of rank files: a tensor has a box in the file of each rank that has a shard."""

    def __init__(
        self, directory: StoragePath, states: Sequence[RankState], extras: Mapping[str, object]
    ) -> None:
        self._states = states
        by_contents: dict[int, list[RankState]] = {}
        for state in states:
            by_contents.setdefault(id(state.tensors), []).append(state)
        self._groups = groups = list(by_contents.values())
        self._group_of = {
            state.rank: place for place, group in enumerate(groups) for state in group
        }
        everywhere = DeviceMesh([state.rank for state in states], (len(states),))
        self._layouts = _layouts_of(groups, everywhere)
        distinct = dict.fromkeys(self._layouts.values())
        # Plain tensors have no mesh.
        same = (layouts[0].mesh for layouts in distinct if len({at.mesh for at in layouts}) == 1)
        full = (mesh for mesh in same if mesh.size() == len(states) and mesh is not everywhere)
        mesh = next(full, None)
        self._specs = {layouts: _spec_on(mesh, layouts, groups) for layouts in distinct}
        self._boxes: dict[tuple[Layout, ...], tuple[catalog.FileBox, ...]] = {}
        self._header_files = HeaderFiles()
        # Names inside nested dicts and lists are joined by dots.
        paths = (state.path for state in states)
        facts = catalog.CheckpointFacts(paths=states[0].paths)
        super().__init__(FORMAT.called, directory, self._layouts, paths, mesh, extras, facts)

    def outline(self, name: str) -> catalog.Outline[catalog.FileBox]:
        """Return shape, dtype and boxes of a tensor from the pickles; reads no data."""
        layouts = self._layouts[name]
        if layouts not in self._boxes:
            self._boxes[layouts] = tuple(
                catalog.FileBox(box, addend, state.rank, state.path)
                for state in self._states
                for box, addend in replica_keys(layouts[self._group_of[state.rank]], state.rank)
            )
        shape, dtype = layouts[0].global_shape, layouts[0].dtype
        pending, boxes = catalog.stored_reductions(layouts[0]), self._boxes[layouts]
        return catalog.Outline(name, shape, dtype, self._specs[layouts], pending, boxes)

    def _look_up(self, name: str) -> catalog.StoredTensor:
        """Return a tensor with file offsets; reads and checks the headers of its zip records."""

        def look(state: RankState) -> TensorPlace:
            with self._header_files.file(state.path) as file:
                return tensor_place(state.tensors[name], file, state.archive)

        # The headers of empty parts are checked too.
        with prefetch_map(self._states, look, self.directory.files_ahead()) as in_order:
            places = dict(zip((state.rank for state in self._states), in_order, strict=True))
        outline, layouts = self.outline(name), self._layouts[name]
        boxes = (
            torch_states.stored_box_of_rank(
                layouts[self._group_of[part.rank]],
                *(part.rank, (part.box, part.addend), part.path, places[part.rank]),
            )
            for part in outline.boxes
        )
        facts = outline.shape, outline.dtype, outline.spec, outline.pending
        return catalog.StoredTensor(name, *facts, tuple(boxes))

    def origin(self, name: str) -> Hashable:
        """Return the positions of a tensor's bytes in all files; equal for tied tensors."""
        tensors = [group[0].tensors[name] for group in self._groups]
        return tuple(
            None if 0 in tensor.shape else (tensor.storage.key, tensor.start) for tensor in tensors
        )

    def copies_agree(self, name: str) -> bool:
        """Return True if the files' CRC-32s show that all copies of a part are equal."""
        for tensor in (group[0].tensors[name] for group in self._groups):
            alone = row_major(tensor.shape, tensor.strides) and not tensor.is_part
            if not alone and 0 not in tensor.shape:
                # The CRC-32 is not of this tensor alone.
                return False
        crcs = {
            state.rank: state.archive.record(f"data/{state.tensors[name].storage.key}").crc32
            for state in self._states
        }
        first: dict[catalog.ReplicaKey, int] = {}
        for part in self.outline(name).boxes:
            first_rank = first.setdefault((part.box, part.addend), part.rank)
            crc = crcs[part.rank]
            if first_rank != part.rank and (crc is None or crc != crcs[first_rank]):
                return False
        return True


def _is_of_rank(name: str) -> bool:
    return _RANK_NAME.fullmatch(name) is not None


FORMAT: Final = Format(
    name="rank-files",
    title="torch files per rank",
    recognizes=lambda names: any(map(_is_of_rank, names)),
    open=_open,
    instead="torch loads shards of the format 'dcp' on any number of ranks",
    extensions=(".pt", ".pth", ".bin"),
    reads_file=lambda start: start.is_zip and _is_of_rank(start.name),
    names_others=_is_of_rank,
    known_by="…_rank_0.pt",
)
