"""Megatron-core on a CPU, over gloo: what asks for CUDA in passing is answered otherwise."""

import os
import warnings
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

__all__ = ["WORLD", "start"]

WORLD = 4
"""Processes."""


def start(rank: int, store: Path) -> None:
    """Join the world, and answer what asks for CUDA in passing."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for name, answer in (("current_device", "cpu"), ("synchronize", None), ("is_available", False)):
        setattr(torch.cuda, name, partial(_said, answer))
    setattr(torch.Tensor, "cuda", _same)  # noqa: B010 (its type is another one)
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, partial(_on_a_cpu, getattr(torch, name)))
    setattr(torch.Tensor, "type", partialmethod(_type, torch.Tensor.type))  # noqa: B010
    # Of torch's Adam, 0.16 sets the step, and then looks for it among what it has loaded.
    name = "_set_main_param_and_optimizer_states"
    was = getattr(DistributedOptimizer, name)
    setattr(DistributedOptimizer, name, partialmethod(_with_step, was))


def _said(answer: object, *_: object) -> object:
    return answer


def _same(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


def _on_a_cpu(make: Any, *args: object, **options: Any) -> object:
    if options.get("device") == "cuda":
        options["device"] = "cpu"
    return make(*args, **options)


def _type(tensor: torch.Tensor, was: Any, *args: object, **options: object) -> object:
    if args or options:
        return was(tensor, *args, **options)
    return was(tensor).replace("torch.", "torch.cuda.")


def _with_step(
    optimizer: Any, was: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> None:
    group, order = optimizer.model_param_group_index_map[parameter]
    held = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    was(optimizer, parameter, {**tensors, "step": held["step"]})
