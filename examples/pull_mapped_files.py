"""A generator reads new weights from memory-mapped files, by rows of transfers and numpy alone.

    python examples/pull_mapped_files.py

Every rank of a trainer keeps its shards in one file, as in shared memory. A generator with another
layout maps the files, and copies the bytes of its shards, row by row.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

from shardspec import DeviceMesh, DTensor, ReshardPlan, plan_reshard


def write(folder: Path, plan: ReshardPlan, state: dict[str, DTensor]) -> dict[tuple[int, int], int]:
    """Write the shards of every trainer rank; return (rank, tensor) -> start in the file."""
    starts = {}
    for rank in plan.moves[0].source.mesh.ids:
        with (folder / f"rank-{rank}").open("wb") as file:
            for place, move in enumerate(plan.moves):
                starts[rank, place] = file.tell()
                file.write(state[move.source_name].shards[rank].numpy().tobytes())
    return starts


def pull(
    rows: np.ndarray,
    folder: Path,
    starts: dict[tuple[int, int], int],
    shards: list[np.ndarray],
) -> int:
    """Fill shards, flat bytes by tensor, as rows say; return the number of copied bytes."""
    files = {
        rank: np.memmap(folder / f"rank-{rank}", np.uint8, "r")
        for rank in np.unique(rows["sender"])
    }
    for row in rows:
        start = starts[row["sender"], row["tensor"]] + row["source_offset"]
        size = (row["count"], row["run_bytes"])
        source = files[row["sender"]][int(start) :]
        target = shards[row["tensor"]][row["target_offset"] :]
        window = np.lib.stride_tricks.as_strided
        window(target, size, (row["target_step"], 1))[...] = window(
            source, size, (row["source_step"], 1)
        )
    return int((rows["run_bytes"] * rows["count"]).sum())


def main() -> None:
    """Write, read, and compare with the results of running the plan."""
    trainer = DeviceMesh(range(4), (4,), axis_names=("fsdp",))
    engine = DeviceMesh([4, 5], (2,), axis_names=("tp",))
    whole = {"up.weight": torch.randn(64, 48), "down.weight": torch.randn(48, 64)}
    state = {name: DTensor(value, trainer, "[S0,R]") for name, value in whole.items()}
    plan = plan_reshard(state, (engine, {"up.*": "[S(tp),R]", "down.*": "[R,S(tp)]"}))
    wanted = plan.run(state)
    with tempfile.TemporaryDirectory() as name:
        starts = write(Path(name), plan, state)
        for device in engine.ids:
            shapes = [move.target.local_shape(device) for move in plan.moves]
            shards = [np.empty(4 * shape[0] * shape[1], np.uint8) for shape in shapes]
            rows = plan.transfers(device)
            copied = pull(rows, Path(name), starts, shards)
            same = all(
                torch.equal(
                    torch.from_numpy(shard.view(np.float32)).view(shape),
                    wanted[move.target_name].shards[device],
                )
                for shard, shape, move in zip(shards, shapes, plan.moves, strict=True)
            )
            print(f"device {device}: {len(rows)} rows, {copied} bytes, same as the plan: {same}")


if __name__ == "__main__":
    main()
