"""`python -m tests.faults [--whole] [ROW ...]` prints what became of every fault."""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.harness import MEMORY_LIMIT
from tests.faults.prepare import prepare
from tests.faults.rows import ROWS
from tests.faults.run import run_rows


def main(args: list[str]) -> int:
    """Run rows and print their table as Markdown; return 1 if any case is wrong."""
    whole = "--whole" in args
    chosen = [arg for arg in args if arg != "--whole"]
    unknown = set(chosen) - {row.name for row in ROWS}
    if unknown:
        sys.exit(f"there is no row {', '.join(sorted(unknown))}; rows: {_names()}")
    print("| fault | cases | right | wrong | worst seconds | worst memory, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    stories: list[str] = []
    total = wrong = 0
    started = time.perf_counter()
    rows = [row for row in ROWS if not chosen or row.name in chosen]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    prepare(rows, folder, whole=whole)
    for row in rows:
        found = run_rows([row], folder, whole=whole)[row.name]
        shutil.rmtree(folder / row.name)
        more = " + torch" if row.torch else ""
        print(
            f"| {row.fault} | {found.cases:,} | {found.cases - found.wrong:,} {row.ends} | "
            f"{found.wrong} | {found.seconds:.2f} | {found.memory / 2**20:.0f}{more} |",
            flush=True,
        )
        total += found.cases
        wrong += found.wrong
        stories += [f"{row.name}: {story}" for story in found.stories]
    folder.rmdir()
    print(
        f"\n{total:,} cases in {time.perf_counter() - started:.0f} s, {wrong} wrong; the limit of "
        f"memory is {MEMORY_LIMIT >> 20} MiB."
    )
    for story in stories:
        print(f"\n{story}", file=sys.stderr)
    return 1 if wrong else 0


def _names() -> str:
    return ", ".join(row.name for row in ROWS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
