"""The plan's cost is the optimum over the declared moves, found here by brute force.

Nothing of the library's search or prices is used: layouts, moves and costs are written out again
from the definitions, and the optimum is found by plain dynamic programming over all layouts.
"""

from functools import cache
from itertools import combinations, permutations, product
from math import inf, prod
from typing import Any

import numpy as np
import pytest

from shardspec import CostModel, DeviceMesh, Layout, LayoutConverter, Link, ShardingSpec

FAST, SLOW = Link(3.4e-6, 1 / 362e9), Link(1.4e-5, 1 / 48e9)
KIB, MIB, GIB = 2**10, 2**20, 2**30


def lists_of(axes):
    for count in range(len(axes) + 1):
        yield from permutations(axes, count)


def all_cuts(num_axes, dims):
    """Every way to give each dim an ordered list of axes, none used twice."""

    def fill(dim, left):
        if dim == dims:
            yield ()
            return
        for axes in lists_of(left):
            rest = tuple(a for a in left if a not in axes)
            for others in fill(dim + 1, rest):
                yield (axes, *others)

    return list(fill(0, tuple(range(num_axes))))


def interval(size, axes, at, mesh):
    lo, hi = 0, size
    for axis in axes:
        block = -(-(hi - lo) // mesh[axis])
        lo, hi = min(lo + at[axis] * block, hi), min(lo + (at[axis] + 1) * block, hi)
    return lo, hi


class Brute:
    """All layouts of one tensor on one mesh, and the seconds between any two."""

    def __init__(self, mesh, shape, item, links, bus, pending):
        self.mesh, self.shape, self.item, self.links, self.bus = mesh, shape, item, links, bus
        self.devices = list(product(*(range(n) for n in mesh)))
        self.states = [
            (cuts, left)
            for count in range(len(pending) + 1)
            for left in combinations(pending, count)
            for cuts in all_cuts(len(mesh), len(shape))
            if not {a for c in cuts for a in c} & set(left)
        ]
        self.index = {state: i for i, state in enumerate(self.states)}

    @cache  # noqa: B019 - lives as long as one test
    def box(self, cuts, at):
        return tuple(
            interval(size, axes, at, self.mesh) for size, axes in zip(self.shape, cuts, strict=True)
        )

    @cache  # noqa: B019
    def nbytes(self, cuts):
        return (
            max(prod(hi - lo for lo, hi in self.box(cuts, at)) for at in self.devices) * self.item
        )

    def slowest(self, axes):
        return (
            max(self.links[a].latency_s for a in axes),
            max(self.links[a].seconds_per_byte for a in axes),
        )

    def link(self, a, b):
        differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        return self.slowest(differ) if differ else (0.0, 0.0)

    def collective(self, kind, axes, b):
        n = prod(self.mesh[a] for a in axes)
        alpha, beta = self.slowest(axes)
        share = {
            "gather": n - 1,
            "scatter": (n - 1) / n,
            "reduce": 2 * (n - 1) / n,
            "all-to-all": (n - 1) / n,
        }[kind]
        messages = 2 * (n - 1) if kind == "reduce" else n - 1
        if self.bus:
            return messages * alpha + len(self.devices) * share * b * beta
        if kind == "all-to-all":
            here = (0,) * len(self.mesh)
            peers = product(
                *(range(self.mesh[a]) if a in axes else (0,) for a in range(len(self.mesh)))
            )
            links = [self.link(here, peer) for peer in peers if peer != here]
            return sum(al + b / n * be for al, be in links)
        return messages * alpha + share * b * beta

    def collectives(self, state):
        cuts, left = state
        used = {a for c in cuts for a in c} | set(left)
        b = self.nbytes(cuts)

        def changed(changes):
            return tuple(changes.get(d, c) for d, c in enumerate(cuts))

        for d, own in enumerate(cuts):
            for axes in lists_of([a for a in range(len(self.mesh)) if a not in used]):
                if axes:
                    yield (changed({d: own + axes}), left), 0.0
            for k in range(1, len(own) + 1):
                stay, go = own[:-k], own[-k:]
                yield (changed({d: stay}), left), self.collective("gather", go, b)
                for e, other in enumerate(cuts):
                    if e != d:
                        for order in permutations(go):
                            yield (
                                (changed({d: stay, e: other + order}), left),
                                self.collective("all-to-all", go, b),
                            )
            for axes in lists_of(left):
                if axes:
                    rest = tuple(a for a in left if a not in axes)
                    yield (changed({d: own + axes}), rest), self.collective("scatter", axes, b)
        for count in range(1, len(left) + 1):
            for axes in combinations(left, count):
                rest = tuple(a for a in left if a not in axes)
                yield (cuts, rest), self.collective("reduce", axes, b)

    def routed(self, before, after):
        """The cheaper of a permute and an exchange."""
        held = {at: self.box(before, at) for at in self.devices}
        wanted = {at: self.box(after, at) for at in self.devices}
        size = {at: prod(hi - lo for lo, hi in held[at]) for at in self.devices}
        sends: dict[Any, list[Any]] = {at: [] for at in self.devices}
        gets: dict[Any, list[Any]] = {at: [] for at in self.devices}
        for at in self.devices:
            for cell in {held[d] for d in self.devices if size[d]}:
                shared = [
                    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(cell, wanted[at], strict=True)
                ]
                amount = prod(max(0, hi - lo) for lo, hi in shared) * self.item
                if amount and held[at] != cell:
                    holder = min(
                        (d for d in self.devices if held[d] == cell),
                        key=lambda d: sum(x != y for x, y in zip(d, at, strict=True)),
                    )
                    sends[holder].append((at, amount))
                    gets[at].append((holder, amount))
        pairs = [(a, b, amount) for a in gets for b, amount in gets[a]]
        if not pairs:
            return inf
        if self.bus:
            slowest = [self.link(a, b) for a, b, _ in pairs]
            messages = max(max(map(len, sends.values())), max(map(len, gets.values())))
            moved = sum(amount for *_, amount in pairs)
            exchange = messages * max(s[0] for s in slowest) + moved * max(s[1] for s in slowest)
        else:
            exchange = max(
                sum(self.link(a, b)[0] + amount * self.link(a, b)[1] for b, amount in peers)
                for table in (sends, gets)
                for a, peers in table.items()
            )
        return min(exchange, self.permute(held, wanted, size))

    def permute(self, held, wanted, size):
        if sorted(held.values()) != sorted(wanted.values()) and sorted(
            box for box in held.values() if prod(hi - lo for lo, hi in box)
        ) != sorted(box for box in wanted.values() if prod(hi - lo for lo, hi in box)):
            return inf
        b = max(size.values()) * self.item
        worst, moved, latency, beta = 0.0, 0, 0.0, 0.0
        for box in {wanted[d] for d in self.devices}:
            if not prod(hi - lo for lo, hi in box):
                continue
            holders = [d for d in self.devices if held[d] == box]
            receivers = [d for d in self.devices if wanted[d] == box]
            options = []
            for order in permutations(holders):
                links = [self.link(h, r) for h, r in zip(order, receivers, strict=True)]
                options.append(
                    (
                        max(al + b * be for al, be in links),
                        sum(h != r for h, r in zip(order, receivers, strict=True)),
                        links,
                    )
                )
            best = min(option[0] for option in options)
            worst = max(worst, best)
            kept_most = min(option[1] for option in options)
            moved += kept_most
            links = min((o for o in options if o[1] == kept_most), key=lambda o: o[0])[2]
            latency = max(latency, *(al for al, _ in links))
            beta = max(beta, *(be for _, be in links))
        return latency + moved * b * beta if self.bus else worst

    def optimum(self):
        count = len(self.states)
        move = np.full((count, count), inf)
        for i, state in enumerate(self.states):
            for reached, seconds in self.collectives(state):
                move[i, self.index[reached]] = min(move[i, self.index[reached]], seconds)
            if not state[1]:
                for j, other in enumerate(self.states):
                    if j != i and not other[1]:
                        move[i, j] = min(move[i, j], self.routed(state[0], other[0]))
        best = move.copy()
        np.fill_diagonal(best, 0.0)
        for k in range(count):
            best = np.minimum(best, best[:, k, None] + best[None, k])
        return best


def model_of(name, mesh):
    if name == "two-tier":
        return CostModel(mesh, (SLOW, *[FAST] * (len(mesh) - 1)))
    if name == "uniform":
        return CostModel(mesh, (FAST,) * len(mesh))
    return CostModel(mesh, (Link(2e-6, 1 / 10e9),) * len(mesh), "shared-bus")


def check(mesh, shape, item_dtype, item, name, pending):
    model = model_of(name, mesh)
    brute = Brute(mesh, shape, item, model.links, name == "shared-bus", pending)
    best = brute.optimum()
    device_mesh = DeviceMesh(range(prod(mesh)), mesh)
    converter = LayoutConverter(model)
    layouts = {
        state: Layout(
            device_mesh,
            ShardingSpec(
                len(shape), dict(enumerate(state[0])), partial=dict.fromkeys(state[1], "sum")
            ),
            shape,
            item_dtype,
        )
        for state in brute.states
    }
    pairs = 0
    for i, source in enumerate(brute.states):
        for j, target in enumerate(brute.states):
            if not set(target[1]) <= set(source[1]):
                continue
            cost = converter.cost(layouts[source], layouts[target])
            assert cost == pytest.approx(best[i, j], rel=1e-9, abs=2e-11), (
                f"{layouts[source].spec} → {layouts[target].spec}"
            )
            pairs += 1
    return pairs


SIZES = [64 * KIB, MIB, 64 * MIB, GIB]


def even_shape(dims, num_bytes):
    """Sizes that every mesh here divides, as near to the bytes of a float32 tensor as it gets."""
    shape = [24] * dims
    shape[0] = max(24, num_bytes // 4 // 24 ** (dims - 1) // 24 * 24)
    return tuple(shape)


@pytest.mark.parametrize("name", ["two-tier", "uniform", "shared-bus"])
@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize(("mesh", "dims"), [((2, 2), 2), ((2, 4), 2), ((2, 3), 2), ((2, 2), 3)])
def test_two_axes(mesh, dims, name, num_bytes):
    for pending in ((), (0,), (1,), (0, 1)):
        check(mesh, even_shape(dims, num_bytes), "float32", 4, name, pending)


@pytest.mark.parametrize("name", ["two-tier", "uniform", "shared-bus"])
@pytest.mark.parametrize(
    ("mesh", "shape"), [((2, 3), (1000, 777)), ((2, 4), (130, 7)), ((2, 2), (5, 3))]
)
def test_uneven_shapes(mesh, shape, name):
    assert check(mesh, shape, "float32", 4, name, ()) == 121


@pytest.mark.parametrize("name", ["two-tier", "uniform", "shared-bus"])
def test_three_axes(name):
    assert check((2, 2, 2), even_shape(2, MIB), "float32", 4, name, ()) == 2401
