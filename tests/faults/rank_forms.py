"""Rank files of the forms of others, missing, doubled, swapped or of another mesh: every subset.

What must come of each case follows from what lies in which file, as torch's writers noted it, by
code that shares nothing with the library's.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import safetensors.numpy

from tests.faults.checks import command, refused, same
from tests.faults.harness import Case
from tests.faults.rank_samples import (
    ARRAYS,
    MEGATRON,
    MESHES,
    MODEL,
    SHORT,
    Stored,
    megatron_file,
    megatron_parts,
    mesh_name,
    parts_of,
)

__all__ = ["forms", "lookalikes"]

_OF_EQUAL_SIZE: Final = (((4,), (2, 2)), ((4, 2), (2, 2, 2)))

_Arrays: TypeAlias = Mapping[str, np.ndarray]
_Placed: TypeAlias = Mapping[str, str | None]
"""Which file's bytes lie under each name; None if nothing does."""


@dataclass(frozen=True)
class _Form:
    """A checkpoint of a form, and what reading it must give."""

    name: str
    source: Path
    files: Sequence[str]
    """Those of the ranks, in their order."""
    whole: _Arrays
    due: Callable[[_Placed], _Arrays | None]
    """What comes out of files that lie elsewhere; None if that must be refused."""
    options: tuple[object, ...] = ()
    may_refuse: bool = False
    """Whether an error is right too: there are signs that files are missing."""


def _boxed(held: Mapping[str, Sequence[Stored]], placed: _Placed) -> _Arrays | None:
    """Return what boxes give that say themselves where they belong, if each is there once."""
    if None in placed.values():
        return None
    boxes: dict[str, list[tuple[slice, ...]]] = {}
    seen = set()
    for content in placed.values():
        for name, starts, sizes, _ in held[str(content)]:
            # One that is empty leaves no trace in what comes out, and yet none is there twice.
            if (key := (name, *starts, *sizes)) in seen:
                return None
            seen.add(key)
            box = tuple(slice(lo, lo + n) for lo, n in zip(starts, sizes, strict=True))
            boxes.setdefault(name, []).append(box)
    found = {}
    for name, parts in boxes.items():
        # As far as they reach: the form says no more.
        shape = np.max([[at.stop for at in box] for box in parts], 0)
        times = np.zeros(shape, int)
        for box in parts:
            times[box] += 1
        if not (times == 1).all():
            return None
        found[name] = ARRAYS[name][tuple(map(slice, shape))]
    return found


def _listed(
    due: Mapping[str, Sequence[Stored]], held: Mapping[str, Sequence[Stored]], placed: _Placed
) -> _Arrays | None:
    """Return what a list of places gives: what lies there, if it is of the listed size and type."""
    found = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
    for file, content in placed.items():
        if content is None or [_look(one) for one in due[file]] != [
            _look(o) for o in held[content]
        ]:
            return None
        for (name, starts, sizes, _), (other, at, _, _) in zip(
            due[file], held[content], strict=True
        ):
            to = tuple(slice(lo, lo + n) for lo, n in zip(starts, sizes, strict=True))
            of = tuple(slice(lo, lo + n) for lo, n in zip(at, sizes, strict=True))
            found[name][to] = ARRAYS[other][of]
    return found


def _look(stored: Stored) -> tuple[object, ...]:
    name, _, sizes, num_bytes = stored
    return ARRAYS[name].dtype, sizes, num_bytes


def _unchanged(whole: _Arrays, placed: _Placed) -> _Arrays | None:
    return whole if all(file == content for file, content in placed.items()) else None


def _of_one_mesh(placed: _Placed) -> _Arrays | None:
    contents = list(placed.values())
    return ARRAYS if contents in (list(placed), [f"-{file}" for file in placed]) else None


def _any_order(whole: _Arrays, placed: _Placed) -> _Arrays | None:
    return whole if set(placed.values()) == set(placed) else None


