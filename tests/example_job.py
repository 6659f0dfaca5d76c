"""Examples as jobs: in forks of one process, so that torch is imported once for all of them."""

import os
import runpy
import sys
import warnings

import torch
import torch.distributed as dist

from tests.dist.processes import run_ranks

__all__ = ["run_examples"]


def _play(rank, world, folder, programs):
    """Run programs as one rank of a job that torchrun has started, all warnings as errors.

    The group of the job is made before the first of them and ended after the last.
    """
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in job.items()}
    os.environ |= {"TORCHELASTIC_RUN_ID": "examples", "OMP_NUM_THREADS": "1"}
    # As a newcomer has it; the tests of steps check that what they make is written over.
    os.environ.pop("SHARDSPEC_CHECK", None)
    torch.set_num_threads(1)
    os.chdir(folder)
    warnings.simplefilter("error")
    dist.init_process_group = lambda *args: None  # noqa: ARG005  # torch's names for them
    dist.destroy_process_group = lambda group=None: None  # noqa: ARG005
    for number, (path, *arguments) in enumerate(programs):
        for descriptor, kind in ((1, "out"), (2, "err")):
            file = os.open(f"{folder}.{number}.{kind}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(file, descriptor)
            os.close(file)
        # A line at a time, in the order in which the ranks print them.
        with os.fdopen(os.dup(1), "w", 1) as sys.stdout, os.fdopen(os.dup(2), "w", 1) as sys.stderr:
            sys.argv = [str(path), *map(str, arguments)]
            runpy.run_path(str(path), run_name="__main__")
            dist.barrier()


def run_examples(world, tmp_path, programs):
    """Run programs, each with its arguments, in one job; return what each of them printed."""
    folder = tmp_path / "job"
    folder.mkdir()
    run_ranks(world, tmp_path, _play, world, folder, programs)
    assert list(folder.iterdir()) == []
    printed = []
    for number in range(len(programs)):
        output, errors = (tmp_path / f"job.{number}.{kind}" for kind in ("out", "err"))
        assert errors.read_text("utf-8") == "", "an example warns"
        printed.append(output.read_text("utf-8"))
    return printed
