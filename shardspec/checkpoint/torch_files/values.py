"""Reads the tensors in `torch.save` pickles: shapes, placements, and the record of the bytes.

The names that torch writes for tensors, parameters, storages, dtypes and DTensors are listed here;
nothing is imported or called. Source: ``torch/_utils.py`` (``_rebuild_*``), ``torch/storage.py``,
``torch/serialization.py`` (``persistent_id``), ``torch/distributed/tensor``; torch 2.4 to 2.13.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final, NamedTuple, Never

from shardspec.checkpoint.catalog import Digest
from shardspec.checkpoint.storage.path import SourceFile
from shardspec.checkpoint.torch_files.unpickler import (
    Global,
    PickledNames,
    StateDict,
    UnsupportedError,
    made_by,
    mere_name,
    record_class,
)
from shardspec.checkpoint.torch_files.zip_reader import TorchZip
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError
from shardspec.layout.placements import Placement
from shardspec.mesh.device_mesh import DeviceMesh

_MAX_DIMS: Final = 64
_MAX_SIZE: Final = 2**63 - 1


class TorchStorage(NamedTuple):
    """A storage: a record of bytes, ``data/<key>``, that tensors are views of."""

    key: str
    dtype: str  # of its elements; ``"uint8"`` if it has no dtype
    size: int  # in elements


class Placed(NamedTuple):
    """Mesh, placements and global shape of a DTensor."""

    shape: tuple[int, ...]  # sizes of the global tensor
    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # one per mesh axis
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None
    """(Dim, axes that shard it, major first) of each sharded dim; None if not recorded."""
    saver: int | None = None
    """Rank that saved the tensor, if recorded and different from the rank of the file."""


class TorchTensor(NamedTuple):
    """A tensor as a view of a storage."""

    dtype: str
    shape: tuple[int, ...]  # of a DTensor, that of the local tensor
    strides: tuple[int, ...]  # elements from one to the next along each dim
    start: int  # elements of the storage before the first
    storage: TorchStorage
    placed: Placed | None = None  # None if it is not a DTensor
    digested: bool = True
    """True if the storage's digest is checked with this tensor: one of several views."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Sizes of the global tensor; the tensor itself may be a shard."""
        return self.shape if self.placed is None else self.placed.shape

    @property
    def is_part(self) -> bool:
        """True if the tensor is only a part of its storage."""
        size, dtype = self.storage.size, self.storage.dtype
        return prod(self.shape) * item_bytes(self.dtype) < size * item_bytes(dtype)


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A placeholder for a tensor or storage of an unsupported kind; `why` says what it is."""

    why: str
    traits: tuple[object, ...] = ()
    """Sizes, strides and other members, for comparisons."""
    storage: tuple[str, str] | None = None
    """Key and kind of the tensor's storage."""


class Complex(str):
    """A complex number as text: a pickle could choose numbers with equal hashes."""

    __slots__ = ()


class TensorPlace(NamedTuple):
    """The position of a tensor's bytes in its file: the last fields of a `StoredBox`."""

    offset: int
    digest: Digest | None  # of its storage; None if torch computed none
    strides: tuple[int, ...] | None
    """Bytes from one element to the next along each dim; None if row-major and contiguous."""


def row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if elements are contiguous; strides of dims of size 1 do not matter.

    >>> row_major((2, 3), (3, 1)), row_major((2, 3), (1, 2)), row_major((1, 3), (9, 1))
    (True, False, True)
    """
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected and 0 not in shape:
                return False
            expected *= size
    return True


def tensor_place(tensor: TorchTensor, file: SourceFile, archive: TorchZip) -> TensorPlace:
    """Return the position of a tensor's bytes in the file; reads and checks the record's header."""
    check_record(tensor, archive)
    name = f"data/{tensor.storage.key}"
    start, record = archive.start(file, name), archive.record(name)
    size = item_bytes(tensor.dtype)
    in_order = row_major(tensor.shape, tensor.strides)
    strides = None if in_order else tuple(step * size for step in tensor.strides)
    crc = record.crc32 if tensor.digested else None
    digest = None if crc is None else Digest(crc, start, record.num_bytes)
    return TensorPlace(start + tensor.start * size, digest, strides)


def check_record(tensor: TorchTensor, archive: TorchZip) -> None:
    """Raise CheckpointError if a tensor reaches past its record, by the zip's directory."""
    storage, start = tensor.storage, tensor.start
    num_bytes = archive.record(f"data/{storage.key}").num_bytes
    if num_bytes != storage.size * item_bytes(storage.dtype):
        raise CheckpointError(
            f"{archive.label}: record data/{storage.key:.40} has {num_bytes} bytes, but the "
            f"pickle says {storage.size} elements of {storage.dtype}; the file is damaged"
        )
    last = start + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
    if 0 not in tensor.shape and (last + 1) * item_bytes(tensor.dtype) > num_bytes:
        raise CheckpointError(
            f"{archive.label}: a tensor of shape {list(tensor.shape)} and strides "
            f"{list(tensor.strides)} from element {start} reaches past its storage of "
            f"{num_bytes} bytes; the file is damaged"
        )


