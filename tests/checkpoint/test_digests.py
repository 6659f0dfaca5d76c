"""Digests: what is saved, every way in which the bytes of a box come by, and what a flip does."""

import json
import os
import zlib
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from shardspec import DeviceMesh, DTensor, load_sharded, merge, reshard, save_sharded
from shardspec.checkpoint.catalog import Digest, StoredBox, StoredTensor
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.convert.copy import Checks
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.errors import CheckpointError
from tests.checkpoint.handmade import handmade, sample

MESH = DeviceMesh(range(6), (2, 3))
SPECS = ["[S0,R]", "[R,S1]", "[S1,S0]", "[S01,R]", "[R,S01]", "[R,R]"]


def save(directory, shape=(11, 13)):
    whole = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    save_sharded({spec: DTensor(whole, MESH, spec) for spec in SPECS}, directory)
    return directory


def test_every_box_has_the_digest_of_its_bytes(tmp_path):
    source = open_checkpoint(save(tmp_path / "ckpt"))
    seen = 0
    for name in source.names:
        tensor = source.tensor(name)
        for stored in tensor.boxes:
            size = 4 * int(np.prod([hi - lo for lo, hi in stored.box]))
            data = Path(stored.path).read_bytes()[stored.offset : stored.offset + size]
            assert stored.digest == Digest(zlib.crc32(data), stored.offset, len(data))
            seen += 1
    assert seen == 2 + 3 + 6 + 6 + 6 + 1


def flip(stored, at=0):
    data = bytearray(Path(stored.path).read_bytes())
    data[stored.offset + at] ^= 1
    Path(stored.path).write_bytes(data)
    return lambda: Path(stored.path).write_bytes(unflipped(data, stored.offset + at))


def unflipped(data, at):
    back = bytearray(data)
    back[at] ^= 1
    return bytes(back)


# Rows longer than the buffer, and columns over many blocks.
@pytest.mark.parametrize("shape", [(11, 13), (3, 300_007), (2500, 211)])
def test_a_flip_in_any_box_is_found_by_merging_and_loading(tmp_path, shape):
    source = open_checkpoint(save(tmp_path / "ckpt", shape))
    merge(tmp_path / "ckpt", tmp_path / "good")
    for name in source.names:
        boxes = source.tensor(name).boxes
        for stored in (boxes[0], boxes[-1]) if shape == (11, 13) else boxes[-1:]:
            restore = flip(stored)
            with pytest.raises(CheckpointError, match=r"has CRC-32 .* was saved") as caught:
                merge(tmp_path / "ckpt", tmp_path / "out")
            assert f"tensor {name!r}: rank {stored.rank}'s box" in str(caught.value)
            assert not (tmp_path / "out").exists()
            with pytest.raises(CheckpointError, match="CRC-32"):
                load_sharded(tmp_path / "ckpt", DeviceMesh(range(1)), {"*": "[R,R]"})
            merge(tmp_path / "ckpt", tmp_path / "flipped", verify=False, overwrite=True)
            assert (tmp_path / "flipped").read_bytes() != (tmp_path / "good").read_bytes()
            restore()
    merge(tmp_path / "ckpt", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "good").read_bytes()


@pytest.mark.parametrize("format", ["dcp", "shardspec"])
def test_bytes_that_did_not_arrive_are_found_by_verify(tmp_path, monkeypatch, format):
    """The output has the digests of what was meant; it is not looked at again while merging."""
    save(tmp_path / "ckpt")
    write = os.pwrite
    changed: list[int] = []

    def miswrite(fd, data, at):
        # Headers come first.
        if at and not changed and len(data) > 100:
            changed.append(at)
            data = bytes([data[0] ^ 1]) + data[1:]
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", miswrite)
    mesh = DeviceMesh(range(2))
    reshard(tmp_path / "ckpt", tmp_path / "out", device_mesh=mesh, format=format)
    monkeypatch.undo()
    assert len(changed) == 1
    with pytest.raises(CheckpointError, match="CRC-32"):
        verify_checkpoint(tmp_path / "out")


