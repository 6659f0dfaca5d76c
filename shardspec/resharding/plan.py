"""Plans and prices the copies that bring a state dict to other layouts: `ReshardPlan`."""

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, overload

from shardspec.comm.cost import Links
from shardspec.dtypes import dtype_name, is_cast, is_floating, item_bytes, keeps_dtype
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.layout.rules import Rules, match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_ids import bound_of_bytes
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.name_map import Equation, NameMap, Names, Naming, Shape, padding
from shardspec.resharding.rows import Declared, End, FileRegion, Rows, transfer_rows
from shardspec.resharding.stages import (
    MoveKind,
    StateCopies,
    StoredLayout,
    TensorMove,
    cluster_of_moves,
    kinds_of,
    state_copies,
)
from shardspec.resharding.state import flat_state, is_plain, required_layout
from shardspec.resharding.total import apply_map, dropped_by, report_of
from shardspec.resharding.views import composed
from shardspec.text import bytes_text, counted, first_of, seconds_text, shown, table_text

if TYPE_CHECKING:
    from shardspec.resharding.receipts import Receipt

_MAX_BYTES: Final = 256 << 20
"""Default size of the send buffer and of the receive buffer of a device."""
_MOST_ROWS: Final = 32
"""Maximum devices in a printed table."""

ReshardTarget: TypeAlias = Mapping[str, object] | tuple[DeviceMesh, Rules]
"""Layouts by name, or DTensors; or a mesh and rules."""


class Executor(Protocol):
    """Runs plans that do more than copy between devices, for example read a checkpoint.

    Its text names this work, as in "reads the checkpoint model".
    """

    def run(
        self, plan: "ReshardPlan", state: Mapping[str, object], out: Mapping[str, object] | None
    ) -> dict[str, Any]:
        """Carry a plan out; see `ReshardPlan.run`."""

    def regions(self, plan: "ReshardPlan") -> Mapping[str, Sequence[FileRegion]]:
        """Return, for each source tensor, the ranges of files that contain it.

        Raises LayoutError if the target is not a byte copy of them.
        """


