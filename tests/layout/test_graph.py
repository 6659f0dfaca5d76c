from collections import Counter
from itertools import permutations
from math import comb, factorial, perm

import networkx as nx
import pytest

from shardspec import ShardingSpec
from shardspec.comm.steps import AllGather, AllReduce, AllToAll, ReduceScatter, Slice
from shardspec.errors import LayoutError
from shardspec.layout.graph import (
    MAX_REORDERED,
    count_states,
    explore,
    space_of,
    spec_of,
    state_of,
    successors,
)
from tests.conversions import partial_specs, plain_specs


def explored(num_axes, start):
    return explore(num_axes, ShardingSpec.parse(start))


def nodes_by_hand(num_axes, dims):
    """Put any of the axes in a row, and bars between them for where one dim ends."""
    return sum(
        comb(num_axes, k) * factorial(k) * comb(k + dims - 1, dims - 1) for k in range(num_axes + 1)
    )


def steps_by_hand(state, num_axes):
    """Count what can be done to a state: cut, gather, move in any order, reduce."""
    cuts, pending = state
    free = num_axes - sum(map(len, cuts)) - len(pending)
    count = free * len(cuts) + sum(map(len, cuts))
    for axes in cuts:
        count += (len(cuts) - 1) * sum(factorial(k) for k in range(1, len(axes) + 1))
    of_op = Counter(op for _, op in pending)
    for p in of_op.values():
        count += 2**p - 1 + len(cuts) * sum(perm(p, k) for k in range(1, p + 1))
    return count


@pytest.mark.parametrize(
    ("num_axes", "start", "nodes", "edges"),
    [
        (1, "[R]", 2, 2),
        (2, "[R,R]", 11, 48),
        (2, "[R,R,R]", 19, 126),
        (3, "[R,R]", 49, 390),
        (3, "[R,R,R]", 106, 1278),
        (4, "[R,R,R,R]", 1457, 41312),
        (3, "[R|P0]", 21, 68),
        (2, "[|P01]", 4, 5),
        (3, "[]", 1, 0),
    ],
)
def test_the_graph_has_as_many_specs_and_steps_as_by_hand(num_axes, start, nodes, edges):
    graph = explored(num_axes, start)
    spec = ShardingSpec.parse(start)
    assert isinstance(graph, nx.DiGraph)
    assert graph.number_of_nodes() == nodes
    assert graph.number_of_edges() == edges
    assert edges == sum(steps_by_hand(state, num_axes) for state in graph.nodes)
    assert count_states(num_axes, spec.dims, len(spec.partials)) == nodes
    if spec.dims and not spec.partials:
        assert nodes_by_hand(num_axes, spec.dims) == nodes


@pytest.mark.parametrize("start", ["[R,R]", "[R,R,R]", "[R,R|P0]", "[R,R|Psum0,Pavg1]"])
def test_every_edge_is_one_step_that_leads_where_it_says(start):
    """What a step does to a spec, written out again."""
    graph = explored(3, start)
    kinds = set()
    for before, after, step in graph.edges(data="step"):
        cuts, left = [list(axes) for axes in before[0]], dict(before[1])
        kinds.add(type(step))
        match step:
            case Slice(dim, axes):
                cuts[dim] += axes
            case AllGather(dim, axes):
                assert tuple(cuts[dim][-len(axes) :]) == axes
                del cuts[dim][-len(axes) :]
            case AllToAll(src_dim, dst_dim, src_axes, dst_axes):
                assert src_dim != dst_dim
                assert tuple(cuts[src_dim][-len(src_axes) :]) == src_axes
                assert sorted(src_axes) == sorted(dst_axes)
                del cuts[src_dim][-len(src_axes) :]
                cuts[dst_dim] += dst_axes
            case ReduceScatter(dim, axes, op):
                assert {left.pop(axis) for axis in axes} == {op}
                cuts[dim] += axes
            case AllReduce(axes, op):
                assert list(axes) == sorted(axes)
                assert {left.pop(axis) for axis in axes} == {op}
        assert after == (tuple(map(tuple, cuts)), tuple(sorted(left.items())))
    reductions = {ReduceScatter, AllReduce} if "P" in start else set()
    assert kinds == {Slice, AllGather, AllToAll} | reductions


