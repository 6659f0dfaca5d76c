"""A file of `torch.save` as a flat state: tensors by name, where each lies, and what else is there.

Nested dicts are flattened with dots, and lists that hold tensors with dots and numbers, so that
``{"optim": {"state": [{"step": t}]}}`` has the tensor ``optim.state.0.step``. Dicts and lists under
the same name would be lost, and are refused. Source of the rule: ``flatten_state_dict`` of
torch/distributed/checkpoint/_nested_dict.py, which DCP applies to what it saves.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import OpaqueValue, StoredBox, StoredTensor
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.torch_files.torch_dtensors import TorchDTensor, local_of, read_dtensors
from shardspec.checkpoint.torch_files.torch_values import (
    Complex,
    TensorPlace,
    TorchTensor,
    tensor_place,
)
from shardspec.checkpoint.torch_files.unpickler import Global, Names, Record, record_class
from shardspec.checkpoint.torch_files.zip_files import TorchZip, read_torch_zip
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError

__all__ = [
    "ARGUMENT_NAMES",
    "StateTensor",
    "TorchContents",
    "TorchState",
    "check_no_copies",
    "contents_of",
    "flatten_state",
    "of_two_saves",
    "plain_value",
    "read_torch_state",
    "read_torch_states",
    "whole_tensor",
]

Flat: TypeAlias = dict[str, object]

_MOST_PARTS: Final = 4 << 20
_MOST_DEPTH: Final = 64
_MOST_PLAIN_PARTS: Final = 100_000
_MOST_PLAIN_DEPTH: Final = 100

ARGUMENT_NAMES: Final[Names] = {
    name: record_class(name)
    for name in (
        *("argparse.Namespace", "types.SimpleNamespace"),
        *("pathlib.Path", "pathlib.PosixPath", "pathlib._local.Path", "pathlib._local.PosixPath"),
        *("datetime.datetime", "datetime.timedelta"),
        *("numpy.ndarray", "numpy.dtype"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
        *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    )
}
"""What trainers put beside tensors: arguments, paths, times, numpy's random state. None of it is
made; a record of its name stands for it."""


class StateTensor(NamedTuple):
    """A tensor of a file and where its bytes, or those of its local part, lie."""

    tensor: TorchTensor | TorchDTensor
    place: TensorPlace

    @property
    def local(self) -> TorchTensor:
        """What the file holds of it."""
        return local_of(self.tensor)


class TorchContents(NamedTuple):
    """The tensors that one file says that it holds, wherever they lie."""

    tensors: Mapping[str, TorchTensor | TorchDTensor]
    beside: frozenset[str]
    """Tensors that look into parts of storages, but for the first of each storage.

    The digest of a storage is left to that one: judging it means reading all its bytes, and a model
    may lie in one storage.
    """

    def place(self, name: str, file: SourceFile, found: TorchZip) -> TensorPlace:
        """Return where the bytes of a tensor lie, or those of its local part."""
        place = tensor_place(local_of(self.tensors[name]), file, found)
        return place._replace(digest=None) if name in self.beside else place


class TorchState(NamedTuple):
    """What one file holds."""

    path: Path
    tensors: Mapping[str, StateTensor]
    extras: Mapping[str, object]
    """What is no tensor, as the pickle has it."""


def read_torch_state(
    path: Path, *, rank: int | None = None, more: Names | None = None
) -> TorchState:
    """Read what describes the state in a file of `torch.save`; not its data.

    Parameters
    ----------
    path
        The file.
    rank
        The rank that wrote it, if known.
    more
        Names that may stand in it beyond those of tensors and of `ARGUMENT_NAMES`.

    Raises
    ------
    CheckpointError
        If it is damaged, holds no dict, names what does not belong in a checkpoint, or has two
        entries of one flat name.

    Examples
    --------
    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "x.pt"
    >>> torch.save({"model": {"w": torch.ones(2, 3)}, "epoch": 7}, path)
    >>> state = read_torch_state(path)
    >>> state.tensors["model.w"].local.shape, state.extras
    ((2, 3), {'epoch': 7})
    """
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        value = read_dtensors(file, found, {**ARGUMENT_NAMES, **(more or {})}, rank)
        contents, extras = contents_of(value, path)
        tensors = {
            name: StateTensor(tensor, contents.place(name, file, found))
            for name, tensor in contents.tensors.items()
        }
    return TorchState(path, tensors, extras)


def read_torch_states(paths: Sequence[Path], more: Names | None = None) -> list[TorchState]:
    """Read the states in the files of one checkpoint as `read_torch_state`, of stores at once."""
    look = partial(read_torch_state, more=more)
    with prefetch_map(paths, look, prefetch_depth(paths[0])) as states:
        return list(states)


def whole_tensor(name: str, path: Path, found: StateTensor) -> StoredTensor:
    """Return a tensor that lies whole in one file."""
    shape, place = found.local.shape, found.place
    box = tuple((0, size) for size in shape)
    stored = StoredBox(box, (), 0, path, place.offset, place.digest, place.strides)
    boxes = () if 0 in shape else (stored,)
    return StoredTensor(name, shape, found.local.dtype, None, (), boxes)


def of_two_saves(
    path: Path, what: str, said: object, other: Path | str, due: object
) -> CheckpointError:
    """Return the error that one file says something else than another, or than others together."""
    return CheckpointError(
        f"{path}: {what} is {said!s:.60}, but {due!s:.60} in {other}; the files are not of one "
        "save, restore those of one"
    )


def check_no_copies(states: Iterable[TorchState]) -> None:
    """Check that no rank's file is that of another, by the digests of torch's zips.

    Raises
    ------
    CheckpointError
        If one is.
    """
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


def contents_of(value: object, path: Path) -> tuple[TorchContents, Flat]:
    """Return the tensors and other entries of what `torch.save` wrote."""
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type(value).__name__}, not a dict of tensors; save a state dict"
        )
    tensors: dict[str, TorchTensor | TorchDTensor] = {}
    others: dict[str, object] = {}
    beside = set()
    seen: set[str] = set()
    for name, part in flatten_state(value, path).items():
        if not isinstance(part, TorchTensor | TorchDTensor):
            others[name] = part
            continue
        tensors[name] = part
        local = local_of(part)
        storage = local.storage
        of_all = storage.size * item_bytes(storage.dtype)
        if prod(local.shape) * item_bytes(local.dtype) < of_all:
            if storage.key in seen:
                beside.add(name)
            seen.add(storage.key)
    return TorchContents(tensors, frozenset(beside)), others


def flatten_state(state: Mapping[object, object], path: Path) -> Flat:
    """Return every part of nested dicts by its flat name.

    Examples
    --------
    >>> flatten_state({"a": {"b": 1, 2: [3, {"c": 4}]}, "d": {}}, Path("x"))
    {'a.b': 1, 'a.2': [3, {'c': 4}], 'd': {}}
    """
    flattening = _Flattening(path)
    flattening.add("", state, 0)
    return flattening.flat


class _Flattening:
    """Goes through a value that need not be a tree, and gives up when it takes too long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = _MOST_PARTS
        self.flat: Flat = {}

    def add(self, name: str, value: object, depth: int) -> None:
        self._count(depth)
        parts: Iterable[tuple[object, object]] | None = None
        if isinstance(value, TorchTensor | TorchDTensor):
            pass
        elif isinstance(value, dict) and (value or not name):
            parts = value.items()
        elif isinstance(value, list | tuple) and self._holds_tensors(value, depth):
            parts = enumerate(value)
        if parts is not None:
            for key, part in parts:
                self.add(f"{name}.{key}" if name else str(key), part, depth + 1)
        elif name in self.flat:
            raise CheckpointError(
                f"{self._path}: two entries have the name {name!r} once their dicts are joined "
                "with dots; rename one of them and save again"
            )
        else:
            self.flat[name] = value

    def _holds_tensors(self, value: object, depth: int) -> bool:
        self._count(depth)
        if isinstance(value, TorchTensor | TorchDTensor):
            return True
        parts = value.values() if isinstance(value, dict) else value
        if not isinstance(parts, Iterable) or isinstance(parts, str | bytes):
            return False
        return any(self._holds_tensors(part, depth + 1) for part in parts)

    def _count(self, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            raise CheckpointError(
                f"{self._path}: its dicts nest more than {_MOST_DEPTH} deep or repeat themselves "
                "without end; save a plain state dict"
            )


def plain_value(value: object) -> object:
    """Return a value of a pickle as None, numbers, texts, lists, tuples and dicts.

    Examples
    --------
    >>> from shardspec.checkpoint.torch_files.unpickler import mere_name
    >>> plain_value({"lr": (0.1, None), 0: mere_name("torch.float32")})
    {'lr': (0.1, None), 0: <torch.float32>}
    """
    left = _MOST_PLAIN_PARTS

    def plain(value: object, depth: int) -> object:
        nonlocal left
        match value:
            case TorchTensor() | TorchDTensor():
                return OpaqueValue(f"tensor of shape {list(value.shape)}")
            case Complex():
                return OpaqueValue(str(value))
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple() | dict():
                left -= len(value)
                if left < 0 or depth > _MOST_PLAIN_DEPTH:
                    raise OverflowError
        match value:
            case list():
                return [plain(item, depth + 1) for item in value]
            case tuple():
                return tuple(plain(item, depth + 1) for item in value)
            case dict():
                return {plain(key, depth + 1): plain(at, depth + 1) for key, at in value.items()}
            case bytes():
                return OpaqueValue(f"{len(value)} bytes")
            case Global():
                return OpaqueValue(value.name)
            case Record():
                return OpaqueValue(f"<{value.name}>")
        return OpaqueValue(type(value).__name__)

    try:
        return plain(value, 0)
    except OverflowError:
        return OpaqueValue(f"a {type(value).__name__} of many or deeply nested parts")
