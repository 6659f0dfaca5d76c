"""torch's operators on uneven and empty shards, over several axes, and on pending sums."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.faults.harness import Case

__all__ = ["operators"]

_MESHES = ((2, 2), (2, 3), (1, 2), (3, 2), (5, 1))


def _run(seed: int) -> None:
    # Other rows have to do without torch, which these import.
    import torch

    from shardspec.mesh.device_mesh import DeviceMesh
    from tests.dist.operation_runs import made_up
    from tests.operation_table import TABLE
    from tests.simulated_tensors import all_specs, check

    torch.set_num_threads(1)
    draw = random.Random(seed)
    # Others have layouts of their own: torch searches for seconds where a sharded dim is flattened.
    known = [operation for operation in TABLE if not operation.layouts]
    operation = known[seed % len(known)]
    shape = draw.choice(_MESHES)
    mesh = DeviceMesh(range(shape[0] * shape[1]), shape)
    specs = []
    for place, sizes in enumerate(operation.shapes):
        # Indices are not added up.
        is_index = place in operation.integers
        specs.append(draw.choice([s for s in all_specs(len(sizes)) if not (is_index and "P" in s)]))
    why = check(operation.function, made_up(operation, seed), mesh, specs)
    remedies = ("redistribut", "to_global()", "torchrun", "name the dims", "detach")
    assert not why or ("\n" not in why and any(remedy in why for remedy in remedies)), why


def operators(_place: Path, whole: bool) -> Iterator[Case]:
    """Compare value and gradient with those of whole tensors, on layouts drawn at random."""
    for seed in range(0, 400, 1 if whole else 99):
        yield Case(f"operation {seed}", partial(_run, seed))
