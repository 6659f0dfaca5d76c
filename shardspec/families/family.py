"""One family of models, read from its TOML file: rows of tensors, and the sizes they name."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from shardspec.errors import LayoutError, SpecSyntaxError
from shardspec.resharding.map_file import Side, form_of, placeholders, text_config
from shardspec.resharding.views import parse_view
from shardspec.text import Argument, shown

_ENTRY_POINTS: Final = "shardspec.families"
"""Entry points of other packages: each leads to the text of a family's TOML."""
CUTS: Final = (
    *("vocab", "heads", "kv-heads", "columns", "rows", "replicated"),
    *("latent", "summed"),
)
"""Ways to shard a tensor. `latent`: sharded only by Megatron-core's own layers. `summed`: stored
whole on rank 0 of an engine that adds up all ranks."""
PLACES: Final = ("file", "live", "megatron", "fused")
"""Files of transformers, its models in memory, Megatron-core, and engines for serving."""
NamesOf: TypeAlias = Literal["hf", "live", "megatron", "torch_dist", "sharded", "fused"]
"""Whose names the tensors of an output have."""
_KEYS: Final = {"hf", "view", "cut", "when", "in", "copy_of", *PLACES}
_TABLES: Final = {"model", "layer", "mtp"}
_HEADS: Final[Mapping[str, tuple[Any, str]]] = {
    **dict.fromkeys(("model_types", "without", "unused", *sorted(_TABLES)), (list, "a list")),
    **dict.fromkeys(("prefix", "sizes", "defaults", "refused"), (dict, "a table")),
    "like": (str, "the name of a family"),
}
"""Keys of a family besides its rows: the type of each value, and its name in errors."""
_SLICED: Final = re.compile(r"(\w+)\[")

_Table: TypeAlias = Mapping[str, object]


class Row(NamedTuple):
    """A tensor, or one of each layer or expert."""

    side: Side
    """Its name, view and slices in the files of transformers."""
    cut: Mapping[str, str]
    """Place -> the way in which it is sharded, one of `CUTS`."""
    places: Mapping[str, Side | None]
    """Place -> its side there; None if it has no place."""
    when: tuple[str, ...] = ()
    """Sizes that are not 0 where it exists; after ``not``, that are 0."""
    layers: str = ""
    """``dense`` or ``moe`` where it is in such layers only."""
    copy_of: str = ""
    """The tensor that it repeats."""

    @property
    def sides(self) -> dict[str, Side | None]:
        """Its name, view and slices by place, and in the files of transformers (``hf``)."""
        return {"hf": self.side, **self.places}


class Family(NamedTuple):
    """A family of models."""

    name: str
    model_types: tuple[str, ...]
    prefix: Mapping[str, str]
    """Prefix of the names of a layer's tensors, by ``hf`` and ``megatron``."""
    rows: Mapping[str, tuple[Row, ...]]
    """Rows of the ``model``, of each ``layer``, and of each further layer (``mtp``)."""
    unused: tuple[str, ...]
    """Names of tensors that files may contain and that go nowhere."""
    sizes: Mapping[str, str]
    """Sizes in words of the config, or of other sizes; also of keys that a config has as null."""
    defaults: Mapping[str, str]
    """Values of transformers' class for keys that a config lacks."""
    refused: Mapping[str, str]
    """Place, or ``all`` -> the reason why no map leads to or from it."""


@lru_cache(1)
def _built_in() -> tuple[str, ...]:
    names = (file.name for file in files("shardspec.families").iterdir())
    stems = (name.removesuffix(".toml") for name in names if name.endswith(".toml"))
    return tuple(sorted(stem.replace("_", "-") for stem in stems))


@lru_cache(1)
def _others() -> dict[str, EntryPoint]:
    points = {point.name: point for point in entry_points(group=_ENTRY_POINTS)}
    return {name: points[name] for name in sorted(points.keys() - {*_built_in()})}


def family_names() -> tuple[str, ...]:
    """Return the names of all families: shardspec's own, then those of other packages.

    >>> "qwen3-moe" in family_names()
    True
    """
    return (*_built_in(), *_others())


@lru_cache(64)
def shipped_family(name: str) -> Family:
    """Return the family of a name.

    Raises
    ------
    LayoutError
        If there is none of that name, or another package's cannot be loaded.
    """
    if name in _built_in():
        place = files("shardspec.families") / f"{name.replace('-', '_')}.toml"
        return read_family(place.read_text("utf-8"), name)
    if name not in _others():
        raise LayoutError(f"there is no family {name!r}; choose among {', '.join(family_names())}")
    try:
        text: object = _others()[name].load()
    except Exception as error:  # importing another package may raise anything
        text, problem = None, f"{type(error).__name__}: {error}"
    else:
        problem = f"it is a {type(text).__name__}, not text"
    if not isinstance(text, str):
        raise LayoutError(
            f"the family {name!r} of another package cannot be loaded ({problem}); correct or "
            "uninstall it"
        )
    return read_family(text, name)


