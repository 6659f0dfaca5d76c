"""Makes an HTML page on which one chooses two layouts and sees the conversion step by step."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from math import comb
from typing import Final, TypeAlias

from shardspec.comm.cost import CostModel
from shardspec.comm.steps import Step
from shardspec.dtypes import dtype_name
from shardspec.errors import DTypeError, LayoutError
from shardspec.layout.converter import LayoutConverter
from shardspec.layout.graph import count_states, space_of, spec_of
from shardspec.layout.layout import Layout
from shardspec.layout.moving import transfers_of
from shardspec.layout.plan import (
    STEP_COLORS,
    ConversionPlan,
    communicating_moves,
    step_kind,
    step_text,
)
from shardspec.layout.search import naive_plan
from shardspec.mesh.device_mesh import DeviceMesh

MAX_PAGE_DEVICES: Final = 32
"""Maximum devices of a mesh; more boxes cannot be distinguished in a drawing."""
MAX_PAGE_DIMS: Final = 3
"""Maximum dims of a tensor in a drawing."""
MAX_CONVERSIONS: Final = 50_000
"""Maximum conversions of a page; planning them takes about a minute."""
MAX_PAGE_BYTES: Final = 16 * 2**20
"""Maximum bytes of a page; browsers open it at once."""
_PLANS: Final = 4
"""Number of plans per conversion, cheapest first, besides the naive plan."""

_Move: TypeAlias = tuple[Step, Layout, Layout]
_Links: TypeAlias = Sequence[tuple[str, ...]]
"""Choices of links, each with the name of one preset for all axes, or one name per axis."""


def explorer_page(
    meshes: Sequence[DeviceMesh], shapes: Sequence[tuple[int, ...]], links: _Links, dtype: object
) -> str:
    """Return an HTML page that shows the plans of a chosen conversion step by step.

    Meshes must have the ids 0, 1, 2, … Raises `LayoutError` if a mesh, a tensor or the page is too
    large, or links fit no mesh, and `MeshError` for an unknown preset.
    """
    name = dtype_name(dtype)
    _check(meshes, shapes, links)
    data = {
        "dtype": name,
        "colors": dict(STEP_COLORS),
        "meshes": [_mesh_tables(mesh, shapes, models_of(mesh, links), name) for mesh in meshes],
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    parts = {
        "TITLE": escape(f"shardspec: conversions on {', '.join(map(str, meshes))}"),
        "STYLE": _asset("page.css"),
        "SCRIPT": _asset("picture.js") + _asset("page.js"),
        # The tables must not contain the closing tag of their element.
        "DATA": text.replace("<", "\\u003c"),
    }
    page = _asset("page.html")
    for mark, part in parts.items():
        page = page.replace(f"%{mark}%", part)
    size = len(page.encode())
    text = f"the page would have {size:,} bytes, the limit is {MAX_PAGE_BYTES:,}; give fewer"
    _refuse_if(size > MAX_PAGE_BYTES, f"{text} meshes, shapes or links")
    return page


def _asset(name: str) -> str:
    return files("shardspec.explorer").joinpath(name).read_text("utf-8")


def _check(meshes: Sequence[DeviceMesh], shapes: Sequence[tuple[int, ...]], links: _Links) -> None:
    for mesh in meshes:
        text = f"mesh {mesh} of {mesh.size()} devices is too large to draw; the limit is"
        _refuse_if(mesh.size() > MAX_PAGE_DEVICES, f"{text} {MAX_PAGE_DEVICES} devices")
    for shape in shapes:
        text = (
            f"a tensor of shape {shape} cannot be drawn; give one of 1 to {MAX_PAGE_DIMS} dims that"
        )
        wrong = not 1 <= len(shape) <= MAX_PAGE_DIMS or 0 in shape
        _refuse_if(wrong, f"{text} has elements")
    for names in links:
        text = f"links {','.join(names)} fit no mesh: give one preset for all axes, or one per axis"
        _refuse_if(all(len(names) not in (1, mesh.ndim) for mesh in meshes), text)
    count = sum(
        len(models_of(mesh, links)) * sum(count_conversions(mesh.ndim, len(s)) for s in shapes)
        for mesh in meshes
    )
    _refuse_if(
        count > MAX_CONVERSIONS,
        f"the page would hold {count:,} conversions, the limit is {MAX_CONVERSIONS:,}; give "
        "meshes of fewer axes, or fewer meshes, shapes or links",
    )


def _refuse_if(wrong: bool, text: str) -> None:
    if wrong:
        raise LayoutError(text)


def count_conversions(num_axes: int, dims: int) -> int:
    """Return the number of conversions of a tensor, including those with pending sums.

    The pending sums of a target are a subset of those of its source.

    >>> count_conversions(1, 1)
    7
    """
    free = [count_states(axes, dims, 0) for axes in range(num_axes + 1)]
    return sum(
        comb(num_axes, pending)
        * free[num_axes - pending]
        * sum(comb(pending, n) * free[num_axes - n] for n in range(pending + 1))
        for pending in range(num_axes + 1)
    )


def all_layouts(mesh: DeviceMesh, shape: tuple[int, ...], dtype: str) -> list[Layout]:
    """Return every layout of a tensor; layouts with pending sums are last.

    >>> [str(layout.spec) for layout in all_layouts(DeviceMesh(range(2)), (4,), "float32")]
    ['[R]', '[S0]', '[R|P0]']
    """
    replicated = ",".join("R" * len(shape))
    replica = Layout(mesh, replicated, shape, dtype)
    try:
        replica.with_spec(f"{replicated}|P0")
        pending = mesh.ndim
    except DTypeError:
        pending = 0
    space = space_of(mesh.ndim, len(shape), tuple((axis, "sum") for axis in range(pending)))
    return [replica.with_spec(spec_of(state)) for state in space.states]


def models_of(mesh: DeviceMesh, links: _Links) -> dict[str, CostModel]:
    """Return a cost model for each entry of `links` that fits the number of axes."""
    models = {
        ",".join(names): CostModel.from_presets(mesh, names)
        for names in links
        if len(names) in (1, mesh.ndim)
    }
    text = f"no links fit mesh {mesh}: give one preset for all axes, or {mesh.ndim} of them"
    _refuse_if(not models, text)
    return models


def _mesh_tables(
    mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]], models: Mapping[str, CostModel], dtype: str
) -> dict[str, object]:
    """Return the tables of one mesh, ready for JSON, with plans for each of `models`."""
    labels = mesh.axis_labels()
    return {
        "name": str(mesh),
        "shape": list(mesh.shape),
        "axes": labels,
        "links": [
            {"name": name, "text": model.links_text(labels), "error": model.known_error}
            for name, model in models.items()
        ],
        "tensors": [
            _tensor_tables(all_layouts(mesh, shape, dtype), list(models.values()))
            for shape in shapes
        ],
    }


def _tensor_tables(layouts: Sequence[Layout], models: Sequence[CostModel]) -> dict[str, object]:
    moves: dict[_Move, int] = {}
    plans = [
        [[_plans(a, b, model, converter, moves) for b in layouts] for a in layouts]
        for model, converter in zip(models, map(LayoutConverter, models), strict=True)
    ]
    index = {layout: number for number, layout in enumerate(layouts)}
    return {
        "shape": list(layouts[0].global_shape),
        "bytes": layouts[0].global_bytes,
        "specs": [str(layout.labelled_spec) for layout in layouts],
        "pending": [[int(p.axis) for p in layout.spec.partials] for layout in layouts],
        "local": [layout.max_local_bytes for layout in layouts],
        "boxes": [
            [[end for side in layout.box(device) for end in side] for device in layout.mesh.ids]
            for layout in layouts
        ],
        "moves": [[index[move[1]], index[move[2]], *_facts(*move)] for move in moves],
        "seconds": [
            [ConversionPlan((step,), (a, b), model).cost_seconds for step, a, b in moves]
            for model in models
        ],
        "plans": plans,
    }


def _facts(step: Step, before: Layout, after: Layout) -> tuple[object, ...]:
    """Return (kind, text, received bytes, peak bytes, senders of each device as bits) of a step."""
    mesh = before.mesh
    plan = ConversionPlan((step,), (before, after), CostModel.of_mesh(mesh))
    transfers = transfers_of(step, before, after)
    bits = [
        sum({1 << mesh.ids.index(c.sender) for c in transfers.of(device).incoming if c.num_bytes})
        for device in mesh.ids
    ]
    text = f"{step_text(step)} over {','.join(mesh.axis_labels(step.axes))}"
    return step_kind(step), text, plan.bytes_received, plan.peak_bytes, bits


def _plans(
    source: Layout,
    target: Layout,
    model: CostModel,
    converter: LayoutConverter,
    moves: dict[_Move, int],
) -> list[object] | None:
    """Return the index of the naive plan, then each plan as a list of move numbers.

    New moves get a number in `moves`. None if the target adds a pending reduction.
    """
    if not set(target.spec.partials) <= set(source.spec.partials):
        return None
    plans = list(converter.alternatives(source, target, _PLANS))
    naive = naive_plan(source, target, model)
    if all(communicating_moves(plan) != communicating_moves(naive) for plan in plans):
        plans.append(naive)
    place = [communicating_moves(plan) for plan in plans].index(communicating_moves(naive))
    return [place, *([moves.setdefault(m, len(moves)) for m in plan.moves] for plan in plans)]
