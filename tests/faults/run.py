"""Running a row in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.faults.harness import Row, Tally

__all__ = ["run_row"]

_ROOT: Final = Path(__file__).parents[2]
_LIMIT: Final = 3600


def run_row(row: Row, *, whole: bool, folder: Path | None = None) -> Tally:
    """Prepare a row and run its cases, each step in a process that starts anew.

    Parameters
    ----------
    row
        One of `ROWS`.
    whole
        All cases, or a sample of each kind.
    folder
        Where to work; a folder that is removed in the end unless it is given.
    """
    place = Path(tempfile.mkdtemp(prefix="faults-", dir=folder))
    try:
        if row.prepare is not None:
            _python("tests.faults.prepare", row.prepare, place)
        command = ("tests.faults.child", row.name, place, *(("--whole",) if whole else ()))
        found = json.loads(_python(*command, mounts=row.own_mounts))
        return Tally(**found)
    finally:
        shutil.rmtree(place)


def _python(*args: object, mounts: bool = False) -> str:
    """Run a module; in a namespace of its own where it mounts, so that nothing stays mounted."""
    first = ("unshare", "-rm") if mounts and _may_mount() else ()
    done = subprocess.run(
        [*first, sys.executable, "-m", *map(str, args)],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, args))} ended with {done.returncode}: {done.stderr}"
        )
    return done.stdout


def _may_mount() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and not subprocess.run([unshare, "-rm", "true"]).returncode
