"""A plan: the ordered steps from one layout to another, and what they cost."""

import json
from dataclasses import dataclass
from itertools import pairwise

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Step
from shardspec.layout.cross import common_model
from shardspec.layout.layout import Layout
from shardspec.layout.move_cost import live_bytes, step_bytes, step_seconds

__all__ = ["ConversionPlan"]


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The ordered steps from one layout to another. A plain value: it holds no group or tensor.

    Examples
    --------
    >>> from shardspec import DeviceMesh, LayoutConverter
    >>> source = Layout(DeviceMesh(range(8), (2, 4)), "[S0,R]", (4096, 4096), "bf16")
    >>> plan = LayoutConverter().plan(source, "[R,S0]")
    >>> plan.steps
    (AllToAll(src_dim=0, dst_dim=1, src_axes=(0,), dst_axes=(0,)),)
    >>> plan.bytes_received
    8388608
    """

    steps: tuple[Step, ...]
    """What to do, in order; empty where source and target are the same."""
    layouts: tuple[Layout, ...]
    """Source, then the layout after every step; the last one is the target."""
    model: CostModel
    """What the steps on the source's mesh are priced by."""
    target_model: CostModel | None = None
    """What the steps on the target's mesh are priced by, where that is another one."""

    @property
    def source(self) -> Layout:
        """The layout the plan starts from."""
        return self.layouts[0]

    @property
    def target(self) -> Layout:
        """The layout the plan arrives at."""
        return self.layouts[-1]

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Modelled seconds of every step."""
        moves = zip(self.steps, pairwise(self.layouts), strict=True)
        return tuple(
            step_seconds(step, *layouts, self.model_between(*layouts)) for step, layouts in moves
        )

    @property
    def step_bytes(self) -> tuple[int, ...]:
        """Bytes the busiest device receives in every step, by a bandwidth-optimal algorithm."""
        moves = zip(self.steps, pairwise(self.layouts), strict=True)
        return tuple(step_bytes(step, *layouts) for step, layouts in moves)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes the fullest device holds during every step: its shard before and after."""
        return tuple(live_bytes(before, after) for before, after in pairwise(self.layouts))

    @property
    def cost_seconds(self) -> float:
        """Modelled seconds of the whole plan."""
        return sum(self.step_seconds)

    @property
    def bytes_received(self) -> int:
        """Bytes the busiest device receives in all steps together."""
        return sum(self.step_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes a device holds at once."""
        return max(self.live_bytes, default=self.source.max_local_bytes)

    def model_between(self, before: Layout, after: Layout) -> CostModel:
        """Return what a step from one layout to the next is priced by."""
        if self.target_model is None or after.mesh == self.source.mesh:
            return self.model
        if before.mesh == after.mesh:
            return self.target_model
        return common_model(before.mesh, after.mesh, self.model, self.target_model)

    @property
    def known_error(self) -> str:
        """How far the modelled seconds are from measured ones, as far as that is known."""
        here = self.model.known_error
        there = here if self.target_model is None else self.target_model.known_error
        return here if here == there else f"{here}; then {there}"

    def as_dict(self) -> dict[str, object]:
        """Return the plan as plain lists, numbers and text, ready for JSON."""
        rows = zip(
            self.steps,
            self.layouts[1:],
            self.step_seconds,
            self.step_bytes,
            self.live_bytes,
            strict=True,
        )
        return {
            "source": str(self.source.spec),
            "target": str(self.target.spec),
            "mesh": list(self.source.mesh.shape),
            "target_mesh": list(self.target.mesh.shape),
            "shape": list(self.source.global_shape),
            "dtype": self.source.dtype,
            "link_model": self.model.link_model,
            "links": [
                {
                    "name": link.name,
                    "latency_s": link.latency_s,
                    "seconds_per_byte": link.seconds_per_byte,
                }
                for link in self.model.links
            ],
            "known_error": self.known_error,
            "steps": [
                {
                    "step": type(step).__name__,
                    **{name: _plain(getattr(step, name)) for name in step.__slots__},
                    "layout": str(after.spec),
                    "bytes_received": received,
                    "seconds": seconds,
                    "live_bytes": live,
                }
                for step, after, seconds, received, live in rows
            ],
            "cost_seconds": self.cost_seconds,
            "bytes_received": self.bytes_received,
            "peak_bytes": self.peak_bytes,
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.as_dict(), indent=indent)

    def __str__(self) -> str:
        from shardspec.layout.plan_text import plan_text

        return plan_text(self)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
