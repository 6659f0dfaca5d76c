"""An exchange is the best there is: against linear programs that may send any part from anyone."""

from collections import defaultdict
from functools import cache
from itertools import product
from math import prod
from random import Random

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.sparse import lil_array

from shardspec import CostModel, DeviceMesh, Layout, trace
from shardspec.boxes import Box, box_size, intersect
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.comm.curves import Link
from shardspec.comm.steps import Exchange
from shardspec.layout.cross import common_mesh, exchange_seconds
from shardspec.layout.graph import state_of
from shardspec.layout.moving import transfers_of
from shardspec.layout.plan import ConversionPlan, step_seconds
from shardspec.layout.pricing import exchange_between
from shardspec.tensor.run import run_conversion
from tests.conversions import plain_specs
from tests.layout import formulas

UNIFORM = Link(5e-6, 1 / 100e9)
TIERS = (Link(2e-5, 1 / 25e9), Link(5e-6, 1 / 100e9), Link(3e-6, 1 / 300e9))
SMALL = [(2, 3), (2, 4), (1, 2), (2, 1, 3)]


def layouts(mesh, shape, dtype="int8"):
    device_mesh = DeviceMesh(range(prod(mesh)), mesh)
    return [Layout(device_mesh, spec, shape, dtype) for spec in plain_specs(len(shape), len(mesh))]


def exchange(before, after, model):
    return exchange_between(state_of(before.spec)[0], state_of(after.spec)[0], model)


@cache
def least_seconds(held: tuple[Box, ...], wanted: tuple[Box, ...], link: Link) -> float:
    """Seconds of the busiest device at least, whoever sends what: the optimum of a linear program.

    A message may be divided at will, and so may its latency; no links are worse than others.
    """
    holders = defaultdict(list)
    for device, box in enumerate(held):
        if box_size(box):
            holders[box].append(device)
    ways, costs, pieces = [], [], 0
    for (receiver, target), (box, devices) in product(enumerate(wanted), holders.items()):
        piece = intersect(box, target)
        if piece is None or receiver in devices:
            continue
        cost = link.latency_s + box_size(piece) * link.seconds_per_byte
        ways += [(pieces, sender, receiver) for sender in devices]
        costs += [cost] * len(devices)
        pieces += 1
    if not pieces:
        return 0.0
    unit = max(costs)
    busy = lil_array((2 * len(held), len(ways) + 1))
    whole = lil_array((pieces, len(ways) + 1))
    for number, ((place, sender, receiver), cost) in enumerate(zip(ways, costs, strict=True)):
        busy[sender, number] = busy[len(held) + receiver, number] = cost / unit
        whole[place, number] = 1.0
    busy[:, len(ways)] = -1.0
    found = linprog(
        np.eye(1, len(ways) + 1, len(ways)).ravel(),
        A_ub=busy.tocsr(),
        b_ub=np.zeros(2 * len(held)),
        A_eq=whole.tocsr(),
        b_eq=np.ones(pieces),
    )
    assert found.status == 0
    return float(found.fun) * unit


def least(before, after, link=UNIFORM):
    devices = sorted({*before.mesh.ids, *after.mesh.ids})
    nothing = ((0, 0),) * len(before.global_shape)
    ends = [[layout.boxes().get(d, nothing) for d in devices] for layout in (before, after)]
    return least_seconds(tuple(ends[0]), tuple(ends[1]), link)


def routed(before, after, model):
    """Seconds of the busiest device, from what the step has each one send to whom."""
    mesh = before.mesh
    step = exchange(before, after, model)
    busy: dict[tuple[str, int], float] = defaultdict(float)
    for sender in mesh.ids:
        for copy in transfers_of(step, before, after).of(sender).outgoing:
            alpha, beta = formulas.link(mesh, model, sender, copy.receiver)
            busy["sends", sender] += alpha + box_size(copy.box) * beta
            busy["receives", copy.receiver] += alpha + box_size(copy.box) * beta
    return max(busy.values(), default=0.0)


def priced(before, after, model):
    return step_seconds(exchange(before, after, model), before, after, model)


SAMPLED = pytest.mark.parametrize(
    "sampled", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["sampled", "all"]
)


def some_pairs(mesh, shape, sampled):
    """Return pairs of layouts, all on two devices and few on three axes."""
    pairs = list(product(layouts(mesh, shape), repeat=2))
    return pairs[:: {(1, 2): 1, (2, 1, 3): 37}.get(mesh, 4) if sampled else 1]


@SAMPLED
@pytest.mark.parametrize("shape", [(24, 48), (1536, 3072), (12288, 6144)], ids=str)
@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_no_choice_of_senders_is_better(mesh, shape, sampled):
    model = CostModel(mesh, (UNIFORM,) * len(mesh))
    pairs = [(*pair, bound) for pair in some_pairs(mesh, shape, sampled) if (bound := least(*pair))]
    for before, after, bound in pairs:
        assert priced(before, after, model) == pytest.approx(bound, rel=1e-9)
        assert routed(before, after, model) == pytest.approx(bound, rel=1e-9)
    moving = {(2, 3): 92, (2, 4): 92, (1, 2): 56, (2, 1, 3): 1880}[mesh]
    assert len(pairs) > 10 if sampled else len(pairs) == moving


