"""Folders with indexes that name some files, none, others, or files that hold tensors twice."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import safetensors.numpy

from tests.faults.checks import command, refused, same
from tests.faults.harness import Case

__all__ = ["Folder", "every_folder", "folders", "written"]

_SPELLINGS: Final = (
    ("model", "model-{:05d}-of-{:05d}.safetensors"),
    ("model", "model-{}-of-{}.safetensors"),
    ("model", "model.safetensors-{:05d}-of-{:05d}"),
    ("model.fp16", "model.fp16-{:05d}-of-{:05d}.safetensors"),
    ("model.fp16", "model-{:05d}-of-{:05d}.fp16.safetensors"),
    ("diffusion_pytorch_model", "diffusion_pytorch_model-{:05d}-of-{:05d}.safetensors"),
)
_LISTED: Final = (
    *("no index", "all", "all but one file", "nothing", "a file that is missing"),
    *("a tensor that two files hold", "an overlay", "all but one tensor", "twice"),
    *("all, of which one is gone", "no index, and one is gone"),
)
_BESIDE: Final = ("", "model.safetensors", "consolidated.safetensors", "adapter_model.safetensors",
                  "model.ema.safetensors", "of another save", ".part.safetensors")  # fmt: skip
_BELOW: Final = ("", "parts/")
_LINKS: Final = (False, True)
_Arrays = dict[str, np.ndarray]


class Folder(NamedTuple):
    """What lies in a folder."""

    model: str
    spelling: str
    files: int
    listed: str
    beside: str
    below: str
    links: bool

    def name(self, number: int, more: int = 0) -> str:
        """Return the name of a file, relative to the folder."""
        return self.below + self.spelling.format(number, self.files + more)


def written(folder: Folder, place: Path) -> _Arrays | None:
    """Write a folder; return what transformers loads of it, None where it has to be refused.

    Where two files hold a tensor, transformers takes that of the later name, and this the one that
    the index names.
    """
    files: dict[str, _Arrays] = {
        folder.name(number): {
            f"{part}{number}": np.arange(number, number + 3, dtype=np.int32) for part in "ab"
        }
        for number in range(1, folder.files + 1)
    }
    due = {name: array for held in files.values() for name, array in held.items()}
    where = {name: home for home, held in files.items() for name in held}
    first, last = folder.name(1), folder.name(folder.files)
    right = folder.listed in ("no index", "all", "a tensor that two files hold", "an overlay")
    match folder.listed:
        case "all but one file":
            where = {name: home for name, home in where.items() if home != last}
        case "nothing":
            where = {}
        case "a file that is missing":
            where["c"] = folder.below + "other.safetensors"
        case "a tensor that two files hold":
            files[last]["a1"] = due["a1"] = np.array([7, 7])
            where["a1"] = last
        case "an overlay":
            files["an overlay.safetensors"] = {"a1": np.array([7, 7])}
            where["a1"], due["a1"] = "an overlay.safetensors", np.array([7, 7])
        case "all but one tensor":
            del where["b1"]
        case "all, of which one is gone" | "no index, and one is gone":
            del files[first]
    beside = folder.beside
    if beside:
        beside = folder.name(1, more=1) if beside == "of another save" else beside
        files[beside] = {"other": np.array([1.5])}
    if folder.listed.startswith("no index"):
        nothing = folder.beside in ("", ".part.safetensors")
        # Two models may not be taken for one, and nobody looks into folders below.
        right = right and nothing and not folder.below
        if folder.below and not nothing and folder.beside != "of another save":
            right, due = True, files[beside]
    else:
        index = {"metadata": {}, "weight_map": where}
        for suffix in ("", ".x")[: 2 if folder.listed == "twice" else 1]:
            path = place / f"{folder.model}{suffix}.safetensors.index.json"
            path.write_text(json.dumps(index))
        right = right and folder.beside not in ("model.safetensors", "of another save")
    for name, held in files.items():
        path = place / name
        path.parent.mkdir(exist_ok=True)
        if folder.links:
            path.symlink_to(place.parent / f"linked {len(list(place.parent.iterdir()))}")
        path.write_bytes(safetensors.numpy.save(held))
    return due if right else None


def _act(folder: Folder, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    source = place / "model"
    source.mkdir(parents=True)
    due = written(folder, source)
    if due is None:
        refused(["merge", source, "-o", place / "out"], place)
    else:
        code, _, error = command(["merge", source, "-o", place / "out"])
        assert code == 0, error
        same(place / "out", due)
    path = source / folder.name(folder.files)
    refused(["merge", path, "-o", place / "one"], place, f"file {folder.files} of")


def every_folder() -> Iterator[Folder]:
    """Yield every combination."""
    kinds = product(_SPELLINGS, (2, 3), _LISTED, _BESIDE, _BELOW, _LINKS)
    for (model, spelling), files, listed, beside, below, links in kinds:
        yield Folder(model, spelling, files, listed, beside, below, links)


def folders(place: Path, whole: bool) -> Iterator[Case]:
    """Yield every combination, or every 61st of them."""
    for folder in islice(every_folder(), 0, None, 1 if whole else 61):
        yield Case(f"{folder}", partial(_act, folder, place / "work"))
