"""Digests of checkpoints and of state dicts; what a file of digests is, read and written."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint import rank_state
from shardspec.checkpoint.catalog import (
    Catalog,
    StoredBox,
    StoredTensor,
    row_major_strides,
    whole_box,
)
from shardspec.checkpoint.choice import Choice, Patterns, Selection, check_drop, select
from shardspec.checkpoint.mapped import Names, mapped_choice, require_finished, target_boxes
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.read_boxes import (
    Buffers,
    Checks,
    Progress,
    read_box,
    stretches,
)
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.storage.path import StoragePath, check_new_file
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.checkpoint.storage.strict_json import read_json
from shardspec.checkpoint.targets import assign_boxes
from shardspec.checkpoint.tiling import check_replicas, check_tiling
from shardspec.comm.communicator import Communicator
from shardspec.comm.together import agree
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, LayoutError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.resharding.digests import LANES, Digests, TensorDigest, digests_of_json
from shardspec.resharding.maps import apply_map, dropped_by
from shardspec.resharding.name_map import Equation, NameMap
from shardspec.resharding.view_parts import parts_of_view
from shardspec.text import Argument

_MOST_BYTES: Final = 1 << 30
_MOST_VALUES: Final = 100_000_000
_SOMEWHERE: Final = storage_path("memory")
"""Stands for memory, where boxes have places in files."""

_Places: TypeAlias = Mapping[str, Sequence[Equation]]
"""By the name of a tensor, what becomes of it."""


def digest(
    source: Mapping[str, Any] | PurePath | str | Catalog,
    *,
    names: Names | None = None,
    seed: int = 0,
    communicator: Communicator | None = None,
    progress: Progress | None = None,
    **selection: Unpack[Selection],
) -> Digests:
    """Return the digest of every tensor of a checkpoint or state dict, however it is sharded.

    It depends on names, dtypes, shapes and bits of the tensors alone: not on sharding, files and
    formats. `docs/digest.md` has the formula. In a job, every rank of a state dict's mesh calls
    this and gets the same; nothing but three numbers a tensor moves.

    Parameters
    ----------
    source
        A checkpoint in any format that `open_checkpoint` reads, or one that is open; or a state
        dict as `save_sharded` takes it, whose plain values do not count.
    names, drop
        Digests are those of the tensors that a map makes, as for `merge`; of a state dict it is one
        `NameMap`, or new names.
    seed
        Chooses the keys, for those who distrust fixed ones.
    communicator
        Who holds a state dict, as for `save_sharded`.
    progress
        Called with the bytes of a checkpoint that are read so far, and in all.

    Other Parameters
    ----------------
    include, exclude, rename
        Which tensors of a checkpoint, and under which names, as for `merge`.

    Raises
    ------
    LayoutError
        If a reduction of a checkpoint is pending, or the map does not fit it.
    CheckpointError
        If a checkpoint is damaged, boxes do not tile a tensor, or replicas differ. Of a state dict
        any of these, on every rank.

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
        raise LayoutError(f"seed={seed!r} is not a whole number from 0 to 2^64 - 1; leave it out")
    choice = Choice(**selection)
    if isinstance(source, Mapping):
        if progress is not None or not replace(choice, drop=()).is_all:
            raise LayoutError("include, exclude, rename and progress are for checkpoints")
        chosen = communicator or rank_state.communicator_of_state(source)
        with chosen.telling():
            return _of_state(source, names, choice.drop, seed, chosen)
    return _of_checkpoint(*mapped_choice(as_catalog(source), names, choice), seed, progress)


