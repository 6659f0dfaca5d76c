"""What people merge checkpoints with today, one each call; prints the seconds of its work alone.

python -m benchmarks.checkpoint_peers consolidate SOURCE OUT
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Placement, Replicate

from benchmarks.checkpoint_shapes import INDEX_FILES

__all__ = ["PEERS", "Peer", "main"]


def consolidate(source: Path, out: Path) -> None:
    """torch's own tool for DCP's Hugging Face format: one thread, one file."""
    out.mkdir()
    consolidate_safetensors_files(str(source), str(out), dict.fromkeys(_names(source), 1), 1)


def consolidate_parallel(source: Path, out: Path) -> None:
    """The same with two threads into several files."""
    out.mkdir()
    names = _names(source)
    places = {name: at * INDEX_FILES // len(names) + 1 for at, name in enumerate(names)}
    consolidate_safetensors_files(str(source), str(out), places, 2)


def _names(source: Path) -> list[str]:
    """Return the tensors of a directory of safetensors files; the mapping has to name them."""
    names: set[str] = set()
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names.update(file.keys())
    return sorted(names)


def to_torch_save(source: Path, out: Path) -> None:
    """torch's own tool for DCP."""
    dcp_to_torch_save(str(source), str(out))


def merge_weights(source: Path, out: Path) -> None:
    """The core of ``accelerate merge-weights`` (``utils/fsdp_utils.py``), without its package."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(str(source)),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]  # untyped in torch
        no_dist=True,
    )
    if len(state) == 1:
        state = state[next(iter(state))]
    save_file(state, out, {"format": "pt"})


def load_and_write(source: Path, out: Path) -> None:
    """Load a DCP as whole tensors, and write it as its Hugging Face format, consolidated."""
    reader = FileSystemReader(str(source))
    state = {
        name: torch.empty(at.size, dtype=at.properties.dtype)
        for name, at in reader.read_metadata().state_dict_metadata.items()
        if isinstance(at, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    writer = HuggingFaceStorageWriter(
        str(out),
        fqn_to_index_mapping=dict.fromkeys(state, 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    save(state, storage_writer=writer, no_dist=True)


def load_and_cat(source: Path, out: Path) -> None:
    """Load every rank's file, concatenate as the mesh says, and save: a script of 20 lines."""
    count = len(list(source.glob("*.pt")))
    ranks = [
        torch.load(source / f"model_world_size_{count}_rank_{rank}.pt", weights_only=False)
        for rank in range(count)
    ]
    state = {}
    for name in list(ranks[0]):
        shards = [rank.pop(name) for rank in ranks]
        mesh, placements = shards[0].device_mesh.mesh, shards[0].placements
        parts = [shards[rank].to_local() for rank in mesh.flatten().tolist()]
        # The last axis is tensor parallelism. FSDP cuts what that has left, so is undone first.
        inner = mesh.shape[-1]
        if len(placements) == 2:
            columns = [parts[at::inner] for at in range(inner)]
            parts = [_joined(column, placements[0]) for column in columns]
        state[name] = _joined(parts, placements[-1])
    save_file(state, out, {"format": "pt"})


def _joined(parts: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if isinstance(placement, Replicate):
        return parts[0].contiguous()
    return torch.cat(parts, placement.dim)  # type: ignore[attr-defined]  # both that cut have it, their base has not


@dataclass(frozen=True, slots=True)
class Peer:
    """A tool, and the format that it reads."""

    reads: str
    run: Callable[[Path, Path], None]
    what: str


PEERS: Final[Mapping[str, Peer]] = {
    "consolidate": Peer("dcp-hf", consolidate, "torch consolidate_safetensors_files"),
    "consolidate-2": Peer(
        "dcp-hf", consolidate_parallel, "torch consolidate_safetensors_files, 2 threads, 4 files"
    ),
    "torch-save": Peer("dcp", to_torch_save, "torch dcp_to_torch_save"),
    "merge-weights": Peer("dcp", merge_weights, "accelerate merge-weights (its core)"),
    "load-write": Peer("dcp", load_and_write, "dcp.load + HF writer with consolidation"),
    "load-cat": Peer("ranks", load_and_cat, "load every rank, torch.cat, save_file"),
}


def main() -> None:
    """Run one tool once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    PEERS[chosen.peer].run(chosen.source, chosen.out)
    print(json.dumps({"seconds": time.perf_counter() - started, "peer": chosen.peer}))


if __name__ == "__main__":
    main()
