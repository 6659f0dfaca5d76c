"""Checks that the tensors given to a plan are those that it was made for, before data moves.

Layouts, dtypes and memory may have changed since planning, so all are checked again, on all ranks.
"""

import pickle
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from operator import itemgetter
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor

from shardspec.comm.consensus import Failure
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import local_of
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_ids import id_list
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.stages import StateCopies, TensorMove
from shardspec.resharding.state import (
    flat_state,
    is_plain,
    plain_key,
    required_layout,
    same_shards,
    stated_layout,
)
from shardspec.tensor.dtensor import DTensor
from shardspec.tensor.shards import bits_of, check_dense, shape_and_dtype
from shardspec.text import first_of, shown

K = TypeVar("K")
State: TypeAlias = Mapping[str, object]

_MAX_WORK: Final = 100_000
"""Maximum steps to find a byte that two strided arrays share; after these they count as sharing."""


class DeviceInputs(NamedTuple):
    """The checked shards of one device: those to read, and those to fill."""

    source: Mapping[str, torch.Tensor]
    """Shards by the names of the source."""
    out: Mapping[str, torch.Tensor]
    """Shards to be filled, by the names of the target."""


class Statement(NamedTuple):
    """The message of one rank to the others after its checks: an error, or facts to compare."""

    failure: Failure | None
    """The error, if a check failed; the other fields are then empty."""
    values: bytes
    """Plain values by the names of the target, pickled."""
    shared: tuple[tuple[str, str], ...]
    """Pairs of target names whose shards in `out` are the same memory."""
    num_stages: int
    """Number of stages; compared between ranks because prices may round differently."""
    fills: bool
    """True if results go to `out`, so that no memory is allocated for them."""


class Inputs(NamedTuple):
    """The checked shards of this process."""

    devices: Mapping[int, DeviceInputs]
    names: Sequence[str]
    """Tensor names in the order of the state dict."""
    out: dict[str, object] | None
    """Tensors to fill, without nesting."""
    statement: Statement


def checked_inputs(
    plan: StateCopies, state: State, out: State | None, devices: Sequence[int], *, alone: bool
) -> Inputs:
    """Return the shards of `devices`, after checking that state dict and `out` fit the plan.

    With `alone`, the process has one device, and plain tensors count as its shards. Raises
    LayoutError if a tensor or value differs from the plan.
    """
    state = flat_state(state)
    sources = {move.source_name: move.source for move in plan.moves}
    targets = {move.target_name: move.target for move in plan.moves}
    values = dict(plan.values)
    _check_names("the state dict", state, {*sources, *values, *plan.dropped})
    _check_layouts("", state, sources, devices)
    for name in values.keys() & state.keys():
        if not is_plain(state[name]):
            raise LayoutError(
                f"{name!r} is a {type(state[name]).__name__}, but was a plain value when the plan "
                "was made; make the plan with it"
            )
    flat_out = None if out is None else flat_state(out)
    if flat_out is not None:
        # Its plain values are not filled.
        plain = [n for n in flat_out.keys() - targets.keys() if is_plain(flat_out[n])]
        _check_names("out", flat_out, {*targets, *plain})
        _check_layouts("out", flat_out, targets, devices)
    read: dict[int, dict[str, torch.Tensor]] = {}
    filled: dict[int, dict[str, torch.Tensor]] = {}
    for device in devices:
        read[device] = {
            name: shard_of(name, repr(name), layout, device, state, alone=alone)
            for name, layout in sources.items()
            if device in layout.mesh
        }
        filled[device] = {
            name: _writable(name, layout, device, flat_out, alone=alone)
            for name, layout in targets.items()
            if flat_out is not None and device in layout.mesh
        }
    shared = _shared(plan, read, filled) if flat_out is not None else ()
    own_values = {new: state[name] for name, new in plan.values if name in state}
    inputs = {
        # Copies read memory, so lazy conjugates and negatives are computed first.
        device: DeviceInputs({n: s.resolve_conj().resolve_neg() for n, s in shards.items()}, out)
        for (device, shards), out in zip(read.items(), filled.values(), strict=True)
    }
    values_bytes = pickle.dumps(own_values)
    statement = Statement(None, values_bytes, shared, len(plan.stages), flat_out is not None)
    return Inputs(inputs, list(state), flat_out, statement)


