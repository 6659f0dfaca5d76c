"""Settings that every test shares."""

from hypothesis import settings

# Derandomized, so that a run says the same everywhere. No deadline: a slow machine is no bug.
settings.register_profile("shardspec", derandomize=True, deadline=None, max_examples=300)
settings.load_profile("shardspec")
