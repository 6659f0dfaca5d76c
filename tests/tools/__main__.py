"""Checkpoints made anew by the tools themselves, read, written, and loaded by the tools again.

``python -m tests.tools [TOOL …]`` runs a module of this folder for each tool, in a process of its
own, and prints the tables of docs/compatibility.md. It fails if any check of any tool does.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tools.table import Cell, Row, as_markdown, families_as_markdown, read_rows

_SUFFIX = "_checkpoints"
_TIMEOUT_S = 1800


def main(names: list[str]) -> int:
    """Run the tools' modules; each writes its rows to the file that it is given."""
    rows: list[Row | Cell] = []
    failed = []
    here = Path(__file__).parent
    known = sorted(path.stem.removesuffix(_SUFFIX) for path in here.glob(f"*{_SUFFIX}.py"))
    for name in names or known:
        with tempfile.TemporaryDirectory(prefix="shardspec-tools-") as place:
            found = Path(place) / "rows"
            command = [sys.executable, "-m", f"tests.tools.{name}{_SUFFIX}", place, str(found)]
            done = subprocess.run(command, timeout=_TIMEOUT_S, check=False)
            if done.returncode or not found.exists():
                failed.append(name)
                continue
            rows += read_rows(found)
    print(as_markdown([row for row in rows if isinstance(row, Row)]))
    print(families_as_markdown(row for row in rows if isinstance(row, Cell)))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
