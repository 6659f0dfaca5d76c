"""Writes the checkpoints that are measured, with torch's own parallelism and writers over gloo.

python -m benchmarks.checkpoint_make dcp /dev/shm/ckpt --cut fsdp+tp --hidden 2048 --vocab 32000
"""

import argparse
import logging
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.checkpoint_shapes import CUTS, INDEX_FILES, Cut, Model, tensor_parallel_dim

__all__ = ["WRITERS", "main"]

State: TypeAlias = dict[str, DTensor]


def sharded_state(model: Model, cut: Cut) -> State:
    """Return this rank's shards, as the state dict of a parallelised model or cut one by one."""
    mesh = init_device_mesh("cpu", cut.mesh, mesh_dim_names=cut.axes)
    if cut.what.endswith(("rows", "columns")):
        dim = 0 if cut.what.endswith("rows") else 1
        state = {
            name: _empty(shape, mesh, min(dim, len(shape) - 1))
            for name, shape in model.shapes.items()
        }
    else:
        state = _parallelised(model, mesh)
    for name, tensor in state.items():
        _fill(name, tensor)
    return state


def _empty(shape: tuple[int, ...], mesh: TorchMesh, dim: int) -> DTensor:
    local = list(shape)
    local[dim] //= mesh.size()
    return DTensor.from_local(torch.empty(local, dtype=torch.bfloat16), mesh, [Shard(dim)])


def _parallelised(model: Model, mesh: TorchMesh) -> State:
    """Cut a model as trainers do: tensor parallel, and FSDP2 over it if there is an axis for it."""
    whole = nn.Module()
    styles: dict[str, ParallelStyle] = {}
    with torch.device("meta"):
        for name, shape in model.shapes.items():
            *path, leaf, _ = name.split(".")
            parent: nn.Module = whole
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            module = _module(name, shape)
            parent.add_module(leaf, module)
            match tensor_parallel_dim(name):
                case 0 if isinstance(module, nn.Embedding):
                    styles[name.removesuffix(".weight")] = RowwiseParallel()
                case 0:
                    styles[name.removesuffix(".weight")] = ColwiseParallel()
                case 1:
                    styles[name.removesuffix(".weight")] = RowwiseParallel()
                case None:
                    styles[name.removesuffix(".weight")] = SequenceParallel()
    parallelize_module(whole, mesh["tp"], styles)
    if "dp" in (mesh.mesh_dim_names or ()):
        for layer in whole.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(whole, mesh=mesh["dp"])
    whole.to_empty(device="cpu")
    return dict(whole.state_dict())


def _module(name: str, shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == 1:
        return nn.RMSNorm(shape[0], dtype=torch.bfloat16)
    rows, columns = shape
    if "embed" in name:
        return nn.Embedding(rows, columns, dtype=torch.bfloat16)
    return nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)


def _fill(name: str, tensor: DTensor) -> None:
    """Put bits of every kind into a shard; copies of one box get the same."""
    where = tensor.device_mesh.get_coordinate()
    assert where is not None, "every rank is in the mesh"
    placed = zip(where, tensor.placements, strict=True)
    at = [place for place, how in placed if not how.is_replicate()]
    random = torch.Generator().manual_seed(zlib.crc32(f"{name}{at}".encode()))
    tensor.to_local().view(torch.int16).random_(-(2**15), 2**15, generator=random)


def write_own(state: State, at: Path) -> None:
    """shardspec's own format."""
    from shardspec import DeviceMesh, Layout, save_sharded
    from shardspec import DTensor as OwnDTensor
    from shardspec.interop.notations import from_placements

    ours = {}
    for name, tensor in state.items():
        mesh = DeviceMesh(tensor.device_mesh.mesh.flatten(), tuple(tensor.device_mesh.mesh.shape))
        spec = from_placements(tensor.placements, tensor.ndim, mesh)
        layout = Layout(mesh, spec, tensor.shape, tensor.dtype)
        ours[name] = OwnDTensor.from_shards({dist.get_rank(): tensor.to_local()}, layout)
    save_sharded(ours, at)


def write_dcp(state: State, at: Path) -> None:
    """torch's distributed checkpoint."""
    save(state, checkpoint_id=at)


def write_ranks(state: State, at: Path) -> None:
    """A `torch.save` of every rank's DTensors."""
    at.mkdir(exist_ok=True)
    name = f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(state, at / name)


def write_dcp_hf(state: State, at: Path) -> None:
    """The distributed checkpoint's Hugging Face format, as it is before it is consolidated."""
    writer = HuggingFaceStorageWriter(str(at), save_distributed=True)
    save(state, storage_writer=writer)


def write_index(state: State, at: Path) -> None:
    """Whole tensors in safetensors files with an index, by the safetensors package."""
    import json

    at.mkdir(exist_ok=True)
    names = list(state)
    of_file = {name: place * INDEX_FILES // len(names) + 1 for place, name in enumerate(names)}
    file = "model-{:05}-of-" + f"{INDEX_FILES:05}.safetensors"
    for number in range(1, INDEX_FILES + 1):
        whole = {}
        for name in names:
            if of_file[name] == number:
                full = state[name].full_tensor()
                if dist.get_rank() == 0:
                    whole[name] = full.contiguous()
                del full
        if dist.get_rank() == 0:
            save_file(whole, at / file.format(number), {"format": "pt"})
    if dist.get_rank() == 0:
        index = {"metadata": {}, "weight_map": {n: file.format(of_file[n]) for n in names}}
        (at / "model.safetensors.index.json").write_text(json.dumps(index))


WRITERS: Final[Mapping[str, Callable[[State, Path], None]]] = {
    "shardspec": write_own,
    "dcp": write_dcp,
    "ranks": write_ranks,
    "dcp-hf": write_dcp_hf,
    "index": write_index,
}


def _rank(rank: int, form: str, at: Path, model: Model, cut: Cut, world: int, meet: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    WRITERS[form](sharded_state(model, cut), at)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start a process per rank, and write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=WRITERS)
    parser.add_argument("at", type=Path)
    parser.add_argument("--cut", choices=CUTS, default="fsdp+tp")
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--vocab", type=int, required=True)
    chosen = parser.parse_args()
    cut = CUTS[chosen.cut]
    world = torch.Size(cut.mesh).numel()
    model = Model(chosen.hidden, chosen.vocab)
    chosen.at.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        meet = f"{temporary}/meet"
        start: Any = mp.start_processes  # type: ignore[attr-defined]  # torch.multiprocessing does not declare it
        start(
            _rank,
            (chosen.form, chosen.at, model, cut, world, meet),
            nprocs=world,
            start_method="fork" if sys.platform == "linux" else "spawn",
        )


if __name__ == "__main__":
    main()