def _alike(whole: _Arrays, placed: _Placed) -> _Arrays | None:
    """Return what files give that all hold the same, if no rank before the last is missing."""
    there = [content is not None for content in placed.values()]
    return whole if any(there) and there == sorted(there, reverse=True) else None


def _as_far(held: Mapping[str, Sequence[Stored]], placed: _Placed) -> _Arrays | None:
    """Return what the files at hand give, where nothing says how many there were."""
    there = {file: content for file, content in placed.items() if content is not None}
    return _boxed(held, there) if there else None


def _stacked(ranks: int, stages: int, placed: _Placed) -> _Arrays | None:
    """Return what Megatron's files give that do not say their rank."""
    if len(set(placed.values()) - {None}) < ranks * stages:
        return None
    known = {
        megatron_file(rank, stage, stages): megatron_parts(stage, rank, stages, ranks)
        for stage in range(stages)
        for rank in range(ranks)
    }
    found: dict[str, np.ndarray] = {}
    layers = 0
    for stage in range(stages):
        held = [known[str(placed[megatron_file(rank, stage, stages)])] for rank in range(ranks)]
        if any(one.keys() != held[0].keys() for one in held):
            return None
        for name in held[0]:
            start, between, rest = name.partition(".layers.")
            number, _, rest = rest.partition(".")
            after = f"{start}{between}{layers + int(number)}.{rest}" if between else name
            parts = [one[name] for one in held]
            if "layernorm" not in name:
                found[after] = np.concatenate(parts, 1 if "fc2" in name else 0)
            elif all(np.array_equal(part, parts[0]) for part in parts):
                found[after] = parts[0]
            else:
                return None
        layers += sum(name.endswith("fc2.weight") for name in held[0])
    return found


def _forms(here: Path, shape: tuple[int, ...], others: Path | None) -> Iterator[_Form]:
    """Yield every form of a mesh; the files of `others`, another mesh, have names with a dash."""
    world = int(np.prod(shape))
    ranks = ("--ranks", world)
    notes = _notes(here)
    for form, stem in (
        ("ranks", f"model_world_size_{world}_rank_{{}}.pt"),
        ("unsaid", "rank-{}.pt"),
    ):
        files = [stem.format(rank) for rank in range(world)]
        yield _Form(form, here / form / "ckpt", files, ARRAYS, _of_one_mesh)
    files = [f"rank_{rank}.pth" for rank in range(world)]
    yield _Form("plain", here / "plain" / "ckpt", files, ARRAYS, partial(_alike, ARRAYS))
    of_dcp, of_hf = notes["dcp"], notes["hf"]
    due = partial(_listed, dict(of_dcp), of_dcp | _dashed(others, "dcp"))
    yield _Form("dcp", here / "dcp" / "ckpt", sorted(of_dcp), ARRAYS, due)
    due = partial(_boxed, of_hf | _dashed(others, "hf"))
    yield _Form("hf", here / "hf" / "ckpt", sorted(of_hf), ARRAYS, due, ("--ranks", len(of_hf)))
    unsaid = partial(_as_far, of_hf)
    yield _Form("hf, unsaid", here / "hf" / "ckpt", sorted(of_hf), ARRAYS, unsaid, may_refuse=True)
    merged = here / "merged"
    shutil.copytree(here / "hf" / "ckpt", merged / "ckpt" / "sharded", dirs_exist_ok=True)
    safetensors.numpy.save_file(dict(ARRAYS), merged / "ckpt" / "model.safetensors")
    yield _Form("hf, merged above", merged / "ckpt" / "sharded", sorted(of_hf), ARRAYS, due)
    yield from _whole_files(here, world)
    if shape in MEGATRON:
        tensor_ranks, stages = MEGATRON[shape]
        files = [
            megatron_file(rank, stage, stages)
            for stage in range(stages)
            for rank in range(tensor_ranks)
        ]
        due = partial(_stacked, tensor_ranks, stages)
        told = partial(_unchanged, MODEL)
        yield _Form("megatron", here / "megatron" / "ckpt", files, MODEL, told)
        yield _Form("megatron, converted", here / "converted" / "ckpt", files, MODEL, due)
        yield _Form("megatron, bare", here / "bare" / "ckpt", files, MODEL, due, ranks)


