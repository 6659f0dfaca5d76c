"""Files of a limited size, and an index as transformers reads it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from shardspec import merge
from shardspec.errors import CheckpointError
from tests.checkpoint.writers.states import check_same, save, state


def read(directory):
    """Read by the index, as transformers does."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {name: load_file(directory / name) for name in set(index["weight_map"].values())}
    return {name: files[file][name] for name, file in index["weight_map"].items()}, index


@pytest.mark.parametrize("limit", [1, 100, 1000, 2000])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_file_keeps_to_the_limit(tmp_path, limit, threads):
    ckpt = save(tmp_path / "ckpt", state())
    report = merge(ckpt, tmp_path / "out", max_shard_bytes=limit, threads=threads)
    found, index = read(tmp_path / "out")
    check_same(found, state())
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state().items()}
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(report.files)
    held: dict[str, list[int]] = {}
    for name, file in index["weight_map"].items():
        held.setdefault(file, []).append(sizes[name])
    for of_file in held.values():
        assert sum(of_file) <= limit or len([size for size in of_file if size]) == 1
    count = len(held)
    assert set(held) == {f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}


def test_one_file_needs_no_index(tmp_path):
    ckpt = save(tmp_path / "ckpt", {"w": torch.ones(3)})
    assert merge(ckpt, tmp_path / "out", format="huggingface").files == ("model.safetensors",)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_limit_that_holds_nothing(tmp_path):
    ckpt = save(tmp_path / "ckpt", {"w": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"files of at most 0 bytes .* or it is below 1"):
        merge(ckpt, tmp_path / "out", max_shard_bytes=0)
    with pytest.raises(CheckpointError, match="the format 'torch' has no such limit"):
        merge(ckpt, tmp_path / "out", format="torch", max_shard_bytes=9)
    assert not (tmp_path / "out").exists()
