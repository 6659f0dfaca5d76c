"""What each rank holds of a state dict, and that all ranks agree on it before anything is done."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from hashlib import sha256
from itertools import permutations
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import ReplicaKey, box_text, replica_holders
from shardspec.checkpoint.formats.safetensors_header import TensorSlot, encode_header
from shardspec.checkpoint.read_boxes import crc32
from shardspec.checkpoint.state_dict import FlatState, Leaf, flatten, leaves
from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import ReduceOp
from shardspec.errors import CheckpointError, DTypeError, OutputExistsError, ShardSpecError
from shardspec.layout.layout import Layout, LayoutCell
from shardspec.layout.picture import ids_text
from shardspec.layout.spec import DimSpec, ShardingSpec
from shardspec.mesh import Axis, DeviceMesh
from shardspec.text import counted

if TYPE_CHECKING:
    import torch

Replicas: TypeAlias = Literal["equal", "first"]
"""What copies of a box on several ranks have to be, or which of them is saved."""
_LONG: Final = 200
_PIECE_BYTES: Final = 1 << 20
"""Digested and written at once, while it is in the CPU's cache."""

T = TypeVar("T")

_FAILURES: Final = (ShardSpecError, OSError, RuntimeError, ValueError, TypeError, MemoryError)
"""What reading, writing and torch raise. An error of programming is raised as it is, where it
happened; the other ranks hear of it all the same."""


def agree(communicator: Communicator, act: Callable[[], T]) -> T:
    """Do something in every process, and go on only if it worked in all of them.

    Every process of the mesh calls this at the same point; one outside acts for itself. What is
    done must not communicate. Where it fails anywhere, every rank raises CheckpointError, which
    names the first such rank, or OutputExistsError if that was one.
    """
    if not communicator.addressable:
        return act()
    done: list[T] = []
    failure: tuple[bool, str] | None = None
    cause: Exception | None = None
    try:
        done.append(act())
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        cause = error
        ours = isinstance(error, ShardSpecError)
        text = str(error) if ours else f"{type(error).__name__}: {error}"
        failure = isinstance(error, OutputExistsError), text
    failures = communicator.gather(dict.fromkeys(communicator.addressable, failure))
    failed = {rank: found for rank, found in failures.items() if found is not None}
    if cause is not None and not isinstance(cause, _FAILURES):
        raise cause
    if failed:
        rank, (exists, text) = next(iter(failed.items()))
        everywhere = len(failed) == len(failures) and len(set(failed.values())) == 1
        message = text if everywhere else f"rank {rank}: {text}"
        raise (OutputExistsError if exists else CheckpointError)(message) from cause
    return done[0]


@dataclass(frozen=True, slots=True)
class Described:
    """A state dict, and how its tensors are laid out."""

    flat: FlatState
    shards: Mapping[str, Mapping[int, "torch.Tensor"]]
    """Name to the shard of every addressable device."""
    layouts: Mapping[str, Layout]
    """Sorted by name, as the shards are."""


def communicator_of_state(state_dict: Mapping[str, Any]) -> Communicator:
    """Return who holds a state dict: by the largest mesh, of which the others are slices."""
    from torch.distributed.tensor import DTensor as TorchDTensor

    from shardspec.comm.process_group import communicator_of
    from shardspec.comm.torch_mesh import from_torch
    from shardspec.dtensor import DTensor

    found: list[Communicator] = []
    meshes: dict[Any, Communicator] = {}
    for _, value in leaves(state_dict):
        if isinstance(value, DTensor):
            found.append(value.communicator)
        elif isinstance(value, TorchDTensor) and value.device_mesh not in meshes:
            meshes[value.device_mesh] = communicator_of(from_torch(value.device_mesh))
            found.append(meshes[value.device_mesh])
    if found:
        return max(found, key=lambda communicator: communicator.mesh.size)
    return communicator_of(world_mesh())


def world_mesh() -> DeviceMesh:
    """Return the mesh of all ranks of the job; without one, of this process alone."""
    import torch.distributed as dist

    return DeviceMesh(range(dist.get_world_size() if dist.is_initialized() else 1))


