"""Lists the tensors of one model, from the TOML of its family and the sizes in its config."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Final, NamedTuple

from shardspec.errors import LayoutError
from shardspec.families.family import Family, Row, moe_layers
from shardspec.resharding.map_file import (
    Side,
    config_sizes,
    filled,
    known_sizes,
    placeholders,
    text_config,
    unknown_root,
)
from shardspec.resharding.name_map import Shape
from shardspec.resharding.views import parse_view
from shardspec.text import shown

_TIED: Final = "tie_word_embeddings"
MTP: Final = "mtp.layers."
"""Prefix of Megatron-core's layers for multi-token prediction."""


class Tensor(NamedTuple):
    """A tensor of a model; ``{i}``, ``{dense}`` or ``{moe}`` in its names is a layer's number."""

    side: Side
    """Name, view and slices in the files of transformers; `places` may override it."""
    places: Mapping[str, Side | None]
    cut: Mapping[str, str]
    copy_of: str = ""
    """Name of the tensor that this one copies."""


@dataclass(frozen=True, slots=True)
class Model:
    """The tensors of a model."""

    family: Family
    sizes: Mapping[str, int | str]
    tensors: tuple[Tensor, ...]
    copies: tuple[Tensor, ...]
    """Tied output heads, which a checkpoint may contain as copies of the embedding."""
    numbers: Mapping[str, Sequence[int]]
    """Placeholder -> its numbers, if these are not simply 0, 1, 2 and so on."""

    @property
    def has_uniform_layers(self) -> bool:
        """True if all layers have the same tensors, so that they can be stacked."""
        return not {"dense", "moe"} & self.numbers.keys()

    def with_numbered_layers(self) -> "Model":
        """Return the model with layers that are never stacked."""
        return replace(self, numbers={"dense": (), **self.numbers})

    def named(self, name: str) -> Tensor:
        """Return the tensor with a name; for a copy that is missing, the tensor that it copies."""
        every = {tensor.side[0]: tensor for tensor in (*self.tensors, *self.copies)}
        own = {tensor.side[0] for tensor in self.tensors}
        while name not in own:
            name = every[name].copy_of
        return every[name]

    def instances(self, text: str) -> Iterator[dict[str, int]]:
        """Yield the numbers of the placeholders in a name, as in ``{"i": 0}``, for each tensor."""
        known = known_sizes(self.sizes)
        names = sorted(placeholders(text))
        ranges = [self.numbers.get(name, range(known.get(f"{{{name}}}", 0))) for name in names]
        for numbers in product(*ranges):
            yield dict(zip(names, numbers, strict=True))

    def shapes(self) -> dict[str, Shape]:
        """Return the names and shapes of all tensors.

        >>> from shardspec.families.family import shipped_family
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
        >>> config = {"model_type": "llama", "vocab_size": 32, "num_hidden_layers": 1, **sizes}
        >>> model_of(shipped_family("llama"), config).shapes()["lm_head.weight"]
        (32, 8)
        """
        known, shapes = known_sizes(self.sizes), {}
        for tensor in self.tensors:
            dims = parse_view(tensor.side[1])
            for factor in (name for factors in dims for name in factors):
                if factor not in known:
                    raise _missing_key(self.family, unknown_root(factor, self.sizes))
            shape = tuple(prod(known[name] for name in factors) for factors in dims)
            for numbers in self.instances(tensor.side[0]):
                shapes[filled(tensor.side[:1], numbers)[0]] = shape
        return shapes