def _check_names(where: str, values: State, planned: Iterable[str]) -> None:
    if unknown := sorted(values.keys() - set(planned)):
        raise LayoutError(
            f"{where} has {first_of([*map(shown, unknown)])}, which the plan lacks; remove it, or "
            "make the plan with it"
        )


def _check_layouts(
    where: str, values: State, planned: Mapping[str, Layout], devices: Sequence[int]
) -> None:
    """Raise LayoutError if a DTensor no longer has the layout that it was planned with."""
    for name, layout in planned.items():
        value = values.get(name)
        if not isinstance(value, Layout | DTensor | TorchDTensor):
            continue
        # Tensors on other meshes, such as a second replica of the model, are not read.
        if any(device in layout.mesh for device in devices):
            declared = stated_layout(name, value)
            if declared not in (None, layout) and not same_shards(declared, layout):
                label = f"{where}[{name!r}]" if where else repr(name)
                raise LayoutError(
                    f"{label} has layout {_layout_text(declared)}, but the plan has "
                    f"{_layout_text(layout)}; redistribute it, or make the plan with it"
                )


def _layout_text(layout: Layout) -> str:
    return f"{layout} with ids {id_list(layout.mesh.ids)}"


def shard_of(
    name: str, label: str, layout: Layout, device: int, values: State, *, alone: bool
) -> torch.Tensor:
    """Return a device's shard of a tensor; LayoutError if its shape or dtype is not as planned."""
    if name not in values:
        where = "the state dict" if label == repr(name) else "out"
        raise LayoutError(f"tensor {name!r} is missing from {where}")
    shard: object = values[name]
    if isinstance(shard, DTensor):
        shard = shard.shards.get(device)
    elif isinstance(shard, TorchDTensor):
        shard = local_of(shard)
    elif not alone:
        shard = None
    if not isinstance(shard, torch.Tensor):
        raise LayoutError(
            f"{label} is a {type(values[name]).__name__}; give a DTensor of shardspec or of "
            "torch, or the shard of this rank as a tensor"
        )
    shape, dtype = shape_and_dtype(layout, device)
    if shard.shape != shape or shard.dtype != dtype:
        raise LayoutError(
            f"the shard of {label} on device {device} is {tuple(shard.shape)} of "
            f"{str(shard.dtype).removeprefix('torch.')}; under {layout} it is {shape} of "
            f"{layout.dtype}"
        )
    try:
        check_dense(shard)
    except LayoutError as error:
        raise LayoutError(f"{label} cannot be used: {error}") from None
    if type(shard).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise LayoutError(f"{label} is a {type(shard).__name__}, which wraps tensors; give these")
    if not has_memory(shard):
        raise LayoutError(
            f"the shard of {label} on device {device} has no memory: it is on the meta device, or "
            "its storage was freed; give it values first"
        )
    return shard


def _writable(name: str, layout: Layout, device: int, out: State, *, alone: bool) -> torch.Tensor:
    label = f"out[{name!r}]"
    shard = shard_of(name, label, layout, device, out, alone=alone)
    if shard.is_conj() or shard.is_neg():
        raise LayoutError(f"{label} is a view that conjugates or negates; give a clone")
    if shard.is_inference() and not torch.is_inference_mode_enabled():
        raise LayoutError(f"{label} was made in inference mode; run in it, or give a clone")
    if overlaps_itself(shard):
        raise LayoutError(
            f"elements of {label} share memory, as those of an expanded tensor do; give a clone"
        )
    return shard


def _shared(
    plan: StateCopies,
    read: Mapping[int, Mapping[str, torch.Tensor]],
    filled: Mapping[int, Mapping[str, torch.Tensor]],
) -> tuple[tuple[str, str], ...]:
    """Return pairs of names in `out` that share one tensor; LayoutError for other shared memory."""
    layouts = {move.target_name: move.target for move in plan.moves}
    shared: set[tuple[str, str]] = set()
    flat_read, flat_filled = (
        {(device, name): shard for device, shards in of.items() for name, shard in shards.items()}
        for of in (read, filled)
    )
    for overlap in memory_overlaps(flat_read, flat_filled):
        (device, name), (other_device, other) = overlap.written, overlap.other
        if not overlap.both_written:
            raise LayoutError(
                f"out[{name!r}] shares memory with the source, {other!r}; give tensors of its own"
            )
        boxes = (layouts[n].intervals(d) for d, n in (overlap.written, overlap.other))
        if not overlap.same or next(boxes) != next(boxes):
            first, second = sorted((name, other))
            where = "" if name != other else f" of devices {other_device} and {device}"
            raise LayoutError(
                f"out[{first!r}] and out[{second!r}] share memory{where}; give each a tensor of "
                "its own"
            )
        if name != other:
            shared.add((min(name, other), max(name, other)))
    return tuple(sorted(shared))


