"""Reshard plans of state dicts in memory: from layouts, tensors, or rules on a mesh."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, overload

from shardspec.comm.cost import Links
from shardspec.dtypes import dtype_name, is_cast, is_floating, keeps_dtype
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.layout.rules import Rules, match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_ids import bound_of_bytes
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.copies import MAX_BYTES, StateCopies, TensorMove
from shardspec.resharding.name_map import Equation, NameMap, Names, Naming, Shape
from shardspec.resharding.state import flat_state, is_plain, required_layout
from shardspec.resharding.total import apply_map, dropped_by, report_of
from shardspec.resharding.transfers import Declared, End, FileRegion, Rows, transfer_rows
from shardspec.resharding.views import composed
from shardspec.text import counted, first_of, shown

if TYPE_CHECKING:
    from shardspec.resharding.receipts import Receipt

ReshardTarget: TypeAlias = Mapping[str, object] | tuple[DeviceMesh, Rules]
"""Layouts by name, or DTensors; or a mesh and rules."""


class Executor(Protocol):
    """Carries a plan out where devices do more than copy from each other; a plain value.

    As text it says what it does, as in "reads the checkpoint model".
    """

    def run(
        self, plan: "ReshardPlan", state: Mapping[str, object], out: Mapping[str, object] | None
    ) -> dict[str, Any]:
        """Carry a plan out; see `ReshardPlan.run`."""

    def regions(self, plan: "ReshardPlan") -> Mapping[str, Sequence[FileRegion]]:
        """Return where tensors of the source lie in files.

        Raises LayoutError if no copy of bytes makes those of the target.
        """


@dataclass(frozen=True, repr=False)
class ReshardPlan(StateCopies):
    """How a state dict gets from its layouts to others; made by `plan_reshard`.

    A plain value, the same on every rank that makes it: it holds no tensor, buffer or group, and
    can be printed, compared, pickled and run any number of times.

    Examples
    --------
    >>> mesh = DeviceMesh(range(4), (4,))
    >>> source = {"w": Layout(mesh, "[S0,R]", (8, 6), "float32")}
    >>> from shardspec import plan_reshard
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

    executor: Executor | None = None
    """What carries the plan out; None for copies between devices alone."""

    def __str__(self) -> str:
        """Return the plan as a table, and what is done beside copies."""
        return self.text({}) if self.executor is None else f"{self.text({})}\n{self.executor}"

    @overload
    def run(
        self,
        state: Mapping[str, object],
        out: Mapping[str, object] | None = None,
        *,
        receipt: Literal[False] = False,
    ) -> dict[str, Any]: ...
    @overload
    def run(
        self,
        state: Mapping[str, object],
        out: Mapping[str, object] | None = None,
        *,
        receipt: Literal[True],
        version: int | None = None,
    ) -> "tuple[dict[str, Any], Receipt]": ...
    def run(
        self,
        state: Mapping[str, object],
        out: Mapping[str, object] | None = None,
        *,
        receipt: bool = False,
        version: int | None = None,
    ) -> "dict[str, Any] | tuple[dict[str, Any], Receipt]":
        """Carry the plan out.

        In a job every rank of any of the meshes calls this; a rank outside the source's meshes
        passes ``{}``. Without a job all devices are simulated in this process. Where the source is
        a checkpoint all pass ``{}``, and each rank reads what it is to hold.

        Parameters
        ----------
        state
            The tensors by the names of the source: DTensors of shardspec or of torch or, in a
            job, the shards of this rank; and plain values. It may be nested.
        out
            What is filled, by the names of the target; by default new tensors are made.
        receipt
            Also return a `shardspec.resharding.receipts.Receipt`: digests of the source and of what
            arrived are compared on every rank, and those of the target's tensors are in it. A rank
            of no mesh gets none.
        version
            The caller's number of what is sent, the same on every rank; it is in the receipt.

        Returns
        -------
        dict
            The tensors of which this process holds a shard, by the names of the target: what
            `out` has, or new DTensors. With them the plain values, on every rank of any mesh. With
            `receipt`, a tuple of this and the `Receipt`.

        Raises
        ------
        LayoutError
            If a tensor is missing or is not as the plan says, on any rank; on all ranks, before
            anything is sent. On a rank of no mesh if it asks for a receipt.
        CheckpointError
            If a checkpoint cannot be read, or has changed since the plan was made.
        CommunicatorError
            If ranks have different plans or versions, a rank has gone, or with `receipt` a tensor
            did not arrive as it was sent; DTensors of `out` that may be half written or wrong then
            raise it too when they are read.
        """
        from shardspec.resharding.execute import run_reshard

        if version is not None and not receipt:
            raise LayoutError(f"version={version} is for a receipt; give receipt=True too")
        if self.executor is not None:
            if receipt:
                raise LayoutError(
                    f"a plan that {self.executor} gives no receipt; compare digest(out)"
                )
            return self.executor.run(self, state, out)
        filled, arrived = run_reshard(self, state, out, receipt=receipt, version=version)
        return filled if arrived is None else (filled, arrived)

    def transfers(
        self, device: int, end: End = "receiver", *, strides: Declared | None = None
    ) -> Rows:
        """Return what a device receives or sends, as rows of strided copies.

        For those who move bytes with a library of their own. What the fields mean, and a player,
        stand in the `page on transfers <transfers.md>`_. Rows are valid for plans of one `digest`.

        Parameters
        ----------
        device
            Physical id; of a plan from a checkpoint also the number of a file.
        end
            What the device is to receive, to send, or all of it. What it has already, and copies
            from itself, is among each of them.
        strides
            How shards lie in memory where they are not row-major without gaps: under ``"source"``
            and ``"target"``, by the name of the tensor there, bytes from one element to the next
            per dim; or these by device.

        Returns
        -------
        numpy.ndarray
            A structured array of the fields ``stage, tensor, sender, receiver, source_offset,
            target_offset, run_bytes, count, source_step, target_step``.

        Raises
        ------
        LayoutError
            If the device is not in the plan, a tensor is cast or quantized on the way, or strides
            are missing for a device, or let elements overlap.

        Examples
        --------
        >>> mesh = DeviceMesh(range(2), (2,))
        >>> source = {"w": Layout(mesh, "[S0,R]", (4, 6), "float32")}
        >>> from shardspec import plan_reshard
        >>> rows = plan_reshard(source, (DeviceMesh([7, 8], (2,)), {"w": "[R,S0]"})).transfers(8)
        >>> rows[["sender", "source_offset", "target_offset", "run_bytes", "count"]].tolist()
        [(0, 12, 0, 12, 2), (1, 12, 24, 12, 2)]
        """
        files = None if self.executor is None else self.executor.regions(self)
        return transfer_rows(self, device, end, strides=strides, files=files)


