"""What one file of `torch.save` holds: its tensors by flat names, where each lies, and what else.

Nested dicts are flattened with dots, and lists that hold tensors with dots and numbers, so that
``{"optim": {"state": [{"step": t}]}}`` has the tensor ``optim.state.0.step``. Dicts and lists under
the same name would be lost, and are refused. Source of the rule: ``flatten_state_dict`` of
torch/distributed/checkpoint/_nested_dict.py, which DCP applies to what it saves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import OpaqueValue, StoredBox, StoredTensor
from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.unpickler import (
    Global,
    Names,
    Record,
    record_class,
    screen,
)
from shardspec.checkpoint.torch_files.values import (
    Complex,
    TensorPlace,
    TorchTensor,
    tensor_place,
)
from shardspec.checkpoint.torch_files.zip_reader import TorchZip, read_torch_zip
from shardspec.errors import CheckpointError

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
"""What trainers put beside tensors: arguments, paths, times, numpy's random state. None of it is
made; a record of its name stands for it."""


class StateTensor(NamedTuple):
    """A tensor of a file and where its bytes, or those of its local part, lie."""

    local: TorchTensor
    """What the file holds of it."""
    place: TensorPlace


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

    `rank` wrote it, if that is known; `more` are names that may stand in it beyond those of tensors
    and `ARGUMENT_NAMES`. Raises `CheckpointError` if it is damaged, holds no dict, names what does
    not belong in a checkpoint, or has two entries of one flat name.
    """
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        held, extras = read_contents(found, found.pickle(file), more, rank)
        places = {name: tensor_place(tensor, file, found) for name, tensor in held.items()}
    tensors = {name: StateTensor(tensor, places[name]) for name, tensor in held.items()}
    return TorchState(path, tensors, extras)


def read_torch_states(paths: Sequence[Path], more: Names | None = None) -> list[TorchState]:
    """Read the states in the files of one checkpoint as `read_torch_state`, of stores at once."""
    look = partial(read_torch_state, more=more)
    with prefetch_map(paths, look, prefetch_depth(paths[0])) as states:
        return list(states)


def read_contents(
    found: TorchZip,
    data: bytes,
    more: Names | None = None,
    rank: int | None = None,
    screened: Callable[[bytes], None] = screen,
) -> tuple[dict[str, TorchTensor], dict[str, object]]:
    """Return the tensors of which a pickle speaks, and other entries, by flat names."""
    value = read_torch(found, data, {**ARGUMENT_NAMES, **(more or {})}, rank, screened)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{found.path}: holds a {type(value).__name__}, not a dict of tensors; save a state "
            "dict"
        )
    tensors: dict[str, TorchTensor] = {}
    others: dict[str, object] = {}
    seen: set[str] = set()
    for name, part in _flat_state(value, found.path).items():
        if not isinstance(part, TorchTensor):
            others[name] = part
            continue
        if part.is_part:
            if part.storage.key in seen:
                part = part._replace(digested=False)
            seen.add(part.storage.key)
        tensors[name] = part
    return tensors, others


def _flat_state(state: dict[object, object], path: Path) -> dict[str, object]:
    """Return every part of nested dicts, and of lists that hold tensors, by its flat name.

    What is no tree is refused, once going through it takes too long.
    """
    flat: dict[str, object] = {}
    left = _MOST_PARTS

    def count(depth: int) -> None:
        nonlocal left
        left -= 1
        if left < 0 or depth > _MOST_DEPTH:
            raise CheckpointError(
                f"{path}: its dicts nest more than {_MOST_DEPTH} deep or repeat themselves without "
                "end; save a plain state dict"
            )

    def holds_tensors(value: object, depth: int) -> bool:
        count(depth)
        if isinstance(value, TorchTensor):
            return True
        parts: Iterable[object] = value if isinstance(value, list | tuple) else ()
        if isinstance(value, dict):
            parts = value.values()
        return any(holds_tensors(part, depth + 1) for part in parts)

    def add(keys: tuple[str, ...], value: object, depth: int) -> None:
        count(depth)
        if isinstance(value, dict) and (value or not keys):
            for key, part in value.items():
                add((*keys, str(key)), part, depth + 1)
        elif (
            isinstance(value, list | tuple)
            and not isinstance(value, TorchTensor)
            and holds_tensors(value, depth)
        ):
            for place, part in enumerate(value):
                add((*keys, str(place)), part, depth + 1)
        elif (name := ".".join(keys)) in flat:
            raise CheckpointError(
                f"{path}: two entries have the name {name!r} once their dicts are joined with "
                "dots; rename one of them and save again"
            )
        else:
            flat[name] = value

    add((), state, 0)
    return flat


def plain_value(value: object) -> object:
    """Return a value of a pickle as None, numbers, texts, lists, tuples, dicts, `OpaqueValue`s."""
    left = _MOST_PLAIN_PARTS

    def plain(value: object, depth: int) -> object:
        nonlocal left
        match value:
            case TorchTensor():
                return OpaqueValue(f"tensor of shape {list(value.global_shape)}")
            case Complex():
                return OpaqueValue(str(value))
            case None | bool() | int() | float() | str():
                return value
            case bytes():
                return OpaqueValue(f"{len(value)} bytes")
            case Global():
                return OpaqueValue(value.name)
            case Record():
                return OpaqueValue(f"<{value.name}>")
            case list() | tuple() | dict():
                left -= len(value)
                if left < 0 or depth > _MOST_PLAIN_DEPTH:
                    raise OverflowError
            case _:
                return OpaqueValue(type(value).__name__)
        if isinstance(value, dict):
            return {plain(key, depth + 1): plain(at, depth + 1) for key, at in value.items()}
        parts = [plain(item, depth + 1) for item in value]
        return parts if isinstance(value, list) else tuple(parts)

    try:
        return plain(value, 0)
    except OverflowError:
        return OpaqueValue(f"a {type(value).__name__} of many or deeply nested parts")


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
