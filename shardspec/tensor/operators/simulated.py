"""torch's DTensors in one process that holds the shards of all devices of a mesh.

torch simulates a job by its `LocalTensor`, which has the shards of all ranks: operations apply to
each of them, and collectives copy between them. torch's DTensor treats such a tensor like a shard.
Both exist only during an operation, whose results are shards.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, count
from traceback import walk_tb
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed import distributed_c10d
from torch.distributed._local_tensor import LocalTensorMode, local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor.experimental import implicit_replication

from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import counted_with
from shardspec.interop.torch_parts import joined, parts_of
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.mesh.job import check_ascending, stand_for
from shardspec.tensor.operators.watch import Watch, is_alias

Locals: TypeAlias = list[torch.Tensor]
"""Tensors, each with the shards of all devices."""
LocalFunction: TypeAlias = Callable[[Locals], Locals]

_SIMULATING: Final = threading.RLock()
"""Locked while torch treats this process as a job."""
_SIMULATION: Final = LocalTensorMode.__module__
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


@contextmanager
def simulating(mesh: DeviceMesh, device_type: str) -> Iterator[None]:
    """Make torch treat this process as all ranks of a mesh."""
    with _SIMULATING:
        state = torch.get_rng_state()
        world, _ = _job_of(mesh, device_type)
        _keep_names(world)
        try:
            with _in_world(world), LocalTensorMode(len(mesh.ids)):
                yield
        finally:
            # torch leaves the value of the last rank.
            torch.set_rng_state(state)


def simulated_mesh(mesh: DeviceMesh, device_type: str) -> TorchMesh:
    """Return torch's mesh in the simulated job, where ranks are numbered as devices of the mesh."""
    return _job_of(mesh, device_type)[1]


def is_branch_of_rank(error: Exception) -> bool:
    """Return whether torch failed because simulated ranks would take different branches."""
    return isinstance(error, AssertionError) and not any(isinstance(a, str) for a in error.args)


@contextmanager
def within_limits(name: str, specs: str = "these layouts") -> Iterator[None]:
    """Refuse what torch cannot simulate, such as shards that are split into unequal numbers."""
    try:
        yield
    except (AssertionError, AttributeError) as error:
        frame, _ = list(walk_tb(error.__traceback__))[-1]
        if not (is_branch_of_rank(error) or frame.f_globals["__name__"] == _SIMULATION):
            raise
        raise LayoutError(
            f"{name}: torch {torch.__version__} cannot simulate it on {specs}, where ranks go "
            "different ways; redistribute first, or start the program with torchrun"
        ) from None


@contextmanager
def each_draws(seeds: Sequence[int]) -> Iterator[None]:
    """Make each rank draw random numbers from its own seed."""
    mode = local_tensor_mode()
    assert mode is not None
    states = mode._per_rank_rng_states
    before = dict(states)
    for rank, seed in enumerate(seeds):
        states[rank] = torch.Generator().manual_seed(seed).get_state(), {}
    try:
        yield
    finally:
        states.update(before)


def untracked(
    function: LocalFunction,
    mesh: DeviceMesh,
    device_type: str,
    tensors: Sequence[Sequence[torch.Tensor]],
) -> list[list[torch.Tensor]]:
    """Apply a function to tensors given as shards; return the shards of its results.

    The function may write to its arguments, which autograd notices.
    """
    with simulating(mesh, device_type):
        locals_ = [joined(shards) for shards in tensors]
        results = _parts_of_results(function(locals_), tensors)
    for local, shards in zip(locals_, tensors, strict=True):
        if not local.is_inference() and local._version:
            torch.autograd.graph.increment_version(shards)
    return results


def _parts_of_results(
    results: Locals, tensors: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Return the shards of results; views of given shards share their version counters."""
    given = list(zip(*tensors, strict=True))
    return [
        [
            next((counted_with(base, part) for base in bases if is_alias(part, base)), part)
            for part, bases in zip(parts_of(result), given, strict=True)
        ]
        for result in results
    ]


def differentiable(
    function: LocalFunction, name: str, mesh: DeviceMesh, tensors: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Apply a function to tensors given as shards; return the shards of its results.

    Differentiable any number of times, if the function writes to nothing. Computing gradients may
    call the function again.
    """
    flat = list(chain.from_iterable(tensors))
    # torch leaves Function.apply untyped.
    results = _Operation.apply(function, name, mesh, *flat)  # type: ignore[no-untyped-call]
    return _batched(results, len(mesh.ids))


def _batched(flat: Sequence[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    return [list(flat[at : at + size]) for at in range(0, len(flat), size)]


class _Operation(torch.autograd.Function):
    """A differentiable function of the shards of all devices."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        function: LocalFunction,
        name: str,
        mesh: DeviceMesh,
        *shards: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        tensors = _batched(shards, len(mesh.ids))
        wanted = [any(shard.requires_grad for shard in of_one) for of_one in tensors]
        with simulating(mesh, shards[0].device.type), torch.enable_grad():
            results = function(
                [joined(of_one, tracked=t) for of_one, t in zip(tensors, wanted, strict=True)]
            )
        ctx.tracked = [result.requires_grad for result in results]
        ctx.function, ctx.name, ctx.mesh, ctx.wanted = function, name, mesh, wanted
        ctx.save_for_backward(*shards)
        parts = _parts_of_results(results, tensors)
        plain = [p for of_one, t in zip(parts, ctx.tracked, strict=True) for p in of_one if not t]
        ctx.mark_non_differentiable(*plain)
        return tuple(chain.from_iterable(parts))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        devices = len(ctx.mesh.ids)
        arriving = zip(_batched(gradients, devices), ctx.tracked, strict=True)
        given = [*_batched(ctx.saved_tensors, devices), *(g for g, tracked in arriving if tracked)]
        back = partial(_gradients, ctx.function, ctx.name, ctx.wanted)
        results = iter(differentiable(back, ctx.name, ctx.mesh, given))
        nothing = [None] * devices
        of_inputs = [next(results) if wanted else nothing for wanted in ctx.wanted]
        return None, None, None, *chain.from_iterable(of_inputs)


def _gradients(
    function: LocalFunction, name: str, wanted: Sequence[bool], tensors: Locals
) -> Locals:
    """Return the gradients of wanted arguments.

    `tensors` are the function's arguments, followed by the gradients of its results.
    """
    again = any(tensor.requires_grad for tensor in tensors)
    inputs = [
        tensor.detach().requires_grad_() if is_wanted and not tensor.requires_grad else tensor
        for tensor, is_wanted in zip(tensors, wanted, strict=False)
    ]
    sources = [each for each, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
    results = [result for result in function(inputs) if result.requires_grad]
    back = f"{name} on the way back"
    with within_limits(back), implicit_replication(), Watch(name, (), back=True):
        gradients = torch.autograd.grad(
            results, sources, tensors[len(inputs) :], create_graph=again, allow_unused=True
        )
    return [
        torch.zeros_like(source) if gradient is None else gradient
        for source, gradient in zip(sources, gradients, strict=True)
    ]
