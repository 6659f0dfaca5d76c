"""Whether a source has every tensor that a map names: numbers run from 0, and nothing is missing.

What a source has says how far numbers run, unless sizes do: ``{i}`` may be one. Tensors that a
model may lack belong to a group, whose tensors are present together or absent together.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from shardspec.resharding.patterns import Binding, Side, filled, placeholders


class Sought(NamedTuple):
    """A rule, and the numbers of the tensors that it matches in the source."""

    side: Side
    """The end of the source."""
    group: str | None
    """What it may lack as a whole; placeholders in it make groups of their own."""
    bindings: Sequence[Binding]


def missing(
    rules: Sequence[Sought],
    as_numbers: Mapping[str, int],
    sizes: Mapping[str, int | str],
    numbers: Mapping[str, Collection[int]] | None = None,
) -> Iterator[str]:
    """Yield what is missing or too much, a line per rule or group.

    Parameters
    ----------
    rules
        What is looked for, and what the source has.
    as_numbers, sizes
        Sizes as numbers, and as they are given; ``{i}`` is how many numbers `i` stands for.
    numbers
        Which ones, where these are not all from 0 on.
    """
    counts: dict[str, int] = {}
    for rule in rules:
        for name in placeholders(rule.side[0]):
            counts.setdefault(name, 1)
        for binding in rule.bindings:
            for name, number in binding.items():
                counts[name] = max(counts.get(name, 1), number + 1)
    given = {name: as_numbers[f"{{{name}}}"] for name in counts if f"{{{name}}}" in as_numbers}
    for rule in rules:
        for binding in rule.bindings:
            for name in given.keys() & binding.keys():
                if binding[name] >= given[name]:
                    yield (
                        f"the source has {_named(rule.side, binding)}, but {{{name}}} ends at "
                        f"{given[name] - 1}, as {_origin(name, sizes)} is {given[name]}"
                    )
                    return
    counts |= given
    ranges: dict[str, Collection[int]] = {name: range(count) for name, count in counts.items()}
    ranges |= numbers or {}
    groups = _groups(rules)
    for rule in rules:
        if rule.group is None or as_numbers.get(rule.group, 0) > 0:
            if (lost := _first_missing(rule, {}, rule.bindings, ranges)) is not None:
                yield f"the source lacks {_named(rule.side, lost)}, which the map names"
            continue
        parts = _by_part(rule)
        for group, part in groups[rule.group].items():
            lost = _first_missing(rule, part, parts.get(group, ()), ranges)
            if lost is not None:
                yield (
                    f"the source lacks {_named(rule.side, lost)}, but has others that the map "
                    "wants together with it"
                )
                break


def _groups(rules: Sequence[Sought]) -> dict[str, dict[tuple[int, ...], Binding]]:
    """Return, per group, for which numbers of its placeholders some of its tensors exist."""
    groups: dict[str, dict[tuple[int, ...], Binding]] = {}
    for rule in rules:
        if rule.group is not None:
            present = groups.setdefault(rule.group, {})
            names = sorted(placeholders(rule.group))
            for numbers in _by_part(rule):
                present[numbers] = dict(zip(names, numbers, strict=True))
    return groups


def _by_part(rule: Sought) -> dict[tuple[int, ...], list[Binding]]:
    names = sorted(placeholders(rule.group or ""))
    parts: dict[tuple[int, ...], list[Binding]] = {}
    for binding in rule.bindings:
        parts.setdefault(tuple(binding.get(name, 0) for name in names), []).append(binding)
    return parts


def _first_missing(
    rule: Sought, part: Binding, bindings: Sequence[Binding], every: Mapping[str, Collection[int]]
) -> Binding | None:
    """Return the first numbers within a part of all that a rule does not match."""
    names = (
        sorted(rule.bindings[0])
        if rule.bindings
        else sorted(placeholders(rule.side[0]) | set(part))
    )
    ranges = [
        range(part[name], part[name] + 1) if name in part else every.get(name, range(1))
        for name in names
    ]
    if len(bindings) == prod(map(len, ranges)):
        return None
    present = {tuple(binding[name] for name in names) for binding in bindings}
    lost = next((numbers for numbers in product(*ranges) if numbers not in present), None)
    return None if lost is None else dict(zip(names, lost, strict=True))


def _named(side: Side, binding: Binding) -> str:
    """Return the name of a tensor, and which row of a stack is meant."""
    own = placeholders(side[0])
    rows = [f"{{{name}}} = {number}" for name, number in binding.items() if name not in own]
    return " at ".join([repr(filled(side[:1], binding)[0]), ", ".join(rows)][: 1 + bool(rows)])


def _origin(name: str, sizes: Mapping[str, int | str]) -> str:
    size = sizes[f"{{{name}}}"]
    return size if isinstance(size, str) else f"the size {{{name}}}"