def plan_state(
    source: Mapping[str, object],
    target: ReshardTarget,
    names: Names | Sequence[NameMap] | None,
    dtype: object,
    max_bytes: int | None,
    drop: str | Sequence[str] = (),
    dropped: Mapping[str, Shape] | None = None,
    links: Links | None = None,
) -> ReshardPlan:
    """Plan how a state dict, or layouts by name, become others; see `plan_reshard`.

    `dropped` are tensors that a map before this one has left behind.
    """
    given = flat_state(source)
    before = _stated(given)
    shapes = {name: layout.global_shape for name, layout in before.items()}
    behind = {**dropped_by(drop, shapes), **(dropped or {})}
    given = {name: value for name, value in given.items() if name not in behind}
    before = {name: layout for name, layout in before.items() if name not in behind}
    renamed: dict[str, str] = {}
    padded: set[str] = set()
    if isinstance(names, Naming):
        wanted = {name: layout.global_shape for name, layout in before.items()}
        names = names.maps(wanted, behind=behind)
    if isinstance(names, NameMap):
        names = (names,)
    if isinstance(names, Sequence) and names and all(isinstance(m, NameMap) for m in names):
        moves, padded = _mapped(before, target, names, dtype, behind)
    elif isinstance(names, Mapping | None):
        renamed = _renamed(list(given), names or {})
        outlines = {renamed[name]: (at.global_shape, at.dtype) for name, at in before.items()}
        after = _targets(target, outlines, dtype)
        for lacking, missing in (
            ("target", sorted(outlines.keys() - after.keys())),
            ("source", sorted(after.keys() - outlines.keys())),
        ):
            if missing:
                names_text = first_of([*map(shown, missing)])
                raise LayoutError(
                    f"the {lacking} lacks {names_text}; names= maps names that differ"
                )
        moves = [
            TensorMove(name, renamed[name], layout, after[renamed[name]])
            for name, layout in before.items()
        ]
    else:
        raise LayoutError(
            f"names= is a {type(names).__name__}; give model_names(), a "
            "NameMap, several in order, or a dict of new names"
        )
    # All ranks have the same plan, in whatever order they list names.
    moves.sort(key=lambda move: (move.target_name, move.source_name))
    values = sorted((name, renamed.get(name, name)) for name in given if name not in before)
    left_behind = sorted(shapes.keys() - {move.source_name for move in moves})
    bound = bound_of_bytes(max_bytes)
    limit = MAX_BYTES if bound is None else bound
    plan = ReshardPlan(
        tuple(moves), limit, tuple(values), tuple(sorted(padded)), tuple(left_behind), links=links
    )
    _ = plan.cluster  # raises where links do not fit the meshes
    for places in plan.kinds.values():
        check_move(plan.moves[places[0]])
    if bound is not None:
        _ = plan.bucket_bytes  # raises where it is too small
    return plan


