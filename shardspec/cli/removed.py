"""Commands, options and values that this version has no longer, and what to type instead."""

from collections.abc import Mapping
from typing import Final

REMOVED: Final[Mapping[str, str]] = {
    "apply": "use 'shardspec delta apply BASE DELTA... -o OUT'",
    "check-map": "use 'shardspec merge CKPT -o OUT --map FILE --dry-run'",
    "convert": "use shardspec.interop.notations in Python",
    "delta *": "use 'shardspec delta make BASE NEW -o OUT'",
    "graph": "use LayoutConverter.to_dot in Python",
    "presets": "use 'shardspec links list'",
    "verify --against": "use 'shardspec diff A B'",
    "plan-state --html": "use --transfers DIR",
    "profile --plot": "use the table that it prints",
    "merge --no-metadata": "call merge(..., metadata=False) in Python",
    "reshard --to deepspeed-universal": "use ds_to_universal.py of DeepSpeed",
    "delta make --fill-from": "use 'shardspec merge --fill-from' first",
    "delta make --drop-rows": "use 'shardspec merge --drop-rows' first",
    "digest --fill-from": "use 'shardspec merge --fill-from --digests'",
    "digest --drop-rows": "use 'shardspec merge --drop-rows --digests'",
    "plan-state --fill-from": "use 'shardspec merge --fill-from' first",
    "plan-state --drop-rows": "use 'shardspec merge --drop-rows' first",
    "verify --fill-from": "use 'shardspec merge --fill-from', then verify its output",
    "verify --drop-rows": "use 'shardspec merge --drop-rows', then verify its output",
    "* --alpha": "use --links SECONDS:SECONDS_PER_BYTE, as in 1e-5:4e-11",
    "* --beta": "use --links SECONDS:SECONDS_PER_BYTE, as in 1e-5:4e-11",
    "* --profile": "use --links cluster.toml",
    "* --links *.json": "use the cluster.toml that 'shardspec profile' writes now",
    "* --map *-to-hf": "use --model DIR --names hf",
    "* --map *-to-megatron": "use --model DIR --names megatron",
    "* --map *-to-torch_dist": "use --model DIR --names megatron --to dcp",
    "* --map *-to-fused": "use --model DIR --names fused",
    "* --reverse-map": "use --model DIR, with --names of the other side",
    "* --scale-rule": "scales are 448 · (1 / amax), as transformers has them",
    "* --sizes": "use --model config.json",
}
"""A pattern of what was typed after `shardspec`, and its remedy."""
