"""What every device must hold after a move, told by the box map alone, and lists of moves.

A tensor with reductions pending is a stack: one leading dim per pending axis, ascending, with one
addend for each coordinate on it. Values are whole numbers small enough that every order of
reducing them gives the same bits.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import prod
from typing import Final

import torch

from shardspec import Layout, ShardingSpec
from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import Exchange, Permute, ReduceOp, Step
from shardspec.layout.graph import spec_of, state_of, successors
from shardspec.layout.moving import transfers_of
from shardspec.mesh.device_mesh import Axis

OPS: Final[tuple[ReduceOp, ...]] = ("sum", "avg", "min", "max", "prod")


def index_of(layout: Layout, device: int) -> tuple[slice, ...]:
    """Return the index that selects a device's box from the global tensor."""
    return tuple(slice(lo, hi) for lo, hi in layout.box(device))


_SHORT = (torch.bfloat16, torch.float16, torch.int8, torch.uint8)


def dtype_of(layout: Layout) -> torch.dtype:
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def pending_axes(spec: ShardingSpec) -> list[int]:
    return sorted(axis for axis in spec.partial if isinstance(axis, int))


def stack_of(layout: Layout) -> torch.Tensor:
    """Make up the tensor that a layout stands for."""
    dtype = dtype_of(layout)
    axes = pending_axes(layout.spec)
    if not axes:
        numbers = torch.arange(prod(layout.global_shape)).reshape(layout.global_shape)
        if layout.dtype.startswith("float8"):
            return (numbers % 120).to(torch.uint8).view(dtype)
        if dtype == torch.bool:
            return numbers * numbers % 7 % 3 == 0
        return (numbers % 97 if dtype in _SHORT else numbers).to(dtype)
    sizes = [layout.mesh.shape[axis] for axis in axes]
    shape = (*sizes, *layout.global_shape)
    ops = set(layout.spec.partial.values())
    generator = torch.Generator().manual_seed(prod(shape) + 7 * len(layout.spec.axes))
    if "prod" in ops:
        numbers = torch.tensor([-2, -1, 1, 2])[
            torch.randint(0, 4, shape, generator=generator)  # powers of two keep their bits
        ]
    else:
        most = 3 if dtype in _SHORT or dtype == torch.bool else 1000
        numbers = torch.randint(-most, most + 1, shape, generator=generator)
    if "avg" in ops:
        numbers = numbers * prod(sizes)
    if dtype == torch.bool:
        return numbers > 0
    if dtype.is_complex:
        return torch.complex(numbers.float(), numbers.flip(0).float()).to(dtype)
    return numbers.to(dtype)


def reduced(stack: torch.Tensor, before: ShardingSpec, after: ShardingSpec) -> torch.Tensor:
    """Finish the reductions of a stack that are pending before but not after."""
    for place, axis in reversed(list(enumerate(pending_axes(before)))):
        if axis not in after.partial:
            match before.partial[axis]:
                case "sum":
                    result = stack.sum(place)
                case "avg":
                    result = stack.mean(place)
                case "min":
                    result = stack.amin(place)
                case "max":
                    result = stack.amax(place)
                case "prod":
                    result = stack.prod(place)
            stack = result.to(stack.dtype)
    return stack


