"""How the formats of checkpoints are told apart: by the names of what lies in a directory.

This stands apart from the modules that read them, of which only the one that is needed is imported.
"""

import re
from collections.abc import Callable, Iterable
from typing import Final

__all__ = [
    "BIN_INDEX",
    "BIN_NAME",
    "BIN_NUMBERED",
    "DCP",
    "DCP_HF",
    "DCP_HF_SHARD",
    "DCP_OF_A_RANK",
    "DCP_OWN_METADATA",
    "DEEPSPEED",
    "DEEPSPEED_LATEST",
    "DEEPSPEED_MODEL",
    "DEEPSPEED_OPTIMIZER",
    "DEEPSPEED_UNIVERSAL",
    "INDEX_SUFFIX",
    "INFO_NAME",
    "MEGATRON",
    "MEGATRON_FILE",
    "MEGATRON_ITERATION",
    "MEGATRON_RANK",
    "MEGATRON_TRACKER",
    "META",
    "METADATA_NAME",
    "META_FILE",
    "META_PARAMS",
    "NATIVE",
    "PARTS",
    "RANK_FILE",
    "RANK_FILES",
    "RUN_STEP",
    "SAFETENSORS",
    "TORCH_FILE",
    "UNIVERSAL_LATEST",
    "UNIVERSAL_OPTIMIZER",
    "find_dcp",
    "find_deepspeed",
    "find_index",
    "find_megatron",
    "find_universal",
    "is_data_file",
    "is_rank_file",
    "not_read",
    "part_of_several",
    "part_text",
]

NATIVE: Final = "shardspec"
INFO_NAME: Final = "sharding_info.json"

DCP: Final = "torch distributed checkpoint"
METADATA_NAME: Final = ".metadata"
DCP_OF_A_RANK: Final = re.compile(r"__(\d{1,9})_\d+\.distcp")
DCP_OWN_METADATA: Final = re.compile(r"__\d+\.metadata")
"""What each rank writes where ranks do not talk to each other."""

DCP_HF: Final = "torch DCP, Hugging Face format"
DCP_HF_SHARD: Final = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")

MEGATRON: Final = "Megatron-LM"
MEGATRON_FILE: Final = "model_optim_rng.pt"
MEGATRON_TRACKER: Final = "latest_checkpointed_iteration.txt"
MEGATRON_RANK: Final = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
MEGATRON_ITERATION: Final = re.compile(r"iter_\d{7,12}|release")
RUN_STEP: Final = "global_step_"
"""What verl calls the checkpoints of a run, which it lists as Megatron does."""
_RELEASE: Final = "release"
"""Too common a word to know a format by."""

DEEPSPEED: Final = "DeepSpeed ZeRO"
DEEPSPEED_UNIVERSAL: Final = "DeepSpeed Universal Checkpoint"
DEEPSPEED_LATEST: Final = "latest"
UNIVERSAL_LATEST: Final = "latest_universal"
UNIVERSAL_OPTIMIZER: Final = "zero/optimizer_state.pt"
DEEPSPEED_OPTIMIZER: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt"
)
DEEPSPEED_MODEL: Final = re.compile(
    r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_model_states\.pt"
)
_DEEPSPEED_SCRIPT: Final = "zero_to_fp32.py"
_DEEPSPEED_TAG: Final = re.compile(r"global_step\d+")

META: Final = "Meta's model parallel"
META_FILE: Final = re.compile(r"consolidated\.(\d\d)\.pth")
META_PARAMS: Final = "params.json"

RANK_FILES: Final = "torch files per rank"
RANK_FILE: Final = re.compile(
    r"(|.*?[_.-])(?:world_size_(\d{1,9})_)?rank[_-]?(\d{1,9})\.(?:pt|pth|bin)", re.DOTALL
)

SAFETENSORS: Final = "safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"

TORCH_FILE: Final = "torch file"
BIN_NAME: Final = "pytorch_model.bin"
BIN_NUMBERED: Final = re.compile(r".+-\d{5}-of-\d{5}\.bin", re.DOTALL)
BIN_INDEX: Final = "pytorch_model.bin.index.json"


def find_dcp(names: frozenset[str]) -> bool:
    """Say whether a directory with these names is torch's, or was to become one."""
    return METADATA_NAME in names or any(
        DCP_OF_A_RANK.fullmatch(name) or DCP_OWN_METADATA.fullmatch(name) for name in names
    )


def find_megatron(names: frozenset[str]) -> bool:
    """Say whether a directory with these names is one of Megatron, or the one above."""
    return MEGATRON_TRACKER in names or any(
        MEGATRON_RANK.fullmatch(name) or (name != _RELEASE and MEGATRON_ITERATION.fullmatch(name))
        for name in names
    )


def find_deepspeed(names: frozenset[str]) -> bool:
    """Say whether a directory with these names is that of a tag of DeepSpeed, or the one above.

    What is of all ranks, and alone, may be of a run without ZeRO.
    """
    run = _DEEPSPEED_SCRIPT in names or any(map(_DEEPSPEED_TAG.fullmatch, names))
    return run or any(
        DEEPSPEED_OPTIMIZER.fullmatch(name)
        or ((match := DEEPSPEED_MODEL.fullmatch(name)) is not None and match[1] is not None)
        for name in names
    )


