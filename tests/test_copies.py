"""The core of all plans: what boxes share, and which holder gives what, against plain loops."""

import random
from collections import Counter, defaultdict
from itertools import pairwise, product

import pytest

from shardspec.boxes import box_size, intersect
from shardspec.comm.senders import Holders, Senders, balanced, overlaps
from tests.resharding.states import least_busiest


def some_box(random_, shape):
    starts = [random_.randrange(size) for size in shape]
    return tuple(
        (lo, random_.randrange(lo + 1, n + 1)) for lo, n in zip(starts, shape, strict=True)
    )


def test_overlaps_of_grids_and_of_any_boxes():
    random_ = random.Random(0)
    for case in range(2000):
        shape = [random_.randrange(1, 7) for _ in range(random_.randrange(4))]
        cuts = [sorted({0, n, *random_.choices(range(n + 1), k=2)}) for n in shape]
        have = list(product(*(list(pairwise(edges)) for edges in cuts)))
        if case % 2:
            have = [box for box in have if random_.random() < 0.8] + [some_box(random_, shape)]
        if case % 3:
            have += random_.choices(have, k=2)  # held twice
        random_.shuffle(have)
        want = sorted(some_box(random_, shape) for _ in range(4))
        for box, found in overlaps(have, want):
            shared = {number: intersect(held, box) for number, held in enumerate(have)}
            assert sorted(found) == [(n, part) for n, part in shared.items() if part is not None]


def test_no_division_among_holders_has_a_less_busy_one():
    """Of all ways to give whole bytes, for a few sets of holders."""
    assert balanced({(0,): 4, (0, 1): 6}) == {(0,): [4.0], (0, 1): [1.0, 5.0]}
    cases: list[dict[Holders, int]] = [
        {(0,): 4, (0, 1): 6},
        {(0, 1): 4, (1, 2): 4, (2,): 1},
        {(0, 1): 9, (1, 2): 0, (0, 2): 3},
        {(0,): 1, (1,): 7, (0, 1, 2): 4},
    ]
    for totals in cases:
        load = dict.fromkeys(range(3), 0.0)
        for holders, shares in balanced(totals).items():
            assert sum(shares) == pytest.approx(totals[holders])
            for one, share in zip(holders, shares, strict=True):
                load[one] += share
        least = min(
            max(sum(chosen[holder] for chosen in way) for holder in range(3))
            for way in product(*(divisions(*item) for item in totals.items()))
        )
        assert max(load.values()) <= 1.002 * least + 1e-9


@pytest.mark.parametrize("kind", ["random", "chain", "groups"])
def test_the_busiest_holder_is_within_one_percent_of_the_linear_program(kind):
    for seed in range(60):
        random_ = random.Random(seed)
        totals: Counter[Holders] = Counter()
        if kind == "chain":  # what its last holder has sends all the rest the other way
            line = list(range(random_.choice([4, 16, 64])))
            if seed % 2:
                random_.shuffle(line)
            totals.update(dict.fromkeys(pairwise(line), 10**6))
            totals[(line[-1],)] = 10**6
        for _ in range(random_.randrange(2, 40) if kind == "random" else 0):
            holders = tuple(sorted(random_.sample(range(16), random_.randrange(1, 17))))
            totals[holders] += random_.choice([1, 10**3, 12345, 10**6, 10**8])
        for size in random_.sample([1, 2, 3, 4, 6, 12], 3) if kind == "groups" else ():
            for first in range(0, 12, size):
                totals[tuple(range(first, first + size))] += random_.randrange(10**6)
        load: defaultdict[int, float] = defaultdict(float)
        for holders, shares in balanced(totals).items():
            assert sum(shares) == pytest.approx(totals[holders])
            for one, share in zip(holders, shares, strict=True):
                assert share >= 0
                load[one] += share
        assert max(load.values()) <= 1.01 * least_busiest(totals), seed


def divisions(holders, total):
    """Return all ways to divide whole bytes among some of three holders."""
    every = product(*(range(total + 1 if one in holders else 1) for one in range(3)))
    return [shares for shares in every if sum(shares) == total]


def test_every_byte_and_every_element_is_sent_once():
    random_ = random.Random(1)
    for _ in range(200):
        demands = []
        for _ in range(random_.randrange(1, 6)):
            holders = tuple(sorted(random_.sample(range(5), random_.randrange(1, 5))))
            box = some_box(random_, (9, 4))
            demands.append((holders, box, box_size(box) * 2))
        senders = Senders([(holders, size) for holders, _, size in demands])
        sent = dict.fromkeys({holders for holders, *_ in demands}, 0)
        for start, (holders, box, size) in zip(senders.starts, demands, strict=True):
            assert start == sent[holders]
            sent[holders] += size
            given = senders.stretches(holders, start, size)
            assert sum(count for _, count in given) == size
            parts = senders.split(holders, box, start, size)
            assert {one for one, _ in parts} <= {one for one, _ in given} <= set(holders)
            assert sum(box_size(part) for _, part in parts) == box_size(box)
        assert {holders: ends[-1] for holders, ends in senders.ends.items()} == sent


def test_a_box_of_few_rows_is_divided_along_a_longer_dim():
    senders = Senders([((0, 1, 2), 3 * 100)])
    assert senders.split((0, 1, 2), ((5, 7), (0, 150)), 0, 300) == [
        (0, ((5, 7), (0, 50))),
        (1, ((5, 7), (50, 100))),
        (2, ((5, 7), (100, 150))),
    ]
    many = senders.split((0, 1, 2), ((0, 75), (0, 4)), 0, 300)
    assert many == [(rank, ((25 * rank, 25 * rank + 25), (0, 4))) for rank in range(3)]
