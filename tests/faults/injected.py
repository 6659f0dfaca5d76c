"""Calls of the system that fail, or during which the process dies: every one of them, in turn."""

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardspec.checkpoint.storage import system_calls
from tests.faults.checks import one_line
from tests.faults.forks import DONE, KILLED, Fork
from tests.faults.harness import Case
from tests.faults.operations import ALL, SAVE, Operation, Stage

__all__ = ["reads", "saves", "writes"]

_WRITES: Final = (
    *("open", "mkdir", "ftruncate", "fstatvfs", "pwrite", "write"),
    *("fsync", "link", "rename", "replace", "unlink", "rmdir"),
)
_READS: Final = ("open", "preadv", "pread", "read", "listdir", "scandir")
_GROWS: Final = ("open", "mkdir", "ftruncate", "pwrite", "write", "link")
"""What needs room on a disk."""
_REMOVES: Final = ("unlink", "rmdir")

_Happens = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_Fault = Callable[[], _Happens]


def _die(_name: str, *_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_halfway(
    name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Do half of a write, or all of anything else, and die."""
    try:
        if name in ("pwrite", "write"):
            fd, data, *rest = args
            call(fd, bytes(data)[: len(data) // 2], *rest)
        else:
            call(*args, **kwargs)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _fail(
    code: int,
    name: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if code == errno.ENOSPC and name == "open" and not args[1] & os.O_CREAT:
        return call(*args, **kwargs)
    raise OSError(code, os.strerror(code))


def _half(
    name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do less than was asked for, as the system may."""
    if name in ("pwrite", "write", "preadv"):
        fd, data, *rest = args
        part = data[0] if name == "preadv" else data
        part = part[: max(1, len(part) // 2)]
        return call(fd, [part] if name == "preadv" else part, *rest)
    return call(*args, **kwargs)


class _Wrapped:
    """Counts calls, and lets the one of a number end otherwise; and those after it, if so told."""

    def __init__(self, number: int, happens: _Happens, names: Sequence[str], *, on: bool) -> None:
        self._left = number
        self._happens = happens
        self._names = names
        self._on = on
        self.hit = ""

    def install(self) -> None:
        """Wrap the calls in this process, which will end soon."""
        for name in self._names:
            setattr(os, name, partial(self._call, name, getattr(os, name)))
        if "rename" in self._names:
            # Called by its address, not through `os`.
            call = partial(self._call, "renameat2", system_calls.renameat2)
            vars(system_calls)["renameat2"] = call

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left == 0 or (self._left < 0 and self._on):
            self.hit = self.hit or name
            return self._happens(name, call, args, kwargs)
        return call(*args, **kwargs)


def _counted(
    operation: Operation, stage: Stage, names: Sequence[str], overwrite: bool
) -> list[str]:
    """Return the names of all calls, in order."""
    met: list[str] = []

    def note(
        name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        met.append(name)
        return call(*args, **kwargs)

    def act() -> None:
        _Wrapped(1, note, names, on=True).install()
        operation.act(stage.inputs[1], stage.out, overwrite)
        (stage.folder.parent / "calls").write_text(" ".join(met))

    assert Fork(act).end() == DONE
    return (stage.folder.parent / "calls").read_text().split()


def _set(operation: Operation, stage: Stage, overwrite: bool) -> None:
    """Start anew: with an older output if it is to be replaced."""
    stage.clear()
    if overwrite:
        operation.act(stage.inputs[0], stage.out, False)


def _faulty(
    operation: Operation,
    stage: Stage,
    overwrite: bool,
    wrapped: _Wrapped,
    hit: str,
    ends: Sequence[str],
) -> None:
    """Run with a fault; check the end, what is there then, and that the next run is well."""
    _set(operation, stage, overwrite)
    old = 0 if overwrite else None

    def act() -> None:
        wrapped.install()
        operation.act(stage.inputs[1], stage.out, overwrite)

    end = Fork(act).end()
    if end not in (DONE, KILLED):
        one_line(end)
    assert (end if end in (DONE, KILLED) else "error") in ends, end
    version = stage.version(operation)
    if end == DONE:
        assert version == 1, version
    else:
        assert version in (old, 1), version
    # What fails in removing, or in looking at what is to be removed, may leave something.
    removing = hit in _REMOVES or (version == 1 and hit in ("open", "scandir", "listdir"))
    if end != KILLED and not removing:
        if version is None:
            assert stage.names() in ([], ["out"] if operation.in_place else []), stage.names()
        else:
            stage.clean()
    operation.act(stage.inputs[1], stage.out, version is not None)
    assert stage.version(operation) == 1
    stage.clean()


def _each(
    operations: Sequence[Operation],
    place: Path,
    names: Sequence[str],
    faults: Sequence[tuple[str, _Happens, Sequence[str], bool, Sequence[str]]],
    every: int,
) -> Iterator[Case]:
    """Yield a case for every call of every operation, with each fault."""
    stage = Stage(place)
    turn = 0
    for operation in operations:
        for overwrite in (False, True):
            _set(operation, stage, overwrite)
            calls = _counted(operation, stage, names, overwrite)
            assert len(calls) > 5, calls
            for label, happens, to, on, ends in faults:
                for number, name in enumerate(calls, 1):
                    turn += 1
                    if name not in (*to, "renameat2") or turn % every:
                        continue
                    wrapped = _Wrapped(number, happens, names, on=False)
                    if on:
                        # Counted among those that fail from here on.
                        number = sum(other in to for other in calls[:number])
                        wrapped = _Wrapped(number, happens, to, on=True)
                    what = f"{operation.name}{' --overwrite' if overwrite else ''}"
                    yield Case(
                        f"{what}: {label} {name}, call {number} of {len(calls)}",
                        partial(_faulty, operation, stage, overwrite, wrapped, name, ends),
                    )


_WRITE_FAULTS: Final = (
    ("killed before", _die, _WRITES, False, (KILLED,)),
    ("killed after", _die_halfway, _WRITES, False, (KILLED,)),
    ("no space at", partial(_fail, errno.ENOSPC), _GROWS, False, ("error", DONE)),
    ("no space from", partial(_fail, errno.ENOSPC), _GROWS, True, ("error", DONE)),
    ("I/O error at", partial(_fail, errno.EIO), _WRITES, False, ("error", DONE)),
    ("no permission at", partial(_fail, errno.EACCES), _WRITES, False, ("error", DONE)),
    ("half done at", _half, ("pwrite", "write"), False, (DONE,)),
)
_READ_FAULTS: Final = (
    ("I/O error at", partial(_fail, errno.EIO), _READS, False, ("error", DONE)),
    ("stale handle at", partial(_fail, errno.ESTALE), _READS, False, ("error", DONE)),
    ("half done at", _half, ("preadv"), False, (DONE,)),
)


def writes(place: Path, whole: bool) -> Iterator[Case]:
    """Kill, or fail, at every call that changes the disk."""
    yield from _each(ALL, place, _WRITES, _WRITE_FAULTS, 1 if whole else 101)


def reads(place: Path, whole: bool) -> Iterator[Case]:
    """Fail at every call that reads."""
    yield from _each(ALL, place, _READS, _READ_FAULTS, 1 if whole else 61)


def saves(place: Path, whole: bool) -> Iterator[Case]:
    """Kill, or fail, at every call of a save that changes the disk."""
    yield from _each([SAVE], place, _WRITES, _WRITE_FAULTS, 1 if whole else 151)
