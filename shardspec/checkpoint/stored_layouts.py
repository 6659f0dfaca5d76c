"""A checkpoint as the source of a reshard plan: its catalog, boxes at files."""

from collections.abc import Iterable
from pathlib import Path

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import Catalog, distinct
from shardspec.checkpoint.open import open_checkpoint
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.resharding.copies import StoredLayout

__all__ = ["layouts_of_checkpoint", "stored_layouts"]


def stored_layouts(catalog: Catalog, first: int) -> tuple[dict[str, StoredLayout], dict[int, str]]:
    """Return where a checkpoint has its tensors, and the names of files by number.

    Parameters
    ----------
    catalog
        The checkpoint.
    first
        The number of its first file, behind the ids of all devices.

    Raises
    ------
    LayoutError
        If a reduction is pending.
    """
    outlines = [catalog.outline(name) for name in catalog.names]
    paths = sorted({box.path for tensor in outlines for box in tensor.boxes})
    numbers = {path: first + place for place, path in enumerate(paths)}
    files = DeviceMesh(list(numbers.values()), (len(numbers),)) if numbers else None
    found: dict[str, StoredLayout] = {}
    known: dict[object, StoredLayout] = {}
    for tensor in outlines:
        if tensor.pending:
            raise LayoutError(
                f"{tensor.name!r} is stored with a reduction pending; merge or reshard the "
                "checkpoint first, which finishes it"
            )
        key = (tensor.shape, tensor.dtype, tensor.boxes)
        if key not in known:
            held: dict[int, list[Box]] = {}
            for box in distinct(tensor):
                held.setdefault(numbers[box.path], []).append(box.box)
            mesh = files or DeviceMesh([first], (1,))
            known[key] = StoredLayout(mesh, held, tensor.shape, tensor.dtype)
        found[tensor.name] = known[key]
    return found, {number: path.name for path, number in numbers.items()}


def layouts_of_checkpoint(place: Path | str, meshes: Iterable[DeviceMesh]) -> dict[str, Layout]:
    """Return where a checkpoint has its tensors; its files come behind the ids of all devices."""
    first = max((device for mesh in meshes for device in mesh.ids), default=-1) + 1
    return {**stored_layouts(open_checkpoint(place), first)[0]}
