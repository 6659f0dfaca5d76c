"""A checkpoint of thousands of tensors and ranks, with real headers and no data: for planning.

python -m benchmarks.checkpoint_planning /tmp/large --tensors 10000 --mesh 16x8x8
"""

import argparse
from pathlib import Path
from typing import Final

from shardspec import DeviceMesh, Layout
from shardspec.checkpoint.targets import Wanted
from shardspec.checkpoint.writers.sharded import sharded_target

__all__ = ["RULES", "main", "write_large"]

RULES: Final = {
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


def write_large(at: Path, tensors: int, mesh: DeviceMesh) -> None:
    """Write a checkpoint in shardspec's own form whose files are holes behind their headers."""
    kinds = list(RULES.items())
    wanted, layouts = [], {}
    for number in range(tensors):
        layer, kind = divmod(number, len(kinds))
        name, (shape, spec) = kinds[kind]
        name = f"layers.{layer}.{name}.weight"
        wanted.append(Wanted(name, name, shape, "bfloat16"))
        layouts[name] = Layout(mesh, spec, shape, "bfloat16")
    target = sharded_target(mesh, wanted, layouts)
    at.mkdir(parents=True)
    for file in target.files:
        with (at / file.name).open("wb") as out:
            for piece in file.pieces:
                out.seek(piece.offset)
                out.write(piece.data)
            out.truncate(file.num_bytes)
    assert target.last is not None, "the form has an info"
    for name, data in target.last({file.name: [0] * len(file.slots) for file in target.files}):
        (at / name).write_bytes(data)


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("at", type=Path)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--mesh", default="16x8x8")
    chosen = parser.parse_args()
    shape = [int(size) for size in chosen.mesh.split("x")]
    devices = 1
    for size in shape:
        devices *= size
    write_large(chosen.at, chosen.tensors, DeviceMesh(range(devices), shape))


if __name__ == "__main__":
    main()
