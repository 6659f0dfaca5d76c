"""Sharding specs: how the dims of a tensor are cut over the axes of a mesh.

The notation is the one of Alpa and Colossal-AI, extended by pending reductions and axis names; the
grammar is in `shardspec.layout.grammar`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args

from shardspec.comm.steps import ReduceOp
from shardspec.device_ids import whole_number
from shardspec.errors import AxisError, LossyConversionError, SpecSyntaxError
from shardspec.layout.grammar import parse_spec
from shardspec.mesh import Axis
from shardspec.text import counted, shown

_OPS: Final[tuple[str, ...]] = get_args(ReduceOp)
MOST_DIMS: Final = 1024
"""Far more than any tensor has."""


def _axes_text(axes: Sequence[Axis]) -> str:
    """Write axes as bare digits where each is one digit, else in brackets."""
    if all(isinstance(axis, int) and axis < 10 for axis in axes):
        return "".join(map(str, axes))
    return f"({','.join(map(str, axes))})"


def _by_number(what: str, given: object) -> dict[Any, Any]:
    """Return a mapping with numbers for keys that are text of digits; the others as they are."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise AxisError(f"{what} is a {type(given).__name__}; give a dict, as in {{0: [0]}}")
    found: dict[Any, Any] = {}
    for key, value in given.items():
        number = whole_number(key)
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10:
            number = int(key)
        if number is None:
            found[key] = value
            continue
        if number in found:
            raise AxisError(f"{what} has the key {number} twice, as a number and as text")
        found[number] = value
    return found


def _check_axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    checked: list[Axis] = []
    for axis in axes:
        if isinstance(axis, str):
            if not axis.isidentifier():
                raise AxisError(
                    f"axis name {shown(axis)}: use letters, digits and '_', no digit first"
                )
            checked.append(axis)
            continue
        number = whole_number(axis)
        if number is None or number < 0:
            raise AxisError(f"axis {shown(axis)}: an axis is a number from 0 or a name")
        checked.append(number)
    return tuple(checked)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a dim that is cut by itself, written `4096` or `1024/2`."""

    size: int
    """How long it is."""
    shares: int = 0
    """Into how many it is cut, where these are fewer than the devices along the axes: neighbouring
    devices then have copies, 1 replicates. By default 0: one share each."""

    def __str__(self) -> str:
        return f"{self.size}/{self.shares}" if self.shares else str(self.size)


@dataclass(frozen=True, slots=True)
class DimSpec:
    """How one tensor dim is cut: the mesh axes that split it, the major one first.

    Examples
    --------
    >>> str(DimSpec((0, 1))), str(DimSpec()), str(DimSpec((10,))), str(DimSpec(("dp", "tp")))
    ('S01', 'R', 'S(10)', 'S(dp,tp)')
    >>> str(DimSpec((0,), (Part(8), Part(4, 1)), 2))
    'S0{8,4/1}*2'
    """

    axes: tuple[Axis, ...] = ()
    """Axes by number or name; empty where the dim is whole on every device."""
    parts: tuple[Part, ...] = ()
    """Pieces that are each cut by themselves; a device has a share of each, in order. None: the
    dim is one piece."""
    block: int = 1
    """Cuts lie at multiples of this many elements of a piece."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", _check_axes(self.axes))
        object.__setattr__(self, "parts", tuple(map(_part, self.parts)))
        block = whole_number(self.block)
        if block is None or block < 1:
            raise AxisError(f"block {shown(self.block)}: give a whole number from 1")
        object.__setattr__(self, "block", block)
        if not self.axes and not self.is_plain:
            raise AxisError("a dim that no axis cuts has no parts and no block; name its axes")

    @property
    def is_plain(self) -> bool:
        """Whether the axes say all: there are no parts and no blocks."""
        return not self.parts and self.block == 1

    def __str__(self) -> str:
        parts = f"{{{','.join(map(str, self.parts))}}}" if self.parts else ""
        block = f"*{self.block}" if self.block > 1 else ""
        return f"S{_axes_text(self.axes)}{parts}{block}" if self.axes else "R"


def _part(given: object) -> Part:
    """Return a part given as one, as a size, as a pair of size and shares, or as text of these."""
    if isinstance(given, str):
        given = given.split("/", 1)
    values = [given]
    if isinstance(given, Part):
        values = [given.size, given.shares]
    elif isinstance(given, Sequence):
        values = list(given)
    numbers = [int(v) if isinstance(v, str) and v.isdecimal() else whole_number(v) for v in values]
    size, shares = (*numbers, 0)[:2] if numbers else (None, 0)
    if len(numbers) > 2 or size is None or shares is None or size < 1 or shares < 0:
        raise AxisError(
            f"part {shown(given)}: give its size, a whole number from 1, or a pair of size and "
            "shares"
        )
    return Part(size, shares)


CutLike: TypeAlias = Sequence[Axis] | Mapping[str, Any] | DimSpec
"""The axes of a dim; or with parts and blocks, a `DimSpec` or its fields as a dict."""