def find_universal(names: frozenset[str]) -> bool:
    """Say whether a directory with these names is a Universal Checkpoint of DeepSpeed."""
    return "zero" in names and any(map(DEEPSPEED_MODEL.fullmatch, names))


def find_index(names: Iterable[str]) -> bool:
    """Say whether a directory with these names has an index of safetensors files."""
    return any(name.endswith(INDEX_SUFFIX) for name in names)


def is_rank_file(name: str) -> bool:
    """Say whether a file name is that of one rank.

    Examples
    --------
    >>> [is_rank_file(name) for name in ("model_world_size_2_rank_0.pt", "rank-1.pt", "frank3.pt")]
    [True, True, False]
    """
    return RANK_FILE.fullmatch(name) is not None and not name.startswith(".")


def is_data_file(name: str) -> bool:
    """Say whether a file name is that of a finished safetensors file."""
    return name.endswith(".safetensors") and not name.startswith(".")


PARTS: Final = {
    "DeepSpeed ZeRO": (
        re.compile(
            r"(?:(?:bf16|fp16)_)?(?:zero_pp_rank_\d+|(?:layer_\d+_)?expert_\d+)"
            r"_mp_rank_\d+_(?:model|optim)_states\.pt"
        ),
        "the script that it leaves beside the checkpoint: python zero_to_fp32.py RUN OUTPUT",
    ),
    "DeepSpeed's tensor parallel": (
        re.compile(r"mp_rank_(\d+)_model_states\.pt"),
        "python -m deepspeed.checkpoint.ds_to_universal --input_folder RUN --output_folder OUTPUT",
    ),
    META: (
        META_FILE,
        "python -m transformers.models.llama.convert_llama_weights_to_hf --input_dir FOLDER "
        "--output_dir OUTPUT",
    ),
}
"""Formats with a file a rank that are not read here: the names of these files, with a number where
one may be alone, and what puts them together."""


_NOT_READ: Final = (
    (
        "orbax (OCDBT)",
        re.compile(r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_sharding"),
        'python -c "import orbax.checkpoint as o, numpy as n; from flax.traverse_util import '
        "flatten_dict as f; from safetensors.numpy import save_file as s; s({k: n.asarray(v) for "
        "k, v in f(o.PyTreeCheckpointer().restore('IN'), sep='.').items()}, 'OUT.safetensors')\"",
    ),
    (
        "zarr, as Megatron-core had it before torch_dist",
        re.compile(r"\.zarray|\.zgroup"),
        "a run of Megatron with --load IN --save OUT --ckpt-convert-format torch_dist",
    ),
    (
        "Flax",
        re.compile(r"flax_model.*\.msgpack"),
        'python -c "from transformers import AutoModel as m; '
        "m.from_pretrained('IN', from_flax=True).save_pretrained('OUT')\"",
    ),
    (
        "TensorFlow",
        re.compile(r"tf_model.*\.h5|model\.ckpt.*\.(index|meta)|saved_model\.pb"),
        'python -c "from transformers import AutoModel as m; '
        "m.from_pretrained('IN', from_tf=True).save_pretrained('OUT')\"",
    ),
    (
        "llama.cpp (GGUF)",
        re.compile(r".*\.gguf"),
        "the checkpoint that it was made of, or python -c "
        "\"from transformers import AutoModel as m; m.from_pretrained('DIRECTORY', "
        "gguf_file='FILE').save_pretrained('OUT')\"",
    ),
    ("NeMo", re.compile(r".*\.nemo"), "tar -xf FILE, and then the directory in it"),
    (
        "the optimizer of data parallel ranks, in buckets (Megatron's distrib_optim.pt)",
        re.compile(r"distrib_optim\.pt"),
        "the model beside it, or a save with --ckpt-format torch_dist "
        "--dist-ckpt-optim-fully-reshardable",
    ),
)
"""What is known and not read: how it is called, its files, and what helps."""


def not_read(names: Iterable[str]) -> str | None:
    """Say what a directory with these names, or a file, is that cannot be read, and what helps.

    Examples
    --------
    >>> not_read(["a.nemo"])
    'is of NeMo, which is not read; use tar -xf FILE, and then the directory in it'
    >>> not_read(["a.txt"]) is None
    True
    """
    there = tuple(names)
    for kind, pattern, remedy in _NOT_READ:
        if any(map(pattern.fullmatch, there)):
            return f"is of {kind}, which is not read; use {remedy}"
    return None


def part_of_several(name: str, beside: Callable[[], Iterable[str]]) -> str | None:
    """Say which of `PARTS` a file is one of, by its name and those beside it; None if of none.

    Examples
    --------
    >>> part_of_several("consolidated.00.pth", lambda: ["consolidated.00.pth"]) is None
    True
    >>> part_of_several("consolidated.01.pth", lambda: ["consolidated.01.pth"])
    "Meta's model parallel"
    """
    for kind, (pattern, _) in PARTS.items():
        match = pattern.fullmatch(name)
        if match is not None:
            alone = match.groups() and not int(match[1])
            if not alone or sum(pattern.fullmatch(other) is not None for other in beside()) > 1:
                return kind
    return None


def part_text(kind: str) -> str:
    """Write what a file of one of `PARTS` is, for errors."""
    return f"what one of several {kind} ranks has saved; put them together with {PARTS[kind][1]}"
