"""Checkpoints in Google's store: written, read and replaced on a server that speaks as it does."""

import logging
import socket

import fsspec
import pytest
import safetensors.torch
import torch
from gcp_storage_emulator.server import create_server

from shardspec import merge, reshard
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from shardspec.checkpoint.storage.object_store import shared_store
from shardspec.errors import OutputExistsError
from tests.checkpoint.formats.reading import assert_same, read_whole
from tests.checkpoint.stores import MESH, RULES, STATE, names, upload


@pytest.fixture(scope="module", autouse=True)
def gs():
    """A server with a bucket of the name `models`, which the environment names."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="models")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        # The server knows plain buckets only, and no accounts.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        store = fsspec.filesystem("gs", token="anon")
        store.clear_instance_cache()
        shared_store.cache_clear()
        yield
        store.clear_instance_cache()
        shared_store.cache_clear()
    server.stop()


def test_there_and_back(forms, tmp_path):
    root = "gs://models/a"
    upload(forms / "own", f"{root}/own")
    assert_same(read_whole(f"{root}/own"), STATE)
    merge(f"{root}/own", f"{root}/x.pt")
    merge(f"{root}/own", tmp_path / "x.pt")
    store = fsspec.filesystem("gs")
    assert store.cat_file(f"{root}/x.pt") == (tmp_path / "x.pt").read_bytes()
    merge(f"{root}/x.pt", f"{root}/hub", max_shard_bytes=100)
    assert list(diff_checkpoints(f"{root}/hub", forms / "own")) == []
    before = names(root)
    with pytest.raises(OutputExistsError, match="exists; choose another name, or overwrite"):
        merge(f"{root}/own", f"{root}/x.pt")
    assert names(root) == before
    merge(f"{root}/own", f"{root}/x.pt", overwrite=True, dtype="bf16")
    assert read_whole(f"{root}/x.pt")["a.w"].dtype == torch.bfloat16
    reshard(f"{root}/own", f"{root}/hub", device_mesh=MESH, rules=RULES, overwrite=True)
    assert verify_checkpoint(f"{root}/hub").flaws == ()
    assert not [name for name in names(root) if "model" in name or "shardspec-" in name]
    merge(f"{root}/hub", tmp_path / "back.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "back.safetensors"), STATE)