def shard_of(layout: Layout, stack: torch.Tensor, device: int) -> torch.Tensor:
    """Return the shard that a device must hold."""
    at = layout.mesh.coordinates(device)
    addend = stack[tuple(at[axis] for axis in pending_axes(layout.spec))]
    return addend[tuple(slice(lo, hi) for lo, hi in layout.box(device))].clone(
        memory_format=torch.contiguous_format
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return dense.copy_(tensor.reshape(-1)).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare shape, dtype and values; of complex numbers zeros of either sign are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_complex:
        return torch.equal(a, b)
    return torch.equal(raw(a), raw(b))


@dataclass(frozen=True, slots=True)
class Move:
    """One step, with the layouts on both sides."""

    step: Step
    before: Layout
    after: Layout


def collectives(source: Layout) -> Iterator[Move]:
    """Yield every step of the graph that starts from a layout."""
    for step, reached in successors(state_of(source.spec), range(source.mesh.ndim)):
        yield Move(step, source, source.with_spec(spec_of(reached)))


def routed(source: Layout, target: Layout) -> Iterator[Move]:
    """Yield the exchange between two layouts, and the permute where there is one."""
    if source.spec == target.spec or source.spec.partials or target.spec.partials:
        return
    axes = tuple(range(source.mesh.ndim))
    yield Move(Exchange(axes), source, target)
    if Counter(source.boxes().values()) == Counter(target.boxes().values()):
        yield Move(Permute(axes), source, target)


def of_each_kind(moves: Iterable[Move], every: int) -> list[Move]:
    """Return every so many of the moves of each kind of step."""
    kinds: dict[type[Step], list[Move]] = defaultdict(list)
    for move in moves:
        kinds[type(move.step)].append(move)
    return [move for alike in kinds.values() for move in alike[::every]]


def partial_specs(
    dims: int, num_axes: int, ops: Sequence[ReduceOp] = OPS, mixed: bool = False
) -> Iterator[ShardingSpec]:
    """Yield every spec with some axes pending by one operation, or by sum and avg together."""
    for count in range(1, num_axes + 1):
        for pending in combinations(range(num_axes), count):
            choices = [(op,) * count for op in ops]
            if mixed:
                choices = [c for c in product(OPS[:2], repeat=count) if len(set(c)) == 2]
            rest = [axis for axis in range(num_axes) if axis not in pending]
            for chosen in choices:
                for cuts in cuts_by(dims, rest):
                    partial: dict[Axis, ReduceOp] = dict(zip(pending, chosen, strict=True))
                    yield ShardingSpec(dims, cuts, partial=partial)


def cuts_by(dims: int, axes: Sequence[int]) -> Iterator[dict[int, list[int | str]]]:
    """Yield every way to cut some dims by some of the axes, in any order."""
    for count in range(len(axes) + 1):
        for chosen in permutations(axes, count):
            for at in product(range(dims), repeat=count):
                if list(at) == sorted(at):
                    cuts: dict[int, list[int | str]] = {}
                    for axis, dim in zip(chosen, at, strict=True):
                        cuts.setdefault(dim, []).append(axis)
                    yield cuts


def plain_specs(dims: int, num_axes: int) -> list[ShardingSpec]:
    """Return every spec with nothing pending."""
    return [ShardingSpec(dims, cuts) for cuts in cuts_by(dims, range(num_axes))]


def targets_of(source: ShardingSpec, num_axes: int) -> list[ShardingSpec]:
    """Return every spec that a spec can be converted to."""
    pending = source.partial
    result = []
    for count in range(len(pending) + 1):
        for kept in combinations(pending, count):
            rest = [axis for axis in range(num_axes) if axis not in kept]
            for cuts in cuts_by(source.dims, rest):
                partial = {axis: pending[axis] for axis in kept}
                result.append(ShardingSpec(source.dims, cuts, partial=partial))
    return result


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many shards were looked at, and what was wrong with which."""

    shards: int
    wrong: tuple[str, ...]


def strided(shard: torch.Tensor) -> torch.Tensor:
    """Return the same values with gaps between them in memory."""
    wide = torch.zeros((*shard.shape, 2), dtype=shard.dtype)
    wide[..., 0] = shard
    return wide[..., 0]


def run_moves(
    communicator: Communicator, moves: Iterable[Move], with_gaps: bool = False
) -> Outcome:
    """Run steps and compare what every device of this process gets with the box map."""
    shards, wrong = 0, []
    for move in moves:
        before, after = move.before, move.after
        stack = stack_of(before)
        given = {d: shard_of(before, stack, d) for d in communicator.addressable}
        if with_gaps:
            given = {device: strided(shard) for device, shard in given.items()}
        kept = {device: shard.clone() for device, shard in given.items()}
        results = communicator.run(transfers_of(move.step, before, after), given)
        expected = reduced(stack, before.spec, after.spec)
        problems = set()
        if tuple(results) != communicator.addressable:
            problems.add(f"results for {tuple(results)}")
        memory = {shard.untyped_storage().data_ptr() for shard in given.values() if shard.numel()}
        for device, result in results.items():
            shards += 1
            wanted = shard_of(after, expected, device)
            if not same_bits(result, wanted):
                problems.add(f"device {device} got {result}, not {wanted}")
            if not result.is_contiguous():
                problems.add(f"device {device} has gaps")
            if result.numel() and result.untyped_storage().data_ptr() in memory:
                problems.add(f"device {device} shares memory")
            if not same_bits(given[device], kept[device]):
                problems.add(f"device {device} had its input changed")
            memory.add(result.untyped_storage().data_ptr() if result.numel() else 0)
        wrong += [f"{move.step} from {before} to {after.spec}: {p}" for p in sorted(problems)]
    return Outcome(shards, tuple(wrong))
