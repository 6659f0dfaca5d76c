"""Reads the TOML of a model family: its tensors, their names in each tool, and their sizes."""

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
"""Entry points of other packages; each loads the text of a family's TOML."""
CUTS: Final = (
    *("vocab", "heads", "kv-heads", "columns", "rows", "replicated"),
    *("latent", "summed"),
)
"""Ways to shard a tensor. `latent`: sharded by Megatron-core's own layers, not by Transformer
Engine's. `summed`: stored on rank 0 only, by engines that add up the results of all ranks."""
PLACES: Final = ("file", "live", "megatron", "fused")
"""Naming conventions: files of transformers, its models in memory, Megatron-core, and inference
engines, which fuse matrices such as q, k and v."""
NamesOf: TypeAlias = Literal["hf", "live", "megatron", "torch_dist", "sharded", "fused"]
"""Naming convention of the output."""
_KEYS: Final = {"hf", "view", "cut", "when", "in", "copy_of", *PLACES}
_TABLES: Final = {"model", "layer", "mtp"}
_HEADS: Final[Mapping[str, tuple[Any, str]]] = {
    **dict.fromkeys(("model_types", "without", "unused", *sorted(_TABLES)), (list, "a list")),
    **dict.fromkeys(("prefix", "sizes", "defaults", "aliases", "refused"), (dict, "a table")),
    "like": (str, "the name of a family"),
}
"""Keys of a family's TOML besides its rows -> type of the value, and name of the type in errors."""
_SLICED: Final = re.compile(r"(\w+)\[")

_Table: TypeAlias = Mapping[str, object]


class Row(NamedTuple):
    """An entry of a family's TOML: one tensor, or one per layer or expert."""

    side: Side
    """Name, view and slices in the files of transformers."""
    cut: Mapping[str, str]
    """One of `PLACES` -> one of `CUTS`: how that tool shards the tensor."""
    places: Mapping[str, Side | None]
    """One of `PLACES` -> name, view and slices there; None if that tool has no such tensor."""
    when: tuple[str, ...] = ()
    """The tensor exists if these sizes are not 0; a size after ``not`` must be 0."""
    layers: str = ""
    """``dense`` or ``moe`` if only such layers have the tensor."""
    copy_of: str = ""
    """Name of the tensor that this one copies."""

    @property
    def sides(self) -> dict[str, Side | None]:
        """Name, view and slices at each place: one of `PLACES`, or ``hf`` for files."""
        return {"hf": self.side, **self.places}


class Family(NamedTuple):
    """A family of models, as read from its TOML."""

    name: str
    model_types: tuple[str, ...]
    prefix: Mapping[str, str]
    """Prefix of the names of a layer's tensors, by ``hf`` and ``megatron``."""
    rows: Mapping[str, tuple[Row, ...]]
    """Rows of the ``model``, of each ``layer``, and of each layer for multi-token prediction
    (``mtp``)."""
    unused: tuple[str, ...]
    """Names of tensors in files that no map uses."""
    sizes: Mapping[str, str]
    """Size -> expression in keys of the config and other sizes; replaces keys that are null."""
    defaults: Mapping[str, str]
    """Key that a config may lack -> the default of transformers."""
    aliases: Mapping[str, Sequence[str]]
    """Key -> its names in configs, as transformers ranks them: the first one present counts."""
    refused: Mapping[str, str]
    """One of `PLACES`, or ``all`` -> the reason why no map leads to or from it."""


@lru_cache(1)
def _built_in() -> tuple[str, ...]:
    names = (file.name for file in files("shardspec.families").iterdir())
    stems = (name.removesuffix(".toml") for name in names if name.endswith(".toml"))
    return tuple(sorted(stem.replace("_", "-") for stem in stems))


@lru_cache(1)
def _external() -> dict[str, EntryPoint]:
    points = {point.name: point for point in entry_points(group=_ENTRY_POINTS)}
    return {name: points[name] for name in sorted(points.keys() - {*_built_in()})}


