"""A generator reads new weights from other processes' memory by NIXL and rows of transfers.

    pip install nixl
    python examples/pull_nixl.py

Each rank of a trainer is a process, which registers its shards with NIXL and then only waits. A
generator makes descriptors, addresses and lengths, of all runs of bytes in its rows, and reads.
"""

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from shardspec import DeviceMesh, Layout, ReshardPlan, plan_reshard

TRAINER, ENGINE = DeviceMesh([0, 1], (2,)), DeviceMesh([2, 3], (2,))
WHOLE = {"down": np.arange(96.0).reshape(8, 12), "up": np.arange(60.0).reshape(12, 5)}


def planned() -> ReshardPlan:
    """Return the plan, the same in every process."""
    source = {name: Layout(TRAINER, "[S0,R]", w.shape, w.dtype) for name, w in WHOLE.items()}
    return plan_reshard(source, (ENGINE, {"down": "[R,S0]", "up": "[S0,R]"}))


def shard(layout: Layout, name: str, device: int) -> np.ndarray:
    """Return a device's shard of a tensor."""
    return np.ascontiguousarray(WHOLE[name][tuple(slice(*side) for side in layout.box(device))])


def descriptors(rows: np.ndarray, end: str, starts: Sequence[int]) -> np.ndarray:
    """Return (address, bytes, GPU number, 0 for host memory) of all runs at one end.

    `starts` are the addresses of the shards there, by tensor.
    """
    counts = rows["count"].astype(np.int64)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.asarray(starts)[rows["tensor"]] + rows[f"{end}_offset"].astype(np.int64)
    found = np.zeros((len(place), 3), np.uint64)
    found[:, 0] = np.repeat(first, counts) + place * np.repeat(rows[f"{end}_step"], counts)
    found[:, 1] = np.repeat(rows["run_bytes"], counts)
    return found


def registered(agent: nixl_agent, shards: Sequence[np.ndarray]) -> list[int]:
    """Let NIXL read and write shards; return their addresses."""
    agent.register_memory([(one.ctypes.data, one.nbytes, 0, "") for one in shards], "DRAM")
    return [one.ctypes.data for one in shards]


def train(rank: int, pipe: Connection) -> None:
    """Send the addresses of a rank's shards, and keep the shards until all are read."""
    plan = planned()
    shards = [shard(move.source, move.source_name, rank) for move in plan.moves]
    agent = nixl_agent(f"trainer-{rank}", nixl_agent_config(backends=["UCX"]))
    starts = registered(agent, shards)
    pipe.send((plan.digest, agent.get_agent_metadata(), starts))
    pipe.recv()


def pull(
    agent: nixl_agent,
    rows: np.ndarray,
    ours: Sequence[int],
    peers: Mapping[int, tuple[str, Sequence[int]]],
) -> None:
    """Read the runs of rows from each sender; `peers` has names and addresses of shards."""
    waiting = []
    for sender in np.unique(rows["sender"]).tolist():
        name, theirs = peers[sender]
        some = rows[rows["sender"] == sender]
        local = agent.get_xfer_descs(descriptors(some, "target", ours), "DRAM")
        remote = agent.get_xfer_descs(descriptors(some, "source", theirs), "DRAM")
        waiting.append(agent.initialize_xfer("READ", local, remote, name))
        agent.transfer(waiting[-1])
    for handle in waiting:
        while (state := agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise ConnectionError("NIXL could not read")
            time.sleep(0.001)
        agent.release_xfer_handle(handle)


def main() -> None:
    """Start the trainer, read, and compare with the global tensors."""
    plan, processes = planned(), multiprocessing.get_context("spawn")
    agent = nixl_agent("generator", nixl_agent_config(backends=["UCX"]))
    pipes = {}
    for rank in TRAINER.ids:
        pipes[rank], theirs = processes.Pipe()
        processes.Process(target=train, args=(rank, theirs), daemon=True).start()
    peers = {}
    for rank, pipe in pipes.items():
        digest, metadata, starts = pipe.recv()
        if digest != plan.digest:
            raise ValueError(f"trainer {rank} has plan {digest[:12]}, not {plan.digest[:12]}")
        peers[rank] = (agent.add_remote_agent(metadata).decode(), starts)
    for device in ENGINE.ids:
        made = [np.empty(m.target.local_shape(device)) for m in plan.moves]
        rows = plan.transfers(device)
        pull(agent, rows, registered(agent, made), peers)
        for move, got in zip(plan.moves, made, strict=True):
            same = np.array_equal(got, shard(move.target, move.target_name, device))
            print(f"device {device}: {move.target_name} {got.shape}, as it should be: {same}")
    for pipe in pipes.values():
        pipe.send("all was read")


if __name__ == "__main__":
    main()
