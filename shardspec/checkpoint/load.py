"""Loading: every rank reads the bytes that its devices need, for the saved or another layout."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardspec.boxes import Box, box_shape, box_size
from shardspec.checkpoint.catalog import Catalog, FileBox, Outline, StoredTensor
from shardspec.checkpoint.moving.ahead import in_files, stretches
from shardspec.checkpoint.moving.buffers import Buffers
from shardspec.checkpoint.moving.copy import copy_box
from shardspec.checkpoint.moving.digests import Checks
from shardspec.checkpoint.moving.sinks import MemorySink
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.source_files import FileStretch, OpenFiles
from shardspec.checkpoint.tiling import check_tiling
from shardspec.checkpoint.writing.agree import agree
from shardspec.comm.communicator import Communicator
from shardspec.errors import AxisError, LayoutError
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.rules import match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

if TYPE_CHECKING:
    import torch

    from shardspec.dtensor import DTensor

__all__ = ["load_sharded"]


def load_sharded(
    directory: Path | str | Catalog,
    mesh: DeviceMesh | None = None,
    specs: Mapping[str, SpecLike] | None = None,
    *,
    communicator: Communicator | None = None,
) -> dict[str, "DTensor"]:
    """Read a checkpoint into this or another mesh and other specs; every rank calls it.

    Parameters
    ----------
    directory
        A checkpoint in any form that `open_checkpoint` knows, or what that has made of it.
    mesh
        The devices to load into; the mesh that was saved if it is left out.
    specs
        Name pattern to spec, as `match_rules` takes them. What no pattern matches is cut as it was
        saved: over axes of the same names where both meshes name theirs, else of the same numbers.
        If there are patterns, what none matches is whole on every device where the checkpoint does
        not say how it was cut.
    communicator
        Who moves shards; as for `DTensor`.

    Returns
    -------
    dict
        Name to tensor, sorted by name, in the memory of the CPU. Pending reductions are finished.

    Raises
    ------
    CheckpointError
        On every rank, if any rank cannot read what it needs, or the checkpoint contradicts itself,
        or the specs do not fit.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import DTensor, save_sharded
    >>> path = tempfile.mkdtemp()
    >>> w = DTensor(torch.arange(6).view(3, 2), DeviceMesh(range(2), (2,)), "[S0,R]")
    >>> save_sharded({"w": w}, path)
    >>> load_sharded(path, DeviceMesh(range(6), (2, 3)), {"*": "[S1,S0]"})["w"].to_local(5)
    tensor([[5]])
    """
    from shardspec.comm.default import communicator_of

    # In a job all ranks find out together whether each of them can open the checkpoint.
    opening = communicator or communicator_of(mesh or _world())
    source = agree(opening, lambda: as_catalog(directory))
    onto = mesh or (communicator.mesh if communicator else source.mesh)
    if onto is None:
        raise LayoutError(
            f"{directory}: the checkpoint does not say which mesh wrote it; give the mesh to load "
            "into (mesh=)"
        )
    chosen = communicator or communicator_of(onto)
    layouts = agree(chosen, lambda: _layouts(source, onto, specs or {}))
    return agree(chosen, lambda: _read(source, layouts, chosen))


def _world() -> DeviceMesh:
    import torch.distributed as dist

    return DeviceMesh(range(dist.get_world_size() if dist.is_initialized() else 1))


def _layouts(source: Catalog, mesh: DeviceMesh, specs: Mapping[str, SpecLike]) -> dict[str, Layout]:
    """Return the layout wanted for every tensor."""
    tensors = {name: source.outline(name) for name in source.names}
    matched = match_rules(specs, {name: len(tensor.shape) for name, tensor in tensors.items()})
    layouts = {}
    for name, tensor in tensors.items():
        if name not in matched:
            if specs and (tensor.spec is None or source.mesh is None):
                whole = ShardingSpec(len(tensor.shape), {})
                layouts[name] = Layout(mesh, whole, tensor.shape, tensor.dtype)
            else:
                layouts[name] = _as_saved(tensor, source.mesh, mesh)
            continue
        layouts[name] = Layout(mesh, matched[name], tensor.shape, tensor.dtype)
        if layouts[name].spec.partials:
            raise LayoutError(
                f"tensor {name!r}: spec {matched[name]} has pending reductions, but a loaded "
                "tensor has none; leave them out"
            )
    return layouts


def _as_saved(tensor: Outline[FileBox], saved: DeviceMesh | None, mesh: DeviceMesh) -> Layout:
    """Return the layout with the cuts that were saved."""
    if tensor.spec is None or saved is None:
        raise LayoutError(
            f"tensor {tensor.name!r} was saved without a spec; say in specs how to cut tensors; "
            "what matches none of them is then whole on every device"
        )
    spec = tensor.spec.without_partial()
    by_name = saved.axis_names is not None and mesh.axis_names is not None

    def renamed(axis: Axis) -> Axis:
        return saved.axis_label(saved.axis(axis)) if by_name else axis

    cuts = {dim: [renamed(axis) for axis in axes] for dim, axes in spec.dim_partition_dict.items()}
    try:
        return Layout(mesh, ShardingSpec(spec.dims, cuts), tensor.shape, tensor.dtype)
    except AxisError as error:
        raise LayoutError(
            f"tensor {tensor.name!r} was saved as {spec} on mesh {saved}: {error}; give a spec "
            "that fits in specs"
        ) from None


def _read(
    source: Catalog, layouts: Mapping[str, Layout], communicator: Communicator
) -> dict[str, "DTensor"]:
    from shardspec.dtensor import DTensor

    loaded = {}
    buffers = Buffers()
    with OpenFiles() as files:
        files.will_read(source.directory, _stretches(source, layouts, communicator.addressable))
        for name, layout in layouts.items():
            tensor = source.tensor(name)
            check_tiling(tensor)
            read: dict[Box, torch.Tensor] = {}
            shards: dict[int, torch.Tensor] = {}
            for device in communicator.addressable:
                box = layout.box(device)
                if box in read:
                    shards[device] = read[box].clone()
                else:
                    read[box] = shards[device] = _read_box(tensor, box, files, buffers)
            loaded[name] = DTensor.from_shards(shards, layout, communicator)
    source.check_unchanged()
    return loaded


def _stretches(
    source: Catalog, layouts: Mapping[str, Layout], devices: Iterable[int]
) -> Iterator[FileStretch]:
    """Return what will be read, as far as it is known and in its order."""
    for name, layout in layouts.items():
        for box in dict.fromkeys(map(layout.box, devices)):
            yield from in_files(stretches(source.tensor(name), box))


def _read_box(tensor: StoredTensor, box: Box, files: OpenFiles, buffers: Buffers) -> "torch.Tensor":
    import torch

    result = torch.empty(box_shape(box), dtype=getattr(torch, tensor.dtype))
    if box_size(box):
        out = result.view(-1).view(torch.uint8).numpy().data
        copy_box(tensor, box, MemorySink(out), files, buffers, checks=Checks(tensor))
    return result
