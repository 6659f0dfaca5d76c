"""Describes the contents of a checkpoint without reading its data."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from math import prod
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeAlias

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint import catalog
from shardspec.checkpoint.catalog import AnyOutline, Catalog
from shardspec.checkpoint.compare.coverage import check_tiling, memoize_by_boxes
from shardspec.checkpoint.formats.megatron import run_facts
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.dtypes import item_bytes
from shardspec.layout.layout import Layout
from shardspec.layout.picture import ids_text
from shardspec.text import natural_order


class RowHolders(NamedTuple):
    """The ranks that have each box of a tensor: by its layout, or as stored if that is unknown."""

    cells: Mapping[Box, tuple[int, ...]]
    """Every nonempty box, and its ranks."""
    replicated: bool
    """True if any box has several ranks."""
    uneven: bool
    """True if boxes differ in shape, or if a layout leaves some ranks without a box."""


class Group(NamedTuple):
    """Totals of some tensors of a checkpoint."""

    tensors: int
    parameters: int
    """Number of elements of all tensors."""
    num_bytes: int


def _holders(boxes: Iterable[tuple[Box, int]], num_ranks: int = 0) -> RowHolders:
    """Return the ranks of each box; `num_ranks` is 0 if it is unknown."""
    ranks_of: dict[Box, dict[int, None]] = {}
    for box, rank in boxes:
        ranks_of.setdefault(box, {})[rank] = None
    cells = {box: tuple(ranks) for box, ranks in ranks_of.items()}
    busy = len({rank for ranks in cells.values() for rank in ranks})
    uneven = len(set(map(box_shape, cells))) > 1 or 0 < busy < num_ranks
    return RowHolders(cells, any(len(ranks) > 1 for ranks in cells.values()), uneven)


@lru_cache(maxsize=64)
def _holders_by(layout: Layout) -> RowHolders:
    ids = layout.mesh.ids
    return _holders(((box, i) for i in ids for box, _ in catalog.replica_keys(layout, i)), len(ids))


_layout_of = lru_cache(maxsize=1024)(Layout)  # many tensors are sharded alike


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A description of a checkpoint, or of selected tensors; properties read the catalog anew."""

    source: Catalog
    names: tuple[str, ...]
    """Names of the selected tensors in natural order: ``layers.2`` before ``layers.10``."""
    extras: Mapping[str, object]
    """Entries that are not tensors."""
    run: Mapping[str, int]
    """Facts about a Megatron run: ``iteration``, ``tp``, ``pp``, ``ep``."""

    @property
    def outlines(self) -> Iterator[AnyOutline]:
        """Shape, dtype and boxes of every tensor."""
        return map(self.source.outline, self.names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all global tensors: about the size of the merged file."""
        return self.total().num_bytes

    def total(self) -> "Group":
        """Return the sums over all tensors."""
        kinds = Counter((tensor.shape, tensor.dtype) for tensor in self.outlines)
        parameters = sum(number * prod(shape) for (shape, _), number in kinds.items())
        sizes = (n * prod(shape) * item_bytes(dtype) for (shape, dtype), n in kinds.items())
        return Group(len(self.names), parameters, sum(sizes))

    def groups(self) -> "dict[str, CheckpointSummary]":
        """Return a summary of each group of tensors; see `groups_of`."""
        groups = groups_of(self.names).items()
        return {group: replace(self, names=tuple(names)) for group, names in groups}

    def apart(self) -> "tuple[CheckpointSummary, CheckpointSummary]":
        """Return summaries of the model's tensors and of the optimizer's state."""
        model = tuple(name for name in self.names if optimizer_kind(name) is None)
        chosen = set(model)
        states = tuple(name for name in self.names if name not in chosen)
        return replace(self, names=model), replace(self, names=states)

    def layout(self, tensor: AnyOutline) -> Layout | None:
        """Return the layout of a tensor over the mesh that wrote it, if the format records both."""
        if self.source.mesh is None or tensor.spec is None:
            return None
        return _layout_of(self.source.mesh, tensor.spec, tensor.shape, tensor.dtype)

    def holders(self, tensor: AnyOutline) -> RowHolders:
        """Return every box of a tensor and the ranks that have it."""
        layout = self.layout(tensor)
        if layout is not None:
            return _holders_by(layout)
        return _holders((stored.box, stored.rank) for stored in tensor.boxes)

    @property
    def rank_files(self) -> list[tuple[int, int, str | None]]:
        """(device, bytes, file) of each device of the mesh; without a mesh, of each that stored."""
        # Many tensors share one tuple of boxes.
        widths: dict[int, tuple[Sequence[catalog.FileBox], int]] = {}
        for tensor in self.outlines:
            _, width = widths.get(id(tensor.boxes), ((), 0))
            widths[id(tensor.boxes)] = tensor.boxes, width + item_bytes(tensor.dtype)
        mesh, directory = self.source.mesh, self.source.directory
        stored: dict[int, dict[StoragePath, int]] = {n: {} for n in (mesh.ids if mesh else ())}
        for boxes, width in widths.values():
            for box in boxes:
                files = stored.setdefault(box.rank, {})
                files[box.path] = files.get(box.path, 0) + width * box_size(box.box)
        rows: list[tuple[int, int, str | None]] = []
        for rank in sorted(stored) if mesh is None else stored:
            named = {_file(path, directory): size for path, size in stored[rank].items()}
            rows += [(rank, named[file], file) for file in natural_order(named)]
            rows += [] if named else [(rank, 0, None)]
        return rows

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Bytes of the boxes that each device of the mesh stored."""
        sizes: dict[int, int] = {}
        for rank, num_bytes, _ in self.rank_files:
            sizes[rank] = sizes.get(rank, 0) + num_bytes
        return sizes

    def facts(self) -> dict[str, object]:
        """Return the summary as plain values, without the tensors."""
        source, mesh, groups = self.source, self.source.mesh, self.groups()
        model, states = (part.total() for part in self.apart())
        return {
            "directory": str(source.directory),
            "format": source.format,
            "run": dict(self.run),
            "mesh": mesh and {"ids": mesh.ids, "shape": mesh.shape, "axis_names": mesh.axis_names},
            "bytes": model.num_bytes + states.num_bytes,
            "parameters": model.parameters,
            "optimizer_elements": states.parameters,
            "groups": {name: group.total()._asdict() for name, group in groups.items()},
            "ranks": [
                {"rank": rank, "bytes": num_bytes, "file": file}
                for rank, num_bytes, file in self.rank_files
            ],
            "others": {name: other_text(value) for name, value in self.extras.items()},
        }

    def tensor_facts(self, name: str) -> dict[str, Any]:
        """Return a tensor and all its boxes as plain values; may read headers."""
        tensor = self.source.tensor(name)
        holders = self.holders(tensor)
        return {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "spec": None if tensor.spec is None else str(tensor.spec),
            "bytes": tensor.num_bytes,
            "stored_bytes": sum(map(tensor.bytes_of, tensor.boxes)),
            "replicated": holders.replicated,
            "uneven": holders.uneven,
            "boxes": [
                {
                    "box": [list(side) for side in box.box],
                    "addend": list(box.addend),
                    "rank": box.rank,
                    "file": _file(box.path, self.source.directory),
                    "offset": box.offset,
                    "bytes": tensor.bytes_of(box),
                }
                for box in tensor.boxes
            ],
        }


@lru_cache(maxsize=1024)
def _file(path: StoragePath, directory: StoragePath) -> str:
    return str(path.relative_to(directory)) if directory in path.parents else path.name


def other_text(value: object, most: int = 200) -> str:
    """Return a value that is not a tensor as text of at most `most` characters.

    >>> other_text(list(range(9)), 12)
    '[0, 1, 2, 3…'
    """
    text = value.text if isinstance(value, catalog.OpaqueValue) else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def inspect_checkpoint(directory: PurePath | str | Catalog) -> CheckpointSummary:
    """Return a summary of a checkpoint; reads and checks the metadata, but reads no data.

    >>> import tempfile, torch
    >>> from shardspec import save_sharded
    >>> path = tempfile.mkdtemp()
    >>> save_sharded({"up.weight": torch.ones(2, 3), "step": 7}, path)
    >>> summary = inspect_checkpoint(path)
    >>> summary.names, summary.num_bytes, dict(summary.extras)
    (('up.weight',), 24, {'step': 7})
    """
    source = as_catalog(directory)
    names = tuple(natural_order(source.names))
    summary = CheckpointSummary(source, names, {}, run_facts(source))
    check = memoize_by_boxes(check_tiling)  # many tensors are sharded alike
    for tensor in summary.outlines:
        summary.layout(tensor)
        check(tensor)
    return replace(summary, extras=source.extras)


# --- layers and groups, by the names of tensors


_NUMBER: Final = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")
"""Number in a name, such as the 12 of ``layers.12.up.weight``."""
_MOMENTS: Final = "max_exp_avg_sq|exp_avg_sq|exp_avg|momentum_buffer|square_avg|step"
_MOMENT: Final = re.compile(rf"(?<![^.])({_MOMENTS})(?![^.])")
_OPTIMIZER: Final = re.compile(
    r"(?<![^.])(?:(?:chained_\d+|optim|optimizers?|optimizer_state_dict)\.|"
    rf"(?:{_MOMENTS})(?![^.]))"
)
"""Names of an optimizer's state in checkpoints of torch, Megatron and DeepSpeed."""
_MAIN: Final = re.compile(r"optimizer\.state\.((?:fp32_)?param)\.")
"""Main parameters of Megatron's distributed optimizer."""
_NUMBERED: Final = "(numbered)"
"""The group of names that begin with a number."""
_MAX_GROUPS: Final = 12
_TRIED_NAMES: Final = 8

_Numbers: TypeAlias = tuple[int, ...]


class Repeated(NamedTuple):
    """Tensors with equal properties whose names differ only in numbers."""

    title: str
    """Pattern of the tensors' names: ``layers.{0..31}.up.weight``."""
    names: Sequence[str]


def repeated_layers(properties: Mapping[str, Hashable]) -> list[Repeated]:
    """Group the names that differ only in numbers and have equal `properties`.

    The title of a group expands to exactly the names in it. Groups are sorted by first name.

    >>> shapes = {f"layers.{i}.up": (4, 2) for i in range(12)}
    >>> shapes |= {"head": (2,), "layers.12.up": (4,)}
    >>> [(one.title, len(one.names)) for one in repeated_layers(shapes)]
    [('head', 1), ('layers.{0..11}.up', 12), ('layers.12.up', 1)]
    """
    groups: dict[tuple[tuple[str, ...], Hashable], dict[_Numbers, str]] = defaultdict(dict)
    for name, value in properties.items():
        parts = _NUMBER.split(name)
        groups[tuple(parts[::2]), value][tuple(map(int, parts[1::2]))] = name
    first: dict[str, Repeated] = {}
    for (texts, _), names in groups.items():
        for numbers in _blocks(sorted(names)):
            words = [_numbers_text(each) for each in numbers]
            title = "".join(chain.from_iterable(zip(texts, [*words, ""], strict=True)))
            members = [names[each] for each in product(*numbers)]
            first[members[0]] = Repeated(title, members)
    return [first[name] for name in natural_order(first)]


def _blocks(numbers: Sequence[_Numbers]) -> Iterator[list[_Numbers]]:
    """Group sorted tuples into products: (0, 1), (0, 2), (4, 1), (4, 2) are (0, 4) × (1, 2)."""
    if not numbers[0]:
        yield []
        return
    rests: dict[int, list[_Numbers]] = defaultdict(list)
    for first, *rest in numbers:
        rests[first].append(tuple(rest))
    same: dict[tuple[_Numbers, ...], list[int]] = defaultdict(list)  # layers with equal experts
    for first, rest_of in rests.items():
        same[tuple(rest_of)].append(first)
    for inner, firsts in same.items():
        for block in _blocks(inner):
            yield [tuple(firsts), *block]


def _numbers_text(numbers: _Numbers) -> str:
    """Return numbers in braces, with runs as ranges; a single number without braces.

    >>> _numbers_text((0, 1, 2, 5)), _numbers_text((4,))
    ('{0..2,5}', '4')
    """
    return str(numbers[0]) if len(numbers) == 1 else f"{{{ids_text(numbers).replace('-', '..')}}}"


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their first words: ``layers``, ``embed``, ``norm``.

    A group is the text before the first number, or before the last word of a name. It is shorter
    if there would be too many groups.

    >>> {group: len(of) for group, of in groups_of(["a.h.0.w", "a.h.1.w", "a.emb.w", "b"]).items()}
    {'a.emb': 1, 'a.h': 2, 'b': 1}
    """
    starts = {name: _NUMBER.split(name)[0] for name in natural_order(names)}
    paths = {
        name: (start.rstrip(".") or _NUMBERED).split(".")
        if start != name
        else name.split(".")[:-1] or [name]
        for name, start in starts.items()
    }
    for depth in range(max(map(len, paths.values()), default=1), 0, -1):
        groups: dict[str, list[str]] = {}
        for name, path in paths.items():
            groups.setdefault(".".join(path[:depth]), []).append(name)
        if len(groups) <= _MAX_GROUPS:
            break
    return groups if paths else {}


def optimizer_kind(name: str) -> str | None:
    """Return the kind of optimizer state of a tensor, as ``exp_avg``; None for model weights.

    >>> optimizer_kind("optim.state.up.weight.exp_avg"), optimizer_kind("up.weight")
    ('exp_avg', None)
    """
    if _OPTIMIZER.search(name) is None:
        return None
    kind = _MOMENT.search(name) or _MAIN.search(name)
    return "other" if kind is None else kind[1]


def prefix_change(names: Collection[str], others: Collection[str]) -> tuple[str, str] | None:
    """Return the prefixes in which names differ from the others; None if more than that differs.

    One side may have more names than the other. No name may be on both sides.

    >>> prefix_change(["model.a.w", "model.b"], ["a.w", "b", "head"])
    ('model.', '')
    """
    if not names or not others or not set(names).isdisjoint(others):
        return None
    # Every suffix that starts at a component, and a name with it.
    ending: dict[str, str] = {}
    for other in others:
        for end in _suffixes(other):
            ending.setdefault(end, other)
    every_other = set(others)
    for name in natural_order(names)[:_TRIED_NAMES]:
        shared = next((end for end in _suffixes(name) if end in ending), None)
        if shared is None:
            continue
        old, new = name.removesuffix(shared), ending[shared].removesuffix(shared)
        renamed = {new + each.removeprefix(old) for each in names if each.startswith(old)}
        if len(renamed & every_other) == min(len(names), len(others)):
            return old, new
    return None


def _suffixes(name: str) -> Iterator[str]:
    """Yield the suffixes of a name by words: ``a.b.c``, ``b.c``, ``c``."""
    while name:
        yield name
        name = name.partition(".")[2]
