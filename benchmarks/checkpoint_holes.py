"""Checkpoints with real headers and digests whose data are holes, so that any size takes no room.

python -m benchmarks.checkpoint_holes /tmp/large --tensors 10000 --mesh 16x8x8 --form dcp
python -m benchmarks.checkpoint_holes /tmp/16gib --hidden 6016 --vocab 32000 --mesh 2x2
"""

import argparse
import json
import pickle
from array import array
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

from isal.isal_zlib import crc32_combine

from benchmarks.checkpoint_shapes import Model, tensor_parallel_dim
from shardspec import DeviceMesh, Layout
from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import OutputTensor, assign_boxes
from shardspec.checkpoint.formats.native import sharded_target
from shardspec.checkpoint.formats.safetensors import encode_header
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.checkpoint.torch_files.writer import Archive
from shardspec.interop.notations import to_placements

__all__ = ["FORMATS", "main", "many_tensors", "of_model", "write_holes"]

_Tensors: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and spec by name."""

_KINDS: Final = {
    "q": ((4096, 4096), "[S21,R]"),
    "k": ((1024, 4096), "[S21,R]"),
    "v": ((1024, 4096), "[S21,R]"),
    "o": ((4096, 4096), "[S1,S2]"),
    "gate": ((11264, 4096), "[S21,R]"),
    "up": ((11264, 4096), "[S21,R]"),
    "down": ((4096, 11264), "[S1,S2]"),
    "norm": ((4096,), "[S1]"),
}
"""Shape and spec by kind: replicated over the first axis, FSDP on the second, tensor parallelism on
the third."""


def many_tensors(count: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and spec of so many tensors for a mesh of three axes.

    Examples
    --------
    >>> list(many_tensors(10))[-1]
    'layers.1.k.weight'
    """
    kinds = list(_KINDS.items())
    found = {}
    for number in range(count):
        layer, kind = divmod(number, len(kinds))
        name, cut = kinds[kind]
        found[f"layers.{layer}.{name}.weight"] = cut
    return found


def of_model(model: Model) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and spec of a model's tensors for a mesh of two axes."""
    specs = {0: "[S10,R]", 1: "[S0,S1]", None: "[S0]"}
    return {name: (shape, specs[tensor_parallel_dim(name)]) for name, shape in model.shapes.items()}


def write_holes(at: Path, mesh: DeviceMesh, tensors: _Tensors) -> None:
    """Write tensors of zeros in shardspec's own format, with holes behind the headers."""
    wanted = [OutputTensor(name, name, shape, "bfloat16") for name, (shape, _) in tensors.items()]
    layouts = {n: Layout(mesh, spec, shape, "bfloat16") for n, (shape, spec) in tensors.items()}
    target = sharded_target(mesh, wanted, layouts)
    digests: dict[int, int] = {}
    at.mkdir(parents=True)
    for file in target.files:
        with (at / file.name).open("wb") as out:
            for piece in file.raw:
                out.seek(piece.offset)
                out.write(piece.made())
            out.truncate(file.num_bytes)
        for num_bytes in {extent.num_bytes for extent in file.extents} - digests.keys():
            digests[num_bytes] = _zeros_crc32(num_bytes)
    assert target.listing is not None, "the form has an info"
    crcs = {
        file.name: [digests[extent.num_bytes] for extent in file.extents] for file in target.files
    }

    with (at / target.listing.name).open("wb") as out:
        target.listing.fill(crcs, out.write)


