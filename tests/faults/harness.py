"""Cases, and the process that runs the cases of one row under limits of time and memory."""

import json
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["MEMORY_LIMIT", "SECONDS_LIMIT", "Case", "Counts", "Row", "child", "perform"]

MEMORY_LIMIT: Final = 200 << 20
"""Bytes of resident memory in all; beyond what `import torch` takes where a row needs torch."""
SECONDS_LIMIT: Final = 60
"""A case that takes longer is taken for one that hangs."""
_SHOWN: Final = 20
"""Wrong cases that are kept with their story."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    label: str
    act: Callable[[], object]
    """Does the thing and raises AssertionError if it ends otherwise than it should."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    fault: str
    """What is wrong, in words."""
    cases: Callable[[Path, bool], Iterator[Case]]
    """Given a folder to work in, and whether all cases are wanted or a sample of each kind."""
    ends: str = "refused"
    """How a case ends that is right."""
    torch: bool = False
    """Whether the cases need torch."""
    prepare: str | None = None
    """A function of `tests.faults.prepare` that fills the folder with torch's help."""
    own_mounts: bool = False
    """Whether the row mounts file systems, and so wants a namespace of its own for them."""
    memory: int = MEMORY_LIMIT
    """Bytes that a case may take."""


@dataclass
class Counts:
    """How many cases of a row were right and wrong, and what the worst of them took."""

    cases: int = 0
    wrong: int = 0
    seconds: float = 0.0
    """Of the slowest case."""
    memory: int = 0
    """Peak of the largest case in bytes; beyond the start where the row needs torch."""
    stories: list[str] = field(default_factory=list)
    """The first wrong cases."""

    def flaw(self, story: str) -> None:
        """Note a wrong case."""
        self.wrong += 1
        if len(self.stories) < _SHOWN:
            self.stories.append(story)


class _Hangs(AssertionError):
    """A case has used up its time."""


def _stop(_number: int, _frame: object) -> None:
    raise _Hangs(f"takes longer than {SECONDS_LIMIT} s")


def _peak() -> int:
    """Return the peak of this process since `_forget_peak`, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        # macOS counts bytes, and has nothing that could be reset.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def _forget_peak() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def perform(row: Row, place: Path, *, whole: bool) -> Counts:
    """Run every case of a row in this process."""
    counts = Counts()
    if row.torch:
        from tests.faults.operations import warm

        warm(place)
    base = _peak() if row.torch else 0
    signal.signal(signal.SIGALRM, _stop)
    for case in row.cases(place, whole):
        counts.cases += 1
        _forget_peak()
        started = time.perf_counter()
        signal.alarm(SECONDS_LIMIT)
        try:
            case.act()
        except Exception:  # whatever it is, the table counts it as wrong
            story = traceback.format_exc(limit=-4, chain=False)
            counts.flaw(f"{case.label}: {story[-2000:]}")
        finally:
            signal.alarm(0)
        counts.seconds = max(counts.seconds, time.perf_counter() - started)
        used = _peak() - base
        if used > row.memory:
            counts.flaw(f"{case.label}: takes {used >> 20} MiB of memory")
        counts.memory = max(counts.memory, used)
    # Linux counts KiB, and forked processes start with what they inherit.
    of_forks = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10) - base
    if of_forks > row.memory:
        counts.flaw(f"a forked process takes {of_forks >> 20} MiB of memory")
    counts.memory = max(counts.memory, of_forks)
    if not row.torch and "torch" in sys.modules:
        counts.flaw("torch was imported")
    return counts


def child(rows: Sequence[tuple[Row, Path]], *, whole: bool) -> None:
    """Run rows, each in its folder, and print their counts as JSON."""
    counts = [asdict(perform(row, place, whole=whole)) for row, place in rows]
    print(json.dumps(counts))
