"""Records of the steps of conversions, measured and predicted: a table, a trace, or log lines.

``SHARDSPEC_LOG=debug`` in the environment, or a handler on the logger "shardspec", writes a line
per step.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Step
from shardspec.errors import ShardSpecError
from shardspec.layout.cross import common_mesh
from shardspec.layout.layout import Layout
from shardspec.layout.plan import step_bytes, step_seconds, step_text
from shardspec.text import bytes_text, counted, seconds_text, table_text

LOGGER: Final = logging.getLogger("shardspec")
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that this process carried out."""

    step: Step
    before: Layout
    after: Layout
    devices: tuple[int, ...]
    """Physical ids that this process holds."""
    started_s: float
    """The start on the clock of `time.perf_counter`."""
    seconds: float
    """Measured seconds in this process, including waiting for others."""
    model: CostModel
    """The cost model of the step."""
    backward: bool
    """Whether the step was part of a backward pass."""

    @property
    def predicted_seconds(self) -> float:
        """The seconds that the cost model predicts."""
        return step_seconds(self.step, self.before, self._priced_after, self.model)

    @property
    def num_bytes(self) -> int:
        """Bytes that the busiest device receives."""
        return step_bytes(self.step, self.before, self._priced_after)

    @property
    def links(self) -> str:
        """The links of the cost model, as text."""
        mesh = common_mesh(self.before.mesh, self.after.mesh)
        return self.model.links_text(mesh.axis_labels())

    @property
    def _priced_after(self) -> Layout:
        # The gradient of a pending value is not pending.
        spec = self.after.spec
        return self.after.with_spec(spec.without_partial()) if self.backward else self.after

    def __str__(self) -> str:
        way = "gradient: " if self.backward else ""
        return (
            f"{way}{step_text(self.step)}, {self.before.labelled_spec} → "
            f"{self.after.labelled_spec} of {list(self.before.global_shape)} {self.before.dtype}, "
            f"{bytes_text(self.num_bytes)} in {seconds_text(self.seconds)}"
        )


class Trace:
    """The steps carried out while the trace was open; see `trace`."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        """The steps in the order in which they began."""
        self.opened, self._clock = time.perf_counter(), time.time()

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return a text table: a row per step, the totals, and the links of the predictions."""
        if not self.records:
            return "no step was carried out"
        rows = [
            [
                ("← " if record.backward else "") + step_text(record.step),
                str(record.before.labelled_spec),
                str(record.after.labelled_spec),
                *_numbers([record]),
            ]
            for record in self.records
        ]
        footer = [counted(len(rows), "step"), "", "", *_numbers(self.records)]
        header = ["step", "from", "to", "receives", "measured", "predicted"]
        table = table_text(header, rows, footer=footer, numbers_from=3)
        links = dict.fromkeys(record.links for record in self.records)
        return "\n".join([table, *(f"predicted for {each}" for each in links)])

    def as_chrome(self) -> dict[str, object]:
        """Return the trace in the format that Perfetto and Chrome's tracing page read.

        One process per rank, or per simulated mesh; times in microseconds of the host's clock, so
        that the files of several ranks line up.
        """
        ranks, steps = {}, []
        for record in self.records:
            layout, pid = record.before, next(iter(record.devices), -1)
            place = {"pid": pid, "tid": 0}
            rank = {"name": f"rank {_devices_text(record.devices)}"}
            ranks[pid] = {"name": "process_name", "ph": "M", **place, "args": rank}
            facts = {
                "from": str(layout.labelled_spec),
                "to": str(record.after.labelled_spec),
                "shape": list(layout.global_shape),
                "dtype": layout.dtype,
                "mesh": str(layout.mesh),
                "bytes_received": record.num_bytes,
                "predicted_us": record.predicted_seconds * 1e6,
            }
            start = (record.started_s - self.opened + self._clock) * 1e6
            kind = "gradient" if record.backward else "conversion"
            event = {"name": step_text(record.step), "cat": kind, "ph": "X", **place}
            steps.append({**event, "ts": start, "dur": record.seconds * 1e6, "args": facts})
        return {"displayTimeUnit": "ms", "traceEvents": [*ranks.values(), *steps]}

    def save(self, path: Path | str) -> None:
        """Write `as_chrome` as JSON; in a job, give each rank a different path."""
        try:
            Path(path).write_text(json.dumps(self.as_chrome()), encoding="utf-8")
        except OSError as error:
            raise ShardSpecError(f"{path}: cannot be written: {error.strerror}") from None


_OPEN: Final[ContextVar[tuple[Trace, ...]]] = ContextVar("shardspec traces", default=())


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every step that this process carries out inside the block.

    Examples
    --------
    >>> import torch
    >>> from shardspec import DeviceMesh, DTensor
    >>> tensor = DTensor(torch.ones(2048, 2048), DeviceMesh(range(4), (2, 2)), "[S0,R]")
    >>> with trace() as steps:
    ...     _ = tensor.redistribute("[R,S0]")
    >>> [(str(record.step), record.num_bytes) for record in steps.records]
    [('AllToAll(src_dim=0, dst_dim=1, src_axes=(0,), dst_axes=(0,))', 4194304)]
    >>> [(event["ph"], event["name"]) for event in steps.as_chrome()["traceEvents"]]
    [('M', 'process_name'), ('X', 'all-to-all dim 0 → 1')]
    """
    opened = Trace()
    token = _OPEN.set((*_OPEN.get(), opened))
    try:
        yield opened
    finally:
        _OPEN.reset(token)


def observers() -> list[Callable[[StepRecord], object]]:
    """Return the functions that receive the record of each step: open traces, and the log."""
    taking: list[Callable[[StepRecord], object]] = [each.records.append for each in _OPEN.get()]
    return [*taking, _log] if LOGGER.isEnabledFor(logging.DEBUG) else taking


def _log(record: StepRecord) -> None:
    LOGGER.debug("rank %s: %s", _devices_text(record.devices), record)


def _numbers(records: Sequence[StepRecord]) -> list[str]:
    """Return total bytes, measured time and predicted time of some steps as text."""
    return [
        bytes_text(sum(record.num_bytes for record in records)),
        seconds_text(sum(record.seconds for record in records)),
        seconds_text(sum(record.predicted_seconds for record in records)),
    ]


def _devices_text(devices: Sequence[int]) -> str:
    return (",".join(map(str, devices[:4])) + (",…" if len(devices) > 4 else "")) or "none"


def log_from_environment() -> None:
    """Write the log to standard error if ``SHARDSPEC_LOG`` names a level."""
    level = os.environ.get("SHARDSPEC_LOG", "").lower()
    if not level or LOGGER.handlers:
        return
    if level not in _LEVELS:
        raise ShardSpecError(f"SHARDSPEC_LOG={level}: use one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("shardspec %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(_LEVELS[level])