def describe(state_dict: Mapping[str, Any], communicator: Communicator) -> Described:
    """Check every value, and say how it is laid out."""
    flat = flatten(state_dict)
    shards, layouts = {}, {}
    for name, value in sorted(flat.tensors.items(), key=itemgetter(0)):
        shards[name], layouts[name] = _shards_of(name, value, communicator)
        for shard in shards[name].values():
            _check_plain(name, shard)
    # Names that no file can carry are refused here, even those of tensors that have no boxes.
    slots = (TensorSlot(name, at.dtype, at.global_shape) for name, at in layouts.items())
    encode_header(slots, {})
    encode_header((TensorSlot(name, "int8", ()) for name in flat.values), {})
    return Described(flat, shards, layouts)


def _shards_of(
    name: str, value: Leaf, communicator: Communicator
) -> tuple[Mapping[int, "torch.Tensor"], Layout]:
    from torch.distributed.tensor import DTensor as TorchDTensor

    from shardspec.dtensor import DTensor

    mesh = communicator.mesh
    if isinstance(value, TorchDTensor):
        value = DTensor.from_torch(value)
    if not isinstance(value, DTensor):
        _check_plain(name, value)
        try:
            layout = Layout(mesh, ShardingSpec(value.dim()), value.shape, value.dtype)
        except DTypeError as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from None
        return dict.fromkeys(communicator.addressable, value), layout
    larger = _on_larger(value.layout, mesh)
    if larger is None or not set(communicator.addressable) <= value.shards.keys():
        own = value.layout.mesh
        raise CheckpointError(
            f"tensor {name!r} is on mesh {own} with ids {own.ids}, but the save is on mesh {mesh} "
            f"with ids {mesh.ids}; convert it to one mesh first"
        )
    return value.shards, larger


def _on_larger(layout: Layout, mesh: DeviceMesh) -> Layout | None:
    """Return a layout on a mesh of which its own is a slice; None if it is none."""
    if layout.mesh == mesh:
        return layout
    axes = _axes_on(layout.mesh, mesh)
    if axes is None:
        return None
    spec = layout.spec
    cuts: dict[int, DimSpec] = {}
    for dim, cut in enumerate(spec.dim_specs):
        by = tuple(axes[int(axis)] for axis in cut.axes if axis in axes)
        # Along axes of one device nothing is sharded, nor does a part have several shares.
        cuts[dim] = DimSpec(by, cut.parts, cut.block) if by else DimSpec()
    pending: dict[Axis, ReduceOp] = {
        axes[int(p.axis)]: p.op for p in spec.partials if p.axis in axes
    }
    onto_mesh = ShardingSpec(spec.dims, cuts, partial=pending)
    return Layout(mesh, onto_mesh, layout.global_shape, layout.dtype)


@lru_cache(maxsize=64)
def _axes_on(own: DeviceMesh, mesh: DeviceMesh) -> dict[int, int] | None:
    """Return which axis of a mesh each longer axis of a slice of it is; None if it is no slice."""
    if not set(own.ids) <= set(mesh.ids):
        return None
    longer = [axis for axis, size in enumerate(own.shape) if size > 1]
    places = [(own.coordinates(device), mesh.coordinates(device)) for device in own.ids]
    for onto in permutations(range(mesh.ndim), len(longer)):
        axes = dict(zip(longer, onto, strict=True))
        if any(own.shape[a] != mesh.shape[b] for a, b in axes.items()):
            continue
        rest = {tuple(at for b, at in enumerate(there) if b not in onto) for _, there in places}
        if len(rest) == 1 and all(h[a] == t[b] for h, t in places for a, b in axes.items()):
            return axes
    return None


def _check_plain(name: str, tensor: "torch.Tensor") -> None:
    """Refuse what has no bytes of its own, one element after the other."""
    import torch

    where = f"tensor {name!r} is"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        remedy = "leave it out, or give it values"
        if not tensor.is_meta:
            remedy = f"save its {'dequantize()' if tensor.is_quantized else 'to_dense()'}"
        raise CheckpointError(
            f"{where} no plain dense tensor ({tensor.layout}, on {tensor.device}); {remedy}"
        )
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise CheckpointError(
            f"{where} a {type(tensor).__module__}.{type(tensor).__name__}, which says nothing of "
            "its bytes; save the plain tensors that it is made of"
        )


def _facts(what: Described, mesh: DeviceMesh, replicas: Replicas) -> dict[str, str]:
    """Return what all ranks have to agree on, each with the words that say what it is."""
    facts = {"the mesh": f"{mesh} of ids {mesh.ids}", "replicas": repr(replicas)}
    paths = what.flat.paths
    for name, layout in what.layouts.items():
        at = f" at {paths[name]}" if name in paths else ""
        spec, shape = layout.spec, list(layout.global_shape)
        facts[f"tensor {name!r}"] = f"{spec} of {shape} {layout.dtype}{at}"
    for name, value in what.flat.values.items():
        at = f" at {paths[name]}" if name in paths else ""
        facts[f"value {name!r}"] = f"{value!r}{at}" if replicas == "equal" else f"a value{at}"
    return facts


