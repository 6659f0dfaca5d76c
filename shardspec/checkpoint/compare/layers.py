"""Names of tensors as people read them: numbers in order, and alike layers in one line."""

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Final, NamedTuple, TypeAlias

from shardspec.layout.picture import ids_text
from shardspec.text import natural_order

_NUMBER: Final = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")
"""A component of a name that counts something, such as the 12 of ``layers.12.up.weight``."""
_MOMENT: Final = re.compile(
    r"(?:^|\.)(max_exp_avg_sq|exp_avg_sq|exp_avg|momentum_buffer|square_avg|step)(?=\.|$)"
)
_OPTIMIZER: Final = re.compile(
    rf"(?:^|\.)(?:chained_\d+|optim|optimizers?|optimizer_state_dict)\.|{_MOMENT.pattern}"
)
"""Names of an optimizer's state, as torch, Megatron and DeepSpeed give them."""
_MAIN: Final = re.compile(r"optimizer\.state\.((?:fp32_)?param)\.")
"""Main parameters of Megatron's distributed optimizer."""
_NUMBERED: Final = "(numbered)"
"""The group of names that begin with a number."""
_MAX_GROUPS: Final = 12
_TRIED_NAMES: Final = 8

_Numbers: TypeAlias = tuple[int, ...]


class Repeated(NamedTuple):
    """Tensors whose names differ in numbers only, and that are alike."""

    title: str
    """Their names in one: ``layers.{0..31}.up.weight``."""
    names: Sequence[str]


def repeated_layers(alike: Mapping[str, Hashable]) -> list[Repeated]:
    """Put names together that differ in numbers only and have equal values in `alike`.

    The names of each of the results are all that its title stands for, and no others. The results
    are in the natural order of their first names.

    >>> shapes = {f"layers.{i}.up": (4, 2) for i in range(12)}
    >>> shapes |= {"head": (2,), "layers.12.up": (4,)}
    >>> [(one.title, len(one.names)) for one in repeated_layers(shapes)]
    [('head', 1), ('layers.{0..11}.up', 12), ('layers.12.up', 1)]
    """
    groups: dict[tuple[tuple[str, ...], Hashable], dict[_Numbers, str]] = defaultdict(dict)
    for name, value in alike.items():
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
    """Split sorted tuples into blocks with every combination of a few numbers at each place."""
    if not numbers[0]:
        yield []
        return
    rests: dict[int, list[_Numbers]] = defaultdict(list)
    for first, *rest in numbers:
        rests[first].append(tuple(rest))
    alike: dict[tuple[_Numbers, ...], list[int]] = defaultdict(list)  # layers with the same experts
    for first, rest_of in rests.items():
        alike[tuple(rest_of)].append(first)
    for inner, firsts in alike.items():
        for block in _blocks(inner):
            yield [tuple(firsts), *block]


def _numbers_text(numbers: _Numbers) -> str:
    """Return numbers in braces, many in a row by the first and the last; one as it is.

    >>> _numbers_text((0, 1, 2, 5)), _numbers_text((4,))
    ('{0..2,5}', '4')
    """
    return str(numbers[0]) if len(numbers) == 1 else f"{{{ids_text(numbers).replace('-', '..')}}}"


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Sort names into a few groups by how they begin: ``layers``, ``embed``, ``norm``.

    A group is named by what comes before the first number, or before the last word of a name; by
    less of that where there would be too many groups.

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
    """Return which state of an optimizer a tensor is, as ``exp_avg``; None for one of the model.

    >>> optimizer_kind("optim.state.up.weight.exp_avg"), optimizer_kind("up.weight")
    ('exp_avg', None)
    """
    if _OPTIMIZER.search(name) is None:
        return None
    kind = _MOMENT.search(name) or _MAIN.search(name)
    return "other" if kind is None else kind[1]


def prefix_change(names: Collection[str], others: Collection[str]) -> tuple[str, str] | None:
    """Return what begins all names in place of what begins the others; None if more differs.

    One side may have more names than the other; none may be the same on both.

    >>> prefix_change(["model.a.w", "model.b"], ["a.w", "b", "head"])
    ('model.', '')
    """
    if not names or not others or not set(names).isdisjoint(others):
        return None
    # By how they end, from the start of a component.
    ending: dict[str, str] = {}
    for other in others:
        for end in _ends(other):
            ending.setdefault(end, other)
    every_other = set(others)
    for name in natural_order(names)[:_TRIED_NAMES]:
        shared = next((end for end in _ends(name) if end in ending), None)
        if shared is None:
            continue
        old, new = name.removesuffix(shared), ending[shared].removesuffix(shared)
        renamed = {new + each.removeprefix(old) for each in names if each.startswith(old)}
        if len(renamed & every_other) == min(len(names), len(others)):
            return old, new
    return None


def _ends(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it without its first words."""
    while name:
        yield name
        name = name.partition(".")[2]
