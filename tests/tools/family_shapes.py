"""Names and shapes of a small model of transformers, for the samples that the tests read.

``python -m tests.tools.family_shapes LABEL`` builds a label of `MODELS` in `models_checkpoints.py`,
and puts what it holds in memory and in files into ``tests/families/shapes.json``.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tools.models_checkpoints import MODELS, type_of

_SAMPLES: Final = Path(__file__).parent.parent / "families" / "shapes.json"


def text_of(samples: dict[str, dict[str, object]]) -> str:
    """Return the samples as JSON with one sample a line, so that a change shows its family."""
    groups = []
    for group, members in samples.items():
        lines = (
            f"{json.dumps(name)}:{json.dumps(sample, separators=(',', ':'))}"
            for name, sample in members.items()
        )
        groups.append(f"{json.dumps(group)}:{{\n" + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(groups) + "}\n"


def main(label: str) -> None:
    """Add a sample; all others stay as they are."""
    config = AutoConfig.for_model(type_of(label), **MODELS[label])
    model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        with safe_open(f"{place}/model.safetensors", "pt") as file:
            files = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    samples = json.loads(_SAMPLES.read_text())
    samples["hf"][label.replace(", ", "-")] = {
        "config": {"model_type": type_of(label), **MODELS[label]},
        "files": files,
        "memory": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
    }
    _SAMPLES.write_text(text_of(samples))


if __name__ == "__main__":
    main(sys.argv[1])