def test_the_busiest_device_of_uneven_replicas():
    """Thirds to halves: the replicas of each third send as much as each other."""
    ends = {str(layout.spec): layout for layout in layouts((2, 3), (6, 1 << 18))}
    model = CostModel((2, 3), (UNIFORM,) * 2)
    for before, after in [("[S1,R]", "[S0,R]"), ("[R,S1]", "[R,S0]")]:
        seconds = priced(ends[before], ends[after], model)
        assert seconds == pytest.approx(2 * 5e-6 + 3 * 2**18 / 100e9, rel=1e-4)


@pytest.mark.parametrize("links", [(UNIFORM,) * 3, TIERS], ids=["uniform", "tiers"])
@pytest.mark.parametrize("shape", [(96, 192), (7, 5), (12288, 6144)], ids=str)
@pytest.mark.parametrize("mesh", SMALL, ids=str)
@SAMPLED
def test_what_is_priced_is_what_travels(mesh, shape, links, sampled):
    model = CostModel(mesh, links[: len(mesh)])
    for before, after in some_pairs(mesh, shape, sampled):
        seconds = routed(before, after, model)
        if seconds:
            # Where cuts are uneven, replicas send as much as each other up to an element or so.
            close = 1e-9 if shape != (7, 5) else 1e-5
            assert priced(before, after, model) == pytest.approx(seconds, rel=close)


@pytest.mark.parametrize(
    "mesh",
    [
        (4, 6),
        (2, 3, 2),
        pytest.param((8, 8), marks=pytest.mark.exhaustive),
        pytest.param((4, 16), marks=pytest.mark.exhaustive),
        pytest.param((4, 4, 4), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_large_meshes_are_within_two_percent(mesh):
    """Where replicas cannot share whole pieces evenly, these are divided, of large tensors."""
    model = CostModel(mesh, (UNIFORM,) * len(mesh))
    ends = layouts(mesh, (49152, 49152))
    pairs = list(product(ends, repeat=2))
    Random(0).shuffle(pairs)
    few = [pair for pair in pairs if something_moves(*pair)][:8]
    for before, after in few:
        bound = least(before, after)
        assert bound <= priced(before, after, model) * (1 + 1e-9) <= bound * 1.02
        assert bound <= routed(before, after, model) * (1 + 1e-9) <= bound * 1.02


@pytest.mark.parametrize(
    ("ids", "shapes"),
    [((4, 4, 10), ((2, 2), (3, 2))), ((6, 0, 6), ((2, 3), (3, 2))), ((8, 4, 16), ((2, 4), (3, 4)))],
)
def test_between_meshes_too(ids, shapes):
    """Disjoint, the same and overlapping devices; pieces for three receivers from two replicas."""
    here = DeviceMesh(range(ids[0]), shapes[0])
    there = DeviceMesh(range(ids[1], ids[2]), shapes[1])
    both = common_mesh(here, there)
    model = CostModel(both.shape, (UNIFORM,) * both.ndim)
    for spec, then in list(product(plain_specs(2, 2), repeat=2))[::10]:
        before = Layout(here, spec, (49152, 49152), "int8")
        after = Layout(there, then, (49152, 49152), "int8")
        bound = least(before, after)
        seconds = exchange_seconds(before, after, model) if bound else 0.0
        assert bound <= seconds * (1 + 1e-9) <= bound * 1.02


def something_moves(before, after):
    return any(
        intersect(before.box(device), box) != box and box_size(box)
        for device, box in after.boxes().items()
    )


@pytest.mark.parametrize(
    ("links", "apart", "most"), [(TIERS[::2], (0,), 24), (TIERS[1:2] * 2, (), 12)]
)
def test_replicas_along_slow_links_do_not_share(links, apart, most):
    """What a node has comes from inside it, though the other node has it too."""
    mesh, model = DeviceMesh(range(6), (2, 3)), CostModel((2, 3), links)
    before, after = (Layout(mesh, spec, (6, 6), "int8") for spec in ("[S1,R]", "[S0,R]"))
    step = exchange(before, after, model)
    assert step.apart == apart
    schedules = {id_: transfers_of(step, before, after).of(id_) for id_ in mesh.ids}
    sent = [sum(copy.num_bytes for copy in schedules[id_].outgoing) for id_ in mesh.ids]
    assert max(sent) == most
    if apart:
        for device in mesh.ids:
            senders = {copy.sender // 3 for copy in schedules[device].incoming}
            assert senders == {device // 3}


def test_the_way_back_has_slow_axes_of_its_own():
    """Halves to thirds crosses the slow axis anyway; thirds to halves need not."""
    mesh, model = DeviceMesh(range(6), (2, 3)), CostModel((2, 3), TIERS[::2])
    halves, thirds = (Layout(mesh, spec, (6, 6), "float32") for spec in ("[S0,R]", "[S1,R]"))
    plan = ConversionPlan((exchange(halves, thirds, model),), (halves, thirds), model)
    whole = torch.arange(36.0).view(6, 6)
    grads = {d: whole[slice(*thirds.box(d)[0])].clone() for d in mesh.ids}
    with trace() as steps:
        back = run_conversion(plan, SimulatedCommunicator(mesh), grads, back=True)
    assert plan.steps == (Exchange((0, 1)),)
    assert [record.step for record in steps.records] == [exchange(thirds, halves, model)]
    assert exchange(thirds, halves, model).apart == (0,)
    for device, grad in back.items():
        assert torch.equal(grad, whole[slice(*halves.box(device)[0])])
