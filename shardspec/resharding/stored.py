"""Where a checkpoint has a tensor, as a source of reshard plans: boxes at files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardspec.boxes import Box, box_size
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["StoredLayout"]


@dataclass(frozen=True, slots=True, init=False)
class StoredLayout(Layout):
    """Which boxes of a tensor lie in which files; files have numbers, as devices have.

    Examples
    --------
    >>> files = DeviceMesh([8, 9], (2,))
    >>> stored = StoredLayout(files, {8: [((0, 2),)], 9: [((2, 3),)]}, (3,), "int8")
    >>> stored.local_boxes(9)
    [((2, 3),)]
    """

    held: tuple[tuple[int, tuple[Box, ...]], ...]
    """Per file its boxes."""
    _boxes: Mapping[int, Sequence[Box]] = field(compare=False, repr=False)

    def __init__(
        self,
        files: DeviceMesh,
        held: Mapping[int, Sequence[Box]],
        global_shape: Sequence[int],
        dtype: object,
    ) -> None:
        Layout.__init__(self, files, ShardingSpec(len(global_shape)), global_shape, dtype)
        boxes = {file: tuple(found) for file, found in held.items()}
        object.__setattr__(self, "held", tuple(sorted(boxes.items())))
        object.__setattr__(self, "_boxes", boxes)
        object.__setattr__(self, "_hash", hash((self.held, self.global_shape, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        return StoredLayout, (self.mesh, dict(self._boxes), self.global_shape, self.dtype)

    def local_boxes(self, physical_id: int) -> list[Box]:
        """Return what a file holds."""
        return [box for box in self._boxes.get(physical_id, ()) if box_size(box)]
