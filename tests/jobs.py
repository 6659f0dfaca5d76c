"""Examples and commands as torchrun starts them, or alone: in forks of one process.

So torch is imported once for all of them.
"""

import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from click.testing import CliRunner

from shardspec.cli.main import cli
from tests.dist.processes import run_ranks

__all__ = ["EXAMPLES", "run_alone", "run_command", "run_examples", "run_python"]

EXAMPLES = Path(__file__).parent.parent / "examples"


def _become_rank(rank, world):
    """Set the variables that torchrun sets for a process."""
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in job.items()}
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"


def _play(_rank, folder, programs):
    """Run programs one after another, all warnings as errors."""
    # As a newcomer has it; the tests of steps check that what they make is written over.
    os.environ.pop("SHARDSPEC_CHECK", None)
    os.environ.pop("COLUMNS", None)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.chdir(folder)
    warnings.simplefilter("error")
    for number, (path, *arguments) in enumerate(programs):
        for descriptor, kind in ((1, "out"), (2, "err")):
            file = os.open(f"{folder}.{number}.{kind}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(file, descriptor)
            os.close(file)
        # A line at a time, in the order in which the ranks print them.
        with os.fdopen(os.dup(1), "w", 1) as sys.stdout, os.fdopen(os.dup(2), "w", 1) as sys.stderr:
            sys.argv = [str(path), *map(str, arguments)]
            runpy.run_path(str(path), run_name="__main__")
            if dist.is_initialized():
                dist.barrier()


def _play_in_job(rank, world, folder, programs):
    """Run programs as one rank; the job's group is made before the first, ended after the last."""
    _become_rank(rank, world)
    dist.init_process_group = lambda *args: None  # noqa: ARG005  # torch's names for them
    dist.destroy_process_group = lambda group=None: None  # noqa: ARG005
    _play(rank, folder, programs)


def _printed(tmp_path, programs):
    """Return what each program printed, and check that they left nothing."""
    assert list((tmp_path / "job").iterdir()) == []
    printed = []
    for number in range(len(programs)):
        output, errors = (tmp_path / f"job.{number}.{kind}" for kind in ("out", "err"))
        assert errors.read_text("utf-8") == "", "an example warns"
        printed.append(output.read_text("utf-8"))
    return printed


def run_examples(world, tmp_path, programs):
    """Run programs, each with its arguments, in one job; return what each of them printed."""
    folder = tmp_path / "job"
    folder.mkdir()
    run_ranks(world, tmp_path, _play_in_job, world, folder, programs)
    return _printed(tmp_path, programs)


def run_alone(tmp_path, programs):
    """Run programs, each with its arguments, in one process that is of no job."""
    folder = tmp_path / "job"
    folder.mkdir()
    run_ranks(1, tmp_path, _play, folder, programs, backend=None)
    return _printed(tmp_path, programs)


class CommandResult(NamedTuple):
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


def _command(rank, world, folder, environment, arguments):
    _become_rank(rank, world)
    os.environ |= environment
    os.chdir(folder)
    done = CliRunner().invoke(cli, arguments, prog_name="shardspec")
    return CommandResult(done.exit_code, done.stdout, done.stderr)


def run_command(
    world: int, tmp_path, *arguments: object, environment: Mapping[str, str] | None = None
) -> list[CommandResult]:
    """Run `shardspec` in each process of a job; return how it ended in each."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(environment or {})}
    words = list(map(str, arguments))
    return run_ranks(world, tmp_path, _command, world, tmp_path, variables, words, backend=None)


def run_python(*args, cwd):
    """Run Python as a user does, all warnings as errors; return what it printed, and its errors."""
    # As on a plain terminal: not part of a job, and not wider than usual.
    left_out = ("COLUMNS", "RANK", "WORLD_SIZE")
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        # One thread each; torchrun says so, at length, where nobody has.
        env={
            **{key: value for key, value in os.environ.items() if key not in left_out},
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