def _dim_spec(dim: int, cut: object) -> DimSpec:
    if isinstance(cut, DimSpec):
        return cut
    if isinstance(cut, Mapping):
        if "axes" not in cut or set(cut) - {"axes", "parts", "block"}:
            raise AxisError(
                f"dim_partition_dict gives {shown(cut)} for dim {dim}; a dict has 'axes', and "
                "perhaps 'parts' and 'block'"
            )
        axes = _dim_spec(dim, cut["axes"]).axes
        return DimSpec(axes, tuple(cut.get("parts", ())), cut.get("block", 1))
    if isinstance(cut, str) or not isinstance(cut, Iterable):
        raise AxisError(
            f"dim_partition_dict gives {shown(cut)} for dim {dim}; "
            f"give a list of axes: [{shown(cut)}]"
        )
    return DimSpec(tuple(cut))


@dataclass(frozen=True, slots=True)
class Partial:
    """A reduction that is still pending over one mesh axis.

    Every device along the axis holds one addend (for ``"sum"``) of the tensor's value. A partial
    mean is the sum scaled by one over the axis size.
    """

    axis: Axis
    op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        _check_axes((self.axis,))
        if self.op not in _OPS:
            raise AxisError(f"reduction {shown(self.op)} over axis {self.axis}: use one of {_OPS}")


def _partial_key(partial: Partial) -> tuple[int, bool, int, str]:
    by_name = isinstance(partial.axis, str)
    number = -1 if isinstance(partial.axis, str) else partial.axis
    return _OPS.index(partial.op), by_name, number, str(partial.axis)


