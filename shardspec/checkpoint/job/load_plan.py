"""Plans which device reads which bytes of a checkpoint; runs such plans or exports them."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardspec.boxes import Box, box_shape
from shardspec.checkpoint.catalog import ZEROS, Catalog, distinct, row_major_strides
from shardspec.checkpoint.convert.select import (
    CatalogNaming,
    Choice,
    Patterns,
    check_dropped,
    config_of,
    configured,
    mapped,
    require_finished,
)
from shardspec.checkpoint.job.load import Reading, read_shards
from shardspec.checkpoint.open import as_catalog, open_checkpoint
from shardspec.checkpoint.quantization import with_numbers
from shardspec.checkpoint.quantization.cuts import check_stored_plan
from shardspec.checkpoint.state import rank_state
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.comm.communicator import Communicator
from shardspec.comm.consensus import agree, check_same
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, LayoutError
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.name_map import NameMap, Names
from shardspec.resharding.plan import ReshardPlan, ReshardTarget, layouts_of, plan_state
from shardspec.resharding.rows import FileRegion, row_major_steps, transfer_rows
from shardspec.resharding.stages import StateCopies, StoredLayout, files_of
from shardspec.resharding.state import flat_state
from shardspec.text import shown

if TYPE_CHECKING:
    import torch


NO_COPY: Final = "this plan quantizes, so it is more than byte copies; quantize first, then plan"


def stored_layouts(
    place: Catalog | StoragePath, first: int
) -> tuple[dict[str, StoredLayout], dict[int, str]]:
    """Return for each tensor which files have which boxes, and the file names by number.

    A plan treats files as devices, whose ids start at `first`. ``/dev/zero`` is one of the files if
    a map pads tensors. Raises LayoutError if a reduction is pending.
    """
    catalog = as_catalog(place)
    outlines = [catalog.outline(name) for name in catalog.names]
    numbers = file_numbers(catalog, first)
    files = DeviceMesh(list(numbers.values()) or [first])
    layouts: dict[str, StoredLayout] = {}
    for tensor in outlines:
        require_finished(tensor)
        boxes: dict[int, list[Box]] = {}
        for box in distinct(tensor):
            boxes.setdefault(numbers[box.path], []).append(box.box)
        layouts[tensor.name] = StoredLayout(files, boxes, tensor.shape, tensor.dtype)
    names = {number: str(p) if p == ZEROS else p.name for p, number in numbers.items()}
    return layouts, names


@dataclass(frozen=True, slots=True)
class CheckpointReader:
    """Runs plans whose source is a checkpoint: each device reads its shards."""

    checkpoint: StoragePath
    names: Mapping[str, str] | NameMap | None = field(compare=False)
    """Map from stored tensors to those of the plan, if any."""
    dequantized_to: str | None
    """Dtype of dequantized weights; None if codes are read."""
    quantizes: bool = False
    """True if weights become codes and scales, which have new names in the plan."""
    naming: CatalogNaming | None = field(default=None, compare=False)
    """Names of a model, applied before the plan's tensors are looked up."""
    drop: Patterns = ()
    """Patterns of tensors that `naming` need not use."""

    def __str__(self) -> str:
        quantizes = " and quantizes weights" if self.quantizes else ""
        return f"reads the checkpoint {self.checkpoint}{quantizes}"

    def run(
        self, plan: ReshardPlan, state: Mapping[str, object], out: Mapping[str, object] | None
    ) -> dict[str, Any]:
        """Read the target shards of the plan; see `ReshardPlan.run`."""
        from shardspec.comm.process_group import communicator_of

        layouts = {move.target_name: move.target for move in plan.moves}
        filled: Mapping[str, object] = {}
        for mesh in dict.fromkeys(layout.mesh for layout in layouts.values()):
            chosen = communicator_of(mesh)
            if not chosen.addressable:
                continue
            with chosen.telling():
                if state:
                    raise LayoutError(f"a plan that {self} takes no tensors; call plan.run({{}})")
                into = None if out is None else flat_state(out)
                facts = {"reshard plan": plan.digest[:12]}
                check_same(chosen, facts, "make the same plan on every rank")
                own = {name: layout for name, layout in layouts.items() if layout.mesh == mesh}
                reading = agree(chosen, partial(self._reading, plan, into, own, chosen))
                read = agree(chosen, partial(read_shards, reading, chosen))
                filled = {**filled, **(read if into is None else {n: into[n] for n in read})}
        return {name: filled[name] for name in layouts if name in filled}

    def regions(self, plan: ReshardPlan) -> dict[str, list[FileRegion]]:
        """Return the positions of tensors in the files of the checkpoint."""
        if self.quantizes:
            raise LayoutError(NO_COPY)
        return file_regions(self._opened(plan), min(files_of(plan.moves), default=0))

    def _opened(self, plan: ReshardPlan) -> Catalog:
        """Return the checkpoint, opened; raises CheckpointError if it does not match the plan."""
        source = open_checkpoint(self.checkpoint)
        if self.quantizes:
            from shardspec.checkpoint.quantization.quantize import with_codes

            source = with_codes(source, self.names, None, plan.dropped)
        else:
            dropped = Choice(drop=[*map(escape, plan.dropped)])
            source = with_numbers(source, self.dequantized_to, dropped)
            if self.naming is not None:
                source = self.naming.applied(source, Choice(drop=self.drop), ())
        now, _ = stored_layouts(source, min(files_of(plan.moves), default=0))
        for move in plan.moves:
            if now.get(move.source_name) != move.source:
                raise CheckpointError(
                    f"{self.checkpoint}: tensor {move.source_name!r} has changed since the plan "
                    "was made; make the plan again"
                )
        return source

    def _reading(
        self,
        plan: ReshardPlan,
        out: Mapping[str, object] | None,
        layouts: Mapping[str, Layout],
        communicator: Communicator,
    ) -> Reading:
        """Return the opened checkpoint and the shards to fill; checks both against the plan."""
        names = {name: name for name in layouts}
        source = self._opened(plan)
        if not self.quantizes:
            source = mapped(source, self.names, dropped=plan.dropped)
        reading = Reading(source, names, layouts)
        if out is None:
            return reading
        if missing := [name for name in layouts if name not in out]:
            raise LayoutError(f"tensor {shown(missing[0])} is missing from the state dict")
        described = rank_state.describe({name: out[name] for name in layouts}, communicator)
        for name, layout in layouts.items():
            if described.layouts[name] != layout:
                raise LayoutError(
                    f"out[{name!r}] has layout {described.layouts[name]}, but the plan has "
                    f"{layout}; pass a tensor with the plan's layout"
                )
        _check_apart(described.shards)
        return reading._replace(shards=described.shards)


