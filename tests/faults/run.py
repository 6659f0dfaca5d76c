"""Running rows in a process of their own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.faults.harness import Counts, Row

__all__ = ["run_rows"]

_ROOT: Final = Path(__file__).parents[2]
_LIMIT: Final = 3600


def run_rows(rows: Sequence[Row], folder: Path, *, whole: bool) -> dict[str, Counts]:
    """Run the cases of some rows, all with torch or all without, in one process that starts anew.

    Parameters
    ----------
    rows
        Some of `ROWS`.
    folder
        Where to work: each row has a folder of its name there, prepared if it needs that.
    whole
        All cases, or a sample of each kind.

    Returns
    -------
    dict
        Name of the row to what came out of it.
    """
    for row in rows:
        folder.joinpath(row.name).mkdir(exist_ok=True)
    first = ("unshare", "-rm") if any(row.own_mounts for row in rows) and _may_mount() else ()
    names = [row.name for row in rows]
    more = ["--whole"] if whole else []
    done = subprocess.run(
        [*first, sys.executable, "-m", "tests.faults.child", str(folder), *names, *more],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    if done.returncode:
        raise RuntimeError(f"{', '.join(names)} ended with {done.returncode}: {done.stderr}")
    return {
        row.name: Counts(**found) for row, found in zip(rows, json.loads(done.stdout), strict=True)
    }


def _may_mount() -> bool:
    """Say whether a process may have mounts of its own, so that nothing stays mounted."""
    unshare = shutil.which("unshare")
    return unshare is not None and not subprocess.run([unshare, "-rm", "true"]).returncode
