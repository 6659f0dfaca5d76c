"""Loads a checkpoint into DTensors on any mesh; every rank reads the shards of its own devices.

Shards are cast if requested. If a box has replicas in several files, all ranks read the first, so
replicas that differ are not mixed.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.catalog import Catalog, OutputTensor, StoredTensor
from shardspec.checkpoint.compare.coverage import check_tiling
from shardspec.checkpoint.convert.copy import Buffers, Checks, Progress, read_box_into, stretches
from shardspec.checkpoint.convert.layout import layouts_by_rules
from shardspec.checkpoint.convert.select import (
    Choice,
    Selection,
    check_dropped,
    plain_names,
    select,
)
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.quantization import mapped_source
from shardspec.checkpoint.quantization.cuts import check_blocks, refuse_casts
from shardspec.checkpoint.state import rank_state
from shardspec.checkpoint.state.state_dict import OMITTED, spread, unflatten
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.comm.communicator import Communicator
from shardspec.comm.consensus import agree
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import AxisError, CheckpointError, LayoutError
from shardspec.layout.layout import Layout, SpecLike, resolve_axes
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.name_map import Names
from shardspec.resharding.state import KeyPath

if TYPE_CHECKING:
    import torch


def load_sharded(
    directory: PurePath | str | Catalog,
    device_mesh: DeviceMesh | None = None,
    rules: Mapping[str, SpecLike] | None = None,
    *,
    into: Mapping[str, Any] | None = None,
    names: Names | None = None,
    communicator: Communicator | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
    **selection: Unpack[Selection],
) -> dict[str, Any]:
    """Return a checkpoint as DTensors on any mesh and in any specs; every rank calls it.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` reads, or an open one.
    device_mesh
        The devices to load into; by default the saved mesh.
    rules
        Name pattern to spec, as `match_rules` takes them. A tensor that no pattern matches keeps
        its saved spec: over axes of the same names if both meshes name theirs, else of the same
        numbers. If the checkpoint does not record its spec, the tensor is replicated; without any
        rules that is an error.
    into
        A state dict whose tensors are filled in place, instead of a mesh and rules; see
        `save_sharded`. DTensors, also torch's, get their shards. Each tensor must have the saved
        shape and dtype; other tensors of the checkpoint are not read. A rank without shards passes
        ``{}``, or does not call this.
    names
        Converts the saved tensors to those of another model: a `NameMap`, a list of maps to apply
        in order, or new names. It must use every tensor. `rename`, rules and `into` match the names
        after it. Saved specs do not apply to converted tensors, so give rules.
    communicator
        Communicator that moves shards, as for `DTensor`.
    dtype
        Cast floating point tensors to this dtype, and dequantize quantized weights to it; tensors
        of `into` must have it.
    progress
        Called with the bytes that this process has read so far, and in all.

    Other Parameters
    ----------------
    include, exclude, rename
        Selection of tensors and values and their new names, as for `merge`; rules and `into` have
        the new names. Excluded entries of `into` stay unchanged.
    drop
        Shell patterns of names in the checkpoint whose tensors `names` need not use.

    Returns
    -------
    dict
        Name to DTensor, sorted by name, in CPU memory; pending reductions are finished. A nested
        state dict that `save_sharded` has written comes back nested, with its plain values; renamed
        entries are at the top level. With `into`, that state dict: the same tensors, and the values
        of the checkpoint.

    Raises
    ------
    CheckpointError
        On every rank, if any rank cannot read its shards, the checkpoint is inconsistent, the
        rules do not fit, or `into` has an entry that the checkpoint lacks. Tensors of `into` may
        be partially filled in that case.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import DTensor, save_sharded
    >>> path = tempfile.mkdtemp()
    >>> w = DTensor(torch.arange(6).view(3, 2), DeviceMesh(range(2), (2,)), "[S0,R]")
    >>> save_sharded({"w": w}, path)
    >>> load_sharded(path, DeviceMesh(range(6), (2, 3)), {"*": "[S1,S0]"})["w"].to_local(5)
    tensor([[5]])
    >>> state = {"w": torch.zeros(3, 2, dtype=torch.int64)}
    >>> load_sharded(path, into=state)["w"] is state["w"]
    True
    >>> state["w"].tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    from shardspec.comm.process_group import communicator_of

    full_choice = Choice(dtype=dtype, **selection)
    alone = rank_state.world_mesh().size() == 1
    if into is not None and not (into or device_mesh or rules or alone):
        return {}  # a rank without shards cannot tell which ranks take part
    if into is not None:
        chosen = communicator or rank_state.communicator_of_state(into)
    else:
        chosen = communicator or communicator_of(device_mesh or rank_state.world_mesh())
    with chosen.telling():
        if into is not None and (device_mesh is not None or rules):
            raise LayoutError("give either a state dict to load into, or a mesh and rules")
        # In a job, all ranks fail together if one of them cannot open the checkpoint.
        source, choice = agree(
            chosen, lambda: _opened(directory, names, full_choice, all_of_it=into is None)
        )
        if into is not None:
            plan = agree(chosen, lambda: _plan_into(source, choice, into, chosen))
        else:
            target = device_mesh or (communicator.mesh if communicator else source.mesh)
            if target is None:
                raise LayoutError(
                    f"{directory}: the checkpoint does not say which mesh wrote it; give the mesh "
                    "to load into (device_mesh=)"
                )
            chosen = communicator or communicator_of(target)
            plan = agree(chosen, lambda: _plan_by_rules(source, choice, target, rules or {}))
        values = {**agree(chosen, lambda: read_shards(plan, chosen, progress)), **plan.values}
        return unflatten(plan.paths, lambda name: values.get(name, OMITTED))


def _opened(
    directory: PurePath | str | Catalog,
    names: Names | None,
    choice: Choice,
    *,
    all_of_it: bool,
) -> tuple[Catalog, Choice]:
    catalog = as_catalog(directory)
    if all_of_it:
        check_dropped(catalog, choice, (), None)
    return mapped_source(catalog, names, choice)


class Reading(NamedTuple):
    """Tensors to read from a checkpoint, and the shards or layouts to fill."""

    source: Catalog
    names: Mapping[str, str]
    """Name of each tensor to its name in the checkpoint."""
    layouts: Mapping[str, Layout]
    shards: "Mapping[str, Mapping[int, torch.Tensor]] | None" = None
    """Shards to fill; None to make new DTensors."""
    paths: Mapping[str, KeyPath] = MappingProxyType({})
    """Name -> keys of the entry in the nested result."""
    values: Mapping[str, object] = MappingProxyType({})
    """Entries of the result other than tensors to read."""


def _selected(source: Catalog, choice: Choice) -> list[OutputTensor]:
    tensors = select(source, choice) if source.names else []
    if choice.dtype is not None:
        refuse_casts(source, [tensor.source for tensor in tensors], dtype_name(choice.dtype))
    return tensors


def _plan_by_rules(
    source: Catalog, choice: Choice, mesh: DeviceMesh, rules: Mapping[str, SpecLike]
) -> Reading:
    tensors = _selected(source, choice)
    old = {tensor.name: tensor.source for tensor in tensors}
    as_saved = partial(_spec_as_saved, source, mesh, bool(rules))
    renamed, values, unchanged = dict(old), {}, {}
    if source.facts.restored:
        for name, new in plain_names(source.extras, choice).items():
            if new in old:
                raise CheckpointError(
                    f"tensor {old[new]!r} and value {name!r} would both be named {new!r}; give "
                    "them different names"
                )
            renamed[new], values[new] = name, source.extras[name]
        unchanged = {n: path for n, path in source.facts.paths.items() if renamed.get(n, n) == n}
    paths: dict[str, KeyPath] = {name: (name,) for name in sorted(renamed)}
    paths |= unchanged
    # Raises for names such as "a" and "a.b" before anything is read.
    unflatten(paths, lambda _: None)
    layouts = layouts_by_rules(mesh, rules, tensors, as_saved)
    check_blocks(source, {old[name]: layout for name, layout in layouts.items()})
    return Reading(source, old, layouts, paths=paths, values=values)


def _spec_as_saved(
    source: Catalog, mesh: DeviceMesh, replicated: bool, tensor: OutputTensor
) -> ShardingSpec:
    """Return the saved spec of a tensor for another mesh; replicated if it is not recorded."""
    spec, saved = source.outline(tensor.source).spec, source.mesh
    if spec is None or saved is None:
        if replicated:
            return ShardingSpec(len(tensor.shape))
        raise LayoutError(
            f"tensor {tensor.source!r} was saved without a spec; give rules with specs; tensors "
            "without a matching rule are then replicated"
        )
    spec = by_axes = spec.without_partial()
    if saved.axis_names is not None and mesh.axis_names is not None:
        by_axes = spec.with_axes(lambda axis: saved.axis_labels()[saved.axis(axis)])
    try:
        return resolve_axes(by_axes, mesh)
    except AxisError as error:
        raise LayoutError(
            f"tensor {tensor.source!r} was saved as {spec} on mesh {saved}: {error}; give a rule "
            "with a spec that fits"
        ) from None


def _plan_into(
    source: Catalog, choice: Choice, into: Mapping[str, Any], communicator: Communicator
) -> Reading:
    state = rank_state.describe(into, communicator)
    tensors = _selected(source, choice)
    names = {tensor.name: tensor.source for tensor in tensors}
    read_as = {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}
    values = {new: source.extras[name] for name, new in plain_names(source.extras, choice).items()}
    # Other formats store a list of dicts as one value.
    values |= spread(values, {})[0]
    flat = state.flat
    for kind, of_state, of_checkpoint in (
        ("tensor", state.layouts, names),
        ("value", flat.values, values),
    ):
        for name in of_state:
            if (
                choice.wants(name)
                and name not in of_checkpoint
                and name not in source.facts.dropped
            ):
                raise CheckpointError(
                    f"{source.directory}: has no {kind} {name!r}; remove it from the state dict, "
                    "exclude it, or rename it"
                )
    layouts = {name: layout for name, layout in state.layouts.items() if name in names}
    for name, layout in layouts.items():
        shape, dtype = read_as[name]
        if (shape, dtype) != (layout.global_shape, layout.dtype):
            raise CheckpointError(
                f"tensor {name!r} is {list(layout.global_shape)} {layout.dtype}, but the "
                f"checkpoint has {list(shape)} {dtype}; load into a tensor of that shape and dtype"
            )
        if layout.spec.partials:
            raise LayoutError(
                f"tensor {name!r}: spec {layout.spec} has pending reductions, but a loaded tensor "
                "has none; redistribute it first"
            )
    check_blocks(source, {names[name]: layout for name, layout in layouts.items()})
    result = {**flat.tensors, **{name: values.get(name, old) for name, old in flat.values.items()}}
    paths = {name: flat.paths.get(name, (name,)) for name in result}
    return Reading(source, names, layouts, state.shards, paths, result)


def read_shards(
    plan: Reading, communicator: Communicator, progress: Progress | None = None
) -> dict[str, Any]:
    """Read the shards of this process, into given tensors or new ones; return all tensors."""
    import torch

    from shardspec.tensor.dtensor import DTensor

    loaded: dict[str, Any] = {}
    buffers, devices = Buffers(), communicator.addressable
    reads = [
        (name, boxes)
        for name, layout in plan.layouts.items()
        for boxes in dict.fromkeys(tuple(layout.local_boxes(device)) for device in devices)
    ]
    widths = {n: item_bytes(plan.source.outline(plan.names[n]).dtype) for n in plan.layouts}
    done, total = 0, sum(widths[name] * sum(map(box_size, boxes)) for name, boxes in reads)
    with OpenFiles() as files, torch.no_grad():
        files.will_read(
            plan.source.directory,
            (
                stretch
                for name, boxes in reads
                for box in boxes
                for stretch in stretches(plan.source.tensor(plan.names[name]), box)
            ),
        )
        for name, layout in plan.layouts.items():
            tensor = plan.source.tensor(plan.names[name])
            check_tiling(tensor)
            dtype = getattr(torch, layout.dtype)
            shards: Mapping[int, torch.Tensor] = (
                {device: torch.empty(layout.local_shape(device), dtype=dtype) for device in devices}
                if plan.shards is None
                else plan.shards[name]
            )
            read: dict[tuple[Box, ...], torch.Tensor] = {}
            for device in devices:
                boxes, shard = tuple(layout.local_boxes(device)), shards[device].detach()
                if (same := read.setdefault(boxes, shard)) is not shard:
                    shard.copy_(same)
                    continue
                for box in boxes:
                    part = rank_state.box_of_shard(shard, layout, device, box)
                    _fill(part, tensor, box, files, buffers)
                    done += box_size(box) * widths[name]
                    if progress is not None:
                        progress(done, total)
            loaded[name] = (
                DTensor.from_shards(shards, layout, communicator) if plan.shards is None else shards
            )
    plan.source.check_unchanged()
    return loaded


def _fill(
    shard: "torch.Tensor", tensor: StoredTensor, box: Box, files: OpenFiles, buffers: Buffers
) -> None:
    """Read a box into a shard, directly into memory if the shard is contiguous on the CPU."""
    import torch

    if not box_size(box):
        return
    stored = getattr(torch, tensor.dtype)
    flat = shard.device.type == "cpu" and shard.is_contiguous() and shard.dtype == stored
    in_place = flat and not (shard.is_conj() or shard.is_neg())
    room = shard if in_place else torch.empty(shard.shape, dtype=stored)
    out = room.view(-1).view(torch.uint8).numpy().data
    torch.autograd.graph.increment_version(shard)  # torch does not see reads into its memory
    read_box_into(tensor, box, out, files, buffers, checks=Checks(tensor))
    if not in_place:
        shard.copy_(room)
