"""A format in a separate package: NumPy's ``.npz``, one file per rank, read and written.

shardspec needs only the value `FORMAT`, which it finds by an entry point of the package:

    [project.entry-points."shardspec.formats"]
    npz = "format_plugin:FORMAT"

Run as a program, this file installs itself into a temporary directory, and uses the format.

    python examples/format_plugin.py
"""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile
from zlib import crc32

import numpy as np
from isal.isal_zlib import crc32_combine

from shardspec import DeviceMesh, ShardingSpec, load_sharded, merge, reshard
from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.catalog import (
    Catalog,
    Digest,
    Extent,
    OutputFile,
    OutputTensor,
    RawBytes,
    StoredBox,
    StoredTensor,
    Target,
    assign_boxes,
    whole_box,
)
from shardspec.checkpoint.formats import Format, OpenOptions, Wanted
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.errors import CheckpointError

INFO = "boxes.json"
"""File in a rank's archive: ranks, mesh and tensors of the save, and the archive's boxes."""
VERSION = 20, 0x808, 0, 0, 33
"""Header of a zip: version; checksums follow the data and names are UTF-8; not compressed; 1980."""
DTYPES = "float64 float32 float16 complex64 bool int64 int32 int16 int8 uint64 uint32 uint16 uint8"
is_of_rank = re.compile(r"rank-\d{5}\.npz").fullmatch


# --- reading: the positions of the bytes of every array


def open_npz(place: StoragePath, _: OpenOptions) -> Catalog:
    """Return the catalog of one file, or of the files of all ranks in a directory."""
    whole = not place.is_dir()
    names = [] if whole else list(filter(is_of_rank, place.names()))
    paths = [place] if whole else [place / name for name in names]
    boxes: dict[str, list[StoredBox]] = {}
    known: dict[str, Any] = {"tensors": {}}
    for rank, path in enumerate(paths):
        info, arrays = read_file(path)
        if whole:  # every array is a whole tensor, as `numpy.savez` writes them
            held = {name: (name, whole_box(array[0])) for name, array in arrays.items()}
            known["tensors"] = {name: [*array[:2], None] for name, array in arrays.items()}
        else:
            own = info.pop("boxes", {})
            known = info if rank == 0 else known
            if info != known or known.get("ranks") != len(paths) or own.keys() != arrays.keys():
                raise CheckpointError(
                    f"{path}: is of another save than the others; restore those of one save"
                )
            held = {name: (tensor, tuple(map(tuple, box))) for name, (tensor, box) in own.items()}
        for name, (tensor, box) in held.items():
            shape, _, offset, digest, strides = arrays[name]
            boxes.setdefault(tensor, [])
            if prod(shape):
                boxes[tensor].append(StoredBox(box, (), rank, path, offset, digest, strides))
    tensors = {}
    for name, (shape, dtype, text) in known["tensors"].items():
        spec = None if text is None else ShardingSpec.parse(text)
        stored = tuple(boxes.get(name, ()))
        tensors[name] = StoredTensor(name, tuple(shape), dtype, spec, (), stored)
    mesh = None if whole else DeviceMesh(range(len(paths)), known["mesh"])
    return Catalog(FORMAT.called, place, tensors, paths, mesh)


