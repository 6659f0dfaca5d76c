"""The programs of this folder, in a job of two; in others of any size by `make exhaustive`."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.dist.processes import run_ranks
from tests.introductions import (
    d_tensor_page,
    dtensor_demo,
    mesh_recipe,
    proposal,
    training_notes,
)

pytestmark = pytest.mark.dist


def all_programs(rank: int, place: str) -> bool:
    dtensor_demo.run(rank)
    mesh_recipe.run(rank)
    for number, program in enumerate((proposal, d_tensor_page, training_notes)):
        directory = Path(place) / str(number)
        directory.mkdir(exist_ok=True)
        program.run(rank, directory)
        dist.barrier()
    return True


OTHERS = (pytest.param(world, marks=pytest.mark.exhaustive) for world in (1, 4, 8))


@pytest.mark.parametrize("world", [2, *OTHERS])
def test_what_the_introductions_have_their_readers_type(world, tmp_path):
    assert run_ranks(world, tmp_path, all_programs, str(tmp_path)) == [True] * world
