"""A small directory of torch.distributed.checkpoint, for tests to spoil."""

import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.checkpoint.formats.torch_jobs import save_alone


@dataclass
class Small:
    """A checkpoint of one process, and what was saved."""

    path: Path
    tensors: dict[str, torch.Tensor]

    def metadata(self):
        with open(os.path.join(self.path, ".metadata"), "rb") as file:
            return pickle.load(file)

    def write(self, metadata):
        with open(os.path.join(self.path, ".metadata"), "wb") as file:
            pickle.dump(metadata, file)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "ckpt"
    tensors = {
        "a": torch.arange(6.0).view(2, 3).bfloat16(),
        "b": torch.tensor(7),
        "c": torch.arange(12.0).view(3, 4).t(),
        "e": torch.empty(0, 3),
    }
    save_alone({"m": tensors, "step": 5}, path)
    return Small(path, {f"m.{name}": tensor for name, tensor in tensors.items()})


@pytest.fixture
def small(original, tmp_path):
    shutil.copytree(original.path, tmp_path / "ckpt")
    return Small(tmp_path / "ckpt", original.tensors)
