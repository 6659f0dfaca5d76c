"""Names and shapes of every family, compared with transformers' own models.

Models are built on the meta device. Of a small config each key is left out, or null, and each
switch that adds or removes tensors is turned: what transformers builds of it, a family says too.
So it is for random configs, with keys under their other names, and for configs around a text model.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
)

from shardspec.errors import LayoutError
from shardspec.families.family import family_names, family_of, shipped_family
from shardspec.families.maps import chain_of
from shardspec.families.model import model_of
from shardspec.resharding.total import apply_map
from tests.tools.models_checkpoints import MODELS, type_of
from tests.tools.table import write_rows

_Shapes = dict[str, tuple[int, ...]]
_SWITCHES: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qk_norm"), (True, False)),
    "tie_word_embeddings": (True, False),
    "q_lora_rank": (20, None),
    "n_shared_experts": (0, 1, 2),
    "n_inner": (24, None),
}
_LAYERS: Final[Mapping[str, tuple[object, ...]]] = {
    "first_k_dense_replace": (0, 1, 2),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([0], [1], []),
}
"""Keys by which classes that have them choose the layers with experts."""
_OTHERS: Final[Mapping[str, dict[str, Any]]] = {
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "gpt_neox": {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 112,
    },
}


def built(config: Mapping[str, Any]) -> _Shapes | None:
    """Return the names and shapes of transformers' model; None if it builds none."""
    others = {name: value for name, value in config.items() if name != "model_type"}
    try:
        own = AutoConfig.for_model(config["model_type"], **others)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own)
    except Exception:  # whatever its classes raise at values that they do not take
        return None
    tied = {*(model._tied_weights_keys or ())} if own.tie_word_embeddings else set()
    return {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}


