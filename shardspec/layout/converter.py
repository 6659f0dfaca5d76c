"""`LayoutConverter` finds the cheapest steps from one layout to another, and lists all costs."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from shardspec.comm.cost import CostModel, Links, models_on
from shardspec.comm.steps import ReduceOp, Slice
from shardspec.errors import LayoutError
from shardspec.layout import graph
from shardspec.layout.layout import Layout, OwnSpec, SpecLike
from shardspec.layout.plan import ConversionPlan, Move, communicating_moves, plan_of_moves
from shardspec.layout.pricing import Prices, prices_to_search, states_of
from shardspec.layout.search import cheapest_plan, too_many
from shardspec.layout.spec import ShardingSpec
from shardspec.layout.table import CostTable, cost_table, pair_costs
from shardspec.layout.transitions import dot_text, priced_graph
from shardspec.mesh.device_ids import bound_of_bytes
from shardspec.mesh.device_mesh import DeviceMesh

if TYPE_CHECKING:
    import networkx as nx


class LayoutConverter:
    """Finds the cheapest plan between two layouts.

    Parameters
    ----------
    cost_model
        Prices of steps; by default those of the mesh of each conversion.
    target_model
        Prices on the target's mesh if that differs from the source's; by default its own.
    links
        The links of the cluster, instead of the models: the name of a preset, one name per axis,
        or a `shardspec.comm.cluster.Cluster`. By default the links of the meshes.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> source = Layout(DeviceMesh(range(6), (2, 3)), "[R,S01,R]", (600, 600, 600), "f32")
    >>> plan = LayoutConverter().plan(source, "[S01,R,R]")
    >>> [str(layout.spec) for layout in plan.layouts]
    ['[R,S01,R]', '[S01,R,R]']
    """

    def __init__(
        self,
        cost_model: CostModel | None = None,
        *,
        target_model: CostModel | None = None,
        links: Links | None = None,
    ) -> None:
        if links is not None and (cost_model or target_model) is not None:
            raise LayoutError("give links, or cost_model and target_model, not both")
        self.cost_model = cost_model
        self.links = links
        self.target_model = target_model
        self._seconds: dict[tuple[Layout, Layout | OwnSpec], float] = {}

    def plan(
        self, source: Layout, target: Layout | SpecLike, *, max_bytes: int | None = None
    ) -> ConversionPlan:
        """Return the cheapest plan from `source` to `target`.

        Parameters
        ----------
        source
            The tensor's current layout.
        target
            The layout to reach: a spec on the same mesh, or a layout on any mesh.
        max_bytes
            Limit on the bytes of a device's shards before and after any step, in sum. By default
            there is no limit. Only for a target on the same mesh.

        Raises
        ------
        LayoutError
            If the target has another shape or dtype, a pending reduction that the source lacks, or
            any pending reduction on another mesh; if every plan needs more than `max_bytes` (the
            message has the minimum); or if `max_bytes` is set for a target on another mesh.
        AxisError
            If the mesh lacks an axis of the target spec.

        Notes
        -----
        Between two meshes the tensor is converted on the first, sent in one exchange, and
        converted on the second. Devices in both meshes keep the elements that they need.

        Examples
        --------
        Four devices send to four others. Each first halves its shard, so every byte is sent once.

        >>> from shardspec import DeviceMesh
        >>> first, second = DeviceMesh(range(4), (2, 2)), DeviceMesh(range(4, 8), (4,))
        >>> source = Layout(first, "[S0,R]", (8, 8), "f32")
        >>> plan = LayoutConverter().plan(source, Layout(second, "[S0,R]", (8, 8), "f32"))
        >>> plan.steps, plan.bytes_received
        ((Slice(dim=1, axes=(1,)), Exchange(axes=(), apart=())), 64)
        """
        if not isinstance(source, Layout):
            raise LayoutError(
                f"the source is a {type(source).__name__}; give a Layout, which has mesh, shape "
                "and dtype"
            )
        goal = target if isinstance(target, Layout) else source.with_spec(target)
        _check_same_tensor(source, goal)
        meshes = source.mesh, goal.mesh
        own = self.cost_model, self.target_model
        if None in own:
            models = models_on([m for m, g in zip(meshes, own, strict=True) if not g], self.links)
            own = own[0] or models[source.mesh], own[1] or models[goal.mesh]
        model, target_model = (_fitting(g, m) for g, m in zip(own, meshes, strict=True) if g)
        other_model = None if source.mesh == goal.mesh else target_model
        return cheapest_plan(source, goal, model, other_model, bound_of_bytes(max_bytes))

    def alternatives(
        self,
        source: Layout,
        target: Layout | SpecLike,
        count: int,
        *,
        max_bytes: int | None = None,
    ) -> tuple[ConversionPlan, ...]:
        """Return up to `count` cheapest plans in ascending order of cost; `plan` returns the first.

        Plans that differ only in slices count as one. Between two layouts only the cheapest step
        is considered. No plan visits a layout twice, and several slices in a row visit all layouts
        between them, so no plan gathers a tensor only to slice it again.

        Raises what `plan` raises, and `LayoutError` for two meshes or more than 1,500 layouts.

        Examples
        --------
        >>> from shardspec import DeviceMesh
        >>> source = Layout(DeviceMesh(range(4), (2, 2)), "[S0,R]", (64, 64), "f32")
        >>> [p.bytes_received for p in LayoutConverter().alternatives(source, "[R,S1]", 3)]
        [4096, 8192, 12288]
        """
        max_bytes = bound_of_bytes(max_bytes)
        best = self.plan(source, target, max_bytes=max_bytes)
        if count < 1:
            raise LayoutError(f"cannot list {count} plans; ask for at least 1")
        goal = best.target
        if count == 1 or source == goal or not (source.spec.is_plain and goal.spec.is_plain):
            return (best,)
        if goal.mesh != source.mesh:
            raise LayoutError(
                f"alternatives are listed on one mesh only, but {goal} is on another mesh than "
                f"{source}"
            )
        if states_of(source) > graph.MAX_STATES:
            raise too_many("alternatives", source, "ask for the plan alone")
        prices, move = prices_to_search(source, best.model, max_bytes, goal)
        goals = prices.state(source), prices.state(goal)
        plans = {_moved(best): best}
        slices = [edge for edge, step in prices.steps.items() if isinstance(step, Slice)]
        for path in islice(graph.cheapest_paths(prices.space, slices, move, *goals, count), count):
            plan = plan_of_moves(source, _moves_along(prices, path, source), best.model)
            plans.setdefault(_moved(plan), plan)
        return tuple(plans.values())[:count]

    def graph(self, layout: Layout) -> "nx.DiGraph":
        """Return the priced transition graph of a tensor: every layout and every single step.

        Parameters
        ----------
        layout
            The tensor on its mesh; only the pending reductions of its spec matter.

        Returns
        -------
        networkx.DiGraph
            Nodes are `ShardingSpec`; edges have the attributes `step`, `seconds` and `bytes`
            (received by the busiest device). An edge is the cheapest single step between two specs:
            a slice, gather, all-to-all or reduction, or, between specs without pending reductions,
            a `Permute` or `Exchange`. A shortest path by `seconds` takes as long as the plan.

        Raises
        ------
        LayoutError
            If there are more than 1,500 specs or 512 devices, which are too many to price every
            exchange; or if the spec has parts or blocks.

        Examples
        --------
        >>> import networkx
        >>> from shardspec import DeviceMesh
        >>> layout = Layout(DeviceMesh(range(4), (2, 2)), "[R,R]", (64, 64), "f32")
        >>> graph = LayoutConverter().graph(layout)
        >>> ends = layout.with_spec("[S0,R]").spec, layout.with_spec("[R,S0]").spec
        >>> path = networkx.shortest_path(graph, *ends, weight="seconds")
        >>> [str(spec) for spec in path]
        ['[S0,R]', '[R,R]', '[R,S0]']
        >>> graph.edges[path[0], path[1]]["step"], graph.edges[path[0], path[1]]["bytes"]
        (AllGather(dim=0, axes=(0,)), 8192)
        """
        return priced_graph(layout, self._model_of(layout.mesh))

    def to_dot(self, layout: Layout, target: Layout | SpecLike | None = None) -> str:
        """Return the priced transition graph in Graphviz's language, for ``dot -Tsvg``.

        With a target, the plan from `layout` to it is in bold. Permutes and exchanges connect all
        pairs of specs, so only those of the plan are drawn. Raises what `graph` and `plan` raise.

        Examples
        --------
        >>> from shardspec import DeviceMesh
        >>> layout = Layout(DeviceMesh(range(2), (2,)), "[S0]", (8,), "f32")
        >>> print(LayoutConverter().to_dot(layout, "[R]").splitlines()[-2])
          "[S0]" -> "[R]" [label="all-gather dim 0 over 0, 5.87 µs", color="#0072b2", penwidth=3];
        """
        plan = None if target is None else self.plan(layout, target)
        return dot_text(layout, self._model_of(layout.mesh), plan)

    def cost(self, source: Layout, target: Layout | SpecLike) -> float:
        """Return the modeled seconds of the cheapest plan; raises what `plan` raises.

        Examples
        --------
        >>> from shardspec import DeviceMesh
        >>> source = Layout(DeviceMesh(range(2), (2,)), "[R]", (8,), "f32")
        >>> LayoutConverter().cost(source, "[S0]")
        0.0
        """
        if not isinstance(target, Layout | ShardingSpec | str):
            target = source.with_spec(target)
        seconds = self._seconds.get((source, target))
        if seconds is None:
            seconds = self._seconds[source, target] = self.plan(source, target).cost_seconds
        return seconds

    def costs(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> npt.NDArray[Any]:
        """Return the modeled seconds from each source to the corresponding target.

        Parameters
        ----------
        sources, targets
            Layouts of any tensors and meshes, one target per source. Each distinct pair is priced
            once, so millions of pairs of a few objects are fast.

        Returns
        -------
        array (pairs)

        Raises
        ------
        LayoutError
            If the numbers of sources and targets differ, or a pair cannot be converted.

        Examples
        --------
        >>> from shardspec import DeviceMesh
        >>> whole = Layout(DeviceMesh(range(4), (4,)), "[R,R]", (64, 64), "f32")
        >>> LayoutConverter().costs([whole] * 3, [whole, whole.with_spec("[S0,R]"), whole])
        array([0., 0., 0.])
        """
        return pair_costs(sources, targets, self._model_of, self.cost, lambda layout: layout)

    def cost_table(
        self,
        mesh: DeviceMesh,
        global_shape: Sequence[int],
        dtype: object,
        *,
        partial: Sequence[ReduceOp] = (),
    ) -> CostTable:
        """Return the costs of every conversion of a tensor, as arrays.

        Parameters
        ----------
        mesh
            The devices.
        global_shape, dtype
            The tensor.
        partial
            A kind of reduction that may be pending along any axes, as in ``("sum",)``; by default
            none is pending.

        Raises
        ------
        LayoutError
            If the mesh has too many axes or devices for a table.

        Examples
        --------
        >>> from shardspec import DeviceMesh
        >>> table = LayoutConverter().cost_table(DeviceMesh(range(4), (2, 2)), (64, 64), "f32")
        >>> table.seconds.shape, table.labels[:3]
        ((11, 11), ('[R,R]', '[R,S0]', '[R,S1]'))
        >>> table.cost("[R,R]", "[S01,R]"), table.local_bytes[table.index("[S01,R]")]
        (0.0, np.int64(4096))
        """
        return cost_table(mesh, tuple(global_shape), dtype, self._model_of(mesh), partial)

    def _model_of(self, mesh: DeviceMesh) -> CostModel:
        return _fitting(self.cost_model or CostModel.of_mesh(mesh, self.links), mesh)


def _fitting(model: CostModel, mesh: DeviceMesh) -> CostModel:
    if model.mesh_shape != mesh.shape:
        raise LayoutError(
            f"the cost model is for a mesh of shape {model.mesh_shape}, but the layout is on "
            f"a mesh of shape {mesh.shape}"
        )
    return model


def _check_same_tensor(source: Layout, target: Layout) -> None:
    for field in ("global_shape", "dtype"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            raise LayoutError(
                f"cannot convert {source} to {target}: {field.replace('_', ' ')} {ours} differs "
                f"from {theirs}"
            )
    if source.mesh != target.mesh and target.spec.partials:
        raise LayoutError(
            f"cannot convert {source} to {target}: a reduction cannot stay pending on another "
            "mesh; let the target spec finish it"
        )
    missing = set(target.spec.partials) - set(source.spec.partials)
    if missing:
        raise LayoutError(
            f"cannot convert {source.spec} to {target.spec}: the target has a pending "
            f"{min(p.op for p in missing)} that the source lacks; a conversion only finishes "
            "reductions, it never starts one"
        )


def _moved(plan: ConversionPlan) -> tuple[tuple[Layout, Layout], ...]:
    """Return the layouts before and after each step except slices, to tell plans apart."""
    return tuple((before, after) for _, before, after in communicating_moves(plan))


def _moves_along(prices: Prices, path: Sequence[graph.Node], source: Layout) -> Iterator[Move]:
    """Yield the moves along a path; consecutive slices become one slice per dim."""
    layout = source
    for (a, _), (b, by_cut) in pairwise(path):
        if not by_cut:
            step, layout = prices.move(source, a, b)
            yield step, layout
            continue
        before, after = prices.space.states[a][0], prices.space.states[b][0]
        cut = {dim: axes for dim, axes in enumerate(after) if axes != before[dim]}
        # The slice with the smallest result comes first, which minimizes peak memory.
        result_bytes = {
            dim: source.with_spec(layout.spec.with_dims({dim: cut[dim]})).max_local_bytes
            for dim in cut
        }
        for dim in sorted(cut, key=result_bytes.__getitem__):
            layout = source.with_spec(layout.spec.with_dims({dim: cut[dim]}))
            yield Slice(dim, cut[dim][len(before[dim]) :]), layout
