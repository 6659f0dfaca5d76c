"""Defines layouts: mesh, spec, shape and dtype of a tensor, which give the box of each device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard

from shardspec.boxes import Box, box_size, split_interval
from shardspec.dtypes import dtype_name, is_floating, item_bytes
from shardspec.errors import AxisError, DTypeError, LayoutError
from shardspec.layout.picture import Picture, ids_text, notebook_html
from shardspec.layout.placements import is_placements, own_placements, spec_of_placements
from shardspec.layout.spec import DimSpec, Part, ShardingSpec
from shardspec.mesh.device_ids import whole_numbers
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import counted, shown

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

OwnSpec: TypeAlias = ShardingSpec | str
"""A spec, or its notation."""
SpecLike: TypeAlias = ShardingSpec | str | Sequence["Placement"]
"""A spec, its notation, or torch's placements, one per mesh axis."""

_MAX_ELEMENTS: Final = 2**63 - 1


def resolve_axes(spec: ShardingSpec, mesh: DeviceMesh) -> ShardingSpec:
    """Return the spec with axes as numbers; raises `AxisError` for axes that `mesh` lacks."""
    axes = spec.axes
    if all(isinstance(axis, int) and 0 <= axis < mesh.ndim for axis in axes):
        return spec
    try:
        return spec.with_axes(mesh.axis)
    except AxisError as error:
        raise AxisError(f"spec {spec}: {error}") from None


def is_own_spec(spec: SpecLike) -> TypeGuard[OwnSpec]:
    """Return True for a spec or its notation, False for torch's placements."""
    return isinstance(spec, str | ShardingSpec) or not is_placements(spec)


def checked_mesh(mesh: object) -> DeviceMesh:
    """Return the mesh; raises `LayoutError` if it is not shardspec's `DeviceMesh`."""
    if mesh is None:
        raise LayoutError("no mesh: give device_mesh, such as DeviceMesh(range(4), (2, 2))")
    if not isinstance(mesh, DeviceMesh):
        kind = type(mesh)
        name = "torch DeviceMesh" if kind.__module__.startswith("torch.") else kind.__name__
        raise LayoutError(
            f"the mesh is a {name}; give a DeviceMesh of shardspec, as by "
            "DeviceMesh.from_torch(mesh)"
        )
    return mesh


def spec_on(mesh: DeviceMesh, spec: SpecLike, dims: int | Sequence[int]) -> ShardingSpec:
    """Return a spec, notation or placements as a spec with the axis numbers of `mesh`.

    `dims` is the number of the tensor's dims, or their sizes; strided shards may need the sizes.
    Raises what `ShardingSpec.parse`, `resolve_axes` and `spec_of_placements` raise.

    >>> str(spec_on(DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp")), "[S(tp),R]", 2))
    '[S1,R]'
    """
    checked_mesh(mesh)
    if is_own_spec(spec):
        return resolve_axes(ShardingSpec.of(spec), mesh)
    return spec_of_placements(own_placements(spec), dims, mesh.shape)