def reshard_state(
    state: Mapping[str, object],
    rules: Rules,
    *,
    device_mesh: DeviceMesh | None = None,
    names: Names | Sequence[NameMap] | None = None,
    max_bytes: int | None = None,
) -> dict[str, Any]:
    """Convert a state dict of DTensors to the specs that rules name, in one go.

    Parameters
    ----------
    state
        DTensors, shardspec's or torch's; ``{}`` on a rank that holds nothing.
    rules
        Name pattern to spec; what no pattern matches is replicated.
    device_mesh
        Where to; in a job all ranks then call this. By default the mesh of the tensors, whose ranks
        call it.
    names, max_bytes
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
    from shardspec.comm.process_group import telling_job

    with telling_job():
        if device_mesh is None and not state:
            return {}  # what holds nothing is no part of the mesh of the tensors
        given = state if device_mesh is None else known_to_all(state)
        meshes = {layout.mesh for layout in layouts_of(given).values()}
        if device_mesh is not None:
            meshes.add(device_mesh)
    with telling_job(device for mesh in meshes for device in mesh.ids):
        if device_mesh is None:
            if len(meshes) != 1:
                raise LayoutError(
                    f"the tensors lie on {counted(len(meshes), 'mesh', 'meshes')}; name one, as "
                    "in device_mesh=mesh"
                )
            (device_mesh,) = meshes
        return plan_state(given, (device_mesh, rules), names, None, max_bytes).run(state)


def layouts_of(state: Mapping[str, object]) -> dict[str, Layout]:
    """Return the layouts of the tensors of a state dict, by name."""
    return _stated(flat_state(state))


def _stated(flat: Mapping[str, object]) -> dict[str, Layout]:
    return {
        name: required_layout(name, value)
        for name, value in flat.items()
        if isinstance(value, Layout) or not is_plain(value)
    }


def known_to_all(state: Mapping[str, object]) -> Mapping[str, object]:
    """Return a state dict, or in a job what all ranks have of one, unless it consists of layouts.

    All ranks of the job call this together, where the state dict has no `Layout`.
    """
    # Without torch there is no job.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return state
    if any(isinstance(value, Layout) for value in flat_state(state).values()):
        return state
    from shardspec.resharding.gathered import layouts_of_job

    return layouts_of_job(state)


def _renamed(before: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of every tensor and value."""
    if unknown := sorted(set(names) - set(before)):
        raise LayoutError(f"names= maps {shown(unknown[0])}, which the source lacks")
    first: dict[str, str] = {}
    for name in before:
        new = names.get(name, name)
        if (other := first.setdefault(new, name)) != name:
            raise LayoutError(
                f"names= makes both {other!r} and {name!r} to {new!r}; give each its own name"
            )
    return {name: new for new, name in first.items()}


