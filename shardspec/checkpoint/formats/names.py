"""How the formats of checkpoints are told apart: by the names of what lies in a directory.

This stands apart from the modules that read them, of which only the one that is needed is imported.
"""

import re
from collections.abc import Iterable
from typing import Final

__all__ = [
    "BIN_INDEX",
    "BIN_NAME",
    "DCP",
    "DCP_HF",
    "DCP_HF_SHARD",
    "DCP_OF_A_RANK",
    "DCP_OWN_METADATA",
    "INDEX_SUFFIX",
    "INFO_NAME",
    "MEGATRON",
    "MEGATRON_FILE",
    "MEGATRON_ITERATION",
    "MEGATRON_RANK",
    "MEGATRON_TRACKER",
    "METADATA_NAME",
    "NATIVE",
    "RANK_FILE",
    "RANK_FILES",
    "SAFETENSORS",
    "TORCH_FILE",
    "find_dcp",
    "find_index",
    "find_megatron",
    "is_data_file",
    "is_rank_file",
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
_RELEASE: Final = "release"
"""Too common a word to know a format by."""

RANK_FILES: Final = "torch files per rank"
RANK_FILE: Final = re.compile(
    r"(|.*?[_.-])(?:world_size_(\d{1,9})_)?rank[_-]?(\d{1,9})\.(?:pt|pth|bin)", re.DOTALL
)

SAFETENSORS: Final = "safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"

TORCH_FILE: Final = "torch file"
BIN_NAME: Final = "pytorch_model.bin"
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
