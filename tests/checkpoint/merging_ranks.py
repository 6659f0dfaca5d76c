"""What each of several processes does that write outputs together; it imports little."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any, TypeAlias

import torch.distributed as dist

from shardspec import DeviceMesh, ShardSpecError
from shardspec.checkpoint.convert.options import WriteReport
from shardspec.comm.process_group import ProcessGroupCommunicator

__all__ = ["answer", "answer_in_job", "end_self", "write_all"]

Act: TypeAlias = Callable[..., WriteReport]
"""A merge or a reshard that still lacks the communicator."""


def answer(act: Act, communicator: ProcessGroupCommunicator) -> list[Any]:
    """Carry it out; return the type of the error, the CRC-32 or the error, and the files."""
    try:
        report = act(communicator=communicator)
    except ShardSpecError as error:
        return [type(error).__name__, str(error), []]
    return [None, report.crc32, list(report.files)]


def write_all(
    rank: int, acts: Sequence[Act | Sequence[Act]], environment: Mapping[str, str]
) -> list[list[Any]]:
    """Carry out one after the other, where there are several that of this rank; return answers."""
    os.environ.update(environment)
    communicator = ProcessGroupCommunicator.of(DeviceMesh(range(dist.get_world_size())))
    return [answer(act if callable(act) else act[rank], communicator) for act in acts]


def end_self(
    done: int, _total: int, victim: int, how: signal.Signals, after: Callable[[int], object] = bool
) -> None:
    """Let one rank end or stop once it has copied something; called with the progress."""
    if dist.get_rank() == victim and after(done):
        os.kill(os.getpid(), how)


def answer_in_job(
    rank: int, world: int, rendezvous: str, timeout_s: float, act: Act, answers: "Queue[Any]"
) -> None:
    """Join a job of so many ranks, and send what this one has to say."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    communicator = ProcessGroupCommunicator.of(DeviceMesh(range(world)))
    answers.put([rank, *answer(act, communicator)])
    dist.destroy_process_group()
