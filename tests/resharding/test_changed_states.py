"""State dicts that are not what they were when the plan was made: right, or refused by name."""

from collections import Counter

import pytest

from tests.resharding.changed_states import changed_case, outcome


@pytest.mark.parametrize(
    "seeds", [range(160), pytest.param(range(160, 20_000), marks=pytest.mark.exhaustive)], ids=len
)
def test_changed_state_dicts_on_simulated_devices(seeds):
    ends: Counter[str] = Counter()
    for seed in seeds:
        case = changed_case(seed, ids=4)
        said, problems = outcome(case, case.devices, in_job=False)
        assert problems == [], seed
        ends[said.split(" ", 1)[0]] += 1
        ends["shares memory"] += "share" in said
    assert ends[""] > len(seeds) / 3
    assert ends["LayoutError:"] > len(seeds) / 5
    assert ends["shares memory"] > len(seeds) / 60
