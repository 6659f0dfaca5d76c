"""Defines sharding specs, which tell how the mesh axes shard the dims of a tensor."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from shardspec.comm.steps import ReduceOp
from shardspec.errors import AxisError, LossyConversionError
from shardspec.layout.notation import OPS, Notation, read_notation
from shardspec.mesh.device_ids import by_number, checked_axis, whole_number
from shardspec.mesh.device_mesh import Axis
from shardspec.text import counted, shown

_MAX_DIMS: Final = 1024
"""Maximum number of dims of a spec."""
_SHORT: Final = 256
"""Maximum length of a text whose spec is cached."""


def _axes_text(axes: Sequence[Axis]) -> str:
    """Return axes as bare digits if each is one digit, else in brackets."""
    if all(isinstance(axis, int) and axis < 10 for axis in axes):
        return "".join(map(str, axes))
    return f"({','.join(map(str, axes))})"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a dim that is sharded separately, written `4096` or `1024/2`."""

    size: int
    """The length of the part."""
    shares: int = 0
    """Number of shares. With 2 shares on 4 devices, devices 0 and 1 have the first, 2 and 3 the
    second; 1 replicates. The default 0 gives each device its own share."""

    def __str__(self) -> str:
        return f"{self.size}/{self.shares}" if self.shares else str(self.size)


def _part(value: object) -> Part:
    """Return a part from a `Part`, a size, a pair of size and shares, or the text of these."""
    if isinstance(value, Part):
        value = value.size, value.shares
    values = value.split("/", 1) if isinstance(value, str) else value
    values = values if isinstance(values, Sequence) else [values]
    numbers = [int(v) if isinstance(v, str) and v.isdecimal() else whole_number(v) for v in values]
    size, shares = (*numbers, 0)[:2] if numbers else (None, 0)
    if len(numbers) > 2 or size is None or shares is None or size < 1 or shares < 0:
        raise AxisError(f"part {shown(value)}: give a size from 1, or a pair of size and shares")
    return Part(size, shares)