# --- functions that stand for torch's; they raise ValueError for wrong arguments


def sizes_of(value: object = ()) -> tuple[int, ...]:
    """Return sizes as a tuple; raises ValueError for anything but whole numbers from 0.

    >>> sizes_of([2, 3])
    (2, 3)
    """
    if isinstance(value, (tuple, list)) and len(value) <= _MAX_DIMS:
        for size in value:
            if type(size) is not int or not 0 <= size <= _MAX_SIZE:
                break
        else:
            return tuple(value)
    raise ValueError("sizes are not whole numbers from 0, or more than 64")


def storage_of(value: object) -> TorchStorage | UnreadTensor:
    """Return the storage to which a persistent id in a pickle refers."""
    match value:
        case ("storage", Global(name=name), str() as key, str(), int() as size) if size >= 0:
            dtype = _STORAGE_DTYPES.get(name)
            if dtype is None:
                why = f"a tensor in a {name}, whose dtype is not supported; cast it"
                return UnreadTensor(why, (size,), (key, name))
            return TorchStorage(key, dtype, size)
    raise ValueError("it refers to something that is not a storage")


def _rebuild(
    storage: object,
    start: object,
    shape: object,
    strides: object,
    _requires_grad: object = None,
    _hooks: object = None,
    metadata: object = None,
    *,
    dtype: str | None = None,
) -> TorchTensor | UnreadTensor:
    if not isinstance(storage, TorchStorage | UnreadTensor):
        raise ValueError("a tensor has no storage")
    sizes, steps = sizes_of(shape), sizes_of(strides)
    if len(sizes) != len(steps) or type(start) is not int or not 0 <= start <= _MAX_SIZE:
        raise ValueError("a tensor has no stride for each dim, or no place in its storage")
    lazily: tuple[str, ...] = ()
    if isinstance(metadata, dict):
        lazily = tuple(str(key)[:20] for key, is_set in metadata.items() if is_set)
    elif metadata:
        raise ValueError("a view does more than conjugate and negate")
    traits = (sizes, steps, start, lazily)
    if isinstance(storage, UnreadTensor):
        return replace(storage, traits=(*storage.traits, *traits))
    if lazily:
        why = "a view that conjugates or negates; save tensor.resolve_conj().resolve_neg()"
        return UnreadTensor(why, traits, (storage.key, storage.dtype))
    return TorchTensor(dtype or storage.dtype, sizes, steps, start, storage)


def _rebuild_v3(*args: object) -> TorchTensor | UnreadTensor:
    if len(args) < 7:
        raise TypeError
    storage, start, shape, strides, *_, dtype, metadata = (*args, None)[:8]
    if not isinstance(dtype, Global) or not dtype.name.startswith("torch."):
        raise ValueError("the name of a dtype does not begin with torch.")
    try:
        supported = dtype_name(dtype.name)
    except DTypeError:
        if isinstance(storage, TorchStorage):
            why = f"a tensor of {dtype.name}, which is not supported; cast it"
            storage = UnreadTensor(why, (storage.size,), (storage.key, dtype.name))
        supported = None
    return _rebuild(storage, start, shape, strides, metadata=metadata, dtype=supported)


def _on_meta(_: object, shape: object, strides: object, *__: object) -> UnreadTensor:
    traits = (sizes_of(shape), sizes_of(strides))
    return UnreadTensor("a tensor on the meta device, which has no data; load the weights", traits)


def _dict(*args: object) -> StateDict:
    """Return an ordered or default dict, which is empty at first, or a counter."""
    match args:
        case ({} as counts,):
            return StateDict(counts)
        case () | ([],) | (None,) | (Global(),):
            return StateDict()
    raise ValueError("a dict is made of pairs, which torch does not write")


