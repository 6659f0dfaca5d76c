"""Checkpoints of Megatron-core's GPTModel and distributed optimizer: read, written, resumed from.

What a rank holds of a tensor is what Megatron's `ShardedTensor` says, and never a rule of ours.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn

from tests.tools.commands import shardspec
from tests.tools.megatron_on_a_cpu import WORLD
from tests.tools.megatron_world import Load, Piece, Run, compare, same_bits, save
from tests.tools.table import Row, write_rows

FULL, BUCKETS = "fully_reshardable", "dp_reshardable"
DENSE = [
    Run("tp2", tp=2, optimizer=FULL),
    Run("pp2", pp=2, optimizer=FULL),
    Run("tp2pp2", tp=2, pp=2, optimizer=FULL),
]
EXPERTS = [Run("ep2", ep=2), Run("ep2pp2", ep=2, pp=2)]
IN_BUCKETS = [
    Run("buckets-tp2", tp=2, optimizer=BUCKETS),
    Run("buckets-tp2pp2", tp=2, pp=2, optimizer=BUCKETS),
]
LEGACY = [
    Run("legacy-tp2pp2", tp=2, pp=2, legacy=True),
    Run("legacy-ep2pp2", ep=2, pp=2, legacy=True),
]
MESHES = [Run("tp1"), Run("tp2", tp=2), Run("tp2pp2", tp=2, pp=2)]
RULES = '"*linear_proj.weight" = "[R,R,S0]"\n"*word_embeddings.weight" = "[S0,R]"\n'


def read_back(run: Run, place: Path) -> None:
    """Compare a merge with what every rank holds; all of every tensor is held by some rank."""
    source, merged = place / run.name, place / f"{run.name}.safetensors"
    shapes = {
        t["name"]: t["shape"] for t in json.loads(shardspec("inspect", source, "--json"))["tensors"]
    }
    shardspec("verify", source)
    shardspec("merge", source, "-o", merged)
    found = load_file(merged)
    assert {name: list(tensor.shape) for name, tensor in found.items()} == shapes
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in found.items()}
    for rank in range(WORLD):
        for said in torch.load(place / f"{run.name}-rank{rank}.pt", weights_only=True):
            piece = Piece(*said)
            whole = found[piece.name]
            assert tuple(whole.shape) == piece.shape, piece.name
            at = tuple(
                slice(lo, lo + size)
                for lo, size in zip(piece.offset, piece.tensor.shape, strict=True)
            )
            assert same_bits(whole[at], piece.tensor), (run.name, rank, piece.name)
            seen[piece.name][at] = True
    for name, marks in seen.items():
        assert marks.all(), f"{run.name}: no rank holds all of {name}"


def resharded(run: Run, place: Path) -> Path:
    rules, out = place / "rules.toml", place / f"{run.name}-dcp"
    rules.write_text(RULES)
    shardspec(
        "reshard", place / run.name, "-o", out, "--mesh", "2", "--rules", rules, "--to", "dcp"
    )
    return out


def pairs(place: Path) -> tuple[list[Load], list[bool]]:
    """Reshard what can be written; say on which meshes the tool is to load it."""
    loads = []
    for run in DENSE:
        out = resharded(run, place)
        loads += [Load(place / run.name, out, mesh._replace(optimizer=FULL)) for mesh in MESHES]
    experts = len(loads)
    for run in EXPERTS:
        out = resharded(run, place)
        loads += [Load(place / run.name, out, mesh) for mesh in (Run("tp1"), Run("ep2", ep=2))]
    kinds = [False] * experts + [True] * (len(loads) - experts)
    # Buckets are for as many ranks as have saved them.
    for run in IN_BUCKETS:
        loads.append(Load(place / run.name, resharded(run, place), run))
        kinds.append(False)
    return loads, kinds


def main(place: Path, rows_file: str) -> None:
    runs = DENSE + EXPERTS + IN_BUCKETS + LEGACY
    spawn(save, (runs, place, place / "saving"), nprocs=WORLD)
    for run in runs:
        read_back(run, place)
    loads, kinds = pairs(place)
    spawn(compare, (loads, kinds, place / "loading"), nprocs=WORLD)
    tool = ("Megatron-core", version("megatron-core"))
    read = ("yes", "yes, by the tensors of each rank")
    written = "`reshard --to dcp`"
    write_rows(
        rows_file,
        [
            Row(
                *(*tool, f"`torch_dist`, TP2, PP2 and TP2 × PP2, SwiGLU, optimizer `{FULL}`"),
                *(*read, written),
                "yes, at TP1, TP2 and TP2 × PP2; the next step is that from the original",
            ),
            Row(
                *(*tool, "`torch_dist`, experts, EP2 and EP2 × PP2"),
                *(*read, written),
                "yes, at EP1 and EP2",
            ),
            Row(
                *(*tool, f"`torch_dist`, TP2 and TP2 × PP2, optimizer `{BUCKETS}`"),
                *("yes; buckets as they are", read[1], written),
                "yes, at the same mesh; the next step is that from the original",
            ),
            Row(
                *(*tool, "legacy `mp_rank_XX_YYY`, TP2 × PP2; with experts, EP2 × PP2"),
                *(*read, "no", ""),
            ),
        ],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