@dataclass(frozen=True, repr=False)
class ReshardPlan:
    """The copies that bring a state dict to other layouts; made by `plan_reshard`.

    A plain value, equal on every rank that makes it, without tensors, buffers or groups. It can be
    printed, compared, pickled and run any number of times.

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
    8 pairs of devices, peak 192 B, 23 µs over assumed h100-nvswitch
    """

    moves: tuple[TensorMove, ...]
    """The tensors, by name; those with the same pair of layouts travel together."""
    max_bytes: int = _MAX_BYTES
    """Maximum bytes of send buffers, and of receive buffers, per device."""
    values: tuple[tuple[str, str], ...] = ()
    """(source name, target name) of each plain value."""
    padded: tuple[str, ...] = ()
    """Tensors of the target with padding: zeros where no source tensor fills them."""
    dropped: tuple[str, ...] = ()
    """Tensors of the source that are dropped."""
    quantized: tuple[str, ...] = ()
    """Tensors of the target that are quantized on arrival."""
    links: Links | None = None
    """Links of the cluster; None for those of the meshes, or an assumed preset."""
    executor: Executor | None = None
    """Runs the plan; None if the plan only copies between devices."""

    @cached_property
    def digest(self) -> str:
        """Hash of the plan, in hexadecimal: equal plans have equal digests."""
        names = self.values, self.padded, self.dropped, *self.quantized
        digest = hashlib.sha256(repr((self.max_bytes, *names, self.links)).encode())
        facts = cache(lambda layout: hashlib.sha256(repr(_facts(layout)).encode()).digest())
        for (source, target, view), places in self._kinds.items():
            moved = [(self.moves[n].source_name, self.moves[n].target_name) for n in places]
            digest.update(repr((facts(source), facts(target), view, moved)).encode())
        return digest.hexdigest()

    @cached_property
    def _kinds(self) -> dict[MoveKind, list[int]]:
        return kinds_of(self.moves)

    @cached_property
    def copies(self) -> StateCopies:
        """The copies of boxes from device to device, in stages."""
        named = self.moves, self.values, self.padded, self.dropped, self.digest
        return state_copies(*named, self._kinds, self.max_bytes, self.links)

    @property
    def devices(self) -> tuple[int, ...]:
        """Ids of all devices, ascending; files of a checkpoint are numbered like devices."""
        return self.copies.devices

    @cached_property
    def sent(self) -> Mapping[int, int]:
        """Bytes that every device sends."""
        return self._summed(0)

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Bytes that every device receives."""
        return self._summed(1)

    def _summed(self, end: int) -> dict[int, int]:
        summed = dict.fromkeys(self.copies.devices, 0)
        for pair, num_bytes in self.copies.traffic.items():
            summed[pair[end]] += num_bytes
        return summed

    @property
    def bytes_between_hosts(self) -> int | None:
        """Bytes that go from one host to another; None if all devices are on one host."""
        if self.copies.num_hosts == 1:
            return None
        crosses = self.copies.cluster.crosses
        return sum(size for pair, size in self.copies.traffic.items() if crosses(*pair))

    @property
    def peak_bytes(self) -> int:
        """Maximum bytes of a device at once: its source, its target and its buffers."""
        before = {move.source_name: move.source for move in self.moves}
        after = {move.target_name: move.target for move in self.moves}
        num_bytes = dict.fromkeys(self.copies.devices, 0)
        for layout, count in Counter([*before.values(), *after.values()]).items():
            if not isinstance(layout, StoredLayout):
                width = item_bytes(layout.dtype) * count
                for device in layout.mesh.ids:
                    num_bytes[device] += prod(layout.local_shape(device)) * width
        for device in num_bytes:
            for moved in (self.sent, self.received):
                num_bytes[device] += min(self.max_bytes, moved[device])
        files = self.copies.files
        return max((num_bytes[device] for device in num_bytes if device not in files), default=0)

    @property
    def cost_seconds(self) -> float:
        """Modeled seconds until the last device has sent and received everything.

        Each stage costs its start, each message the latency of its link, and each byte the
        transfer cost of its link, inside a host or between hosts.
        """
        return self.copies.cost_seconds

    def as_dict(self) -> dict[str, object]:
        """Return the plan as plain values, ready for JSON."""
        return {
            "tensors": len(self.moves),
            "devices": list(self.copies.devices),
            "sent": {str(device): num_bytes for device, num_bytes in self.sent.items()},
            "received": {str(device): num_bytes for device, num_bytes in self.received.items()},
            "busiest_sender": max(self.sent.values(), default=0),
            "busiest_receiver": max(self.received.values(), default=0),
            "pairs": len(self.copies.traffic),
            "bytes_between_hosts": self.bytes_between_hosts,
            "peak_bytes": self.peak_bytes,
            "cost_seconds": self.cost_seconds,
            "digest": self.digest,
        }

    def __repr__(self) -> str:
        tensors = counted(len(self.moves), "tensor")
        return f"ReshardPlan({tensors} on {counted(len(self.copies.devices), 'device')})"

    def __str__(self) -> str:
        """Return a table of bytes sent and received per device, and the plan's other work."""
        text = text_of(self, {})
        return text if self.executor is None else f"{text}\n{self.executor}"

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
        passes ``{}``. Without a job all devices are simulated in this process. If the source is a
        checkpoint, all pass ``{}``, and each rank reads its own shards.

        Parameters
        ----------
        state
            The tensors by the names of the source: DTensors of shardspec or of torch or, in a
            job, the shards of this rank; and plain values. It may be nested.
        out
            Tensors to fill, by the names of the target; by default new tensors are made.
        receipt
            Also return a `shardspec.resharding.receipts.Receipt`, with digests of the target's
            tensors; these are compared with the source on every rank. Ranks outside all meshes get
            none.
        version
            The caller's version number for the receipt, the same on every rank.

        Returns
        -------
        dict
            Tensors with a shard in this process, by the names of the target: those of `out`, or
            new DTensors. It includes the plain values, on every rank of any mesh. With `receipt`,
            a tuple of this dict and the `Receipt`.

        Raises
        ------
        LayoutError
            On all ranks, before anything is sent, if a tensor on any rank is missing or differs
            from the plan. On a rank outside all meshes if it asks for a receipt.
        CheckpointError
            If a checkpoint cannot be read, or has changed since the plan was made.
        CommunicatorError
            If ranks have different plans or versions, a rank has gone, or a receipt differs from
            the source. Reading a half-written or wrong DTensor of `out` then raises it too.
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
        filled, arrived = run_reshard(self.copies, state, out, receipt=receipt, version=version)
        return filled if arrived is None else (filled, arrived)

    def transfers(
        self, device: int, end: End = "receiver", *, strides: Declared | None = None
    ) -> Rows:
        """Return the copies that a device receives or sends, as an array of strided copies.

        Another library can move the bytes by these rows. The `page on transfers <transfers.md>`_
        explains the fields and has an example. Rows are valid for plans with the same `digest`.

        Parameters
        ----------
        device
            Physical id; of a plan from a checkpoint also the number of a file.
        end
            Rows to return: those that the device receives, those that it sends, or both. Copies
            from itself to itself are in each of them.
        strides
            Strides in bytes of shards with gaps or another order of dims, as in
            ``{"source": {"w": (4, 32)}}``; for one tensor also a dict of strides by device.

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
        return transfer_rows(self.copies, device, end, strides=strides, files=files)


def text_of(plan: ReshardPlan, names: Mapping[int, str]) -> str:
    """Return a plan as a table; `names` replace the ids of some devices or files."""
    copies, sent, received = plan.copies, plan.sent, plan.received
    rows = [
        [names.get(device, str(device)), bytes_text(sent[device]), bytes_text(received[device])]
        for device in copies.devices[:_MOST_ROWS]
    ]
    if len(copies.devices) > _MOST_ROWS:
        rows.append(["…", "", ""])
    devices = counted(len(copies.devices) - len(copies.files), "device")
    files = f", from {counted(len(copies.files), 'file')}" if copies.files else ""
    lines = [
        f"{counted(len(plan.moves), 'tensor')} on {devices}{files}",
        table_text(["device", "sends", "receives"], rows),
    ]
    for role, moved in (("sender", sent), ("receiver", received)):
        busy = [num_bytes for num_bytes in moved.values() if num_bytes]
        share = bytes_text(sum(busy) / max(1, len(busy)))
        lines.append(
            f"busiest {role} {bytes_text(max(busy, default=0))} "
            f"(even share of {counted(len(busy), role)}: {share})"
        )
    lines.append(
        f"{counted(len(copies.traffic), 'pair')} of devices, "
        f"peak {bytes_text(plan.peak_bytes)}, {seconds_text(plan.cost_seconds)} over "
        f"{copies.cluster.inside.name}"
    )
    if between := plan.bytes_between_hosts:
        once = " (each byte once to a host)" if len(copies.stages) > 1 else ""
        over = f" over {copies.cluster.between.name}" if copies.cluster.between else ""
        hosts = counted(copies.num_hosts, "host")
        lines.append(f"between {hosts} {bytes_text(between)}{once}{over}")
    return "\n".join(lines)


def _facts(layout: Layout) -> tuple[object, ...]:
    """Return the properties of a layout that change a plan: mesh, links, spec, shape, dtype."""
    stored = layout.stored if isinstance(layout, StoredLayout) else ()
    mesh = layout.mesh
    links = mesh.mesh_alpha, mesh.mesh_beta, mesh.link_model
    return mesh.ids, mesh.shape, links, str(layout.spec), stored, layout.global_shape, layout.dtype


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
    """Plan the copies from a state dict, or layouts by name, to a target; see `plan_reshard`.

    `dropped` are tensors that an earlier map has dropped.
    """
    flat = flat_state(source)
    before = _layouts_of_flat(flat)
    shapes = {name: layout.global_shape for name, layout in before.items()}
    behind = {**dropped_by(drop, shapes), **(dropped or {})}
    flat = {name: value for name, value in flat.items() if name not in behind}
    before = {name: layout for name, layout in before.items() if name not in behind}
    renamed: dict[str, str] = {}
    padded: set[str] = set()
    if isinstance(names, Naming):
        remaining = {name: layout.global_shape for name, layout in before.items()}
        names = names.maps(remaining, behind=behind)
    if isinstance(names, NameMap):
        names = (names,)
    if isinstance(names, Sequence) and names and all(isinstance(m, NameMap) for m in names):
        moves, padded = _mapped(before, target, names, dtype, behind)
    elif isinstance(names, Mapping | None):
        renamed = _renamed(list(flat), names or {})
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
    # Sorted, so that ranks with different orders of names make the same plan.
    moves.sort(key=lambda move: (move.target_name, move.source_name))
    values = sorted((name, renamed.get(name, name)) for name in flat if name not in before)
    left_behind = sorted(shapes.keys() - {move.source_name for move in moves})
    bound = bound_of_bytes(max_bytes)
    limit = _MAX_BYTES if bound is None else bound
    plan = ReshardPlan(
        tuple(moves), limit, tuple(values), tuple(sorted(padded)), tuple(left_behind), links=links
    )
    examples = [moves[places[0]] for places in plan._kinds.values()]
    cluster_of_moves(examples, links)  # raises where links do not fit the meshes
    for move in examples:
        check_move(move)
    if bound is not None:
        _ = plan.copies  # raises where it is too small
    return plan


def reshard_state(
    state: Mapping[str, object],
    rules: Rules,
    *,
    device_mesh: DeviceMesh | None = None,
    names: Names | Sequence[NameMap] | None = None,
    max_bytes: int | None = None,
) -> dict[str, Any]:
    """Plan and run the conversion of a state dict of DTensors to the specs that rules name.

    Parameters
    ----------
    state
        DTensors, shardspec's or torch's; ``{}`` on a rank without shards.
    rules
        Name pattern to spec; a tensor that no pattern matches is replicated.
    device_mesh
        Target mesh; in a job all ranks then call this. By default the mesh of the tensors; only its
        ranks call this then.
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
            return {}  # a rank without tensors is outside their mesh
        known = state if device_mesh is None else known_to_all(state)
        meshes = {layout.mesh for layout in layouts_of(known).values()}
        if device_mesh is not None:
            meshes.add(device_mesh)
    with telling_job(device for mesh in meshes for device in mesh.ids):
        if device_mesh is None:
            if len(meshes) != 1:
                raise LayoutError(
                    f"the tensors are on {counted(len(meshes), 'mesh', 'meshes')}; name one, as "
                    "in device_mesh=mesh"
                )
            (device_mesh,) = meshes
        return plan_state(known, (device_mesh, rules), names, None, max_bytes).run(state)


