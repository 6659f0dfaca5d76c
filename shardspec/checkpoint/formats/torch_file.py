"""Reads and writes `torch.save` files of a model: one file, or several parts.

Parts have an index, or numbered names as ``pytorch_model-00001-of-00002.bin``. The index,
``pytorch_model.bin.index.json``, follows the rules of ``model.safetensors.index.json``: every
listed tensor must be in the listed file, and every tensor of a file must be listed. A file with
DTensors has the shards of one rank. It is read alone only if a shard is the full tensor.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from shardspec.checkpoint.catalog import (
    Catalog,
    CheckpointFacts,
    OutputTensor,
    StoredTensor,
    Target,
)
from shardspec.checkpoint.formats import FileStart, Format, OpenOptions, Wanted
from shardspec.checkpoint.formats.model_files import (
    BIN_NAME,
    ModelFiles,
    check_alone,
    files_of_index,
    find_bins,
    is_bin_index,
    is_numbered_bin,
)
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.torch_files import (
    DEEPSPEED,
    EXPERTS,
    META,
    TENSOR_PARALLEL,
    part_of_several,
    part_text,
)
from shardspec.checkpoint.torch_files.states import (
    TorchState,
    plain_value,
    read_torch_states,
    state_file,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.writer import tensor_value
from shardspec.errors import CheckpointError
from shardspec.resharding.state import KeyPath

_OLD: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
"""First bytes of a file of torch.save that is not a zip: a number in a pickle."""
_OWN: Final = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json")


def _recognizes(names: Collection[str]) -> bool:
    return any(name == BIN_NAME or is_bin_index(name) or is_numbered_bin(name) for name in names)


def _reads_file(start: FileStart) -> bool:
    return is_bin_index(start.name) is not None or start.is_zip or start.head.startswith(_OLD)


def open_torch_file(path: StoragePath) -> Catalog:
    """Return the catalog of a `torch.save` file; raises CheckpointError for a rank's shards."""
    check_alone(path)
    kind = part_of_several(path.name, lambda: path.parent.names())
    if kind is not None:
        raise CheckpointError(f"{path}: is one of several files of {part_text(kind)}")
    return _opened(path, ModelFiles({path: frozenset()}))


def _open(place: StoragePath, _: OpenOptions) -> Catalog:
    """Return the catalog of a file, of the files that an index lists, or of a directory's model."""
    if place.is_dir():
        return _opened(place, find_bins(place))
    if is_bin_index(place.name):
        return _opened(place.parent, files_of_index(place))
    with place.open() as file:
        if file.read(0, min(file.num_bytes, len(_OLD))) == _OLD:
            raise CheckpointError(
                f"{place}: is in the format of torch.save before torch 1.6, which cannot be read; "
                "load it with torch.load(weights_only=True) and save it again"
            )
    return open_torch_file(place)


def _opened(place: StoragePath, model: ModelFiles) -> Catalog:
    """Return the catalog of the `torch.save` files of a model; each tensor is in one file."""
    tensors: dict[str, StoredTensor] = {}
    extras: dict[str, object] = {}
    keys: dict[str, KeyPath] = {}
    for path, state in zip(model.files, read_torch_states([*model.files]), strict=True):
        chosen = model.names_to_read(path, state.tensors.keys())
        kind = _part_by_content(state)
        if kind is not None:
            raise CheckpointError(f"{path}: is one of several files of {part_text(kind)}")
        for name, tensor in state.tensors.items():
            if name not in chosen:
                continue  # the index sends it to another file
            shape, global_shape = tensor.local.shape, tensor.local.global_shape
            if shape != global_shape:
                raise CheckpointError(
                    f"{path}: has a shard of shape {list(shape)} of tensor {name!r} of shape "
                    f"{list(global_shape)}; name the directory with the files of all ranks, such "
                    "as model_world_size_4_rank_0.pt"
                )
            if name in tensors:
                raise CheckpointError(
                    f"{path}: another file of the same model also has tensor {name!r}; move the "
                    "file of the other save away"
                )
            tensors[name] = whole_tensor(name, path, tensor)
        extras.update(
            (name, plain_value(value, state.archive)) for name, value in state.extras.items()
        )
        keys.update(state.paths)
    facts = CheckpointFacts(notes=model.notes, below=model.below, paths=keys)
    return Catalog(FORMAT.called, place, tensors, model.paths, None, extras, facts)


