"""Nested state dicts as flat names, and back: tensors by name, plain values beside them.

A name is the keys on the way to a value, joined by dots. Mappings are always descended into, lists
and tuples where they hold tensors or mappings; other plain values stay whole.
"""

import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

from shardspec.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from shardspec.tensor.dtensor import DTensor

KeyPath: TypeAlias = tuple[str | int | tuple[int], ...]
"""Keys from the outermost mapping inwards; a position in a list is a tuple of one."""
Leaf: TypeAlias = "DTensor | torch.Tensor"

_MAX_DEPTH: Final = 64
LEFT_OUT: Final = object()
"""Stands for a value that `unflatten` leaves out."""


class Place(tuple[int]):
    """A position in a list, which is told from a tuple that is a key."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state dict without its nesting."""

    tensors: Mapping[str, Leaf]
    values: Mapping[str, object]
    """Plain values."""
    paths: Mapping[str, KeyPath]
    """The keys of those names that are not keys themselves."""


def leaves(state: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield every value that is not descended into, and the keys that lead to it.

    >>> list(leaves({"a": {0: 1.5}, "b": [{"lr": 2}], "c": (1, 2)}))
    [(('a', 0), 1.5), (('b', (0,), 'lr'), 2), (('c',), (1, 2))]
    """
    if isinstance(state, Mapping) and state and len(path) < _MAX_DEPTH:
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, list | tuple) and _holds_more(state) and len(path) < _MAX_DEPTH:
        for place, value in enumerate(state):
            yield from leaves(value, (*path, Place((place,))))
    else:
        yield path, state


def _holds_more(items: Iterable[object], depth: int = 0) -> bool:
    """Whether a list holds a tensor or a mapping, at any depth."""
    return depth <= _MAX_DEPTH and any(
        _holds_more(item, depth + 1)
        if isinstance(item, list | tuple)
        else isinstance(item, Mapping) or _is_tensor(item)
        for item in items
    )


def _is_tensor(value: object) -> bool:
    if "torch" not in sys.modules:  # then nobody has made one
        return False
    import torch

    from shardspec.tensor.dtensor import DTensor

    return isinstance(value, torch.Tensor | DTensor)


def flatten(state: Mapping[str, object]) -> FlatState:
    """Return the tensors and values of a state dict by name.

    Raises CheckpointError if a key is neither text nor a whole number, two values get one name, or
    a value is neither a tensor nor plain.
    """
    tensors: dict[str, Any] = {}
    values: dict[str, object] = {}
    paths: dict[str, KeyPath] = {}
    for path, value in leaves(state) if state else ():
        name = _name(path)
        if name in tensors or name in values:
            raise CheckpointError(
                f"two values of the state dict would both be named {name!r}: that at "
                f"{_shown(paths.get(name, (name,)))} and that at {_shown(path)}; rename a key"
            )
        if path != (name,):
            paths[name] = path
        if _is_tensor(value):
            tensors[name] = value
        else:
            # Refuses what is not a plain value.
            encode_value(value, name)
            values[name] = value
    return FlatState(tensors, values, paths)


def _name(path: KeyPath) -> str:
    for depth, key in enumerate(path):
        kinds = str | int | Place if depth else str
        if not isinstance(key, kinds) or isinstance(key, bool):
            raise CheckpointError(
                f"the key {key!r} at {_shown(path)} is a {type(key).__name__}; name tensors by "
                "text, and values inside of dicts by text and whole numbers"
            )
    return ".".join(str(key[0]) if isinstance(key, tuple) else str(key) for key in path)


def _shown(path: KeyPath) -> str:
    return "".join(f"[{key[0] if isinstance(key, Place) else key!r}]" for key in path)


def spread(
    values: Mapping[str, object], paths: Mapping[str, KeyPath]
) -> tuple[dict[str, object], dict[str, KeyPath]]:
    """Return values under the names that `flatten` would give them, and the keys of all names.

    Other formats keep lists of dicts whole. Raises CheckpointError if two values get one name.

    >>> spread({"groups": [{"lr": 1}]}, {})
    ({'groups.0.lr': 1}, {'groups.0.lr': ('groups', (0,), 'lr')})
    """
    found: dict[str, object] = {}
    keys = dict(paths)
    for name, value in values.items():
        at = paths.get(name, (name,))
        parts = list(leaves(value, at))
        if not all(is_path(path) for path, _ in parts):
            parts = [(at, value)]  # keys of other kinds: `flatten` takes none
        for path, part in parts:
            inner = name if path == at else _name(path)
            if inner in found:
                raise CheckpointError(
                    f"two values would both be named {inner!r}, that at {_shown(path)} and "
                    "another; exclude one"
                )
            found[inner] = part
            if path != (inner,):
                keys[inner] = path
    return found, {name: path for name, path in keys.items() if name in found or name not in values}


def encode_value(value: object, name: str = "", depth: int = 0) -> object:
    """Return a plain value as JSON has it; what JSON lacks is an object of one member.

    Raises CheckpointError, which tells the name, if it is not a plain value.

    >>> encode_value({"betas": (0.9, float("inf"))})
    {'dict': [['betas', {'tuple': [0.9, {'float': 'inf'}]}]]}
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"value {name!r} nests deeper than {_MAX_DEPTH} times")

    def encoded(items: Iterable[object]) -> list[object]:
        return [encode_value(item, name, depth + 1) for item in items]

    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if isfinite(value) else {"float": repr(float(value))}
        case bytes():
            return {"bytes": b64encode(value).decode()}
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise CheckpointError(
                    f"value {name!r} is a text that UTF-8 cannot express"
                ) from None
            return str(value)
        case list():
            return encoded(value)
        case tuple():
            return {"tuple": encoded(value)}
        case dict():
            return {"dict": [encoded(item) for item in value.items()]}
    raise CheckpointError(
        f"tensor {name!r} is a {type(value).__name__}; a checkpoint holds tensors and plain values "
        "(numbers, text, bytes, lists and dicts of them), so leave it out or make it one with "
        "torch.tensor"
    )


