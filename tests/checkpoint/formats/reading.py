"""What the tests of the formats share: a checkpoint read whole, and the line that refuses it."""

import subprocess
import sys
from math import prod

import numpy as np
import pytest
import torch

from shardspec.checkpoint.compare.coverage import check_replicas, check_tiling
from shardspec.checkpoint.convert.copy import Buffers, Checks, read_box_into
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError


def read_whole(path, **options):
    """Return every tensor of a checkpoint, checked and put together as merging does it."""
    source = open_checkpoint(path, **options)
    whole = {}
    buffers = Buffers()
    with OpenFiles() as files:
        for name in source.names:
            tensor = source.tensor(name)
            assert tensor.name == name
            for group in check_tiling(tensor):
                check_replicas(tensor, group, files)
            flat = np.zeros(prod(tensor.shape) * item_bytes(tensor.dtype), np.uint8)
            box = tuple((0, size) for size in tensor.shape)
            read_box_into(tensor, box, flat.data, files, buffers, checks=Checks(tensor))
            dtype = getattr(torch, tensor.dtype)
            found = torch.from_numpy(flat).view(dtype) if flat.size else torch.empty(0, dtype=dtype)
            whole[name] = found.view(tensor.shape)
    return whole


def assert_same(found, due):
    """Compare names, shapes, dtypes and bits."""
    assert found.keys() == due.keys()
    for name, tensor in due.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert bits(found[name]) == bits(tensor), name


def bits(tensor):
    """Return the bytes of a tensor."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def refused(path, **options):
    """Return the one line that refuses a checkpoint, when it is opened or read."""
    with pytest.raises(CheckpointError) as caught:
        read_whole(path, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def assert_merged_without_torch(path, out, opening=""):
    """Merge in a process of its own, in which nothing may import torch."""
    script = (
        "import sys\n"
        "from shardspec.checkpoint.convert.output import merge\n"
        f"report = merge({str(path)!r}, {str(out)!r}{opening})\n"
        "assert 'torch' not in sys.modules\n"
        "print(report.tensors)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
