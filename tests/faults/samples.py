"""Small checkpoints to be spoiled, made without torch."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from shardspec import DeviceMesh, reshard
from tests.checkpoint.handmade import handmade

__all__ = ["arrays", "cut", "index", "own", "plain", "split"]


def arrays(seed: int = 0, *, scale: int = 1) -> dict[str, np.ndarray]:
    """Return four tensors of unlike dtypes and sizes; other ones for another seed."""
    rng = np.random.default_rng(seed)
    return {
        "layer.w": rng.integers(-99, 99, (8 * scale, 7)).astype(np.int32),
        "layer.b": rng.standard_normal(7).astype(np.float32),
        "step": np.array(seed, np.int64),
        "größe": rng.integers(0, 255, (3, 5)).astype(np.uint8),
    }


SPECS = {"layer.w": "[S0,S1]", "layer.b": "[S1]", "step": "[]", "größe": "[S01,R]"}


def plain(path: Path, seed: int = 0, *, scale: int = 1) -> Path:
    """Write one safetensors file."""
    path.write_bytes(safetensors.numpy.save(arrays(seed, scale=scale), {"format": "pt"}))
    return path


def own(path: Path, mesh: tuple[int, ...] = (2, 3)):
    """Write a checkpoint in our form by hand, which has no digests."""
    return made(mesh).write(path)


def made(mesh: tuple[int, ...] = (2, 3)):
    """Return a checkpoint in our form before it is written."""
    return handmade({name: (SPECS[name], array) for name, array in arrays().items()}, mesh)


def cut(path: Path, source: Path, mesh: tuple[int, ...] = (2, 3)) -> Path:
    """Write a checkpoint in our form, with digests."""
    size = int(np.prod(mesh))
    reshard(source, path, device_mesh=DeviceMesh(range(size), mesh), rules=SPECS)
    return path


def split(path: Path) -> Path:
    """Write Hugging Face's form: two files and an index."""
    path.mkdir()
    every = arrays()
    parts = [["layer.w", "step"], ["layer.b", "größe"]]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        data = safetensors.numpy.save({name: every[name] for name in part}, {"format": "pt"})
        path.joinpath(file).write_bytes(data)
        weight_map.update(dict.fromkeys(part, file))
    index(path).write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}), "utf-8"
    )
    return path


def index(path: Path) -> Path:
    """Return the index of such a directory."""
    return path / "model.safetensors.index.json"
