"""Bytes as messages of `torch.distributed`, by gloo on CPU and NCCL where CUDA is.

A message that is one contiguous part of a shard is sent and received as it lies; others pass
through buckets, of which a bounded number of bytes is in use at a time.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.comm.agreement import ranks_text
from shardspec.comm.transfers import Message, message_bytes
from shardspec.comm.transports.stage import Stage, Wave
from shardspec.errors import CommunicatorError

STAGED_BYTES: Final = 16 << 20
"""The most that lies in buffers on the CPU, half of it sent and half received; with more than 32
peers, half a MiB for each."""
_ACCELERATOR_BYTES: Final = 64 << 20
"""What is sent in one round between accelerators, whose links want longer messages."""

Addressed: TypeAlias = list[tuple[int, torch.Tensor]]
"""Pairs of peer and tensor."""
Finish: TypeAlias = Callable[[], None]
"""Waits for the messages of a wave, and unpacks them."""


@dataclass(slots=True, eq=False)
class Messages:
    """A `Transport` by sends and receives; the tag tells threads apart, except with NCCL."""

    tag: int
    free: list[torch.Tensor] = field(default_factory=list)
    """Buckets that hold no message, to be used again."""
    bucket_bytes: int = 0
    """The least that a bucket has."""

    def move(self, stages: Iterable[Stage]) -> None:
        """Fill targets; see `Transport.move`."""
        for stage in stages:
            on_cpu = all(shard.device.type == "cpu" for shard in stage.source.values())
            most = STAGED_BYTES // 2 if on_cpu else _ACCELERATOR_BYTES
            finish = _nothing
            for wave in stage.waves(most):
                # What came in the wave before is unpacked while this one travels.
                following = self._start(stage, wave)
                finish()
                finish = following
                if stage.one_by_one:
                    finish()
                    finish = _nothing
            finish()

    def reserve(self, first: Callable[[], tuple[int, int]], like: torch.Tensor) -> bool:
        """Make the buckets of a first wave; see `Transport.reserve`."""
        count, self.bucket_bytes = first()
        self.free.extend(_bucket(self.bucket_bytes, like) for _ in range(count))
        return True

    def _start(self, stage: Stage, wave: Wave) -> Finish:
        """Start the messages of a wave; return what ends it."""
        landing: Addressed = []
        leaving: Addressed = []
        taken: list[torch.Tensor] = []
        unpacked: list[tuple[Message, torch.Tensor]] = []
        for peer, message in wave.receives.items():
            whole = _whole(stage, message, of_source=False) if peer != stage.device else None
            if whole is None and peer != stage.device:
                whole = self._taken(stage, message, taken, of_source=False)
                unpacked.append((message, whole))
            if whole is not None:
                landing.append((peer, whole))
        for peer, message in wave.sends.items():
            whole = _whole(stage, message, of_source=True)
            if whole is None:
                whole = self._taken(stage, message, taken, of_source=True)
                stage.pack(message, whole)
            leaving.append((peer, whole))
        with errors_named(stage.name, stage.readers | stage.senders):
            works = start_messages(leaving, landing, self.tag)

        def finish() -> None:
            stage.copy(wave.receives.get(stage.device, ()))
            with errors_named(stage.name, stage.readers | stage.senders):
                for work in works:
                    work.wait()
            for message, bucket in unpacked:
                stage.unpack(message, bucket)
            self.free.extend(taken)

        return finish

    def _taken(
        self, stage: Stage, message: Message, taken: list[torch.Tensor], *, of_source: bool
    ) -> torch.Tensor:
        """Return memory for a message."""
        size = message_bytes(message)
        fitting = (at for at, bucket in enumerate(self.free) if bucket.numel() >= size)
        at = next(fitting, None)
        if at is None:
            shards = stage.source if of_source else stage.target
            taken.append(_bucket(max(size, self.bucket_bytes), shards[message[0].places[0]]))
        else:
            taken.append(self.free.pop(at))
        return taken[-1][:size]


def _nothing() -> None:
    pass


def _bucket(num_bytes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=_sending(like.device))


def _sending(device: torch.device) -> torch.device:
    """Return where messages lie: gloo sends and reads memory of the host alone."""
    with_gloo = f"{device.type}:gloo" in dist.get_backend_config()
    return torch.device("cpu") if with_gloo else device


def _whole(stage: Stage, message: Message, *, of_source: bool) -> torch.Tensor | None:
    """Return the part of a shard that is a message as it lies in memory; None if there is none."""
    if len(message) > 1 or len(message[0].places) > 1:
        return None
    (part,) = stage.parts(message[0], of_source=of_source)
    same = part.is_contiguous() and part.nbytes == message_bytes(message)
    there = part.dtype == stage.dtype_of(message[0]) and part.device == _sending(part.device)
    return part if same and there else None


def start_messages(
    sends: Addressed, receives: Addressed, tag: int, group: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """Post contiguous tensors as bytes, so that every dtype travels; empty ones do not."""
    ops = [
        dist.P2POp(act, as_bytes(tensor), peer, group, tag)
        for act, addressed in ((dist.irecv, receives), (dist.isend, sends))
        for peer, tensor in addressed
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes."""
    # A single element counts as contiguous whatever its stride, but needs stride 1 to be bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def errors_named(what: str, peers: Iterable[int]) -> Iterator[None]:
    """Name a step or plan and its ranks where `torch.distributed` raises an error."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and the other errors of torch
        raise failed_with(what, peers, cause_of(error)) from error


def failed_with(what: object, peers: Iterable[int], why: str) -> CommunicatorError:
    """Return the error that something with some ranks has failed."""
    return CommunicatorError(
        f"{what} with {ranks_text(peers)} failed: {why}; the job cannot go on, see what these "
        "ranks say"
    )


def cause_of(error: RuntimeError) -> str:
    """Return what happened, without the backend's source line and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return re.sub(r"^\[\S+:\d+\] ", "", said).split(". This is typically")[0]
