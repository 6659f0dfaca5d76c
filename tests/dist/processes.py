"""Real processes that talk over gloo, started once for many checks."""

import os
import queue
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardspec import DeviceMesh
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.mesh.job import current_job

__all__ = ["communicator_by", "rank_context", "run_ranks", "substitute"]


def communicator_by(mesh: DeviceMesh, *, reads_peers: bool) -> ProcessGroupCommunicator:
    """Return a communicator that reads peers' memory, or one that sends messages."""
    name = "memory" if reads_peers else "messages"
    with mock.patch.dict(os.environ, SHARDSPEC_TRANSPORT=name):
        return ProcessGroupCommunicator(mesh)


def substitute(communicator: ProcessGroupCommunicator) -> None:
    """Make a communicator the one that the job uses for its mesh."""
    current_job().communicators[communicator.mesh] = communicator


def _rank(
    rank: int,
    world: int,
    rendezvous: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    out: Any,
    backend: str | None,
) -> None:
    torch.set_num_threads(1)  # the ranks share few cores
    try:
        if backend:
            dist.init_process_group(
                backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world
            )
        result = work(rank, *args)
        if backend:
            dist.barrier()
            dist.destroy_process_group()
        out.put((rank, True, result))
    except BaseException:
        out.put((rank, False, traceback.format_exc()))
        sys.exit(1)


def rank_context() -> Any:
    """Return the context of multiprocessing in which ranks are forks of one process with torch."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.preload"])
    return context


def run_ranks(
    world: int,
    tmp_path: Path,
    work: Callable[..., Any],
    *args: Any,
    timeout_s: float = 150,
    backend: str | None = "gloo",
) -> list[Any]:
    """Run ``work(rank, *args)`` in so many processes and return what each of them returns.

    They are a job of torch.distributed unless `backend` is None. A process that fails or hangs ends
    them all, with its traceback in the error.
    """
    context = rank_context()
    out = context.Queue()
    rendezvous = str(tmp_path / "rendezvous")
    processes = [
        context.Process(target=_rank, args=(rank, world, rendezvous, work, args, out, backend))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    try:
        while len(results) < world:
            try:
                rank, fine, result = out.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(world)) - set(results))
                raise AssertionError(f"ranks {missing} did not end in {timeout_s} s") from None
            if not fine:
                raise AssertionError(f"rank {rank} failed:\n{result}")
            results[rank] = result
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [results[rank] for rank in range(world)]
