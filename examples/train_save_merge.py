"""A small model of real text: trained in shards, saved, merged, and run in one process.

torchrun --standalone --nproc_per_node 4 examples/train_save_merge.py    (2, 4 or 8 processes)

The text is the documentation of the Python language, which is part of every installation.
"""

import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec import DTensor, init_device_mesh, merge, save_sharded
from shardspec.parallel import distribute_module, inputs_as, outputs_as

CONTEXT = 12
TEST = 10**6
"""Seed of the test rows."""
TEXT = "".join(topics[name] for name in sorted(topics))[:200_000]
LETTERS = sorted(set(TEXT))


class NextLetter(nn.Module):
    """Predicts a letter from the letters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 16)
        self.up = nn.Linear(16 * CONTEXT, 256)
        self.down = nn.Linear(256, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return the scores of every letter, for each row of letters."""
        return self.down(torch.relu(self.up(self.embed(letters).flatten(1))))  # type: ignore[no-any-return]  # a module's call is untyped


def batch(text: torch.Tensor, step: int, size: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of letters and the letters that follow them, the same on every rank."""
    starts = torch.randint(
        0, len(text) - CONTEXT, (size,), generator=torch.Generator().manual_seed(step)
    )
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, -1]


def continued(model: nn.Module, start: str, letters: int = 60) -> str:
    """Return what the model writes after a start."""
    for _ in range(letters):
        known = torch.tensor([[LETTERS.index(letter) for letter in start[-CONTEXT:]]])
        start += LETTERS[int(model(known)[0].argmax())]
    return start


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, world // 2), axis_names=("dp", "tp"))
rules = {"up.weight": "[S(tp),R]", "up.bias": "[S(tp)]", "down.weight": "[R,S(tp)]"}
text = torch.tensor([LETTERS.index(letter) for letter in TEXT])

row = mesh.coordinates(rank)[0]


def ask(letters: torch.Tensor) -> torch.Tensor:
    """Return the scores of all rows; the model gets this rank's half of the batch."""
    half = len(letters) // 2
    return model(letters[half * row : half * (row + 1)])  # type: ignore[no-any-return]  # a module's call is untyped


torch.manual_seed(0)
model = NextLetter()
# The output of the embedding is replicated over tp, and so is its gradient.
embedded = {"embed": "[S(dp),R,R]"}
takes, gives = inputs_as("[S(dp),R]"), outputs_as("[R,R]")
distribute_module(model, mesh, rules, takes, gives, outputs=embedded)
adam = torch.optim.Adam(model.parameters(), lr=1.5e-2)
for step in range(61):
    letters, following = batch(text, step)
    loss = nn.functional.cross_entropy(ask(letters), following)
    loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    adam.step()
    adam.zero_grad()
    if rank == 0 and step % 20 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}", flush=True)

with torch.no_grad():
    scores = ask(batch(text, TEST)[0])

# Every rank writes its own shards; replicas are written once.
place = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(place)
directory = Path(place[0])
state = {}
for name, parameter in model.named_parameters():
    assert isinstance(parameter, TorchDTensor)
    state[name] = DTensor.from_torch(parameter.detach())
save_sharded(state, directory / "checkpoint")

if rank == 0:
    # One process on any machine can do the rest.
    report = merge(directory / "checkpoint", directory / "model.pt")
    print(
        f"merged: {report.tensors} tensors of {report.read_files} files, {report.num_bytes:,} bytes"
    )
    alone = NextLetter()
    alone.load_state_dict(torch.load(directory / "model.pt", weights_only=True))
    with torch.no_grad():
        found = alone(batch(text, TEST)[0])
        agreed = int((found.argmax(1) == scores.argmax(1)).sum())
        print(
            f"the same guesses: {agreed} of {len(found)}; scores differ by at most 1e-4:", end=" "
        )
        print(bool((found - scores).abs().max() < 1e-4))
        print(f"it writes: {continued(alone, 'The statement')!r}")
# No process ends while others still communicate.
dist.barrier()
dist.destroy_process_group()
