"""Saves checkpoints: each rank writes one file of shards; `sharding_info.json` is written last.

A save has five steps: describe the state dict, compare replicas, lock the directory, write the
files, write `sharding_info.json`. After each step all ranks continue or fail together.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, overload

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import BoxEntry, FileEntry, OutputFile, OutputTensor, assign_boxes
from shardspec.checkpoint.compare.digest import (
    add_up,
    check_digests_file,
    write_digests,
)
from shardspec.checkpoint.convert.copy import Progress
from shardspec.checkpoint.formats import native
from shardspec.checkpoint.formats.native import INFO_NAME, is_shard
from shardspec.checkpoint.formats.safetensors import encode_header, read_header
from shardspec.checkpoint.job.background import (
    BackgroundCommunicator,
    PendingSave,
    copied,
    wait_for_open,
)
from shardspec.checkpoint.state import rank_state
from shardspec.checkpoint.state.memory import require_no_sums
from shardspec.checkpoint.state.rank_state import Described, Replicas
from shardspec.checkpoint.state.state_dict import encode_value
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.checkpoint.storage.path import StoragePath, is_temporary, reason
from shardspec.comm.communicator import Communicator
from shardspec.comm.consensus import agree
from shardspec.errors import CheckpointError, OutputExistsError
from shardspec.resharding.digests import TensorDigest
from shardspec.text import Argument

Pieces: TypeAlias = Iterator[bytes | memoryview]


@overload
def save_sharded(
    state_dict: Mapping[str, Any],
    directory: PurePath | str,
    *,
    overwrite: bool = False,
    replicas: Replicas = "equal",
    communicator: Communicator | None = None,
    digests: PurePath | str | None = None,
    progress: Progress | None = None,
    asynchronous: Literal[False] = False,
) -> None: ...
@overload
def save_sharded(
    state_dict: Mapping[str, Any],
    directory: PurePath | str,
    *,
    overwrite: bool = False,
    replicas: Replicas = "equal",
    communicator: Communicator | None = None,
    digests: PurePath | str | None = None,
    progress: Progress | None = None,
    asynchronous: Literal[True],
) -> PendingSave: ...
def save_sharded(
    state_dict: Mapping[str, Any],
    directory: PurePath | str,
    *,
    overwrite: bool = False,
    replicas: Replicas = "equal",
    communicator: Communicator | None = None,
    digests: PurePath | str | None = None,
    progress: Progress | None = None,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Write a checkpoint; every rank calls it with its shards of the same tensors.

    Each rank writes one file with its boxes; one rank writes each replicated box. Last, when these
    files are on the disk, `sharding_info.json` is written: without it the save is unfinished.
    Pending reductions are saved unreduced, addend by addend.

    Parameters
    ----------
    state_dict
        Name to tensor: DTensors, those of `torch.distributed.tensor` too, and plain tensors, which
        must be equal on every device of the mesh. Dicts and lists may be nested, and may contain
        numbers, text and None, as the state dict of an optimizer does; `load_sharded` returns the
        same nesting. All DTensors are on one mesh, or on slices of it.
    directory
        The directory to write, the same for every rank; it is created if it does not exist. It may
        be the URL of an object store, where concurrent saves do not notice each other.
    overwrite
        Replace an existing save. It stays complete until the new one is; then only its shard files
        are removed.
    replicas
        With ``"equal"`` the digests of replicas, plain tensors and values are compared, and nothing
        is saved if they differ. With ``"first"`` they may differ, as statistics of batch norms do,
        and the replica of the first rank is saved.
    communicator
        Communicator of the ranks; by default that of the DTensors, or without DTensors the running
        job or this process alone.
    digests
        A file for the digests of all tensors, as `digest` computes them. They are computed while
        writing.
    progress
        Called with the bytes that this process has written so far, and in all; by the thread that
        saves.
    asynchronous
        Copy everything into memory, return a `PendingSave`, and write in the background. The save
        is unfinished until all ranks have written. The next save of the process waits for this
        one, and raises its error if it failed.

    Returns
    -------
    PendingSave or None
        With `asynchronous`, the save to wait for.

    Raises
    ------
    OutputExistsError
        On every rank, if the directory contains a finished save and `overwrite` is not set.
    CheckpointError
        On every rank, if another save is running there, any rank fails, replicas differ, or ranks
        do not agree on names, shapes, dtypes, specs and values. The files of this save are removed
        again, and an older save is kept.
    CommunicatorError
        If this is a rank of a job that has not initialized `torch.distributed`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import DTensor, DeviceMesh, load_sharded
    >>> mesh = DeviceMesh(range(4), (2, 2))
    >>> w = DTensor(torch.arange(6).view(3, 2), mesh, "[S0,R]")
    >>> path = tempfile.mkdtemp()
    >>> save_sharded({"model": {"w": w}, "step": 7}, path)
    >>> state = load_sharded(path)
    >>> state["model"]["w"]
    DTensor([S0,R] of [3, 2] int64 on 2x2; values:
    tensor([[0, 1],
            [2, 3],
            [4, 5]]))
    >>> state["step"]
    7
    """
    chosen = communicator or rank_state.communicator_of_state(state_dict)
    if not chosen.addressable:
        return PendingSave() if asynchronous else None
    place, mesh = storage_path(directory), chosen.mesh
    file = None if digests is None else storage_path(digests)
    save_to = partial(_save, place, overwrite, replicas, file, progress)
    leader = mesh.ids[0] in chosen.addressable

    def described() -> Described:
        state = rank_state.describe(state_dict, chosen)
        # Refuses tensors that no file can contain, even those without boxes.
        tensors = [(name, at.dtype, at.global_shape) for name, at in state.layouts.items()]
        encode_header([*tensors, *((name, "int8", ()) for name in state.flat.values)], {})
        for name, value in state.flat.values.items():
            encode_value(value, name)  # refuses values that the info cannot contain
        if leader and not overwrite:
            _check_free(place)
        if file is not None:
            require_no_sums(state.layouts)
            if leader:
                check_digests_file(file, None, overwrite=overwrite)
        return state

    with chosen.telling():
        if replicas not in ("equal", "first"):
            raise CheckpointError(f"replicas is {replicas!r}; choose 'equal' or 'first'")
        wait_for_open()
        state = agree(chosen, described)
        tokens = chosen.gather(dict.fromkeys(chosen.addressable, os.urandom(8).hex()))
        save = tokens[mesh.ids[0]]
        if not asynchronous:
            save_to(state, save, chosen)
            return None
        state = agree(chosen, lambda: copied(state))
        alone = set(chosen.addressable) == set(mesh.ids)
        talking = chosen if alone else BackgroundCommunicator(chosen, save)
        return PendingSave(lambda: save_to(state, save, talking), talking)


