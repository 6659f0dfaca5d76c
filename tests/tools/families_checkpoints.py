"""Names and shapes of every family, compared with transformers' own models.

Models are built on the meta device. Of a small config each key is left out, or null, and each
switch that adds or removes tensors is turned: what transformers builds of it, a family says too.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

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
    "n_shared_experts": (1, 2),
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
    tried, wrong = 0, []
    seen = set()
    every = {**MODELS, **_OTHERS}
    for label, sizes in every.items():
        model_type = type_of(label)
        seen.add(model_type)
        for what, config in variants({"model_type": model_type, **sizes}):
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
