"""Loading: a plan whose holders are files, carried out by reading.

Every rank reads what its own devices are to hold, and casts where the plan says so. Of copies in
several files the first is read: were they to differ, a model would otherwise be mixed of several.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardspec.boxes import Box, box_size
from shardspec.checkpoint.catalog import Catalog, FileBox, Outline, StoredTensor, distinct
from shardspec.checkpoint.formats.native import NativeCatalog
from shardspec.checkpoint.mapped import Names, mapped, require_finished
from shardspec.checkpoint.open import as_catalog, open_checkpoint
from shardspec.checkpoint.rank_state import (
    Described,
    agree,
    communicator_of_state,
    describe,
    world_mesh,
)
from shardspec.checkpoint.read_boxes import Buffers, Checks, read_box_into, stretches
from shardspec.checkpoint.select import (
    Choice,
    Patterns,
    Renames,
    layouts_by_rules,
    plain,
    select,
)
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.state_dict import LEFT_OUT, KeyPath, unflatten
from shardspec.checkpoint.tiling import check_tiling
from shardspec.comm.communicator import Communicator
from shardspec.errors import AxisError, CheckpointError, LayoutError
from shardspec.layout.layout import Layout, LayoutCell, SpecLike, resolve_axes
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.renamed import renamed_argument
from shardspec.resharding.copies import StateCopies, StoredLayout, flat_state

if TYPE_CHECKING:
    import torch


def load_sharded(
    directory: Path | str | Catalog,
    device_mesh: DeviceMesh | None = None,
    rules: Mapping[str, SpecLike] | None = None,
    *,
    into: Mapping[str, Any] | None = None,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Renames = (),
    names: Names | None = None,
    communicator: Communicator | None = None,
    mesh: DeviceMesh | None = None,
    specs: Mapping[str, SpecLike] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint into this or another mesh and other specs; every rank calls it.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or what that has made of it.
    device_mesh
        The devices to load into; the mesh that was saved if it is left out.
    rules
        Name pattern to spec, as `match_rules` takes them. What no pattern matches is sharded as it
        was saved: over axes of the same names where both meshes name theirs, else of the same
        numbers. If there are patterns, what none matches is replicated where the checkpoint does
        not say how it was sharded.
    into
        A state dict, as `save_sharded` takes it, whose tensors are filled in place, instead of a
        mesh and rules: DTensors, also torch's, get their shards. Each has the shape and dtype that
        was saved. What else the checkpoint holds is not read.
    include, exclude, rename
        Which tensors and values are loaded, and under which names, as for `merge`; rules and `into`
        have the new names. What these patterns leave out stays as it is in `into`.
    names
        What makes of the tensors that were saved those of another model, as one that is served: a
        `NameMap`, a list of some to be taken one after the other, or new names. All of the above
        then have the names that it gives. How it was sharded says nothing of these tensors: give
        rules.
    communicator
        Who moves shards; as for `DTensor`.
    mesh, specs
        Former names of `device_mesh` and `rules`.

    Returns
    -------
    dict
        Name to DTensor, sorted by name, in the memory of the CPU; pending reductions are finished.
        A nested state dict that `save_sharded` has written comes back nested, with its plain
        values; what is renamed stands outside of the nesting. With `into`, that state dict: the
        same tensors, and the values of the checkpoint.

    Raises
    ------
    CheckpointError
        On every rank, if any rank cannot read what it needs, or the checkpoint contradicts itself,
        or the rules do not fit, or `into` wants what the checkpoint does not have. Tensors of
        `into` may then be filled in part.

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

    onto = renamed_argument("load_sharded", "device_mesh", device_mesh, "mesh", mesh)
    by_rules = renamed_argument("load_sharded", "rules", rules, "specs", specs) or {}
    choice = Choice(include, exclude, rename)
    if into is not None:
        if onto is not None or by_rules:
            raise LayoutError("give either a state dict to load into, or a mesh and rules")
        return _load_into(directory, into, choice, names, communicator)
    # In a job all ranks find out together whether each of them can open the checkpoint.
    opening = communicator or communicator_of(onto or world_mesh())
    source = agree(opening, lambda: mapped(as_catalog(directory), names))
    onto = onto or (communicator.mesh if communicator else source.mesh)
    if onto is None:
        raise LayoutError(
            f"{directory}: the checkpoint does not say which mesh wrote it; give the mesh to load "
            "into (device_mesh=)"
        )
    target = onto
    chosen = communicator or communicator_of(target)

    def selected() -> tuple[dict[str, str], dict[str, Layout], dict[str, str]]:
        wanted = select(source, choice) if source.names else []
        old = {tensor.name: tensor.source for tensor in wanted}
        values = plain(_saved(source)[0], choice)
        # Names that contradict each other are refused before anything is read.
        _nested(source, dict.fromkeys(old), old, values)
        as_saved = partial(_as_saved, source.mesh, target, bool(by_rules))
        layouts = layouts_by_rules(
            target, by_rules, wanted, lambda tensor: as_saved(source.outline(tensor.source))
        )
        return old, layouts, values

    old, layouts, values = agree(chosen, selected)
    loaded = agree(chosen, lambda: _read(source, old, layouts, chosen))
    return _nested(source, loaded, old, values)


def _saved(source: Catalog) -> tuple[Mapping[str, object], Mapping[str, KeyPath]]:
    """Return the plain values of a state dict that was saved, and the keys of all by name."""
    return (source.extras, source.paths) if isinstance(source, NativeCatalog) else ({}, {})


def _nested(
    source: Catalog,
    loaded: Mapping[str, object],
    names: Mapping[str, str],
    values: Mapping[str, str],
) -> dict[str, Any]:
    """Return what was loaded, nested as the state dict that was saved.

    `names` has the new names of tensors with those in the checkpoint, `values` the names of values
    in the checkpoint with the new ones.
    """
    known, saved = _saved(source)
    for name, new in values.items():
        if new in names:
            raise CheckpointError(
                f"tensor {names[new]!r} and value {name!r} would both be named {new!r}; rename "
                "them apart"
            )
    found = {**loaded, **{new: known[name] for name, new in values.items()}}
    paths: dict[str, KeyPath] = {new: (new,) for new in sorted(found)}
    old = {**names, **{new: name for name, new in values.items()}}
    paths.update({name: path for name, path in saved.items() if old.get(name, name) == name})
    return unflatten(paths, lambda name: found.get(name, LEFT_OUT))


def _load_into(
    directory: Path | str | Catalog,
    into: Mapping[str, Any],
    choice: Choice,
    by: Names | None,
    communicator: Communicator | None,
) -> dict[str, Any]:
    """Fill the tensors of a state dict; return it with the values of the checkpoint."""
    chosen = communicator or communicator_of_state(into)

    def selected() -> tuple[Catalog, Described, dict[str, str], dict[str, object]]:
        source = mapped(as_catalog(directory), by)
        state = describe(into, chosen)
        wanted = select(source, choice) if source.names else []
        names = {tensor.name: tensor.source for tensor in wanted}
        values = {new: source.extras[name] for name, new in plain(source.extras, choice).items()}
        for name, layout in state.layouts.items():
            if name in names:
                _check_into(name, layout, source.outline(names[name]))
            elif choice.wants(name):
                raise CheckpointError(
                    f"{source.directory}: has no tensor {name!r}; leave it out of what is loaded "
                    "into, exclude it, or rename one"
                )
        for name in state.flat.values:
            if choice.wants(name) and name not in values:
                raise CheckpointError(
                    f"{source.directory}: has no value {name!r}; leave it out of what is loaded "
                    "into, or exclude it"
                )
        return source, state, {n: names[n] for n in state.layouts if n in names}, values

    source, state, names, values = agree(chosen, selected)
    layouts = {name: state.layouts[name] for name in names}
    agree(chosen, lambda: _read(source, names, layouts, chosen, state.shards))
    flat = state.flat
    kept = {**flat.tensors, **{name: values.get(name, old) for name, old in flat.values.items()}}
    return unflatten({name: flat.paths.get(name, (name,)) for name in kept}, kept.__getitem__)


def _check_into(name: str, layout: Layout, tensor: Outline[FileBox]) -> None:
    """Raise unless a tensor that is to be filled is as the checkpoint has it."""
    if (tensor.shape, tensor.dtype) != (layout.global_shape, layout.dtype):
        raise CheckpointError(
            f"tensor {name!r} is {list(layout.global_shape)} {layout.dtype}, but the "
            f"checkpoint has {list(tensor.shape)} {tensor.dtype}; make them alike"
        )
    if layout.spec.partials:
        raise LayoutError(
            f"tensor {name!r}: spec {layout.spec} has pending reductions, but a loaded tensor has "
            "none; redistribute it first"
        )


def _as_saved(
    saved: DeviceMesh | None, mesh: DeviceMesh, replicated: bool, tensor: Outline[FileBox]
) -> ShardingSpec:
    """Return the cuts that were saved, for another mesh; or none where nothing is known of them."""
    if tensor.spec is None or saved is None:
        if replicated:
            return ShardingSpec(len(tensor.shape))
        raise LayoutError(
            f"tensor {tensor.name!r} was saved without a spec; say in rules how to shard tensors; "
            "what matches none of them is then replicated"
        )
    spec = by_axes = tensor.spec.without_partial()
    if saved.axis_names is not None and mesh.axis_names is not None:
        by_axes = spec.with_axes(lambda axis: saved.axis_label(saved.axis(axis)))
    try:
        return resolve_axes(by_axes, mesh)
    except AxisError as error:
        raise LayoutError(
            f"tensor {tensor.name!r} was saved as {spec} on mesh {saved}: {error}; give a rule "
            "with a spec that fits"
        ) from None


def stored_layouts(
    place: Catalog | Path, first: int
) -> tuple[dict[str, StoredLayout], dict[int, str]]:
    """Return where a checkpoint has its tensors, and the names of its files by number.

    Files are numbered from `first` on, behind the ids of all devices. Raises LayoutError if a
    reduction is pending.
    """
    catalog = as_catalog(place)
    outlines = [catalog.outline(name) for name in catalog.names]
    paths = sorted({box.path for tensor in outlines for box in tensor.boxes})
    numbers = {path: first + place for place, path in enumerate(paths)}
    files = DeviceMesh(list(numbers.values()) or [first])
    known: dict[object, StoredLayout] = {}
    found: dict[str, StoredLayout] = {}
    for tensor in outlines:
        require_finished(tensor)
        key = (tensor.shape, tensor.dtype, tensor.boxes)
        if key not in known:
            held: dict[int, list[Box]] = {}
            for box in distinct(tensor):
                held.setdefault(numbers[box.path], []).append(box.box)
            known[key] = StoredLayout(files, held, tensor.shape, tensor.dtype)
        found[tensor.name] = known[key]
    return found, {number: path.name for path, number in numbers.items()}


def load_by_plan(
    plan: StateCopies, state: Mapping[str, object], out: Mapping[str, object] | None
) -> dict[str, Any]:
    """Read what a plan says from its checkpoint; see `ReshardPlan.run`."""
    from shardspec.comm.process_group import communicator_of

    if state:
        raise LayoutError(
            f"the source of this plan is the checkpoint {plan.checkpoint}; pass an empty state "
            "dict, as in plan.run({})"
        )
    layouts = {move.target_name: move.target for move in plan.moves}
    layouts |= {tie.target_name: plan.moves[tie.first].target for tie in plan.ties}
    given = None if out is None else flat_state(out)
    found: dict[str, Any] = {}
    for mesh in dict.fromkeys(layout.mesh for layout in layouts.values()):
        chosen = communicator_of(mesh)
        if chosen.addressable:
            here = {name: layout for name, layout in layouts.items() if layout.mesh == mesh}
            _check_same_plan(plan, chosen)
            source, into = agree(chosen, partial(_opened, plan, given, here, chosen))
            found |= agree(chosen, partial(_read, source, {n: n for n in here}, here, chosen, into))
    return {name: (given or found)[name] for name in layouts if name in found}


def _check_same_plan(plan: StateCopies, communicator: Communicator) -> None:
    digests = communicator.gather(dict.fromkeys(communicator.addressable, plan.digest[:12]))
    first = min(digests)
    for rank, digest in digests.items():
        if digest != digests[first]:
            raise LayoutError(
                f"rank {rank} has reshard plan {digest} where rank {first} has {digests[first]}; "
                "make the same plan on every rank"
            )


def _opened(
    plan: StateCopies,
    out: Mapping[str, object] | None,
    layouts: Mapping[str, Layout],
    communicator: Communicator,
) -> "tuple[Catalog, Mapping[str, Mapping[int, torch.Tensor]] | None]":
    """Open the checkpoint of a plan, and return the shards to fill; both as the plan says."""
    assert plan.checkpoint is not None, "the plan has one"
    source = open_checkpoint(plan.checkpoint)
    now, _ = stored_layouts(source, min(plan.files, default=0))
    for move in plan.moves:
        if now.get(move.source_name) != move.source:
            raise CheckpointError(
                f"{plan.checkpoint}: tensor {move.source_name!r} is not as it was when the plan "
                "was made; make the plan again"
            )
    if out is None:
        return mapped(source, plan.names), None
    if missing := [name for name in layouts if name not in out]:
        raise LayoutError(f"tensor {missing[0]!r} is missing from the state dict")
    given = describe({name: out[name] for name in layouts}, communicator)
    for name, layout in layouts.items():
        if given.layouts[name] != layout:
            raise LayoutError(
                f"out[{name!r}] is laid out as {given.layouts[name]}, in the plan as {layout}; "
                "give it as the plan says"
            )
    return mapped(source, plan.names), given.shards


def _read(
    source: Catalog,
    names: Mapping[str, str],
    layouts: Mapping[str, Layout],
    communicator: Communicator,
    into: "Mapping[str, Mapping[int, torch.Tensor]] | None" = None,
) -> dict[str, Any]:
    """Read the shards of this process, into those that are there or into new DTensors.

    `names` has the names of tensors in the checkpoint, by those in `layouts` and `into`.
    """
    import torch

    from shardspec.dtensor import DTensor

    loaded: dict[str, Any] = {}
    buffers, devices = Buffers(), communicator.addressable
    with OpenFiles() as files, torch.no_grad():
        files.will_read(
            source.directory,
            (
                stretch
                for name, layout in layouts.items()
                for box in dict.fromkeys(box for d in devices for box in layout.local_boxes(d))
                for stretch in stretches(source.tensor(names[name]), box)
            ),
        )
        for name, layout in layouts.items():
            tensor = source.tensor(names[name])
            check_tiling(tensor)
            read: dict[tuple[Box, ...], torch.Tensor] = {}
            shards: dict[int, torch.Tensor] = {}
            for device in devices:
                boxes = tuple(layout.local_boxes(device))
                shape, dtype = layout.local_shape(device), getattr(torch, layout.dtype)
                given = torch.empty(shape, dtype=dtype) if into is None else into[name][device]
                shard = given.detach()
                if boxes not in read:
                    for box in boxes:
                        room = shard
                        if len(boxes) > 1:
                            room = shard[LayoutCell(layout, box).index(device)]
                        _fill(room, tensor, box, files, buffers)
                    read[boxes] = shard
                elif shard is not read[boxes]:
                    shard.copy_(read[boxes])
                shards[device] = shard
            loaded[name] = shards
            if into is None:
                loaded[name] = DTensor.from_shards(shards, layout, communicator)
    source.check_unchanged()
    return loaded


def _fill(
    shard: "torch.Tensor", tensor: StoredTensor, box: Box, files: OpenFiles, buffers: Buffers
) -> None:
    """Read a box into a tensor, straight into its memory where that is flat and of this host."""
    import torch

    if not box_size(box):
        return
    stored = getattr(torch, tensor.dtype)
    flat = shard.device.type == "cpu" and shard.is_contiguous() and shard.dtype == stored
    place = shard if flat and not (shard.is_conj() or shard.is_neg()) else None
    room = torch.empty(shard.shape, dtype=stored) if place is None else place
    out = room.view(-1).view(torch.uint8).numpy().data
    read_box_into(tensor, box, out, files, buffers, checks=Checks(tensor))
    if place is None:
        shard.copy_(room)
