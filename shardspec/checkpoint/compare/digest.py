"""Computes digests of checkpoints and state dicts, and reads and writes files of digests."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import (
    Catalog,
    StoredBox,
    row_major_strides,
    whole_box,
)
from shardspec.checkpoint.compare.coverage import check_replicas, check_tiling
from shardspec.checkpoint.convert.copy import (
    Buffers,
    Progress,
    read_whole,
    stretches,
)
from shardspec.checkpoint.convert.select import (
    Choice,
    MappedCatalog,
    Patterns,
    Selection,
    check_drop,
    mapped,
    mapped_choice,
    require_finished,
    select,
    through,
)
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.state import rank_state
from shardspec.checkpoint.state.memory import Memory, catalog_of, require_no_sums
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import StoragePath, check_new_file
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.checkpoint.storage.strict_json import read_json
from shardspec.comm.communicator import Communicator
from shardspec.comm.consensus import agree
from shardspec.dtypes import bits_type, item_bytes
from shardspec.errors import CheckpointError, LayoutError
from shardspec.resharding.digests import LANES, Digests, TensorDigest
from shardspec.resharding.name_map import NameMap, Names, Naming
from shardspec.resharding.total import dropped_by
from shardspec.text import Argument

if TYPE_CHECKING:
    pass


def digest(
    source: Mapping[str, Any] | PurePath | str | Catalog,
    *,
    names: Names | None = None,
    seed: int = 0,
    communicator: Communicator | None = None,
    part: bool = False,
    progress: Progress | None = None,
    **selection: Unpack[Selection],
) -> Digests:
    """Return the digest of every tensor of a checkpoint or state dict, however it is sharded.

    It depends only on the names, dtypes, shapes and bits of the tensors, not on sharding, files or
    formats. `docs/digest.md` has the formula. In a job, every rank of a state dict's mesh calls
    it and gets the same result; each sends three numbers per tensor.

    Parameters
    ----------
    source
        A checkpoint in any format that `open_checkpoint` reads, or an open one; or a state dict as
        `save_sharded` takes it, whose plain values do not count.
    names, drop
        Digest the tensors that a map makes, as for `merge`; for state dicts too.
    seed
        Selects the hash keys, in place of the fixed default ones.
    communicator
        The ranks of a state dict, as for `save_sharded`.
    part
        Digest only the boxes of a state dict that this process would save, without other ranks.
        Add up the results: ``sum(parts, Digests({})).require_complete()``.
    progress
        Called with the bytes read from a checkpoint so far, and in all.

    Other Parameters
    ----------------
    include, exclude, rename
        Selection of a checkpoint's tensors and their new names, as for `merge`.

    Raises
    ------
    LayoutError
        If a reduction of a checkpoint is pending, or the map does not fit it.
    CheckpointError
        If a checkpoint is damaged, boxes do not tile a tensor, or replicas differ. For a state
        dict, every rank raises it.

    Examples
    --------
    >>> import torch
    >>> from shardspec import DTensor, DeviceMesh
    >>> w = torch.arange(12.0).view(4, 3)
    >>> cut = DTensor(w, DeviceMesh(range(4), (2, 2)), "[S0,S1]")
    >>> digest({"w": w}) == digest({"w": cut})
    True
    """
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise LayoutError(f"seed={seed!r} is not a whole number from 0 to 2^64 - 1; omit it")
    choice = Choice(**selection)
    if isinstance(source, Mapping):
        if progress is not None or not replace(choice, drop=()).is_all:
            raise LayoutError(
                "include, exclude, rename and progress are for checkpoints; omit them"
            )
        chosen = communicator or rank_state.communicator_of_state(source)
        if part:
            described = rank_state.describe(source, chosen)
            require_no_sums(described.layouts)
            own = named_state(catalog_of(described, chosen), names, choice.drop)
            return Digests(_of_boxes(own, chosen, seed), seed)
        with chosen.telling():
            return _of_state(source, names, choice.drop, seed, chosen)
    if part:
        raise LayoutError("part=True is for state dicts; choose tensors by include=")
    return _of_checkpoint(*mapped_choice(as_catalog(source), names, choice), seed, progress)


def _of_checkpoint(
    source: Catalog, choice: Choice, seed: int, progress: Progress | None
) -> Digests:
    chosen = select(source, choice) if source.names else []
    names = {tensor.name: tensor.source for tensor in chosen}
    outlines = [source.outline(name) for name in names.values()]
    for outline in outlines:
        require_finished(outline)
    total, done = sum(outline.num_bytes for outline in outlines), 0
    digests: dict[str, TensorDigest] = {}
    buffers = Buffers()
    with OpenFiles() as files:
        tensors = map(source.tensor, names.values())
        ahead = (at for tensor in tensors for at in stretches(tensor, whole_box(tensor.shape)))
        files.will_read(source.directory, ahead)
        for name, stored_name in names.items():
            tensor = source.tensor(stored_name)
            for group in check_tiling(tensor):
                check_replicas(tensor, group, files, trust_digests=True)
            value, at = TensorDigest(tensor.dtype, tensor.shape, seed=seed), 0
            for block in read_whole(tensor, files, buffers):
                value = value.with_bytes(block, whole_box(tensor.shape), at)
                at += len(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
            digests[name] = value
        source.check_unchanged()
    return Digests(digests, seed)


# --- state dicts


def _of_state(
    state: Mapping[str, Any],
    names: Names | None,
    drop: Patterns,
    seed: int,
    chosen: Communicator,
) -> Digests:
    if not chosen.addressable:
        mesh = chosen.mesh
        raise LayoutError(
            f"this rank is not in mesh {mesh} of ids {mesh.ids}, which has the state dict; call "
            "digest on ranks of that mesh only"
        )

    def described() -> tuple[rank_state.Described, Catalog]:
        what = rank_state.describe(state, chosen)
        require_no_sums(what.layouts)
        return what, named_state(catalog_of(what, chosen), names, drop)

    what, source = agree(chosen, described)
    rank_state.check_same_state(what, chosen, "first")
    rank_state.check_replicas_of_ranks(what, chosen)

    return add_up(agree(chosen, lambda: _of_boxes(source, chosen, seed)), chosen, seed)


def _of_boxes(source: Catalog, chosen: Communicator, seed: int) -> dict[str, TensorDigest]:
    """Return tensor name -> digest of the boxes that this process reads."""
    digests = {}
    for name in source.names:
        tensor = source.tensor(name)
        total = TensorDigest(tensor.dtype, tensor.shape, seed=seed)
        for stored in tensor.boxes:
            # Padding is the same on all ranks: the first counts it.
            padding = stored.computed is None
            if not padding or chosen.mesh.ids[0] in chosen.addressable:
                bits = _bits(stored, item_bytes(tensor.dtype))
                total += TensorDigest.of_box(bits, stored.box, tensor.shape, tensor.dtype, seed)
        digests[name] = total
    return digests


def named_state(source: Catalog, names: Names | None, drop: Patterns = ()) -> Catalog:
    """Apply a name map to a state dict in memory."""
    if names is None:
        check_drop(Choice(drop=drop))
        return source
    shapes = {name: source.outline(name).shape for name in source.names}
    dropped = dropped_by(drop, shapes)
    if isinstance(names, Naming):
        remaining = {name: shape for name, shape in shapes.items() if name not in dropped}
        maps = names.maps(remaining, behind=dropped)
        return through(source, maps, dropped, {})
    if isinstance(names, NameMap):
        return MappedCatalog(source, names, dropped, {})
    return mapped(source, names, dropped=dropped)


def _bits(stored: StoredBox, width: int) -> NDArray[np.generic]:
    """Return the bits of a box in memory, without copying them."""
    shape = box_shape(stored.box)
    if stored.computed is None:
        return np.broadcast_to(np.zeros((), bits_type(width)), shape)
    assert isinstance(stored.computed, Memory), "all other boxes are in memory"
    strides = stored.strides or row_major_strides(shape, width)
    return stored.computed.bits(shape, strides, stored.offset)


def add_up(mine: Mapping[str, TensorDigest], communicator: Communicator, seed: int = 0) -> Digests:
    """Add up the digests of all processes of a mesh, which all call this."""
    names, (first, *others) = sorted(mine), communicator.addressable
    sums = np.array([mine[name].sums for name in names], np.uint64)
    own: dict[int, bytes | None] = {first: sums.tobytes(), **dict.fromkeys(others, None)}
    gathered = communicator.gather(own).values()
    every = [np.frombuffer(data, np.uint64) for data in gathered if data is not None]
    totals = np.sum(every, axis=0, dtype=np.uint64).reshape(len(names), LANES + 1)
    digests = {
        n: replace(mine[n], sums=tuple(s)) for n, s in zip(names, totals.tolist(), strict=True)
    }
    return Digests(digests, seed).require_complete()


# --- files of digests


def read_digests(path: PurePath | str) -> Digests:
    """Return the digests in a file; raises CheckpointError for any other file."""
    place = storage_path(path)
    return Digests.from_json(read_json(place, "digests"), str(place))


def check_digests_file(path: StoragePath, output: StoragePath | None, *, overwrite: bool) -> None:
    """Raise CheckpointError if a file of digests cannot be written; called before any output."""
    if output is not None and output.absolute() in (path.absolute(), *path.absolute().parents):
        raise CheckpointError(
            f"{path}: this file would be inside the output {output}, which is replaced; choose "
            "another path with ",
            Argument("digests"),
        )
    check_new_file(path, overwrite=overwrite)


def write_digests(path: StoragePath, digests: Digests, *, overwrite: bool) -> None:
    """Write a file of digests, one line per tensor.

    >>> import tempfile
    >>> place = storage_path(tempfile.mkdtemp()) / "digests.json"
    >>> write_digests(place, Digests({"w": TensorDigest("int8", (0,))}), overwrite=False)
    >>> list(read_digests(place))
    ['w']
    """
    record = digests.to_json()
    tensors = record.pop("tensors")
    assert isinstance(tensors, dict), "by name"
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(entry)}" for n, entry in tensors.items())
    head = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in record.items())
    text = f'{{\n{head}"tensors": {{\n{lines}\n}}\n}}\n'.encode()
    path.write(len(text), [text], overwrite=overwrite)
