"""Settings that every test shares."""

import os

import pytest
from hypothesis import settings

# Results of steps are filled with noise, and it is checked that all of it is written over; in the
# processes that tests start too.
os.environ.setdefault("SHARDSPEC_CHECK", "1")

# Derandomized, so that a run says the same everywhere. No deadline: a slow machine is no bug.
settings.register_profile("shardspec", derandomize=True, deadline=None, max_examples=300)
settings.load_profile("shardspec")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that start jobs: they take longest, and none is to be alone at the end."""
    with_jobs = {item.path for item in items if item.get_closest_marker("dist")}
    items.sort(key=lambda item: item.path not in with_jobs)