def _check_apart(shards: "Mapping[str, Mapping[int, torch.Tensor]]") -> None:
    """Raise LayoutError if tensors to fill share a part of their memory; tied ones share all."""
    from shardspec.resharding.inputs import memory_overlaps, overlaps_itself

    filled = {(name, device): shard for name, of in shards.items() for device, shard in of.items()}
    for (name, _), shard in filled.items():
        if overlaps_itself(shard):
            raise LayoutError(
                f"elements of out[{name!r}] share memory, as those of an expanded tensor do; give "
                "a clone"
            )
    for overlap in memory_overlaps({}, filled):
        if not overlap.same:
            names = sorted((overlap.written[0], overlap.other[0]))
            raise LayoutError(
                f"out[{names[0]!r}] and out[{names[1]!r}] share memory; give each a tensor of its "
                "own"
            )


class StoredPlan(NamedTuple):
    """A plan from a checkpoint."""

    source: Catalog
    """Checkpoint of the plan's tensors."""
    plan: ReshardPlan
    names: Mapping[str, str] | NameMap | None
    """The last name map, if any; earlier maps are already applied to `source`."""
    files: dict[int, str]
    """File names by number."""

    @property
    def first(self) -> int:
        """The smallest number that stands for a file instead of a device."""
        return min(self.files, default=0)


def plan_stored(
    source: Catalog,
    target: ReshardTarget,
    names: Names | None,
    dtype: object,
    max_bytes: int | None,
    drop: Patterns = (),
) -> StoredPlan:
    """Plan how devices read a checkpoint, through one map or several; see `plan_reshard`."""
    if isinstance(target, tuple):
        meshes = [target[0]]
        check_dropped(source, Choice(drop=drop), (), None)
    else:
        meshes = [layout.mesh for layout in layouts_of(target).values()]
    if dtype is not None:
        source = with_numbers(source, dtype, Choice(drop=drop), config_of(source, names))
        names = names.with_dtype(dtype) if isinstance(names, CatalogNaming) else names
    if isinstance(names, CatalogNaming):
        source, names, drop = names.applied(source, Choice(drop=drop), ()), None, ()
    elif isinstance(names, NameMap):
        names = configured(source, names)
    # Files are numbered after the ids of all devices.
    behind = max((device for mesh in meshes for device in mesh.ids), default=-1) + 1
    stored, files = stored_layouts(source, behind)
    own = names if isinstance(names, Mapping | NameMap) else None
    plan = plan_state(stored, target, own, dtype, max_bytes, drop, source.facts.dropped)
    check_stored_plan(source, plan, own, dtype)
    return StoredPlan(source, plan, own, files)


