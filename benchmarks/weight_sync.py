"""Receipts of a sync, and the pause of an asynchronous save, in processes that talk over gloo.

``python -m benchmarks.weight_sync`` runs one reshard plan without a receipt, with one, and digests
the same bytes alone, by turns in the same processes; then it saves a state dict in the background
by `save_sharded` and by torch's DCP, beside one copy of it in memory. The time of a turn is that of
the slowest process.
"""

import argparse
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard

from benchmarks.state import in_processes
from shardspec import DeviceMesh, Layout, plan_reshard, save_sharded
from shardspec.resharding.digests import TensorDigest
from shardspec.tensor.shards import bits_of
from shardspec.text import table_text

__all__ = ["main"]

_RANKS: Final = 4
_COLUMNS: Final = 4096


def _slowest(run: Callable[[], object]) -> float:
    """Return the seconds of a call that all processes make, of the slowest of them."""
    dist.barrier()
    started = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _by_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way; the first turn does not count."""
    taken: dict[str, list[float]] = defaultdict(list)
    for turn in range(1 + rounds):
        for name, run in ways.items():
            seconds = run()
            if turn:
                taken[name].append(seconds)
    return {name: median(seconds) for name, seconds in taken.items()}


def receipts(rank: int, num_bytes: int, rounds: int) -> dict[str, float]:
    """Return seconds of syncs from rows to columns of bf16, without a receipt and with one."""
    torch.set_num_threads(1)
    mesh = DeviceMesh(range(_RANKS), (_RANKS,))
    rows = num_bytes // (16 * 2 * _COLUMNS)
    shapes = {f"layers.{at}.weight": (rows, _COLUMNS) for at in range(16)}
    before = {name: Layout(mesh, "[S0,R]", shape, "bfloat16") for name, shape in shapes.items()}
    after = {name: Layout(mesh, "[R,S0]", shape, "bfloat16") for name, shape in shapes.items()}
    numbers = torch.Generator().manual_seed(rank)
    state, out = (
        {
            name: torch.randn(layout.local_shape(rank), generator=numbers).bfloat16()
            for name, layout in layouts.items()
        }
        for layouts in (before, after)
    )
    plan = plan_reshard(before, after)

    def digests() -> None:
        """Digest what this rank has, on both sides, as a receipt has to."""
        for layouts, shards in ((before, state), (after, out)):
            for name, shard in shards.items():
                layout = layouts[name]
                TensorDigest.of_box(
                    bits_of(shard), layout.box(rank), layout.global_shape, "bfloat16"
                )

    return _by_turns(
        {
            "without": lambda: _slowest(lambda: plan.run(state, out)),
            "with a receipt": lambda: _slowest(lambda: plan.run(state, out, receipt=True)),
            "digests alone": lambda: _slowest(digests),
        },
        rounds,
    )


def saves(rank: int, num_bytes: int, rounds: int, folder: str) -> dict[str, float]:
    """Return the seconds until asynchronous saves return, and those of one copy in memory."""
    torch.set_num_threads(1)
    count = 16
    rows = num_bytes // (count * 4 * _COLUMNS)
    mesh = TorchMesh("cpu", range(_RANKS))
    state: dict[str, Any] = {
        f"layers.{at}.weight": TorchDTensor.from_local(
            torch.full((rows // _RANKS, _COLUMNS), float(rank)), mesh, [Shard(0)], run_check=False
        )
        for at in range(count)
    }
    place = Path(folder)

    def copy() -> float:
        return _slowest(lambda: [tensor.to_local().clone() for tensor in state.values()])

    def ours() -> float:
        pending: list[Any] = []
        seconds = _slowest(
            lambda: pending.append(
                save_sharded(state, place / "ours", asynchronous=True, overwrite=True)
            )
        )
        pending[0].wait()
        return seconds

    def theirs() -> float:
        if rank == 0:
            shutil.rmtree(place / "dcp", ignore_errors=True)
        pending: list[Any] = []
        seconds = _slowest(lambda: pending.append(async_save(state, checkpoint_id=place / "dcp")))
        pending[0].result()
        return seconds

    return _by_turns({"a copy": copy, "save_sharded": ours, "DCP, async_save": theirs}, rounds)


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of the whole state dict")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    chosen = parser.parse_args()
    num_bytes = chosen.mib << 20
    taken = in_processes(_RANKS, receipts, num_bytes, chosen.rounds)
    both = taken["without"] + taken["digests alone"]
    rows = [(name, f"{seconds:.3f}", f"{seconds / both:.2f}") for name, seconds in taken.items()]
    print(f"a sync of {chosen.mib} MiB from rows to columns, {_RANKS} ranks")
    print(table_text(("", "s", "÷ (without + digests alone)"), rows))
    with tempfile.TemporaryDirectory(dir=chosen.memory) as folder:
        taken = in_processes(_RANKS, saves, num_bytes, chosen.rounds, folder)
    best = taken["a copy"]
    rows = [(name, f"{seconds:.3f}", f"{seconds / best:.2f}") for name, seconds in taken.items()]
    print(f"the pause of an asynchronous save of {chosen.mib} MiB, {_RANKS} ranks")
    print(table_text(("", "s", "÷ a copy"), rows))


if __name__ == "__main__":
    main()
