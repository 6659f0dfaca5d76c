"""The table of what was measured, beside what was aimed at."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.checkpoint_timing import Series

__all__ = ["MOST_MIB", "Row", "head_lines", "row_lines"]

MOST_MIB: Final = 64
INSPECT_SECONDS: Final = 0.3


@dataclass(frozen=True, slots=True)
class Row:
    """One command on one checkpoint."""

    case: str
    name: str
    cat: Series
    series: Series
    aim: float | None
    """Most times as long as `cat`."""
    ours: bool
    by_median: bool = False
    """Whether the aim is for the medians: a disk can be fast until its credit is used up."""

    def cells(self) -> list[str]:
        """Return the columns of the table."""
        best = self.cat.best
        middle = statistics.median(run.seconds for run in self.cat.runs)
        median = statistics.median(run.seconds for run in self.series.runs)
        seconds, work = self.series.best, self.series.inside
        missed = []
        ratio = median / middle if self.by_median else seconds / best
        if self.aim is not None and ratio > self.aim:
            missed.append("time")
        if self.ours and self.series.peak_mib > MOST_MIB:
            missed.append("memory")
        if self.name == "inspect" and seconds > INSPECT_SECONDS:
            missed.append("time")
        aim = f"{INSPECT_SECONDS} s" if self.name == "inspect" else self.aim
        timed = self.name != "inspect"
        return [
            self.case,
            self.name,
            f"{seconds:.2f}",
            f"{seconds / best:.2f}" if timed else "",
            f"{median / middle:.2f}" if timed else "",
            f"{self.series.cpu_seconds / self.cat.cpu_seconds:.2f}" if timed else "",
            "" if work is None or not timed else f"{work / best:.2f}",
            "" if aim is None else str(aim),
            f"{self.series.peak_mib:,.0f}",
            ", ".join(missed),
        ]


_HEAD: Final = (
    "checkpoint",
    "command",
    "s",
    "÷ cat",
    "(medians)",
    "CPU ÷ cat",
    "work alone",
    "aim",
    "peak MiB",
    "missed",
)


def head_lines() -> list[str]:
    """Return the head of the table, as Markdown."""
    return [_line(_HEAD), _line(["---"] * len(_HEAD))]


def row_lines(rows: Sequence[Row]) -> list[str]:
    """Return lines of the table, with one for the `cat` beside each checkpoint."""
    lines = []
    case = None
    for row in rows:
        if row.case != case:
            case = row.case
            cells = [case, "cat", f"{row.cat.best:.2f}", "1.00", "1.00", "1.00", "", "", "", ""]
            lines.append(_line(cells))
        lines.append(_line(row.cells()))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
