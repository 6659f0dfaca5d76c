"""Saving: each rank writes its shards into a file of its own, the sharding info comes last."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardspec.boxes import box_shape
from shardspec.checkpoint.formats.names import INFO_NAME
from shardspec.checkpoint.formats.native import shard_metadata
from shardspec.checkpoint.formats.safetensors_header import Header, TensorSlot, encode_header
from shardspec.checkpoint.moving.digests import crc32
from shardspec.checkpoint.sharding_info import (
    BoxEntry,
    FileEntry,
    ShardingInfo,
    format_info,
    read_info,
)
from shardspec.checkpoint.store import RemotePath, as_path, reason
from shardspec.checkpoint.writing.agree import agree
from shardspec.checkpoint.writing.assign import assign_boxes
from shardspec.checkpoint.writing.new_file import Write, write_file
from shardspec.checkpoint.writing.turn import Turn, shard_name
from shardspec.comm.communicator import Communicator
from shardspec.errors import CheckpointError, DTypeError, OutputExistsError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

if TYPE_CHECKING:
    import torch

    from shardspec.dtensor import DTensor

__all__ = ["save_sharded"]


_PIECE_BYTES: Final = 1 << 20
"""Digested and written at once, while it is in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file to be written."""

    entry: FileEntry
    head: bytes
    """Its first bytes."""
    header: Header


def save_sharded(
    state_dict: Mapping[str, "DTensor | torch.Tensor"],
    directory: Path | str,
    *,
    overwrite: bool = False,
    communicator: Communicator | None = None,
) -> None:
    """Write a checkpoint; every rank calls it with its shards of the same tensors.

    Each rank writes one file with its boxes; a box that several ranks hold is written by one of
    them. The sharding info follows when all files are on the disk, so a directory without it is an
    unfinished save. Pending reductions are saved as they are, addend by addend.

    Parameters
    ----------
    state_dict
        Name to tensor. A plain tensor counts as the same on every device of the mesh. All
        DTensors are on one mesh.
    directory
        Where to write, the same place for every rank; made if it does not exist. It may be the
        URL of an object store, where saves to one place do not see each other.
    overwrite
        Replace the save that is there. The old one stays whole until the new one is.
    communicator
        Who the ranks are; by default that of the DTensors, and without any the running job, or
        this process alone.

    Raises
    ------
    OutputExistsError
        On every rank, if the directory holds a finished save and `overwrite` is not set.
    CheckpointError
        On every rank, if another save is at work there, any rank fails, or they do not agree on
        names, shapes, dtypes and specs. What this save wrote is removed again, and an older save
        is kept.
    CommunicatorError
        If this is a rank of a job that has not initialised `torch.distributed`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import DTensor, DeviceMesh, load_sharded
    >>> mesh = DeviceMesh(range(4), (2, 2))
    >>> w = DTensor(torch.arange(6).view(3, 2), mesh, "[S0,R]")
    >>> path = tempfile.mkdtemp()
    >>> save_sharded({"w": w, "step": torch.tensor(7)}, path)
    >>> load_sharded(path)["w"]
    DTensor([S0,R] of [3, 2] int64 on 2x2; holds the shards of devices 0, 1, 2, 3)
    """
    chosen = _communicator(state_dict, communicator)
    if not chosen.addressable:
        return
    path = as_path(directory)
    mesh = chosen.mesh
    leader = mesh.ids[0] in chosen.addressable
    layouts = agree(chosen, lambda: _layouts(state_dict, mesh))
    tokens = chosen.gather(dict.fromkeys(chosen.addressable, os.urandom(8).hex()))
    save = tokens[mesh.ids[0]]
    _check_same(layouts, chosen)
    with Turn() as turn:
        agree(chosen, lambda: _claim(path, overwrite, turn) if leader else None)
        # A device without boxes writes no file.
        boxes = {rank: entries for rank, entries in assign_boxes(mesh, layouts).items() if entries}
        mine = [_shard(r, boxes[r], layouts, save) for r in chosen.addressable if r in boxes]
        try:
            written = agree(chosen, lambda: _write_shards(path, mine, state_dict))
            digests = chosen.gather({rank: written.get(rank, {}) for rank in chosen.addressable})
            digested = {
                rank: [entry._replace(crc32=digests[rank][entry.tensor]) for entry in entries]
                for rank, entries in boxes.items()
            }
            replaced = agree(
                chosen, lambda: _publish(path, save, layouts, digested, mesh) if leader else []
            )
        except CheckpointError:
            _remove(path, [shard.entry.name for shard in mine])
            raise
        if leader:
            _remove(path, replaced)
            turn.clear(path, {shard_name(rank, save) for rank in boxes})


def _communicator(
    state_dict: Mapping[str, "DTensor | torch.Tensor"], communicator: Communicator | None
) -> Communicator:
    """Return who saves together."""
    import torch.distributed as dist

    from shardspec.comm.default import communicator_of
    from shardspec.dtensor import DTensor

    if communicator is not None:
        return communicator
    for value in state_dict.values():
        if isinstance(value, DTensor):
            return value.communicator
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return communicator_of(DeviceMesh(range(ranks)))


def _layouts(
    state_dict: Mapping[str, "DTensor | torch.Tensor"], mesh: DeviceMesh
) -> dict[str, Layout]:
    """Check every value, and return how it is laid out, by name."""
    import torch

    from shardspec.dtensor import DTensor

    layouts = {}
    for name, value in state_dict.items():
        if not isinstance(name, str):
            raise CheckpointError(f"the name {name!r} is no text; name tensors by strings")
        where = f"tensor {name!r}"
        if isinstance(value, DTensor):
            if value.layout.mesh != mesh:
                raise CheckpointError(
                    f"{where} is on mesh {value.layout.mesh} with ids {value.layout.mesh.ids}, but "
                    f"the save is on mesh {mesh} with ids {mesh.ids}; convert it to one mesh first"
                )
            parts = list(value.shards.values())
            layouts[name] = value.layout
        elif isinstance(value, torch.Tensor):
            parts = [value]
            try:
                layouts[name] = Layout(mesh, ShardingSpec(value.dim()), value.shape, value.dtype)
            except DTypeError as error:
                raise CheckpointError(f"{where}: {error}") from None
        else:
            raise CheckpointError(
                f"{where} is a {type(value).__name__}; a checkpoint holds tensors, so leave it "
                "out or make it one with torch.tensor"
            )
        for part in parts:
            if type(part).__module__.startswith("torch.distributed"):
                raise CheckpointError(
                    f"{where} is a {type(part).__module__}.{type(part).__name__}; give its local "
                    "tensor to shardspec.DTensor.from_local"
                )
            if part.layout is not torch.strided or part.is_quantized or part.is_meta:
                raise CheckpointError(
                    f"{where} is no plain dense tensor ({part.layout}, on {part.device}); convert "
                    "it first"
                )
    layouts = {name: layouts[name] for name in sorted(layouts)}
    # Names that no file can carry are refused here, even those of tensors that have no boxes.
    encode_header((TensorSlot(n, at.dtype, at.global_shape) for n, at in layouts.items()), {})
    return layouts


def _check_same(layouts: Mapping[str, Layout], communicator: Communicator) -> None:
    """Raise on every rank if not all of them save the same tensors."""
    facts = {
        name: f"{layout.spec} of {list(layout.global_shape)} {layout.dtype}"
        for name, layout in layouts.items()
    }
    digest = sha256(repr(sorted(facts.items())).encode("utf-8", "surrogatepass")).hexdigest()
    ranks = communicator.addressable
    digests = communicator.gather(dict.fromkeys(ranks, digest))
    if len(set(digests.values())) == 1:
        return
    # Only now the long lists travel.
    every = communicator.gather(dict.fromkeys(ranks, facts))
    first, other = next((i, j) for i in every for j in every if every[i] != every[j])
    name = min(
        name
        for name in every[first].keys() | every[other].keys()
        if every[first].get(name) != every[other].get(name)
    )
    has = [f"rank {r} has {every[r].get(name, 'no such tensor')}" for r in (first, other)]
    raise CheckpointError(f"tensor {name!r}: {' but '.join(has)}; save the same on every rank")


def _shard(
    rank: int, entries: Sequence[BoxEntry], layouts: Mapping[str, Layout], save: str
) -> _Shard:
    """Return the file that a rank writes."""
    slots = [
        TensorSlot(entry.tensor, layouts[entry.tensor].dtype, box_shape(entry.box))
        for entry in entries
    ]
    head, header = encode_header(slots, shard_metadata(save, rank))
    name = shard_name(rank, save)
    return _Shard(FileEntry(name, rank, header.file_bytes, tuple(entries)), head, header)


def _make_directory(path: Path) -> None:
    if isinstance(path, RemotePath):
        # Stores make it with the first file.
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be made a directory: {reason(error)}") from None


def _claim(path: Path, overwrite: bool, turn: Turn) -> None:
    """Make the directory and take one's turn, unless there is a save in it that is to be kept."""
    _make_directory(path)
    if isinstance(path, RemotePath):
        there = (path / INFO_NAME).exists()
    else:
        turn.take(path)
        there = os.path.lexists(path / INFO_NAME)
    if there and not overwrite:
        raise OutputExistsError(
            f"{path}: holds a finished save; choose another directory, or replace it with "
            "overwrite=True"
        )


