"""Plans the resharding of state dicts in memory or in a checkpoint: `plan_reshard`."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from shardspec.checkpoint.storage import storage_path
from shardspec.comm.cost import Links
from shardspec.errors import LayoutError
from shardspec.resharding.name_map import NameMap, Names, Naming
from shardspec.resharding.plan import ReshardPlan, ReshardTarget, known_to_all, plan_state


def plan_reshard(
    source: Mapping[str, object] | PurePath | str,
    target: ReshardTarget,
    *,
    names: Names | Sequence[NameMap] | None = None,
    dtype: object = None,
    max_bytes: int | None = None,
    drop: str | Sequence[str] = (),
    links: Links | None = None,
) -> ReshardPlan:
    """Plan the resharding of a state dict from its layouts to others.

    In a job all ranks call this with their state dicts, ``{}`` on ranks without shards. Layouts are
    exchanged, and every rank gets the same plan. A plan from layouts, or from a checkpoint, needs
    no job and no other rank.

    Parameters
    ----------
    source
        Name to `Layout`, or a state dict of DTensors, shardspec's or torch's; or the path of a
        checkpoint.
    target
        Name to `Layout`, a state dict, or a mesh and rules from name patterns to specs; tensors
        that no pattern matches are replicated. The mesh may be the same, grown, shrunk, permuted,
        disjoint or overlapping.
    names
        Name in the source to name in the target, for names that differ; or `model_names`; or a
        `NameMap`, or several in order, which also fuse, split, stack, transpose and pad.
    dtype
        New dtype of floating-point tensors, if `target` is a mesh and rules; quantized weights of a
        checkpoint are dequantized to it. With ``"fp8-128x128"``, weights of linear layers (by their
        names) become codes of float8_e4m3fn and scales. The sender quantizes if its shards do not
        split blocks, else the receiver. From a checkpoint, codes are equal to those that `merge`
        writes with ``quantize=``.
    max_bytes
        Maximum bytes of send buffers, and of receive buffers, on each device; 256 MiB by
        default.
    drop
        Shell patterns of names of source tensors to skip. A map must use all others.
    links
        The links of the cluster: the name of a preset, one link per axis, or a
        `shardspec.comm.cluster.Cluster`, which lists the device ids of each host. The default is
        the links of the meshes, or hosts of eight devices.

    Raises
    ------
    LayoutError
        If names are missing on either side, shapes differ, ranks disagree on a layout, a reduction
        is pending, or `max_bytes` is too small; if a map does not use a tensor, names one that the
        source lacks, or is for another model type than the checkpoint's ``config.json``.

    Examples
    --------
    >>> from shardspec import DeviceMesh, Layout
    >>> mesh = DeviceMesh(range(4), (2, 2))
    >>> source = {"w": Layout(mesh, "[S0,R]", (8, 6), "float32")}
    >>> plan = plan_reshard(source, (DeviceMesh([1, 5], (2,)), {"w": "[R,S0]"}))
    >>> dict(plan.sent), dict(plan.received)
    ({0: 24, 1: 24, 2: 48, 3: 48, 5: 0}, {0: 0, 1: 48, 2: 0, 3: 0, 5: 96})
    """
    if not isinstance(target, tuple):
        target = known_to_all(target)
    quantizes = dtype == "fp8-128x128"
    # Imported on demand: state dicts in memory do not need these modules.
    if quantizes and (names is None or isinstance(names, Mapping | NameMap)):
        from shardspec.checkpoint.quantization.plan import plan_quantized, plan_quantized_load

        if isinstance(source, str | PurePath):
            return plan_quantized_load(storage_path(source), target, names, max_bytes, drop)
        return plan_quantized(known_to_all(source), target, names, max_bytes, drop)
    one = names if isinstance(names, Mapping | NameMap | Naming) else None
    if isinstance(source, str | PurePath) and not quantizes and one is names:
        from shardspec.checkpoint.job.load_plan import plan_load

        return plan_load(storage_path(source), target, one, dtype, max_bytes, drop)
    if quantizes or isinstance(source, str | PurePath):
        raise LayoutError(
            "names= has several maps; a plan that quantizes or reads a checkpoint takes one "
            "NameMap or dict"
        )
    plan = plan_state(known_to_all(source), target, names, dtype, max_bytes, drop, links=links)
    dtypes = {layout.dtype for move in plan.moves for layout in (move.source, move.target)}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16", "float16", "float64"}:
        from shardspec.checkpoint.quantization.cuts import check_plan

        check_plan(plan, dtype)
    return plan
