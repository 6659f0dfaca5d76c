"""Files that were cut short: headers at every byte, payloads at a thousand places."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.faults.checks import refused
from tests.faults.harness import Case
from tests.faults.samples import index, own, plain, split

__all__ = ["headers", "payloads"]


def _cut(path: Path, data: bytes, length: int, source: Path, place: Path) -> None:
    path.write_bytes(data[:length])
    refused(["merge", source, "-o", place / "out"], place, str(path))


def _header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def headers(place: Path, whole: bool) -> Iterator[Case]:
    """Cut what describes a checkpoint at every byte: headers, info, index, pickles, zips."""
    single = plain(place / "single.safetensors")
    sharded, indexed = own(place / "own"), split(place / "split")
    for source, path in (
        (single, single),
        (sharded, sharded / "rank4.safetensors"),
        (sharded, sharded / "sharding_info.json"),
        (indexed, indexed / "model-00001-of-00002.safetensors"),
        (indexed, index(indexed)),
        (place / "whole.pt", place / "whole.pt"),
        (place / "dcp", place / "dcp" / ".metadata"),
        (place / "dcp", place / "dcp" / "__0_0.distcp"),
    ):
        data = path.read_bytes()
        end = _header_end(data) if path.suffix == ".safetensors" else len(data)
        for length in range(0, end, 1 if whole else 67):
            yield Case(
                f"{path.name} cut to {length} bytes",
                partial(_cut, path, data, length, source, place),
            )
        path.write_bytes(data)


def payloads(place: Path, whole: bool) -> Iterator[Case]:
    """Cut data at every 1/250 of it, in four kinds of files."""
    single = plain(place / "single.safetensors", scale=20)
    sharded, indexed = own(place / "own"), split(place / "split")
    count = 250 if whole else 5
    for source, path in (
        (single, single),
        (sharded, sharded / "rank4.safetensors"),
        (sharded, sharded / "rank0.safetensors"),
        (indexed, indexed / "model-00001-of-00002.safetensors"),
    ):
        data = path.read_bytes()
        start = _header_end(data)
        for part in range(count):
            length = start + (len(data) - start) * part // count
            yield Case(
                f"{path.name} cut to {length} bytes",
                partial(_cut, path, data, length, source, place),
            )
        path.write_bytes(data)
