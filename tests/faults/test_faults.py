"""The short form of every row: a sample of each kind of fault, the same at every run."""

import pytest

from tests.faults.harness import MEMORY_LIMIT
from tests.faults.rows import ROWS
from tests.faults.run import run_row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_sample_of_every_fault(row, tmp_path):
    found = run_row(row, whole=False, folder=tmp_path)
    assert found.stories == []
    assert found.wrong == 0
    assert found.cases > 2
    assert found.memory <= MEMORY_LIMIT
