"""Makes all processes of a mesh continue, or all raise the same error."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Final, NamedTuple, TypeVar

from shardspec.comm.agreement import failure_text, on_all_ranks
from shardspec.comm.communicator import Communicator
from shardspec.errors import CheckpointError, OutputExistsError, ShardSpecError

T = TypeVar("T")

_LONG: Final = 200
"""Maximum characters of a value in an error."""
_FAILURES: Final = (ShardSpecError, OSError, RuntimeError, ValueError, TypeError, MemoryError)
"""Errors of reading, writing and torch. The rank with another error raises it unchanged, and the
other ranks fail too."""


class Failure(NamedTuple):
    """The report of an error that a rank sends to the others."""

    kind: type[ShardSpecError]
    """Class of the error that all ranks raise."""
    text: str


def agree(communicator: Communicator, act: Callable[[], T]) -> T:
    """Run `act` in every process of the mesh; return its result if all processes succeed.

    `act` must not communicate. If it fails anywhere, every rank raises `CheckpointError`, which
    names the first such rank, or `OutputExistsError` if that rank did. A process outside the mesh
    runs `act` by itself.

    >>> from shardspec import DeviceMesh, SimulatedCommunicator
    >>> communicator = SimulatedCommunicator(DeviceMesh(range(2)))
    >>> agree(communicator, lambda: 3), check_same(communicator, {"tensor 'w'": "[8]"}, "convert")
    (3, None)
    """
    if not communicator.addressable:
        return act()
    results: list[T] = []
    failure = cause = None
    try:
        results.append(act())
    except Exception as error:  # whatever it is, the other ranks would wait for this one
        cause = error
        kind = OutputExistsError if isinstance(error, OutputExistsError) else CheckpointError
        failure = Failure(kind, failure_text(error))
    failures = communicator.gather(dict.fromkeys(communicator.addressable, failure))
    raise_first(failures, cause)
    return results[0]


def raise_first(failures: Mapping[int, Failure | None], cause: Exception | None) -> None:
    """Raise the first failure, the same on every rank; return if no rank has failed.

    `cause` is the error of this rank; it is raised unchanged if its class is not in `_FAILURES`.
    """
    if cause is not None and not isinstance(cause, _FAILURES):
        raise on_all_ranks(cause)
    for rank, failure in failures.items():
        if failure is not None:
            everywhere = len(set(failures.values())) == 1
            text = failure.text if everywhere else f"rank {rank}: {failure.text}"
            raise on_all_ranks(failure.kind(text)) from cause


def check_same(communicator: Communicator, facts: Mapping[str, str], remedy: str) -> None:
    """Raise `CheckpointError` on every rank if ranks have different `facts`.

    Keys are a kind and a name, as in ``"tensor 'w'"``; the error has the first key that differs.
    """
    digest = sha256(repr(sorted(facts.items())).encode("utf-8", "surrogatepass")).hexdigest()
    ranks = communicator.addressable
    digests = communicator.gather(dict.fromkeys(ranks, digest))
    if len(set(digests.values())) == 1:
        return
    # The long lists are sent only after digests differ.
    every = communicator.gather(dict.fromkeys(ranks, facts))
    first, second = next((i, j) for i in every for j in every if every[i] != every[j])
    differ = dict(every[first].items() ^ every[second].items())
    key = next(name for name in {**every[first], **every[second]} if name in differ)
    has = []
    for rank in (first, second):
        text = every[rank].get(key, f"no such {key.split()[0]}")
        has.append(f"rank {rank} has {text[:_LONG]}{'…' if len(text) > _LONG else ''}")
    raise on_all_ranks(CheckpointError(f"ranks differ in {key}: {' but '.join(has)}; {remedy}"))
