"""Records the steps of conversions, in a `trace` and as log lines.

``SHARDSPEC_LOG=debug`` in the environment, or a handler on the logger "shardspec", writes a line
per step. Steps also appear as ranges in `torch.profiler`.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Step
from shardspec.errors import ShardSpecError
from shardspec.layout.layout import Layout
from shardspec.layout.plan import step_bytes, step_seconds, step_text
from shardspec.text import bytes_text, seconds_text

LOGGER: Final = logging.getLogger("shardspec")
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that this process executed."""

    step: Step
    before: Layout
    after: Layout
    devices: tuple[int, ...]
    """Physical ids of the shards in this process."""
    seconds: float
    """Measured time in this process, including the wait for others."""
    model: CostModel
    """The cost model of the step."""
    backward: bool
    """True if the step was part of a backward pass."""

    @property
    def predicted_seconds(self) -> float:
        """Seconds predicted by the cost model."""
        return step_seconds(self.step, self.before, self._priced_after, self.model)

    @property
    def num_bytes(self) -> int:
        """Bytes that the busiest device receives."""
        return step_bytes(self.step, self.before, self._priced_after)

    @property
    def _priced_after(self) -> Layout:
        # The gradient of a pending value is not pending.
        spec = self.after.spec
        return self.after.with_spec(spec.without_partial()) if self.backward else self.after

    def __str__(self) -> str:
        prefix = "gradient: " if self.backward else ""
        return (
            f"{prefix}{step_text(self.step)}, {self.before.labelled_spec} → "
            f"{self.after.labelled_spec} of {list(self.before.global_shape)} {self.before.dtype}, "
            f"{bytes_text(self.num_bytes)} in {seconds_text(self.seconds)} "
            f"(predicted: {seconds_text(self.predicted_seconds)})"
        )


@dataclass(slots=True)
class Trace:
    """The steps executed while the trace was open; see `trace`."""

    records: list[StepRecord] = field(default_factory=list)
    """Steps in the order of their completion."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.records)) or "no step was executed"


_OPEN: Final[ContextVar[tuple[Trace, ...]]] = ContextVar("shardspec traces", default=())


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every step that this process executes inside the block.

    Examples
    --------
    >>> import torch
    >>> from shardspec import DeviceMesh, DTensor
    >>> tensor = DTensor(torch.ones(2048, 2048), DeviceMesh(range(4), (2, 2)), "[S0,R]")
    >>> with trace() as steps:
    ...     _ = tensor.redistribute("[R,S0]")
    >>> [(str(record.step), record.num_bytes) for record in steps.records]
    [('AllToAll(src_dim=0, dst_dim=1, src_axes=(0,), dst_axes=(0,))', 4194304)]
    """
    opened = Trace()
    token = _OPEN.set((*_OPEN.get(), opened))
    try:
        yield opened
    finally:
        _OPEN.reset(token)


def is_recording() -> bool:
    """Return True if a trace is open or steps are logged."""
    return bool(_OPEN.get()) or LOGGER.isEnabledFor(logging.DEBUG)


def record_step(record: StepRecord) -> None:
    """Add the record of a step to the open traces and to the log."""
    for opened in _OPEN.get():
        opened.records.append(record)
    devices = ",".join(map(str, record.devices[:4])) + (",…" if len(record.devices) > 4 else "")
    LOGGER.debug("rank %s: %s", devices or "none", record)


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
