"""Four processes of Megatron-core on a CPU: models and optimizers of any mesh, saved and loaded."""

from argparse import Namespace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu

from tests.tools.commands import leave
from tests.tools.megatron_on_a_cpu import WORLD, start

LAYERS = 4
ITERATION = 30


class Run(NamedTuple):
    """What is saved: on a mesh of which the rest of four devices is data parallel."""

    name: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    optimizer: str = ""
    """How it is stored, if there is one."""
    legacy: bool = False


class Load(NamedTuple):
    """Two checkpoints that are to be one and the same for a mesh."""

    one: Path
    other: Path
    mesh: Run


class Piece(NamedTuple):
    """What a rank holds of a global tensor, by Megatron's own account."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


def begin(run: Run) -> None:
    """Cut the world another way."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(run.tp, run.pp, expert_model_parallel_size=run.ep)


def build(run: Run, experts: bool, seed: int) -> tuple[GPTModel, Any]:
    """Build a model, every element of which is another one, and an optimizer that took a step."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=24,
        num_attention_heads=6,
        num_query_groups=2,
        ffn_hidden_size=40,
        num_moe_experts=4 if experts else None,
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        expert_model_parallel_size=run.ep,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=4 if experts else None, moe_grouped_gemm=False)
    model = GPTModel(
        config,
        spec,
        vocab_size=96,
        max_sequence_length=12,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        key = seed * 1000 + stage * 100 + number
        if ".experts." in name:
            key = key * 10 + parallel_state.get_expert_model_parallel_rank() + 1
        if getattr(parameter, "tensor_model_parallel", False):
            key = key * 10 + parallel_state.get_tensor_model_parallel_rank() + 1
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(key))
        parameter.data.copy_(noise)
    if not run.optimizer:
        return model, None
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, use_distributed_optimizer=True, weight_decay=0.01
    )
    optimizer = get_megatron_optimizer(options, [ddp])
    step(model, optimizer)
    return model, optimizer


def step(model: GPTModel, optimizer: Any) -> None:
    """Take a step with gradients that elements of a parameter have on every mesh."""
    for parameter in model.parameters():
        parameter.main_grad.copy_(torch.cos(parameter.data * 7))
    optimizer.step()


def state_of(model: GPTModel, optimizer: Any, run: Run, *, loading: bool = False) -> dict[str, Any]:
    """Return what Megatron saves, or is to load."""
    state = {"model": model.sharded_state_dict()}
    if optimizer:
        state["optimizer"] = optimizer.sharded_state_dict(
            model.sharded_state_dict(),
            is_loading=loading,
            metadata={
                "distrib_optim_sharding_type": run.optimizer,
                "distrib_optim_fully_reshardable_mem_efficient": False,
            },
        )
    return state


def leaves(state: Any, at: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return what is in dicts and lists, each with the keys that lead to it."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    found = []
    for key, part in items:
        here = (*at, str(key))
        found += leaves(part, here) if isinstance(part, dict | list | tuple) else [(here, part)]
    return found


def pieces_of(state: Any, legacy: bool) -> list[Piece]:
    """Return the pieces of tensors in a state.

    Those of legacy files have the numbers of layers and experts in their names.
    """
    found = []
    for (*_, local), part in leaves(state):
        parts = part.build() if isinstance(part, ShardedTensorFactory) else part
        for _, piece in leaves(parts if isinstance(parts, dict | list | tuple) else [parts]):
            if not isinstance(piece, ShardedTensor):
                continue
            name, skip = piece.key, 0
            if legacy:
                words, numbers = local.split("."), iter(piece.global_offset)
                skip = piece.prepend_axis_num
                for place in [n for n, word in enumerate(words) if word.isdigit()]:
                    words[place] = str(next(numbers))
                name = ".".join(words)
            tensor = piece.data.detach().clone()
            if piece.flattened_range is None and not legacy:
                tensor = tensor.reshape((1,) * piece.prepend_axis_num + tensor.shape)
            offset = tuple(map(int, piece.global_offset[skip:]))
            found.append(Piece(name, tuple(piece.global_shape[skip:]), offset, tensor))
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal; the padding between buckets' tensors may be NaN."""
    parts = (part.contiguous().reshape(-1).view(torch.uint8) for part in (one, other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*parts)


def save(rank: int, runs: list[Run], place: Path, store: Path) -> None:
    """Save each run's checkpoint, and beside it what this rank holds."""
    start(rank, store)
    for number, run in enumerate(runs):
        begin(run)
        model, optimizer = build(run, run.ep > 1, seed=number + 1)
        state = state_of(model, optimizer, run)
        pieces = pieces_of(state, run.legacy)
        torch.save([tuple(piece) for piece in pieces], place / f"{run.name}-rank{rank}.pt")
        if run.legacy:
            save_legacy(model, run, rank, place / run.name)
        else:
            if rank == 0:
                (place / run.name).mkdir()
            dist.barrier()
            common = {"iteration": ITERATION, "checkpoint_version": 3.0, "args": {"tp": run.tp}}
            dist_checkpointing.save({**state, **common}, str(place / run.name))
        dist.barrier()
    leave()


def save_legacy(model: GPTModel, run: Run, rank: int, place: Path) -> None:
    """Save as Megatron-LM's training loop does without `dist_checkpointing`."""
    if parallel_state.get_expert_data_parallel_rank():
        return
    if run.ep == 1 and parallel_state.get_data_parallel_rank():
        return
    folder = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if run.pp > 1:
        folder += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if run.ep > 1:
        folder += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    args = Namespace(
        num_layers=LAYERS,
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.tp,
        virtual_pipeline_model_parallel_size=None,
        world_size=WORLD,
        rank=rank,
        swiglu=True,
        params_dtype=torch.float32,
        model_type=ModelType.encoder_or_decoder,
    )
    target = place / f"iter_{ITERATION:07d}" / folder
    target.mkdir(parents=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    torch.save({**state, "model": model.state_dict()}, target / "model_optim_rng.pt")
    (place / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def resumed(directory: Path, run: Run, experts: bool, seed: int) -> dict[str, torch.Tensor]:
    """Load strictly, take a step, and return all tensors before and after it."""
    model, optimizer = build(run, experts, seed)
    fresh = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    said = dist_checkpointing.load(
        state_of(model, optimizer, run, loading=True),
        str(directory),
        strict=StrictHandling.RAISE_ALL,
    )
    assert said["iteration"] == ITERATION
    model.load_state_dict(said["model"], strict=False)
    found = {
        ".".join(at): part.clone()
        for at, part in leaves(said)
        # Steps are not stored with tensors: these are what the optimizer has held.
        if isinstance(part, torch.Tensor) and at[-1] != "step"
    }
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, fresh[name]), f"{name} was not loaded"
        found[f"loaded.{name}"] = parameter.detach().clone()
    if optimizer:
        with torch.no_grad():
            optimizer.load_state_dict(said["optimizer"])
        step(model, optimizer)
        for name, parameter in model.named_parameters():
            found[f"stepped.{name}"] = parameter.detach().clone()
            assert not torch.equal(parameter, found[f"loaded.{name}"]), f"{name} took no step"
    return found


def compare(rank: int, loads: list[Load], experts: list[bool], store: Path) -> None:
    """Load two checkpoints of each pair, and go on from each: all tensors are equal."""
    start(rank, store)
    seeds = count(1000)
    for (one, other, run), with_experts in zip(loads, experts, strict=True):
        begin(run)
        wanted = resumed(one, run, with_experts, next(seeds))
        found = resumed(other, run, with_experts, next(seeds))
        assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
        assert len(wanted) > 10
        for name, tensor in wanted.items():
            assert same_bits(tensor, found[name]), (str(other), run, name)
    leave()
