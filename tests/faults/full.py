"""Disks that are too small: a file system of every size, on the real thing where one can mount."""

import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tests.faults.checks import one_line
from tests.faults.forks import DONE, Fork
from tests.faults.harness import Case
from tests.faults.operations import ALL, SAVE, Operation, Stage

__all__ = ["full", "saves"]

_PAGE: Final = 4096
_SIZES: Final = 64
_SCALE: Final = 600
"""Makes outputs of about half the largest disk."""


def _mount(folder: Path, what: Sequence[str]) -> bool:
    done = subprocess.run(["mount", *what, str(folder)], capture_output=True)
    return done.returncode == 0


def _counts_nothing(_fd: int) -> os.statvfs_result:
    """Be a file system that does not say how much room it has, so that writing is what fails."""
    return os.statvfs_result([0] * 11)


def _limit(num_bytes: int) -> None:
    """Stand in for a small disk, where nothing can be mounted: no file is larger."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _small(
    operation: Operation,
    stage: Stage,
    num_bytes: int,
    overwrite: bool,
    counted: bool,
    mounted: bool,
) -> None:
    stage.clear()
    if mounted:
        assert _mount(stage.folder, ("-o", f"remount,size={2 * _SIZES * _PAGE}"))
    if overwrite:
        operation.act(stage.inputs[0], stage.out, False)
    used = sum(path.stat().st_blocks * 512 for path in stage.folder.rglob("*") if path.is_file())
    if mounted:
        assert _mount(stage.folder, ("-o", f"remount,size={used + num_bytes}"))

    def act() -> None:
        if not counted:
            vars(os)["fstatvfs"] = _counts_nothing
        if not mounted:
            _limit(num_bytes)
        operation.act(stage.inputs[1], stage.out, overwrite)

    end = Fork(act).end()
    version = stage.version(operation)
    if end == DONE:
        assert version == 1
        stage.clean()
    else:
        message = one_line(end)
        assert "No space left" in message or "File too large" in message, message
        assert version == (0 if overwrite else None)
        if overwrite:
            stage.clean()
        else:
            assert stage.names() in ([], ["out"] if operation.in_place else []), stage.names()


def _each(operations: Sequence[Operation], place: Path, every: int) -> Iterator[Case]:
    stage = Stage(place, scale=_SCALE)
    mounted = _mount(stage.folder, ("-t", "tmpfs", "-o", f"size={2 * _SIZES * _PAGE}", "tmpfs"))
    try:
        turn = 0
        for operation in operations:
            for overwrite in (False, True):
                for pages in range(1, _SIZES + 1):
                    for counted in (True, False):
                        turn += 1
                        if turn % every:
                            continue
                        option = " --overwrite" if overwrite else ""
                        label = f"{operation.name}{option} on {pages} pages"
                        size = pages * _PAGE
                        act = partial(_small, operation, stage, size, overwrite, counted, mounted)
                        yield Case(label if mounted else f"{label}, by a limit", act)
    finally:
        if mounted:
            stage.clear()
            subprocess.run(["umount", str(stage.folder)], check=True)


def full(place: Path, whole: bool) -> Iterator[Case]:
    """Merge and reshard onto disks of 1 to 64 pages, with an older output there and without."""
    yield from _each(ALL, place, 1 if whole else 139)


def saves(place: Path, whole: bool) -> Iterator[Case]:
    """Save onto disks of 1 to 64 pages."""
    yield from _each([SAVE], place, 1 if whole else 101)
