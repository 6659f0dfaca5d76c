"""The command shardspec, run as users run it; times and memory."""

import os
import resource
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from typing import NamedTuple, NoReturn

__all__ = ["Measured", "in_process", "leave", "measured", "shardspec"]


class Measured(NamedTuple):
    """What a command printed, how long it took, and the most memory it had."""

    output: str
    seconds: float
    peak_bytes: int


def shardspec(*arguments: str | Path, code: int = 0) -> str:
    """Run the command and return what it printed; fail if it does not end with `code`."""
    command = [sys.executable, "-m", "shardspec", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, f"{' '.join(command)}: {done.returncode}\n{said}"
    return done.stdout if code == 0 else said


def in_process(*arguments: str | Path) -> None:
    """Run the command in this process, which has loaded what it needs; fail if it does."""
    from click.testing import CliRunner

    from shardspec.cli.main import cli

    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == 0, f"{arguments}: {done.exit_code}\n{done.output}"


def measured(command: list[str]) -> Measured:
    """Run a command from a process of its own, which asks the system for its child's peak."""
    call = [sys.executable, "-m", "tests.tools.commands", *command]
    done = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    *lines, last = done.stdout.splitlines()
    seconds, peak = last.split()
    return Measured("\n".join(lines), float(seconds), int(peak))


def leave() -> NoReturn:
    """End a process of a job: first its groups, when all are there, then itself.

    The interpreter is not finalised. A thread of gloo may still have a tensor to release, also
    after the groups have ended, and the process is aborted if it comes when Python is gone.
    """
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    # Those that write checkpoints for Megatron-core would stay, and keep what they write to open.
    for child in active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(command: list[str]) -> int:
    start = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    seconds = time.perf_counter() - start
    # Linux counts it in KiB.
    peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"{seconds} {peak}")
    return code


if __name__ == "__main__":
    raise SystemExit(_run(sys.argv[1:]))
