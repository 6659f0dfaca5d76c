"""What torch's DTensor gets wrong without a word is right or refused, in a job of four.

`make test` tries every seventh case, and `make exhaustive` all.
"""

import pytest
import torch

from shardspec import init_device_mesh
from tests.dist.processes import run_ranks
from tests.dist.silent_runs import silent

pytestmark = pytest.mark.dist


def play(rank, every):
    torch.set_num_threads(1)
    return silent(rank, init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp")), every)


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_it_is_right_or_refused_alike_on_every_rank(tmp_path, every):
    refusals, *others = run_ranks(4, tmp_path, play, every)
    assert len(refusals) > 5
    assert all(more == refusals for more in others)
    assert all("redistribute first" in text for text in refusals)
