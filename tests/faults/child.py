"""`python -m tests.faults.child FOLDER [--whole] ROW ...` runs the cases of some rows."""

import sys
from pathlib import Path

from tests.faults.harness import child
from tests.faults.rows import ROWS

if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    names = [name for name in rest if name != "--whole"]
    chosen = [(row, Path(folder) / row.name) for row in ROWS if row.name in names]
    child(chosen, whole="--whole" in rest)