def unequal_pair(
    plan: StateCopies, pairs: Iterable[tuple[str, str]], devices: Iterable[DeviceInputs]
) -> tuple[str, str] | None:
    """Return the first pair of tied target names that would get different values; else None.

    Sources are compared shard by shard, so those with other layouts differ.
    """
    moves: dict[str, list[TensorMove]] = {}
    for move in plan.moves:
        moves.setdefault(move.target_name, []).append(move)
    devices = list(devices)
    for pair in pairs:
        ours, theirs = (moves[name] for name in pair)
        ways = [[(m.source, m.target, m.view) for m in each] for each in (ours, theirs)]
        if ways[0] != ways[1]:
            return pair
        for first, second in zip(ours, theirs, strict=True):
            for device in devices:
                shards = (device.source.get(move.source_name) for move in (first, second))
                both = [bits_of(shard) for shard in shards if shard is not None]
                if both and not np.array_equal(both[0], both[1]):
                    return pair
    return None


def check_equal(pair: tuple[str, str] | None) -> None:
    """Raise LayoutError for a pair of names of one tensor in `out` that would get two values."""
    if pair is not None:
        raise LayoutError(
            f"out[{pair[0]!r}] and out[{pair[1]!r}] share memory, but differ in the source; give "
            "each a tensor of its own"
        )


def agreed_values(plan: StateCopies, pickled: Mapping[int, bytes]) -> dict[str, object]:
    """Return the plain values by name, after checking that all devices have equal ones.

    `pickled` maps each device to its values. Raises LayoutError for different or missing values.
    """
    # Most devices have equal bytes, which are unpickled once.
    dicts: dict[bytes, dict[str, object]] = {}
    for data in pickled.values():
        if data not in dicts:
            dicts[data] = pickle.loads(data)
    values: dict[str, object] = {}
    for name, new in plan.values:
        having = {peer: dicts[data] for peer, data in pickled.items() if new in dicts[data]}
        if not having:
            raise LayoutError(
                f"the value {name!r}, which the plan copies, is missing from the state dict"
            )
        first = min(having)
        values[new] = having[first][new]
        keys: dict[int, object] = {}
        for peer, theirs in having.items():
            if id(theirs) not in keys:
                keys[id(theirs)] = plain_key(theirs[new])
            if keys[id(theirs)] != keys[id(having[first])]:
                raise LayoutError(
                    f"{name!r} is {shown(values[new])} on rank {first} and {shown(theirs[new])} on "
                    f"rank {peer}; make them equal, or remove it"
                )
    return values


# --- memory that tensors share


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key of a tensor's memory: equal for two tensors with the very same elements."""
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if the elements are in memory; False for a meta tensor or a freed storage."""
    if not tensor.numel():
        return True
    if tensor.is_meta:
        return False
    start = tensor.storage_offset() * tensor.element_size()
    return start + _span_bytes(tensor) <= tensor.untyped_storage().nbytes()


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first to its last element, with the gaps between."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor share memory: ``torch.ones(1).expand(3)`` does.

    Strides that slicing, stepping and permuting cannot produce count as overlapping.
    """
    if not tensor.numel() or tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


class Overlap(NamedTuple, Generic[K]):
    """A pair of tensors that share memory; at least one of them is written."""

    written: K
    other: K
    both_written: bool
    same: bool
    """True if both arrays are the same elements of the same memory."""


class _Span(NamedTuple, Generic[K]):
    start: int
    end: int
    key: K
    tensor: torch.Tensor
    written: bool


def _spans(tensors: Mapping[K, torch.Tensor], *, written: bool) -> Iterator[_Span[K]]:
    for key, tensor in tensors.items():
        if tensor.numel():
            start = tensor.data_ptr()
            yield _Span(start, start + _span_bytes(tensor), key, tensor, written)


