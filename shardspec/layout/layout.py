"""A layout: mesh, spec, global shape and dtype, and from them the box of every device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, TypeAlias

from shardspec.boxes import Box, box_shape, box_size, split_interval
from shardspec.comm.steps import ReduceOp
from shardspec.device_ids import whole_number
from shardspec.dtypes import dtype_name, is_floating, item_bytes
from shardspec.errors import AxisError, DTypeError, LayoutError
from shardspec.layout.picture import MAX_CELLS, Picture, ids_text
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh
from shardspec.text import shown

__all__ = ["Layout", "SpecLike", "resolve_axes"]

SpecLike: TypeAlias = ShardingSpec | str

MAX_ELEMENTS: Final = 2**63 - 1


def resolve_axes(spec: ShardingSpec, mesh: DeviceMesh) -> ShardingSpec:
    """Return the spec with every axis as a number of `mesh`.

    Raises
    ------
    AxisError
        If the mesh lacks an axis, or a name and a number mean the same one.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    >>> str(resolve_axes(ShardingSpec.parse("[S(tp),R|P(dp)]"), mesh))
    '[S1,R|P0]'
    """
    axes = spec.axes
    if all(isinstance(axis, int) and 0 <= axis < mesh.ndim for axis in axes):
        return spec
    try:
        cuts = {d: [mesh.axis(a) for a in axes] for d, axes in spec.dim_partition_dict.items()}
        pending: dict[Axis, ReduceOp] = {}
        for partial in spec.partials:
            axis = mesh.axis(partial.axis)
            if axis in pending:
                raise AxisError(f"axis {partial.axis} is pending twice, by name and by number")
            pending[axis] = partial.op
        return ShardingSpec(spec.dims, cuts, partial=pending)
    except AxisError as error:
        raise AxisError(f"spec {spec}: {error}") from None


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Which box of a global tensor each device of a mesh holds.

    Each split follows `torch.chunk` (ceil-sized blocks, then a short one, then empty ones), applied
    axis by axis from the major one inward, so boxes agree with `torch.distributed.tensor`. Where a
    device gets nothing of a dim, its interval is ``(size, size)``, which is torch's offset too.

    Parameters
    ----------
    mesh, spec
        Where, and how it is cut; a spec may be given in its notation.
    global_shape
        Sizes of the whole tensor; ``()`` for a scalar, zeros allowed.
    dtype
        A torch or numpy dtype, or a name such as ``"bf16"``.

    Raises
    ------
    LayoutError
        If the spec has another number of dims than the shape, or a size is no whole number from 0.
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
    """The cut, every axis by number."""
    global_shape: tuple[int, ...]
    """Sizes of the whole tensor."""
    dtype: str
    """torch's name of the element type."""
    _hash: int = field(compare=False, repr=False)

    def __init__(
        self, mesh: DeviceMesh, spec: SpecLike, global_shape: Sequence[int], dtype: object
    ) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise LayoutError(
                f"a {type(mesh).__name__} is no mesh; give a DeviceMesh (of torch's mesh: "
                "DeviceMesh.from_torch)"
            )
        sizes = list(global_shape) if isinstance(global_shape, Iterable) else [None]
        shape = tuple(size for size in map(whole_number, sizes) if size is not None)
        if len(shape) != len(sizes):
            raise LayoutError(
                f"global shape {shown(global_shape)}: give a sequence of whole numbers"
            )
        resolved = resolve_axes(ShardingSpec.of(spec), mesh)
        if any(size < 0 for size in shape):
            raise LayoutError(f"global shape {shown(shape)} has a negative size")
        if prod(filter(None, shape)) > MAX_ELEMENTS:
            raise LayoutError(
                f"global shape {shown(shape)} has more elements than a tensor can have, 2^63 - 1"
            )
        if resolved.dims != len(shape):
            raise LayoutError(
                f"spec {spec} is for {_dims(resolved.dims)}, but the tensor of shape {shape} has "
                f"{_dims(len(shape))}"
            )
        name = dtype_name(dtype)
        for partial in resolved.partials:
            _check_reducible(partial.op, name)
        values = (mesh, resolved, shape, name)
        for field_name, value in zip(self.__slots__, (*values, hash(values)), strict=True):
            object.__setattr__(self, field_name, value)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Layout"], tuple[object, ...]]:
        # Rebuilt rather than restored: hashes of text differ from process to process.
        return Layout, (self.mesh, self.spec, self.global_shape, self.dtype)

    def __str__(self) -> str:
        return f"{self.spec} of {list(self.global_shape)} {self.dtype} on {self.mesh}"

    def box(self, physical_id: int) -> Box:
        """Return the part of the global tensor that a device holds.

        Raises
        ------
        MeshError
            If the device is not in the mesh.
        """
        at = self.mesh.coordinates(physical_id)
        sides = []
        for size, cut in zip(self.global_shape, self.spec.dim_specs, strict=True):
            lo, hi = 0, size
            for axis in cut.axes:
                assert isinstance(axis, int), "axes are resolved when the layout is made"
                lo, hi = split_interval(lo, hi, self.mesh.shape[axis], at[axis])
            sides.append((lo, hi) if lo < hi else (size, size))
        return tuple(sides)

    def boxes(self) -> dict[int, Box]:
        """Return the box of every device, by physical id.

        Examples
        --------
        >>> Layout(DeviceMesh([5, 9], (2,)), "[S0]", (3,), "int8").boxes()
        {5: ((0, 2),), 9: ((2, 3),)}
        """
        return {physical_id: self.box(physical_id) for physical_id in self.mesh.ids}

    def local_shape(self, physical_id: int) -> tuple[int, ...]:
        """Return the shape of a device's shard."""
        return box_shape(self.box(physical_id))

    @property
    def labelled_spec(self) -> ShardingSpec:
        """The spec with axes by name where the mesh has names.

        Examples
        --------
        >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
        >>> str(Layout(mesh, "[S10,R]", (4, 4), "f32").labelled_spec)
        '[S(tp,dp),R]'
        """
        if self.mesh.axis_names is None:
            return self.spec
        names = self.mesh.axis_names
        cuts = {
            d: [names[int(a)] for a in axes] for d, axes in self.spec.dim_partition_dict.items()
        }
        pending: dict[Axis, ReduceOp] = {names[int(p.axis)]: p.op for p in self.spec.partials}
        return ShardingSpec(self.spec.dims, cuts, partial=pending)

    @property
    def max_local_bytes(self) -> int:
        """Bytes of the largest shard: the one at coordinates zero, by the rule of the cuts."""
        return prod(box_shape(self.box(self.mesh.ids[0]))) * item_bytes(self.dtype)

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.global_shape) * item_bytes(self.dtype)

    def with_spec(self, spec: SpecLike) -> "Layout":
        """Return the same tensor cut another way.

        Examples
        --------
        >>> str(Layout(DeviceMesh(range(2), (2,)), "[S0,R]", (4, 4), "f32").with_spec("[R,S0]"))
        '[R,S0] of [4, 4] float32 on 2'
        """
        return Layout(self.mesh, spec, self.global_shape, self.dtype)

    @property
    def title(self) -> str:
        """Spec, sizes, dtype and mesh, axes by name where the mesh has names.

        Examples
        --------
        >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
        >>> Layout(mesh, "[S10,R]", (4, 4), "f32").title
        '[S(tp,dp),R] of [4, 4] float32 on dp=2,tp=2'
        """
        return f"{self.labelled_spec} of {list(self.global_shape)} {self.dtype} on {self.mesh}"

    def drawing(self) -> Picture:
        """Return who holds what, to be drawn as text, SVG or HTML."""
        cells: dict[Box, list[int]] = {}
        idle = []
        for device, box in self.boxes().items():
            if box_size(box):
                cells.setdefault(box, []).append(device)
            else:
                idle.append(device)
        notes = [f"nothing is held by {ids_text(idle)}"] if idle else []
        for partial in self.spec.partials:
            axis = self.mesh.axis_label(int(partial.axis))
            notes.append(f"pending over axis {axis}: the {partial.op} of what its devices hold")
        return Picture(self.title, cells, notes)

    def picture(self) -> str:
        """Draw as text which devices hold which part of the tensor.

        Examples
        --------
        >>> print(Layout(DeviceMesh(range(4), (2, 2)), "[S0,R]", (4, 4), "f32").picture())
        [S0,R] of [4, 4] float32 on 2x2
                   0:4
            ┌───────────────┐
            │               │
        0:2 │      0,1      │
            │               │
            ├───────────────┤
            │               │
        2:4 │      2,3      │
            │               │
            └───────────────┘
        """
        return self.drawing().text()

    def _repr_html_(self) -> str:
        """Draw the layout where notebooks show it."""
        return self.drawing().svg() if self.mesh.size <= MAX_CELLS else f"<code>{self}</code>"


def _dims(count: int) -> str:
    return f"{count} {'dim' if count == 1 else 'dims'}"


def _check_reducible(op: str, dtype: str) -> None:
    if op == "avg" and not is_floating(dtype):
        raise DTypeError(f"a pending avg of {dtype} has no exact result; use sum and divide")
    if op in ("min", "max") and dtype.startswith("complex"):
        raise DTypeError(f"{op} is not defined for {dtype}: complex numbers have no order")
    if dtype.startswith(("float8", "float4", "uint16", "uint32", "uint64")):
        raise DTypeError(f"no reduction is defined for {dtype}; convert to a wider dtype first")