def decode_value(value: object) -> object:
    """Return the value that `encode_value` has encoded; ValueError if it is none such."""
    match value:
        case list():
            return [decode_value(item) for item in value]
        case {"float": str(text), **rest} if not rest:
            return float(text)
        case {"bytes": str(text), **rest} if not rest:
            return b64decode(text, validate=True)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(map(decode_value, items))
        case {"dict": list(items), **rest} if not rest:
            if all(isinstance(item, list) and len(item) == 2 for item in items):
                with suppress(TypeError):  # of a key that cannot be one
                    return {decode_value(key): decode_value(inner) for key, inner in items}
        case None | bool() | int() | float() | str():
            return value
    raise ValueError("is not an encoded value")


def is_path(keys: tuple[object, ...]) -> TypeGuard[KeyPath]:
    """Return whether keys, as `leaves` yields them, are such as `save_sharded` takes."""
    kinds = (str | int | Place if depth else str for depth in range(len(keys)))
    right = all(
        isinstance(key, kind) and not isinstance(key, bool)
        for key, kind in zip(keys, kinds, strict=True)
    )
    return right and 0 < len(keys) <= _MAX_DEPTH


def encode_path(path: KeyPath) -> list[object]:
    """Return keys as JSON has them: a position in a list is a list of one."""
    return [list(key) if isinstance(key, tuple) else key for key in path]


def decode_path(path: object) -> KeyPath:
    """Return the keys that `encode_path` has encoded; ValueError if they are none such."""
    if not isinstance(path, list) or not path[:1] or len(path) > _MAX_DEPTH:
        raise ValueError("is not a list of keys")
    found: list[str | int | tuple[int]] = []
    for key in path:
        match key:
            case str() | int() if not isinstance(key, bool) and (found or isinstance(key, str)):
                found.append(key)
            case [int(place)] if not isinstance(place, bool) and place >= 0 and found:
                found.append(Place((place,)))
            case _:
                raise ValueError(f"has the key {key!r:.60}, but keys are text or whole numbers")
    return tuple(found)


class _Node(dict[Any, Any]):
    """A dict or list in the making; any other dict is a value."""


def unflatten(paths: Mapping[str, KeyPath], of: Callable[[str], object]) -> dict[Any, Any]:
    """Return nested dicts and lists of values, given the keys of every name, and its value.

    A value may be `LEFT_OUT`; None takes its place in a list. Raises CheckpointError if keys
    contradict each other: a value has the place of others, or a list has a gap.

    >>> unflatten({"a.0": ("a", (0,)), "b": ("b",)}, str.upper)
    {'a': ['A.0'], 'b': 'B'}
    """
    root = _Node()
    for name, path in paths.items():
        node: Any = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node()) if isinstance(node, _Node) else node
        if not isinstance(node, _Node) or path[-1] in node:
            raise CheckpointError(
                f"the keys of {name!r} lead to where another value is; rename it otherwise, or "
                "restore the sharding info of the checkpoint"
            )
        node[path[-1]] = of(name)
    found = _nested(root)
    return {} if found is LEFT_OUT else found


def _nested(node: Any) -> Any:  # noqa: ANN401  # dicts, lists, values
    if not isinstance(node, _Node):
        return node
    found = {key: _nested(value) for key, value in node.items()}
    kept = {key: value for key, value in found.items() if value is not LEFT_OUT}
    if any(isinstance(key, tuple) for key in node):
        places = [(place,) for place in range(len(node))]
        if node.keys() != set(places):
            raise CheckpointError(
                f"the keys {', '.join(map(repr, list(node)[:3]))} of the checkpoint are those of "
                "no list; its sharding info is damaged, restore it"
            )
        return [kept.get(place) for place in places] if kept else LEFT_OUT
    return kept or LEFT_OUT
