"""Describes the shards of a state dict on each rank, and checks that all ranks agree."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import box_text, replica_holders
from shardspec.checkpoint.state.state_dict import FlatState, Leaf, flatten
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.comm.agreement import on_all_ranks
from shardspec.comm.communicator import Communicator, SimulatedCommunicator
from shardspec.comm.consensus import agree, check_same
from shardspec.errors import CheckpointError, DTypeError
from shardspec.layout.common_mesh import on_larger_mesh
from shardspec.layout.layout import Layout, LayoutCell
from shardspec.layout.picture import ids_text
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.state import leaves
from shardspec.text import counted

if TYPE_CHECKING:
    import torch

Replicas: TypeAlias = Literal["equal", "first"]
"""Rule for replicas of a box: all must be equal, or the first is saved."""
_PIECE_BYTES: Final = 1 << 20
"""Bytes digested and written per step, while they are in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Described:
    """A state dict with the layout of each tensor, and the shards in this process."""

    flat: FlatState
    shards: Mapping[str, Mapping[int, "torch.Tensor"]]
    layouts: Mapping[str, Layout]

    def bytes_of(self, name: str, rank: int, box: Box) -> Iterator[memoryview]:
        """Yield the row-major bytes of one box of a rank; copied only if not contiguous."""
        import torch

        part = box_of_shard(self.shards[name][rank], self.layouts[name], rank, box).detach()
        plain = part.resolve_conj().resolve_neg().cpu().contiguous()
        # Strides are set here: a single element counts as contiguous with any stride.
        data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
        for at in range(0, len(data), _PIECE_BYTES):
            yield data[at : at + _PIECE_BYTES]


def communicator_of_state(state_dict: Mapping[str, Any], *, alone: bool = False) -> Communicator:
    """Return the communicator of a state dict's largest mesh; other meshes are slices of it.

    Without DTensors it is that of the job or, if `alone`, of this process. All ranks raise errors.
    """
    from shardspec.comm.process_group import communicator_of, telling_job
    from shardspec.tensor.dtensor import DTensor
    from shardspec.tensor.shards import is_torch_dtensor

    communicators: dict[object, Communicator] = {}
    with telling_job():
        for _, value in leaves(state_dict):
            if isinstance(value, DTensor):
                communicators[value.layout.mesh] = value.communicator
            elif is_torch_dtensor(value) and value.device_mesh not in communicators:
                communicators[value.device_mesh] = communicator_of(
                    DeviceMesh.from_torch(value.device_mesh)
                )
    if communicators:
        return max(communicators.values(), key=lambda communicator: communicator.mesh.size())
    return SimulatedCommunicator(DeviceMesh([0])) if alone else communicator_of(world_mesh())


def world_mesh() -> DeviceMesh:
    """Return the mesh of all ranks of the job; without one, of this process alone."""
    import torch.distributed as dist

    return DeviceMesh(range(dist.get_world_size() if dist.is_initialized() else 1))


def describe(state_dict: Mapping[str, Any], communicator: Communicator) -> Described:
    """Return the shards and layouts of a state dict; raises CheckpointError for other values."""
    flat = flatten(state_dict)
    shards, layouts = {}, {}
    for name, value in sorted(flat.tensors.items(), key=itemgetter(0)):
        shards[name], layouts[name] = _shards_of(name, value, communicator)
    return Described(flat, shards, layouts)


def _shards_of(
    name: str, value: Leaf, communicator: Communicator
) -> tuple[Mapping[int, "torch.Tensor"], Layout]:
    from shardspec.tensor.dtensor import DTensor
    from shardspec.tensor.shards import is_torch_dtensor

    mesh = communicator.mesh
    if is_torch_dtensor(value):
        value = DTensor.from_torch(value)
    for shard in value.shards.values() if isinstance(value, DTensor) else (value,):
        _check_plain(name, shard)
    if not isinstance(value, DTensor):
        try:
            layout = Layout(mesh, ShardingSpec(value.dim()), value.shape, value.dtype)
        except DTypeError as error:
            raise CheckpointError(f"tensor {name!r} cannot be saved: {error}") from None
        return dict.fromkeys(communicator.addressable, value), layout
    larger = on_larger_mesh(value.layout, mesh)
    if larger is None or not set(communicator.addressable) <= value.shards.keys():
        own = value.layout.mesh
        raise CheckpointError(
            f"tensor {name!r} is on mesh {own} with ids {own.ids}, but the save is on mesh {mesh} "
            f"with ids {mesh.ids}; convert it to one mesh first"
        )
    return value.shards, larger


