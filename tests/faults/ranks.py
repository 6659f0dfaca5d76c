"""Rank files that are missing, doubled or swapped, and meshes that are wrong."""

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardspec import DeviceMesh, reshard
from tests.checkpoint.handmade import handmade
from tests.faults.checks import refused
from tests.faults.harness import Case
from tests.faults.samples import plain

__all__ = ["files", "meshes"]

_MESHES: Final = ((2,), (3,), (2, 2), (2, 3), (2, 2, 2))
_WHOLE_CUTS: Final = {1: "[S0,R]", 2: "[S0,S1]", 3: "[S01,S2]"}


def _sharded(path: Path, mesh: tuple[int, ...]):
    """Write a checkpoint in which every rank has boxes of its own, of even and uneven sizes."""
    rng = np.random.default_rng(1)
    even = rng.integers(0, 99, (12, 6)).astype(np.int32)
    uneven = rng.standard_normal((5, 7)).astype(np.float32)
    axes = "".join(map(str, range(len(mesh))))
    tensors = {
        "even": (_WHOLE_CUTS[len(mesh)], even),
        "uneven": (f"[S{axes},R]", uneven),
        "alike": ("[R]", np.arange(3, dtype=np.int64)),
    }
    return handmade(tensors, mesh).write(path)


def _subsets(items: Sequence[Path], least: int) -> Iterator[tuple[Path, ...]]:
    for count in range(least, len(items) + 1):
        yield from combinations(items, count)


def _missing(chosen: Sequence[Path], source: Path, place: Path) -> None:
    for path in chosen:
        path.rename(place / path.name)
    try:
        refused(["merge", source, "-o", place / "out"], place)
        assert not (place / "out").exists()
    finally:
        for path in chosen:
            (place / path.name).rename(path)


def _replaced(wanted: dict[Path, Path], source: Path, place: Path) -> None:
    """Put into every file what another holds."""
    data = {path: path.read_bytes() for path in wanted}
    new = {path: other.read_bytes() for path, other in wanted.items()}
    for path in wanted:
        path.write_bytes(new[path])
    try:
        refused(["merge", source, "-o", place / "out"], place)
    finally:
        for path in wanted:
            path.write_bytes(data[path])


def files(place: Path, whole: bool) -> Iterator[Case]:
    """Take away, copy over or turn around every subset of the files of each mesh."""
    for mesh in _MESHES if whole else ((2,), (2, 2)):
        shape = "x".join(map(str, mesh))
        source = _sharded(place / "own", mesh)
        yield from _subsets_of(sorted(source.glob("*.safetensors")), f"own {shape}", source, place)
        shutil.rmtree(source)
        single = plain(place / "single.safetensors")
        source = place / "dcp"
        onto = DeviceMesh(range(int(np.prod(mesh))), mesh)
        rules = {"layer.w": _WHOLE_CUTS[len(mesh)]}
        reshard(single, source, device_mesh=onto, rules=rules, format="dcp", include=["layer.w"])
        # Their names say the rank and nothing inside does, so equal ones cannot be told apart.
        for chosen in _subsets(sorted(source.glob("*.distcp")), 1):
            label = f"dcp {shape}, missing {', '.join(path.name for path in chosen)}"
            yield Case(label, partial(_missing, chosen, source, place))
        shutil.rmtree(source)


def _subsets_of(paths: Sequence[Path], label: str, source: Path, place: Path) -> Iterator[Case]:
    for chosen in _subsets(paths, 1):
        shown = ", ".join(path.name for path in chosen)
        yield Case(f"{label}, missing {shown}", partial(_missing, chosen, source, place))
        # Each becomes a copy of the file after it.
        copies = {path: paths[(paths.index(path) + 1) % len(paths)] for path in chosen}
        yield Case(f"{label}, doubled {shown}", partial(_replaced, copies, source, place))
        if len(chosen) > 1:
            turned = dict(zip(chosen, (*chosen[1:], chosen[0]), strict=True))
            yield Case(f"{label}, swapped {shown}", partial(_replaced, turned, source, place))


def _other_mesh(changed: dict[str, Any], source: Path, place: Path) -> None:
    path = source / "sharding_info.json"
    text = path.read_text("utf-8")
    info = json.loads(text)
    info["mesh"] |= changed
    path.write_text(json.dumps(info), "utf-8")
    try:
        refused(["merge", source, "-o", place / "out"], place)
    finally:
        path.write_text(text, "utf-8")


def meshes(place: Path, whole: bool) -> Iterator[Case]:
    """State every other order of the ids, shapes of the same and of other sizes, and nonsense."""
    for mesh in _MESHES if whole else ((2,), (2, 2)):
        label = "x".join(map(str, mesh))
        source = _sharded(place / "own", mesh)
        size = int(np.prod(mesh))
        ids = tuple(range(size))
        orders = list(permutations(ids)) if size <= 6 else [_turned(ids, n) for n in range(size)]
        for order in orders:
            if order != ids:
                yield Case(
                    f"{label} with ids {order}",
                    partial(_other_mesh, {"ids": list(order)}, source, place),
                )
        for shape in _shapes(size):
            # An axis of one device that no spec uses changes nothing.
            if tuple(n for n in shape if n > 1) != mesh or shape[: len(mesh)] != mesh:
                yield Case(
                    f"{label} as {shape}",
                    partial(_other_mesh, {"shape": list(shape)}, source, place),
                )
        for other in (size - 1, size + 1, 2 * size):
            changed = {"ids": list(range(other)), "shape": [other]}
            yield Case(f"{label} as ({other},)", partial(_other_mesh, changed, source, place))
        odd: tuple[object, ...] = ([0] * size, [*ids[:-1], -1], [*ids[:-1], 1 << 63], [], "0", None)
        for stated in odd:
            act = partial(_other_mesh, {"ids": stated}, source, place)
            yield Case(f"{label} with ids {stated}", act)
        shutil.rmtree(source)


def _turned(ids: tuple[int, ...], by: int) -> tuple[int, ...]:
    """Return the ids turned by some places, or for 0 with the last two swapped."""
    return ids[by:] + ids[:by] if by else (*ids[:-2], ids[-1], ids[-2])


def _shapes(size: int) -> Iterator[tuple[int, ...]]:
    """Yield every shape of up to four axes with so many devices."""
    for axes in range(1, 5):
        yield from _factors(size, axes)


def _factors(size: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            for rest in _factors(size // first, axes - 1):
                yield (first, *rest)
