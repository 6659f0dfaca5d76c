"""Training that continues with another number of processes: 8, then 4, then 6.

python examples/elastic_resume.py

Each stage is a job that loads the checkpoint of the stage before, resharded for its own mesh. The
losses are compared bit by bit with those of one process that was never interrupted.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, load_sharded, save_sharded

STAGES = (8, 4, 6)
STEPS = 4
SIZES = {"up": (37, 16), "down": (5, 37)}


def start() -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state before the first step."""
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(size, generator=generator) / 4 for name, size in SIZES.items()}
    for name, size in SIZES.items():
        state |= {f"{name}.mean": torch.zeros(size), f"{name}.square": torch.zeros(size)}
    return state


def loss_of(weights: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    """Return the loss of a step; its data depend only on the number of the step."""
    generator = torch.Generator().manual_seed(100 + step)
    x, wanted = torch.randn(64, 16, generator=generator), torch.randn(64, 5, generator=generator)
    return (torch.relu(x @ weights["up"].T) @ weights["down"].T - wanted).square().mean()


def adam(
    weight: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Take a step of Adam in place, element by element, on a tensor or a shard."""
    mean.lerp_(gradient, 0.1)
    square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    weight.sub_(0.01 * mean / (square.sqrt() + 1e-8))


def stage(directory: Path, first: int) -> None:
    """Train as one job: every rank has and updates its own rows."""
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = DeviceMesh(range(world), (world,), axis_names=("fsdp",))
    if first == 0:
        state = {name: DTensor(value, mesh, "[S(fsdp),R]") for name, value in start().items()}
    else:
        state = load_sharded(directory / "checkpoint", mesh, {"*": "[S(fsdp),R]"})
    losses = []
    for step in range(first, first + STEPS):
        cut = {name: state[name].requires_grad_() for name in SIZES}
        loss = loss_of({name: tensor.to_global() for name, tensor in cut.items()}, step)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        losses.append(float(loss.item()).hex())
        with torch.no_grad():
            for name, tensor in cut.items():
                gradient = tensor.grad
                assert gradient is not None
                parts = (tensor, state[f"{name}.mean"], state[f"{name}.square"], gradient)
                adam(*(part.to_local() for part in parts))
                shard = {rank: tensor.to_local().detach()}
                state[name] = DTensor.from_shards(shard, tensor.layout)
    save_sharded(state, directory / "checkpoint", overwrite=True)
    if rank == 0:
        print(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def alone() -> list[str]:
    """Return the losses of one process that takes all steps."""
    state = start()
    losses = []
    for step in range(STEPS * len(STAGES)):
        weights = {name: state[name].requires_grad_() for name in SIZES}
        loss = loss_of(weights, step)
        gradients = torch.autograd.grad(loss, list(weights.values()))
        losses.append(float(loss.item()).hex())
        with torch.no_grad():
            for name, gradient in zip(weights, gradients, strict=True):
                adam(weights[name], state[f"{name}.mean"], state[f"{name}.square"], gradient)
    return losses


def main() -> None:
    """Run the stages one after the other, each as a separate job."""
    expected = alone()
    with tempfile.TemporaryDirectory() as temporary:
        for number, world in enumerate(STAGES):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            first = number * STEPS
            done = subprocess.run(
                [*torchrun, f"--nproc_per_node={world}", __file__, temporary, str(first)],
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            if done.returncode:
                sys.exit(done.stderr)
            losses = json.loads(done.stdout)
            curve = " ".join(f"{float.fromhex(loss):.6f}" for loss in losses)
            same = losses == expected[first : first + STEPS]
            print(f"{world} ranks: {curve}; as without interruption, to the last bit: {same}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        stage(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
