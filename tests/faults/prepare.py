"""`python -m tests.faults.prepare WHAT FOLDER` writes, with torch, what cases spoil without it."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.faults.samples import arrays


def torch_files(place: Path) -> None:
    """Write the sample as one file of torch.save, and as a directory of torch's checkpoints."""
    state = {name: torch.from_numpy(array) for name, array in arrays().items()}
    torch.save(state, place / "whole.pt")
    with warnings.catch_warnings():
        # That there is one process only.
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=place / "dcp")


if __name__ == "__main__":
    {"torch_files": torch_files}[sys.argv[1]](Path(sys.argv[2]))
