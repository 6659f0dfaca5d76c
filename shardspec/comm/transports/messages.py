"""Sends boxes as messages of `torch.distributed`: gloo on CPU, NCCL on CUDA.

A message that is one contiguous part of a shard is sent and received in place. Others are packed
into buckets (buffers), which have a bounded number of bytes at a time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias

import torch
import torch.distributed as dist

from shardspec.boxes import Box, box_shape, box_size, split_interval
from shardspec.comm.results import checked_result
from shardspec.comm.steps import AllGather, AllReduce, ReduceScatter
from shardspec.comm.transfers import DeviceTransfers, Message, message_bytes
from shardspec.comm.transports.stage import Stage, Wave
from shardspec.errors import CommunicatorError
from shardspec.text import ranks_text

_TAG: Final = 0x5AD5
"""The tag of the library's messages; programs use small tags."""
STAGED_BYTES: Final = 16 << 20
"""The most bytes in buffers on the CPU, half of them for sending. With more than 32 peers the limit
is 0.5 MiB per peer."""
_ACCELERATOR_BYTES: Final = 64 << 20
"""Bytes per wave between accelerators, whose links need longer messages."""

Addressed: TypeAlias = list[tuple[int, torch.Tensor]]
"""Pairs of peer and tensor."""
Finish: TypeAlias = Callable[[], None]
"""A function that waits for the messages of a wave, and unpacks them."""


@dataclass(slots=True, eq=False)
class Messages:
    """A `Transport` that sends and receives messages."""

    name: ClassVar[str] = "messages"
    free: list[torch.Tensor] = field(default_factory=list)
    """Unused buckets, for later messages."""
    bucket_bytes: int = 0
    """The least bytes of a bucket."""

    def close(self) -> None:
        """Do nothing: peers notice when the process ends, or at the timeout of the group."""

    def move(self, stages: Iterable[Stage]) -> None:
        """Fill the targets of stages by messages; see `Transport.move`."""
        for stage in stages:
            on_cpu = all(shard.device.type == "cpu" for shard in stage.source.values())
            most = STAGED_BYTES // 2 if on_cpu else _ACCELERATOR_BYTES
            finish = _nothing
            for wave in stage.waves(most):
                # The previous wave is unpacked while this one travels.
                following = self._start(stage, wave)
                finish()
                finish = following
                if stage.one_by_one:
                    finish()
                    finish = _nothing
            finish()

    def reserve(self, first: Callable[[], tuple[int, int]], like: torch.Tensor) -> bool:
        """Allocate the buckets of a first wave; see `Transport.reserve`."""
        count, self.bucket_bytes = first()
        self.free.extend(_bucket(self.bucket_bytes, like) for _ in range(count))
        return True

    def _start(self, stage: Stage, wave: Wave) -> Finish:
        """Start the messages of a wave; return a function that completes it."""
        landing: Addressed = []
        leaving: Addressed = []
        buckets: list[torch.Tensor] = []
        unpacked: list[tuple[Message, torch.Tensor]] = []
        for peer, message in wave.receives.items():
            buffer = _in_place(stage, message, of_source=False) if peer != stage.device else None
            if buffer is None and peer != stage.device:
                buffer = self._memory_for(stage, message, buckets, of_source=False)
                unpacked.append((message, buffer))
            if buffer is not None:
                landing.append((peer, buffer))
        for peer, message in wave.sends.items():
            buffer = _in_place(stage, message, of_source=True)
            if buffer is None:
                buffer = self._memory_for(stage, message, buckets, of_source=True)
                stage.pack(message, buffer)
            leaving.append((peer, buffer))
        with errors_named(stage.name, stage.readers | stage.senders):
            works = _start_messages(leaving, landing)

        def finish() -> None:
            stage.copy(wave.receives.get(stage.device, ()), stage)
            with errors_named(stage.name, stage.readers | stage.senders):
                for work in works:
                    work.wait()
            for message, bucket in unpacked:
                stage.unpack(message, bucket)
            self.free.extend(buckets)

        return finish

    def _memory_for(
        self, stage: Stage, message: Message, buckets: list[torch.Tensor], *, of_source: bool
    ) -> torch.Tensor:
        """Return memory for a message in a free or new bucket, which is added to `buckets`."""
        size = message_bytes(message)
        fitting = (at for at, bucket in enumerate(self.free) if bucket.numel() >= size)
        at = next(fitting, None)
        if at is None:
            shards = stage.source if of_source else stage.target
            buckets.append(_bucket(max(size, self.bucket_bytes), shards[message[0].places[0]]))
        else:
            buckets.append(self.free.pop(at))
        return buckets[-1][:size]