def model_of(family: Family, config: Mapping[str, object]) -> Model:
    """Return the tensors of a model by its config, with transformers' defaults for missing keys.

    Raises LayoutError if the family is refused, or a size is missing. `Model.shapes` has an
    example.
    """
    if "all" in family.refused:
        raise LayoutError(family.refused["all"])
    absent = family.defaults.keys() - text_config(config).keys()
    defaults = {name: family.defaults[name] for name in absent}
    every: dict[str, int | str] = {**family.sizes, **defaults, **config_sizes(config)}
    # The head belongs to the wrapper, so the wrapper's config decides if it is tied.
    if "text_config" in config and isinstance(tied := config.get(_TIED), bool):
        every[_TIED] = int(tied)
    known = known_sizes(every)
    count = known.get("{i}")
    if count is None:
        raise _missing_key(family, unknown_root("{i}", every))
    if not 0 < count < 10**6:
        raise LayoutError(f"the config has {count} layers; give a number from 1 to 999999")
    sparse = moe_layers({**known, **text_config(config)}, count)
    kinds = {
        "": range(count),
        "moe": sparse,
        "dense": sorted(set(range(count)) - set(sparse)),
    }
    words = {
        kind: f"{{{kind}}}" if 0 < len(layers) < count else "{i}" for kind, layers in kinds.items()
    }
    used = {row.layers for row in family.rows["layer"]}
    mixed = {
        kind: kinds[kind] for kind in ("moe", "dense") if {kind} & used and words[kind] != "{i}"
    }
    further = known.get("mtp_layers", 0)
    tensors, copies = [], []
    for row in family.rows["model"]:
        placed = _tensor(row, dict.fromkeys(("hf", "megatron", "fused"), ""))
        if _exists(family, row, known, every):
            tensors.append(placed)
        elif row.copy_of:
            copies.append(placed)
    for row in family.rows["layer"]:
        if kinds[row.layers] and _exists(family, row, known, every):
            prefix = {**family.prefix, "fused": family.prefix["hf"]}
            tensors.append(_tensor(row, prefix, words[row.layers]))
    for ahead in range(further):
        prefix = {
            "hf": family.prefix["hf"].replace("{i}", str(count + ahead)),
            "megatron": f"{MTP}{ahead}.",
        }
        block = {
            "hf": prefix["hf"],
            "megatron": f"{prefix['megatron']}transformer_layer.",
            "fused": f"{prefix['hf']}mtp_block.",
        }
        inner = [row for row in family.rows["layer"] if row.layers != "dense"]
        both = (family.rows["mtp"], {**prefix, "fused": prefix["hf"]}), (inner, block)
        for rows, before in both:
            existing = (row for row in rows if _exists(family, row, known, every))
            tensors += [_tensor(row, before) for row in existing]
    factors = {factor for own in tensors for dim in parse_view(own.side[1]) for factor in dim}
    if "q" in factors and known.get("q") == 0:
        heads, groups = (known[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        raise LayoutError(
            f"the config has {heads} attention heads and {groups} key-value heads; correct "
            "num_key_value_heads"
        )
    numbers: dict[str, Sequence[int]] = {**mixed, **({"i": range(count)} if further else {})}
    return Model(family, every, tuple(tensors), tuple(copies), numbers)


def _tensor(row: Row, prefix: Mapping[str, str], layer: str = "{i}") -> Tensor:
    def placed(side: Side, before: str) -> Side:
        return tuple(text.replace("{i}", layer) for text in (before + side[0], *side[1:]))

    places = {
        place: None if side is None else placed(side, prefix.get(place, prefix["hf"]))
        for place, side in row.places.items()
    }
    return Tensor(placed(row.side, prefix["hf"]), places, row.cut, row.copy_of)


def _exists(
    family: Family, row: Row, known: Mapping[str, int], sizes: Mapping[str, int | str]
) -> bool:
    for word in row.when:
        size = word.removeprefix("not ")
        if size not in known:
            raise _missing_key(family, unknown_root(size, sizes))
        if bool(known[size]) == word.startswith("not "):
            return False
    return True


def _missing_key(family: Family, word: str) -> LayoutError:
    return LayoutError(
        f"the config lacks {shown(word)}, which the family {family.name!r} needs; give the model's "
        "full config.json"
    )
