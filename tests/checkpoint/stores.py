"""Stores to read from and write to: memory, one that counts or spoils, and a real S3 server."""

import logging
import os
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.moto_server.threaded_moto_server import ThreadedMotoServer


class CountingStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Memory that notes what is asked of it, and may give back other bytes than it was given."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[list[int]] = []
    """Size of every range that was read."""
    spoil: ClassVar[set[str]] = set()
    """Names of files whose last byte is given back with a bit flipped."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end, **kwargs)
        self.requests.append(len(data))
        if path.rpartition("/")[2] in self.spoil and end == self.info(path)["size"]:
            data = data[:-1] + bytes([data[-1] ^ 4])
        return data


fsspec.register_implementation("counted", CountingStore, clobber=True)


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
        store.mkdir("models")
        try:
            yield
        finally:
            store.clear_instance_cache()
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