def _of_checkpoint(
    source: Catalog, choice: Choice, seed: int, progress: Progress | None
) -> Digests:
    wanted = select(source, choice) if source.names else []
    total, done = sum(one.num_bytes for one in wanted), 0
    for one in wanted:
        require_finished(source.outline(one.source))
    found: dict[str, TensorDigest] = {}
    buffers = Buffers()
    with OpenFiles() as files:
        every = (source.tensor(one.source) for one in wanted)
        ahead = (at for tensor in every for at in stretches(tensor, whole_box(tensor.shape)))
        files.will_read(source.directory, ahead)
        for one in wanted:
            tensor = source.tensor(one.source)
            for group in check_tiling(tensor):
                check_replicas(tensor, group, files, trust_digests=True)
            digested = TensorDigest(tensor.dtype, tensor.shape, seed=seed)
            for block, at in _blocks(tensor, files, buffers):
                digested = digested.with_bytes(block, whole_box(tensor.shape), at)
                done += len(block)
                if progress is not None:
                    progress(done, total)
            found[one.name] = digested
        source.check_unchanged()
    return Digests(found, seed)


def _blocks(
    tensor: StoredTensor, files: OpenFiles, buffers: Buffers
) -> Iterator[tuple[memoryview, int]]:
    """Yield the bytes of a tensor in row-major order, and the number of the first element."""
    checks, at = Checks(tensor), 0
    for block, _ in read_box(tensor, whole_box(tensor.shape), files, buffers, checks):
        yield block, at
        at += len(block) // item_bytes(tensor.dtype)
    checks.finish(files)


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
            f"this rank is not in mesh {mesh} of ids {mesh.ids}, which holds the state dict; call "
            "this on its ranks alone"
        )

    def described() -> tuple[rank_state.Described, dict[str, TensorDigest], _Places]:
        found = rank_state.describe(state, chosen)
        require_no_sums(found.layouts)
        return found, *_target(found.layouts, names, drop, seed)

    what, sums, equations = agree(chosen, described)
    rank_state.check_same_state(what, chosen, "first")
    rank_state.check_replicas_of_ranks(what, chosen)
    boxes = assign_boxes(chosen.mesh, what.layouts)

    def digested() -> dict[str, TensorDigest]:
        found = dict(sums)
        for rank in chosen.addressable:
            for entry in boxes[rank]:
                numbers = what.bits_of(entry.tensor, rank, entry.box)
                for name, some, box in _placed(numbers, entry.box, entry.tensor, equations):
                    found[name] += TensorDigest.of_box(
                        some, box, found[name].shape, found[name].dtype, seed
                    )
        return found

    return add_up(agree(chosen, digested), chosen, seed)


def require_no_sums(layouts: Mapping[str, Layout]) -> None:
    """Raise LayoutError if the reduction of a tensor is pending."""
    for name, layout in layouts.items():
        if layout.spec.partials:
            raise LayoutError(
                f"{name!r} is laid out as {layout.spec}, with a reduction pending, so it has no "
                f"digest yet; finish it, with redistribute({str(layout.spec.without_partial())!r})"
            )


def empty_digest(layout: Layout) -> TensorDigest:
    """Return the digest of no element of a tensor."""
    return TensorDigest(layout.dtype, layout.global_shape)


def _target(
    layouts: Mapping[str, Layout], names: Names | None, drop: Patterns, seed: int
) -> tuple[dict[str, TensorDigest], _Places]:
    """Return digests of nothing for the tensors that a map makes, and its equations by source."""
    shapes = {name: layout.global_shape for name, layout in layouts.items()}
    if names is None:
        check_drop(Choice(drop=drop))
        names = {}
    if isinstance(names, Mapping):
        if unknown := sorted(names.keys() - shapes.keys()):
            raise LayoutError(f"names= maps {unknown[0]!r}, which the state dict lacks")
        names = NameMap(tuple(((old,), (names.get(old, old),)) for old in shapes))
    if not isinstance(names, NameMap):
        raise LayoutError(
            f"names= is a {type(names).__name__}; of a state dict give one NameMap, as load_map "
            "makes, or a dict of new names"
        )
    dropped = dropped_by(drop, shapes)
    found, _, report = apply_map(names, shapes, dropped)
    report.require_total()
    sums: dict[str, TensorDigest] = {}
    equations: dict[str, list[Equation]] = {}
    for equation in report.equations:
        dtype = layouts[equation.source].dtype
        empty = TensorDigest(dtype, found[equation.target], seed=seed)
        if sums.setdefault(equation.target, empty).dtype != dtype:
            raise LayoutError(
                f"the map makes {equation.target!r} of {sums[equation.target].dtype} and of "
                f"{dtype}; cast one of them first"
            )
        equations.setdefault(equation.source, []).append(equation)
    for name, side in names.padding(found):
        factors = sorted(factor for dim in side.dims for factor in dim)
        whole = tuple((0, factor.length) for factor in factors)
        for box, *_ in parts_of_view(side, whole, [0] * len(whole)) if box_size(whole) else ():
            sums[name] = sums[name].with_zeros(box)
    return sums, equations