def chosen_spec(sharding_spec: SpecLike | None, placements: SpecLike | None) -> SpecLike | None:
    """Return the one of two synonymous arguments that is not None; None if both are."""
    if sharding_spec is not None and placements is not None:
        raise LayoutError("sharding_spec and placements mean the same; give one of the two")
    return placements if sharding_spec is None else sharding_spec


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """The box of a global tensor that each device of a mesh has.

    Boxes agree with `torch.distributed.tensor`: each axis, from the major one inward, splits like
    `torch.chunk`, so 7 rows on 4 devices are 2, 2, 2 and 1. If a device gets nothing of a dim, its
    interval is ``(size, size)``, as in torch.

    Parameters
    ----------
    mesh, spec
        The devices, and how they share the tensor: a `ShardingSpec`, its notation, or torch's
        placements.
    global_shape
        Sizes of the global tensor; ``()`` for a scalar, zeros allowed.
    dtype
        A torch or numpy dtype, or a name such as ``"bf16"``.

    Raises
    ------
    LayoutError
        If spec and shape differ in the number of dims, a size is negative or not a whole number,
        or there is not one placement per mesh axis.
    AxisError
        If the mesh lacks an axis of the spec.
    DTypeError
        If the dtype is unknown, or a pending reduction does not exist for it.

    Examples
    --------
    >>> layout = Layout(DeviceMesh(range(4), (2, 2)), "[S01,R]", (7, 3), "bf16")
    >>> layout.box(3)
    ((6, 7), (0, 3))
    >>> [layout.local_shape(i) for i in range(4)]
    [(2, 3), (2, 3), (2, 3), (1, 3)]
    >>> Layout(DeviceMesh(range(6), (2, 3)), "[S01]", (8,), "bf16").box(2)
    ((8, 8),)
    """

    mesh: DeviceMesh
    """The devices."""
    spec: ShardingSpec
    """The spec, with axes by number."""
    global_shape: tuple[int, ...]
    """Sizes of the global tensor."""
    dtype: str
    """torch's name of the element type."""
    _hash: int = field(compare=False, repr=False)

    def __init__(
        self, mesh: DeviceMesh, spec: SpecLike, global_shape: Sequence[int], dtype: object
    ) -> None:
        checked_mesh(mesh)
        shape = whole_numbers(global_shape)
        if shape is None or min(shape, default=0) < 0:
            raise LayoutError(
                f"global shape {shown(global_shape)}: give a sequence of whole numbers from 0"
            )
        own = ShardingSpec.of(spec) if is_own_spec(spec) else spec_on(mesh, spec, shape)
        values = (mesh, *_checked(mesh, own, shape, dtype_name(dtype)))
        for name, value in zip(Layout.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Layout"], tuple[object, ...]]:
        # Rebuilt rather than restored: hashes of text differ from process to process.
        return Layout, (self.mesh, self.spec, self.global_shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.spec} of {list(self.global_shape)} {self.dtype} on {self.mesh}"

    def box(self, physical_id: int) -> Box:
        """Return the box of the global tensor that a device has.

        Raises `MeshError` for a device outside the mesh, and `LayoutError` if the device has
        several boxes; see `local_boxes`.
        """
        sides = self.intervals(physical_id)
        if any(len(side) > 1 for side in sides):
            raise LayoutError(
                f"under {self.spec} device {physical_id} has several boxes of the tensor, one per "
                "part; this function needs one box per device: redistribute to "
                f"{ShardingSpec(self.spec.dims, self.spec.dim_partition_dict)} first"
            )
        return tuple(side[0] for side in sides)

    def intervals(self, physical_id: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return for each dim the intervals of indices that a device has, in ascending order.

        Adjacent intervals are joined; ``(size, size)`` if the device has nothing of a dim.

        >>> mesh = DeviceMesh(range(2), (2,))
        >>> Layout(mesh, "[S0{4,2/1}]", (6,), "int8").intervals(0)
        (((0, 2), (4, 6)),)
        """
        at = self.mesh.coordinates(physical_id)
        sides: list[tuple[tuple[int, int], ...]] = []
        for size, cut in zip(self.global_shape, self.spec.dim_specs, strict=True):
            splits = [(self.mesh.shape[int(axis)], at[int(axis)]) for axis in cut.axes]
            if not cut.is_plain:
                sides.append(_part_intervals(cut, size, splits))
                continue
            lo, hi = 0, size
            for count, index in splits:
                lo, hi = split_interval(lo, hi, count, index)
            sides.append(((lo, hi),) if lo < hi else ((size, size),))
        return tuple(sides)

    def local_boxes(self, physical_id: int) -> list[Box]:
        """Return the boxes of the global tensor that a device has, in the order of its shard.

        >>> mesh = DeviceMesh(range(2), (2,))
        >>> Layout(mesh, "[S0{4,2},R]", (6, 3), "int8").local_boxes(1)
        [((2, 4), (0, 3)), ((5, 6), (0, 3))]
        """
        return list(product(*self.intervals(physical_id)))

    def boxes(self) -> dict[int, Box]:
        """Return the box of every device, by physical id.

        >>> Layout(DeviceMesh([5, 9], (2,)), "[S0]", (3,), "int8").boxes()
        {5: ((0, 2),), 9: ((2, 3),)}
        """
        return {physical_id: self.box(physical_id) for physical_id in self.mesh.ids}

    def local_shape(self, physical_id: int) -> tuple[int, ...]:
        """Return the shape of a device's shard."""
        return tuple(sum(hi - lo for lo, hi in side) for side in self.intervals(physical_id))

    @property
    def labelled_spec(self) -> ShardingSpec:
        """The spec with axes by name where the mesh has names.

        >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
        >>> str(Layout(mesh, "[S10,R]", (4, 4), "f32").labelled_spec)
        '[S(tp,dp),R]'
        """
        if self.mesh.axis_names is None:
            return self.spec
        names = self.mesh.axis_names
        return self.spec.with_axes(lambda axis: names[int(axis)])

    @property
    def max_local_bytes(self) -> int:
        """Bytes of the largest shard; the first device always has one of that size."""
        return prod(self.local_shape(self.mesh.ids[0])) * item_bytes(self.dtype)

    @property
    def global_bytes(self) -> int:
        """Bytes of the global tensor."""
        return prod(self.global_shape) * item_bytes(self.dtype)

    def with_spec(self, spec: SpecLike) -> "Layout":
        """Return the same tensor sharded another way."""
        return Layout(self.mesh, spec, self.global_shape, self.dtype)

    @property
    def title(self) -> str:
        """Spec, sizes, dtype and mesh, axes by name where the mesh has names."""
        return f"{self.labelled_spec} of {list(self.global_shape)} {self.dtype} on {self.mesh}"

    def drawing(self) -> Picture:
        """Return a picture of the box of each device, for text, SVG or HTML."""
        cells: dict[Box, list[int]] = {}
        idle = []
        parts = [LayoutCell(self, cell) for cell in cells_of(self)]
        for device in self.mesh.ids:
            boxes = [box for box in (part.box(device) for part in parts) if box_size(box)]
            for box in boxes:
                cells.setdefault(box, []).append(device)
            if not boxes:
                idle.append(device)
        notes = [f"nothing is held by {ids_text(idle)}"] if idle else []
        for partial in self.spec.partials:
            axis = self.mesh.axis_labels()[int(partial.axis)]
            notes.append(f"pending over axis {axis}: the {partial.op} of what its devices hold")
        return Picture(self.title, cells, notes)

    def picture(self) -> str:
        """Draw the boxes of the tensor as text, each with its devices.

        >>> print(Layout(DeviceMesh(range(4), (2, 2)), "[S1]", (10,), "f32").picture())
        [S1] of [10] float32 on 2x2
          0:5   5:10
        ┌─────┬─────┐
        │ 0,2 │ 1,3 │
        └─────┴─────┘
        """
        return self.drawing().text()

    def _repr_html_(self) -> str:
        """Draw the layout in notebooks."""
        return notebook_html(lambda: self.drawing().svg(), str(self), self.mesh.size())


@lru_cache(maxsize=4096)
def _checked(
    mesh: DeviceMesh, spec: ShardingSpec, shape: tuple[int, ...], dtype: str
) -> tuple[ShardingSpec, tuple[int, ...], str, int]:
    """Check the fields of a layout except its mesh, and return them; raises what `Layout` raises.

    Cached, because models have many tensors but few shapes and specs.
    """
    if prod(filter(None, shape)) > _MAX_ELEMENTS:
        raise LayoutError(
            f"global shape {shown(shape)} has more elements than a tensor can have, 2^63 - 1"
        )
    resolved = resolve_axes(spec, mesh)
    if resolved.dims != len(shape):
        raise LayoutError(
            f"spec {spec} is for {counted(resolved.dims, 'dim')}, but the tensor of shape "
            f"{shown(shape)} has {counted(len(shape), 'dim')}"
        )
    for dim, (size, cut) in enumerate(zip(shape, resolved.dim_specs, strict=True)):
        total = sum(part.size for part in cut.parts)
        if cut.parts and total != size:
            raise LayoutError(
                f"spec {spec}: the parts of dim {dim} add up to {total}, not to its size {size}"
            )
        devices = prod(mesh.shape[int(axis)] for axis in cut.axes)
        for part in cut.parts:
            if part.shares and devices % part.shares:
                raise LayoutError(
                    f"spec {spec}: part {part} of dim {dim} has {part.shares} shares, which do not "
                    f"divide {devices} devices; give a divisor"
                )
    for partial in resolved.partials:
        _check_reducible(partial.op, dtype)
    return resolved, shape, dtype, hash((mesh, resolved, shape, dtype))


def _part_intervals(
    cut: DimSpec, size: int, splits: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return one device's intervals of a dim that has parts or blocks."""
    devices, place = 1, 0
    for count, index in splits:
        devices, place = devices * count, place * count + index
    pieces: list[tuple[int, int]] = []
    start = 0
    for part in cut.parts or (Part(size),):
        lo, hi = 0, -(-part.size // cut.block)
        shares = [(part.shares, place * part.shares // devices)] if part.shares else splits
        for count, index in shares:
            lo, hi = split_interval(lo, hi, count, index)
        lo, hi = start + min(lo * cut.block, part.size), start + min(hi * cut.block, part.size)
        start += part.size
        if lo < hi and pieces and pieces[-1][1] == lo:
            pieces[-1] = (pieces[-1][0], hi)
        elif lo < hi:
            pieces.append((lo, hi))
    return tuple(pieces) or ((size, size),)


@dataclass(frozen=True, slots=True)
class LayoutCell:
    """A layout restricted to a cell: a box of the tensor. Each device has one part of it."""

    layout: Layout
    cell: Box

    def box(self, physical_id: int) -> Box:
        """Return the part of the cell that a device has, with empty intervals if it has none."""
        sides = []
        for side, (lo, hi) in zip(self.layout.intervals(physical_id), self.cell, strict=True):
            # Without max and min, since a mesh of thousands of devices asks millions of times.
            shared = [
                (a if a > lo else lo, b if b < hi else hi) for a, b in side if a < hi and lo < b
            ]
            assert len(shared) < 2, "parts are cut by cells"
            sides.append(shared[0] if shared else (hi, hi))
        return tuple(sides)

    def boxes(self) -> dict[int, Box]:
        """Return the part of the cell that each device has, by physical id."""
        return {device: self.box(device) for device in self.layout.mesh.ids}

    def index(self, physical_id: int) -> tuple[slice, ...]:
        """Return the slices of a device's shard that contain its part of the cell."""
        index = []
        sides = zip(self.layout.intervals(physical_id), self.box(physical_id), strict=True)
        for side, (lo, hi) in sides:
            before = sum(min(b, lo) - a for a, b in side if a < lo)
            index.append(slice(before, before + hi - lo))
        return tuple(index)


def cells_of(*layouts: Layout) -> tuple[Box, ...]:
    """Divide a tensor into cells in which every device has at most one box, in every layout.

    >>> mesh = DeviceMesh(range(2), (2,))
    >>> cells_of(Layout(mesh, "[S0{4,2}]", (6,), "int8"), Layout(mesh, "[R]", (6,), "int8"))
    (((0, 4),), ((4, 6),))
    """
    sides = []
    for dim, size in enumerate(layouts[0].global_shape):
        bounds = {0, size}
        for layout in layouts:
            stops = accumulate(part.size for part in layout.spec.dim_specs[dim].parts)
            bounds.update(stops)
        sides.append(list(pairwise(sorted(bounds))) or [(0, 0)])
    return tuple(product(*sides))


def _check_reducible(op: str, dtype: str) -> None:
    if op == "avg" and not is_floating(dtype):
        raise DTypeError(f"a pending avg of {dtype} has no exact result; use sum and divide")
    if op in ("min", "max") and dtype.startswith("complex"):
        raise DTypeError(f"{op} is not defined for {dtype}: complex numbers have no order")
    if dtype.startswith(("float8", "float4", "uint16", "uint32", "uint64")):
        raise DTypeError(f"no reduction is defined for {dtype}; convert to a wider dtype first")