def _write_shards(
    path: Path, shards: Sequence[_Shard], state_dict: Mapping[str, "DTensor | torch.Tensor"]
) -> dict[int, dict[str, int]]:
    """Write the files of this process; return by rank and tensor the CRC-32 of each box."""
    digests: dict[int, dict[str, int]] = {}
    # Made by the first rank; asking again makes a network file system look.
    _make_directory(path)
    for shard in shards:
        write_file(
            path / shard.entry.name,
            shard.header.file_bytes,
            partial(_fill, shard, state_dict, digests.setdefault(shard.entry.rank, {})),
            overwrite=False,
        )
    return digests


def _fill(
    shard: _Shard,
    state_dict: Mapping[str, "DTensor | torch.Tensor"],
    digests: dict[str, int],
    write: Write,
) -> None:
    from shardspec.dtensor import DTensor

    write(memoryview(shard.head))
    for entry in shard.header.entries:
        value = state_dict[entry.name]
        part = value.shards[shard.entry.rank] if isinstance(value, DTensor) else value
        data = _bytes_of(part)
        value_crc = 0
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            value_crc = crc32(piece, value_crc)
            write(piece)
        digests[entry.name] = value_crc


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    """Return the bytes of a tensor, row-major; copied only where they are not at hand that way."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Strides are set, not kept: a single element counts as contiguous whatever its stride.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def _publish(
    path: Path,
    save: str,
    layouts: Mapping[str, Layout],
    boxes: Mapping[int, Sequence[BoxEntry]],
    mesh: DeviceMesh,
) -> list[str]:
    """Write the sharding info, which makes the save count; return the files it supersedes."""
    files = (_shard(rank, entries, layouts, save).entry for rank, entries in boxes.items())
    info = ShardingInfo(save, mesh, layouts, tuple(files))
    for file in info.files:
        place = path / file.name
        try:
            found = place.num_bytes() if isinstance(place, RemotePath) else place.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path / file.name}: rank {file.rank} has written this file, but the first rank "
                f"of the mesh does not see it ({reason(error)}); save to a directory that all "
                "ranks share"
            ) from None
        assert found == file.num_bytes, "files appear only when they are complete"
    superseded: list[str] = []
    # An older info that cannot be read names nothing that could be removed.
    with suppress(CheckpointError):
        superseded = [file.name for file in read_info(path).files]
    text = format_info(info).encode()
    write_file(path / INFO_NAME, len(text), lambda write: write(memoryview(text)), overwrite=True)
    return superseded


def _remove(path: Path, names: Sequence[str]) -> None:
    """Remove files that no info names any more; one that stays takes room and does no harm."""
    for name in names:
        with suppress(OSError, CheckpointError):
            (path / name).unlink()
