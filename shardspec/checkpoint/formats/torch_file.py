"""Files of `torch.save`: what one holds, whole models in one or several of them, and writing one.

Nested dicts are flattened with dots, and lists that hold tensors with dots and numbers, so that
``{"optim": {"state": [{"step": t}]}}`` has the tensor ``optim.state.0.step``. Two entries with the
same flat name are refused. Source of the rule: ``flatten_state_dict`` of
torch/distributed/checkpoint/_nested_dict.py, which DCP applies to what it saves.

``pytorch_model.bin.index.json`` is read by the rules of ``model.safetensors.index.json``: index and
files are compared both ways. A file with DTensors is one rank's part. It is read alone only where
the part is the whole, as on a mesh of one device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import (
    Catalog,
    OpaqueValue,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    whole_box,
)
from shardspec.checkpoint.formats.names import (
    BIN_INDEX,
    BIN_NAME,
    BIN_NUMBERED,
    TORCH_FILE,
    part_of_several,
    part_text,
)
from shardspec.checkpoint.formats.safetensors import by_file, check_listed, check_numbering
from shardspec.checkpoint.store import SourceFile, file_inside, prefetch_depth, prefetch_map
from shardspec.checkpoint.targets import Extent, OutputFile, OutputTensor, RawBytes, Target
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.unpickler import Global, Names, Record, record_class, screen
from shardspec.checkpoint.torch_files.values import (
    Complex,
    TensorPlace,
    TorchTensor,
    row_major,
    tensor_place,
)
from shardspec.checkpoint.torch_files.writer import Archive, pickled, tensor_value
from shardspec.checkpoint.torch_files.zip_reader import TorchZip, read_torch_zip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout, LayoutCell

_MOST_PARTS: Final = 4 << 20
_MOST_DEPTH: Final = 64
_MOST_PLAIN_PARTS: Final = 100_000
_MOST_PLAIN_DEPTH: Final = 100

ARGUMENT_NAMES: Final[Names] = {
    name: record_class(name)
    for name in (
        *("argparse.Namespace", "types.SimpleNamespace"),
        *("pathlib.Path", "pathlib.PosixPath", "pathlib._local.Path", "pathlib._local.PosixPath"),
        *("datetime.datetime", "datetime.timedelta", "numpy.ndarray", "numpy.dtype"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    )
}
"""What trainers save beside tensors: arguments, paths, times, numpy's random state. None of it is
made; records stand for it."""


class StateTensor(NamedTuple):
    """What a file holds of a tensor, and where its bytes are."""

    local: TorchTensor
    place: TensorPlace


class TorchState(NamedTuple):
    """What one file holds."""

    path: Path
    tensors: Mapping[str, StateTensor]
    extras: Mapping[str, object]  # everything else, as the pickle has it


def read_torch_states(paths: Sequence[Path], more: Names | None = None) -> list[TorchState]:
    """Read what describes the states in files of `torch.save`; not their data.

    `more` are names that may be in them beyond those of tensors and `ARGUMENT_NAMES`.
    """

    def look(path: Path) -> TorchState:
        with SourceFile(path) as file:
            found = read_torch_zip(file)
            held, extras = read_contents(found, found.pickle(file), more)
            tensors = {
                name: StateTensor(tensor, tensor_place(tensor, file, found))
                for name, tensor in held.items()
            }
        return TorchState(path, tensors, extras)

    with prefetch_map(paths, look, prefetch_depth(paths[0])) as states:
        return list(states)


def read_contents(
    found: TorchZip,
    data: bytes,
    more: Names | None = None,
    rank: int | None = None,
    screened: Callable[[bytes], None] = screen,
) -> tuple[dict[str, TorchTensor], dict[str, object]]:
    """Return the tensors that a pickle describes, and other entries, by flat names."""
    value = read_torch(found, data, {**ARGUMENT_NAMES, **(more or {})}, rank, screened)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{found.path}: holds a {type(value).__name__}, not a dict of tensors; save a state "
            "dict"
        )
    tensors: dict[str, TorchTensor] = {}
    others: dict[str, object] = {}
    seen: set[str] = set()
    for name, part in _leaves("", value, 0, iter(range(_MOST_PARTS)), found.path):
        if name in tensors or name in others:
            raise CheckpointError(
                f"{found.path}: two entries have the name {name!r} once their dicts are joined "
                "with dots; rename one of them and save again"
            )
        if not isinstance(part, TorchTensor):
            others[name] = part
            continue
        if part.is_part:
            if part.storage.key in seen:
                part = part._replace(digested=False)
            seen.add(part.storage.key)
        tensors[name] = part
    return tensors, others


def _leaves(
    name: str, value: object, depth: int, left: Iterator[int], path: Path
) -> Iterator[tuple[str, object]]:
    """Yield the parts of nested dicts, and of lists that hold tensors, with their flat names.

    `left` bounds how many are visited.
    """
    _visit(depth, left, path)
    parts: Iterable[tuple[object, object]]
    if isinstance(value, dict) and (value or not depth):
        parts = value.items()
    elif isinstance(value, list | tuple) and _holds_tensors(value, depth, left, path):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        inner = f"{name}.{key}" if depth else str(key)
        if isinstance(part, TorchTensor):
            _visit(depth + 1, left, path)
            yield inner, part
        else:
            yield from _leaves(inner, part, depth + 1, left, path)


def _holds_tensors(value: object, depth: int, left: Iterator[int], path: Path) -> bool:
    _visit(depth, left, path)
    if isinstance(value, TorchTensor):
        return True
    parts = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, dict):
        parts = tuple(value.values())
    return any(_holds_tensors(part, depth + 1, left, path) for part in parts)


def _visit(depth: int, left: Iterator[int], path: Path) -> None:
    if depth > _MOST_DEPTH or next(left, None) is None:
        raise CheckpointError(
            f"{path}: its dicts nest more than {_MOST_DEPTH} deep or repeat themselves without "
            "end; save a plain state dict"
        )


def plain_value(value: object) -> object:
    """Return a value of a pickle as None, numbers, texts, lists, tuples, dicts, `OpaqueValue`s."""
    try:
        return _plain(value, _MOST_PLAIN_DEPTH, iter(range(_MOST_PLAIN_PARTS)))
    except OverflowError:
        return OpaqueValue(f"a {type(value).__name__} of many or deeply nested parts")


def _plain(value: object, depth: int, left: Iterator[int]) -> object:
    match value:
        case TorchTensor():
            return OpaqueValue(f"tensor of shape {list(value.global_shape)}")
        case bytes():
            return OpaqueValue(f"{len(value)} bytes")
        case Global() | Record() | Complex():
            return OpaqueValue(str(value))
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple() | dict():
            if depth < 0 or len(list(islice(left, len(value)))) < len(value):
                raise OverflowError
            parts = [_plain(part, depth - 1, left) for part in value]
            if isinstance(value, dict):
                held = (_plain(part, depth - 1, left) for part in value.values())
                return dict(zip(parts, held, strict=True))
            return parts if isinstance(value, list) else tuple(parts)
    return OpaqueValue(type(value).__name__)


def whole_tensor(name: str, path: Path, found: StateTensor) -> StoredTensor:
    """Return a tensor that is whole in one file."""
    shape = found.local.shape
    boxes = () if 0 in shape else (StoredBox(whole_box(shape), (), 0, path, *found.place),)
    return StoredTensor(name, shape, found.local.dtype, None, (), boxes)


def part_of(
    layout: Layout, rank: int, part: ReplicaKey, path: Path, local: TensorPlace
) -> StoredBox:
    """Return one of the boxes of a rank, whose shard is at `local`."""
    box, addend = part
    offset, digest, strides = local
    if not layout.spec.is_plain:
        shape, item = layout.local_shape(rank), item_bytes(layout.dtype)
        steps = strides or tuple(item * prod(shape[dim + 1 :]) for dim in range(len(shape)))
        index = LayoutCell(layout, box).index(rank)
        offset += sum(side.start * step for side, step in zip(index, steps, strict=True))
        in_order = row_major(box_shape(box), tuple(step // item for step in steps))
        strides = None if in_order else steps
    return StoredBox(box, addend, rank, path, offset, digest, strides)


def of_two_saves(
    path: Path, what: str, said: object, other: Path | str, due: object
) -> CheckpointError:
    """Return the error that one file says something else than another, or than others together."""
    return CheckpointError(
        f"{path}: {what} is {said!s:.60}, but {due!s:.60} in {other}; the files are not of one "
        "save, restore those of one"
    )


def check_same_names(held: Iterable[tuple[Path, Mapping[str, object]]]) -> None:
    """Check that the files of all ranks hold tensors of the same names."""
    (first_path, first), *others = held
    for path, tensors in others:
        odd = min(first.keys() ^ tensors.keys(), default=None)
        if odd is not None:
            lacks, has = (path, first_path) if odd in first else (first_path, path)
            raise CheckpointError(
                f"{lacks}: lacks tensor {odd!r}, which {has} holds; the files are not of one save"
            )


def check_no_copies(states: Iterable[TorchState]) -> None:
    """Refuse a rank's file that is that of another, by the digests of torch's zips."""
    seen: dict[frozenset[tuple[str, int]], Path] = {}
    for state in states:
        digests = [(name, found.place.digest) for name, found in state.tensors.items()]
        key = frozenset((name, digest.crc32) for name, digest in digests if digest is not None)
        other = seen.setdefault(key, state.path)
        if other != state.path and len(key) == len(state.tensors):
            raise CheckpointError(
                f"{state.path}: holds just what {other} does; one is a copy of the other, restore "
                "it"
            )


# --- whole models


def open_torch_file(path: Path) -> Catalog:
    """Read what describes the state in one file; not its data. Parts of tensors are refused."""
    kind = part_of_several(path.name, lambda: [at.name for at in path.parent.iterdir()])
    if kind is not None:
        raise CheckpointError(f"{path}: is {part_text(kind)}")
    return _opened(path, {path: set()})


def open_bin_directory(directory: Path) -> Catalog:
    """Read the index of a directory, or its one ``pytorch_model.bin``, or all numbered files."""
    names = sorted(path.name for path in directory.iterdir())
    if BIN_INDEX in names:
        return open_bin_index(directory / BIN_INDEX)
    if BIN_NAME in names:
        return _opened(directory, {file_inside(directory, BIN_NAME, directory): set()})
    numbered = [name for name in names if BIN_NUMBERED.fullmatch(name)]
    check_numbering(directory, numbered)
    return _opened(directory, {file_inside(directory, name, directory): set() for name in numbered})


def open_bin_index(index: Path) -> Catalog:
    """Read an index and what describes its files, and check that they agree."""
    return _opened(index.parent, by_file(index), index)


def _opened(place: Path, files: Mapping[Path, Set[str]], index: Path | None = None) -> Catalog:
    """Return the catalog of files that hold whole tensors: those that an index lists, or all."""
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, object] = {}
    for (path, listed), state in zip(files.items(), read_torch_states([*files]), strict=True):
        if index is not None:
            check_listed(path, state.tensors, listed, index)
        kind = _part_by_content(state)
        if kind is not None:
            raise CheckpointError(f"{path}: is {part_text(kind)}")
        for name, found in state.tensors.items():
            shape, whole = found.local.shape, found.local.global_shape
            if shape != whole:
                raise CheckpointError(
                    f"{path}: holds a part of shape {list(shape)} of tensor {name!r} of shape "
                    f"{list(whole)}; name the directory with the files of all ranks (files named "
                    "like model_world_size_4_rank_0.pt are found by themselves)"
                )
            if name in tensors:
                raise CheckpointError(
                    f"{path}: holds tensor {name!r}, which another file of the same model does "
                    "too; move the one that is of another save away"
                )
            tensors[name] = whole_tensor(name, path, found)
        others.update((name, plain_value(value)) for name, value in state.extras.items())
    paths = tuple(files) if index is None else (index, *files)
    return Catalog(TORCH_FILE, place, tensors, paths, None, others)


def _part_by_content(state: TorchState) -> str | None:
    """Say which kind of part of a checkpoint a file is, if what it holds shows that it is one."""
    shapes = state.extras.get("param_shapes")
    for group in shapes if isinstance(shapes, list) else ():
        for name, shape in group.items() if isinstance(group, dict) else ():
            found = state.tensors.get(f"module.{name}")
            if found is not None and found.local.shape != shape:
                return "DeepSpeed ZeRO"
    ranks = state.extras.get("mp_world_size")
    if "ds_version" in state.extras and isinstance(ranks, int) and ranks > 1:
        return "DeepSpeed's tensor parallel"
    # Meta shards this square matrix along its second dim.
    square = state.tensors.get("layers.0.attention.wo.weight")
    shape = (0, 0) if square is None else square.local.shape
    few = len(shape) == 2 and 0 < shape[1] < shape[0] and shape[0] % shape[1] == 0
    return "Meta's model parallel" if few and "rope.freqs" in state.tensors else None


def state_file(name: str, value: object, tensors: Sequence[OutputTensor] = ()) -> OutputFile:
    """Return the file of a value; the storages that it names ``0``, ``1``, ... are tensors'."""
    sizes = ((str(number), tensor.num_bytes) for number, tensor in enumerate(tensors))
    archive = Archive(pickled(value), sizes)
    extents = tuple(
        Extent(tensor, whole_box(tensor.shape), place)
        for tensor, place in zip(tensors, archive.places, strict=True)
    )
    raw, trailer = RawBytes(0, archive.head), archive.late if tensors else None
    return OutputFile(name, archive.num_bytes, (raw,), extents, trailer)


def torch_target(
    name: str,
    tensors: Sequence[OutputTensor],
    others: Mapping[str, object],
    same: Mapping[str, str],
) -> Target:
    """Return the output that is one file for torch.load, with `others`, plain values.

    `same` is the name of a tensor to that of another, listed before it, whose storage it shares.
    """
    keys: dict[str, str] = {}
    stored: list[OutputTensor] = []
    for tensor in tensors:
        first = same.get(tensor.name)
        keys[tensor.name] = str(len(stored)) if first is None else keys[first]
        if first is None:
            stored.append(tensor)
    state: dict[str, object] = {
        tensor.name: tensor_value(tensor.shape, tensor.dtype, keys[tensor.name])
        for tensor in tensors
    }
    file = state_file(name, {**state, **others}, stored)
    return Target((file,), directory=False, digested=True)
