"""What goes wrong while data is under way, said in one line that names the step and the peers."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shardspec.errors import CommunicatorError

__all__ = ["cause", "failing", "ranks"]


def ranks(peers: Iterable[int]) -> str:
    """Name some ranks.

    Examples
    --------
    >>> ranks([3, 1, 3]), ranks([4]), ranks(range(20))
    ('ranks 1, 3', 'rank 4', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    found = sorted(set(peers))
    shown = ", ".join(map(str, found[:8]))
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"rank{'' if len(found) == 1 else 's'} {shown}{more}"


@contextmanager
def failing(what: object, peers: Iterable[int]) -> Iterator[None]:
    """Turn what `torch.distributed` raises into a `CommunicatorError`.

    Parameters
    ----------
    what
        The step that is under way.
    peers
        Whom this rank talks to.

    Examples
    --------
    >>> with failing("AllGather(dim=0, axes=(0,))", [1, 2]):
    ...     raise RuntimeError("Connection closed by peer")
    Traceback (most recent call last):
        ...
    shardspec.errors.CommunicatorError: AllGather(dim=0, axes=(0,)) with ranks 1, 2 failed: \
Connection closed by peer; the job cannot go on, see what these ranks say
    """
    try:
        yield
    except CommunicatorError:
        raise
    except RuntimeError as error:  # DistBackendError and the other errors of torch are such
        raise CommunicatorError(
            f"{what} with {ranks(peers)} failed: {cause(error)}; the job cannot go on, see what "
            "these ranks say"
        ) from error


def cause(error: RuntimeError) -> str:
    """Return what happened, without where in the sources of the backend, and without its advice."""
    line = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), "no reason given"
    )
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]