def check_same(what: Described, communicator: Communicator, replicas: Replicas) -> None:
    """Raise on every rank if not all of them have the same tensors and values."""
    facts = _facts(what, communicator.mesh, replicas)
    digest = sha256(repr(sorted(facts.items())).encode("utf-8", "surrogatepass")).hexdigest()
    ranks = communicator.addressable
    digests = communicator.gather(dict.fromkeys(ranks, digest))
    if len(set(digests.values())) == 1:
        return
    # Only now the long lists travel.
    every = communicator.gather(dict.fromkeys(ranks, facts))
    first, other = next((i, j) for i in every for j in every if every[i] != every[j])
    one, two = every[first], every[other]
    key = min(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
    has = []
    for rank in (first, other):
        text = every[rank].get(key, f"no such {key.split()[0]}")
        has.append(f"rank {rank} has {text[:_LONG]}{'…' if len(text) > _LONG else ''}")
    raise CheckpointError(f"{key}: {' but '.join(has)}; save the same on every rank")


_Shared: TypeAlias = Mapping[Layout, Mapping[ReplicaKey, tuple[int, ...]]]
"""The boxes that are not empty and that several ranks hold, and these."""


def _replicas(what: Described, communicator: Communicator, shared: _Shared) -> dict[int, bytes]:
    """Return by rank the CRC-32 of each of its boxes that other ranks hold too, by name."""
    known: dict[tuple[int, Box], int] = {}
    found = {}
    for rank in communicator.addressable:
        crcs = array("I")
        # In the order in which all ranks look at them.
        mine = {
            layout: [box for (box, _), ranks in held.items() if rank in ranks]
            for layout, held in shared.items()
        }
        for name, layout in what.layouts.items():
            tensor = what.shards[name][rank]
            for box in mine[layout]:
                # A plain tensor is one for all devices of this process.
                of = id(tensor), box
                if of not in known:
                    pieces = tensor_bytes(box_of_shard(tensor, layout, rank, box))
                    known[of] = reduce(lambda crc, piece: crc32(piece, crc), pieces, 0)
                crcs.append(known[of])
        found[rank] = crcs.tobytes()
    return found


def check_replicas_of_ranks(what: Described, communicator: Communicator) -> None:
    """Raise on every rank if copies of a box on several ranks differ."""
    shared = {
        layout: {part: ranks for part, ranks in replica_holders(layout).items() if len(ranks) > 1}
        for layout in set(what.layouts.values())
    }
    crcs = communicator.gather(agree(communicator, lambda: _replicas(what, communicator, shared)))
    digests = {rank: iter(array("I", found)) for rank, found in crcs.items()}
    differ: dict[str, str] = {}
    for name, layout in what.layouts.items():
        for (box, _), ranks in shared[layout].items():
            holders: dict[int, list[int]] = {}
            for rank in ranks:
                holders.setdefault(next(digests[rank]), []).append(rank)
            if len(holders) > 1 and name not in differ:
                groups = [f"rank{'s' * (len(g) > 1)} {ids_text(g)}" for g in holders.values()]
                whose = ", another on ".join(groups[:3]) + (", and more" if groups[3:] else "")
                differ[name] = f"its copies of box {box_text(box)} differ: one is on {whose}"
    for name, problem in differ.items():
        more = f" ({counted(len(differ) - 1, 'other tensor')} too)" if len(differ) > 1 else ""
        raise CheckpointError(
            f"tensor {name!r}: {problem}{more}; make them equal, or shard the tensor by what "
            'differs, or save that of the first rank with replicas="first"'
        )


def box_of_shard(shard: "torch.Tensor", layout: Layout, rank: int, box: Box) -> "torch.Tensor":
    """Return one of the boxes of a rank's shard, which is all of it unless there are parts."""
    if layout.spec.is_plain:
        return shard
    return shard[LayoutCell(layout, box).index(rank)]


def tensor_bytes(tensor: "torch.Tensor") -> Iterator[memoryview]:
    """Yield the bytes of a tensor, row-major; copied only where they are not at hand that way."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Strides are set, not kept: a single element counts as contiguous whatever its stride.
    data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]
