"""The short form of every row: a sample of each kind of fault, the same at every run."""

import pytest

from tests.faults.harness import MEMORY_LIMIT, Tally
from tests.faults.prepare import prepare
from tests.faults.rows import ROWS
from tests.faults.run import run_rows


@pytest.fixture(scope="module")
def tallies(tmp_path_factory):
    """Run the rows without torch in one process, and those with torch in another."""
    folder = tmp_path_factory.mktemp("faults")
    prepare(ROWS, folder)
    found: dict[str, Tally] = {}
    for torch in (False, True):
        found |= run_rows([row for row in ROWS if row.torch == torch], folder, whole=False)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_sample_of_every_fault(row, tallies):
    found = tallies[row.name]
    assert found.stories == []
    assert found.wrong == 0
    assert found.cases > 1
    assert found.memory <= MEMORY_LIMIT