@dataclass(frozen=True, slots=True, init=False)
class ShardingSpec:
    """Per tensor dim the ordered mesh axes that split it, plus pending reductions.

    Parameters
    ----------
    dims
        Number of tensor dims.
    dim_partition_dict
        Tensor dim to the mesh axes that split it, major first. Missing dims are whole. A dim may be
        text of digits, as JSON has keys. With parts or blocks, a `DimSpec` or a dict:
        ``{"axes": [0], "parts": [4096, "1024/2"], "block": 128}``.
    partial
        Mesh axis to the operation of a reduction pending over it; likewise.

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
        dims: int,
        dim_partition_dict: Mapping[int, CutLike]
        | Mapping[str, CutLike]
        | Mapping[int, Sequence[Axis]]
        | Mapping[str, Sequence[Axis]]
        | Mapping[int, DimSpec]
        | None = None,
        *,
        partial: Mapping[Axis, ReduceOp] | None = None,
    ) -> None:
        count = whole_number(dims)
        if count is None:
            raise AxisError(f"dims {shown(dims)}: give a whole number")
        dims = count
        if not 0 <= dims <= MOST_DIMS:
            raise AxisError(f"a tensor cannot have {shown(dims)} dims, only 0 to {MOST_DIMS}")
        cuts = _by_number("dim_partition_dict", dim_partition_dict)
        for dim in cuts:
            if whole_number(dim) is None:
                raise AxisError(
                    f"dim_partition_dict names dim {shown(dim)}; a dim is a whole number"
                )
            if not 0 <= dim < dims:
                raise AxisError(
                    f"dim_partition_dict names dim {dim}, but the tensor has "
                    f"{counted(dims, 'dim')}, numbered from 0"
                )
        dim_specs = tuple(_dim_spec(dim, cuts.get(dim, ())) for dim in range(dims))
        pending = tuple(
            sorted(
                (Partial(a, op) for a, op in _by_number("partial", partial).items()),
                key=_partial_key,
            )
        )
        _check_used_once(dim_specs, pending)
        _check_commute(pending)
        object.__setattr__(self, "dim_specs", dim_specs)
        object.__setattr__(self, "partials", pending)
        object.__setattr__(self, "_hash", hash((dim_specs, pending)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Made anew: the kept hash is of this process only, since each salts its text hashes.
        return _remake, (self.dim_specs, self.partial)

    @classmethod
    def parse(cls, text: str) -> "ShardingSpec":
        """Read a spec from its notation; brackets and blanks are optional.

        Raises
        ------
        SpecSyntaxError
            If the text does not follow the grammar; shows the text and a caret.
        AxisError
            If an axis is used twice or pending reductions do not commute.

        Examples
        --------
        >>> ShardingSpec.parse("[S10,R|P2]").dim_partition_dict
        {0: [1, 0]}
        >>> ShardingSpec.parse("[S0,X]")
        Traceback (most recent call last):
            ...
        shardspec.errors.SpecSyntaxError: expected R or S and its axes
          [S0,X]
              ^
        """
        if not isinstance(text, str):
            raise SpecSyntaxError(
                f"a {type(text).__name__} is no spec; write one as in '[S0,R]'", shown(text), 0
            )
        dims, partial = parse_spec(text)
        cuts = [DimSpec(tuple(axes), tuple(map(_part, parts)), b) for axes, parts, b in dims]
        return cls(len(dims), dict(enumerate(cuts)), partial=partial)

    @classmethod
    def of(cls, spec: "ShardingSpec | str") -> "ShardingSpec":
        """Return a spec given as one or in its notation.

        Raises
        ------
        SpecSyntaxError
            If it is neither, or does not follow the grammar.
        AxisError
            As the constructor.
        """
        return spec if isinstance(spec, ShardingSpec) else cls.parse(spec)

    def __str__(self) -> str:
        text = ",".join(map(str, self.dim_specs))
        pending = []
        for op in _OPS:
            axes = [p.axis for p in self.partials if p.op == op]
            if axes:
                pending.append(f"P{'' if op == 'sum' else op}{_axes_text(axes)}")
        return f"[{text}|{','.join(pending)}]" if pending else f"[{text}]"

    def __repr__(self) -> str:
        return f"ShardingSpec.parse({str(self)!r})"

    @property
    def dims(self) -> int:
        """Number of tensor dims."""
        return len(self.dim_specs)

    @property
    def dim_partition_dict(self) -> dict[int, list[Axis]]:
        """Tensor dim to the mesh axes that split it; whole dims are left out. A fresh dict.

        Parts and blocks are left out: `dim_specs` has them.
        """
        return {dim: list(cut.axes) for dim, cut in enumerate(self.dim_specs) if cut.axes}

    @property
    def sharding_sequence(self) -> tuple[DimSpec, ...]:
        """One `DimSpec` per tensor dim, as Colossal-AI calls it."""
        return self.dim_specs

    @property
    def partial(self) -> dict[Axis, ReduceOp]:
        """Mesh axis to the operation of the reduction pending over it. A fresh dict."""
        return {p.axis: p.op for p in self.partials}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis used, in the order of the text."""
        cuts = (axis for cut in self.dim_specs for axis in cut.axes)
        return (*cuts, *(p.axis for p in self.partials))

    @property
    def is_plain(self) -> bool:
        """Whether no dim has parts or blocks."""
        return all(cut.is_plain for cut in self.dim_specs)

    def check_plain(self, what: str) -> None:
        """Raise `LossyConversionError` where a dim has parts or blocks, which `what` cannot say."""
        if not self.is_plain:
            raise LossyConversionError(
                f"{self} cuts by parts or blocks, which {what} cannot say; redistribute to "
                f"{ShardingSpec(self.dims, self.dim_partition_dict, partial=self.partial)} first"
            )

    def with_axes(self, rename: Callable[[Axis], Axis]) -> "ShardingSpec":
        """Return the spec with other names or numbers for its axes.

        Examples
        --------
        >>> str(ShardingSpec.parse("[S0{4,2},R|P1]").with_axes(lambda axis: "xy"[axis]))
        '[S(x){4,2},R|P(y)]'
        """
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
        """Return the spec with the cuts of some dims replaced.

        Examples
        --------
        >>> str(ShardingSpec.parse("[S0,R|P1]").with_dims({0: [], 1: [0]}))
        '[R,S0|P1]'
        """
        cuts: dict[int, CutLike] = {**dict(enumerate(self.dim_specs)), **changes}
        return ShardingSpec(self.dims, cuts, partial=self.partial)

    def without_partial(self, axes: Iterable[Axis] | None = None) -> "ShardingSpec":
        """Return the spec with the reductions over some axes, or over all, no longer pending.

        Examples
        --------
        >>> str(ShardingSpec.parse("[R|P01]").without_partial([1]))
        '[R|P0]'
        """
        done = set(self.partial if axes is None else axes)
        pending = {axis: op for axis, op in self.partial.items() if axis not in done}
        return ShardingSpec(self.dims, dict(enumerate(self.dim_specs)), partial=pending)


def _check_used_once(dim_specs: Sequence[DimSpec], partials: Sequence[Partial]) -> None:
    where: dict[Axis, str] = {}
    uses = [(axis, f"dim {dim}") for dim, cut in enumerate(dim_specs) for axis in cut.axes]
    uses += [(p.axis, f"the pending {p.op}") for p in partials]
    for axis, place in uses:
        if axis in where:
            raise AxisError(
                f"axis {axis} is used twice, by {where[axis]} and by {place}; "
                "a mesh axis can cut a tensor only once"
            )
        where[axis] = place


def _check_commute(partials: Sequence[Partial]) -> None:
    """Refuse mixed reductions whose result depends on which axis is reduced first."""
    ops = {p.op for p in partials}
    if len(ops) > 1 and not ops <= {"sum", "avg"}:
        raise AxisError(
            f"pending reductions {sorted(ops)} do not commute, so their result depends on the "
            "order; finish one before starting the other (sum and avg may be mixed)"
        )


def _remake(cuts: Sequence[DimSpec], partial: Mapping[Axis, ReduceOp]) -> ShardingSpec:
    return ShardingSpec(len(cuts), dict(enumerate(cuts)), partial=partial)
