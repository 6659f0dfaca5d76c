"""Locates tensors in the files of a checkpoint, and writes transfers for other tools to execute."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

import numpy as np
import numpy.typing as npt

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import Catalog, distinct, row_major_strides
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.resharding.rows import FileRegion, row_major_steps, transfer_rows
from shardspec.resharding.stages import StateCopies, StoredLayout

TRANSFERS_FORMAT: Final = "shardspec-transfers-1"
INDEX: Final = "transfers.json"
"""Index of names, written last."""


def file_numbers(catalog: Catalog, first: int) -> dict[StoragePath, int]:
    """Return the files of a checkpoint, numbered from `first` on, after the ids of all devices."""
    outlines = (catalog.outline(name) for name in catalog.names)
    paths = sorted({box.path for tensor in outlines for box in tensor.boxes})
    return {path: first + at for at, path in enumerate(paths)}


def file_regions(catalog: Catalog, first: int) -> dict[str, list[FileRegion]]:
    """Return by name the positions of the boxes of tensors, in files numbered from `first` on."""
    numbers = file_numbers(catalog, first)
    regions = {}
    for name in catalog.names:
        tensor = catalog.tensor(name)
        if any(stored.computed for stored in tensor.boxes):
            raise CheckpointError(
                f"{catalog.directory}: tensor {name!r} is made of codes and scales, which no copy "
                "of bytes does; merge or reshard the checkpoint with a dtype first"
            )
        regions[name] = [
            FileRegion(
                numbers[stored.path],
                stored.box,
                stored.offset,
                stored.strides
                or row_major_strides(box_shape(stored.box), item_bytes(tensor.dtype)),
            )
            for stored in distinct(tensor)
        ]
    return regions


def write_transfers(
    plan: StateCopies,
    directory: PurePath | str,
    files: Mapping[str, Sequence[FileRegion]] | None = None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Write the transfers and the shard shapes of every device of a plan to a directory.

    Writes one ``.npz`` per device, and an index of names, dtypes and shapes. `files` has the
    positions of tensors in files, `names` the file names. Raises CheckpointError if the directory
    is not empty.
    """
    devices = [device for device in plan.devices if device not in plan.files]
    rows = transfer_rows(plan, devices[0], "both", files=files)  # refuses plans before writing
    place = storage_path(directory)
    with place.errors("written"):
        if place.exists() and (not place.is_dir() or place.list()):
            raise CheckpointError(f"{place} exists; give a new or an empty directory")
        place.make_directory()
    for device in devices:
        if device != devices[0]:
            rows = transfer_rows(plan, device, "both", files=files)
        content, digest = io.BytesIO(), np.frombuffer(plan.digest.encode(), np.uint8)
        arrays = {"rows": rows, "digest": digest, **_shards(plan, device)}
        # numpy types its own option among the names of arrays.
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
        _write(place / f"device-{device}.npz", content.getvalue())
    index = {
        "format": TRANSFERS_FORMAT,
        "digest": plan.digest,
        "devices": devices,
        "files": {str(number): name for number, name in (names or {}).items()},
        "padded": list(plan.padded),
        "tensors": [
            {
                "source": move.source_name,
                "target": move.target_name,
                "dtype": move.target.dtype,
                "source_shape": list(move.source.global_shape),
                "target_shape": list(move.target.global_shape),
            }
            for move in plan.moves
        ],
    }
    _write(place / INDEX, json.dumps(index).encode())


def _write(path: StoragePath, content: bytes) -> None:
    path.write(len(content), [content], overwrite=False)


def _shards(plan: StateCopies, device: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return shape and byte strides of a device's shard of every tensor; zeros without a shard."""
    dims = [len(layout.global_shape) for m in plan.moves for layout in (m.source, m.target)]
    table = np.zeros((4, len(plan.moves), max(dims, default=0)), np.int64)
    shapes_and_steps: dict[Layout, tuple[Sequence[int], Sequence[int]]] = {}
    for place, move in enumerate(plan.moves):
        for side, layout in enumerate((move.source, move.target)):
            if isinstance(layout, StoredLayout) or device not in layout.mesh:
                continue
            if layout not in shapes_and_steps:
                shapes_and_steps[layout] = (
                    layout.local_shape(device),
                    row_major_steps(layout, device),
                )
            for of, numbers in enumerate(shapes_and_steps[layout]):
                table[2 * side + of, place, : len(numbers)] = numbers
    names = ("source_shapes", "source_strides", "target_shapes", "target_strides")
    return dict(zip(names, table, strict=True))
