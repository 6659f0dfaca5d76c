"""Making reshard plans: from layouts, state dicts, or rules on a mesh."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, overload

from shardspec.dtypes import dtype_name, is_cast, is_floating
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.rules import match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.resharding.check import check_map
from shardspec.resharding.copies import MAX_BYTES, StateCopies, TensorMove
from shardspec.resharding.maps import NameMap
from shardspec.text import counted, shown

if TYPE_CHECKING:
    from shardspec.dtensor import DTensor

__all__ = ["ReshardPlan", "plan_reshard", "reshard_state"]

T = TypeVar("T")
Rules: TypeAlias = Mapping[str, SpecLike]
"""Name pattern to spec; a tensor that no pattern matches is replicated."""


class ReshardPlan(StateCopies):
    """How a state dict gets from its layouts to others; made by `plan_reshard`.

    A plain value, the same on every rank that makes it: it holds no tensor, buffer or group, and
    can be printed, compared, pickled and run any number of times.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (4,))
    >>> source = {"w": Layout(mesh, "[S0,R]", (8, 6), "float32")}
    >>> plan = plan_reshard(source, (DeviceMesh([6, 5], (2,)), {"w": "[R,S0]"}))
    >>> print(plan)
    1 tensor on 6 devices
    device   sends   receives
    ─────────────────────────
    0         48 B        0 B
    1         48 B        0 B
    2         48 B        0 B
    3         48 B        0 B
    5          0 B       96 B
    6          0 B       96 B
    busiest sender 48 B (even share of 4 senders: 48 B)
    busiest receiver 96 B (even share of 2 receivers: 96 B)
    8 pairs of devices, peak 192 B, 23 µs
    """

    @overload
    def run(self, state: Mapping[str, object], out: None = None) -> "dict[str, DTensor]": ...
    @overload
    def run(self, state: Mapping[str, object], out: Mapping[str, T]) -> dict[str, T]: ...
    def run(
        self, state: Mapping[str, object], out: Mapping[str, T] | None = None
    ) -> "dict[str, DTensor] | dict[str, T]":
        """Carry the plan out.

        In a job every rank of any of the meshes calls this; a rank outside the source's meshes
        passes ``{}``. Without a job all devices are simulated in this process.

        Parameters
        ----------
        state
            The tensors by the names of the source: DTensors of shardspec or of torch or, in a
            job, the shards of this rank.
        out
            What is filled, by the names of the target; by default new tensors are made.

        Returns
        -------
        dict
            The tensors of which this process holds a shard, by the names of the target: what
            `out` has, or new DTensors.

        Raises
        ------
        LayoutError
            If a tensor is missing or is not as the plan says, on any rank; on all ranks, before
            anything is sent.
        CommunicatorError
            If ranks have different plans, or a rank has gone.
        """
        from shardspec.resharding.execute import run_plan

        if self.files:
            raise LayoutError(
                "the source of this plan is a checkpoint; load_sharded reads it by the same rules"
            )
        return run_plan(self, state, out)


def plan_reshard(
    source: Mapping[str, object] | Path | str,
    target: Mapping[str, object] | tuple[DeviceMesh, Rules],
    *,
    names: Mapping[str, str] | NameMap | None = None,
    dtype: object = None,
    max_bytes: int | None = None,
) -> ReshardPlan:
    """Plan how a state dict gets from its layouts to others; needs no job.

    Parameters
    ----------
    source
        Name to `Layout`, or a state dict of DTensors, shardspec's or torch's; or a checkpoint, of
        which `load_sharded` then reads what the plan says.
    target
        The same, or a mesh and rules: name pattern to spec, what no pattern matches is replicated.
        Meshes may be any: the same, grown, shrunk, permuted, disjoint or overlapping ones.
    names
        Name in the source to name in the target, for those that differ; or a `NameMap`, which
        also fuses, splits, stacks, transposes and pads.
    dtype
        What floating-point tensors become, where `target` is a mesh and rules.
    max_bytes
        Bytes in buckets for sending, and as many for receiving, on each device; 256 MiB by
        default.

    Raises
    ------
    LayoutError
        If names are missing on either side, shapes differ, a reduction is pending, or `max_bytes`
        is too small.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (2, 2))
    >>> source = {"w": Layout(mesh, "[S0,R]", (8, 6), "float32")}
    >>> plan = plan_reshard(source, (DeviceMesh([1, 5], (2,)), {"w": "[R,S0]"}))
    >>> dict(plan.sent), dict(plan.received)
    ({0: 24, 1: 24, 2: 48, 3: 48, 5: 0}, {0: 0, 1: 48, 2: 0, 3: 0, 5: 96})
    """
    if isinstance(source, str | Path):
        from shardspec.checkpoint.stored_layouts import layouts_of_checkpoint

        meshes = (
            [target[0]]
            if isinstance(target, tuple)
            else [_layout(name, value).mesh for name, value in target.items()]
        )
        source = layouts_of_checkpoint(source, meshes)
    before = {name: _layout(name, value) for name, value in source.items()}
    if isinstance(names, NameMap):
        return _mapped(before, target, names, dtype, max_bytes)
    renamed = _renamed(before, names or {})
    if isinstance(target, tuple):
        dtypes = {renamed[name]: layout.dtype for name, layout in before.items()}
        shapes = {renamed[name]: layout.global_shape for name, layout in before.items()}
        after = _by_rules(shapes, dtypes, *target, dtype)
    else:
        after = {name: _layout(name, value) for name, value in target.items()}
    for kind, missing in (
        ("the target lacks", sorted(set(renamed.values()) - set(after))),
        ("the source lacks", sorted(set(after) - set(renamed.values()))),
    ):
        if missing:
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise LayoutError(f"{kind} {shown(missing[0])}{rest}; names= maps names that differ")
    moves = []
    for name, layout in before.items():
        move = TensorMove(name, renamed[name], layout, after[renamed[name]])
        _check(move)
        moves.append(move)
    return _plan(moves, max_bytes)


def reshard_state(
    state: Mapping[str, object],
    rules: Rules,
    *,
    device_mesh: DeviceMesh | None = None,
    max_bytes: int | None = None,
) -> "dict[str, DTensor]":
    """Convert a state dict of DTensors to the specs that rules name, in one go.

    Parameters
    ----------
    state
        DTensors, shardspec's or torch's.
    rules
        Name pattern to spec; what no pattern matches is replicated.
    device_mesh
        Where to; by default the mesh of the tensors.
    max_bytes
        As for `plan_reshard`.

    Raises
    ------
    LayoutError, CommunicatorError
        As `plan_reshard` and `ReshardPlan.run` do.

    Examples
    --------
    >>> import torch
    >>> from shardspec import DTensor
    >>> w = DTensor(torch.arange(6.0), DeviceMesh(range(2), (2,)), "[S0]")
    >>> reshard_state({"w": w}, {}, device_mesh=DeviceMesh([3], (1,)))["w"].to_local()
    tensor([0., 1., 2., 3., 4., 5.])
    """
    if device_mesh is None:
        meshes = {_layout(name, value).mesh for name, value in state.items()}
        if len(meshes) != 1:
            raise LayoutError(
                f"the tensors lie on {counted(len(meshes), 'mesh', 'meshes')}; name one, as in "
                "device_mesh=mesh"
            )
        (device_mesh,) = meshes
    return plan_reshard(state, (device_mesh, rules), max_bytes=max_bytes).run(state)


def _layout(name: str, value: object) -> Layout:
    if isinstance(value, Layout):
        return value
    # Plans on paper need no torch.
    import torch.distributed.tensor as torch_tensor

    from shardspec.dtensor import DTensor
    from shardspec.interop.torch_dtensor import layout_of

    match value:
        case DTensor():
            return value.layout
        case torch_tensor.DTensor():
            return layout_of(value)
    raise LayoutError(
        f"{name!r} is a {type(value).__name__}; give a Layout, or a DTensor of shardspec or of "
        "torch"
    )


def _renamed(before: Mapping[str, Layout], names: Mapping[str, str]) -> dict[str, str]:
    if unknown := sorted(set(names) - set(before)):
        raise LayoutError(f"names= maps {shown(unknown[0])}, which the source lacks")
    renamed = {name: names.get(name, name) for name in before}
    first: dict[str, str] = {}
    for name, new in renamed.items():
        if new in first:
            raise LayoutError(
                f"names= makes both {first[new]!r} and {name!r} to {new!r}; give each its own name"
            )
        first[new] = name
    return renamed


def _by_rules(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    mesh: DeviceMesh,
    rules: Rules,
    dtype: object,
) -> dict[str, Layout]:
    specs = match_rules(rules, {name: len(shape) for name, shape in shapes.items()})
    wanted = None if dtype is None else dtype_name(dtype)
    found = {}
    for name, shape in shapes.items():
        spec = specs.get(name, ShardingSpec(len(shape), {}))
        cast = wanted is not None and is_floating(dtypes[name])
        found[name] = Layout(mesh, spec, shape, wanted if cast else dtypes[name])
    return found


def _mapped(
    before: Mapping[str, Layout],
    target: Mapping[str, object] | tuple[DeviceMesh, Rules],
    names: NameMap,
    dtype: object,
    max_bytes: int | None,
) -> ReshardPlan:
    shapes = {name: layout.global_shape for name, layout in before.items()}
    if isinstance(target, tuple):
        implied = names.target_shapes(shapes)
        from_ = {e.target: before[e.source].dtype for e in names.equations(shapes, implied)}
        after = _by_rules(implied, from_, *target, dtype)
    else:
        after = {name: _layout(name, value) for name, value in target.items()}
    report = check_map(names, shapes, {name: one.global_shape for name, one in after.items()})
    if report.problems:
        rest = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise LayoutError(f"the map is not total: {report.problems[0]}{rest}")
    moves = []
    for equation in report.equations:
        one, other = before[equation.source], after[equation.target]
        moves.append(TensorMove(equation.source, equation.target, one, other, equation.view))
        _check(moves[-1])
    return _plan(moves, max_bytes)


def _plan(moves: Sequence[TensorMove], max_bytes: int | None) -> ReshardPlan:
    plan = ReshardPlan(tuple(moves), MAX_BYTES if max_bytes is None else max_bytes)
    if max_bytes is not None:
        _ = plan.bucket_bytes  # raises where it is too small
    return plan


def _check(move: TensorMove) -> None:
    if move.view is None and move.source.global_shape != move.target.global_shape:
        raise LayoutError(
            f"{move.source_name!r} is {move.source.global_shape} in the source and "
            f"{move.target.global_shape} in the target"
        )
    if move.source.dtype != move.target.dtype and not is_cast(move.source.dtype, move.target.dtype):
        raise LayoutError(
            f"{move.source_name!r} is {move.source.dtype} in the source and {move.target.dtype} "
            "in the target; only floating-point dtypes are cast"
        )
    for layout in (move.source, move.target):
        if layout.spec.partials:
            raise LayoutError(
                f"{move.source_name!r} is laid out as {layout.spec}, with a reduction pending; "
                f"finish it first, with redistribute({str(layout.spec.without_partial())!r})"
            )
