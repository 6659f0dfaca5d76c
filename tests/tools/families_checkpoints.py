"""No shipped map loses a tensor of any family of transformers: it takes all of a model, or none.

Models are built on the meta device: names and shapes are all that maps see.
"""

import sys
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardspec import NameMap, map_chain, shipped_maps
from shardspec.errors import LayoutError
from shardspec.families.family import shipped_family
from shardspec.resharding.total import apply_map
from tests.tools.table import write_rows

_Shapes = dict[str, tuple[int, ...]]
_SMALL = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("vocab_size",), 96),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
}
_FORMATS = ("hf", "megatron", "torch_dist", "fused")
_OTHER_FORMS = {
    "FP8 scales": ("self_attn.q_proj.weight", "{}_scale_inv", True),
    "GPTQ": ("self_attn.q_proj.weight", "{}.qweight", False),
    "an adapter": ("self_attn.q_proj.weight", "base_model.model.{}.lora_A", True),
    "wrapped in part": ("layers.1.input_layernorm.weight", "_checkpoint_wrapped_module.{}", False),
}


def model_shapes(model_type: str) -> tuple[dict[str, Any], _Shapes]:
    """Return the config of a small model of a family, and the shapes of its tensors."""
    config = CONFIG_MAPPING[model_type]()
    for name, size in _SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, size)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else ()
    )
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}
    return config.to_dict(), shapes


def forms(shapes: _Shapes) -> dict[str, _Shapes]:
    """Return a state as it is, and as tools make it that quantize, adapt or wrap models."""
    found = {"": shapes}
    for form, (suffix, name, kept) in _OTHER_FORMS.items():
        every = [old for old in shapes if old.endswith(suffix)]
        others = {old: shape for old, shape in shapes.items() if kept or old not in every}
        if every:
            found[form] = others | {name.format(old): (2, 2) for old in every}
    return found


def elements(shapes: _Shapes) -> int:
    return sum(map(prod, shapes.values()))


def taken(chain: tuple[NameMap, ...], config: dict[str, object], shapes: _Shapes) -> _Shapes | None:
    """Return what maps make of a model, None if they refuse it."""
    try:
        for map_ in chain:
            shapes, _, report = apply_map(map_.with_sizes(config), shapes, {})
            report.require_total()
    except LayoutError:
        return None
    return shapes


def main(rows_file: str) -> None:
    models = sorted({name.rpartition("-hf-to-")[0] for name in shipped_maps()})
    chains = {}
    for model, one, other in product(models, _FORMATS, _FORMATS):
        # Of some families the config says which tensors there are, and of some a way is refused.
        with suppress(LayoutError):
            chains[model, one, other] = map_chain(f"{model}-{one}-to-{other}")
    families = tried = accepted = 0
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        try:
            config, shapes = model_shapes(model_type)
        except Exception as error:  # whatever its defaults are that do not fit each other
            print(f"{model_type}: not built: {type(error).__name__}", file=sys.stderr)
            continue
        families += 1
        untyped = {name: value for name, value in config.items() if name != "model_type"}
        for (model, one, other), chain in chains.items():
            for form, state in forms(shapes).items():
                tried += 1
                made = taken(chain, untyped, state)
                if made is None:
                    continue
                accepted += 1
                assert not form, (model_type, form, model, one, other)
                assert elements(made) == elements(state), (model_type, model, one, other)
                back = taken(chains[model, other, one], untyped, made)
                assert back is not None, (model_type, model, one, other)
                assert elements(back) == elements(state), (model_type, model, one, other)
                typed = taken(chain, config, state)
                # Some families, such as GPT-SW3, are another's by their config.
                its_own = config["model_type"] in shipped_family(model).model_types
                assert (typed is not None) == its_own, (model_type, model, one, other)
                print(f"{model_type}: {model} from {one} to {other}", file=sys.stderr)
    print(
        f"{families} families of transformers {transformers.__version__}, {tried} ways: "
        f"{accepted} take all elements, the others are refused",
        file=sys.stderr,
    )
    assert families > 50
    write_rows(rows_file, [])


if __name__ == "__main__":
    main(sys.argv[2])