def read_family(text: str, name: str) -> Family:
    """Read a family from TOML.

    Raises
    ------
    LayoutError
        If the text is not that of a family; it says the line.
    """
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"family {name!r} is not TOML: {error}") from None
    reader = _Reader(text, name)
    reader.check_heads(given)
    like = given.get("like")
    if like is not None and like not in {*family_names()} - {name}:
        raise reader.wrong("like", f"there is no other family {shown(like)} to be like")
    base = None if like is None else shipped_family(like)
    without = given.get("without", [])
    for pattern in without:
        every = [row.side[0] for rows in base.rows.values() for row in rows] if base else []
        if not any(fnmatchcase(old, pattern) for old in every):
            raise reader.wrong(pattern, f"without {shown(pattern)} matches no row of the base")
    rows = {}
    for table in ("model", "layer", "mtp"):
        own = [reader.row(entry) for entry in given.get(table, [])]
        reader.check_apart(own)
        names = {row.side[0] for row in own}
        kept = [
            row
            for row in (base.rows[table] if base else ())
            if row.side[0] not in names
            and not any(fnmatchcase(row.side[0], pattern) for pattern in without)
        ]
        rows[table] = (*kept, *own)

    def merged(key: str) -> dict[str, str]:
        old = getattr(base, key) if base else {}
        return {**old, **{word: str(value) for word, value in given.get(key, {}).items()}}

    sizes, refused = merged("sizes"), merged("refused")
    family = Family(
        name,
        tuple(given.get("model_types", [])),
        merged("prefix"),
        rows,
        (*(base.unused if base else ()), *given.get("unused", [])),
        sizes,
        merged("defaults"),
        refused,
    )
    if not (family.model_types and family.prefix.keys() >= {"hf", "megatron"}):
        raise LayoutError(f"family {name!r} needs model_types, and prefix with hf and megatron")
    for row in () if "all" in refused else (row for every in rows.values() for row in every):
        reader.check(row, family)
    return family


class _Reader:
    """Reads the rows of a text, and knows on which line each is."""

    def __init__(self, text: str, name: str) -> None:
        self._lines, self._name = text.splitlines(), name

    def wrong(self, word: str, problem: str, *, last: bool = False) -> LayoutError:
        """Return the error of the first or last line that has a word."""
        lines = [at for at, line in enumerate(self._lines, 1) if word in line.partition("#")[0]]
        line = lines[-1 if last else 0] if lines else 1
        return LayoutError(f"family {self._name!r}, line {line}: {problem}")

    def check_heads(self, given: Mapping[str, Any]) -> None:
        """Raise LayoutError if a family has unknown keys, or values of wrong types."""
        for key, value in given.items():
            if key not in _HEADS:
                raise self.wrong(key, f"{shown(key)} is no part of a family")
            kind, expected = _HEADS[key]
            if not isinstance(value, kind):
                raise self.wrong(key, f"{key} is {expected}, not {shown(value)}")
            texts = key in ("model_types", "without", "unused")
            if texts and not all(isinstance(text, str) for text in value):
                raise self.wrong(key, f"{key} is a list of texts, not {shown(value)}")
            for place in {*value} - {"all", *PLACES} if key == "refused" else ():
                raise self.wrong(str(place), f"{shown(place)} is no place; say megatron or fused")

    def check_apart(self, rows: Sequence[Row]) -> None:
        """Raise LayoutError if two rows are the same tensor in some place."""
        seen = set()
        for row in rows:
            for place, side in row.sides.items():
                key = place, side, row.layers, row.when
                if side is not None and key in seen:
                    name = row.side[0]
                    raise self.wrong(name, f"two rows are {shown(side[0])} in {place}", last=True)
                seen.add(key)

    def row(self, entry: object) -> Row:
        """Return the row of a table."""
        if not isinstance(entry, dict) or not isinstance(entry.get("hf"), str):
            raise self.wrong(str(entry), f"a row is a table with hf, view and cut; not {entry!r}")
        name = entry["hf"]
        if unknown := sorted(entry.keys() - _KEYS):
            raise self.wrong(name, f"row {shown(name)} has no {shown(unknown[0])}")
        view = entry.get("view")
        texts = [view] if isinstance(view, str) else view
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.wrong(name, f"the view of {shown(name)} is text, perhaps with slices")
        cuts = entry.get("cut")
        cut: dict[str, str] = (
            cuts if isinstance(cuts, dict) else dict.fromkeys(("megatron", "fused"), str(cuts))
        )
        if unknown := sorted(cut.keys() - PLACES):
            raise self.wrong(name, f"{shown(name)} is cut in {unknown[0]!r}, which is no place")
        if unknown := [text for text in cut.values() if text not in CUTS]:
            raise self.wrong(
                name, f"{shown(name)} is cut by {unknown[0]!r}; choose among {', '.join(CUTS)}"
            )
        whole = (name, *texts)
        places: dict[str, Side | None] = {}
        for place in PLACES:
            side = entry.get(place)
            if isinstance(side, str):
                places[place] = (side, *texts)
            elif isinstance(side, list) and all(isinstance(text, str) for text in side):
                places[place] = tuple(side)
            elif side is not None:
                raise self.wrong(name, f"{place} of {shown(name)} is a name, a view and slices")
        places.setdefault("file", whole)
        places.setdefault("live", places["file"])
        places.setdefault("fused", places["file"])
        places.setdefault("megatron", None)
        when = tuple(text.strip() for text in str(entry.get("when", "")).split(",") if text.strip())
        return Row(whole, cut, places, when, entry.get("in", ""), entry.get("copy_of", ""))

    def check(self, row: Row, family: Family) -> None:
        """Raise LayoutError if a row is not as its family says."""
        name = row.side[0]
        for place, side in row.sides.items():
            if side is None:
                if not (row.copy_of or "megatron" in family.refused):
                    raise self.wrong(name, f"{shown(name)} has no place in {place}")
                continue
            try:
                factors = [factor for dim in parse_view(side[1]) for factor in dim]
            except SpecSyntaxError as error:
                raise self.wrong(name, f"{shown(name)}: {error.problem}") from None
            words = {*family.sizes, *_words_of_config(family)}
            if unknown := [factor for factor in factors if factor not in words]:
                raise self.wrong(name, f"{shown(name)} names {unknown[0]!r}, which is no size")
            for text in side[2:]:
                sliced = _SLICED.match(text)
                if sliced is None or sliced[1] not in factors:
                    raise self.wrong(name, f"{shown(name)}: {shown(text)} is no slice of its view")
            for number in sorted(placeholders(name)):
                if f"{{{number}}}" not in words:
                    raise self.wrong(name, f"{shown(name)}: no size says how many {{{number}}} are")
                if number not in placeholders(" ".join(side)):
                    raise self.wrong(name, f"{shown(name)} has no {{{number}}} in {place}")
        if row.copy_of and row.copy_of not in {other.side[0] for other in family.rows["model"]}:
            raise self.wrong(name, f"{shown(name)} repeats {shown(row.copy_of)}, which is no row")
        for word in row.when:
            size = word.removeprefix("not ")
            if size not in family.sizes and size not in family.defaults:
                raise self.wrong(name, f"{shown(name)} exists when {size!r}, which is no size")
        if row.layers not in ("", "dense", "moe"):
            raise self.wrong(name, f"{shown(name)} is in {row.layers!r} layers; say dense or moe")


