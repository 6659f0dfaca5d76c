"""The short form of every row: a sample of each kind of fault, the same at every run."""

from pathlib import Path

import pytest

from tests.faults.harness import Counts
from tests.faults.prepare import prepare
from tests.faults.rows import ROWS
from tests.faults.run import run_rows

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Run the rows without torch in one process, and those with torch in another."""
    folder = tmp_path_factory.mktemp("faults")
    prepare(ROWS, folder, whole=False)
    found: dict[str, Counts] = {}
    for torch in (False, True):
        found |= run_rows([row for row in ROWS if row.torch == torch], folder, whole=False)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_sample_of_every_fault(row, counts):
    found = counts[row.name]
    assert found.stories == []
    assert found.wrong == 0
    assert found.cases > 1
    assert found.memory <= row.memory


def test_the_documented_table_has_every_row():
    text = Path(__file__).parents[2].joinpath("docs", "faults.md").read_text("utf-8")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [row.fault for row in ROWS]
