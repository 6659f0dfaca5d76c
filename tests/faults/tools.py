"""Files that DeepSpeed, Meta's and Megatron's tools wrote: missing, cut, or in another's place."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
import safetensors.numpy

from tests.faults.checks import command, one_line, refused
from tests.faults.harness import Case

__all__ = ["files"]

_DATA: Final = Path(__file__).parents[1] / "real" / "data"
_MEGATRON: Final = ("0.15", "0.16", "legacy")
_CUTS: Final = 16


def files(place: Path, whole: bool) -> Iterator[Case]:
    """Yield the cases of each checkpoint, or two of each kind."""
    random = Random(9)
    with tarfile.open(_DATA / "deepspeed.tar.xz") as archive:
        archive.extractall(place, filter="data")
    due = json.loads((_DATA / "deepspeed.json").read_text("utf-8"))
    kinds = [kind for name in due for kind in _cases(place / name, due[name])]
    for archive_name in _MEGATRON:
        with tarfile.open(_DATA / f"megatron-{archive_name}.tar.xz") as archive:
            archive.extractall(place, filter="data")
    for source in sorted({*place.glob("megatron-0.1?"), *place.glob("legacy-*")}):
        # tests/real compares these with what each rank held.
        out = place / f"{source.name}.safetensors"
        code, _, error = command(["merge", source, "-o", out])
        assert code == 0, error
        kinds += _cases(source, _shown(out))
    for cases in kinds:
        yield from cases if whole else random.sample(cases, min(2, len(cases)))


def _cases(source: Path, due: dict[str, list[object]]) -> tuple[list[Case], ...]:
    """Return the cases of one checkpoint by their kind: missing, cut, in the place of another."""
    found = {path for kind in ("*.pt*", "*.distcp", ".metadata") for path in source.rglob(kind)}
    # What may be left out, or says nothing that is compared.
    left = ("optimizer_state", "common")
    held = sorted(path.relative_to(source) for path in found if path.stem not in left)
    missing: list[Case] = []
    cuts: list[Case] = []
    replaced: list[Case] = []
    for path in held:
        act = partial(_act, source, due, path)
        missing.append(Case(f"{source.name}, {path} missing", partial(act, None)))
        data = (source / path).read_bytes()
        for part in range(_CUTS):
            cut = data[: len(data) * part // _CUTS]
            cuts.append(Case(f"{source.name}, {path} cut", partial(act, cut)))
        for other in held:
            over = (source / other).read_bytes()
            # Chunks of equal shapes may be swapped in a DCP directory: see the document.
            alike = path.suffix == ".distcp" and len(over) == len(data)
            if other != path and other.suffix == path.suffix and not alike:
                label = f"{source.name}, {other} over {path}"
                replaced.append(Case(label, partial(act, over)))
    return missing, cuts, replaced


def _act(source: Path, due: dict[str, list[object]], path: Path, data: bytes | None) -> None:
    place = source.parent / "work"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place / "ckpt")
    (place / "ckpt" / path).unlink()
    if data is not None:
        (place / "ckpt" / path).write_bytes(data)
    args = ["merge", place / "ckpt", "-o", place / "out.safetensors"]
    code, _, error = command(args)
    if code:
        one_line(error[error.index("Error: ") :])
        assert code == 3
        refused(args, place)
        return
    shown = _shown(place / "out.safetensors")
    assert {name: found for name, found in shown.items() if name in due} == due


def _shown(path: Path) -> dict[str, list[object]]:
    return {
        name: [str(array.dtype), list(array.shape), hashlib.sha256(_bytes(array)).hexdigest()[:16]]
        for name, array in safetensors.numpy.load_file(path).items()
    }


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()