def _whole_files(here: Path, count: int) -> Iterator[_Form]:
    """Yield the forms of whole tensors in several files."""
    parts = parts_of(count, "safetensors")
    whole: _Arrays = {name: array for part in parts.values() for name, array in part.items()}
    for form in ("index", "numbered"):
        folder = here / form / "ckpt"
        folder.mkdir(parents=True)
        for name, part in parts.items():
            safetensors.numpy.save_file(part, folder / name)
        due = partial(_any_order, whole)
        if form == "index":
            weight_map = {name: file for file, part in parts.items() for name in part}
            text = json.dumps({"metadata": {}, "weight_map": weight_map})
            (folder / "model.safetensors.index.json").write_text(text)
            due = partial(_unchanged, whole)
        yield _Form(form, folder, list(parts), whole, due)
    yield _Form(
        "bin",
        here / "bin" / "ckpt",
        list(parts_of(count, "bin")),
        whole,
        partial(_unchanged, whole),
    )


def _notes(here: Path) -> dict[str, dict[str, list[Stored]]]:
    notes: dict[str, dict[str, list[Stored]]] = json.loads((here / "notes.json").read_text())
    return notes


def _dashed(others: Path | None, form: str) -> dict[str, list[Stored]]:
    return {} if others is None else {f"-{n}": held for n, held in _notes(others)[form].items()}


def _subsets(files: Sequence[str], least: int = 1) -> Iterator[tuple[str, ...]]:
    for count in range(least, len(files) + 1):
        yield from combinations(files, count)