def _save(
    path: StoragePath,
    overwrite: bool,
    replicas: Replicas,
    digests: StoragePath | None,
    progress: Progress | None,
    state: Described,
    save: str,
    chosen: Communicator,
) -> None:
    mesh = chosen.mesh
    leader = mesh.ids[0] in chosen.addressable
    rank_state.check_same_state(state, chosen, replicas, digests)
    if replicas == "equal":
        rank_state.check_replicas_of_ranks(state, chosen)
    # The system unlocks the directory when a process is killed.
    with ExitStack() as lock:
        locked = agree(chosen, lambda: leader and _claim(path, overwrite, lock))
        boxes = assign_boxes(mesh, state.layouts, spread=replicas == "equal")
        # A device without boxes writes no file.
        mine = [rank for rank in chosen.addressable if boxes[rank]]
        own = {rank: boxes[rank] for rank in mine}
        names = [native.shard_name(rank, save) for rank in mine]
        sums = {
            name: TensorDigest(layout.dtype, layout.global_shape)
            for name, layout in (() if digests is None else state.layouts.items())
        }
        try:
            written = agree(chosen, lambda: _write_shards(path, own, state, save, sums, progress))
            digested = None if digests is None else add_up(sums, chosen)
            gathered = chosen.gather({rank: written.get(rank) for rank in chosen.addressable})
            files = tuple(file for rank in mesh.ids if (file := gathered[rank]) is not None)
            flat = state.flat
            info = native.ShardingInfo(save, mesh, state.layouts, files, flat.values, flat.paths)
        except BaseException:
            _remove(path, names)
            raise
        try:
            if digests is not None and digested is not None:
                write = partial(write_digests, digests, digested, overwrite=overwrite)
                agree(chosen, lambda: write() if leader else None)
            older = agree(chosen, lambda: _publish(path, info) if leader else [])
        except CheckpointError:  # other errors may come when it is published
            if not _is_published(path, save):
                _remove(path, names)
            raise
        if leader:
            # Without a lock, another save may own any file that the older info does not list.
            with suppress(OSError, CheckpointError):
                older = path.names() if locked else older
            _remove(path, _superseded(path, older, keep={file.name for file in files}))


def _check_free(path: StoragePath) -> None:
    """Raise OutputExistsError if a directory contains a finished save."""
    if (path / INFO_NAME).taken():
        raise OutputExistsError(
            f"{path}: contains a finished save; choose another directory, or replace it with ",
            Argument("overwrite", value=True),
        )


def _claim(path: StoragePath, overwrite: bool, lock: ExitStack) -> bool:
    """Create and lock a directory; raises OutputExistsError if it contains a save to keep.

    Returns True if it is locked; object stores and some file systems have no locks.
    """
    path.make_directory()
    locked = lock.enter_context(path.locked())
    if locked is False:
        raise CheckpointError(
            f"{path}: another run is saving there; wait for that one, or choose another directory"
        )
    if not overwrite:
        _check_free(path)
    return locked is True