def family_names() -> tuple[str, ...]:
    """Return the names of all families: shardspec's own, then those of other packages.

    >>> "qwen3-moe" in family_names()
    True
    """
    return (*_built_in(), *_external())


@lru_cache(64)
def shipped_family(name: str) -> Family:
    """Return the family with this name; raises `LayoutError` if it is unknown or cannot be loaded.

    >>> shipped_family("qwen3").model_types
    ('qwen3',)
    """
    if name in _built_in():
        place = files("shardspec.families") / f"{name.replace('-', '_')}.toml"
        return read_family(place.read_text("utf-8"), name)
    if name not in _external():
        raise LayoutError(f"there is no family {name!r}; choose among {', '.join(family_names())}")
    try:
        text: object = _external()[name].load()
    except Exception as error:  # importing another package may raise anything
        text, problem = None, f"{type(error).__name__}: {error}"
    else:
        problem = f"it is a {type(text).__name__}, not text"
    if not isinstance(text, str):
        raise LayoutError(
            f"the family {name!r} of another package cannot be loaded ({problem}); correct or "
            "uninstall that package"
        )
    return read_family(text, name)


def read_family(text: str, name: str) -> Family:
    r"""Return the family in a TOML text; raises `LayoutError`, with the line, if it is malformed.

    >>> text = "like = 'llama'\nmodel_types = ['mine']\nwithout = ['lm_head.weight']"
    >>> [row.side[0] for row in read_family(text, "mine").rows["model"]]
    ['model.embed_tokens.weight', 'model.norm.weight']
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"family {name!r} is not TOML: {error}") from None
    reader = _Reader(text, name)
    reader.check_heads(document)
    like = document.get("like")
    if like is not None and like not in {*family_names()} - {name}:
        raise reader.wrong("like", f"there is no family {shown(like)}; name another one")
    base = None if like is None else shipped_family(like)
    without = document.get("without", [])
    for pattern in without:
        every = [row.side[0] for rows in base.rows.values() for row in rows] if base else []
        if not any(fnmatchcase(old, pattern) for old in every):
            raise reader.wrong(pattern, f"without: {shown(pattern)} matches no row of the base")
    rows = {}
    for table in ("model", "layer", "mtp"):
        own = [reader.row(entry) for entry in document.get(table, [])]
        reader.check_distinct(own)
        names = {row.side[0] for row in own}
        inherited = [
            row
            for row in (base.rows[table] if base else ())
            if row.side[0] not in names
            and not any(fnmatchcase(row.side[0], pattern) for pattern in without)
        ]
        rows[table] = (*inherited, *own)

    def merged(key: str) -> dict[str, str]:
        old = getattr(base, key) if base else {}
        return {**old, **{word: str(value) for word, value in document.get(key, {}).items()}}

    sizes, refused = merged("sizes"), merged("refused")
    family = Family(
        name,
        tuple(document.get("model_types", [])),
        merged("prefix"),
        rows,
        (*(base.unused if base else ()), *document.get("unused", [])),
        sizes,
        merged("defaults"),
        {**(base.aliases if base else {}), **document.get("aliases", {})},
        refused,
    )
    if not (family.model_types and family.prefix.keys() >= {"hf", "megatron"}):
        raise LayoutError(f"family {name!r} needs model_types, and prefix with hf and megatron")
    for row in () if "all" in refused else (row for every in rows.values() for row in every):
        reader.check(row, family)
    return family


class _Reader:
    """Reads the rows of a family's TOML; errors name the line."""

    def __init__(self, text: str, name: str) -> None:
        self._lines, self._name = text.splitlines(), name

    def wrong(self, word: str, problem: str, *, last: bool = False) -> LayoutError:
        """Return a LayoutError that names the first line that contains `word`, or the last."""
        lines = [at for at, line in enumerate(self._lines, 1) if word in line.partition("#")[0]]
        line = lines[-1 if last else 0] if lines else 1
        return LayoutError(f"family {self._name!r}, line {line}: {problem}")

    def check_heads(self, document: Mapping[str, Any]) -> None:
        """Raise LayoutError if a family has unknown keys, or values of wrong types."""
        for key, value in document.items():
            if key not in _HEADS:
                raise self.wrong(key, f"unknown key {shown(key)}; known: {', '.join(_HEADS)}")
            kind, expected = _HEADS[key]
            if not isinstance(value, kind):
                raise self.wrong(key, f"{key} is {expected}, not {shown(value)}")
            texts = key in ("model_types", "without", "unused")
            if texts and not all(isinstance(text, str) for text in value):
                raise self.wrong(key, f"{key} is a list of texts, not {shown(value)}")
            for place in {*value} - {"all", *PLACES} if key == "refused" else ():
                raise self.wrong(
                    str(place), f"unknown place {shown(place)}; use megatron, fused or all"
                )
            for names in value.values() if key == "aliases" else ():
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    raise self.wrong(key, f"an alias is a list of keys, not {shown(names)}")

    def check_distinct(self, rows: Sequence[Row]) -> None:
        """Raise LayoutError if two rows have the same name in one of `PLACES`."""
        keys = set()
        for row in rows:
            for place, side in row.sides.items():
                key = place, side, row.layers, row.when
                if side is not None and key in keys:
                    name = row.side[0]
                    raise self.wrong(
                        name, f"two rows have the name {shown(side[0])} in {place}", last=True
                    )
                keys.add(key)

    def row(self, entry: object) -> Row:
        """Return the `Row` that a TOML table describes."""
        if not isinstance(entry, dict) or not isinstance(entry.get("hf"), str):
            raise self.wrong(str(entry), f"a row is a table with hf, view and cut; not {entry!r}")
        name = entry["hf"]
        if unknown := sorted(entry.keys() - _KEYS):
            raise self.wrong(name, f"row {shown(name)}: unknown key {shown(unknown[0])}")
        view = entry.get("view")
        texts = [view] if isinstance(view, str) else view
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.wrong(
                name, f"row {shown(name)}: give a view, or a list of a view and slices"
            )
        cuts = entry.get("cut")
        cut: dict[str, str] = (
            cuts if isinstance(cuts, dict) else dict.fromkeys(("megatron", "fused"), str(cuts))
        )
        if unknown := sorted(cut.keys() - PLACES):
            raise self.wrong(name, f"{shown(name)} is cut in {unknown[0]!r}, an unknown place")
        if unknown := [text for text in cut.values() if text not in CUTS]:
            raise self.wrong(
                name, f"{shown(name)} is cut by {unknown[0]!r}; choose among {', '.join(CUTS)}"
            )
        hf_side = (name, *texts)
        places: dict[str, Side | None] = {}
        for place in PLACES:
            side = entry.get(place)
            if isinstance(side, str):
                places[place] = (side, *texts)
            elif isinstance(side, list) and all(isinstance(text, str) for text in side):
                places[place] = tuple(side)
            elif side is not None:
                raise self.wrong(
                    name, f"{shown(name)}: {place} is not a name, or a list of name and view"
                )
        places.setdefault("file", hf_side)
        places.setdefault("live", places["file"])
        places.setdefault("fused", places["file"])
        places.setdefault("megatron", None)
        when = tuple(text.strip() for text in str(entry.get("when", "")).split(",") if text.strip())
        return Row(hf_side, cut, places, when, entry.get("in", ""), entry.get("copy_of", ""))

    def check(self, row: Row, family: Family) -> None:
        """Raise LayoutError if a row contradicts the sizes and rows of its family."""
        name = row.side[0]
        for place, side in row.sides.items():
            if side is None:
                if not (row.copy_of or "megatron" in family.refused):
                    raise self.wrong(
                        name, f"{shown(name)} has no name in {place}; add {place} = ..."
                    )
                continue
            try:
                factors = [factor for dim in parse_view(side[1]) for factor in dim]
            except SpecSyntaxError as error:
                raise self.wrong(name, f"{shown(name)}: {error.problem}") from None
            words = {*family.sizes, *_words_of_config(family)}
            if unknown := [factor for factor in factors if factor not in words]:
                raise self.wrong(name, f"{shown(name)}: unknown size {unknown[0]!r}")
            for text in side[2:]:
                sliced = _SLICED.match(text)
                if sliced is None or sliced[1] not in factors:
                    raise self.wrong(
                        name, f"{shown(name)}: {shown(text)} does not slice a factor of its view"
                    )
            for number in sorted(placeholders(name)):
                if f"{{{number}}}" not in words:
                    raise self.wrong(
                        name,
                        f"{shown(name)}: add {{{number}}} to [sizes], the count of its tensors",
                    )
                if number not in placeholders(" ".join(side)):
                    raise self.wrong(name, f"{shown(name)} has no {{{number}}} in {place}")
        if row.copy_of and row.copy_of not in {each.side[0] for each in family.rows["model"]}:
            raise self.wrong(
                name, f"{shown(name)} is a copy of {shown(row.copy_of)}, an unknown row"
            )
        for word in row.when:
            size = word.removeprefix("not ")
            if size not in family.sizes and size not in family.defaults:
                raise self.wrong(name, f"{shown(name)} depends on {size!r}, an unknown size")
        if row.layers not in ("", "dense", "moe"):
            raise self.wrong(name, f"{shown(name)} is in {row.layers!r} layers; use dense or moe")