@dataclass(frozen=True, slots=True, repr=False)
class DimSpec:
    """The sharding of one tensor dim: the mesh axes that split it, the major one first.

    Examples
    --------
    >>> str(DimSpec((0, 1))), str(DimSpec()), str(DimSpec((10,))), str(DimSpec(("dp", "tp")))
    ('S01', 'R', 'S(10)', 'S(dp,tp)')
    >>> str(DimSpec((0,), (Part(8), Part(4, 1)), 2))
    'S0{8,4/1}*2'
    """

    axes: tuple[Axis, ...] = ()
    """Axes by number or name; empty if the dim is not sharded."""
    parts: tuple[Part, ...] = ()
    """Pieces that are sharded separately; a device has a share of each, in order. By default the
    dim is one piece."""
    block: int = 1
    """Block size: shard boundaries are multiples of it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(map(checked_axis, self.axes)))
        object.__setattr__(self, "parts", tuple(map(_part, self.parts)))
        block = whole_number(self.block)
        if block is None or block < 1:
            raise AxisError(f"block {shown(self.block)}: give a whole number from 1")
        object.__setattr__(self, "block", block)
        if not self.axes and not self.is_plain:
            raise AxisError("parts and blocks are for sharded dims; name the axes of the dim")

    @property
    def is_plain(self) -> bool:
        """True if there are no parts and no blocks."""
        return not self.parts and self.block == 1

    def __str__(self) -> str:
        parts = f"{{{','.join(map(str, self.parts))}}}" if self.parts else ""
        block = f"*{self.block}" if self.block > 1 else ""
        return f"S{_axes_text(self.axes)}{parts}{block}" if self.axes else "R"

    def __repr__(self) -> str:
        return str(self)  # as in Colossal-AI, so that a list of them prints as [S0, R]


CutLike: TypeAlias = Sequence[Axis] | Mapping[str, Any] | DimSpec
"""The axes of a dim, or a `DimSpec`, or the fields of a `DimSpec` as a dict."""


def _dim_spec(dim: int, cut: object) -> DimSpec:
    if isinstance(cut, DimSpec):
        return cut
    if isinstance(cut, Mapping):
        if "axes" not in cut or set(cut) - {"axes", "parts", "block"}:
            raise AxisError(
                f"dim_partition_dict has {shown(cut)} for dim {dim}; give a dict with 'axes', and "
                "perhaps 'parts' and 'block'"
            )
        axes = _dim_spec(dim, cut["axes"]).axes
        return DimSpec(axes, tuple(cut.get("parts", ())), cut.get("block", 1))
    if isinstance(cut, str) or not isinstance(cut, Iterable):
        raise AxisError(
            f"dim_partition_dict has {shown(cut)} for dim {dim}; give a list: [{shown(cut)}]"
        )
    return DimSpec(tuple(cut))


@dataclass(frozen=True, slots=True)
class Partial:
    """A reduction that is pending over one mesh axis.

    Every device along the axis has one addend (for ``"sum"``) of the tensor's value. A pending
    mean is the pending sum divided by the number of devices along the axis.
    """

    axis: Axis
    op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        checked_axis(self.axis)
        if self.op not in OPS:
            raise AxisError(f"reduction {shown(self.op)} over axis {self.axis}: use one of {OPS}")


@dataclass(frozen=True, slots=True, init=False)
class ShardingSpec:
    """The mesh axes that split each tensor dim, in order, and the pending reductions.

    Parameters
    ----------
    dims
        Number of tensor dims.
    dim_partition_dict
        Tensor dim to the mesh axes that split it, major first. Missing dims are not sharded. Keys
        may be text of digits, as in JSON. With parts or blocks, a `DimSpec` or a dict:
        ``{"axes": [0], "parts": [4096, "1024/2"], "block": 128}``.
    partial
        Mesh axis to the operation of the reduction pending over it.
    dim_size
        Colossal-AI's name for `dims`.

    Raises
    ------
    AxisError
        If a dim is out of range, an axis is used twice, or pending reductions do not commute.

    Examples
    --------
    >>> spec = ShardingSpec(2, {0: [0, 1]})
    >>> str(spec), spec == ShardingSpec.parse("[S01,R]")
    ('[S01,R]', True)
    >>> str(ShardingSpec(1, {0: ["tp"]}, partial={"dp": "avg"}))
    '[S(tp)|Pavg(dp)]'
    >>> str(ShardingSpec(1, {0: {"axes": [0], "parts": [8, (4, 2)], "block": 2}}))
    '[S0{8,4/2}*2]'
    """

    dim_specs: tuple[DimSpec, ...]
    """One entry per tensor dim."""
    partials: tuple[Partial, ...]
    """Pending reductions in canonical order: by operation, then by axis."""
    _hash: int = field(compare=False, repr=False)

    def __init__(
        self,
        dims: int | None = None,
        dim_partition_dict: Mapping[int, CutLike] | Mapping[str, CutLike] | None = None,
        *,
        partial: Mapping[Axis, ReduceOp] | None = None,
        dim_size: int | None = None,
    ) -> None:
        if (dims is None) == (dim_size is None):
            raise AxisError("give the number of dims once, as in ShardingSpec(2, {0: [0]})")
        dims = dim_size if dims is None else dims
        count = whole_number(dims)
        if count is None or not 0 <= count <= _MAX_DIMS:
            raise AxisError(f"a tensor cannot have {shown(dims)} dims, only 0 to {_MAX_DIMS}")
        cuts = by_number("dim_partition_dict", dim_partition_dict)
        for dim in cuts:
            if whole_number(dim) is None or not 0 <= dim < count:
                raise AxisError(
                    f"dim_partition_dict names dim {shown(dim)}, but the tensor has "
                    f"{counted(count, 'dim')}, numbered from 0"
                )
        dim_specs = tuple(_dim_spec(dim, cuts.get(dim, ())) for dim in range(count))
        reductions = by_number("partial", partial).items()
        pending = tuple(
            sorted(
                (Partial(axis, op) for axis, op in reductions),
                key=lambda p: (OPS.index(p.op), isinstance(p.axis, str), p.axis),
            )
        )
        _check_used_once(dim_specs, pending)
        ops = {p.op for p in pending}
        if len(ops) > 1 and not ops <= {"sum", "avg"}:
            raise AxisError(
                f"pending reductions {sorted(ops)} do not commute, so their result depends on the "
                "order; finish one before starting the other (sum and avg may be mixed)"
            )
        object.__setattr__(self, "dim_specs", dim_specs)
        object.__setattr__(self, "partials", pending)
        object.__setattr__(self, "_hash", hash((dim_specs, pending)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Rebuilt rather than restored: hashes of text differ from process to process.
        cuts = dict(enumerate(self.dim_specs))
        return functools.partial(ShardingSpec, partial=self.partial), (self.dims, cuts)

    @classmethod
    def parse(cls, text: str) -> "ShardingSpec":
        """Read a spec from its notation; brackets and blanks are optional.

        Raises `SpecSyntaxError`, which names the character, and `AxisError` as the constructor.

        >>> ShardingSpec.parse("[S10,R|P2]").dim_partition_dict
        {0: [1, 0]}
        >>> ShardingSpec.parse("[S0,X]")
        Traceback (most recent call last):
            ...
        shardspec.errors.SpecSyntaxError: expected R or S and its axes (character 5 of '[S0,X]')
        """
        short = isinstance(text, str) and len(text) <= _SHORT
        return _parsed(text) if short else _spec_of(read_notation(text))

    @classmethod
    def of(cls, spec: "ShardingSpec | str") -> "ShardingSpec":
        """Return a spec from a spec or its notation; raises what `parse` raises."""
        return spec if isinstance(spec, ShardingSpec) else cls.parse(spec)

    def __str__(self) -> str:
        by_op = {op: [p.axis for p in self.partials if p.op == op] for op in OPS}
        pending = [
            f"P{'' if op == 'sum' else op}{_axes_text(axes)}" for op, axes in by_op.items() if axes
        ]
        bar = "|" if pending else ""
        return f"[{','.join(map(str, self.dim_specs))}{bar}{','.join(pending)}]"

    def __repr__(self) -> str:
        return f"ShardingSpec.parse({str(self)!r})"

    @property
    def dims(self) -> int:
        """Number of tensor dims."""
        return len(self.dim_specs)

    @property
    def dim_partition_dict(self) -> dict[int, list[Axis]]:
        """Sharded tensor dim to the mesh axes that split it, without parts and blocks."""
        return {dim: list(cut.axes) for dim, cut in enumerate(self.dim_specs) if cut.axes}

    @property
    def sharding_sequence(self) -> list[DimSpec]:
        """One `DimSpec` per tensor dim, as Colossal-AI calls it."""
        return list(self.dim_specs)

    @property
    def partial(self) -> dict[Axis, ReduceOp]:
        """Mesh axis to the operation of the reduction pending over it."""
        return {p.axis: p.op for p in self.partials}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes of the spec, in the order of its text."""
        cuts = (axis for cut in self.dim_specs for axis in cut.axes)
        return (*cuts, *(p.axis for p in self.partials))

    @property
    def is_plain(self) -> bool:
        """True if no dim has parts or blocks."""
        return all(cut.is_plain for cut in self.dim_specs)

    def with_axes(self, rename: Callable[[Axis], Axis]) -> "ShardingSpec":
        """Return the spec with other names or numbers for its axes."""
        cuts = {
            dim: DimSpec(tuple(map(rename, cut.axes)), cut.parts, cut.block)
            for dim, cut in enumerate(self.dim_specs)
        }
        pending: dict[Axis, ReduceOp] = {}
        for partial in self.partials:
            axis = rename(partial.axis)
            if axis in pending:
                raise AxisError(f"axis {partial.axis} is pending twice, by name and by number")
            pending[axis] = partial.op
        return ShardingSpec(self.dims, cuts, partial=pending)

    def with_dims(self, changes: Mapping[int, CutLike]) -> "ShardingSpec":
        """Return the spec with some dims sharded in another way."""
        cuts: dict[int, CutLike] = {**dict(enumerate(self.dim_specs)), **changes}
        return ShardingSpec(self.dims, cuts, partial=self.partial)

    def without_partial(self, axes: Iterable[Axis] | None = None) -> "ShardingSpec":
        """Return the spec without the pending reductions over some axes, by default over all."""
        if not self.partials:
            return self
        finished = set(self.partial if axes is None else axes)
        pending = {axis: op for axis, op in self.partial.items() if axis not in finished}
        return ShardingSpec(self.dims, dict(enumerate(self.dim_specs)), partial=pending)