def _check_plain(name: str, tensor: "torch.Tensor") -> None:
    """Raise CheckpointError for a sparse, nested, quantized or other tensor that is not dense."""
    import torch

    remedy = ""
    if tensor.is_meta:
        remedy = "exclude it, or give it values"
    elif tensor.layout is not torch.strided or tensor.is_quantized:
        remedy = f"save its {'dequantize()' if tensor.is_quantized else 'to_dense()'}"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        remedy = "save the plain tensors that it is made of"
    if remedy:
        raise CheckpointError(
            f"tensor {name!r} is a {type(tensor).__module__}.{type(tensor).__name__}, not a plain "
            f"dense tensor ({tensor.layout}, on {tensor.device}); {remedy}"
        )


def _state_facts(described: Described, mesh: DeviceMesh, replicas: Replicas) -> dict[str, str]:
    """Return texts that ranks must have equal: ``{"tensor 'w'": "[S0] of [8] float32"}``."""
    at = {name: f" at {path}" for name, path in described.flat.paths.items()}
    tensors = {
        f"tensor {name!r}": f"{x.spec} of {list(x.global_shape)} {x.dtype}{at.get(name, '')}"
        for name, x in described.layouts.items()
    }
    values = {
        f"value {name!r}": (repr(x) if replicas == "equal" else "a value") + at.get(name, "")
        for name, x in described.flat.values.items()
    }
    mesh_and_replicas = {"the mesh": f"{mesh} of ids {mesh.ids}", "replicas": repr(replicas)}
    return {**mesh_and_replicas, **tensors, **values}


def check_same_state(
    described: Described, communicator: Communicator, replicas: Replicas, digests: object = None
) -> None:
    """Raise on every rank if tensors, values or the file of `digests` differ between ranks."""
    facts = {**_state_facts(described, communicator.mesh, replicas), "option digests": str(digests)}
    check_same(communicator, facts, "save the same on every rank")


def check_replicas_of_ranks(described: Described, communicator: Communicator) -> None:
    """Raise on every rank if replicas of a box on several ranks differ in CRC-32."""
    holders = lru_cache(None)(replica_holders)
    shared = [
        (name, box, ranks)
        for name, layout in described.layouts.items()
        for (box, _), ranks in holders(layout).items()
        if len(ranks) > 1
    ]

    def crcs() -> dict[int, list[int]]:
        """Return by rank the CRC-32 of each of its shared boxes, in the order of `shared`."""
        crcs_of: dict[int, list[int]] = {rank: [] for rank in communicator.addressable}
        # A plain tensor is one object for all devices of this process.
        digested: dict[tuple[int, Box], int] = {}
        for name, box, ranks in shared:
            for rank in crcs_of.keys() & ranks:
                key = id(described.shards[name][rank]), box
                if key not in digested:
                    pieces = described.bytes_of(name, rank, box)
                    digested[key] = reduce(lambda crc, piece: crc32(piece, crc), pieces, 0)
                crcs_of[rank].append(digested[key])
        return crcs_of

    gathered = communicator.gather(agree(communicator, crcs))
    remaining = {rank: iter(values) for rank, values in gathered.items()}
    differ: dict[str, str] = {}
    for name, box, ranks in shared:
        groups: dict[int, list[int]] = {}
        for rank in ranks:
            groups.setdefault(next(remaining[rank]), []).append(rank)
        if len(groups) > 1 and name not in differ:
            texts = [f"rank{'s' * (len(g) > 1)} {ids_text(g)}" for g in groups.values()]
            whose = ", another on ".join(texts[:3]) + (", and more" if texts[3:] else "")
            differ[name] = f"its copies of box {box_text(box)} differ: one is on {whose}"
    for name, problem in differ.items():
        more = f" ({counted(len(differ) - 1, 'other tensor')} too)" if len(differ) > 1 else ""
        raise on_all_ranks(
            CheckpointError(
                f"tensor {name!r}: {problem}{more}; make them equal, give its layout the "
                'axes along which they differ, or pass replicas="first" to keep one copy'
            )
        )


def box_of_shard(shard: "torch.Tensor", layout: Layout, rank: int, box: Box) -> "torch.Tensor":
    """Return one box of a rank's shard; the full shard unless it has parts."""
    if layout.spec.is_plain:
        return shard
    return shard[LayoutCell(layout, box).index(rank)]
