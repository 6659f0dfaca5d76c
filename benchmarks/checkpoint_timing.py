"""Timing commands: each in a process of its own, with its peak of memory, the machine made ready.

The process that measures stays small: a child's peak of resident memory counts from that of its
parent on, so nothing here imports numpy or torch.
"""

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Final, TypeVar

__all__ = [
    "Run",
    "Series",
    "cat_command",
    "cats_command",
    "empty",
    "evict",
    "python",
    "run",
    "shuffled",
    "small",
    "touch",
    "warm",
]

_T = TypeVar("_T")
_CHUNK: Final = 1 << 20
_OWN_MIB: Final = 40
"""An interpreter with numpy and the formats; what is measured takes more."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one command took."""

    seconds: float
    """Of the process, from its start to its end."""
    cpu_seconds: float
    """That it computed and the system worked for it: what other users of the machine leave be."""
    inside: float | None
    """Seconds of its work alone, where it says so as JSON: without starting and importing."""
    peak_mib: float
    said: str
    """Its standard output."""


@dataclass(frozen=True, slots=True)
class Series:
    """Runs of one command."""

    runs: Sequence[Run]

    @property
    def best(self) -> float:
        """Least seconds of a run."""
        return min(run.seconds for run in self.runs)

    @property
    def cpu_seconds(self) -> float:
        """Least seconds of computing."""
        return min(run.cpu_seconds for run in self.runs)

    @property
    def inside(self) -> float | None:
        """Least seconds of work alone."""
        found = [run.inside for run in self.runs if run.inside is not None]
        return min(found, default=None)

    @property
    def peak_mib(self) -> float:
        """Most resident memory of a run."""
        return max(run.peak_mib for run in self.runs)


def python(module: str, *words: object) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *map(str, words)]


def cat_command(files: Sequence[Path], out: Path, *, synced: bool = False) -> list[str]:
    """Return the command that copies files into one, and flushes it to the disk if asked to."""
    script = 'out=$1; shift; cat "$@" >"$out"' + (' && sync "$out"' if synced else "")
    return ["sh", "-c", script, "sh", str(out), *map(str, files)]


def cats_command(files: Sequence[Path], out: Path) -> list[str]:
    """Return the command that copies two halves of files at once, into two files of a folder."""
    script = 'out=$1; shift; cat "$@" >"$out"'
    halves = [
        shlex.join(["sh", "-c", script, "sh", str(out / str(number)), *map(str, files[number::2])])
        for number in range(2)
    ]
    words = shlex.quote(str(out))
    return ["sh", "-c", f"mkdir {words} && {{ {halves[0]} & {halves[1]} && wait $!; }}"]


def run(command: Sequence[str]) -> Run:
    """Run a command and wait for it.

    Raises
    ------
    RuntimeError
        If it fails; the message is what it said last.
    """
    root = Path(__file__).resolve().parent.parent
    # As in an installation: what is imported has been compiled before.
    compiled = str(Path(tempfile.gettempdir()) / "shardspec-benchmarks-compiled")
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        child = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        said = out.read().decode(errors="replace")
        if child.returncode:
            last = errors.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"{' '.join(command)[:300]} ended with {child.returncode}: {last}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(seconds, cpu, _seconds_said(said), usage.ru_maxrss / 1024, said)


def _seconds_said(said: str) -> float | None:
    try:
        found = json.loads(said)
    except ValueError:
        return None
    return float(found["seconds"]) if isinstance(found, dict) and "seconds" in found else None


@contextmanager
def small() -> Iterator[None]:
    """Make sure that the peaks measured in the block are those of the children.

    Raises
    ------
    RuntimeError
        If this process has grown larger than an interpreter.
    """
    yield
    # Of this program alone: `getrusage` begins with the peak of what started it.
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    if peak > _OWN_MIB:
        raise RuntimeError(f"the process that measures has itself had {peak:.0f} MiB")


def shuffled(commands: Mapping[str, _T]) -> list[tuple[str, _T]]:
    """Return commands with their names in any order: what ran before is not always the same."""
    return random.sample(list(commands.items()), len(commands))


def touch(folder: Path, num_bytes: int) -> None:
    """Have the system lay hands on memory for so many bytes of files, and let go of it.

    A virtual machine gives memory that lies free back to its host within seconds, and getting it
    again takes several times as long as using it. Every core does so, for what one of them has let
    go of is slow to get for another; all at once, so that none of it lies free for long.
    """
    cores = sorted(os.sched_getaffinity(0))
    chunk, all_have_it = bytes(_CHUNK), Barrier(len(cores))

    def touch_from(core: int) -> None:
        # Of several threads, this binds the one that calls it.
        os.sched_setaffinity(0, {core})
        place = folder / f"touched-{core}"
        try:
            with place.open("wb", buffering=0) as file:
                for _ in range(0, num_bytes, _CHUNK):
                    file.write(chunk)
            all_have_it.wait()
        except BaseException:
            all_have_it.abort()
            raise
        finally:
            # It must not hide what went wrong before.
            with suppress(OSError):
                place.unlink()

    with ThreadPoolExecutor(len(cores)) as pool:
        futures = [pool.submit(touch_from, core) for core in cores]
        errors = [error for future in futures if (error := future.exception()) is not None]
    # Where one fails, the others wait for it in vain: that is not what went wrong.
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error


def warm(files: Sequence[Path]) -> None:
    """Read files, so that the page cache holds them."""
    room = bytearray(_CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def evict(files: Sequence[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def empty(place: Path) -> None:
    """Remove an output, file or directory, if it is there."""
    if place.is_dir():
        for path in sorted(place.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        place.rmdir()
    else:
        place.unlink(missing_ok=True)
