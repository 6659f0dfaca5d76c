"""Settings that every test shares."""

import os

from hypothesis import settings

# Results of steps are filled with noise, and it is checked that all of it is written over; in the
# processes that tests start too.
os.environ.setdefault("SHARDSPEC_CHECK", "1")

# Derandomized, so that a run says the same everywhere. No deadline: a slow machine is no bug.
settings.register_profile("shardspec", derandomize=True, deadline=None, max_examples=300)
settings.load_profile("shardspec")
