"""Sizes that a map names: numbers, expressions in other sizes, and keys of a model's config."""

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Final

from shardspec.errors import LayoutError, SpecSyntaxError
from shardspec.resharding.views import evaluate
from shardspec.text import shown

_WORD: Final = re.compile(r"[A-Za-z_]\w*")


def known_sizes(sizes: Mapping[str, int | str]) -> dict[str, int]:
    """Return the sizes that can be computed.

    Raises LayoutError if an expression is invalid, too large, or refers to itself.
    """
    numbers = {name: size for name, size in sizes.items() if isinstance(size, int)}
    needed = {name: _WORD.findall(size) for name, size in sizes.items() if isinstance(size, str)}
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        raise LayoutError(
            f"the size {error.args[1][0]!r} is made of itself; give it as a number"
        ) from None
    for name in order:
        text = sizes.get(name)
        if isinstance(text, str) and all(word in numbers for word in needed[name]):
            try:
                numbers[name] = evaluate(text, numbers)
            except SpecSyntaxError as error:
                raise LayoutError(f"the size {name!r}: {error.problem}: {shown(text)}") from None
    return numbers


def unknown_root(name: str, sizes: Mapping[str, int | str]) -> str:
    """Return the size to supply so that another can be computed.

    >>> unknown_root("r", {"r": "q + 2", "q": "heads // groups", "heads": 8})
    'groups'
    """
    numbers = known_sizes(sizes)
    while isinstance(text := sizes.get(name), str):
        missing = [word for word in _WORD.findall(text) if word not in numbers]
        if not missing:
            break
        name = missing[0]
    return name


def in_words_of_config(text: str, sizes: Mapping[str, int | str]) -> str:
    """Replace sizes that are short for others, such as those of a model's config.

    >>> in_words_of_config("'g' is 4 long", {"g": "num_key_value_heads"})
    "'num_key_value_heads' is 4 long"
    """

    def longer(match: re.Match[str]) -> str:
        name = match[0]
        for _ in range(len(sizes)):
            value = sizes.get(name)
            if not isinstance(value, str) or not value.isidentifier():
                break
            name = value
        return name

    return _WORD.sub(longer, text)


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config with the keys of its `text_config` on the top level, where they win."""
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def config_sizes(config: Mapping[str, object]) -> dict[str, int]:
    """Return the integers of a config; those of its `text_config` win, and True counts as 1.

    >>> config_sizes({"model_type": "x", "text_config": {"hidden_size": 8}, "tie": False})
    {'tie': 0, 'hidden_size': 8}
    """
    every = text_config(config).items()
    return {str(name): int(size) for name, size in every if isinstance(size, int)}


def check_model_type(config: Mapping[str, object], model_types: tuple[str, ...]) -> None:
    """Raise LayoutError if the model type of a config is not one that a map accepts."""
    types = (part.get("model_type") for part in (config, text_config(config)))
    given = [model_type for model_type in types if isinstance(model_type, str)]
    if model_types and given and not set(given) & set(model_types):
        raise LayoutError(
            f"the config is of a model of type {shown(given[0])}, the map is for "
            f"{', '.join(map(repr, model_types))}; take a map for {shown(given[0])}, whose "
            "tensors differ"
        )
