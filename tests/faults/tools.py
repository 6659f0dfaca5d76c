"""Files of DeepSpeed and Meta, of the tools themselves: missing, cut, or in another's place."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import safetensors.numpy

from tests.faults.checks import command, one_line, refused
from tests.faults.harness import Case

__all__ = ["files"]

_DATA: Final = Path(__file__).parents[1] / "real" / "data"
_CUTS: Final = 16


def files(place: Path, whole: bool) -> Iterator[Case]:
    """Yield the cases of each checkpoint, or every ninth of them."""
    with tarfile.open(_DATA / "deepspeed.tar.xz") as archive:
        archive.extractall(place, filter="data")
    due = json.loads((_DATA / "deepspeed.json").read_text("utf-8"))
    cases = [case for name in due for case in _cases(place / name, due[name])]
    yield from cases[:: 1 if whole else 9]


def _cases(source: Path, due: dict[str, list[object]]) -> Iterator[Case]:
    held = sorted(path.relative_to(source) for path in source.rglob("*.pt*"))
    # What may be left out, or says nothing that is compared.
    held = [path for path in held if path.stem != "optimizer_state"]

    for path in held:
        yield Case(f"{source.name}, {path} missing", partial(_act, source, due, path, None))
        data = (source / path).read_bytes()
        for part in range(_CUTS):
            cut = data[: len(data) * part // _CUTS]
            yield Case(f"{source.name}, {path} cut", partial(_act, source, due, path, cut))
        # Those of parameters may be of equal shapes.
        for other in held if source.name != "universal" else ():
            if other != path and other.suffix == path.suffix:
                label = f"{source.name}, {other} over {path}"
                over = (source / other).read_bytes()
                yield Case(label, partial(_act, source, due, path, over))


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
    found = safetensors.numpy.load_file(place / "out.safetensors")
    shown = {
        name: [str(array.dtype), list(array.shape), hashlib.sha256(_bytes(array)).hexdigest()[:16]]
        for name, array in found.items()
        if name in due
    }
    assert shown == due


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()
