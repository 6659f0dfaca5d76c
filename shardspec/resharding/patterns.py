"""Names with placeholders for numbers, such as ``layers.{i}.weight``."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from shardspec.errors import LayoutError
from shardspec.text import shown

Side: TypeAlias = tuple[str, ...]
"""A name, then perhaps a view, then perhaps slices of it."""
Binding: TypeAlias = dict[str, int]
"""Placeholder to the number that it stands for."""
NamesByForm: TypeAlias = Mapping[str, Sequence[str]]
"""Names by what they are without their numbers, so that a pattern looks at few of them."""

_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
_DIGITS: Final = re.compile("[0-9]+")


def placeholders(text: str) -> set[str]:
    """Return the placeholders of a name.

    >>> sorted(placeholders("layers.{i}.experts.{e}.weight"))
    ['e', 'i']
    """
    return set(_PLACEHOLDER.findall(text))


def check_pattern(name: str) -> None:
    """Raise LayoutError if placeholders are odd, or digits do not tell to which they belong."""
    if set("{}") & set(_PLACEHOLDER.sub("", name)):
        raise LayoutError(f"{shown(name)} has a brace that is no placeholder, as {{i}} is one")
    between = _PLACEHOLDER.split(name)[2:-1:2]
    if any(not _DIGITS.sub("", text) for text in between):
        raise LayoutError(
            f"{shown(name)} has placeholders side by side; put text other than digits between them"
        )


def form_of(name: str) -> str:
    """Return a name or pattern without its numbers and placeholders.

    >>> form_of("layers.{i}.w") == form_of("layers.17.w")
    True
    """
    return _DIGITS.sub("0", _PLACEHOLDER.sub("0", name) if "{" in name else name)


def names_by_form(names: Iterable[str]) -> NamesByForm:
    """Sort names by what they are without their numbers."""
    by_form = defaultdict(list)
    for name in names:
        by_form[form_of(name)].append(name)
    return by_form


def bindings(pattern: str, names: NamesByForm) -> dict[str, Binding]:
    """Return, per name that a pattern matches, the numbers that its placeholders stand for.

    >>> bindings("a.{i}.b.{e}", names_by_form(["a.3.b.12", "a.03.b.1", "a.1.c.1"]))
    {'a.3.b.12': {'i': 3, 'e': 12}}
    """
    candidates = names.get(form_of(pattern), ())
    text, seen = "", set[str]()
    for number, part in enumerate(_PLACEHOLDER.split(pattern)):
        if number % 2 == 0:
            text += re.escape(part)
        else:
            text += f"(?P={part})" if part in seen else f"(?P<{part}>0|[1-9][0-9]{{0,8}})"
            seen.add(part)
    matches = map(re.compile(text).fullmatch, candidates)
    return {
        match[0]: {key: int(n) for key, n in match.groupdict().items()}
        for match in matches
        if match
    }


def filled(side: Side, binding: Mapping[str, int]) -> Side:
    """Return a side with numbers for placeholders; LayoutError if one has no number."""
    try:
        return tuple(
            [text % tuple([binding[name] for name in names]) for text, names in _formats(side)]
        )
    except KeyError as error:
        raise LayoutError(
            f"{shown(side[0])}: neither name has the placeholder {{{error.args[0]}}}"
        ) from None


@lru_cache(maxsize=4096)
def _formats(side: Side) -> tuple[tuple[str, Sequence[str]], ...]:
    """Return each text of a side as what ``%`` takes, and its placeholders in order."""
    split = [_PLACEHOLDER.split(text.replace("%", "%%")) for text in side]
    return tuple(("%d".join(parts[::2]), parts[1::2]) for parts in split)