def _nothing() -> None:
    pass


def _bucket(num_bytes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=_sending(like.device))


def _sending(device: torch.device) -> torch.device:
    """Return the device for buffers: the accelerator if NCCL sends from it, else the CPU."""
    with_gloo = f"{device.type}:gloo" in dist.get_backend_config()
    return torch.device("cpu") if with_gloo else device


def _in_place(stage: Stage, message: Message, *, of_source: bool) -> torch.Tensor | None:
    """Return the part of a shard that is the message in place; None if it must be packed."""
    if len(message) > 1 or len(message[0].places) > 1:
        return None
    (part,) = stage.parts(message[0], of_source=of_source)
    is_contiguous = part.is_contiguous() and part.nbytes == message_bytes(message)
    is_in_place = part.dtype == stage.dtype_of(message[0]) and part.device == _sending(part.device)
    return part if is_contiguous and is_in_place else None


def _start_messages(sends: Addressed, receives: Addressed) -> list[dist.Work]:
    """Post sends and receives of contiguous tensors as bytes; skip empty ones."""
    ops = [
        dist.P2POp(act, as_bytes(tensor), peer, None, _TAG)
        for act, addressed in ((dist.irecv, receives), (dist.isend, sends))
        for peer, tensor in addressed
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes.

    >>> as_bytes(torch.tensor([1, 256], dtype=torch.int16))
    tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    # torch counts a single element as contiguous with any stride, but a view of bytes needs 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@contextmanager
def errors_named(name: str, peers: Iterable[int]) -> Iterator[None]:
    """Turn errors of `torch.distributed` into a `CommunicatorError` that names step and ranks."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and the other errors of torch
        raise CommunicatorError(
            f"{name} with {ranks_text(peers)} failed: {cause_of(error)}"
        ) from error


def cause_of(error: RuntimeError) -> str:
    """Return the first line of a backend's error, without its source position and advice.

    >>> cause_of(RuntimeError("[pair.cc:5] closed. This is typically a crash"))
    'closed'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first_line = lines[0] if lines else "no reason given"
    return re.sub(r"^\[\S+:\d+\] ", "", first_line).split(". This is typically")[0]


# torch 2.13 has new names, and warns of the old ones.
_NEW_NAMES: Final = torch.__version__ >= "2.13"  # compares as versions do
_ALL_GATHER: Final = dist.all_gather_single if _NEW_NAMES else dist.all_gather_into_tensor
_REDUCE_SCATTER: Final = dist.reduce_scatter_single if _NEW_NAMES else dist.reduce_scatter_tensor
_SUMMED: Final = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes that every backend sums in the dtype itself."""


def run_collective(
    schedule: DeviceTransfers, shard: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Run a step as one collective of NCCL, which is faster than sends and receives.

    `has_collective` must be true for the step; see `run_transfers`.
    """
    step, result = schedule.step, shard.new_empty(box_shape(schedule.after))
    with checked_result(step, result), errors_named(str(step), schedule.peers):
        if isinstance(step, AllReduce):
            dist.all_reduce(result.copy_(shard), group=group)
        elif schedule.op is None:
            _ALL_GATHER(as_bytes(result), as_bytes(shard.contiguous()), group=group)
        else:
            _REDUCE_SCATTER(result.view(-1), shard.contiguous().view(-1), group=group)
    return result.div_(len(schedule.members)) if schedule.op == "avg" else result


def has_collective(schedule: DeviceTransfers, dtype: torch.dtype) -> bool:
    """Return True if the backend has a collective for a step; all members return the same."""
    match schedule.step:
        case AllGather():
            coming = {copy.sender: copy.box for copy in schedule.incoming}
            return _are_in_order(schedule, coming, schedule.after)
        case ReduceScatter(op="sum" | "avg"):
            going = {copy.receiver: copy.box for copy in schedule.outgoing}
            going[schedule.device] = schedule.after
            return dtype in _SUMMED and _are_in_order(schedule, going, schedule.before)
        case AllReduce(op="sum" | "avg"):
            return dtype in _SUMMED
        case _:
            return False


def _are_in_order(schedule: DeviceTransfers, parts: Mapping[int, Box], box: Box) -> bool:
    """Return True if the members' parts are equally long and follow each other in the box."""
    ranks, shape = sorted(schedule.members), box_shape(box)
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if dim is None or not box_size(box) or shape[dim] % len(ranks):
        return False
    cuts = (split_interval(*box[dim], len(ranks), at) for at in range(len(ranks)))
    return [parts.get(rank) for rank in ranks] == [(*box[:dim], c, *box[dim + 1 :]) for c in cuts]
