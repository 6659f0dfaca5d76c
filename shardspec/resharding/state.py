"""Flattens nested state dicts to dotted names, and makes their plain values comparable.

A name is the keys that lead to a value, joined by dots: ``{"a": {"b": 1}}`` has the name ``a.b``.
Mappings are always flattened, lists and tuples only if they contain tensors or mappings.
"""

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, Flag
from functools import lru_cache
from typing import Final, TypeAlias

from shardspec.errors import LayoutError, ShardSpecError
from shardspec.layout.layout import Layout
from shardspec.text import shown

KeyPath: TypeAlias = tuple[str | int | tuple[int], ...]
"""Keys from the outermost mapping inwards; a position in a list is a `Place`."""

MAX_DEPTH: Final = 64


class Place(tuple[int]):
    """A position in a list; a tuple of another type is a key."""

    __slots__ = ()


def leaves(state: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield (keys, value) for every tensor and value of a nested state dict.

    >>> list(leaves({"a": {0: 1.5}, "b": [{"lr": 2}], "c": (1, 2)}))
    [(('a', 0), 1.5), (('b', (0,), 'lr'), 2), (('c',), (1, 2))]
    """
    if isinstance(state, Mapping) and state and len(path) < MAX_DEPTH:
        for key, value in state.items():
            if isinstance(value, Layout):  # without a generator, as there may be thousands
                yield (*path, key), value
            else:
                yield from leaves(value, (*path, key))
    elif isinstance(state, list | tuple) and _holds_more(state) and len(path) < MAX_DEPTH:
        for place, value in enumerate(state):
            yield from leaves(value, (*path, Place((place,))))
    else:
        yield path, state


def _holds_more(items: Iterable[object], depth: int = 0) -> bool:
    """Return True if a list contains a tensor or a mapping at any depth, and is flattened."""
    return depth <= MAX_DEPTH and any(
        _holds_more(item, depth + 1)
        if isinstance(item, list | tuple)
        else isinstance(item, Mapping) or is_tensor(item)
        for item in items
    )


def is_tensor(value: object) -> bool:
    """Return True for a tensor of torch or shardspec, and for a Layout in its place."""
    if isinstance(value, Layout):
        return True
    if "torch" not in sys.modules:  # then nobody has made one
        return False
    import torch

    return isinstance(value, torch.Tensor)


def dotted_name(path: Sequence[object]) -> str:
    """Return the name of a value: the keys that lead to it, joined by dots.

    >>> dotted_name(("model", "layers", Place((0,)), "weight"))
    'model.layers.0.weight'
    """
    return ".".join([str(key[0] if isinstance(key, Place) else key) for key in path])


def keys_text(path: Sequence[object]) -> str:
    """Return keys as text for an error.

    >>> keys_text(("layers", Place((0,)), "w"))
    "['layers'][0]['w']"
    """
    return "".join(f"[{key[0] if isinstance(key, Place) else key!r}]" for key in path)


def named_leaves(state: Mapping[str, object]) -> Iterator[tuple[str, KeyPath, object]]:
    """Yield (dotted name, keys, value) for every tensor and value of a nested state dict.

    Raises LayoutError if two values get one name.
    """
    paths: dict[str, KeyPath] = {}
    for path, value in leaves(state) if state else ():
        name = dotted_name(path)
        if paths.setdefault(name, path) is not path:
            raise LayoutError(
                f"two values of the state dict would both be named {shown(name)}: the ones at "
                f"{keys_text(paths[name])} and {keys_text(path)}; rename a key"
            )
        yield name, path, value


def flat_state(state: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a nested state dict by their dotted names.

    Raises LayoutError if two values get one name.

    >>> flat_state({"step": 3, "state": {"w": {"lr": 0.1}}})
    {'step': 3, 'state.w.lr': 0.1}
    """
    return {name: value for name, _, value in named_leaves(state)}


def plain_key(value: object) -> Hashable:
    """Return a key that is equal for equal plain values, to compare the values of two ranks.

    Equal values have one type; NaN equals NaN, and -0.0 differs from 0.0. The order of keys and of
    sets does not count. Raises TypeError for anything but numbers, texts, bytes, None, members of
    enumerations, scalars of numpy, and lists, tuples, sets and dicts of these.

    >>> plain_key([0.0, float("nan")]) == plain_key([0.0, float("nan")])
    True
    >>> plain_key((1, {"a": 0.0})) == plain_key((1, {"a": -0.0}))
    False
    """
    import numpy as np  # names of checkpoints need none

    content: Hashable
    match value:
        case Flag():
            content = value.value
        case Enum():
            content = value.name
        case np.generic():
            content = repr(value)
        case float():
            content = float.__repr__(value)
        case complex():
            content = complex.__repr__(value)
        case None | int() | str() | bytes():
            content = value
        case list() | tuple():
            content = tuple(map(plain_key, value))
        case set() | frozenset():
            content = frozenset(map(plain_key, value))
        case Mapping():
            content = frozenset((plain_key(key), plain_key(item)) for key, item in value.items())
        case _:
            raise TypeError(f"a {type(value).__name__} is not a plain value")
    return type(value), content


def is_plain(value: object) -> bool:
    """Return True for numbers, texts, bytes, None, and lists and dicts of these.

    >>> is_plain([{"lr": 0.1, "betas": (0.9, 0.99)}]), is_plain([object()])
    (True, False)
    """
    try:
        plain_key(value)
    except (TypeError, RecursionError):  # a list can contain itself
        return False
    return True


def stated_layout(name: str, value: object) -> Layout | None:
    """Return the layout of a DTensor, or a Layout unchanged; None for any other value.

    Raises LayoutError if a spec cannot express torch's placements.
    """
    if isinstance(value, Layout):
        return value
    # Plans on paper need no torch.
    import torch.distributed.tensor as torch_tensor

    from shardspec.interop.torch_dtensor import layout_of
    from shardspec.tensor.dtensor import DTensor

    if isinstance(value, DTensor):
        return value.layout
    if not isinstance(value, torch_tensor.DTensor):
        return None
    try:
        return layout_of(value)
    except ShardSpecError as error:
        raise LayoutError(f"the layout of {name!r} cannot be used: {error}") from None


def required_layout(name: str, value: object) -> Layout:
    """Return the layout of a value; LayoutError if it has none."""
    layout = stated_layout(name, value)
    if layout is None:
        raise LayoutError(
            f"{name!r} is a {type(value).__name__}, which has no mesh; give a Layout, or a "
            "DTensor of shardspec or of torch, as distribute_tensor makes it"
        )
    return layout


@lru_cache(maxsize=4096)
def same_shards(ours: Layout, theirs: Layout) -> bool:
    """Return True if every device has the same box under both layouts, with nothing pending.

    >>> from shardspec import DeviceMesh
    >>> flat = Layout(DeviceMesh(range(4)), "[S0]", (8,), "f32")
    >>> grid = DeviceMesh(range(4), (2, 2))
    >>> [same_shards(flat, Layout(grid, spec, (8,), "f32")) for spec in ("[S01]", "[S10]")]
    [True, False]
    """
    if ours == theirs:
        return True
    same_tensor = (ours.global_shape, ours.dtype) == (theirs.global_shape, theirs.dtype)
    if not same_tensor or ours.spec.partials or theirs.spec.partials:
        return False
    ids = set(ours.mesh.ids)
    return ids == set(theirs.mesh.ids) and all(
        ours.intervals(device) == theirs.intervals(device) for device in ids
    )
