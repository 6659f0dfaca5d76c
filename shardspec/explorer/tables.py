"""Every conversion on one mesh as plain lists: what the page of `shardspec explore` shows.

The page computes no plan and no price. It gets the boxes of every layout, every move that some
plan takes, with its bytes, seconds and senders, and for each pair of layouts the plans as lists of
moves. What a device gets from a sender is what the sender's box before shares with its own box
after, so the senders are enough to draw a move.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Final, TypeAlias

from shardspec.boxes import box_size
from shardspec.comm.cost import CostModel
from shardspec.comm.routes import Transfers
from shardspec.comm.steps import Step
from shardspec.errors import DTypeError, LayoutError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.drawing import kind_of
from shardspec.layout.graph import count_states, space_of, spec_of
from shardspec.layout.layout import Layout
from shardspec.layout.plan import ConversionPlan, naive_plan, step_text
from shardspec.mesh import DeviceMesh

__all__ = ["MAX_DIMS", "PLANS", "count_conversions", "layouts_of", "mesh_tables", "models_of"]

PLANS: Final = 4
"""Plans of each conversion, the cheapest first; the naive one comes beside them."""

MAX_DIMS: Final = 3
"""Tensors of more dims are not drawn."""

_Move: TypeAlias = tuple[Step, Layout, Layout]


def count_conversions(num_axes: int, dims: int) -> int:
    """Return how many pairs of layouts a tensor has, sums pending at the source or both included.

    A target has no more pending than its source.

    Examples
    --------
    >>> count_conversions(1, 2), count_conversions(2, 2), count_conversions(3, 2)
    (13, 223, 5139)
    """
    free = [count_states(axes, dims, 0) for axes in range(num_axes + 1)]
    return sum(
        comb(num_axes, pending)
        * free[num_axes - pending]
        * sum(comb(pending, left) * free[num_axes - left] for left in range(pending + 1))
        for pending in range(num_axes + 1)
    )


def layouts_of(mesh: DeviceMesh, shape: tuple[int, ...], dtype: str) -> list[Layout]:
    """Return every layout of a tensor: first those with nothing pending, then those with sums.

    Examples
    --------
    >>> layouts = layouts_of(DeviceMesh(range(2), (2,)), (4, 4), "f32")
    >>> [str(layout.spec) for layout in layouts]
    ['[R,R]', '[R,S0]', '[S0,R]', '[R,R|P0]']
    """
    whole = Layout(mesh, ",".join("R" * len(shape)), shape, dtype)
    try:
        whole.with_spec(f"{','.join('R' * len(shape))}|P0")
        pending = mesh.ndim
    except DTypeError:
        pending = 0
    space = space_of(mesh.ndim, len(shape), tuple((axis, "sum") for axis in range(pending)))
    return [whole.with_spec(spec_of(state)) for state in space.states]


def models_of(mesh: DeviceMesh, links: Sequence[tuple[str, ...]]) -> dict[str, CostModel]:
    """Return a cost model for each choice of presets, one per axis or one for all, that fits.

    Raises
    ------
    LayoutError
        If none fits.

    Examples
    --------
    >>> choices = [("h100-nvswitch",), ("ib-ndr-per-gpu", "h100-nvswitch")]
    >>> list(models_of(DeviceMesh(range(4), (4,)), choices))
    ['h100-nvswitch']
    """
    models = {}
    for names in links:
        if len(names) in (1, mesh.ndim):
            models[",".join(names)] = CostModel.from_presets(mesh, names)
    if not models:
        raise LayoutError(
            f"no links fit mesh {mesh}: give one preset for all axes, or {mesh.ndim} of them"
        )
    return models


def mesh_tables(
    mesh: DeviceMesh,
    shapes: Sequence[tuple[int, ...]],
    models: Mapping[str, CostModel],
    dtype: str,
) -> dict[str, object]:
    """Return everything there is to see on one mesh, ready for JSON.

    Parameters
    ----------
    mesh
        Its ids count up from 0.
    shapes, dtype
        The tensors.
    models
        Prices by what to call them; every tensor's plans are made for each of them.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> tables = mesh_tables(mesh, [(4,)], models_of(mesh, [("unit",)]), "int8")
    >>> tables["tensors"][0]["boxes"]
    [[[0, 4], [0, 4]], [[0, 2], [2, 4]], [[0, 4], [0, 4]]]
    """
    return {
        "name": str(mesh),
        "shape": list(mesh.shape),
        "axes": [mesh.axis_label(axis) for axis in range(mesh.ndim)],
        "links": [
            {
                "name": name,
                "text": model.links_text([mesh.axis_label(axis) for axis in range(mesh.ndim)]),
                "error": model.known_error,
            }
            for name, model in models.items()
        ],
        "tensors": [_Tensor(mesh, shape, dtype).as_dict(list(models.values())) for shape in shapes],
    }


@dataclass(frozen=True, slots=True)
class _Tensor:
    mesh: DeviceMesh
    shape: tuple[int, ...]
    dtype: str

    def as_dict(self, models: Sequence[CostModel]) -> dict[str, object]:
        layouts = layouts_of(self.mesh, self.shape, self.dtype)
        moves: dict[_Move, int] = {}
        plans = [_plans(layouts, model, moves) for model in models]
        index = {layout: number for number, layout in enumerate(layouts)}
        return {
            "shape": list(self.shape),
            "bytes": layouts[0].global_bytes,
            "specs": [str(layout.labelled_spec) for layout in layouts],
            "pending": [[int(p.axis) for p in layout.spec.partials] for layout in layouts],
            "local": [layout.max_local_bytes for layout in layouts],
            "boxes": [
                [[end for side in layout.box(device) for end in side] for device in self.mesh.ids]
                for layout in layouts
            ],
            "moves": [
                [index[before], index[after], *_facts(step, before, after)]
                for step, before, after in moves
            ],
            "seconds": [[_alone(move, model).cost_seconds for move in moves] for model in models],
            "plans": plans,
        }


def _alone(move: _Move, model: CostModel) -> ConversionPlan:
    step, *ends = move
    return ConversionPlan((step,), tuple(ends), model)


def _facts(step: Step, before: Layout, after: Layout) -> Iterator[object]:
    """Yield kind, text, bytes received, bytes live, and per device a bit for each sender."""
    mesh = before.mesh
    plan = _alone((step, before, after), CostModel.of_mesh(mesh))
    axes = ",".join(mesh.axis_label(axis) for axis in step.axes)
    yield kind_of(step)
    yield f"{step_text(step)} over {axes}"
    yield plan.bytes_received
    yield plan.peak_bytes
    transfers = Transfers(step, mesh, before.box, after.box)
    yield [
        sum(
            {1 << mesh.ids.index(peer) for peer, box in transfers.incoming(device) if box_size(box)}
        )
        for device in mesh.ids
    ]


def _plans(
    layouts: Sequence[Layout], model: CostModel, moves: dict[_Move, int]
) -> list[list[list[object] | None]]:
    """Return per source and target its plans as numbers of moves, after the place of the naive one.

    Moves that are new are added to `moves`.
    """
    converter = LayoutConverter(model)
    table: list[list[list[object] | None]] = []
    for source in layouts:
        row: list[list[object] | None] = []
        for target in layouts:
            if not set(target.spec.partials) <= set(source.spec.partials):
                row.append(None)
                continue
            plans = list(converter.alternatives(source, target, PLANS))
            naive = naive_plan(source, target, model)
            kept = [plan.communicating for plan in plans]
            if naive.communicating not in kept:
                plans.append(naive)
                kept.append(naive.communicating)
            numbers = [
                [moves.setdefault(move, len(moves)) for move in plan.moves] for plan in plans
            ]
            row.append([kept.index(naive.communicating), *numbers])
        table.append(row)
    return table
