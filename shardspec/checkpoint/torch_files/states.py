"""Reads and writes state dicts in `torch.save` files without torch.

Nested dicts are flattened with dots, and lists that contain tensors with dots and numbers, so that
``{"optim": {"state": [{"step": t}]}}`` has the tensor ``optim.state.0.step``. Two entries with the
same flat name are refused. DCP flattens in the same way when it saves: ``flatten_state_dict`` in
torch/distributed/checkpoint/_nested_dict.py.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any, Final, NamedTuple

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import (
    Extent,
    OpaqueValue,
    OutputFile,
    OutputTensor,
    RawBytes,
    ReplicaKey,
    StoredBox,
    StoredTensor,
    is_plain_entry,
    row_major_strides,
    unsharded_tensor,
    whole_box,
)
from shardspec.checkpoint.state.state_dict import is_path
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.unpickler import (
    Foreign,
    Global,
    PickleError,
    Record,
)
from shardspec.checkpoint.torch_files.values import (
    Complex,
    TensorPlace,
    TorchStorage,
    TorchTensor,
    UnreadTensor,
    row_major,
    tensor_place,
)
from shardspec.checkpoint.torch_files.writer import Archive, pickled
from shardspec.checkpoint.torch_files.zip_reader import TorchZip, read_torch_zip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout, LayoutCell
from shardspec.resharding.state import KeyPath, Place, dotted_name

_MAX_PARTS: Final = 1 << 20
_MAX_DEPTH: Final = 64
_MAX_PLAIN_PARTS: Final = 100_000
_MAX_PLAIN_DEPTH: Final = 100
_MAX_PLAIN_BYTES: Final = 1 << 20
"""Maximum size of plain bytes; larger ones, such as data loader states, would fill the memory."""
_MAX_OPAQUE_PARTS: Final = 1 << 17


class StateTensor(NamedTuple):
    """A tensor in a file, and the position of its bytes."""

    local: TorchTensor
    place: TensorPlace


class TorchState(NamedTuple):
    """The contents of one file."""

    path: StoragePath
    tensors: Mapping[str, StateTensor]
    extras: Mapping[str, object]  # all other entries, as they were unpickled
    paths: Mapping[str, KeyPath]  # nested keys by name, as in `Contents`
    archive: TorchZip


class Contents(NamedTuple):
    """The contents of a pickle, by flat names."""

    tensors: dict[str, TorchTensor]
    extras: dict[str, object]
    paths: dict[str, KeyPath]
    """Nested keys by name; names of top-level entries are omitted."""


def read_torch_states(paths: Sequence[StoragePath]) -> list[TorchState]:
    """Return the contents of files of `torch.save`; the bytes of tensors are not read.

    Raises CheckpointError if a file is damaged, or contains no state dict.
    """

    def look(path: StoragePath) -> TorchState:
        with path.open() as file:
            archive = read_torch_zip(file)
            contents = read_contents(archive, archive.pickle(file))
            tensors = {
                name: StateTensor(tensor, tensor_place(tensor, file, archive))
                for name, tensor in contents.tensors.items()
            }
        return TorchState(path, tensors, contents.extras, contents.paths, archive)

    with prefetch_map(paths, look, paths[0].files_ahead()) as states:
        return list(states)


def read_contents(
    archive: TorchZip,
    data: bytes,
    rank: int | None = None,
) -> Contents:
    """Return the contents of a pickle; see `read_torch` for the parameters."""
    value = read_torch(archive, data, rank=rank)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{archive.path}: contains {_kind_of(value)}, not a dict of tensors; save a state dict"
        )
    return flat_contents(value, (), archive.path)


def _kind_of(value: object) -> str:
    if isinstance(value, TorchTensor | UnreadTensor):
        return "a tensor"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def flat_contents(value: object, at: KeyPath, path: StoragePath) -> Contents:
    """Return the contents of a value whose keys in the state dict are `at`.

    Raises PickleError if two entries get the same flat name, or the value is nested too deep.
    """
    contents = Contents({}, {}, {})
    tensors, extras, paths = contents
    storages: set[str] = set()
    for keys, part in _leaves(at, value, len(at), iter(range(_MAX_PARTS)), path):
        name = dotted_name(keys)
        if name in tensors or name in extras:
            raise PickleError(
                f"{path}: two entries have the name {name!r} once their dicts are joined "
                "with dots; rename one of them and save again"
            )
        if keys != (name,) and is_path(keys):
            paths[name] = keys
        if not isinstance(part, TorchTensor):
            extras[name] = part
            continue
        if part.is_part:
            if part.storage.key in storages:
                part = part._replace(digested=False)
            storages.add(part.storage.key)
        tensors[name] = part
    return contents


def _leaves(
    at: tuple[Any, ...], value: object, depth: int, budget: Iterator[int], path: StoragePath
) -> Iterator[tuple[tuple[Any, ...], object]]:
    """Yield (keys, leaf) of nested dicts, and of lists that contain tensors.

    `at` has the keys that lead to `value`. Each visit takes an item of `budget`.
    """
    _visit(depth, budget, path)
    parts: Iterable[tuple[object, object]]
    if isinstance(value, dict) and (value or not depth):
        parts = value.items()
    elif isinstance(value, list | tuple) and _has_tensors(value, depth, budget, path):
        parts = ((Place((place,)), part) for place, part in enumerate(value))
    else:
        yield at, value
        return
    for key, part in parts:
        if isinstance(part, TorchTensor):
            _visit(depth + 1, budget, path)
            yield (*at, key), part
        else:
            yield from _leaves((*at, key), part, depth + 1, budget, path)


def _has_tensors(value: object, depth: int, budget: Iterator[int], path: StoragePath) -> bool:
    _visit(depth, budget, path)
    if isinstance(value, TorchTensor | UnreadTensor):
        return True
    parts = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, dict):
        parts = tuple(value.values())
    return any(_has_tensors(part, depth + 1, budget, path) for part in parts)


def _visit(depth: int, budget: Iterator[int], path: StoragePath) -> None:
    if depth > _MAX_DEPTH or next(budget, None) is None:
        raise PickleError(
            f"{path}: its dicts nest more than {_MAX_DEPTH} deep or repeat themselves without "
            "end; save a plain state dict"
        )


def plain_value(value: object, archive: TorchZip | None = None) -> object:
    """Return a value made of None, numbers, texts, bytes, lists, tuples, dicts and `OpaqueValue`s.

    `archive` is its zip; objects with tensors are compared by its CRC-32.

    >>> plain_value({"step": [1, None]})
    {'step': [1, None]}
    """
    parts = iter(range(_MAX_OPAQUE_PARTS))
    try:
        return _plain(value, _MAX_PLAIN_DEPTH, iter(range(_MAX_PLAIN_PARTS)), parts, archive)
    except OverflowError:
        text = f"a {type(value).__name__} of many or deeply nested parts"
        return _opaque(text, value, iter(range(_MAX_OPAQUE_PARTS)), archive)


def _plain(
    value: object,
    depth: int,
    budget: Iterator[int],
    of_opaque: Iterator[int],
    archive: TorchZip | None,
) -> object:
    match value:
        case TorchTensor():
            text = f"tensor of shape {list(value.global_shape)}"
        case UnreadTensor():
            text = value.why
        case Foreign():
            text = f"{value}, not read and not run"
        case Global() | Record() | Complex():
            text = str(value)
        case bytes() if len(value) > _MAX_PLAIN_BYTES:
            text = f"{len(value)} bytes"
        case None | bool() | int() | float() | str() | bytes():
            return value
        case list() | tuple() | dict():
            if depth < 0 or len(list(islice(budget, len(value)))) < len(value):
                raise OverflowError

            def each(parts: Iterable[object]) -> list[object]:
                return [_plain(part, depth - 1, budget, of_opaque, archive) for part in parts]

            if not isinstance(value, dict):
                return each(value) if isinstance(value, list) else tuple(each(value))
            keys = each(value)
            if all(map(is_plain_entry, keys)):
                return dict(zip(keys, each(value.values()), strict=True))
            text = f"a dict with keys such as {keys[0]}"
        case _:
            text = type(value).__name__
    return _opaque(text, value, of_opaque, archive)


def _opaque(
    text: str, value: object, budget: Iterator[int], archive: TorchZip | None
) -> OpaqueValue:
    """Return a placeholder for a value, with a digest of all its parts in a fixed order.

    Each part takes an item of `budget`, which bounds values that contain themselves.
    """
    digest, tensors, exact, todo = sha256(), False, True, [value]
    while todo:
        part = todo.pop()
        inner: Collection[object] = ()
        shown: object = ""
        match part:
            case TorchTensor() | TorchStorage():
                tensors = True
                storage = part if isinstance(part, TorchStorage) else part.storage
                crc = archive and archive.record(f"data/{storage.key}").crc32
                exact &= crc is not None
                traits = (*part[:4], part.placed) if isinstance(part, TorchTensor) else ()
                shown = storage.dtype, storage.size, traits, crc
            case UnreadTensor():
                tensors = True
                where = part.storage and archive and archive.record(f"data/{part.storage[0]}").crc32
                exact &= part.storage is None or where is not None
                shown = part.storage and part.storage[1], part.traits, where
            case Global():
                shown = part.path
            case Record():
                shown, inner = type(part).path, (part.args, part.state)
                if isinstance(part, Foreign):
                    inner = (*inner, part.more)
            case dict():
                inner = [*part, *part.values()]
            case list() | tuple():
                inner = part
            case None | bool() | int() | float() | str() | bytes():
                shown = part
            case _:
                exact = False
        line = f"{type(part).__name__} {len(inner)} {shown!r}\n"
        digest.update(line.encode("utf-8", "surrogatepass"))
        if len(list(islice(budget, len(inner)))) < len(inner):
            return OpaqueValue(text, None, tensors=True)
        todo.extend(inner)
    return OpaqueValue(text, digest.hexdigest() if exact else None, tensors)


def whole_tensor(name: str, path: StoragePath, tensor: StateTensor, rank: int = 0) -> StoredTensor:
    """Return a tensor that is stored completely in the file of one rank."""
    return unsharded_tensor(name, tensor.local.shape, tensor.local.dtype, path, *tensor.place, rank)


def stored_box_of_rank(
    layout: Layout, rank: int, part: ReplicaKey, path: StoragePath, local: TensorPlace
) -> StoredBox:
    """Return one box of a rank as a `StoredBox`; `local` is the position of the rank's shard."""
    box, addend = part
    offset, digest, strides = local
    if not layout.spec.is_plain:
        shape, item = layout.local_shape(rank), item_bytes(layout.dtype)
        steps = strides or row_major_strides(shape, item)
        index = LayoutCell(layout, box).index(rank)
        offset += sum(side.start * step for side, step in zip(index, steps, strict=True))
        in_order = row_major(box_shape(box), tuple(step // item for step in steps))
        strides = None if in_order else steps
    return StoredBox(box, addend, rank, path, offset, digest, strides)


def mismatch_error(
    path: StoragePath, what: str, value: object, other: StoragePath | str, other_value: object
) -> CheckpointError:
    """Return the error for a value that differs between two files, or a file and all others."""
    return CheckpointError(
        f"{path}: {what} is {value!s:.60}, but {other_value!s:.60} in {other}; the files are of "
        "different saves, restore those of one"
    )


def check_same_names(files: Iterable[tuple[StoragePath, Mapping[str, object]]]) -> None:
    """Raise CheckpointError unless the files of all ranks have tensors of the same names."""
    (first_path, first), *rest = files
    for path, tensors in rest:
        name = min(first.keys() ^ tensors.keys(), default=None)
        if name is not None:
            lacks, has = (path, first_path) if name in first else (first_path, path)
            raise CheckpointError(
                f"{lacks}: lacks tensor {name!r}, which {has} has; the files are of different saves"
            )


def check_no_copies(states: Iterable[TorchState]) -> None:
    """Raise CheckpointError if the files of two ranks have equal digests of all tensors."""
    paths: dict[frozenset[tuple[str, int]], StoragePath] = {}
    for state in states:
        digests = [(name, tensor.place.digest) for name, tensor in state.tensors.items()]
        key = frozenset((name, digest.crc32) for name, digest in digests if digest is not None)
        first_path = paths.setdefault(key, state.path)
        if first_path != state.path and len(key) == len(state.tensors):
            raise CheckpointError(
                f"{state.path}: has the same tensors as {first_path}; one is a copy of the other, "
                "restore it"
            )


def state_file(name: str, value: object, tensors: Sequence[OutputTensor] = ()) -> OutputFile:
    """Return the file that pickles a value; storages ``0``, ``1``, ... are those of `tensors`."""
    sizes = ((str(number), tensor.num_bytes) for number, tensor in enumerate(tensors))
    archive = Archive(pickled(value), sizes)
    extents = tuple(
        Extent(tensor, whole_box(tensor.shape), place)
        for tensor, place in zip(tensors, archive.places, strict=True)
    )
    raw, trailer = RawBytes(0, archive.head), archive.late if tensors else None
    return OutputFile(name, archive.num_bytes, (raw,), extents, trailer)
