"""Layouts as the chunks that checkpoints list: an offset and sizes per device, and back."""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from shardspec.boxes import box_shape
from shardspec.errors import LayoutError, LossyConversionError
from shardspec.layout.graph import count_states, space_of, spec_of
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh

__all__ = ["Chunk", "from_chunks", "to_chunks"]

Chunk: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one entry a dim; as in torch's `ChunkStorageMetadata`."""

_MOST_SPECS: Final = 20_000


def to_chunks(layout: Layout) -> dict[int, Chunk]:
    """Return the chunk of every device.

    Raises `LossyConversionError` if a reduction is pending: a chunk is a part of a tensor, not an
    addend.

    Examples
    --------
    >>> to_chunks(Layout(DeviceMesh(range(2), (2,)), "[S0,R]", (5, 3), "f32"))
    {0: ((0, 0), (3, 3)), 1: ((3, 0), (2, 3))}
    """
    if layout.spec.partials:
        raise LossyConversionError(
            f"{layout.spec}: chunks cannot say that a reduction is pending; finish it first"
        )
    return {
        device: (tuple(lo for lo, _ in box), box_shape(box))
        for device, box in layout.boxes().items()
    }


def from_chunks(
    chunks: Mapping[int, Chunk], mesh: DeviceMesh, global_shape: Sequence[int], dtype: object
) -> Layout:
    """Return the layout whose devices hold these chunks.

    Of several specs that say the same of this tensor, that with the fewest sharded dims is taken,
    then the first in the order of the transition graph. Offsets of an empty chunk mean nothing.

    Raises `LayoutError` if a device of the mesh has no chunk or another one is named, or the mesh
    has so many axes that its specs cannot all be tried; `LossyConversionError` if no spec shards
    the tensor so.

    Examples
    --------
    >>> chunks = {0: ((0, 0), (3, 3)), 1: ((3, 0), (2, 3))}
    >>> str(from_chunks(chunks, DeviceMesh(range(2), (2,)), (5, 3), "f32").spec)
    '[S0,R]'
    """
    if set(chunks) != set(mesh.ids):
        raise LayoutError(
            f"chunks of the devices {sorted(chunks)} for a mesh of the devices {sorted(mesh.ids)}"
        )
    shape = tuple(global_shape)
    count = count_states(mesh.ndim, len(shape), 0)
    if count > _MOST_SPECS:
        raise LayoutError(f"mesh {mesh} has {count} specs for {len(shape)} dims, too many to try")
    held = {device: (tuple(at), tuple(sizes)) for device, (at, sizes) in chunks.items()}
    for state in space_of(mesh.ndim, len(shape), ()).states:
        layout = Layout(mesh, spec_of(state), shape, dtype)
        if _filled(to_chunks(layout)) == _filled(held):
            return layout
    raise LossyConversionError(
        f"no spec on mesh {mesh} shards a tensor of shape {list(shape)} into these chunks: "
        f"{dict(list(chunks.items())[:4])}{' …' if len(chunks) > 4 else ''}"
    )


def _filled(chunks: Mapping[int, Chunk]) -> dict[int, Chunk]:
    return {device: chunk for device, chunk in chunks.items() if 0 not in chunk[1]}
