"""Name maps against real models: transformers' and Megatron-core's answer alike, both ways.

Megatron-core runs on a CPU here: in one process, with its own layers in place of those of
Transformer Engine, and with what asks for CUDA answered otherwise.
"""

import contextlib
import json
import shutil
import sys
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn

from tests.tools.commands import leave, shardspec
from tests.tools.language_models import CONFIGS, TOKENS, answers, loaded, model_of
from tests.tools.megatron_gpt import gpt
from tests.tools.table import Row, write_rows

State = dict[str, torch.Tensor]
_PADDED = 128
CLOSE = 1e-5
"""How far logits of two tools may be apart."""
_MODELS = "llama, qwen2, mistral, gpt2, gpt-neox, mixtral"


def on_a_cpu(rank: int, world: int, store: Path, **experts: int) -> None:
    """Start a world of tensor parallel ranks, and answer what asks for CUDA in passing."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(world, 1, **experts)
    for name, answer in (("current_device", "cpu"), ("synchronize", None)):
        setattr(torch.cuda, name, partial(_said, answer))
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    # It counts as there without being.
    multi_latent_attention.HAVE_TE = False


def _said(answer: object, *_: object) -> object:
    return answer


def other_model(config: transformers.PretrainedConfig, *, seed: int) -> GPTModel:
    """Build Megatron's model of the same sizes, with other weights and a padded vocabulary."""
    torch.manual_seed(seed)
    model = gpt(config, padded_vocab=_PADDED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def megatron_answers(model: GPTModel, vocab: int) -> torch.Tensor:
    """Return the logits for the tokens that transformers' models are asked."""
    length = TOKENS.shape[1]
    positions = torch.arange(length).expand(TOKENS.shape)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits = model(TOKENS, positions, hidden)
    assert isinstance(logits, torch.Tensor)
    return logits[..., :vocab]


def alike(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far logits are apart; fail if it is more than rounding."""
    apart = float((one - other).abs().max())
    assert one.shape == other.shape
    assert apart < CLOSE, apart
    assert float(one.std()) > 0.1, "the logits say nothing"
    return apart


def load(model: GPTModel, tensors: State) -> None:
    """Load tensors, of which nothing but what is empty may be missing."""
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing


def sharded(model: GPTModel) -> dict[str, Any]:
    """Return what Megatron saves and loads, less the states of layers, which are empty here."""
    found = model.sharded_state_dict()
    return {name: part for name, part in found.items() if not name.endswith("_extra_state")}


def to_megatron(model_type: str, folder: Path, place: Path, saved: Path) -> tuple[float, float]:
    """Make of a folder what Megatron loads: by names of tensors, and by `dist_checkpointing`."""
    config = json.loads((folder / "config.json").read_text())
    place.mkdir()
    sizes = place / "sizes.json"
    sizes.write_text(json.dumps({**config, "padded_vocab": _PADDED}))
    by = ("--model", sizes, "--names", "megatron")
    model = loaded(folder)
    wanted = answers(model)
    vocab = wanted.shape[-1]

    one = place / "numbered.safetensors"
    shardspec("merge", folder, "-o", one, *by)
    # Without Transformer Engine norms have names of their own in memory.
    words = {"self_attention.linear_qkv.layer_norm_": "input_layernorm."}
    words |= {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
    tensors = load_file(one)
    for old, new in words.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    by_name = other_model(model.config, seed=3)
    assert not torch.allclose(megatron_answers(by_name, vocab), wanted, atol=1e-2)
    load(by_name, tensors)

    stacked = place / "stacked"
    # Nor do stacks of it tell the norm before experts from that of a matrix.
    local = ("--rename", "pre_mlp_layernorm[.]", "mlp.linear_fc1.layer_norm_")
    torch_dist: list[str | Path] = [*by, "--to", "dcp"]
    torch_dist += local if model_type == "mixtral" else ()
    shardspec("merge", folder, "-o", stacked, *torch_dist)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(saved / name, stacked)
    by_tool = other_model(model.config, seed=4)
    load(by_tool, dist_checkpointing.load(sharded(by_tool), str(stacked)))
    return (
        alike(megatron_answers(by_name, vocab), wanted),
        alike(megatron_answers(by_tool, vocab), wanted),
    )


def from_megatron(saved: Path, place: Path, wanted: torch.Tensor) -> float:
    """Make of what Megatron has saved, with a config.json beside, what transformers loads."""
    shardspec("verify", saved)
    # The rows that Megatron pads the vocabulary with are random here.
    shardspec("merge", saved, "-o", f"{place}/", "--model", saved, "--drop-rows")
    return alike(answers(loaded(place)), wanted)


def save_from_two(rank: int, labels: list[str], place: Path) -> None:
    """Save models that two tensor parallel ranks hold."""
    warnings.simplefilter("ignore")
    on_a_cpu(rank, 2, place / "store")
    for number, label in enumerate(labels):
        model = other_model(CONFIGS[label], seed=number)
        torch.manual_seed(100 + rank)
        with torch.no_grad():
            for parameter in model.parameters():
                # What is not sharded is the same on both.
                if getattr(parameter, "tensor_model_parallel", False):
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
        dist_checkpointing.save(model.sharded_state_dict(), str(place / label))
    leave()


def from_two_ranks(place: Path) -> None:
    """Convert what two ranks have saved; Megatron itself loads it for one, and answers alike."""
    labels = ["llama", "qwen2", "gpt2", "gpt-neox"]
    for label in labels:
        (place / label).mkdir(parents=True)
    spawn(save_from_two, (labels, place), nprocs=2)
    for label in labels:
        config, saved = CONFIGS[label], place / label
        own = other_model(config, seed=11)
        load(own, dist_checkpointing.load(sharded(own), str(saved)))
        config.architectures = [type(model_of(config)).__name__]
        config.save_pretrained(saved)
        wanted = megatron_answers(own, config.vocab_size)
        apart = from_megatron(saved, place / f"{label}-hf", wanted)
        print(f"{label}, TP2: logits apart by {apart:.1e}", file=sys.stderr)


def main(place: Path, rows_file: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    on_a_cpu(0, 1, place / "store-of-one")
    for label, config in CONFIGS.items():
        model_type, here = label.split(",")[0], place / label.replace(", ", "-").replace(" ", "-")
        if model_type == "gpt-neox":
            # Megatron's layers are not parallel.
            config.use_parallel_residual = False
        folder, saved = here / "hf", here / "megatron"
        model_of(config).save_pretrained(folder)
        own = other_model(config, seed=2)
        saved.mkdir()
        dist_checkpointing.save(own.sharded_state_dict(), str(saved))
        shutil.copy(folder / "config.json", saved)
        apart = to_megatron(model_type, folder, here / "to", saved)
        wanted = megatron_answers(own, config.vocab_size)
        back = from_megatron(saved, here / "from", wanted)
        print(
            f"{label}: logits apart by {apart[0]:.1e}, {apart[1]:.1e}, {back:.1e}", file=sys.stderr
        )
    from_two_ranks(place / "two")
    tool = ("Megatron-core", version("megatron-core"))
    rows = [
        Row(
            *(*tool, f"`torch_dist` of {_MODELS} by `--model`, vocabulary padded; TP1, TP2"),
            *("yes", "by its logits", "`--to huggingface`"),
            "by transformers: its logits are Megatron's, within 1e-5",
        ),
        Row(
            *("transformers", transformers.__version__),
            "folders of these by `--model --names megatron`, vocabulary padded",
            *("yes", "by their logits", "`--to safetensors`, `--to dcp`"),
            "by Megatron-core: its logits are those of transformers, within 1e-5",
        ),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave()
