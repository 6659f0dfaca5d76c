"""Checkpoints of many ranks as torch writes them, with notes of what lies in their files."""

import json
import logging
import pickle
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.dist.processes import run_ranks
from tests.faults.rank_samples import (
    ARRAYS,
    CUTS,
    MEGATRON,
    Stored,
    megatron_file,
    megatron_parts,
    mesh_name,
    parts_of,
)

__all__ = ["save_ranks"]


def _placements(axes: tuple[int | None, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if dim is None else Shard(dim) for dim in axes)


def _save(rank: int, folder: Path, shape: tuple[int, ...], world: int) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    where = folder / mesh_name(shape)
    mesh = init_device_mesh("cpu", shape)
    whole = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    state = {
        name: distribute_tensor(tensor, mesh, _placements(CUTS[len(shape)][name]))
        for name, tensor in whole.items()
    }
    for form, name, held in (
        ("ranks", f"model_world_size_{world}_rank_{rank}.pt", state),
        ("unsaid", f"rank-{rank}.pt", state),
        ("plain", f"rank_{rank}.pth", whole),
    ):
        place = where / form / "ckpt"
        place.mkdir(parents=True, exist_ok=True)
        torch.save(held, place / name)
    save(state, checkpoint_id=where / "dcp" / "ckpt")
    writer = HuggingFaceStorageWriter(str(where / "hf" / "ckpt"), save_distributed=True)
    save(state, storage_writer=writer)


def _dcp_notes(folder: Path) -> dict[str, list[Stored]]:
    """Return what the metadata says of each file, in the order of its bytes."""
    with (folder / ".metadata").open("rb") as file:
        metadata: Any = pickle.load(file)
    found: dict[str, list[tuple[int, Stored]]] = {}
    for index, info in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        (size,) = (chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        stored: Stored = (index.fqn, list(index.offset), list(size), info.length)
        found.setdefault(info.relative_path, []).append((info.offset, stored))
    return {name: [stored for _, stored in sorted(items)] for name, items in found.items()}


def _hf_notes(folder: Path) -> dict[str, list[Stored]]:
    found: dict[str, list[Stored]] = {}
    for path in sorted(folder.iterdir()):
        with safe_open(path, "pt") as file:
            notes = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            found[path.name] = [
                (name, notes[name]["saved_offsets"], file.get_slice(name).get_shape(), 0)
                for name in file.keys()  # noqa: SIM118 - no dict
            ]
    return found


def _megatron(folder: Path, ranks: int, stages: int) -> None:
    """Write as Megatron's own code does; as converters do, of rank 0 all; and without arguments."""
    for form in ("megatron", "converted", "bare"):
        for stage in range(stages):
            for rank in range(ranks):
                model = {
                    name: torch.from_numpy(part)
                    for name, part in megatron_parts(stage, rank, stages, ranks).items()
                }
                state: dict[str, object] = {"model": model, "checkpoint_version": 3.0}
                if form != "bare":
                    state["args"] = Namespace(
                        tensor_model_parallel_size=ranks,
                        pipeline_model_parallel_size=stages,
                        num_layers=4,
                        rank=0 if form == "converted" else stage * ranks + rank,
                    )
                path = folder / form / "ckpt" / megatron_file(rank, stage, stages)
                path.parent.mkdir(parents=True)
                torch.save(state, path)


def _parted(folder: Path, count: int) -> None:
    """Write whole tensors spread over files, with an index."""
    place = folder / "bin" / "ckpt"
    place.mkdir(parents=True)
    weight_map = {}
    for name, part in parts_of(count, "bin").items():
        torch.save({n: torch.from_numpy(array) for n, array in part.items()}, place / name)
        weight_map.update(dict.fromkeys(part, name))
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (place / "pytorch_model.bin.index.json").write_text(text)


def save_ranks(folder: Path, meshes: Sequence[tuple[int, ...]]) -> None:
    """Let ranks on each mesh save in every form, into a folder per mesh, with a folder per form."""
    for shape in meshes:
        place = folder / mesh_name(shape)
        place.mkdir()
        world = torch.Size(shape).numel()
        run_ranks(world, place, _save, folder, shape, world)
        _parted(place, world)
        notes = {"dcp": _dcp_notes(place / "dcp" / "ckpt"), "hf": _hf_notes(place / "hf" / "ckpt")}
        (place / "notes.json").write_text(json.dumps(notes))
        if shape in MEGATRON:
            _megatron(place, *MEGATRON[shape])