def _placements(files: Sequence[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield what is done to the files, and the bytes of which one each has then."""
    same_place: dict[str, str | None] = dict(zip(files, files, strict=True))
    yield "as saved", same_place
    after = dict(zip(files, (*files[1:], files[0]), strict=True))
    for chosen in _subsets(files):
        shown = ", ".join(chosen)
        yield f"missing {shown}", same_place | dict.fromkeys(chosen)
        yield f"doubled {shown}", same_place | {file: after[file] for file in chosen}
        if len(chosen) > 1:
            turned = zip(chosen, (*chosen[1:], chosen[0]), strict=True)
            yield f"swapped {shown}", {**same_place, **dict(turned)}
    for file in files:
        yield f"all are {file}", dict.fromkeys(files, file)


def _of_another(files: Sequence[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    same_place: dict[str, str | None] = dict(zip(files, files, strict=True))
    for chosen in _subsets(files):
        mixed = same_place | {file: f"-{file}" for file in chosen}
        yield f"of another mesh {', '.join(chosen)}", mixed


def _apply(form: _Form, placed: _Placed, due: _Arrays | None, others: Path | None) -> None:
    """Put files into their places, merge, compare, and put them back."""
    place = form.source.parents[1] if form.source.name == "sharded" else form.source.parent
    before = {file: form.source / file for file in form.files}
    data: dict[str | None, bytes] = {file: path.read_bytes() for file, path in before.items()}
    if others is not None:
        data |= {f"-{file}": (others / file).read_bytes() for file in form.files}
    changed = {file: content for file, content in placed.items() if file != content}
    out = place / "out.safetensors"
    args = ["merge", form.source, "-o", out, *form.options]
    try:
        for file, content in changed.items():
            if content is None:
                before[file].unlink()
                if before[file].parent != form.source:
                    before[file].parent.rmdir()
            else:
                before[file].write_bytes(data[content])
        if due is None:
            refused(args, place)
        else:
            code, _, err = command([*args, "--quiet"])
            if form.may_refuse and code == 3:
                assert not out.exists()
                return
            assert (code, err) == (0, "")
            same(out, due)
    finally:
        out.unlink(missing_ok=True)
        for file in changed:
            before[file].parent.mkdir(exist_ok=True)
            before[file].write_bytes(data[file])


def _right(found: _Arrays | None, whole: _Arrays) -> bool:
    """Say whether nothing comes out, or what was saved."""
    return found is None or (
        found.keys() == whole.keys()
        and all(np.array_equal(found[name], array) for name, array in whole.items())
    )


def _renamed(form: _Form, world: int, other: int) -> None:
    """Let the names of the files say another number of ranks."""
    names = {file: file.replace(f"_{world}_", f"_{other}_") for file in form.files}
    for file, name in names.items():
        (form.source / file).rename(form.source / name)
    try:
        refused(["merge", form.source, "-o", form.source.parent / "out"], form.source.parent)
    finally:
        for file, name in names.items():
            (form.source / name).rename(form.source / file)


def _described(form: _Form, due: _Arrays | None, others: Path) -> None:
    """Read a directory of torch's by the metadata of another mesh."""
    path = form.source / ".metadata"
    data = path.read_bytes()
    path.write_bytes((others / ".metadata").read_bytes())
    try:
        _apply(form, {}, due, None)
    finally:
        path.write_bytes(data)


def _miscounted(form: _Form, world: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield other numbers of ranks, said by the caller or by the names of files."""
    for other in range(1, 2 * world + 1):
        if other == world:
            continue
        if form.name == "ranks":
            yield f"named as of {other} ranks", partial(_renamed, form, world, other)
        elif form.name in ("hf", "hf, merged above") or form.name.startswith("megatron"):
            args = ["merge", form.source, "-o", form.source.parent / "out", "--ranks", other]
            yield f"said to be of {other} ranks", partial(refused, args, form.source.parent)


def _every(place: Path, whole: bool) -> Iterator[tuple[Case, bool]]:
    """Yield every case, and whether it ends with an error or what was saved."""
    pairs = {a: b for pair in _OF_EQUAL_SIZE for a, b in (pair, pair[::-1])}
    for shape in MESHES if whole else SHORT:
        here = place / mesh_name(shape)
        other = place / mesh_name(pairs[shape]) if whole and shape in pairs else None
        for form in _forms(here, shape, other):
            label = f"{form.name} {mesh_name(shape)}"
            world = int(np.prod(shape))
            for what, act in _miscounted(form, world):
                yield Case(f"{label}, {what}", act), True
            for what, placed in _placements(form.files):
                due = form.due(placed)
                act = partial(_apply, form, placed, due, None)
                yield Case(f"{label}, {what}", act), _right(due, form.whole)
            if other is None or form.name not in ("ranks", "unsaid", "dcp", "hf"):
                continue
            folder = other / form.source.relative_to(here)
            for what, placed in _of_another(form.files):
                due = form.due(placed)
                act = partial(_apply, form, placed, due, folder)
                yield Case(f"{label}, {what}", act), _right(due, form.whole)
            if form.name == "dcp":
                held = _notes(here)["dcp"]
                due = _listed(_notes(other)["dcp"], held, dict(zip(held, held, strict=True)))
                act = partial(_described, form, due, folder)
                yield Case(f"{label}, metadata of another mesh", act), _right(due, form.whole)


def forms(place: Path, whole: bool) -> Iterator[Case]:
    """Yield the cases that end with an error or with what was saved."""
    return islice((case for case, right in _every(place, whole) if right), 0, None, _step(whole))


def lookalikes(place: Path, whole: bool) -> Iterator[Case]:
    """Yield those where no reader can know: files of equal sizes that do not say their rank."""
    return (case for case, right in _every(place, whole) if not right)


def _step(whole: bool) -> int:
    """Return how many cases go by for one of the sample; no multiple of the kinds in turn."""
    return 1 if whole else 9