def _words_of_config(family: Family) -> set[str]:
    return {word for text in family.sizes.values() for word in text.replace("*", " ").split()}


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family for the model_type of a config; raises `LayoutError` if it is unknown.

    >>> family_of({"model_type": "mixtral"}).name
    'mixtral'
    """
    model_types = [part.get("model_type") for part in (config, text_config(config))]
    for model_type in model_types:
        for name in family_names():
            family = shipped_family(name)
            if model_type in family.model_types:
                return family
    if model_types == [None, None]:
        raise LayoutError("the config has no model_type; add that of transformers, such as llama")
    raise LayoutError(
        f"there is no family for models of type {shown(model_types[0])}; known families: "
        f"{', '.join(family_names())}; give a map of your own by ",
        Argument("names"),
    )


def rows_in(family: Family) -> Iterator[tuple[str, Row]]:
    """Yield (table, row) for all rows of the tables ``model``, ``layer`` and ``mtp``."""
    for table, rows in family.rows.items():
        for row in rows:
            yield table, row


def forms_in(family: Family) -> Iterator[tuple[str, Row, Side]]:
    """Yield (name without numbers, row, (name, view, slices)) for every row and convention."""
    for table, row in rows_in(family):
        for place, side in row.sides.items():
            if side is not None:
                prefix = family.prefix["megatron" if place == "megatron" else "hf"]
                yield form_of(("" if table == "model" else prefix) + side[0]), row, side


def moe_layers(config: Mapping[str, object], count: int) -> Sequence[int]:
    """Return the numbers of the layers with experts, from any key by which configs list them.

    >>> moe_layers({"first_k_dense_replace": 2}, 4)
    [2, 3]
    >>> moe_layers({"mlp_only_layers": [1], "decoder_sparse_step": 2}, 4)
    [3]
    """
    values = text_config(config)

    def number(word: str, otherwise: int) -> int:
        value = values.get(word)
        return value if isinstance(value, int) else otherwise

    first, step = number("first_k_dense_replace", 0), number("decoder_sparse_step", 1)
    every = number("moe_layer_freq", 1)
    dense = values.get("mlp_only_layers")
    without = dense if isinstance(dense, list) else []
    kinds = values.get("mlp_layer_types")
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
