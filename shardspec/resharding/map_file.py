"""Reads name maps from TOML, and matches names with patterns such as ``layers.{i}.weight``."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, TypeAlias

from shardspec.errors import LayoutError, SpecSyntaxError
from shardspec.input_files import parse_toml
from shardspec.resharding.views import evaluate
from shardspec.text import shown

Side: TypeAlias = tuple[str, ...]
"""A name, perhaps with a view and slices of it: ``("qkv", "(g r) c", "r[:2]")``."""
Binding: TypeAlias = dict[str, int]
"""Placeholder -> its number."""
NamesByForm: TypeAlias = Mapping[str, Sequence[str]]
"""Names grouped by `form_of`, so that a pattern is compared with few of them."""

_PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_]\w*)\}", re.ASCII)
_DIGITS: Final = re.compile("[0-9]+")

_Table: TypeAlias = Mapping[str, object]


def read_map(text: str) -> dict[str, Any]:
    """Parse a TOML name map; return the fields of `NameMap`. LayoutError if it is not valid."""
    try:
        fields = parse_toml(text)
    except ValueError as error:
        raise LayoutError(f"this is not TOML: {error}") from None
    if unknown := sorted(set(fields) - {"map", "sizes", "zeros", "unused", "model_types"}):
        raise LayoutError(
            "a map has model_types, [sizes], [[map]], [[zeros]] and [[unused]], not "
            f"{shown(unknown[0])}"
        )
    sizes = fields.get("sizes", {})
    if not isinstance(sizes, dict) or not all(
        isinstance(size, int | str) and not isinstance(size, bool) for size in sizes.values()
    ):
        raise LayoutError("[sizes] has numbers, or expressions as text")
    types = fields.get("model_types", [])
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise LayoutError(f'model_types is a list, as in ["llama"]; not {shown(types)}')
    maps = _tables(fields, "map", {"source", "target"})
    return {
        "rules": tuple((_side(table, "source"), _side(table, "target")) for table in maps),
        "sizes": sizes,
        "zeros": tuple(_side(table, "target") for table in _tables(fields, "zeros", {"target"})),
        "unused": tuple(_side(table, "source") for table in _tables(fields, "unused", {"source"})),
        "model_types": tuple(types),
    }


def _tables(fields: _Table, key: str, keys: Collection[str]) -> list[dict[str, object]]:
    tables = fields.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise LayoutError(f"{key} is a list of tables, as in [[{key}]]")
    for table in tables:
        if unknown := sorted(table.keys() - set(keys)):
            raise LayoutError(f"[[{key}]] takes {', '.join(sorted(keys))}, not {shown(unknown[0])}")
    return tables


def _side(table: _Table, end: str) -> Side:
    """Return the value of key `end`, ``source`` or ``target``, in a TOML table."""
    value = table.get(end)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise LayoutError(
            f"{end} is a name, or a list of a name, a view and slices of it; not {shown(value)}"
        )
    check_pattern(texts[0])
    return tuple(texts)


def placeholders(text: str) -> set[str]:
    """Return the placeholders of a name.

    >>> sorted(placeholders("layers.{i}.experts.{e}.weight"))
    ['e', 'i']
    """
    return set(_PLACEHOLDER.findall(text))


def check_pattern(name: str) -> None:
    """Raise LayoutError for an unmatched brace, or for adjacent placeholders as in ``{i}{j}``."""
    if set("{}") & set(_PLACEHOLDER.sub("", name)):
        raise LayoutError(f"{shown(name)} has a brace outside of placeholders such as {{i}}")
    between = _PLACEHOLDER.split(name)[2:-1:2]
    if any(not _DIGITS.sub("", text) for text in between):
        raise LayoutError(
            f"{shown(name)} has placeholders side by side; put text other than digits between them"
        )


def form_of(name: str) -> str:
    """Return a name or pattern without numbers and placeholders: equal for all layers.

    >>> form_of("layers.{i}.w") == form_of("layers.17.w")
    True
    """
    return _DIGITS.sub("0", _PLACEHOLDER.sub("0", name) if "{" in name else name)


def names_by_form(names: Iterable[str]) -> NamesByForm:
    """Group names that differ only in numbers, such as those of all layers."""
    by_form = defaultdict(list)
    for name in names:
        by_form[form_of(name)].append(name)
    return by_form


def bindings(pattern: str, names: NamesByForm) -> dict[str, Binding]:
    """Match a pattern with names; return matching name -> number of each placeholder.

    >>> bindings("a.{i}.b.{e}", names_by_form(["a.3.b.12", "a.03.b.1", "a.1.c.1"]))
    {'a.3.b.12': {'i': 3, 'e': 12}}
    """
    candidates = names.get(form_of(pattern), ())
    text, bound_names = "", set[str]()
    for number, part in enumerate(_PLACEHOLDER.split(pattern)):
        if number % 2 == 0:
            text += re.escape(part)
        else:
            text += f"(?P={part})" if part in bound_names else f"(?P<{part}>0|[1-9][0-9]{{0,8}})"
            bound_names.add(part)
    matches = map(re.compile(text).fullmatch, candidates)
    return {
        match[0]: {key: int(n) for key, n in match.groupdict().items()}
        for match in matches
        if match
    }


def filled(side: Side, binding: Mapping[str, int]) -> Side:
    """Replace the placeholders in a side: layers.{i} with i = 3 is layers.3."""
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
    """Return each text of a side as a ``%`` format, with its placeholders in order."""
    split = [_PLACEHOLDER.split(text.replace("%", "%%")) for text in side]
    return tuple(("%d".join(parts[::2]), parts[1::2]) for parts in split)


_WORD: Final = re.compile(r"[A-Za-z_]\w*")


def known_sizes(sizes: Mapping[str, int | str]) -> dict[str, int]:
    """Evaluate sizes such as "q + 2"; return those whose inputs are known.

    Raises LayoutError if an expression is invalid, too large, or refers to itself.
    """
    numbers = {name: size for name, size in sizes.items() if isinstance(size, int)}
    needed = {name: _WORD.findall(size) for name, size in sizes.items() if isinstance(size, str)}
    try:
        order = list(TopologicalSorter(needed).static_order())
    except CycleError as error:
        raise LayoutError(
            f"the size {error.args[1][0]!r} depends on itself; give a number"
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
    """Return the missing size on which another one depends.

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
    """Return a text, such as an error, with config keys for a map's abbreviated sizes.

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
    """Return a config with the keys of its nested `text_config` moved to the top."""
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, Mapping) else {})}


def config_sizes(config: Mapping[str, object]) -> dict[str, int]:
    """Return the integers of a config by key; those of its `text_config` win, True is 1.

    >>> config_sizes({"model_type": "x", "text_config": {"hidden_size": 8}, "tie": False})
    {'tie': 0, 'hidden_size': 8}
    """
    every = text_config(config).items()
    return {str(name): int(size) for name, size in every if isinstance(size, int)}


def check_model_type(config: Mapping[str, object], model_types: tuple[str, ...]) -> None:
    """Raise LayoutError if the config's `model_type` is not among those accepted."""
    types = (part.get("model_type") for part in (config, text_config(config)))
    own_types = [model_type for model_type in types if isinstance(model_type, str)]
    if model_types and own_types and not set(own_types) & set(model_types):
        raise LayoutError(
            f"the config is of a model of type {shown(own_types[0])}, the map is for "
            f"{', '.join(map(repr, model_types))}; take a map for {shown(own_types[0])}, whose "
            "tensors differ"
        )
