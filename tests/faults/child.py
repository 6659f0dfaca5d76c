"""`python -m tests.faults.child ROW FOLDER [--whole]` runs the cases of one row."""

import sys
from pathlib import Path

from tests.faults.harness import child
from tests.faults.rows import ROWS

if __name__ == "__main__":
    name, folder, *rest = sys.argv[1:]
    (row,) = (row for row in ROWS if row.name == name)
    child(row, Path(folder), whole=rest == ["--whole"])
