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
_TIES: Final[Mapping[str, str]] = {
    "tied": "aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid gemma3 glmasr got_ocr2 "
    "granite_speech granite_speech_plus hyperclovax_vision_v2 internvl janus kimi_k25 lfm2_vl "
    "lfm3_vl lighton_ocr minicpm_ocr mistral3 moss_transcribe_diarize ovis2 paligemma "
    "pp_chart2table qwen3_asr",
    "untied": "aria cosmos3_edge cosmos3_omni exaone4_5 fuyu glm46v glmga idefics2 idefics3 "
    "llava_next minicpmv4_6 minicpmv4_7 qianfan_ocr smolvlm video_llava vipllava",
    "either": "fast_vlm llava llava_next_video llava_onevision shieldgemma2 video_llama_3",
    "text": "blip-2 instructblip instructblipvideo vibevoice",
    "never": "audioflamingo3 musicflamingo nemo_speechlm qwen2_audio vibevoice_asr voxtral",
}
"""Rule for tied heads in transformers -> model types with a text model inside.

`tied` and `untied`: the outer config decides, and this is its default; `either`: one of the two
configs is enough; `text`: the config of the text model decides.
"""
_RULES: Final = {kind: rule for rule, kinds in _TIES.items() for kind in kinds.split()}
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

    def shape_of(self, view: str) -> Shape:
        """Return the shape of a view such as ``(two f) h``; LayoutError if a size is missing."""
        known, dims = known_sizes(self.sizes), parse_view(view)
        for factor in (name for factors in dims for name in factors):
            if factor not in known:
                raise _missing_key(self.family, unknown_root(factor, self.sizes))
        return tuple(prod(known[name] for name in factors) for factors in dims)

    def shapes(self) -> dict[str, Shape]:
        """Return the names and shapes of all tensors.

        >>> from shardspec.families.family import shipped_family
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}
        >>> config = {"model_type": "llama", "vocab_size": 32, "num_hidden_layers": 1, **sizes}
        >>> model_of(shipped_family("llama"), config).shapes()["lm_head.weight"]
        (32, 8)
        """
        shapes = {}
        for tensor in self.tensors:
            shape = self.shape_of(tensor.side[1])
            for numbers in self.instances(tensor.side[0]):
                shapes[filled(tensor.side[:1], numbers)[0]] = shape
        return shapes


def model_of(family: Family, config: Mapping[str, object]) -> Model:
    """Return the tensors of a model by its config, with transformers' defaults for missing keys.

    Raises LayoutError if the family is not supported, or a size is missing; see `Model.shapes`.
    """
    if "all" in family.refused:
        raise LayoutError(family.refused["all"])
    values = _values(family, config)
    absent = family.defaults.keys() - values.keys()
    defaults = {name: family.defaults[name] for name in absent}
    every: dict[str, int | str] = {**family.sizes, **defaults, **config_sizes(values)}
    known = known_sizes(every)
    count = known.get("{i}")
    if count is None:
        raise _missing_key(family, unknown_root("{i}", every))
    if not 0 < count < 10**6:
        raise LayoutError(f"the config has {shown(count)} layers; give a number from 1 to 999999")
    sparse = moe_layers({**known, **values}, count)
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


def _values(family: Family, config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of a config and of its `text_config`, without aliases."""
    inner, values = config.get("text_config"), text_config(config)
    values.pop("text_config", None)
    if isinstance(inner, Mapping):
        values[_TIED] = _is_tied(config, bool(inner.get(_TIED, int(family.defaults.get(_TIED, 0)))))
    plain = {name: value for name, value in values.items() if name not in family.aliases}
    for key, names in family.aliases.items():
        for name in names:
            if name in values:
                plain[key] = values[name]
                break
    for name in {*family.sizes, *family.defaults} & plain.keys():
        value = plain[name]
        is_size = isinstance(value, int) and 0 <= value < 1 << 63
        if "_" in name and not is_size and value is not None:
            raise LayoutError(
                f"the config has {shown(value, 40)} for {shown(name)}; give a whole number from 0 "
                "to 2^63 - 1"
            )
    return plain


def _is_tied(config: Mapping[str, object], text: bool) -> bool:
    """Return True if a model with a text model ties its head; `text` is the text model's value."""
    own, rule = config.get(_TIED), _RULES.get(str(config.get("model_type")))
    if rule == "never":
        return False
    if rule == "either":
        return own is True or text
    if rule != "text" and isinstance(own, bool):
        return own
    return rule == "tied" if rule in ("tied", "untied") else text


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