def test_a_save_without_digests_is_read(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    assert {b.digest for n in ("w", "b") for b in open_checkpoint(ckpt).tensor(n).boxes} == {None}
    assert merge(ckpt, tmp_path / "out").tensors == 2


@pytest.mark.parametrize("bad", ["", "123", "0000000G", "ABCDEF01", "0123456789", 7])
def test_a_digest_that_is_none(tmp_path, bad):
    made = handmade(sample())
    made.info["files"][0]["boxes"]["w"]["crc32"] = bad
    with pytest.raises(
        CheckpointError, match=r"files\[0\].boxes\['w'\] should have .* a crc32 of eight"
    ):
        open_checkpoint(made.write(tmp_path / "ckpt"))


def test_stretches_in_any_order(tmp_path):
    data = bytes(range(60))
    stretches = [(0, 7), (7, 20), (20, 21), (21, 60)]
    for good in (True, False):
        stored = StoredBox(
            ((0, 60),), (), 0, tmp_path, 0, Digest(zlib.crc32(data) ^ (not good), 0, 60)
        )
        tensor = StoredTensor("w", (60,), "uint8", None, (), (stored,))
        for order in permutations(stretches):
            checks = Checks(tensor)
            for lo, hi in order[:-1]:
                checks.add(stored, lo, data[lo:hi])
            assert stored in checks
            lo, hi = order[-1]
            if good:
                checks.add(stored, lo, data[lo:hi])
                assert stored not in checks
            else:
                with pytest.raises(CheckpointError, match="tensor 'w': rank 0's box"):
                    checks.add(stored, lo, data[lo:hi])


def test_what_was_not_seen_is_read_in_the_end(tmp_path):
    data = bytes(range(200))
    path = tmp_path / "data"
    path.write_bytes(data)
    # The digest covers 10 bytes before the box and 40 behind it.
    for good in (True, False):
        digest = Digest(zlib.crc32(data[10:180]) ^ (not good), 10, 170)
        stored = StoredBox(((0, 120),), (), 0, LocalPath(path), 20, digest)
        tensor = StoredTensor("w", (120,), "uint8", None, (), (stored,))
        for seen in (
            [],
            [(20, 140)],
            [(10, 30), (50, 60)],
            [(at, at + 1) for at in range(10, 180, 2)],
        ):
            checks = Checks(tensor)
            for lo, hi in seen:
                checks.add(stored, lo, data[lo:hi])
            with OpenFiles() as files:
                if good:
                    checks.finish(files)
                    assert stored not in checks
                else:
                    with pytest.raises(CheckpointError, match="tensor 'w': rank 0's box"):
                        checks.finish(files)


def test_the_info_says_them(tmp_path):
    info = json.loads((save(tmp_path / "ckpt") / "sharding_info.json").read_text())
    digests = [box["crc32"] for file in info["files"] for box in file["boxes"].values()]
    assert len(digests) == 24
    assert all(len(text) == 8 for text in digests)


def test_boxes_in_one_digested_stretch_are_judged_together(tmp_path):
    """As parts of a storage are: nothing is read twice, and stretches that overlap do no harm."""
    data = bytes(range(48))
    path = tmp_path / "file"
    path.write_bytes(data)
    digest = Digest(zlib.crc32(data), 0, 48)
    halves = [StoredBox(((lo, lo + 24),), (), 0, LocalPath(path), lo, digest) for lo in (0, 24)]
    tensor = StoredTensor("w", (48,), "uint8", None, (), tuple(halves))
    for order in permutations([(0, 0, 20), (1, 30, 48), (1, 24, 30), (0, 10, 24), (1, 26, 40)]):
        checks = Checks(tensor)
        for which, start, end in order:
            checks.add(halves[which], start, data[start:end])
        assert (halves[0] in checks) == (halves[1] in checks)
        with OpenFiles() as files:
            checks.finish(files)
        assert halves[0] not in checks
    path.write_bytes(data[:40] + b"x" + data[41:])
    with OpenFiles() as files, pytest.raises(CheckpointError, match="CRC-32"):
        Checks(tensor).finish(files)
    checks = Checks(tensor)
    checks.add(halves[0], 0, data[:24])
    with pytest.raises(CheckpointError, match="CRC-32"):
        checks.add(halves[1], 24, b"x" + data[25:])