def layouts_of(state: Mapping[str, object]) -> dict[str, Layout]:
    """Return the layouts of the tensors of a state dict, by name."""
    return _layouts_of_flat(flat_state(state))


def _layouts_of_flat(flat: Mapping[str, object]) -> dict[str, Layout]:
    return {
        name: required_layout(name, value)
        for name, value in flat.items()
        if isinstance(value, Layout) or not is_plain(value)
    }


def known_to_all(state: Mapping[str, object]) -> Mapping[str, object]:
    """Return the layouts of the tensors of all ranks in the job; without a job, the state dict.

    A state dict with a `Layout` is returned as it is. Otherwise all ranks of the job call this.
    """
    # Without torch there is no job.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return state
    if any(isinstance(value, Layout) for value in flat_state(state).values()):
        return state
    from shardspec.resharding.inputs import layouts_of_job

    return layouts_of_job(state)


def _renamed(before: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return old to new name of every tensor and value; others keep their name."""
    if unknown := sorted(set(names) - set(before)):
        raise LayoutError(f"names= maps {shown(unknown[0])}, which the source lacks")
    first: dict[str, str] = {}
    for name in before:
        new = names.get(name, name)
        if (other := first.setdefault(new, name)) != name:
            raise LayoutError(
                f"names= renames both {other!r} and {name!r} to {new!r}; give them different names"
            )
    return {name: new for new, name in first.items()}


def _targets(
    target: ReshardTarget, outlines: Mapping[str, tuple[tuple[int, ...], str]], dtype: object
) -> dict[str, Layout]:
    """Return the target's layouts; rules match the names in `outlines`, name -> (shape, dtype)."""
    if not isinstance(target, tuple):
        return layouts_of(target)
    mesh, rules = target
    specs = match_rules(rules, {name: shape for name, (shape, _) in outlines.items()}, mesh)
    requested = None if dtype is None else dtype_name(dtype)
    layouts = {}
    for name, (shape, own) in outlines.items():
        spec = specs.get(name, ShardingSpec(len(shape), {}))
        casts = is_floating(own) and not own.startswith("complex") and not keeps_dtype(name)
        layouts[name] = Layout(mesh, spec, shape, requested if requested and casts else own)
    return layouts


def _mapped(
    before: Mapping[str, Layout],
    target: ReshardTarget,
    names: Sequence[NameMap],
    dtype: object,
    dropped: Mapping[str, Shape],
) -> tuple[list[TensorMove], set[str]]:
    """Apply name maps one after the other; return the moves, and target names with padding."""
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
        padded |= {name for name, _ in padding(map_, after)}
        shapes, dropped = {**after, **behind}, behind
    every = equations or []
    outlines = {e.target: (after[e.target], before[e.source].dtype) for e in every}
    layouts = _targets(target, outlines, dtype)
    moves = [
        TensorMove(e.source, e.target, before[e.source], layouts[e.target], e.view) for e in every
    ]
    return moves, padded


def _in_turn(first: Sequence[Equation] | None, second: Sequence[Equation]) -> list[Equation]:
    """Return equations that apply `first`, then `second`; if `first` is None, only `second`."""
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
                    f"{equation.source!r} is split by one map and joined by another; make one plan "
                    "for each map"
                )
            both.append(Equation(before.source, equation.target, view))
    return both


def check_move(move: TensorMove) -> None:
    """Raise LayoutError if a tensor's two shapes or dtypes differ too much, or a sum is pending."""
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