def test_no_step_is_missing():
    """Between neighbors by definition there is an edge: all arrival orders, all axes at once."""
    graph = explored(3, "[R,R]")

    def joined(a, b):
        return graph.has_edge(*(state_of(ShardingSpec.parse(text)) for text in (a, b)))

    for axes in permutations("012"):
        assert joined("[S012,R]", f"[R,S{''.join(axes)}]")
    assert joined("[S012,R]", "[S0,R]")
    assert joined("[S012,R]", "[R,R]")
    assert joined("[S0,S12]", "[S021,R]")
    assert not joined("[S01,R]", "[S1,R]")
    assert not joined("[S01,R]", "[S10,R]")
    assert not joined("[S01,R]", "[S1,S0]")
    pending = explored(3, "[R,R|P012]")
    for arrival in ("1", "20", "201"):
        rest = "".join(axis for axis in "012" if axis not in arrival)
        target = f"[S{arrival},R|P{rest}]" if rest else f"[S{arrival},R]"
        ends = [state_of(ShardingSpec.parse(text)) for text in ("[R,R|P012]", target)]
        step = pending.edges[tuple(ends)]["step"]
        assert step == ReduceScatter(0, tuple(map(int, arrival)), "sum")


def test_many_axes_keep_their_order():
    """Beyond `MAX_REORDERED` axes the arrival orders would be too many to list."""
    count = MAX_REORDERED + 1
    axes = "".join(map(str, range(count)))
    start = state_of(ShardingSpec.parse(f"[S{axes},R]"))
    steps = [step for step, _ in successors(start, range(count))]
    together = [s for s in steps if isinstance(s, AllToAll) and len(s.axes) == count]
    assert together == [AllToAll(0, 1, tuple(range(count)), tuple(range(count)))]
    four = [s for s in steps if isinstance(s, AllToAll) and len(s.axes) == 4]
    assert len(four) == factorial(4)


@pytest.mark.parametrize("spec", [*plain_specs(3, 3), *partial_specs(2, 3)], ids=str)
def test_states_and_specs_are_the_same(spec):
    assert spec_of(state_of(spec)) == spec


def test_only_some_axes_and_dims():
    start = state_of(ShardingSpec.parse("[R,R,S3]"))
    steps = [step for step, _ in successors(start, (0, 4), (1,))]
    assert steps == [
        Slice(1, (0,)),
        Slice(1, (4,)),
        AllToAll(2, 1, (3,), (3,)),
        AllGather(2, (3,)),
    ]


def test_of_many_pending_axes_each_alone_or_all():
    start = state_of(ShardingSpec.parse("[R|P0123456789]"))
    steps = [step for step, _ in successors(start, range(10))]
    every = tuple(range(10))
    assert set(steps) == {
        *(step for axis in every for step in (ReduceScatter(0, (axis,), "sum"),)),
        *(AllReduce((axis,), "sum") for axis in every),
        ReduceScatter(0, every, "sum"),
        AllReduce(every, "sum"),
    }


@pytest.mark.parametrize(("axes", "dims"), [(33, 1), (1, 65), (100_000, 100_000)])
def test_more_than_is_planned_for(axes, dims):
    with pytest.raises(LayoutError, match="at most 32 axes and 64 dims"):
        count_states(axes, dims, 0)


def test_a_space_lists_the_graph():
    space = space_of(3, 2, ((1, "sum"),))
    graph = explored(3, "[R,R|P1]")
    assert set(space.states) == set(graph.nodes)
    assert [space.index[state] for state in space.states] == list(range(len(space.states)))
    edges = {(space.states[a], space.states[b], step) for (a, b), step in space.steps.items()}
    assert edges == set(graph.edges(data="step"))
    for place, state in enumerate(space.states):
        lists = tuple(space.lists[i] for i in space.list_index[place])
        assert lists == state[0]
    assert space.states[: space.num_finished] == [s for s in space.states if not s[1]]