def _part_by_content(state: TorchState) -> str | None:
    """Return what a file is a part of (such as a ZeRO checkpoint); None if it is complete."""
    shapes = state.extras.get("param_shapes")
    for group in shapes if isinstance(shapes, list) else ():
        for name, shape in group.items() if isinstance(group, dict) else ():
            tensor = state.tensors.get(f"module.{name}")
            if tensor is not None and tensor.local.shape != shape:
                return DEEPSPEED
    ranks = state.extras.get("mp_world_size")
    if "ds_version" in state.extras and isinstance(ranks, int) and ranks > 1:
        return TENSOR_PARALLEL
    if "ds_version" in state.extras and state.extras.get("num_experts"):
        return EXPERTS  # experts are in separate files
    # Meta shards this square matrix along its second dim.
    square = state.tensors.get("layers.0.attention.wo.weight")
    shape = (0, 0) if square is None else square.local.shape
    few = len(shape) == 2 and 0 < shape[1] < shape[0] and shape[0] % shape[1] == 0
    return META if few and "rope.freqs" in state.tensors else None


def torch_target(
    name: str,
    tensors: Sequence[OutputTensor],
    values: Mapping[str, object],
    same: Mapping[str, str],
) -> Target:
    """Return an output of one file for torch.load, with tensors and plain `values`.

    `same` maps a tied tensor to an earlier tensor; both share one storage.
    """
    keys: dict[str, str] = {}
    stored: list[OutputTensor] = []
    for tensor in tensors:
        first = same.get(tensor.name)
        keys[tensor.name] = str(len(stored)) if first is None else keys[first]
        if first is None:
            stored.append(tensor)
    state: dict[str, object] = {
        tensor.name: tensor_value(tensor.shape, tensor.dtype, keys[tensor.name])
        for tensor in tensors
    }
    file = state_file(name, {**state, **values}, stored)
    return Target((file,), False, tensors, digested=True)


def _tied(source: Catalog, tensors: Sequence[OutputTensor]) -> dict[str, str]:
    """Return tied tensors: {"lm_head.weight": "embed.weight"} if both are the same bytes of a file.

    Equal values at different positions do not count.
    """
    by_place: dict[object, list[OutputTensor]] = {}
    for tensor in tensors:
        outline = source.outline(tensor.source)
        if outline.boxes:
            key = outline.shape, outline.dtype, tensor.dtype, source.origin(tensor.source)
            by_place.setdefault(key, []).append(tensor)
    same = {}
    for group in by_place.values():
        first: dict[object, str] = {}
        # Tensors that start at one place may have other strides.
        for tensor in group if len(group) > 1 else ():
            boxes = source.tensor(tensor.source).boxes
            places = frozenset((box.path, box.offset, box.box, box.strides) for box in boxes)
            name = first.setdefault(places, tensor.name)
            if name != tensor.name:
                same[tensor.name] = name
    return same


def _lay_out(source: Catalog, output: Wanted) -> Target:
    same = _tied(source, output.tensors)
    target = torch_target(output.name, output.tensors, output.carried.values, same)
    return target._replace(same=same)


FORMAT: Final = Format(
    name="torch",
    title="torch file",
    recognizes=_recognizes,
    open=_open,
    lay_out=_lay_out,
    writes=("merged",),
    extensions=(".pt", ".pth", ".bin"),
    owns=lambda name: _OWN.fullmatch(name) is not None,
    reads_file=_reads_file,
    names_others=lambda name: is_bin_index(name) is not None,
    known_by=BIN_NAME,
)