def _write_shards(
    path: StoragePath,
    boxes: Mapping[int, Sequence[BoxEntry]],
    state: Described,
    save: str,
    sums: dict[str, TensorDigest],
    progress: Progress | None,
) -> dict[int, FileEntry]:
    """Write the files of this process; return rank -> entry of its file, with CRC-32 of boxes.

    Digests of written boxes are added to those in `sums`.
    """
    # The first rank has made it; a second call makes a network file system notice.
    path.make_directory()
    tensors = {
        name: OutputTensor(name, name, layout.global_shape, layout.dtype)
        for name, layout in state.layouts.items()
    }
    written = {}
    files = {rank: native.shard_file(tensors, boxes[rank], rank, save) for rank in boxes}
    shown = _shown(progress, sum(file.num_bytes for file in files.values()))
    for rank, entries in boxes.items():
        file, crcs = files[rank], dict[tuple[str, Box], int]()
        pieces = shown(_pieces(file, rank, state, crcs, sums))
        place = path / file.name
        place.write(file.num_bytes, pieces, overwrite=False, mode_of=INFO_NAME)
        stored = [entry._replace(crc32=crcs[entry.tensor, entry.box]) for entry in entries]
        written[rank] = FileEntry(file.name, rank, file.num_bytes, stored)
    return written


def _shown(progress: Progress | None, total: int) -> Callable[[Pieces], Pieces]:
    """Return a function that yields pieces unchanged and reports their bytes to `progress`."""
    done = 0

    def passed_on(pieces: Pieces) -> Pieces:
        nonlocal done
        for piece in pieces:
            yield piece
            done += len(piece)
            if progress is not None:
                progress(done, total)

    return passed_on


def _pieces(
    file: OutputFile,
    rank: int,
    state: Described,
    crcs: dict[tuple[str, Box], int],
    sums: dict[str, TensorDigest],
) -> Pieces:
    """Yield the bytes of a file, and record the CRC-32 of each of its boxes."""
    yield from (raw.made() for raw in file.raw)
    for tensor, box, _ in file.extents:
        crc = at = 0
        for piece in state.bytes_of(tensor.name, rank, box):
            crc = crc32(piece, crc)
            if tensor.name in sums:
                sums[tensor.name] = sums[tensor.name].with_bytes(piece, box, at)
            at += len(piece)
            yield piece
        crcs[tensor.name, box] = crc


def _publish(path: StoragePath, info: native.ShardingInfo) -> Sequence[str]:
    """Write `sharding_info.json`, which completes the save; return the files of the older save."""
    for file in info.files:
        place = path / file.name
        entry, why = None, os.strerror(errno.ENOENT)
        try:
            entry = place.look()
        except OSError as error:
            why = reason(error)
        if entry is None:
            raise CheckpointError(
                f"{place}: rank {file.rank} has written this file, but the first rank of the mesh "
                f"does not see it ({why}); save to a directory that all ranks share"
            )
        if entry.num_bytes != file.num_bytes:
            raise CheckpointError(
                f"{place}: has {entry.num_bytes} bytes, but rank {file.rank} has written "
                f"{file.num_bytes}; another program has changed it, save again"
            )
    older: Sequence[str] = []
    with suppress(CheckpointError):  # an unreadable info lists no files to remove
        older = [file.name for file in native.read_info(path).files]
    text = "".join(native.info_lines(info)).encode()
    (path / INFO_NAME).write(len(text), [text], overwrite=True, mode_of=INFO_NAME)
    return older


def _is_published(path: StoragePath, save: str) -> bool:
    """Return True if `sharding_info.json` is of this save, or cannot be read."""
    if not (path / INFO_NAME).taken():
        return False
    try:
        return native.read_info(path).save == save
    except (CheckpointError, OSError):
        return True


def _superseded(path: StoragePath, names: Iterable[str], keep: Collection[str]) -> Iterator[str]:
    """Yield the temporary files in `names`, and older saves' files (by header) not in `keep`."""
    for name in names:
        if is_temporary(name):
            yield name
        shard = is_shard(name)
        if shard is None or name in keep:
            continue
        with suppress(CheckpointError, OSError):
            place = path / name
            entry = place.look(follow_links=False)
            if entry is not None and entry.kind == "file":
                with place.open() as file:
                    metadata = read_header(file).metadata
                rank, save = shard.groups()
                if metadata.items() >= native.shard_metadata(save, int(rank)).items():
                    yield name


def _remove(path: StoragePath, names: Iterable[str]) -> None:
    """Remove files of older or failed saves; ignore errors, since such files only take space."""
    for name in names:
        with suppress(OSError, CheckpointError):
            (path / name).unlink()
