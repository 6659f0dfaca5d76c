"""Who sends what in an exchange and a permute: complete, from the nearest, shared fairly."""

from collections import Counter, defaultdict
from itertools import islice, permutations, product

import pytest
import torch

from shardspec import CostModel, DeviceMesh, Layout
from shardspec.boxes import box_size, contains
from shardspec.comm.curves import Link
from shardspec.comm.steps import AllGather, AllReduce, Exchange, Permute, Slice
from shardspec.comm.transfers import distance_on, exchange_routes, permute_routes
from shardspec.layout.moving import transfers_of
from tests.conversions import plain_specs
from tests.layout import formulas

SHUFFLED = DeviceMesh([6, 1, 7, 0, 3, 2], (2, 3))
CUBE = DeviceMesh([6, 1, 7, 0, 3, 2, 5, 4], (2, 2, 2))


def routes(plan, before, after):
    def distance(a, b):
        return distance_on(before.mesh)(a, b)

    return plan(before.boxes(), after.boxes(), distance)


def pairs(mesh, shape):
    layouts = [Layout(mesh, spec, shape, "int32") for spec in plain_specs(len(shape), mesh.ndim)]
    return product(layouts, repeat=2)


@pytest.mark.parametrize(
    ("mesh", "shape", "every"),
    [
        (SHUFFLED, (6, 12), 1),
        (SHUFFLED, (7, 5), 1),
        (CUBE, (9, 3), 29),
        pytest.param(CUBE, (9, 3), 1, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_an_exchange_sends_every_box_once_from_the_nearest_holder(mesh, shape, every):
    for before, after in islice(pairs(mesh, shape), 0, None, every):
        wanted: dict[int, torch.Tensor] = {d: torch.zeros(shape, dtype=torch.int) for d in mesh.ids}
        for move in routes(exchange_routes, before, after):
            assert contains(before.box(move.sender), move.box)
            assert box_size(move.box) > 0
            wanted[move.receiver][tuple(slice(lo, hi) for lo, hi in move.box)] += 1
            holders = [d for d in mesh.ids if contains(before.box(d), move.box)]
            nearest = min(distance_on(mesh)(d, move.receiver) for d in holders)
            assert distance_on(mesh)(move.sender, move.receiver) == nearest
        for device, times in wanted.items():
            box = tuple(slice(lo, hi) for lo, hi in after.box(device))
            assert (times[box] == 1).all()
            assert times.sum() == box_size(after.box(device))


def test_replicas_share_the_work():
    """Between meshes all holders are as near; whoever has sent least sends."""
    whole = dict.fromkeys([0, 1, 2], ((0, 6), (0, 4)))
    wanted = {10 + i: ((i, i + 1), (0, 4)) for i in range(6)}
    moves = exchange_routes(whole, wanted, lambda a, b: int(a != b))
    assert Counter(move.sender for move in moves) == {0: 2, 1: 2, 2: 2}
    assert [move.receiver for move in moves] == list(wanted)
    assert [move.box for move in moves] == list(wanted.values())


def test_an_exchange_with_another_mesh_sends_what_is_lacking():
    before = Layout(DeviceMesh([0, 1, 2], (3,)), "[S0]", (7,), "int8")
    after = Layout(DeviceMesh([2, 3, 4, 5], (2, 2)), "[S01]", (7,), "int8")
    moves = exchange_routes(before.boxes(), after.boxes(), lambda a, b: int(a != b))
    assert [(m.sender, m.receiver, m.box) for m in moves] == [
        (0, 2, ((0, 2),)),
        (0, 3, ((2, 3),)),
        (1, 3, ((3, 4),)),
        (1, 4, ((4, 6),)),
        (2, 5, ((6, 7),)),
    ]


def test_nothing_to_send():
    empty = {0: ((0, 0),), 1: ((0, 0),)}
    assert exchange_routes(empty, empty, lambda a, b: int(a != b)) == []
    assert permute_routes(empty, empty, lambda a, b: int(a != b)) == []


@pytest.mark.parametrize(
    ("mesh", "shape", "count", "every"),
    [
        (SHUFFLED, (6, 12), 4, 1),
        (SHUFFLED, (1, 2), 4, 1),
        (CUBE, (8, 16), 222, 10),
        (CUBE, (11, 5), 222, 10),
        pytest.param(CUBE, (8, 16), 222, 1, marks=pytest.mark.exhaustive),
        pytest.param(CUBE, (11, 5), 222, 1, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_permute_sends_whole_shards_by_the_shortest_longest_way(mesh, shape, count, every):
    """Each device sends one whole shard at most, and no assignment has a shorter longest way."""
    orders = permutations([Link(10.0**place, 0.0) for place in range(mesh.ndim)])
    models = [CostModel(mesh.shape, links) for links in orders]
    layouts = [Layout(mesh, spec, shape, "int32") for spec in plain_specs(len(shape), mesh.ndim)]
    boxes = {layout: Counter(layout.boxes().values()) for layout in layouts}
    alike = [(a, b) for a, b in permutations(layouts, 2) if boxes[a] == boxes[b]]
    assert len(alike) == count
    for before, after in alike[::every]:
        moves = routes(permute_routes, before, after)
        receivers = [move.receiver for move in moves]
        assert len(set(receivers)) == len(receivers)
        assert len({move.sender for move in moves}) == len(moves)
        assert set(receivers) == {d for d in mesh.ids if box_size(after.box(d))}
        for move in moves:
            assert move.box == before.box(move.sender) == after.box(move.receiver)
            assert (before.box(move.receiver) == move.box) == (move.sender == move.receiver)
        for model in models:
            best = formulas.permuted(before, after, model)
            assert best is not None
            ends = [(move.sender, move.receiver) for move in moves]
            used = [formulas.link(mesh, model, a, b) for a, b in ends if a != b]
            assert max(used, default=(0.0, 0.0)) <= max(best)


@pytest.mark.parametrize("kind", [Exchange, Permute])
def test_both_ends_agree(kind):
    before = Layout(CUBE, "[S012,R]", (8, 3), "int8")
    after = before.with_spec("[S201,R]")
    step = kind((0, 1, 2))
    schedules = {id_: transfers_of(step, before, after).of(id_) for id_ in CUBE.ids}
    sent: dict[int, list[object]] = defaultdict(list)
    for schedule in schedules.values():
        for copy in schedule.outgoing:
            sent[copy.receiver].append(copy)
    for device, schedule in schedules.items():
        assert len(schedule.incoming) == 1
        coming = [copy for copy in schedule.incoming if copy.sender != device]
        assert sorted(coming, key=str) == sorted(sent[device], key=str)


def test_groups_send_in_the_order_of_the_mesh():
    before = Layout(SHUFFLED, "[R,S10]", (4, 12), "int8")
    after = before.with_spec("[R,R]")
    gather = transfers_of(AllGather(1, (1, 0)), before, after).of(3)
    assert [copy.sender for copy in gather.incoming] == [6, 1, 7, 0, 3, 2]
    assert sum(copy.num_bytes for copy in gather.incoming) == 48
    assert [(c.receiver, c.box) for c in gather.outgoing] == [
        (peer, before.box(3)) for peer in (6, 1, 7, 0, 2)
    ]
    alone = transfers_of(Slice(0, (1,)), after, after.with_spec("[S1,R]")).of(3)
    assert [copy.sender for copy in alone.incoming] == [3]
    reduced = transfers_of(AllReduce((0,), "sum"), after, after).of(3)
    assert [(c.sender, c.box) for c in reduced.incoming] == [
        (1, ((0, 4), (0, 12))),
        (3, ((0, 4), (0, 12))),
    ]
