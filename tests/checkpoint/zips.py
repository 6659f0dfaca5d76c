"""What the tests of torch's zips share: reading one, and the line that refuses it."""

import pytest

from shardspec.checkpoint.files import SourceFile
from shardspec.checkpoint.torch_values import read_torch, tensor_place
from shardspec.checkpoint.torch_zip import read_torch_zip
from shardspec.errors import CheckpointError

__all__ = ["Counted", "read", "refused"]


class Counted(SourceFile):
    """A file that counts how often it is read, and how much."""

    reads = 0
    total = 0

    def read_into(self, buffer, offset):
        self.reads += 1
        self.total += len(buffer)
        super().read_into(buffer, offset)


def read(path, data, *stretch):
    """Return the bytes of every tensor of a dict that torch has saved."""
    path.write_bytes(data)
    with SourceFile(path) as file:
        found = read_torch_zip(file, *stretch)
        state = read_torch(file, found)
        assert isinstance(state, dict)
        places = {name: tensor_place(tensor, file, found) for name, tensor in state.items()}
        sizes = {name: found.num_bytes(tensor.storage.key) for name, tensor in state.items()}
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
