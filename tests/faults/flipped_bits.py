"""Bits that have turned over: in data with digests, in headers without, in pickles."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy

from shardspec.checkpoint.catalog import StoredBox
from shardspec.checkpoint.open import open_checkpoint
from tests.faults.checks import command, one_line, refused, same
from tests.faults.harness import Case
from tests.faults.samples import arrays, cut, own, plain, split

__all__ = ["data", "described", "headers", "pickles"]


def _flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def _stretches(source: Path) -> list[tuple[Path, int, int]]:
    """Return where the data of every box lies: file, first byte, end."""
    opened = open_checkpoint(source)
    found = []
    for name in opened.names:
        tensor = opened.tensor(name)
        for box in tensor.boxes:
            num_bytes = _num_bytes(box, tensor.dtype)
            found.append((Path(box.path), box.offset, box.offset + num_bytes))
    return found


def _num_bytes(box: StoredBox, dtype: str) -> int:
    return int(np.prod([hi - lo for lo, hi in box.box])) * np.dtype(dtype).itemsize


def _caught(path: Path, bit: int, source: Path, place: Path) -> None:
    _flip(path, bit)
    try:
        refused(["merge", source, "-o", place / "out"], place, "CRC-32")
        code, _, err = command(["verify", source])
        assert code == 3, err
        assert "CRC-32" in one_line(err)
    finally:
        _flip(path, bit)


def data(place: Path, whole: bool) -> Iterator[Case]:
    """Flip bits of tensors of which digests were saved: in our form, and in torch's zips."""
    rng = random.Random(5)
    single = plain(place / "single.safetensors", scale=3)
    sources = cut(place / "cut", single), place / "whole.pt", place / "dcp"
    for source, count in zip(sources, (5000, 2500, 2500), strict=True):
        stretches = _stretches(source)
        weights = [end - start for _, start, end in stretches]
        for _ in range(count if whole else count // 250):
            ((path, start, end),) = rng.choices(stretches, weights)
            bit = rng.randrange(start * 8, end * 8)
            yield Case(f"{path.name}, bit {bit}", partial(_caught, path, bit, source, place))


def _refused(path: Path, bit: int, source: Path, place: Path) -> None:
    _flip(path, bit)
    try:
        refused(["merge", source, "-o", place / "out"], place)
    finally:
        _flip(path, bit)


def headers(place: Path, whole: bool) -> Iterator[Case]:
    """Flip every bit of the headers in a checkpoint of our form that has no digests."""
    source = own(place / "own")
    for path in sorted(source.glob("*.safetensors")):
        length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for bit in range(0, length * 8, 1 if whole else 197):
            yield Case(f"{path.name}, bit {bit}", partial(_refused, path, bit, source, place))


def _refused_or_right(path: Path, bit: int, source: Path, place: Path, *, exact: bool) -> None:
    """Flip a bit; what comes out, if anything does, is what was saved (if `exact`) or whole."""
    _flip(path, bit)
    out = place / "out.safetensors"
    try:
        code, _, err = command(["merge", source, "-o", out, "--quiet"])
        if code:
            assert code in (2, 3), (code, err)
            one_line(err)
            assert not out.exists()
        elif exact:
            same(out, arrays())
        else:
            safetensors.numpy.load_file(out)
    finally:
        out.unlink(missing_ok=True)
        _flip(path, bit)


def described(place: Path, whole: bool) -> Iterator[Case]:
    """Flip every bit of our info, of which some do not matter."""
    source = own(place / "own")
    path = source / "sharding_info.json"
    for bit in range(0, path.stat().st_size * 8, 1 if whole else 397):
        yield Case(
            f"{path.name}, bit {bit}",
            partial(_refused_or_right, path, bit, source, place, exact=True),
        )


def pickles(place: Path, whole: bool) -> Iterator[Case]:
    """Flip every bit of an index and of pickles, which may rename a tensor and no one knows."""
    indexed = split(place / "split")
    for source, path in (
        (place / "dcp", place / "dcp" / ".metadata"),
        (place / "whole.pt", place / "whole.pt"),
        (indexed, indexed / "model.safetensors.index.json"),
    ):
        for bit in range(0, path.stat().st_size * 8, 1 if whole else 2003):
            yield Case(
                f"{path.name}, bit {bit}",
                partial(_refused_or_right, path, bit, source, place, exact=False),
            )
