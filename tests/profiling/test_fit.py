"""Curves and links from measured times: exact where times follow lines, near where they do not."""

import random

import pytest

from shardspec.comm.curves import EXCHANGE_KIND, KINDS, PERMUTE_KIND
from shardspec.errors import ProfileError
from shardspec.profiling.fit import Timing, fit_curve, fitted_links, middle_and_most, unseen_errors

SIZES = [4096 * 4**i for i in range(9)]


def seconds(size):
    """Return what a protocol of low latency and one of high rate take together."""
    return min(1e-5 + size / 5e9, 4e-5 + size / 5e10)


def test_times_on_two_lines_give_these_lines():
    curve = fit_curve("all-gather", 4, [(size, seconds(size)) for size in SIZES])
    for size in (*SIZES, 10_000, 3 << 20):
        assert curve.seconds(size) == pytest.approx(seconds(size), rel=1e-6)
    assert curve.sizes == (SIZES[0], SIZES[-1])
    assert (curve.kind, curve.devices, curve.nodes) == ("all-gather", 4, 1)


def test_errors_are_those_of_sizes_left_out():
    """Noise of 5 % shows as such; without noise, only where the ends are extrapolated."""
    noisy = [(size, seconds(size) * (1 + 0.05 * (i % 3 - 1))) for i, size in enumerate(SIZES)]
    errors = unseen_errors(noisy, lambda times: fit_curve("all-to-all", 4, times))
    assert len(errors) == len(SIZES)
    found = middle_and_most(errors)
    assert found is not None
    assert 0.01 < found[0] < 0.1
    assert found[0] <= found[1] < 0.4
    assert unseen_errors(noisy[:2], lambda times: fit_curve("all-to-all", 4, times)) == []
    assert middle_and_most([]) is None


def test_a_few_wild_times_hardly_count():
    times = [(s, (1e-5 + s * 1e-10) * (25.0 if i == 5 else 1.0)) for i, s in enumerate(SIZES)]
    curve = fit_curve("all-reduce", 2, times)
    for size in (*SIZES[:5], *SIZES[6:]):
        assert curve.seconds(size) == pytest.approx(1e-5 + size * 1e-10, rel=0.1)


def test_nothing_is_negative():
    """Times that shrink with size would fit best with a rate below zero."""
    for times in (
        [(size, 1e-3 / (1 + i)) for i, size in enumerate(SIZES)],
        [(size, size * size * 1e-12) for size in SIZES],
    ):
        curve = fit_curve("all-gather", 2, times)
        assert all(fixed >= 0 and slope >= 0 for fixed, slope in curve.lines)


def runs(noise=0.0, seed=0):
    """Return times of everything on 2 and 4 devices of one host, and of 4 on two hosts."""
    random_ = random.Random(seed)
    return [
        Timing(kind, n, nodes, {s: nodes * seconds(s) * random_.uniform(1 - noise, 1 + noise)})
        for kind in (*KINDS, PERMUTE_KIND, EXCHANGE_KIND)
        for n, nodes in ((2, 1), (4, 1), (4, 2))
        for s in SIZES
    ]


def test_links_of_all_runs():
    preset = fitted_links("own", runs(0.05), source="here")
    assert (preset.name, preset.per_node, preset.source) == ("own", 4, "here")
    for link, nodes, count in ((preset.inside, 1, 12), (preset.between, 2, 6)):
        assert not isinstance(link, str)
        assert link is not None
        assert link.error is not None
        assert 0.005 < link.error[0] < 0.05
        assert len(link.curves) == count
        assert {curve.nodes for curve in link.curves} == {nodes}
        for curve in link.curves:
            for size in SIZES:
                assert curve.seconds(size) == pytest.approx(nodes * seconds(size), rel=0.15)


def test_times_of_the_same_devices_count_together():
    first, second = (
        Timing("all-gather", 2, 1, {size: factor * seconds(size) for size in SIZES})
        for factor in (0.99, 1.01)
    )
    preset = fitted_links("own", [first, second])
    assert preset.inside is not None
    (curve,) = preset.inside.curves
    assert curve.seconds(1 << 20) == pytest.approx(seconds(1 << 20), rel=0.02)
    assert preset.per_node is preset.between is None
    assert fitted_links("own", [first], "ib-ndr-per-gpu").between == "ib-ndr-per-gpu"


@pytest.mark.parametrize(
    "measured",
    [
        [],
        [Timing("all-gather", 4, 2, {4096: 1e-5, 8192: 1e-5})],
        [Timing(PERMUTE_KIND, 4, 1, {4096: 1e-5, 8192: 1e-5})],
        [Timing("all-gather", 4, 1, {4096: 1e-5})],
    ],
)
def test_too_few_times(measured):
    with pytest.raises(ProfileError, match="one host"):
        fitted_links("own", measured)