def _placed(
    numbers: NDArray[np.generic], box: Box, name: str, equations: _Places
) -> Iterator[tuple[str, NDArray[np.generic], Box]]:
    """Yield which boxes of the targets a box of a tensor is, with their elements."""
    width = numbers.itemsize
    stored = StoredBox(box, (), 0, _SOMEWHERE, 0)
    for equation in equations.get(name, ()):
        flat = np.ascontiguousarray(numbers)
        for part in target_boxes(equation.view, stored, width):
            shape = box_shape(part.box)
            strides = part.strides or row_major_strides(shape, width)
            yield (
                equation.target,
                np.ndarray(shape, flat.dtype, flat, part.offset, strides),
                part.box,
            )


def add_up(mine: Mapping[str, TensorDigest], communicator: Communicator, seed: int = 0) -> Digests:
    """Return the sums of what all processes of a mesh have; every one of them calls this."""
    if set(communicator.addressable) == set(communicator.mesh.ids):
        return Digests(mine, seed)
    import torch
    import torch.distributed as dist

    from shardspec.tensor.dtensor import DTensor

    names, width = sorted(mine), LANES + 1
    sums = np.array([mine[name].sums for name in names], np.uint64).reshape(-1)
    mesh = communicator.mesh
    pending = ShardingSpec(1, {}, partial=dict.fromkeys(range(mesh.ndim), "sum"))
    layout = Layout(mesh, pending, sums.shape, "int64")
    # NCCL moves no memory of the host.
    on_host = "gloo" in dist.get_backend_config()
    shard = torch.from_numpy(sums.view(np.int64)).to("cpu" if on_host else "cuda")
    shards = dict.fromkeys(communicator.addressable, shard)
    whole = DTensor.from_shards(shards, layout, communicator).redistribute("[R]").to_local()
    found = whole.cpu().numpy().view(np.uint64).reshape(-1, width).tolist()
    return Digests(
        {n: replace(mine[n], sums=tuple(s)) for n, s in zip(names, found, strict=True)}, seed
    )


# --- files of digests


def read_digests(path: PurePath | str) -> Digests:
    """Read a file of digests; CheckpointError if it is none."""
    place = storage_path(path)
    return digests_of_json(read_json(place, "digests", _MOST_BYTES, _MOST_VALUES), str(place))


def check_digests_file(path: StoragePath, output: StoragePath | None, *, overwrite: bool) -> None:
    """Check that a file of digests can be written, before anything else is."""
    check_new_file(path, overwrite=overwrite)
    if output is not None and output.absolute() in (path.absolute(), *path.absolute().parents):
        raise CheckpointError(
            f"{path}: the digests would lie in the output {output}, which is replaced as a whole; "
            "put them beside it, with ",
            Argument("digests"),
        )


def write_digests(path: StoragePath, digests: Digests, *, overwrite: bool) -> None:
    """Write a file of digests, a line a tensor."""
    record = digests.to_json()
    tensors = record.pop("tensors")
    assert isinstance(tensors, dict), "by name"
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(entry)}" for n, entry in tensors.items())
    head = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in record.items())
    text = f'{{\n{head}"tensors": {{\n{lines}\n}}\n}}\n'.encode()
    path.write(len(text), [text], overwrite=overwrite)
