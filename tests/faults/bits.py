"""Every dtype, with NaNs of every payload, -0 and subnormals: the same bits come out."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.formats.safetensors import read_header
from shardspec.checkpoint.storage import storage_path
from tests.faults.harness import Case

__all__ = ["CUTS", "DTYPES", "bits"]

DTYPES: Final = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2", "complex64"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
CUTS: Final = (
    ((6,), "[S0,R]"),
    ((2, 3), "[S0,S1]"),
    ((3, 2), "[R,S10]"),
    ((2, 2, 2), "[S20,S1]"),
    ((4,), "[R,R]"),
)
_OTHER: Final = DeviceMesh(range(15), (3, 5))
_Step = Callable[[Path, Path], object]


def _whole(source: Path, out: Path) -> object:
    return merge(source, out, format="safetensors")


def _columns(source: Path, out: Path) -> object:
    return reshard(source, out, device_mesh=_OTHER, rules={"*": "[R,S01]"})


def _blocks(source: Path, out: Path) -> object:
    return reshard(source, out, device_mesh=_OTHER, rules={"*": "[S1,S0]"})


def _dcp(source: Path, out: Path) -> object:
    return reshard(source, out, device_mesh=_OTHER, rules={"*": "[S0,S1]"}, format="dcp")


def _torch(source: Path, out: Path) -> object:
    return merge(source, out, format="torch")


def _huggingface(source: Path, out: Path) -> object:
    return merge(source, out, max_shard_bytes=100_000)


_WAYS: Final[dict[str, tuple[_Step, ...]]] = {
    "merge": (_whole,),
    "reshard, merge": (_columns, _whole),
    "reshard twice, merge": (_blocks, _columns, _whole),
    "DCP, merge": (_dcp, _whole),
    "torch file, merge": (_torch, _whole),
    "Hugging Face shards, reshard, merge": (_huggingface, _blocks, _whole),
}


_SAMPLE: Final = ((0, 0), (1, 3), (2, 1))


def bits(place: Path, whole: bool) -> Iterator[Case]:
    """Send every dtype, from every cut, every way."""
    with np.load(place / "bytes.npz") as saved:
        expected = {name: saved[name].tobytes() for name in saved.files}
    assert expected.keys() == set(DTYPES)
    for number, (shape, spec) in enumerate(CUTS):
        for turn, (way, steps) in enumerate(_WAYS.items()):
            if not whole and (number, turn) not in _SAMPLE:
                continue
            at = place / f"saved{number}"
            for count, step in enumerate(steps):
                out = place / f"out{number}-{turn}-{count}"
                step(at, out)
                at = out
            with storage_path(at).open() as file:
                entries = {entry.name: entry for entry in read_header(file).entries}
                found = {n: (e.dtype, file.read(e.offset, e.num_bytes)) for n, e in entries.items()}
            for name in DTYPES:
                label = f"{name} saved as {spec} on {shape}: {way}"
                yield Case(label, partial(_same, found.get(name), (name, expected[name])))


def _same(found: object, expected: object) -> None:
    assert found == expected
