"""Every command that a refusal names, run as it is printed; and what comes out is read."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.tools.commands import shardspec
from tests.tools.language_models import CONFIGS, TOKENS
from tests.tools.table import Row, write_rows

RANKS = 2
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
Tensors = dict[str, torch.Tensor]


def mixture() -> torch.nn.Module:
    """Return a layer and two experts, of which each rank has one."""
    import deepspeed

    experts = deepspeed.moe.layer.MoE(
        6, torch.nn.Linear(6, 6, bias=False), num_experts=2, ep_size=RANKS, min_capacity=0
    )
    return torch.nn.ModuleDict({"layer": torch.nn.Linear(6, 6), "experts": experts})


def job(place: Path) -> None:
    """Save a mixture of experts, and a model with tensor parallel ranks after a step."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    torch.manual_seed(1)
    model = mixture()
    adam = torch.optim.AdamW(split({"params": list(model.parameters()), "name": "all"}), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    engine.save_checkpoint(str(place / "experts"))
    torch.save(engine.module.state_dict(), place / f"expert-of-{rank}.pt")

    torch.manual_seed(1)
    llama = transformers.LlamaForCausalLM(CONFIGS["llama"])
    torch.save(llama.state_dict(), place / f"llama-{rank}.pt")
    parallel: dict[str, Any] = {
        **config,
        "bf16": {"enabled": True},
        "tensor_parallel": {"autotp_size": RANKS},
        "zero_optimization": {"stage": 1, "reduce_scatter": False, "overlap_comm": False},
    }
    adam = torch.optim.AdamW(llama.parameters(), lr=0.0, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=llama, optimizer=adam, config=parallel)
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
    engine.step()
    engine.save_checkpoint(str(place / "tensor-parallel"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_remedy(refusal: str, run: Path, out: Path) -> None:
    """Run the command that a refusal names, with the folders in the place of its capitals."""
    found = re.search(r"python -(?:c \"[^\"]+\"|m [^;]+)", refusal)
    assert found is not None, refusal
    command = found[0].replace("RUN", str(run)).replace("OUTPUT", str(out))
    command = command.replace("OUT.pt", str(out)).replace("python", sys.executable, 1)
    done = subprocess.run(
        command, shell=True, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def same(found: Tensors, due: Tensors) -> None:
    """Compare names and values."""
    assert found.keys() == due.keys(), found.keys() ^ due.keys()
    for name, tensor in due.items():
        assert torch.equal(found[name], tensor), name


def experts(place: Path) -> None:
    """Put the files of a mixture of experts together as the refusals of each and of all say."""
    (run,) = (place / "experts").glob("global_step*")
    due: Tensors = {}
    for rank in range(RANKS):
        held = torch.load(place / f"expert-of-{rank}.pt", weights_only=True)
        # Each rank calls its only expert the first one.
        due |= {
            name.replace("deepspeed_experts.0.", f"deepspeed_experts.{rank}."): tensor
            for name, tensor in held.items()
        }
    files = [*run.glob("*expert*_model_states.pt"), run / "mp_rank_00_model_states.pt"]
    for number, named in enumerate([*files, run]):
        refusal = shardspec("merge", named, "-o", place / "no.safetensors", code=3)
        out = place / f"experts-{number}.pt"
        run_remedy(refusal, run, out)
        shardspec("merge", out, "-o", f"{out}.safetensors")
        same(load_file(f"{out}.safetensors"), due)


def tensor_parallel(place: Path) -> None:
    """Make a Universal Checkpoint of tensor parallel ranks, as the refusal says."""
    (run,) = (place / "tensor-parallel").glob("global_step*")
    refusal = shardspec("merge", run, "-o", place / "no.safetensors", code=3)
    run_remedy(refusal, run, place / "universal")
    files = (place / "universal" / "zero").glob("*/fp32.pt")
    weights = {at.parent.name: torch.load(at, weights_only=True)["param"] for at in files}
    due = torch.load(place / "llama-0.pt", weights_only=True)
    # The engine made the weights bfloat16, and the masters of these; no step has changed them.
    same({k: weights[k].bfloat16() for k in due}, {k: v.bfloat16() for k, v in due.items()})


def main(place: Path, rows_file: str) -> None:
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    call += [str(RANKS), "-m", "tests.tools.remedies_checkpoints", "job", str(place)]
    subprocess.run(call, env=ENVIRONMENT, timeout=600, check=True)
    experts(place)
    print("experts: equal", file=sys.stderr)
    tensor_parallel(place)
    print("tensor parallel: equal", file=sys.stderr)
    tool = ("DeepSpeed", version("deepspeed"))
    rows = [
        Row(*tool, "experts on 2 ranks", "refused, with a command that merges the weights",
            "yes, its output, by the modules of the ranks", "no", ""),
        Row(*tool, "ZeRO 1 with 2 tensor parallel ranks (AutoTP), LLaMA",
            "refused, with the command of `ds_to_universal`",
            "yes, its output, by the model in bfloat16", "no", ""),
    ]  # fmt: skip
    write_rows(rows_file, rows)


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
