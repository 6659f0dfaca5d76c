"""Whole tensors in one file of `torch.save`, or in several that an index lists, and writing one.

``pytorch_model.bin.index.json`` is read by the rules of ``model.safetensors.index.json``: index and
files are compared both ways. A file with DTensors is one rank's part, and is read only where the
part is the whole, as on a mesh of one device.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shardspec.checkpoint.catalog import ListedCatalog, StoredTensor, whole_box
from shardspec.checkpoint.formats.names import (
    BIN_INDEX,
    BIN_NAME,
    BIN_NUMBERED,
    TORCH_FILE,
    part_of_several,
    part_text,
)
from shardspec.checkpoint.formats.safetensors import by_file, check_listed, check_numbering
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.targets import Extent, OutputFile, OutputTensor, Target
from shardspec.checkpoint.torch_files.state import (
    TorchState,
    plain_value,
    read_torch_state,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.writer import ZipPlan, add_state, tensor_value
from shardspec.errors import CheckpointError


def open_torch_file(path: Path) -> ListedCatalog:
    """Read what describes the state in one file; not its data. Parts of tensors are refused."""
    _check_alone(
        path, part_of_several(path.name, lambda: [at.name for at in path.parent.iterdir()])
    )
    state = read_torch_state(path)
    _check_alone(path, _part_by_content(state))
    others = {name: plain_value(value) for name, value in state.extras.items()}
    return ListedCatalog(TORCH_FILE, path, _whole(state), (path,), None, others)


def _check_alone(path: Path, kind: str | None) -> None:
    if kind is not None:
        raise CheckpointError(f"{path}: is {part_text(kind)}")


def _part_by_content(state: TorchState) -> str | None:
    """Say which kind of part of a checkpoint a file is, if what it holds shows that it is one."""
    shapes = state.extras.get("param_shapes")
    for group in shapes if isinstance(shapes, list) else ():
        for name, shape in group.items() if isinstance(group, dict) else ():
            found = state.tensors.get(f"module.{name}")
            if found is not None and found.local.shape != shape:
                return "DeepSpeed ZeRO"
    ranks = state.extras.get("mp_world_size")
    if "ds_version" in state.extras and isinstance(ranks, int) and ranks > 1:
        return "DeepSpeed's tensor parallel"
    # Meta cuts along its second dim what is square.
    square = state.tensors.get("layers.0.attention.wo.weight")
    shape = (0, 0) if square is None else square.local.shape
    few = len(shape) == 2 and 0 < shape[1] < shape[0] and shape[0] % shape[1] == 0
    return "Meta's model parallel" if few and "rope.freqs" in state.tensors else None


def open_bin_directory(directory: Path) -> ListedCatalog:
    """Read the index of a directory, or its one ``pytorch_model.bin``, or all numbered files."""
    index = directory / BIN_INDEX
    names = sorted(path.name for path in directory.iterdir())
    if index.name in names:
        return open_bin_index(index)
    if BIN_NAME in names:
        return open_torch_file(directory / BIN_NAME)
    numbered = [name for name in names if BIN_NUMBERED.fullmatch(name)]
    check_numbering(directory, numbered)
    states = [read_torch_state(file_inside(directory, name, directory)) for name in numbered]
    return _listed(directory, states, ())


def open_bin_index(index: Path) -> ListedCatalog:
    """Read an index and what describes its files, and check that they agree."""
    states = []
    for path, names in by_file(index).items():
        states.append(read_torch_state(path))
        check_listed(path, states[-1].tensors, names, index)
    return _listed(index.parent, states, (index,))


def _listed(directory: Path, states: Iterable[TorchState], more: tuple[Path, ...]) -> ListedCatalog:
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, object] = {}
    paths = list(more)
    for state in states:
        twice = tensors.keys() & state.tensors.keys()
        if twice:
            raise CheckpointError(
                f"{state.path}: holds tensor {min(twice)!r}, which another file of the same model "
                "does too; move the one that is of another save away"
            )
        tensors.update(_whole(state))
        others.update((name, plain_value(value)) for name, value in state.extras.items())
        paths.append(state.path)
    return ListedCatalog(TORCH_FILE, directory, tensors, paths, None, others)


def _whole(state: TorchState) -> Mapping[str, StoredTensor]:
    for name, found in state.tensors.items():
        shape, whole = found.local.shape, found.local.global_shape
        if shape != whole:
            raise CheckpointError(
                f"{state.path}: holds a part of shape {list(shape)} of tensor {name!r} of shape "
                f"{list(whole)}; name the directory with the files of all ranks (files named like "
                "model_world_size_4_rank_0.pt are found by themselves)"
            )
    return {name: whole_tensor(name, state.path, found) for name, found in state.tensors.items()}


def state_file(
    name: str,
    value: object,
    tensors: Sequence[OutputTensor] = (),
    storages: Sequence[tuple[str, bytes]] = (),
) -> OutputFile:
    """Return the file of a value; the storages that it names ``0``, ``1``, ... are tensors'.

    Or they are those of `storages`, of known bytes.
    """
    plan = ZipPlan()
    sizes = [(str(number), tensor.num_bytes) for number, tensor in enumerate(tensors)]
    places = add_state(plan, value, [*sizes, *storages])
    extents = tuple(
        Extent(tensor, whole_box(tensor.shape), place)
        for tensor, place in zip(tensors, places, strict=True)
    )
    trailer = plan.late if tensors else None
    return OutputFile(name, plan.num_bytes, tuple(plan.pieces()), extents, trailer)


def torch_target(
    name: str,
    tensors: Sequence[OutputTensor],
    others: Mapping[str, object],
    same: Mapping[str, str],
) -> Target:
    """Return the output that is one file for torch.load, with `others`, which are no tensors.

    `same` is the name of a tensor to that of another, listed before it, whose storage it shares.
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
    file = state_file(name, {**state, **others}, stored)
    return Target((file,), directory=False, digested=True)
