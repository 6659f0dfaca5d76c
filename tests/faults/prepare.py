"""What cases spoil without torch, written with it."""

import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from shardspec import DeviceMesh, DTensor, save_sharded
from tests.faults.bits import CUTS, DTYPES
from tests.faults.harness import Row
from tests.faults.rank_jobs import save_ranks
from tests.faults.rank_samples import MESHES, SHORT
from tests.faults.samples import arrays

__all__ = ["prepare"]


def torch_files(place: Path) -> None:
    """Write the sample as one file of torch.save, and as a directory of torch's checkpoints."""
    state = {name: torch.from_numpy(array) for name, array in arrays().items()}
    torch.save(state, place / "whole.pt")
    with warnings.catch_warnings():
        # That there is one process only.
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=place / "dcp")


def _patterns(item_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """Return bytes of elements: every pattern where there are few, else all that are special."""
    if item_bytes <= 2:
        values = np.arange(256**item_bytes, dtype=f"<u{item_bytes}")
        return values.view(np.uint8)
    word = min(item_bytes, 4 if item_bytes == 4 else 8)
    sign, top = 1 << (8 * word - 1), 23 if word == 4 else 52
    infinity = ((1 << (8 * word - 1 - top)) - 1) << top
    # Zero, the smallest subnormals, the largest one, infinity, and NaNs quiet and signalling.
    special = [0, 1, 2, (1 << top) - 1, 1 << top, infinity, infinity + 1, infinity + (1 << top) - 1]
    special += [infinity | 1 << (top - 1), infinity | 0xBAD, (1 << (8 * word - 1)) - 1]
    special += [value | sign for value in special]
    words = np.array(special, dtype=f"<u{word}").view(np.uint8)
    return np.concatenate([words, rng.integers(0, 256, 8 * 1021 - len(words)).astype(np.uint8)])


def every_dtype(place: Path) -> None:
    """Save tensors of every dtype, cut in many ways, and the bytes that they should have."""
    rng = np.random.default_rng(8)
    state = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        raw = _patterns(8 if name == "complex64" else dtype.itemsize, rng)
        if dtype is torch.bool:
            raw %= 2
        # Seven rows, so that nothing divides; what is left over is dropped.
        columns = len(raw) // dtype.itemsize // 7
        raw = raw[: 7 * columns * dtype.itemsize]
        state[name] = torch.from_numpy(raw.copy()).view(dtype).view(7, columns)
    raws: dict[str, Any] = {n: t.view(torch.uint8).numpy() for n, t in state.items()}
    np.savez(place / "bytes.npz", **raws)
    for number, (shape, spec) in enumerate(CUTS):
        mesh = DeviceMesh(range(int(np.prod(shape))), shape)
        cut = {name: DTensor(tensor, mesh, spec) for name, tensor in state.items()}
        save_sharded(cut, place / f"saved{number}")


def prepare(rows: Sequence[Row], folder: Path, *, whole: bool) -> None:
    """Fill the folders of those rows that need it, for all their cases or for the sample."""
    known: dict[str, Callable[[Path], object]] = {
        "torch_files": torch_files,
        "every_dtype": every_dtype,
        "rank_files": partial(save_ranks, meshes=MESHES if whole else SHORT),
    }
    made: dict[str, Path] = {}
    for row in rows:
        place = folder / row.name
        if row.prepare is None:
            place.mkdir()
        elif row.prepare in made:
            shutil.copytree(made[row.prepare], place)
        else:
            place.mkdir()
            known[row.prepare](place)
            made[row.prepare] = place