def check_plain(spec: ShardingSpec, notation: str) -> None:
    """Raise `LossyConversionError` if a dim has parts or blocks, which `notation` lacks."""
    if not spec.is_plain:
        plain = ShardingSpec(spec.dims, spec.dim_partition_dict, partial=spec.partial)
        raise LossyConversionError(
            f"{notation} cannot express parts or blocks of {spec}; redistribute to {plain} first"
        )


def _check_used_once(dim_specs: Sequence[DimSpec], partials: Sequence[Partial]) -> None:
    where: dict[Axis, str] = {}
    uses = [(axis, f"dim {dim}") for dim, cut in enumerate(dim_specs) for axis in cut.axes]
    uses += [(p.axis, f"the pending {p.op}") for p in partials]
    for axis, place in uses:
        if axis in where:
            raise AxisError(
                f"axis {axis} is used twice, by {where[axis]} and by {place}; "
                "a mesh axis can shard a tensor only once"
            )
        where[axis] = place


def parse_for_rule(text: str) -> tuple[ShardingSpec, int | None]:
    """Return the spec of a rule, and the number of dims before ``...``, None without ``...``.

    Raises what `ShardingSpec.parse` raises.

    >>> spec, before = parse_for_rule("[S0,...,R]")
    >>> str(spec), before
    ('[S0,R]', 1)
    """
    notation = read_notation(text, for_rule=True)
    return _spec_of(notation), notation.ellipsis


def _spec_of(notation: Notation) -> ShardingSpec:
    cuts = dict(enumerate(notation.dims))
    return ShardingSpec(len(cuts), cuts, partial=notation.pending)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> ShardingSpec:
    """Return the cached spec of a text; models with many tensors have few distinct specs."""
    return _spec_of(read_notation(text))
