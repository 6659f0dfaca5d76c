"""Checkpoints with real headers and digests whose data are holes, so that any size takes no room.

python -m benchmarks.checkpoint_holes /tmp/large --tensors 10000 --mesh 16x8x8
python -m benchmarks.checkpoint_holes /tmp/16gib --hidden 6016 --vocab 32000 --mesh 2x2
"""

import argparse
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final

from benchmarks.checkpoint_shapes import Model, tensor_parallel_dim
from shardspec import DeviceMesh, Layout
from shardspec.checkpoint.moving.digests import crc32, crc32_combine
from shardspec.checkpoint.writers.sharded import sharded_target
from shardspec.checkpoint.writing.targets import Wanted

__all__ = ["main", "many_tensors", "of_model", "write_holes"]

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


def write_holes(
    at: Path, mesh: DeviceMesh, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    """Write tensors of zeros in shardspec's own form, with holes behind the headers."""
    wanted = [Wanted(name, name, shape, "bfloat16") for name, (shape, _) in tensors.items()]
    layouts = {n: Layout(mesh, spec, shape, "bfloat16") for n, (shape, spec) in tensors.items()}
    target = sharded_target(mesh, wanted, layouts)
    digests: dict[int, int] = {}
    at.mkdir(parents=True)
    for file in target.files:
        with (at / file.name).open("wb") as out:
            for piece in file.pieces:
                out.seek(piece.offset)
                out.write(piece.data)
            out.truncate(file.num_bytes)
        for num_bytes in {slot.num_bytes for slot in file.slots} - digests.keys():
            digests[num_bytes] = _zeros_crc32(num_bytes)
    assert target.last is not None, "the form has an info"
    crcs = {file.name: [digests[slot.num_bytes] for slot in file.slots] for file in target.files}
    for name, data in target.last(crcs):
        (at / name).write_bytes(data)


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
    chosen = parser.parse_args()
    shape = [int(size) for size in chosen.mesh.split("x")]
    if chosen.tensors is not None:
        tensors = many_tensors(chosen.tensors)
    else:
        tensors = of_model(Model(chosen.hidden, chosen.vocab))
    write_holes(chosen.at, DeviceMesh(range(prod(shape)), shape), tensors)


if __name__ == "__main__":
    main()