def write_dcp(at: Path, mesh: DeviceMesh, tensors: _Tensors) -> None:
    """Write the metadata that torch would, beside files that are all holes: for plans only."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    listed = {
        name: metadata.TensorStorageMetadata(properties, torch.Size(shape), [])
        for name, (shape, _) in tensors.items()
    }
    storage = {}
    at.mkdir(parents=True)
    for rank, boxes in _stored(mesh, tensors).items():
        path, end = f"__{rank}_0.distcp", 0
        for name, box in boxes:
            offsets, sizes = torch.Size([lo for lo, _ in box]), torch.Size(box_shape(box))
            chunks = listed[name].chunks
            index = metadata.MetadataIndex(name, offsets, len(chunks))
            chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
            # torch's zip has about a KiB beside the bytes.
            length = 2 * box_size(box) + 1024
            storage[index] = filesystem._StorageInfo(path, end, length)
            end += length
        with (at / path).open("wb") as out:
            out.truncate(end)
    data = metadata.Metadata({**listed}, planner_data={n: (n,) for n in listed})
    data.storage_data = storage
    (at / ".metadata").write_bytes(pickle.dumps(data))


def write_dcp_hf(at: Path, mesh: DeviceMesh, tensors: _Tensors) -> None:
    """Write the files that torch's writer of Hugging Face's format would, of one merged file."""
    at.mkdir(parents=True)
    for rank, boxes in _stored(mesh, tensors).items():
        slots = [(name, "bfloat16", box_shape(box)) for name, box in boxes]
        notes = {name: {"saved_offsets": [lo for lo, _ in box]} for name, box in boxes}
        note = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(notes)}
        data, header = encode_header(slots, {"format": "pt", **note})
        with (at / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").open("wb") as out:
            out.write(data)
            out.truncate(header.file_bytes)


def write_ranks(at: Path, mesh: DeviceMesh, tensors: _Tensors) -> None:
    """Write what a `.pt` of each rank starts and ends with, and holes between: for plans only.

    Pickles of ranks that have parts of the same sizes differ in the mesh, which stands in the first
    tensor. So torch pickles all tensors for the first of these ranks only, and two for the others.
    """
    layouts = {n: Layout(mesh, spec, shape, "bfloat16") for n, (shape, spec) in tensors.items()}
    first = dict(list(layouts.items())[:2])
    pickles: dict[object, tuple[bytes, bytes]] = {}
    ids = array("i", mesh.ids).tobytes()
    at.mkdir(parents=True)
    for rank in mesh.ids:
        shapes = tuple(layout.local_shape(rank) for layout in layouts.values())
        sizes = [2 * prod(shape) for shape in shapes]
        start = _pickled(mesh, first, rank)
        if shapes not in pickles:
            pickles[shapes] = start, _pickled(mesh, layouts, rank)
        like, whole = pickles[shapes]
        alike = _common_end(start, like)
        data = start[: len(start) - alike] + whole[len(like) - alike :]
        storages = enumerate[int | bytes]((sizes[0], ids, *sizes[1:]))
        archive = Archive(data, ((str(key), held) for key, held in storages))
        # Any digests, the same for all ranks: nothing looks at the holes.
        between = [*archive.late(range(1, 1 + len(sizes)))]
        with (at / f"model_world_size_{mesh.size()}_rank_{rank}.pt").open("wb") as out:
            out.write(archive.head)
            for piece in (between[0], between[-1]):
                out.seek(piece.offset)
                out.write(piece.made())


def _common_end(one: bytes, other: bytes) -> int:
    """Return how many bytes two pickles end alike with."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    unlike = (count for count, (a, b) in enumerate(pairs) if a != b)
    return next(unlike, min(len(one), len(other)))


class _Pickle:
    """Takes the pickle out of what `torch.save` writes."""

    data = b""

    def write_record(self, name: str, data: bytes, _: int) -> None:
        """Keep one of all records."""
        if name == "data.pkl":
            self.data = data

    def write_record_metadata(self, name: str, num_bytes: int) -> None:
        """Leave a storage out."""


def _pickled(mesh: DeviceMesh, layouts: Mapping[str, Layout], rank: int) -> bytes:
    """Return the pickle of a rank's state; the storage of the mesh has the key 1."""
    import torch
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.size())
    names = tuple(f"axis{axis}" for axis in range(mesh.ndim))
    on = init_device_mesh("cpu", mesh.shape, mesh_dim_names=names)
    state = {}
    for name, layout in layouts.items():
        whole = torch.empty(layout.global_shape, dtype=torch.bfloat16, device="meta")
        state[name] = DTensor.from_local(
            torch.empty(layout.local_shape(rank), dtype=torch.bfloat16),
            on,
            to_placements(layout.spec, mesh),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    found = _Pickle()
    with torch.serialization.skip_data():
        # What `torch.save` calls; that would also write room for gigabytes of storages.
        torch.serialization._save(state, found, pickle, 2, False)  # type: ignore[no-untyped-call]  # untyped in torch
    destroy_process_group()
    return found.data


def _stored(mesh: DeviceMesh, tensors: _Tensors) -> dict[int, list[tuple[str, Box]]]:
    """Return by rank what it stores: of boxes that several hold, one stores each."""
    layouts = {n: Layout(mesh, spec, shape, "bfloat16") for n, (shape, spec) in tensors.items()}
    found = assign_boxes(mesh, layouts).items()
    return {rank: [(entry.tensor, entry.box) for entry in boxes] for rank, boxes in found}


FORMATS: Final[Mapping[str, Callable[[Path, DeviceMesh, _Tensors], None]]] = {
    "shardspec": write_holes,
    "dcp": write_dcp,
    "dcp-hf": write_dcp_hf,
    "ranks": write_ranks,
}
"""What writes each format."""


def _zeros_crc32(num_bytes: int) -> int:
    """Return the CRC-32 of so many zeros, from that of half as many."""
    if num_bytes < 1 << 16:
        return crc32(bytes(num_bytes))
    half = _zeros_crc32(num_bytes // 2)
    value = int(crc32_combine(half, half, num_bytes // 2))
    return crc32(b"\0", value) if num_bytes % 2 else value


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("at", type=Path)
    parser.add_argument("--tensors", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--mesh", required=True)
    parser.add_argument("--form", choices=FORMATS, default="shardspec")
    chosen = parser.parse_args()
    shape = [int(size) for size in chosen.mesh.split("x")]
    if chosen.tensors is not None:
        tensors = many_tensors(chosen.tensors)
    else:
        tensors = of_model(Model(chosen.hidden, chosen.vocab))
    FORMATS[chosen.form](chosen.at, DeviceMesh(range(prod(shape)), shape), tensors)


if __name__ == "__main__":
    main()
