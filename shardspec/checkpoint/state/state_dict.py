"""Flattens nested state dicts to tensors and plain values by name, and restores the nesting.

Names are those of `resharding/state.py`. A checkpoint also stores the keys, which are texts and
whole numbers, so that the nesting can be restored.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

from shardspec.checkpoint.storage.strict_json import is_size
from shardspec.errors import CheckpointError
from shardspec.resharding.state import (
    MAX_DEPTH,
    KeyPath,
    Place,
    dotted_name,
    is_plain,
    is_tensor,
    keys_text,
    leaves,
    named_leaves,
)

if TYPE_CHECKING:
    import torch

    from shardspec.tensor.dtensor import DTensor

Leaf: TypeAlias = "DTensor | torch.Tensor"

_MOST_BITS: Final = 13_300
"""Maximum bits of a whole number: Python parses at most 4,300 digits."""
OMITTED: Final = object()
"""Marks a value that `unflatten` skips."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state dict without its nesting."""

    tensors: Mapping[str, Leaf]
    values: Mapping[str, object]
    """Plain values."""
    paths: Mapping[str, KeyPath]
    """Nested keys by name; names of top-level entries are omitted."""


def flatten(state: Mapping[str, object]) -> FlatState:
    """Return the tensors and values of a state dict by name.

    Raises LayoutError if two values get one name, CheckpointError if a key is neither text nor a
    whole number, or a value is neither a tensor nor plain.
    """
    tensors: dict[str, Any] = {}
    values: dict[str, object] = {}
    paths: dict[str, KeyPath] = {}
    for name, path, value in named_leaves(state):
        for depth, key in enumerate(path):
            if not _is_key(key, depth):
                raise CheckpointError(
                    f"the key {key!r} at {keys_text(path)} is a {type(key).__name__}; name tensors "
                    "by text, and values inside of dicts by text and whole numbers"
                )
        if path != (name,):
            paths[name] = path
        if is_tensor(value):
            tensors[name] = value
        elif is_plain(value):
            values[name] = value
        else:
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__}, neither a tensor nor a plain value, such "
                "as a number, text or list of them; exclude it, or use torch.tensor"
            )
    return FlatState(tensors, values, paths)


def _is_key(key: object, depth: int) -> bool:
    kinds = str | int | Place if depth else str
    return isinstance(key, kinds) and not isinstance(key, bool)


def is_path(keys: tuple[object, ...]) -> TypeGuard[KeyPath]:
    """Return True if `save_sharded` supports these keys, as `leaves` yields them.

    >>> is_path(("optim", 0, "step")), is_path((0,))
    (True, False)
    """
    return 0 < len(keys) <= MAX_DEPTH and all(_is_key(key, at) for at, key in enumerate(keys))


def spread(
    values: Mapping[str, object], paths: Mapping[str, KeyPath]
) -> tuple[dict[str, object], dict[str, KeyPath]]:
    """Return values under the names that `flatten` would give them, and the keys of all names.

    Other formats store a list of dicts as one value. Raises CheckpointError if two names are equal.

    >>> spread({"groups": [{"lr": 1}]}, {})
    ({'groups.0.lr': 1}, {'groups.0.lr': ('groups', (0,), 'lr')})
    """
    parts_by_name: dict[str, object] = {}
    keys = dict(paths)
    for name, value in values.items():
        at = paths.get(name, (name,))
        for path, part in saved_leaves(value, at):
            inner = name if path == at else dotted_name(path)
            if inner in parts_by_name:
                raise CheckpointError(
                    f"two values, at {keys_text(path)} and elsewhere, would both be named "
                    f"{inner!r}; exclude one"
                )
            parts_by_name[inner] = part
            if path != (inner,):
                keys[inner] = path
    return parts_by_name, {
        name: path for name, path in keys.items() if name in parts_by_name or name not in values
    }


def saved_leaves(value: object, path: KeyPath) -> list[tuple[KeyPath, object]]:
    """Return the leaves of a value; the value itself if `flatten` refuses some of its keys."""
    parts = list(leaves(value, path))
    return parts if all(is_path(keys) for keys, _ in parts) else [(path, value)]


