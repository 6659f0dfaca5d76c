"""The text of a name map: TOML, of bounded size, into plain values."""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias

from shardspec.errors import LayoutError
from shardspec.resharding.patterns import Side, check_pattern
from shardspec.text import shown

_MOST_ENTRIES: Final = 10_000
"""Of each table."""
_MOST_CHARACTERS: Final = 1_000
"""Of a name, a view or a slice."""

_Table: TypeAlias = Mapping[str, object]


def read_map(text: str) -> dict[str, Any]:
    """Return the fields of the `NameMap` that a text describes; LayoutError if it is no map."""
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Besides its own error: numbers of thousands of digits, and what nests too deep.
        raise LayoutError(f"this is not TOML: {error}") from None
    if unknown := sorted(set(given) - {"map", "sizes", "zeros", "unused", "model_types"}):
        raise LayoutError(
            "a map has model_types, [sizes], [[map]], [[zeros]] and [[unused]], not "
            f"{shown(unknown[0])}"
        )
    sizes = given.get("sizes", {})
    if not isinstance(sizes, dict) or not all(
        isinstance(size, int | str) and not isinstance(size, bool) for size in sizes.values()
    ):
        raise LayoutError("[sizes] holds numbers, or expressions as text")
    if len(sizes) > _MOST_ENTRIES:
        raise LayoutError(f"[sizes] has more than {_MOST_ENTRIES:,} entries")
    types = given.get("model_types", [])
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise LayoutError(f'model_types is a list, as in ["llama"]; not {shown(types)}')
    maps = _tables(given, "map", {"source", "target"})
    unused = _tables(given, "unused", {"source", "unless"})
    return {
        "rules": tuple((_side(table, "source"), _side(table, "target")) for table in maps),
        "sizes": sizes,
        "zeros": tuple(_side(table, "target") for table in _tables(given, "zeros", {"target"})),
        "unused": tuple(_side(table, "source") for table in unused),
        "unless": _texts(unused, "unless"),
        "model_types": tuple(types),
    }


def _tables(given: _Table, key: str, keys: Collection[str]) -> list[dict[str, object]]:
    tables = given.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise LayoutError(f"{key} is a list of tables, as in [[{key}]]")
    if len(tables) > _MOST_ENTRIES:
        raise LayoutError(f"there are more than {_MOST_ENTRIES:,} tables [[{key}]]")
    for table in tables:
        if unknown := sorted(table.keys() - set(keys)):
            raise LayoutError(f"[[{key}]] has {', '.join(sorted(keys))}, not {shown(unknown[0])}")
    return tables


def _side(table: _Table, end: str) -> Side:
    """Return one end of a table: a name, then perhaps a view, then perhaps slices of it."""
    value = table.get(end)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise LayoutError(
            f"{end} is a name, or a list of a name, a view and slices of it; not {shown(value)}"
        )
    if max(map(len, texts)) > _MOST_CHARACTERS or len(texts) > _MOST_CHARACTERS:
        raise LayoutError(
            f"{end} {shown(texts[0])}: a name, a view and a slice have {_MOST_CHARACTERS:,} "
            "characters at most, and a view has as many slices at most"
        )
    check_pattern(texts[0])
    return tuple(texts)


def _texts(tables: Iterable[_Table], key: str) -> dict[int, str]:
    """Return a text of some tables, by their place."""
    texts = {}
    for place, table in enumerate(tables):
        text = table.get(key)
        if isinstance(text, str) and text:
            texts[place] = text
        elif key in table:
            raise LayoutError(f"{key} is a name, not {shown(text)}")
    return texts
