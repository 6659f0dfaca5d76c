"""Transports move bytes between the processes of a job: by messages, or from memory to memory."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardspec.errors import CommunicatorError

if TYPE_CHECKING:
    from shardspec.comm.transports.stage import Transport


_NAMES: Final = ("memory", "messages")


def transport_name() -> str:
    """Return the transport named by ``SHARDSPEC_TRANSPORT``, by default "memory".

    Raises `CommunicatorError` for an unknown name.
    """
    name = os.environ.get("SHARDSPEC_TRANSPORT") or _NAMES[0]
    if name not in _NAMES:
        raise CommunicatorError(f"SHARDSPEC_TRANSPORT={name}: use {' or '.join(_NAMES)}")
    return name


def connect(
    name: str,
    rank: int,
    peers: Sequence[int],
    gather: Callable[[Any], Mapping[int, Any]],
    known: dict[int, Any],
    timeout_s: float,
) -> Callable[[], "Transport"]:
    """Return a function that returns the transport of CPU tensors; all ranks of a mesh call this.

    That is "memory" if all ranks request it, share a host and can read each other; else "messages".
    """
    from shardspec.comm.transports.messages import Messages
    from shardspec.comm.transports.peer_memory import PeerMemory

    allowed = name == "memory"
    memory = PeerMemory.connect(rank, peers, gather, known, timeout_s, allowed=allowed)
    return (lambda: memory) if memory else Messages
