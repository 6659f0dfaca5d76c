"""State dicts that change between planning and running, and what must become of them.

The oracle knows nothing of plans: each tensor alone is made whole from its shards, and memory is
compared element by element. A run is right if it returns these values or names what is wrong.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal

import numpy as np
import torch

from shardspec import DeviceMesh, DTensor, Layout, ShardingSpec, ShardSpecError, plan_reshard
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.comm.process_group import communicator_of
from shardspec.errors import LayoutError
from tests.resharding.states import random_mesh, random_spec, shard_at, wrong_shards

Shards = dict[int, Any]
_ELEMENTS = 400


@dataclass
class Changed:
    """A state dict as it was planned with, and as it runs; by name layouts and shards."""

    planned: dict[str, tuple[Layout, Shards]]
    target: dict[str, Layout]
    given: dict[str, tuple[Layout, Shards]]
    out: dict[str, tuple[Layout, Shards]] | None
    memory: list[np.ndarray]
    wrong_names: set[str] = field(default_factory=set)
    """Names of which one must be refused."""

    @property
    def devices(self) -> list[int]:
        layouts = [*(layout for layout, _ in self.planned.values()), *self.target.values()]
        return sorted({device for layout in layouts for device in layout.mesh.ids})

    def layouts(self) -> list[Layout]:
        """Return all layouts, in an order that is the same in every process."""
        stated = [*self.planned.values(), *self.given.values(), *(self.out or {}).values()]
        return [*self.target.values(), *(layout for layout, _ in stated)]

    def whole(self) -> dict[str, torch.Tensor]:
        """Return each tensor that runs, as it is when it is the only one."""
        found = {}
        for name, (layout, shards) in self.given.items():
            simulated = SimulatedCommunicator(layout.mesh)
            found[name] = DTensor.from_shards(shards, layout, simulated).to_global().clone()
        return found

    def conflicts(self, devices: Sequence[int]) -> bool:
        """Whether elements that some devices fill are filled twice, or read."""
        read: set[int] = set()
        for layout, shards in self.given.values():
            read.update(*(addresses(shards[d]) for d in layout.mesh.ids if d in devices))
        written: list[int] = []
        for layout, shards in (self.out or {}).values():
            written += (at for d in layout.mesh.ids if d in devices for at in addresses(shards[d]))
        return len(set(written)) < len(written) or not read.isdisjoint(written)


def addresses(tensor: torch.Tensor) -> Iterator[int]:
    """Yield where each element lies."""
    for index in product(*map(range, tensor.shape)):
        offset = sum(at * stride for at, stride in zip(index, tensor.stride(), strict=True))
        yield tensor.data_ptr() + offset * tensor.element_size()


def view(random_: random.Random, memory: np.ndarray, shape: tuple[int, ...]) -> torch.Tensor:
    """Return some view of memory, made by torch or by numpy."""
    strides, step = [0] * len(shape), random_.choice([1, 1, 1, 2])
    for dim in random_.sample(range(len(shape)), len(shape)):
        strides[dim] = 0 if random_.random() < 0.04 else step
        step *= max(1, shape[dim]) + random_.choice([0, 0, 0, 1])
    reach = 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
    offset = random_.randrange(_ELEMENTS - reach + 1)
    if random_.random() < 0.5:
        return torch.from_numpy(memory).as_strided(shape, strides, offset)
    steps = [stride * memory.itemsize for stride in strides]
    return torch.from_numpy(np.lib.stride_tricks.as_strided(memory[offset:], shape, steps))


def shards_under(layout: Layout, make: Callable[[tuple[int, ...]], torch.Tensor]) -> Shards:
    """Return shards of which those of one box are the same tensor."""
    by_box: dict[object, torch.Tensor] = {}
    shards = {}
    for device in layout.mesh.ids:
        box = layout.intervals(device)
        if box not in by_box:
            by_box[box] = make(layout.local_shape(device))
        shards[device] = by_box[box]
    return shards


def _copies_a_part(layout: Layout) -> bool:
    """Whether two devices hold some elements both, and others not."""
    shape = layout.global_shape
    numbered = torch.arange(prod(shape)).reshape(shape)
    held = {tuple(shard_at(numbered, layout, d).flatten().tolist()) for d in layout.mesh.ids}
    return len(set(sum(held, ()))) < len(sum(held, ()))


def changed_case(seed: int, ids: int) -> Changed:
    """Return a state dict, and what it has become when it runs."""
    random_ = random.Random(seed)
    a, b = random_mesh(random_, ids), random_mesh(random_, ids)
    memory = [np.arange(_ELEMENTS, dtype=np.float32) + 1000 * n + seed % 97 for n in range(3)]

    def seen(shape: tuple[int, ...]) -> torch.Tensor:
        return view(random_, random_.choice(memory[:2]), shape)

    kinds = []
    for _ in range(random_.choice([1, 1, 2])):
        shape = tuple(random_.choice([0, 1, 2, 3, 4, 4]) for _ in range(random_.randrange(3)))
        source = Layout(a, random_spec(random_, a, shape), shape, "float32")
        if _copies_a_part(source):  # whose copies would differ
            source = source.with_spec(ShardingSpec(len(shape)))
        kinds.append((source, Layout(b, random_spec(random_, b, shape), shape, "float32")))
    planned: dict[str, tuple[Layout, Shards]] = {}
    target: dict[str, Layout] = {}
    for number in range(random_.randrange(1, 5)):
        source, target[f"t{number}"] = random_.choice(kinds)
        same = [shards for layout, shards in planned.values() if layout == source]
        tied = same and random_.random() < 0.4
        shards = random_.choice(same) if tied else shards_under(source, seen)
        planned[f"t{number}"] = source, shards
    case = Changed(planned, target, dict(planned), None, memory)
    for _ in range(random_.choice([0, 1, 1, 2])):
        _change(random_, case, seen)
    if random_.random() < 0.6:
        place = random_.choice([2, 2, 2, 0])
        separate = random_.random() < 0.4
        case.out = {}
        for name, layout in target.items():
            same = [shards for at, shards in case.out.values() if at == layout]
            if same and random_.random() < 0.3:
                case.out[name] = layout, random_.choice(same)
            elif separate:
                case.out[name] = layout, {d: torch.zeros(layout.local_shape(d)) for d in b.ids}
            else:
                made = {d: view(random_, memory[place], layout.local_shape(d)) for d in b.ids}
                case.out[name] = layout, made
        if random_.random() < 0.1:
            name = random_.choice(list(target))
            _state_another_layout(random_, case, case.out, name)
    return case


def _change(
    random_: random.Random, case: Changed, seen: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    name = random_.choice(list(case.planned))
    if name not in case.given or name in case.wrong_names:
        return
    layout, shards = case.given[name]
    match random_.choice(["tie", "tie one", "apart", "new", "turned", "layout", "names", "dtype"]):
        case "tie":
            same = [s for at, s in case.given.values() if at == layout]
            case.given[name] = layout, random_.choice(same)
        case "tie one":  # only where one device sees it, with values of its own elsewhere
            same = [s for at, s in case.given.values() if at == layout]
            other, box = random_.choice(same), layout.intervals(random_.choice(layout.mesh.ids))
            case.given[name] = (
                layout,
                {d: (other if layout.intervals(d) == box else shards)[d] for d in layout.mesh.ids},
            )
        case "apart":
            case.given[name] = layout, {d: shard.clone() for d, shard in shards.items()}
        case "new":
            case.given[name] = layout, shards_under(layout, seen)
        case "turned":
            turned = {d: s.t() if s.dim() == 2 else s for d, s in shards.items()}
            if all(turned[d].shape == s.shape for d, s in shards.items()):
                case.given[name] = layout, turned
        case "layout":
            _state_another_layout(random_, case, case.given, name)
        case "dtype":
            double = Layout(layout.mesh, layout.spec, layout.global_shape, "float64")
            case.given[name] = double, {d: shard.double() for d, shard in shards.items()}
            case.wrong_names.add(name)
        case "names":
            moved = random_.choice(["", "other"])
            value = case.given.pop(name)
            if moved:
                case.given[moved] = value
            case.wrong_names |= {name, moved} - {""}


def _state_another_layout(
    random_: random.Random, case: Changed, state: dict[str, Any], name: str
) -> None:
    """State another layout for the same shards, if one fits them."""
    layout, shards = state[name]
    ids, shape = list(layout.mesh.ids), layout.global_shape
    # Without elements no layout is wrong.
    for _ in range(20 if prod(shape) else 0):
        random_.shuffle(ids)
        grid = random_.choice([layout.mesh.shape, (len(ids),)])
        mesh = DeviceMesh(random_.choice([ids, layout.mesh.ids]), grid)
        spec = random_spec(random_, mesh, shape)
        free = [axis for axis in range(mesh.ndim) if axis not in spec.axes]
        pending: dict[int | str, Literal["sum"]] = {}
        if free and random_.random() < 0.4:
            pending[free[0]] = "sum"
        cuts = dict(enumerate(spec.dim_specs))
        stated = Layout(mesh, ShardingSpec(spec.dims, cuts, partial=pending), shape, layout.dtype)
        fits = all(stated.local_shape(d) == layout.local_shape(d) for d in ids)
        if fits and not _copies_a_part(stated):
            break
    else:
        return
    state[name] = stated, shards
    numbered = torch.arange(prod(shape)).reshape(shape)
    if pending or any(
        not torch.equal(shard_at(numbered, stated, d), shard_at(numbered, layout, d)) for d in ids
    ):
        case.wrong_names.add(name)


def outcome(case: Changed, devices: Sequence[int], *, in_job: bool) -> tuple[str, list[str]]:
    """Run a case for some devices; return what was refused, and what is wrong."""

    def held(layout: Layout, shards: Shards) -> DTensor:
        here = {d: shards[d] for d in layout.mesh.ids if d in devices}
        return DTensor.from_shards(here, layout)

    def outside(layout: Layout) -> bool:
        return in_job and devices[0] not in layout.mesh

    for layout in case.layouts() if in_job else ():
        communicator_of(layout.mesh)  # which all ranks make in one order
    planned = {n: at if in_job else held(at, s) for n, (at, s) in case.planned.items()}
    plan = plan_reshard(planned, case.target)
    # The order of names is that of this process.
    names = sorted(case.given, reverse=bool(devices[0] % 2))
    state = {n: case.given[n] for n in names if not outside(case.given[n][0])}
    conflicts = case.conflicts(devices)
    whole = None if case.wrong_names else case.whole()
    before = [array.copy() for array in case.memory]
    out = None if case.out is None else {n: held(*at) for n, at in case.out.items()}
    try:
        got = plan.run({n: held(*at) for n, at in state.items()}, out)
    except ShardSpecError as error:
        said = f"{type(error).__name__}: {error}"
        problems = []
        if any(not np.array_equal(*pair) for pair in zip(before, case.memory, strict=True)):
            problems.append(f"refused, but memory has changed: {said}")
        if not isinstance(error, LayoutError):
            problems.append(f"another error: {said}")
        if not in_job and not conflicts:
            if not case.wrong_names:
                problems.append(f"refused without a reason: {said}")
            elif not any(repr(name) in said for name in case.wrong_names):
                problems.append(f"names none of {case.wrong_names}: {said}")
        return said, problems
    if whole is None:
        return "", [f"not refused, but {case.wrong_names}"]
    here = [device for device in devices if any(device in at.mesh for at in case.target.values())]
    return "", wrong_shards(whole, case.target, got, here)
