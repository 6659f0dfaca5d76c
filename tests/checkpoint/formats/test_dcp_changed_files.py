"""Files of a directory of torch.distributed.checkpoint that were cut or changed."""

import random
from dataclasses import replace

import pytest
import torch

from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.conftest import Small
from tests.checkpoint.formats.reading import assert_same, read_whole, refused
from tests.checkpoint.formats.test_dcp_spoiled import index_of, read_or_none
from tests.checkpoint.formats.torch_jobs import save_alone

# --- the files cut and changed


def test_files_cut_at_every_so_many_bytes(small):
    path = small.path / "__0_0.distcp"
    data = path.read_bytes()
    for size in range(0, len(data), 37):
        path.write_bytes(data[:size])
        assert refused(small.path).startswith(f"{path}: has {size} bytes, but .metadata lists")


@pytest.mark.parametrize("count", [150, pytest.param(1500, marks=pytest.mark.exhaustive)])
def test_any_byte_of_a_file_changed_is_told_or_does_not_matter(small, count):
    path = small.path / "__0_0.distcp"
    data = path.read_bytes()
    draw = random.Random(13)
    told = 0
    places = draw.sample(range(len(data)), count)
    for at in places:
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 + draw.randrange(255))]) + data[at + 1 :])
        found = read_or_none(small.path)
        if found is None:
            told += 1
            continue
        assert_same(found, small.tensors)
    # Padding, time stamps and records that say nothing of tensors make up the rest.
    assert count // 8 < told < count - count // 15


def test_chunks_that_say_the_same_are_each_compared(tmp_path):
    """Pickles of the same bytes are read once; what they say is held against every chunk."""
    values = {name: torch.arange(6.0).view(2, 3) + 10 * n for n, name in enumerate("abc")}
    save_alone(values, tmp_path / "ckpt")
    small = Small(tmp_path / "ckpt", values)
    assert_same(read_whole(small.path), values)
    metadata = small.metadata()
    entry = metadata.state_dict_metadata["b"]
    entry.properties = replace(entry.properties, dtype=torch.int32)
    small.write(metadata)
    source = open_checkpoint(small.path)
    assert [source.tensor(name).dtype for name in "ac"] == ["float32", "float32"]
    with pytest.raises(
        CheckpointError, match=r"'b'.* is \[2, 3\] of float32 there, but .* of int32"
    ):
        source.tensor("b")
    # The pickle of the last one is damaged, whatever others of its bytes said.
    index = index_of(metadata, "c")
    item = metadata.storage_data[index]
    path = small.path / item.relative_path
    data = bytearray(path.read_bytes())
    at = data.index(b"FloatStorage", item.offset)
    data[at] ^= 1
    path.write_bytes(data)
    source = open_checkpoint(small.path)
    assert source.tensor("a").shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"tensor 'c', .* have changed since the save"):
        source.tensor("c")
