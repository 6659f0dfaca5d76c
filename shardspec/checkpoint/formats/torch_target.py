"""Files that torch.load reads: a state dict of whole tensors, or one tensor of a DCP file.

Source: torch/serialization.py and torch/_utils.py. Nothing of torch is needed to write them.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from shardspec.checkpoint.targets import Extent, OutputFile, OutputTensor, Target, whole_box
from shardspec.checkpoint.torch_files.pickle_writer import Call, Name, Outside, pickled
from shardspec.checkpoint.torch_files.zip_writer import ZipPlan
from shardspec.dtypes import item_bytes

__all__ = ["add_state", "state_file", "tensor_value", "torch_target"]

_STORAGES: Final = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Dtypes that have a storage of their own; the others are kept as bytes."""


def tensor_value(shape: Sequence[int], dtype: str, key: str) -> Call:
    """Return a tensor as torch pickles it, its bytes in the record `data/<key>`.

    Examples
    --------
    >>> tensor_value((2, 3), "float32", "0").args[3]
    (3, 1)
    """
    sizes = tuple(shape)
    strides = tuple(prod(max(1, n) for n in sizes[dim + 1 :]) for dim in range(len(sizes)))
    hooks = Call(Name("collections", "OrderedDict"))
    count = prod(sizes)
    kind = _STORAGES.get(dtype)
    if kind is not None:
        storage = Outside(("storage", Name("torch", kind), key, "cpu", count))
        args = (storage, 0, sizes, strides, False, hooks)
        return Call(Name("torch._utils", "_rebuild_tensor_v2"), args)
    size = count * item_bytes(dtype)
    untyped = Outside(("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", size))
    args_v3 = (untyped, 0, sizes, strides, False, hooks, Name("torch", dtype))
    return Call(Name("torch._utils", "_rebuild_tensor_v3"), args_v3)


def add_state(
    plan: ZipPlan, value: object, storages: Sequence[tuple[str, int | bytes]]
) -> list[int]:
    """Add to an archive what torch.save writes.

    Parameters
    ----------
    plan
        The archive, empty so far.
    value
        What is pickled.
    storages
        Key of every storage that the value refers to, and its size, or its bytes.

    Returns
    -------
    list
        Where in the file the bytes of each storage go that was given by its size.
    """
    plan.add("data.pkl", pickled(value))
    plan.add(".format_version", b"1")
    plan.add(".storage_alignment", b"64")
    plan.add("byteorder", b"little")
    places = []
    for key, stored in storages:
        if isinstance(stored, bytes):
            plan.add(f"data/{key}", stored)
        else:
            places.append(plan.add_tensor(f"data/{key}", stored))
    plan.add("version", b"3\n")
    return places


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
    """Return the output that is one file for torch.load, of tensors and values that go along.

    `same` has the name of a tensor to that of another, listed before it, which shares its storage.
    """
    state: dict[str, object] = {}
    keys: dict[str, str] = {}
    stored: list[OutputTensor] = []
    for tensor in tensors:
        first = same.get(tensor.name)
        keys[tensor.name] = str(len(stored)) if first is None else keys[first]
        if first is None:
            stored.append(tensor)
        state[tensor.name] = tensor_value(tensor.shape, tensor.dtype, keys[tensor.name])
    file = state_file(name, {**state, **others}, stored)
    return Target((file,), directory=False, digested=True)