def _targets(
    target: ReshardTarget, outlines: Mapping[str, tuple[tuple[int, ...], str]], dtype: object
) -> dict[str, Layout]:
    """Return the layouts of the target; by rules from the shapes and dtypes of its tensors."""
    if not isinstance(target, tuple):
        return layouts_of(target)
    mesh, rules = target
    specs = match_rules(rules, {name: shape for name, (shape, _) in outlines.items()}, mesh)
    wanted = None if dtype is None else dtype_name(dtype)
    layouts = {}
    for name, (shape, own) in outlines.items():
        spec = specs.get(name, ShardingSpec(len(shape), {}))
        casts = is_floating(own) and not keeps_dtype(name)
        layouts[name] = Layout(mesh, spec, shape, wanted if wanted and casts else own)
    return layouts


def _mapped(
    before: Mapping[str, Layout],
    target: ReshardTarget,
    names: Sequence[NameMap],
    dtype: object,
    dropped: Mapping[str, Shape],
) -> tuple[list[TensorMove], set[str]]:
    """Return the moves under some maps in turn, and the tensors of the target with padding."""
    shapes = {**dropped, **{name: layout.global_shape for name, layout in before.items()}}
    equations: list[Equation] | None = None
    padded: set[str] = set()
    for number, map_ in enumerate(names, 1):
        if number < len(names) or isinstance(target, tuple):
            after, behind, report = apply_map(map_, shapes, dropped)
        else:
            after = {name: layout.global_shape for name, layout in layouts_of(target).items()}
            behind, report = {}, report_of(map_, shapes, after, dropped)
        report.require_total()
        equations = _in_turn(equations, report.equations)
        padded = {e.target for e in report.equations if e.source in padded}
        padded |= {name for name, _ in map_.padding(after)}
        shapes, dropped = {**after, **behind}, behind
    every = equations or []
    outlines = {e.target: (after[e.target], before[e.source].dtype) for e in every}
    layouts = _targets(target, outlines, dtype)
    moves = [
        TensorMove(e.source, e.target, before[e.source], layouts[e.target], e.view) for e in every
    ]
    return moves, padded


def _in_turn(first: Sequence[Equation] | None, second: Sequence[Equation]) -> list[Equation]:
    """Return the equations of two maps, one after the other."""
    if first is None:
        return list(second)
    written: dict[str, list[Equation]] = {}
    for equation in first:
        written.setdefault(equation.target, []).append(equation)
    both = []
    for equation in second:
        for before in written.get(equation.source, ()):
            view = composed(before.view, equation.view)
            if view is None:
                raise LayoutError(
                    f"{equation.source!r} is cut by one map and joined by another; plan through "
                    "the names between them, one map at a time"
                )
            both.append(Equation(before.source, equation.target, view))
    return both


def check_move(move: TensorMove) -> None:
    """Refuse a move between shapes or dtypes that do not fit, or of a pending reduction."""
    name, before, after = move.source_name, move.source, move.target
    if move.view is None and before.global_shape != after.global_shape:
        raise LayoutError(
            f"{name!r} is {before.global_shape} in the source and {after.global_shape} in the "
            "target"
        )
    dtypes = before.dtype, after.dtype
    if dtypes[0] != dtypes[1] and not (is_cast(*dtypes) and is_cast(*reversed(dtypes))):
        raise LayoutError(
            f"{name!r} is {before.dtype} in the source and {after.dtype} in the target; only "
            "floating-point dtypes are cast"
        )
    for spec in (before.spec, after.spec):
        if spec.partials:
            raise LayoutError(
                f"{name!r} is laid out as {spec}, with a reduction pending; finish it first, with "
                f"redistribute({str(spec.without_partial())!r})"
            )
