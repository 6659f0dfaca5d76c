"""Whether boxes fit: stored ones tile a tensor, copies agree, and no quantisation block is cut.

Quantised tensors have a scale for each block of elements. torchao says in the metadata of its
safetensors files where blocks lie (``block_size``). For fp8 weights ``config.json`` says it
(``quantization_config.weight_block_size``): each such weight ``W`` has a ``W_scale_inv``. GPTQ and
AWQ have a row of ``W.scales`` for so many rows of ``W.qweight``; bitsandbytes has a number of
``W.absmax`` for so many bytes of a 4-bit ``W``, a power of two.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Final, NamedTuple, TypeAlias, TypeVar

from shardspec.boxes import Box, box_size, chunks, contains
from shardspec.checkpoint import catalog
from shardspec.checkpoint.read_boxes import BLOCK_BYTES, Buffers, read_box_into
from shardspec.checkpoint.store import OpenFiles, SourceFile, file_inside
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, LayoutError
from shardspec.layout.layout import Layout

_Box = TypeVar("_Box", bound=catalog.FileBox)
_Found = TypeVar("_Found")
_Outline: TypeAlias = catalog.Outline[catalog.FileBox]

_MOST_KNOWN: Final = 64
"""Kinds of tensors of which results are kept: a model has few."""
_MOST_CONFIG_BYTES: Final = 2**20


class Hole(NamedTuple):
    """A part of the tensor that no box covers."""

    box: Box


class Overlap(NamedTuple):
    """Two boxes, by their places in the sequence, that share some element."""

    first: int
    second: int


@lru_cache(_MOST_KNOWN)
def find_flaw(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Hole | Overlap | None:
    """Return the first reason why boxes, none of them empty, do not tile a tensor, if any.

    A sweep along the first dim; between two cuts the same boxes are met all the way, and there
    the remaining dims are swept in turn. A grid of n boxes takes O(n log n) a dim.
    """

    def sweep(met: Sequence[int], prefix: Box) -> Hole | Overlap | None:
        """Check the part of the tensor that lies in `prefix`, where all boxes of `met` reach."""
        dim = len(prefix)
        if not met:
            return Hole((*prefix, *((0, size) for size in shape[dim:])))
        if dim == len(shape):
            return Overlap(met[0], met[1]) if len(met) > 1 else None
        starts: dict[int, list[int]] = {}
        cuts = {0, shape[dim]}
        for place in met:
            lo, hi = boxes[place][dim]
            starts.setdefault(lo, []).append(place)
            cuts.update((lo, hi))
        active: list[int] = []
        for lo, hi in pairwise(sorted(cuts)):
            active = [place for place in active if boxes[place][dim][1] > lo] + starts.get(lo, [])
            flaw = sweep(active, (*prefix, (lo, hi)))
            if flaw is not None:
                return flaw
        return None

    return None if 0 in shape else sweep(range(len(boxes)), ())


def check_tiling(tensor: catalog.Outline[_Box]) -> tuple[tuple[_Box, ...], ...]:
    """Check that the boxes of a tensor tile it, once for every addend that is pending.

    Returns groups of two or more boxes that claim the same part: their bytes must agree.
    """
    same: dict[catalog.ReplicaKey, list[_Box]] = {}
    for stored in tensor.boxes:
        same.setdefault((stored.box, stored.addend), []).append(stored)
    whole = catalog.whole_box(tensor.shape)
    addends = [pending.addends for pending in tensor.pending]
    by_addend: dict[tuple[int, ...], list[_Box]] = {
        addend: [] for addend in product(*map(range, addends))
    }
    for (box, addend), (first, *_) in same.items():
        problem = ""
        if len(box) != len(whole) or not contains(whole, box) or any(lo >= hi for lo, hi in box):
            problem = f"is empty or lies outside the tensor of shape {list(tensor.shape)}"
        elif addend not in by_addend:
            problem = f"is addend {list(addend)} of a pending reduction of {addends} addends"
        if problem:
            raise CheckpointError(
                f"tensor {tensor.name!r}: rank {first.rank}'s box {catalog.box_text(box)} in "
                f"{first.path} {problem}"
            )
        by_addend[addend].append(first)
    for addend, group in by_addend.items():
        match find_flaw(tensor.shape, tuple(stored.box for stored in group)):
            case Hole(box):
                of = f" of addend {list(addend)}" if addend else ""
                raise CheckpointError(
                    f"tensor {tensor.name!r} of shape {list(tensor.shape)}: no file holds its "
                    f"part {catalog.box_text(box)}{of}; restore the missing file or save again"
                )
            case Overlap(i, j):
                one, other = (
                    f"rank {at.rank}'s box {catalog.box_text(at.box)} in {at.path}"
                    for at in (group[i], group[j])
                )
                raise CheckpointError(
                    f"tensor {tensor.name!r}: {one} and {other} overlap in part, which no layout "
                    "gives; the checkpoint contradicts itself"
                )
    return tuple(tuple(group) for group in same.values() if len(group) > 1)


def memoize_by_boxes(find: Callable[[_Outline], _Found]) -> Callable[[_Outline], _Found]:
    """Return a function that is called once for outlines that share the same tuple of boxes."""
    # Keys have the ids of boxes, which the outlines keep alive.
    known: dict[tuple[object, ...], tuple[_Outline, _Found]] = {}

    def found(outline: _Outline) -> _Found:
        key = id(outline.boxes), outline.shape, outline.pending
        if key not in known:
            known[key] = outline, find(outline)
            if len(known) > _MOST_KNOWN:
                del known[next(iter(known))]
        return known[key][1]

    return found


def element_index(box: Box, element: int) -> tuple[int, ...]:
    """Return where in the global tensor an element of a box lies."""
    index: list[int] = []
    for lo, hi in reversed(box):
        element, at = divmod(element, hi - lo)
        index.insert(0, lo + at)
    return tuple(index)


def check_replicas(
    tensor: catalog.StoredTensor,
    group: Sequence[catalog.StoredBox],
    files: OpenFiles,
    *,
    trust_digests: bool = False,
) -> None:
    """Compare the elements of boxes that claim the same part of a tensor, bit by bit.

    With `trust_digests`, those whose digests are equal are equal, without being read.
    """
    size = item_bytes(tensor.dtype)
    buffers = Buffers()
    rooms = memoryview(bytearray(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
    # Each by itself, wherever its elements lie in its file.
    alone = [replace(tensor, pending=(), boxes=(replace(box, addend=()),)) for box in group]
    first = group[0]
    for other, of_other in zip(group[1:], alone[1:], strict=True):
        if trust_digests and _same_digest(first, other, box_size(first.box) * size):
            continue
        for block in chunks(first.box, BLOCK_BYTES // size):
            a, b = (room[: box_size(block) * size] for room in rooms)
            read_box_into(alone[0], block, a, files, buffers)
            read_box_into(of_other, block, b, files, buffers)
            if a.tobytes() == b.tobytes():
                continue
            at = next(at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            remedy = "keep the right one of the two"
            if len(tensor.shape) == 1 and first.path.suffix == ".distcp":
                remedy += (
                    "; but if ranks have saved flat parts of their own under one name, as FSDP1's "
                    "local optimizer states are, keep all, and save them in a run of as many ranks "
                    "with FSDP.optim_state_dict"
                )
            raise CheckpointError(
                f"tensor {tensor.name!r}: ranks {first.rank} and {other.rank} claim different data "
                f"for box {catalog.box_text(first.box)}, first at index "
                f"{list(element_index(block, at // size))}, in {first.path} and {other.path}; "
                f"{remedy}"
            )


def _same_digest(a: catalog.StoredBox, b: catalog.StoredBox, num_bytes: int) -> bool:
    """Return whether both have a digest of just their bytes, in the same order, and it is equal."""
    if a.digest is None or b.digest is None or a.strides != b.strides:
        return False
    whole = a.digest.num_bytes == b.digest.num_bytes == num_bytes
    return whole and a.digest.crc32 == b.digest.crc32


def check_blocks(source: catalog.Catalog, layouts: Mapping[str, Layout]) -> None:
    """Refuse layouts, by name in a checkpoint, that cut a tensor inside a block."""
    blocks = dict(_blocks(source))
    for name in sorted(blocks.keys() & layouts.keys()):
        layout = layouts[name]
        if len(blocks[name]) != len(layout.global_shape):
            continue
        for device in layout.mesh.ids:
            sides = zip(layout.box(device), blocks[name], layout.global_shape, strict=True)
            for dim, ((lo, hi), block, size) in enumerate(sides):
                if lo < hi and (lo % block or (hi % block and hi != size)):
                    raise LayoutError(
                        f"tensor {name!r}: spec {layout.spec} cuts dim {dim} at {lo}:{hi}, inside "
                        f"a block of {block} elements that share a scale; cut another dim, or over "
                        "fewer devices"
                    )


def _blocks(source: catalog.Catalog) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that are quantised in blocks, and the shape of these."""
    for key, text in source.file_metadata.values.items():
        block = _sizes(text, "_data", "block_size")
        if block and _member(text, "_tensor_data_names"):
            home, _, weight = key.rpartition(".")
            yield f"{home}._{weight}_qdata".lstrip("."), block
    known = set(source.names)
    config = source.directory / "config.json"
    scaled = [name for name in source.names if f"{name}_scale_inv" in known]
    if scaled and config.is_file():
        with SourceFile(file_inside(source.directory, config.name, source.directory)) as file:
            said = file.read(0, min(file.num_bytes, _MOST_CONFIG_BYTES))
        if block := _sizes(said, "quantization_config", "weight_block_size"):
            yield from ((name, block) for name in scaled)
    for name in source.names:
        home, _, last = name.rpartition(".")
        if last == "qweight" and f"{home}.scales" in known:
            rows, groups = (source.outline(f"{home}.{of}").shape[0] for of in (last, "scales"))
            if groups and rows % groups == 0:
                yield name, (rows // groups, 1)
        elif f"{name}.absmax" in known:
            num_bytes, count = (prod(source.outline(of).shape) for of in (name, f"{name}.absmax"))
            powers = (1 << power for power in range(num_bytes.bit_length() + 1))
            size = next((size for size in powers if -(-num_bytes // size) == count), None)
            if size is not None:
                yield name, (size, 1)


def _member(text: str | bytes, *keys: str) -> object:
    """Return a member of an object in JSON; None where there is none."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for key in keys:
        said = said.get(key) if isinstance(said, dict) else None
    return said


def _sizes(text: str | bytes, *keys: str) -> tuple[int, ...]:
    said = _member(text, *keys)
    if not isinstance(said, list) or not all(type(size) is int and size > 0 for size in said):
        return ()
    return tuple(said)
