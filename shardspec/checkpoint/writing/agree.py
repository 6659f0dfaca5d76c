"""Failing together: what goes wrong on one rank is raised on every rank, so that none waits."""

from collections.abc import Callable
from typing import Final, TypeVar

from shardspec.comm.communicator import Communicator
from shardspec.errors import CheckpointError, OutputExistsError, ShardSpecError

__all__ = ["agree"]

T = TypeVar("T")

_FAILURES: Final = (ShardSpecError, OSError, RuntimeError, ValueError, TypeError, MemoryError)
"""What reading, writing and torch raise. An error of programming is raised as it is, where it
happened; the other ranks hear of it all the same."""


def agree(communicator: Communicator, act: Callable[[], T]) -> T:
    """Do something in every process, and go on only if it worked in all of them.

    Parameters
    ----------
    communicator
        Every process of its mesh calls this at the same point; one outside it acts for itself.
    act
        What to do; it must not communicate.

    Returns
    -------
    T
        What `act` returned here.

    Raises
    ------
    OutputExistsError
        On every rank, if the first failure was one.
    CheckpointError
        On every rank, if `act` failed in any other way on any rank; names the first such rank.

    Examples
    --------
    >>> from shardspec import DeviceMesh, SimulatedCommunicator
    >>> agree(SimulatedCommunicator(DeviceMesh(range(2), (2,))), lambda: 5)
    5
    """
    if not communicator.addressable:
        return act()
    done: list[T] = []
    failure: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        done.append(act())
    except Exception as error:
        cause = error
        ours = isinstance(error, ShardSpecError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        failure = isinstance(error, OutputExistsError), text
    failures = communicator.gather(dict.fromkeys(communicator.addressable, failure))
    failed = {rank: found for rank, found in failures.items() if found is not None}
    if cause is not None and not isinstance(cause, _FAILURES):
        raise cause
    if failed:
        rank, (exists, text) = next(iter(failed.items()))
        everywhere = len(failed) == len(failures) and len(set(failed.values())) == 1
        message = text if everywhere else f"rank {rank}: {text}"
        raise (OutputExistsError if exists else CheckpointError)(message) from cause
    return done[0]