def read_file(path: StoragePath) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the content of `INFO`, and per array shape, dtype, offset, digest and strides."""
    info, arrays = {}, {}
    try:
        with open(path, "rb") as file, ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename == INFO:
                    info = json.loads(archive.read(entry))
                    continue
                with archive.open(entry) as member:
                    np.lib.format.read_magic(member)
                    shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
                    head = member.tell()
                if dtype.name not in DTYPES.split() or entry.compress_type != ZIP_STORED:
                    raise ValueError(f"{entry.filename} is compressed, or of {dtype}")
                file.seek(entry.header_offset + 26)
                start = entry.header_offset + 30 + sum(struct.unpack("<2H", file.read(4)))
                strides = tuple(dtype.itemsize * prod(shape[:dim]) for dim in range(len(shape)))
                arrays[entry.filename.removesuffix(".npy")] = (
                    *(shape, dtype.name, start + head),
                    Digest(entry.CRC, start, entry.file_size),
                    strides if fortran else None,
                )
    except (BadZipFile, ValueError, EOFError, struct.error) as error:
        raise CheckpointError(f"{path}: is not a file of NumPy ({error}); restore it") from None
    return info, arrays


# --- writing: which bytes go where


def lay_out(_: Catalog, wanted: Wanted) -> Target:
    """Return one file of global tensors, or one file per rank."""
    by_name = {tensor.name: tensor for tensor in wanted.tensors}
    for tensor in wanted.tensors:
        if tensor.dtype not in DTYPES.split():
            raise CheckpointError(f"NumPy has no {tensor.dtype}, of {tensor.name!r}; cast it")
    if wanted.way == "merged":
        whole = [(tensor.name, tensor, whole_box(tensor.shape)) for tensor in wanted.tensors]
        return Target((npz_file(wanted.name, {}, whole),), False, wanted.tensors, digested=True)
    mesh, files = wanted.mesh, []
    tensors = {n: [at.global_shape, at.dtype, str(at.spec)] for n, at in wanted.layouts.items()}
    info = {"ranks": mesh.size(), "mesh": mesh.shape, "tensors": tensors}
    for rank, entries in enumerate(assign_boxes(mesh, wanted.layouts).values()):
        held = [(f"{at}.{e.tensor}", by_name[e.tensor], e.box) for at, e in enumerate(entries)]
        boxes = {name: (tensor.name, box) for name, tensor, box in held}
        files.append(npz_file(f"rank-{rank:05}.npz", info | {"boxes": boxes}, held))
    return Target(tuple(files), True, wanted.tensors, digested=True)


def npz_file(
    name: str, info: Mapping[str, object], arrays: Sequence[tuple[str, OutputTensor, Box]]
) -> OutputFile:
    """Return a zip of arrays; the CRC-32 of an array follows it, and is in the directory too."""
    raw, extents, members, end = [], [], [], 0
    parts: list[tuple[str, bytes, Any]] = [
        (f"{key}.npy", npy_head(tensor.dtype, box), (tensor, box)) for key, tensor, box in arrays
    ]
    for key, head, part in [*parts, *([(INFO, json.dumps(info).encode(), None)] if info else [])]:
        file_name = key.encode()
        local = struct.pack("<4s5H3I2H", b"PK\3\4", *VERSION, 0, 0, 0, len(file_name), 0)
        raw.append(RawBytes(end, local + file_name + head))
        data = end + len(local) + len(file_name) + len(head)
        if part is not None:
            extents.append(Extent(part[0], part[1], data))
        num_bytes = len(head) + (extents[-1].num_bytes if part else 0)
        members.append((file_name, head, num_bytes, end))
        end = data - len(head) + num_bytes + 16
    directory_bytes = sum(46 + len(member[0]) for member in members)

    def sums(number: int, crcs: Sequence[int]) -> tuple[int, int, int]:
        _, head, num_bytes, _ = members[number]
        crc, rest = crc32(head), num_bytes - len(head)
        crc = int(crc32_combine(crc, crcs[number], rest)) if number < len(extents) else crc
        return crc, num_bytes, num_bytes

    def trailer(crcs: Sequence[int]) -> Iterator[RawBytes]:
        for number, (file_name, _, num_bytes, start) in enumerate(members):
            behind = start + 30 + len(file_name) + num_bytes
            yield RawBytes(behind, partial(behind_member, number, crcs))
        yield RawBytes(end, partial(directory, crcs))

    def behind_member(number: int, crcs: Sequence[int]) -> bytes:
        return struct.pack("<4s3I", b"PK\7\10", *sums(number, crcs))

    def directory(crcs: Sequence[int]) -> bytes:
        entries = b""
        for number, (file_name, *_, start) in enumerate(members):
            same = (*VERSION, *sums(number, crcs), len(file_name))
            entries += struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, *same, *[0] * 5, start) + file_name
        counts = 0, 0, len(members), len(members), len(entries), end, 0
        return entries + struct.pack("<4s4H2IH", b"PK\5\6", *counts)

    return OutputFile(name, end + directory_bytes + 22, raw, extents, trailer)


def npy_head(dtype: str, box: Box) -> bytes:
    """Return the header of an array in NumPy's format."""
    head = BytesIO()
    said = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": box_shape(box)}
    np.lib.format.write_array_header_1_0(head, said)
    return head.getvalue()


FORMAT = Format(
    name="npz",
    recognizes=lambda names: any(map(is_of_rank, names)),
    open=open_npz,
    lay_out=lay_out,
    writes=("merged", "sharded"),
    extensions=(".npz",),
    owns=lambda name: is_of_rank(name) is not None,
    keeps="tensors",
    reads_file=lambda start: start.is_zip and start.name.endswith(".npz"),
    known_by="rank-00000.npz",
)


# --- used once it is installed


def main() -> None:
    """Install the format; convert a file of NumPy to shards, and back."""
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        package = at / "npz_format-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: npz-format\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(
            "[shardspec.formats]\nnpz = format_plugin:FORMAT\n"
        )
        sys.path.insert(0, directory)
        rng = np.random.default_rng(0)
        model: dict[str, Any] = {
            "w": rng.random((6, 5), np.float32),
            "b": rng.random(6),
            "step": np.array(7),
        }
        np.savez(at / "model.npz", **model)

        mesh = DeviceMesh(range(4), (2, 2))
        reshard(
            at / "model.npz", at / "cut", device_mesh=mesh, rules={"w": "[S0,S1]"}, format="npz"
        )
        print("sharded:", *sorted(path.name for path in (at / "cut").iterdir()))
        merge(at / "cut", at / "again.npz")
        merge(at / "cut", at / "model.safetensors")
        again = np.load(at / "again.npz")
        print("equal:  ", all(np.array_equal(again[name], model[name]) for name in model))
        w = load_sharded(at / "cut")["w"]
        print(f"loaded:  w as {w.sharding_spec}, {tuple(w.to_local(3).shape)} on device 3")
        for command in ("inspect", "verify"):
            call = [sys.executable, "-m", "shardspec", command, "cut"]
            path = os.pathsep.join([directory, str(Path(__file__).parent), *sys.path])
            done = subprocess.run(call, cwd=at, env=os.environ | {"PYTHONPATH": path}, check=True)
            assert done.returncode == 0


if __name__ == "__main__":
    main()
