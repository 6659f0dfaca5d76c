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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import OpaqueValue
from shardspec.checkpoint.formats.names import RANK_FILE, is_rank_file
from shardspec.checkpoint.formats.rank_tensors import (
    RankFilesCheckpoint,
    RankGroup,
    RankState,
    grouped,
    tensors_of,
)
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.torch_files.torch_dtensors import (
    AlikeFiles,
    TorchDTensor,
    local_of,
    read_dtensors,
)
from shardspec.checkpoint.torch_files.torch_state import (
    ARGUMENT_NAMES,
    TorchContents,
    contents_of,
    plain_value,
)
from shardspec.checkpoint.torch_files.torch_values import check_record
from shardspec.checkpoint.torch_files.zip_files import TorchZip, read_torch_zip
from shardspec.errors import CheckpointError
from shardspec.text import counted

__all__ = ["open_family", "open_rank_files", "read_states"]

_PREFERRED: Final = "model"
_SHOWN: Final = 8
_MOST_KEPT_OF_ONE: Final = 4 << 20
"""Bytes kept of a file in a store, as there are several at once."""
_AHEAD: Final = 3
"""Files of this machine that are opened while one is made sense of."""


class _RankFile(NamedTuple):
    """What the name of a file says."""

    name: str
    family: str
    world: int | None
    rank: int


def open_rank_files(directory: Path) -> RankFilesCheckpoint:
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


def open_family(path: Path) -> RankFilesCheckpoint:
    """Read the files of all ranks of the family that one of them belongs to."""
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
) -> RankFilesCheckpoint:
    files = sorted(families[family], key=lambda file: file.rank)
    world = _world(directory, files)
    paths = ((file_inside(directory, file.name, directory), file.rank) for file in files)
    states = read_states(paths)
    groups = grouped(states)
    _check_all(directory, files, max(world, _reach(groups)))
    mesh, tensors = tensors_of(states, groups)
    others = _others(states)
    for other, beside in families.items():
        if other != family:
            others[f"({beside[0].name})"] = OpaqueValue(
                f"{counted(len(beside), 'file')} of another family; name one to read it"
            )
    return RankFilesCheckpoint(directory, states, tensors, mesh, others)


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


# --- what the files hold


class _Looked(NamedTuple):
    """A file, open, and its directory."""

    file: SourceFile
    rank: int
    found: TorchZip
    data: bytes
    """Its pickle."""


def read_states(files: Iterable[tuple[Path, int]]) -> list[RankState]:
    """Return what describes the state in files of `torch.save`, each with its rank; not their data.

    Files that say the same of tensors share what is kept of that. What is read next is read while
    what has been read is made sense of.
    """
    files = list(files)
    ahead = prefetch_depth(files[0][0], here=_AHEAD) if files else 0
    alike = AlikeFiles()
    known: dict[tuple[object, ...], list[TorchContents]] = {}
    zips: list[TorchZip] = []
    fitting: set[tuple[int, int]] = set()
    states: list[RankState] = []
    with prefetch_map(files, _look, ahead, lambda looked: looked.file.close()) as looks:
        for file, rank, found, data in looks:
            with file:
                value = read_dtensors(file, found, ARGUMENT_NAMES, rank, alike, data)
            contents, extras = contents_of(value, file.path)
            contents = _shared(contents, known)
            if not any(found.share(other) for other in zips):
                zips.append(found)
            if (id(contents), id(found.sizes)) not in fitting:
                for tensor in contents.tensors.values():
                    check_record(local_of(tensor), found)
                fitting.add((id(contents), id(found.sizes)))
            plain = {name: plain_value(one) for name, one in extras.items()}
            states.append(RankState(file.path, rank, contents, plain, found))
    return states


def _look(of_rank: tuple[Path, int]) -> _Looked:
    path, rank = of_rank
    with ExitStack() as stack:
        file = stack.enter_context(SourceFile(path))
        if file.remote is not None:
            file.remote.keep(_MOST_KEPT_OF_ONE)
        found = read_torch_zip(file)
        looked = _Looked(file, rank, found, found.pickle(file))
        stack.pop_all()
    return looked


def _shared(
    contents: TorchContents, known: dict[tuple[object, ...], list[TorchContents]]
) -> TorchContents:
    """Return the first of equal contents."""
    held = contents.tensors.values()
    meshes = frozenset(id(x.mesh) for x in held if isinstance(x, TorchDTensor))
    # What differs in these is not compared one by one.
    alike = known.setdefault((meshes, len(held), sum(local_of(x).storage.size for x in held)), [])
    for other in alike:
        if contents == other:
            return other
    alike.append(contents)
    return contents


def _reach(groups: Iterable[RankGroup]) -> int:
    """Return how many ranks there are by the largest one that any file knows of."""
    known = [0]
    for contents, states in groups:
        known += [state.rank for state in states]
        held = contents.tensors.values()
        meshes = {id(x.mesh): x.mesh for x in held if isinstance(x, TorchDTensor)}
        known += [max(mesh.ids) for mesh in meshes.values()]
    return max(known) + 1


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