def _words_of_config(family: Family) -> set[str]:
    return {word for text in family.sizes.values() for word in text.replace("*", " ").split()}


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family of a model by its config.

    Raises
    ------
    LayoutError
        If there is none for the config's model_type.
    """
    model_types = [part.get("model_type") for part in (config, text_config(config))]
    for model_type in model_types:
        for name in family_names():
            family = shipped_family(name)
            if model_type in family.model_types:
                return family
    if model_types == [None, None]:
        raise LayoutError("the config has no model_type, which says the family of its tensors")
    raise LayoutError(
        f"there is no family for models of type {shown(model_types[0])}; there are "
        f"{', '.join(family_names())}; give a map of your own instead, as ",
        Argument("names"),
    )


def rows_in(family: Family) -> Iterator[tuple[str, Row]]:
    """Yield all rows, each with its table."""
    for table, rows in family.rows.items():
        for row in rows:
            yield table, row


def forms_in(family: Family) -> Iterator[tuple[str, Row, Side]]:
    """Yield the name of every row in every place, without numbers, and its side there."""
    for table, row in rows_in(family):
        for place, side in row.sides.items():
            if side is not None:
                prefix = family.prefix["megatron" if place == "megatron" else "hf"]
                yield form_of(("" if table == "model" else prefix) + side[0]), row, side


def moe_layers(config: Mapping[str, object], count: int) -> Sequence[int]:
    """Return the layers with experts, by any of the keys that configs use for them.

    >>> moe_layers({"first_k_dense_replace": 2}, 4)
    [2, 3]
    >>> moe_layers({"mlp_only_layers": [1], "decoder_sparse_step": 2}, 4)
    [3]
    """
    given = text_config(config)

    def number(word: str, otherwise: int) -> int:
        value = given.get(word)
        return value if isinstance(value, int) else otherwise

    first, step = number("first_k_dense_replace", 0), number("decoder_sparse_step", 1)
    every = number("moe_layer_freq", 1)
    dense = given.get("mlp_only_layers")
    without = dense if isinstance(dense, list) else []
    kinds = given.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == count:
        return [layer for layer in range(count) if kinds[layer] != "dense"]
    return [
        layer
        for layer in range(count)
        if layer >= first
        and layer not in without
        and step > 0
        and (layer + 1) % step == 0
        and layer % max(1, every) == 0
    ]
