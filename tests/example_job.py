"""Runs examples one after another in the processes of one job, so that torch starts only once.

``torchrun --standalone --nproc_per_node 4 tests/example_job.py EXAMPLE EXAMPLE …``

The group of the job is made by the first of them and ended after the last: gloo does not meet a
second time in one job.
"""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist


def main():
    make, end = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = lambda *args: None if dist.is_initialized() else make(*args)
    dist.destroy_process_group = lambda group=None: None  # noqa: ARG005  # torch's name for it
    for path in sys.argv[1:]:
        if os.environ["RANK"] == "0":
            print(f"## {Path(path).name}", flush=True)
        runpy.run_path(path, run_name="__main__")
        dist.barrier()
    end()


if __name__ == "__main__":
    main()