def _encoded(text: object, encoding: object = "latin1") -> bytes:
    """Return the bytes of a latin1 text: protocol 2 has no instruction for bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are not text in latin1")
    return text.encode("latin1")


def _no_bytes(*args: object) -> bytes:
    if args:
        raise ValueError("bytes have arguments")
    return b""


def _complex(real: object, imag: object) -> Complex:
    if not isinstance(real, float) or not isinstance(imag, float):
        raise ValueError("a complex number is not made of two numbers")
    return Complex(str(complex(real, imag)))


def _sharded(*_: object) -> Never:
    raise UnsupportedError(
        "a ShardedTensor, which FSDP1 makes without a device mesh, is read from torch DCP only; "
        "load it with FSDP and save SHARDED_STATE_DICT, or give FSDP a device_mesh"
    )


_DTYPES: Final = "uint8 float64 float32 float16 int64 int32 int16 int8 bool bfloat16 complex64"
_KINDS: Final = "Byte Double Float Half Long Int Short Char Bool BFloat16 ComplexFloat"
STORAGES: Final = {
    **dict(zip(_DTYPES.split(), _KINDS.split(), strict=True)),
    "complex128": "ComplexDouble",
}
"""Dtypes that have a storage of their own, ``torch.<KIND>Storage``."""
_STORAGE_DTYPES: Final[Mapping[str, str]] = {
    **{f"torch.{kind}Storage": dtype for dtype, kind in STORAGES.items()},
    # Their sizes are in bytes; the tensors have dtypes.
    **dict.fromkeys(("torch.UntypedStorage", "torch.storage.UntypedStorage"), "uint8"),
}
_BUILTINS: Final = ("builtins", "__builtin__")
_FUNCTIONS: Final[Mapping[str, Callable[..., object]]] = {
    "torch._utils._rebuild_tensor": _rebuild,
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_meta_tensor_no_storage": _on_meta,
    # A parameter is its tensor.
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "torch.Size": sizes_of,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _dict,
    "collections.Counter": _dict,
    "_codecs.encode": _encoded,
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": _sharded,
    "torch.distributed._shard.sharded_tensor.shard.Shard": _sharded,
    **{f"{home}.complex": _complex for home in _BUILTINS},
    # Protocol 2 writes empty bytes so.
    **{f"{home}.bytes": _no_bytes for home in _BUILTINS},
}
_DTENSOR_HOMES: Final = (
    *("torch.distributed.device_mesh", "torch.distributed._mesh_layout"),
    *("torch.distributed.tensor", "torch.distributed.tensor._api", "torch.distributed._tensor.api"),
    *("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types"),
    *("torch.distributed.tensor._dtensor_spec", "torch.distributed._tensor._dtensor_spec"),
)
"""Modules of DTensor and its members, in several versions of torch."""


def _named(homes: Iterable[str], names: str, suffix: str = "") -> Iterable[str]:
    return (f"{home}.{name}{suffix}" for home in homes for name in names.split())


_MERE_NAMES: Final = (
    *(*_STORAGE_DTYPES, "torch.strided", "torch.Tensor"),
    *_named(("torch",), "QUInt8 QInt8 QInt32 QUInt4x2 QUInt2x4", "Storage"),
    *_named(("torch",), "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2"),
    *_named(("torch",), "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 bool"),
    *_named(("torch",), "complex32 complex64 complex128 int8 int16 int32 int64 uint8 uint16"),
    *_named(("torch",), "uint32 uint64"),
    # Factories of defaultdicts.
    *_named(_BUILTINS, "list dict int long float str unicode bool tuple"),
)
_RECORDS: Final = (
    *_named(_BUILTINS, "set frozenset bytearray range xrange slice"),
    *_named(_DTENSOR_HOMES, "DTensor DTensorSpec TensorMeta ShardOrderEntry DeviceMesh _Partial"),
    *_named(_DTENSOR_HOMES, "_MeshLayout _FlatLayout Shard _StridedShard Replicate Partial"),
    *("torch.device", "torch.serialization._get_layout"),
    *("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_wrapper_subclass"),
)
TORCH_NAMES: Final[PickledNames] = {
    **{path: mere_name(path) for path in _MERE_NAMES},
    **{path: made_by(path, function) for path, function in _FUNCTIONS.items()},
    **{path: record_class(path, path.rpartition(".")[2]) for path in _RECORDS},
}
"""The names that torch writes for tensors, DTensors and plain values."""