def random_configs(config: Mapping[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield variants of a config: other sizes and switches, missing keys, other names, orders."""
    draw = random.Random(seed)
    own = AutoConfig.for_model(config["model_type"])
    aliases = own.attribute_map
    switches = {**_SWITCHES, **{key: _LAYERS[key] for key in _LAYERS if hasattr(own, key)}}
    switches |= dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), (4, 8))
    for number in range(25):
        made = {key: value for key, value in config.items() if draw.random() < 0.93}
        for key in draw.sample(sorted(switches), 3):
            if key in config or key in aliases or draw.random() < 0.3:
                made[key] = draw.choice(switches[key])
        for other, key in aliases.items():
            if key in made and isinstance(value := made[key], int) and draw.random() < 0.5:
                made[other] = value * draw.choice((1, 2))
                if draw.random() < 0.3:
                    del made[key]
        keys = draw.sample(sorted(made), len(made))
        yield (
            f"seed {seed}, {number}: {made}",
            {key: made[key] for key in keys} | {"model_type": config["model_type"]},
        )


def aliases_differ(model_type: str) -> Iterator[str]:
    """Yield keys whose other names a family ranks otherwise than transformers does."""
    family = family_of({"model_type": model_type})
    words = {word for text in family.sizes.values() for word in text.split()} | {*family.defaults}
    for other, key in AutoConfig.for_model(model_type).attribute_map.items():
        if not ({key, other} & (words | {*family.aliases})):
            continue
        winners = set()
        for keys in ((other, key), (key, other)):
            config = AutoConfig.for_model(model_type, **{name: 2 + (name == key) for name in keys})
            winners.add((other, key)[getattr(config, key) - 2])
        ranked = [names for names in family.aliases.values() if {*names} == {other, key}]
        if len(ranked) != 1 or winners != {ranked[0][0]}:
            yield f"{model_type}: {winners} wins over {{{other}, {key}}}, not {ranked}"


def head_is_tied(config: PreTrainedConfig) -> bool | None:
    """Return True if transformers' model of a config ties its head; None if it builds none."""
    for auto in (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq):
        if type(config) not in auto._model_mapping:
            continue
        try:
            with torch.device("meta"):
                model = auto.from_config(config)
                text = type(AutoModel.from_config(config.text_config))
        except ImportError:  # a vision tower of another package: what the config says
            return bool(config.tie_word_embeddings)
        except Exception:  # whatever its classes raise at values that they do not take
            continue
        head = model.get_output_embeddings() or getattr(model, "lm_head", None)
        if head is not None and text in map(type, model.modules()):
            return head.weight is model.get_input_embeddings().weight
    return None


def ties() -> Iterator[tuple[str, bool | None, bool]]:
    """Yield configs around a text model: what transformers says of their heads, and what we say."""
    every: tuple[dict[str, Any], ...] = (
        {},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
    )
    cases = [("qwen3", top, inner) for top in every for inner in every] + [("gemma3_text", {}, {})]
    for model_type, own in CONFIG_MAPPING.items():
        if model_type == "llama4":  # a family that is refused
            continue
        for text_type, top, inner in cases if "text_config" in own.sub_configs else ():
            text = {"model_type": text_type, **MODELS["qwen3"], **inner}
            config = {"model_type": model_type, **top, "text_config": text}
            try:
                whole = own.from_dict(config)
                of_text = type(whole.text_config) is CONFIG_MAPPING[text_type]
                wanted = head_is_tied(whole) if of_text else None
            except Exception:  # whatever its classes raise at values that they do not take
                wanted = None
            if wanted is None:
                break
            found = "lm_head.weight" not in model_of(family_of(config), config).shapes()
            yield f"{model_type} around {text_type}, {top}, {inner}", wanted, found


def described(config: Mapping[str, Any]) -> _Shapes:
    """Return the names and shapes that the family of a config says."""
    model = model_of(family_of(config), {**config, "num_nextn_predict_layers": 0})
    shapes: _Shapes = model.shapes()
    for map_ in chain_of(model, "hf", "live"):
        made = apply_map(map_, shapes, {})
        made.report.require_total()
        shapes = made.shapes
    return shapes


def variants(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield configs that differ from one in a key or a switch, with what differs."""
    yield "as it is", {**config}
    for key in config.keys() - {"model_type"}:
        yield f"without {key}", {name: value for name, value in config.items() if name != key}
        yield f"{key}=None", {**config, key: None}
    own = AutoConfig.for_model(config["model_type"])
    layers = {key: values for key, values in _LAYERS.items() if hasattr(own, key)}
    for key, values in ({**_SWITCHES, **layers}).items():
        for value in values:
            yield f"{key}={value}", {**config, key: value}


def main(rows_file: str) -> None:
    wrong: list[str] = []
    tried = 0
    seen = set()
    every = {**MODELS, **_OTHERS}
    for label, sizes in every.items():
        model_type = type_of(label)
        seen.add(model_type)
        own = {"model_type": model_type, **sizes}
        wrong += aliases_differ(model_type)
        for what, config in chain(variants(own), random_configs(own, len(label))):
            wanted = built(config)
            if wanted is None:
                continue
            tried += 1
            try:
                found: _Shapes | str = described(config)
            except LayoutError as error:
                found = str(error)
                # More key-value heads than heads: transformers builds it, and cannot run it.
                if "correct num_key_value_heads" in found:
                    continue
            if found != wanted:
                wrong.append(f"{label}, {what}: {difference(found, wanted)}")
    heads = [*ties()]
    wrong += [f"{what}: tied {wanted}" for what, wanted, found in heads if wanted != found]
    tried += len(heads)
    print(
        f"{tried} configs of {len(seen)} families of transformers {transformers.__version__}: "
        f"{len(wrong)} differ",
        file=sys.stderr,
    )
    assert not wrong, "\n".join(wrong)
    types = {t for n in family_names() for t in shipped_family(n).model_types[:1]}
    assert types - seen == {"llama4"}, "each family has a config here"
    write_rows(rows_file, [])


def difference(found: _Shapes | str, wanted: _Shapes) -> str:
    """Return as text where two models differ first."""
    if isinstance(found, str):
        return found
    names = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
    return f"{names[0]} {found.get(names[0])}, not {wanted.get(names[0])}; {len(names)} differ"


if __name__ == "__main__":
    main(sys.argv[2])