def encode_value(value: object, name: str = "", depth: int = 0) -> object:
    """Encode a plain value for JSON; types that JSON lacks become objects with one member.

    Raises CheckpointError for types that the sharding info cannot store.

    >>> encode_value({"betas": (0.9, float("inf"))})
    {'dict': [['betas', {'tuple': [0.9, {'float': 'inf'}]}]]}
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"value {name!r} nests deeper than {MAX_DEPTH} times")

    def encoded(items: Iterable[object]) -> list[object]:
        return [encode_value(item, name, depth + 1) for item in items]

    match value:
        case None | bool():
            return value
        case int() if value.bit_length() < _MOST_BITS:
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
        f"value {name!r}: sharding_info.json cannot store a {type(value).__name__}, only numbers "
        "of up to 4,000 digits, text, bytes, lists and dicts; remove it, or use torch.tensor"
    )


def decode_value(value: object) -> object:
    """Decode the result of `encode_value`; raises ValueError for anything else.

    >>> decode_value({"tuple": [0.9, {"float": "inf"}]})
    (0.9, inf)
    """
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
    raise ValueError("is not a value as sharding_info.json encodes it")


def encode_path(path: KeyPath) -> list[object]:
    """Encode keys for JSON: a position in a list becomes a list of one number.

    >>> encode_path(("groups", Place((0,)), "lr"))
    ['groups', [0], 'lr']
    """
    return [list(key) if isinstance(key, tuple) else key for key in path]


def decode_path(path: object) -> KeyPath:
    """Decode the result of `encode_path`; raises ValueError for anything else.

    >>> decode_path(["groups", [0], "lr"])
    ('groups', (0,), 'lr')
    """
    if not isinstance(path, list) or not path or len(path) > MAX_DEPTH:
        raise ValueError("is not a list of keys")
    keys: list[Any] = []
    for depth, key in enumerate(path):
        is_place = isinstance(key, list) and len(key) == 1 and is_size(key[0])
        keys.append(Place(key) if is_place else key)
        if not _is_key(keys[-1], depth):
            raise ValueError(f"has the key {key!r:.60}, but keys are text or whole numbers")
    return tuple(keys)


def fitting_paths(
    paths: Mapping[str, KeyPath], names: Collection[str], beside: Iterable[str] = ()
) -> dict[str, KeyPath]:
    """Return the nested keys of names; none if they conflict with the names in `beside`.

    If tensors of a list were renamed or excluded, every name becomes a top-level key.

    >>> paths = {"a.0": ("a", (0,)), "a.1": ("a", (1,))}
    >>> fitting_paths(paths, ["a.0"]), fitting_paths(paths, ["a.1"])
    ({'a.0': ('a', (0,))}, {})
    """
    fitting = {name: path for name, path in paths.items() if name in names}
    if not fitting:
        return {}
    try:
        unflatten({name: fitting.get(name, (name,)) for name in (*names, *beside)}, lambda _: None)
    except CheckpointError:
        return {}
    return fitting


class _Node(dict[Any, Any]):
    """A dict or list under construction; any other dict is a value."""


def unflatten(paths: Mapping[str, KeyPath], of: Callable[[str], object]) -> dict[Any, Any]:
    """Build nested dicts and lists from the keys and the value of every name.

    A value may be `OMITTED`; None takes its place in a list. Raises CheckpointError if keys
    conflict: a value and a dict have the same keys, or a list has a gap.

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
                f"another value has the same keys as {name!r}; rename it, or restore the "
                "sharding info of the checkpoint"
            )
        node[path[-1]] = of(name)
    nested = _nested(root)
    return {} if nested is OMITTED else nested


def _nested(node: Any) -> Any:  # noqa: ANN401  # dicts, lists, values
    if not isinstance(node, _Node):
        return node
    items = {key: _nested(value) for key, value in node.items()}
    present = {key: value for key, value in items.items() if value is not OMITTED}
    if any(isinstance(key, tuple) for key in node):
        places = [(place,) for place in range(len(node))]
        if node.keys() != set(places):
            raise CheckpointError(
                f"the keys {', '.join(map(repr, list(node)[:3]))} of the checkpoint do not form "
                "a list; its sharding info is damaged, restore it"
            )
        return [present.get(place) for place in places] if present else OMITTED
    return present or OMITTED
