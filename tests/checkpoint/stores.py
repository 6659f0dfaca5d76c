"""Stores to read from and write to: memory, one that counts or spoils, and a real S3 server."""

import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, ClassVar
from urllib.request import Request, urlopen

import fsspec
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardspec import DeviceMesh, DTensor, merge, save_sharded
from shardspec.checkpoint.storage.object_store import shared_store
from shardspec.cli.main import cli

STATE = {
    "a.w": torch.randn(37, 11, generator=torch.Generator().manual_seed(1)),
    "b.w": torch.arange(15.0).view(5, 3).half(),
    "n": torch.arange(4),
    "s": torch.tensor(2.5),
}
MESH = DeviceMesh(range(6), (2, 3))
RULES = {"*.w": "[S10,R]"}
ROOTS = ("memory://models", "s3://models")


class CountingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Memory that notes what is asked of it, and may lose what it was given."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[list[int]] = []
    """Size of every range that was read."""
    lose: ClassVar[set[str]] = set()
    """What the names of files contain of which the last byte does not arrive."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end, **kwargs)
        self.requests.append(len(data))
        return data

    def info(self, path, **kwargs):
        found = super().info(path, **kwargs)
        if found["type"] == "file" and any(name in path for name in self.lose):
            found = found | {"size": found["size"] - 1}
        return found


class SharedStore(CountingStore):
    """Memory that threads share, as they do a store that is far away; some requests meet."""

    protocol = "together"
    async_impl = True
    mirror_sync_methods = False
    meeting: ClassVar[list[Barrier]] = []
    """If there is one, so many requests have to be under way at once, as often as it is there."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("together://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        try:
            meeting = self.meeting.pop()
        except IndexError:
            pass
        else:
            meeting.wait(60)
        return super().cat_file(path, start, end, **kwargs)

    def cat_ranges(self, paths, starts, ends, **_):
        """Ask for all of them at once, as a store that is far away is asked."""

        def one(path, start, end):
            try:
                return self.cat_file(path, start, end)
            except OSError as error:
                return error

        with ThreadPoolExecutor(len(paths)) as pool:
            return list(pool.map(one, paths, starts, ends))


class NewStore(SharedStore):
    """The same, of which fsspec makes another one whenever it is asked."""

    protocol = "new"
    cachable = False


fsspec.register_implementation("new", NewStore, clobber=True)
fsspec.register_implementation("counted", CountingStore, clobber=True)
fsspec.register_implementation("together", SharedStore, clobber=True)


@contextmanager
def s3_server():
    """Run a server that speaks S3, and let the environment name it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        store = fsspec.filesystem("s3")
        shared_store.cache_clear()
        store.mkdir("models")
        try:
            yield
        finally:
            store.clear_instance_cache()
            shared_store.cache_clear()
            # What it holds outlives it.
            urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
            server.stop()


def upload(path, url):
    """Copy a file or a directory with all below it to a URL."""
    store = fsspec.core.url_to_fs(url)[0]
    if path.is_file():
        store.pipe_file(url, path.read_bytes())
    else:
        for file in path.rglob("*"):
            if file.is_file():
                store.pipe_file(f"{url}/{file.relative_to(path)}", file.read_bytes())


def names(url):
    """Return the names of all files below a URL."""
    store, root = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    return sorted(name.removeprefix(root).lstrip("/") for name in store.find(url))


def write_forms(at):
    """Write one checkpoint in every form."""
    cut = {name: DTensor(v, MESH, "[S10,R]") if v.dim() == 2 else v for name, v in STATE.items()}
    save_sharded(cut, at / "own")
    merge(at / "own", at / "whole.safetensors")
    merge(at / "own", at / "hub", max_shard_bytes=100)
    torch.save({**STATE, "step": 7}, at / "whole.pt")
    with warnings.catch_warnings():
        # That there is no process group.
        warnings.simplefilter("ignore")
        dcp_save(dict(STATE), checkpoint_id=at / "dcp", no_dist=True)
    (at / "ranks").mkdir()
    (at / "bin").mkdir()
    (at / "sharded").mkdir()
    for rank in range(2):
        torch.save({**STATE, "step": 7}, at / "ranks" / f"model_world_size_2_rank_{rank}.pt")
        place = at / "megatron" / "iter_0000003" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        torch.save({"model": {"w": STATE["n"]}}, place / "model_optim_rng.pt")
    (at / "megatron" / "latest_checkpointed_iteration.txt").write_text("3")
    torch.save(STATE, at / "bin" / "pytorch_model.bin")
    offsets = {name: {"saved_offsets": [0] * v.dim()} for name, v in STATE.items()}
    safetensors.torch.save_file(
        STATE,
        at / "sharded" / "shard-00001-model-00001-of-00001.safetensors",
        {"DCP_SHARDING_INFO": str(offsets).replace("'", '"'), "DCP_VERSION": "1.0"},
    )


FORMS: dict[str, dict[str, Any]] = {
    "own": {},
    "whole.safetensors": {},
    "hub": {},
    "hub/model.safetensors.index.json": {},
    "whole.pt": {},
    "dcp": {},
    "ranks": {},
    "ranks/model_world_size_2_rank_1.pt": {},
    "bin": {},
    "sharded": {"ranks": 1},
    "megatron": {"ranks": 2, "source_rules": {"w": "[R]"}},
}
"""Folder or file name to what has to be said to open it."""


def failed(*args):
    """Return the one line with which a command ends."""
    result = CliRunner().invoke(cli, [*map(str, args)], prog_name="shardspec")
    assert result.exit_code == 3, result.output
    lines = result.output.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    return lines[0]
