"""Carrying out a reshard plan whose source is a checkpoint."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.load import read_shards
from shardspec.checkpoint.mapped import mapped
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.rank_state import agree, describe
from shardspec.checkpoint.stored_layouts import stored_layouts
from shardspec.comm.communicator import Communicator
from shardspec.errors import CheckpointError, LayoutError
from shardspec.layout.layout import Layout
from shardspec.resharding.copies import StateCopies
from shardspec.resharding.flat import flat_state

__all__ = ["load_by_plan"]


def load_by_plan(
    plan: StateCopies, state: Mapping[str, object], out: Mapping[str, object] | None
) -> dict[str, Any]:
    """Read what a plan says from its checkpoint; see `shardspec.resharding.plan.ReshardPlan.run`.

    Every rank reads the boxes that it is to hold, and casts tensors one by one.
    """
    from shardspec.comm.process_group import communicator_of

    if state:
        raise LayoutError(
            f"the source of this plan is the checkpoint {plan.checkpoint}; pass an empty state "
            "dict, as in plan.run({})"
        )
    layouts = {move.target_name: move.target for move in plan.moves}
    layouts |= {tie.target_name: plan.moves[tie.first].target for tie in plan.ties}
    found: dict[str, Any] = {}
    for mesh in dict.fromkeys(layout.mesh for layout in layouts.values()):
        communicator = communicator_of(mesh)
        if communicator.addressable:
            here = {name: layout for name, layout in layouts.items() if layout.mesh == mesh}
            found |= _load(plan, here, communicator, out)
    return {name: found[name] for name in layouts if name in found}


def _load(
    plan: StateCopies,
    layouts: Mapping[str, Layout],
    communicator: Communicator,
    out: Mapping[str, object] | None,
) -> dict[str, Any]:
    import torch

    from shardspec.dtensor import DTensor

    def opened() -> tuple[Catalog, dict[str, Mapping[int, torch.Tensor]] | None]:
        return _planned(plan), None if out is None else _given(
            flat_state(out), layouts, communicator
        )

    digests = communicator.gather(dict.fromkeys(communicator.addressable, plan.digest[:12]))
    first = min(digests)
    for rank, digest in digests.items():
        if digest != digests[first]:
            raise LayoutError(
                f"rank {rank} has reshard plan {digest} where rank {first} has {digests[first]}; "
                "make the same plan on every rank"
            )
    source, into = agree(communicator, opened)
    stored = {
        name: Layout(at.mesh, at.spec, at.global_shape, source.outline(name).dtype)
        for name, at in layouts.items()
    }
    alike = {name: at for name, at in stored.items() if at == layouts[name]}
    names = {name: name for name in alike}
    found = agree(communicator, lambda: read_shards(source, names, alike, communicator, into))
    for name in sorted(layouts.keys() - alike.keys()):
        only = {name: name}
        read = agree(
            communicator, partial(read_shards, source, only, {name: stored[name]}, communicator)
        )
        dtype = getattr(torch, layouts[name].dtype)
        if into is None:
            shards = {device: shard.to(dtype) for device, shard in read[name].shards.items()}
            found[name] = DTensor.from_shards(shards, layouts[name], communicator)
        else:
            for device, shard in read[name].shards.items():
                into[name][device].detach().copy_(shard)
    return found if out is None else {name: flat_state(out)[name] for name in layouts}


def _planned(plan: StateCopies) -> Catalog:
    """Open the checkpoint of a plan; raise if that is not what the plan was made of."""
    assert plan.checkpoint is not None, "the plan has one"
    source = open_checkpoint(plan.checkpoint)
    now, _ = stored_layouts(source, min(plan.files, default=0))
    for move in plan.moves:
        if now.get(move.source_name) != move.source:
            raise CheckpointError(
                f"{plan.checkpoint}: tensor {move.source_name!r} is not as it was when the plan "
                "was made; make the plan again"
            )
    return mapped(source, plan.names)


def _given(
    out: Mapping[str, object], layouts: Mapping[str, Layout], communicator: Communicator
) -> "dict[str, Mapping[int, Any]]":
    """Return the shards to fill, by name and device."""
    for name in layouts:
        if name not in out:
            raise LayoutError(f"tensor {name!r} is missing from the state dict")
    given = describe({name: out[name] for name in layouts}, communicator)
    for name, layout in layouts.items():
        if given.layouts[name] != layout:
            raise LayoutError(
                f"out[{name!r}] is laid out as {given.layouts[name]}, in the plan as {layout}; "
                "give it as the plan says"
            )
    return dict(given.shards)
