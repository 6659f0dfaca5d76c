"""Links from measured times: exact where times follow the model, near it where they do not."""

from itertools import product
from statistics import median

import pytest

from shardspec import CostModel
from shardspec.comm.curves import KINDS, Link
from shardspec.errors import ProfileError
from shardspec.profiling.fit import Measurement, fit_links, step_of
from shardspec.profiling.profile import Profile

SHAPE = (2, 3)
LINKS = (Link(1.4e-5, 1 / 48e9), Link(3.4e-6, 1 / 362e9))
SIZES = [4096 * 4**i for i in range(7)]


def exact(_index):
    return 1.0


def times(model, noise=exact, axes=((0,), (1,), (0, 1))):
    found = []
    for index, (along, kind, size) in enumerate(product(axes, KINDS, SIZES)):
        seconds = model.step_seconds(step_of(kind, along), size)
        found.append(Measurement(kind, along, size, seconds * noise(index)))
    return found


@pytest.mark.parametrize("link_model", ["ring", "shared-bus"])
def test_times_that_follow_the_model_give_its_links(link_model):
    fit = fit_links(SHAPE, times(CostModel(SHAPE, LINKS, link_model)), link_model)
    for found, given in zip(fit.model.links, LINKS, strict=True):
        assert found.latency_s == pytest.approx(given.latency_s, rel=1e-9)
        assert found.seconds_per_byte == pytest.approx(given.seconds_per_byte, rel=1e-9)
        assert found.name == "measured"
    assert fit.worst_error < 1e-9


@pytest.mark.parametrize("link_model", ["ring", "shared-bus"])
def test_the_model_that_the_times_follow_is_chosen(link_model):
    profile = Profile(SHAPE, None, tuple(times(CostModel(SHAPE, LINKS, link_model))), {})
    assert profile.fit.model.link_model == link_model
    assert profile.cost_model.link_model == link_model
    other = profile.shared_bus if link_model == "ring" else profile.ring
    assert other.worst_error > 0.2


def test_one_axis_alone_is_no_reason_for_a_bus():
    model = CostModel((4,), LINKS[:1], "shared-bus")
    profile = Profile((4,), None, tuple(times(model, axes=((0,),))), {})
    assert profile.fit.model.link_model == "ring"
    assert profile.fit.worst_error < 1e-9


def test_errors_are_those_of_the_measurements():
    model = CostModel(SHAPE, LINKS)
    measured = times(model, noise=lambda index: 1.0 + 0.1 * (index % 3 - 1))
    fit = fit_links(SHAPE, measured, "ring")
    again = fit.model
    errors = [
        abs(again.step_seconds(step_of(m.kind, m.axes), m.num_bytes) / m.seconds - 1)
        for m in measured
    ]
    assert fit.typical_error == median(errors)
    assert fit.worst_error == max(errors)
    assert fit.typical_error < 0.11
    assert fit.mean_error == pytest.approx(sum(errors) / len(errors))


def test_a_few_wild_measurements_hardly_count():
    model = CostModel(SHAPE, LINKS)
    measured = times(model, noise=lambda index: 25.0 if index % 13 == 5 else 1.0)
    fit = fit_links(SHAPE, measured, "ring")
    for found, given in zip(fit.model.links, LINKS, strict=True):
        assert found.latency_s == pytest.approx(given.latency_s, rel=0.1)
        assert found.seconds_per_byte == pytest.approx(given.seconds_per_byte, rel=0.1)
    assert fit.worst_error > 0.9


def test_nothing_is_negative():
    """Times that shrink with size would fit best with a rate below zero."""
    measured = [Measurement("all-gather", (0,), b, 1e-3 / (1 + i)) for i, b in enumerate(SIZES)]
    (link,) = fit_links((2,), measured, "ring").model.links
    assert link.seconds_per_byte == 0.0
    assert link.latency_s > 0
    measured = [Measurement("all-gather", (0,), b, b * b * 1e-12) for b in SIZES]
    (link,) = fit_links((2,), measured, "ring").model.links
    assert link.latency_s == 0.0
    assert link.seconds_per_byte > 0


def test_axes_of_one_device_are_free():
    measured = [Measurement("all-gather", (1,), b, 1e-5 + b * 1e-9) for b in SIZES]
    fit = fit_links((1, 2), measured, "ring")
    assert (fit.model.links[0].latency_s, fit.model.links[0].seconds_per_byte) == (0.0, 0.0)
    assert fit.model.links[1].latency_s == pytest.approx(1e-5)


def test_too_few_measurements():
    with pytest.raises(ProfileError, match="axis 1 has 0 measurements; two sizes"):
        fit_links((2, 2), times(CostModel((2, 2), LINKS), axes=((0,),)), "ring")
    with pytest.raises(ProfileError, match="axis 0 has 1 measurements"):
        fit_links((2,), [Measurement("all-gather", (0,), 4096, 1.0)], "ring")
