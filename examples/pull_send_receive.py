"""Sends new weights by `torch.distributed`, from rows of transfers alone.

    torchrun --nproc_per_node 4 examples/pull_send_receive.py

Ranks 0 and 1 train, ranks 2 and 3 generate. Each rank has its own rows of the plan. Sender and
receiver of a message have the same rows in the same order, so they pack and unpack alike.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, Layout, plan_reshard


def runs(row: np.void, flat: np.ndarray, end: str) -> np.ndarray:
    """Return the runs of a row in a shard, as a matrix of bytes."""
    step = row[f"{end}_step"]
    part = flat[row[f"{end}_offset"] :]
    return np.lib.stride_tricks.as_strided(part, (row["count"], row["run_bytes"]), (step, 1))


def by_peer(rows: np.ndarray, end: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the rows with each peer."""
    for peer in np.unique(rows[end]):
        yield int(peer), rows[rows[end] == peer]


def push(rows: np.ndarray, source: Callable[[int], np.ndarray]) -> list[dist.Work | None]:
    """Start a message to each receiver."""
    works = []
    for peer, some in by_peer(rows, "receiver"):
        parts = [runs(row, source(row["tensor"]), "source").ravel() for row in some]
        works.append(dist.isend(torch.from_numpy(np.concatenate(parts)), peer))
    return works


def pull(rows: np.ndarray, target: Callable[[int], np.ndarray]) -> None:
    """Receive a message of each sender, and unpack it."""
    for peer, some in by_peer(rows, "sender"):
        sizes = (some["run_bytes"] * some["count"]).astype(int)
        message = torch.empty(sizes.sum(), dtype=torch.uint8)
        dist.recv(message, peer)
        for row, part in zip(some, np.split(message.numpy(), np.cumsum(sizes)[:-1]), strict=True):
            filled = runs(row, target(row["tensor"]), "target")
            filled[...] = part.reshape(filled.shape)


def main() -> None:
    """Plan on every rank, compare digests, send, receive, and compare with the global tensors."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    trainer, engine = DeviceMesh([0, 1], (2,)), DeviceMesh([2, 3], (2,))
    whole = {"down": torch.arange(96.0).view(8, 12), "up": torch.arange(60.0).view(12, 5)}
    source = {name: Layout(trainer, "[S0,R]", w.shape, w.dtype) for name, w in whole.items()}
    plan = plan_reshard(source, (engine, {"down": "[R,S0]", "up": "[S0,R]"}))
    digests: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, plan.digest)
    assert len(set(digests)) == 1, "rows of one plan are of no use to another"

    def shard(layout: Layout, name: str) -> torch.Tensor:
        index = tuple(slice(lo, hi) for lo, hi in layout.box(rank))
        return whole[name][index].contiguous()

    if rank in trainer.ids:
        held = [shard(m.source, m.source_name).numpy().view(np.uint8).ravel() for m in plan.moves]
        for work in push(plan.transfers(rank, "sender"), held.__getitem__):
            if work is not None:
                work.wait()
    elif rank in engine.ids:
        made = [torch.empty(m.target.local_shape(rank)) for m in plan.moves]
        pull(plan.transfers(rank), lambda place: made[place].numpy().view(np.uint8).ravel())
        for move, got in zip(plan.moves, made, strict=True):
            same = torch.equal(got, shard(move.target, move.target_name))
            print(f"rank {rank}: {move.target_name} {tuple(got.shape)}, as it should be: {same}")
    dist.barrier()
    if started:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
