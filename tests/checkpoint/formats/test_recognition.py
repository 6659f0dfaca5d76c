"""What a format is recognized by: the names in a directory, and how a file begins."""

import pytest
import safetensors.torch
import torch

from shardspec.checkpoint.formats import (
    MODULES,
    built_in,
)
from tests.checkpoint.formats.reading import assert_same, read_whole


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        ["model.fp16.safetensors.index.json"],
        ["model.safetensors-00001-of-00002"],
        ["sharding_info.json"],
        [".metadata"],
        ["__3_0.distcp"],
        ["__0.metadata"],
        ["mp_rank_00_001"],
        ["iter_0000100"],
        ["latest_checkpointed_iteration.txt"],
        ["shard-00001-model-00001-of-00002.safetensors"],
        ["zero", "mp_rank_00_model_states.pt"],
        ["zero_to_fp32.py"],
        ["global_step12"],
        ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        ["zero_pp_rank_0_mp_rank_00_model_states.pt"],
        ["consolidated.00.pth"],
        ["model_world_size_2_rank_1.pt"],
        ["rank1.bin"],
        ["pytorch_model.bin"],
        ["pytorch_model-00001-of-00002.bin"],
        ["pytorch_model.bin.index.json"],
    ],
    ids=" ".join,
)
def test_modules_that_are_asked_are_all_that_recognize_names(names):
    every = [form.name for form in built_in() if form.recognizes(names)]
    assert every
    assert [form.name for form in built_in(names) if form.recognizes(names)] == every
    assert len(list(built_in(names))) < len(MODULES) / 2


def test_a_header_that_begins_like_a_zip(tmp_path):
    """Of 19,280 bytes, whose length is written as b"PK"."""
    file = tmp_path / "x.safetensors"
    for pad in range(19_000, 19_280):
        safetensors.torch.save_file({"w": torch.ones(2)}, file, {"k": "x" * pad})
        if file.read_bytes().startswith(b"PK"):
            break
    assert file.read_bytes()[:3] == b"PK\0"
    assert_same(read_whole(file), {"w": torch.ones(2)})
