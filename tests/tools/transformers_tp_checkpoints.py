"""What two ranks hold of a model that transformers shards itself, by DCP and by `torch.save`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.tools.commands import leave, shardspec
from tests.tools.language_models import CONFIGS, answers, loaded, model_of
from tests.tools.table import Row, write_rows


def job(folder: Path, place: Path) -> None:
    """Load a folder onto two ranks, and save what each holds."""
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    plan = DistributedConfig(tp_plan="auto", tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).eval()
    assert torch.allclose(answers(model), answers(loaded(folder)), atol=1e-4)
    # torch saves no views into files of safetensors, as some ranks hold.
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sharded = [tensor for tensor in state.values() if isinstance(tensor, DTensor)]
    assert len(sharded) > 10
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.save(state, place / "ranks" / f"model_world_size_{world}_rank_{rank}.pt")
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    if rank == 0:
        torch.save(whole, place / "whole.pt")
    if model.config.model_type == "mixtral":
        # The halves of its experts are sharded each by itself; torch takes the boxes to overlap.
        with pytest.raises(CheckpointException, match="overlapping chunks"):
            save(state, checkpoint_id=place / "dcp")
    else:
        save(state, checkpoint_id=place / "dcp")


def merged(source: Path, place: Path, whole: dict[str, torch.Tensor], folder: Path) -> None:
    """Merge; every tensor is what torch gathers, and transformers loads all of it."""
    shutil.copy(folder / "config.json", source)
    shardspec("verify", source)
    shardspec("merge", source, "-o", f"{place}/")
    found = load_file(place / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())
    assert torch.equal(answers(loaded(place)), answers(loaded(folder)))


def main(place: Path, rows_file: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    for label in ("llama", "mixtral", "qwen2"):
        here = place / label
        folder = here / "hf"
        model_of(CONFIGS[label]).save_pretrained(folder, max_shard_size="60KB")
        (here / "ranks").mkdir()
        call = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        call += ["--standalone", "-m", "tests.tools.transformers_tp_checkpoints"]
        call += ["job", str(folder), str(here)]
        subprocess.run(call, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300, check=True)
        whole = torch.load(here / "whole.pt")
        merged(here / "ranks", here / "of-ranks", whole, folder)
        if label != "mixtral":
            merged(here / "dcp", here / "of-dcp", whole, folder)
        print(f"{label}: bit-identical", file=sys.stderr)
    tool = ("transformers", transformers.__version__)
    same = ("yes", "yes, by `full_tensor()`", "`--to huggingface`", "yes, the logits are equal")
    rows = [
        Row(*tool, "tensor parallel on 2 ranks, `torch.save` a rank: LLaMA, Qwen2, Mixtral", *same),
        Row(*tool, "the same by DCP: LLaMA, Qwen2 (torch 2.13 saves no fused experts so)", *same),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(Path(sys.argv[2]), Path(sys.argv[3]))
        leave()
    else:
        main(Path(sys.argv[1]), sys.argv[2])