def memory_overlaps(
    read: Mapping[K, torch.Tensor], written: Mapping[K, torch.Tensor]
) -> Iterator[Overlap[K]]:
    """Yield pairs of tensors that share memory, unless both are only read."""
    reached, open_spans = 0, list[_Span[K]]()
    spans = [*_spans(read, written=False), *_spans(written, written=True)]
    for span in sorted(spans, key=itemgetter(0)):
        if span.start >= reached:
            open_spans = []
        for earlier in open_spans:
            if earlier.end <= span.start or not (span.written or earlier.written):
                continue
            if _share(earlier.tensor, span.tensor):
                first, second = (span, earlier) if span.written else (earlier, span)
                same = memory_of(span.tensor) == memory_of(earlier.tensor)
                yield Overlap(first.key, second.key, second.written, same)
        open_spans.append(span)
        reached = max(reached, span.end)


def _share(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors, whose address ranges meet, have a byte in common."""
    if first.device != second.device:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    # numpy's stubs allow only two of the values that numpy takes.
    return np.may_share_memory(_array(first), _array(second), max_work=_MAX_WORK)  # type: ignore[arg-type]


class _Interface:
    """The memory of a tensor in the form that numpy accepts, for any dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{item}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * item for stride in tensor.stride()),
        }


def _array(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return a numpy view of a tensor's memory, to compare addresses; its values are not read."""
    return np.asarray(_Interface(tensor))


# --- layouts of all ranks


def layouts_of_job(state: Mapping[str, object]) -> dict[str, Layout | None]:
    """Return the layout of each tensor that any rank has, by name; None for plain values.

    All ranks call this; ranks without tensors pass ``{}``. Of copies on disjoint meshes, that of
    the lowest rank counts. All ranks raise LayoutError if two ranks lay out a tensor differently.
    """
    ranks = range(dist.get_world_size())
    communicator = ProcessGroupCommunicator.of(DeviceMesh(ranks))
    rank = dist.get_rank()
    with communicator.telling():
        own = _own_layouts(flat_state(state))
        content = pickle.dumps(own)
        # Most ranks have equal layouts, which only the first of them sends.
        digests = communicator.gather({rank: sha256(content).digest()})
        first = {digests[peer]: peer for peer in reversed(ranks)}
        sends = first[digests[rank]] == rank
        contents = communicator.gather({rank: content if sends else b""})
    layouts: dict[str, Layout | None] = {}
    holders: dict[str, int] = {}
    for peer in sorted(first.values()):
        declared: dict[str, Layout | None] = pickle.loads(contents[peer])
        for name, layout in declared.items():
            before = layouts.setdefault(name, layout)
            holder = holders.setdefault(name, peer)
            if not _agree(before, layout):
                texts = [str(value) if value else "a plain value" for value in (before, layout)]
                raise LayoutError(
                    f"{name!r} is {texts[0]} on rank {holder} and {texts[1]} on rank {peer}; make "
                    "them equal"
                )
    return layouts


def _own_layouts(state: Mapping[str, object]) -> dict[str, Layout | None]:
    """Return the layout of each of this rank's tensors, by name; None for plain values.

    Plain tensors, such as buffers, are replicated over the mesh of the DTensors beside them.
    Raises LayoutError unless one of their meshes contains the others.
    """
    layouts = {name: stated_layout(name, value) for name, value in state.items()}
    meshes = {layout.mesh for layout in layouts.values() if layout}
    # A module may have parameters on slices of its mesh.
    largest = max(meshes, key=DeviceMesh.size, default=None)
    if largest and any(not {*mesh.ids} <= {*largest.ids} for mesh in meshes):
        largest = None
    for name, value in state.items():
        if layouts[name] is None and not is_plain(value):
            if largest is None or not isinstance(value, torch.Tensor):
                layouts[name] = required_layout(name, value)
            else:
                layouts[name] = Layout(largest, ShardingSpec(value.dim()), value.shape, value.dtype)
    return layouts


def _agree(ours: Layout | None, theirs: Layout | None) -> bool:
    """Return True if two ranks' layouts of a tensor give equal shards or have disjoint meshes."""
    if ours is None or theirs is None or ours == theirs:
        return ours == theirs
    same_tensor = (ours.global_shape, ours.dtype) == (theirs.global_shape, theirs.dtype)
    return same_shards(ours, theirs) or (same_tensor and not {*ours.mesh.ids} & {*theirs.mesh.ids})
