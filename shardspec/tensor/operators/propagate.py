"""Layouts of results by torch's rules, in a process without a job: torch runs on meta tensors.

torch's DTensor needs a job, so it is shown one that transfers nothing.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_leaves

from shardspec.errors import LayoutError, LossyConversionError
from shardspec.interop.torch_dtensor import in_our_words, layout_of, torch_dtensor
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.mesh.job import check_ascending, stand_for
from shardspec.tensor.operators.call import Call
from shardspec.tensor.operators.tensor import TensorLike

Layouts: TypeAlias = Sequence[Layout | None] | None

_FAILURES: Final = (
    *(RuntimeError, ValueError, AssertionError, TypeError, IndexError, KeyError),
    AttributeError,
)
"""The errors that torch raises if it cannot propagate a layout."""
_HASHABLE: Final = (int, float, complex, str, type(None), torch.dtype, torch.device)
_MOST_KNOWN: Final = 4096
_KNOWN: Final[dict[Hashable, tuple[Layouts]]] = {}
"""Layouts of the results of earlier calls."""
_SIMULATING: Final = threading.RLock()
"""Locked while torch treats this process as a job."""
_NAMES: Final = count(1)
_NAMES_EACH: Final = 1 << 32


@dataclass(eq=False)
class _World:
    """A replacement for the global state of torch.distributed."""

    group_count: int
    """A number for the name of the next group; names are unique over all worlds."""
    default_pg: dist.ProcessGroup | None = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    tags_to_pg: dict[Any, Any] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


class _WorldOfThread:
    """Shows one world to this thread, and another to all others."""

    def __init__(self, own: _World, others: object) -> None:
        seen = {"_thread": threading.get_ident(), "_own": own, "_others": others}
        vars(self).update(seen)

    def _seen(self) -> object:
        return self._own if threading.get_ident() == self._thread else self._others

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._seen(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._seen(), name, value)


@contextmanager
def _in_world(world: _World) -> Iterator[None]:
    before = distributed_c10d._world
    # torch keeps its groups only here, and its own threaded groups replace it in the same way.
    # Other threads still see the previous world, which is restored when the call ends.
    distributed_c10d._world = _WorldOfThread(world, before)  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed_c10d._world = before


@lru_cache(maxsize=64)
def _job_of(mesh: DeviceMesh, device_type: str) -> tuple[_World, TorchMesh]:
    """Return a job of the mesh's ranks that transfers nothing, and torch's mesh in it."""
    check_ascending(mesh)
    number = next(_NAMES)
    world = _World(number * _NAMES_EACH)
    grid = torch.arange(len(mesh.ids), dtype=torch.int).reshape(mesh.shape)
    # Different names keep it from equalling a mesh of another job, in torch's caches.
    names = tuple(f"axis {axis} of simulated job {number}" for axis in range(mesh.ndim))
    with _in_world(world):
        dist.init_process_group("fake", rank=0, world_size=len(mesh.ids))
        torch_mesh = TorchMesh(device_type, grid, mesh_dim_names=names)
        stand_for(mesh, torch_mesh)
    return world, torch_mesh


def _keep_names(world: _World) -> None:
    """Register groups anew that torch's `destroy_process_group` has forgotten with all others."""
    for group, name in world.pg_names.items():
        try:
            _resolve_process_group(name)
        except RuntimeError:
            _register_process_group(name, group)


def layouts_by_torch(call: Call, torch_mesh: TorchMesh | None = None) -> Layouts:
    """Return the layout of each tensor that a call returns by torch's rule; None without a rule.

    `torch_mesh` is that of the running job; without it this process simulates the mesh.
    """
    if torch_mesh is not None:
        return _propagated(call, torch_mesh)
    key = _key(call)
    found = None if key is None else _KNOWN.get(key)
    if found is not None:
        return found[0]
    mesh = call.tensors[0].layout.mesh
    with _SIMULATING:
        world, torch_mesh = _job_of(mesh, "cpu")
        _keep_names(world)
        with _in_world(world):
            layouts = _propagated(call, torch_mesh)
    if key is not None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = (layouts,)
    return layouts


def _key(call: Call) -> Hashable | None:
    """Return what decides the layouts of a call's results; None if that cannot be hashed."""
    leaves: list[Hashable] = []
    for leaf in call.leaves:
        if isinstance(leaf, TensorLike):
            leaves.append((TensorLike, leaf.layout))
        elif isinstance(leaf, torch.Tensor):
            leaves.append((torch.Tensor, leaf.dtype))
        elif isinstance(leaf, _HASHABLE):
            leaves.append((type(leaf), leaf))
        else:
            return None
    return (call.function, *leaves, str(call.structure), torch.get_default_dtype())


def _propagated(call: Call, torch_mesh: TorchMesh) -> Layouts:
    tensors = call.tensors
    mesh, theirs = tensors[0].layout.mesh, {}
    device = next(iter(tensors[0].communicator.addressable), mesh.ids[0])
    with torch.no_grad(), implicit_replication():
        for tensor in tensors:
            shape = tensor.layout.local_shape(device)
            local = torch.empty(shape, dtype=tensor.dtype, device="meta")
            theirs[id(tensor)] = torch_dtensor(local, tensor.layout, torch_mesh)
        try:
            result = call.on(theirs)
            return [
                layout_of(in_our_words(leaf), mesh) if isinstance(leaf, TorchDTensor) else None
                for leaf in tree_leaves(result)
                if isinstance(leaf, torch.Tensor)
            ]
        except (*_FAILURES, LayoutError, LossyConversionError):
            return None