def plan_load(
    checkpoint: StoragePath,
    target: ReshardTarget,
    names: Names | None,
    dtype: object,
    max_bytes: int | None,
    drop: Patterns = (),
) -> ReshardPlan:
    """Plan how devices read a checkpoint; see `plan_reshard`."""
    source = as_catalog(checkpoint)
    _, plan, own, _ = plan_stored(source, target, names, dtype, max_bytes, drop)
    own = dict(own) if isinstance(own, Mapping) else own
    numbers = None if dtype is None else dtype_name(dtype)
    naming = names if isinstance(names, CatalogNaming) else None
    if naming is not None and dtype is not None:
        naming = naming.with_dtype(dtype)
    reader = CheckpointReader(checkpoint, own, numbers, naming=naming, drop=drop)
    return replace(plan, executor=reader)


TRANSFERS_FORMAT: Final = "shardspec-transfers-1"
INDEX: Final = "transfers.json"
"""Name of the index file, which is written last."""


def file_numbers(catalog: Catalog, first: int) -> dict[StoragePath, int]:
    """Return a number for each file of a checkpoint, from `first` on, above all device ids."""
    outlines = (catalog.outline(name) for name in catalog.names)
    paths = sorted({box.path for tensor in outlines for box in tensor.boxes})
    return {path: first + at for at, path in enumerate(paths)}


def file_regions(catalog: Catalog, first: int) -> dict[str, list[FileRegion]]:
    """Return the places of each tensor's boxes in files, which are numbered from `first` on."""
    numbers = file_numbers(catalog, first)
    regions = {}
    for name in catalog.names:
        tensor = catalog.tensor(name)
        if any(stored.computed for stored in tensor.boxes):
            raise CheckpointError(
                f"{catalog.directory}: tensor {name!r} is computed from codes and scales, not "
                "copied; merge or reshard the checkpoint with a dtype first"
            )
        regions[name] = [
            FileRegion(
                numbers[stored.path],
                stored.box,
                stored.offset,
                stored.strides
                or row_major_strides(box_shape(stored.box), item_bytes(tensor.dtype)),
            )
            for stored in distinct(tensor)
        ]
    return regions


def write_transfers(
    plan: StateCopies,
    directory: PurePath | str,
    files: Mapping[str, Sequence[FileRegion]] | None = None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Write the transfers and the shard shapes of every device of a plan to a directory.

    Each device gets an ``.npz`` file; an index has names, dtypes and shapes. `files` has the places
    of tensors in files, `names` the file names. CheckpointError if the directory is not empty.
    """
    devices = [device for device in plan.devices if device not in plan.files]
    rows = transfer_rows(plan, devices[0], "both", files=files)  # refuses plans before writing
    place = storage_path(directory)
    with place.errors("written"):
        if place.exists() and (not place.is_dir() or place.list()):
            raise CheckpointError(f"{place} exists; give a new or an empty directory")
        place.make_directory()
    for device in devices:
        if device != devices[0]:
            rows = transfer_rows(plan, device, "both", files=files)
        content, digest = io.BytesIO(), np.frombuffer(plan.digest.encode(), np.uint8)
        arrays: dict[str, Any] = {"rows": rows, "digest": digest, **_shards(plan, device)}
        np.savez_compressed(content, **arrays)
        _write(place / f"device-{device}.npz", content.getvalue())
    index = {
        "format": TRANSFERS_FORMAT,
        "digest": plan.digest,
        "devices": devices,
        "files": {str(number): name for number, name in (names or {}).items()},
        "padded": list(plan.padded),
        "tensors": [
            {
                "source": move.source_name,
                "target": move.target_name,
                "dtype": move.target.dtype,
                "source_shape": list(move.source.global_shape),
                "target_shape": list(move.target.global_shape),
            }
            for move in plan.moves
        ],
    }
    _write(place / INDEX, json.dumps(index).encode())


def _write(path: StoragePath, content: bytes) -> None:
    path.write(len(content), [content], overwrite=False)


def _shards(plan: StateCopies, device: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the shape and byte strides of a device's shard of every tensor; 0 without a shard."""
    dims = [len(layout.global_shape) for m in plan.moves for layout in (m.source, m.target)]
    table = np.zeros((4, len(plan.moves), max(dims, default=0)), np.int64)
    shapes_and_steps: dict[Layout, tuple[Sequence[int], Sequence[int]]] = {}
    for place, move in enumerate(plan.moves):
        for side, layout in enumerate((move.source, move.target)):
            if isinstance(layout, StoredLayout) or device not in layout.mesh:
                continue
            if layout not in shapes_and_steps:
                shapes_and_steps[layout] = (
                    layout.local_shape(device),
                    row_major_steps(layout, device),
                )
            for of, numbers in enumerate(shapes_and_steps[layout]):
                table[2 * side + of, place, : len(numbers)] = numbers
    names = ("source_shapes", "source_strides", "target_shapes", "target_strides")
    return dict(zip(names, table, strict=True))
