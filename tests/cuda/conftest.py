"""Collected only where there is a GPU: `make test-cuda` runs these, `make test` has none to run."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
