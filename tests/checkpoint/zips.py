"""What the tests of torch's zips share: reading one, making one, and the line that refuses it."""

import struct
from typing import NamedTuple

import pytest

from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.checkpoint.storage.local import LocalFile
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.values import tensor_place
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError

__all__ = ["Counted", "handmade", "read", "record", "refused"]


class Record(NamedTuple):
    """Where the bytes of a storage lie."""

    offset: int
    num_bytes: int
    crc32: int | None


def record(found, file, key):
    """Return where a storage lies."""
    said = found.record(f"data/{key}")
    return Record(found.start(file, f"data/{key}"), said.num_bytes, said.crc32)


class Counted(LocalFile):
    """A file that counts how often it is read, and how much."""

    reads = 0
    total = 0

    def read(self, offset, num_bytes):
        self.reads += 1
        self.total += num_bytes
        return super().read(offset, num_bytes)


def read(path, data, *stretch):
    """Return the bytes of every tensor of a dict that torch has saved."""
    path.write_bytes(data)
    with storage_path(path).open() as file:
        found = read_torch_zip(file, *stretch)
        state = read_torch(found, found.pickle(file))
        assert isinstance(state, dict)
        places = {name: tensor_place(tensor, file, found) for name, tensor in state.items()}
        sizes = {
            name: found.record(f"data/{tensor.storage.key}").num_bytes
            for name, tensor in state.items()
        }
        for name, place in places.items():
            assert place.digest is None or place.digest.num_bytes == sizes[name]
        return {name: file.read(place.offset, sizes[name]) for name, place in places.items()}


def refused(path, data, *stretch):
    """Return the one line that refuses it."""
    with pytest.raises(CheckpointError) as caught:
        read(path, data, *stretch)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(path))
    return message.removeprefix(f"{path}: ")


def handmade(records, end=b"", **changes):
    """Return a zip of (name, data) pairs; what is written of each entry may be changed.

    Changes are functions of the entry's number and true value.
    """
    changes = {
        "header": lambda _, value: value,
        "size": lambda _, value: value,
        "packed": lambda _, value: value,
        "flags": lambda _, value: value,
        "name": lambda _, value: value,
        "count": lambda _, value: value,
        "start": lambda _, value: value,
        "length": lambda _, value: value,
        "disk": lambda _, value: value,
    } | changes
    body, listing = b"", b""
    for number, (name, data) in enumerate(records):
        header = len(body)
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0)
        body += name + data
        own = changes["name"](number, name)
        listing += struct.pack(
            "<4s6H3L5H2L",
            *(b"PK\1\2", 20, 20, changes["flags"](number, 0), 0, 0, 0, crc32(data)),
            *(changes["packed"](number, len(data)), changes["size"](number, len(data))),
            *(len(own), 0, 0, changes["disk"](number, 0), 0, 0),
            changes["header"](number, header),
        )
        listing += own
    count = changes["count"](0, len(records))
    start, length = changes["start"](0, len(body)), changes["length"](0, len(listing))
    return (
        body
        + listing
        + end
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, start, 0)
    )
