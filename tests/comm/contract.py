"""What every communicator must do, written once; each backend's tests inherit it.

A case is a step between two layouts with a shard for every device. The expected result is worked
out here from the boxes alone, with no code of the communicators.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import pytest
import torch

from shardspec import DeviceMesh, Layout
from shardspec.boxes import slices_within
from shardspec.comm.communicator import Communicator
from shardspec.comm.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Permute,
    ReduceOp,
    ReduceScatter,
    Slice,
    Step,
)
from shardspec.comm.transfers import Transfers


@dataclass(frozen=True)
class Case:
    """One step to run."""

    name: str
    step: Step
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    ids: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    mesh_shape: tuple[int, ...] = (2, 3)

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh(self.ids, self.mesh_shape)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        before = Layout(self.mesh, self.source, self.shape, self.dtype)
        return before, before.with_spec(self.target)

    def whole(self, addend: int = 0) -> torch.Tensor:
        """The global tensor, or one addend of it; small whole numbers, so sums are exact."""
        count = prod(self.shape)
        if self.dtype == torch.bool:
            return ((torch.arange(count) * 7 + addend) % 3 == 0).reshape(self.shape)
        values = ((torch.arange(count) * 7 + 3 * addend) % 11 - 4).reshape(self.shape)
        if self.dtype.is_complex:
            return torch.complex(values.float(), values.float() * 2 + addend)
        return values.to(self.dtype)

    def addend_of(self, device: int) -> int:
        before, _ = self.layouts
        at = self.mesh.coordinates(device)
        index = 0
        for partial in before.spec.partials:
            index = index * self.mesh.shape[int(partial.axis)] + at[int(partial.axis)]
        return index

    def shards(self) -> dict[int, torch.Tensor]:
        before, _ = self.layouts
        return {
            device: self.whole(self.addend_of(device))[_index(before, device)].clone()
            for device in self.mesh.ids
        }

    def expected(self) -> dict[int, torch.Tensor]:
        before, after = self.layouts
        done = {p.axis for p in before.spec.partials} - {p.axis for p in after.spec.partials}
        result = {}
        for device in self.mesh.ids:
            members = self.mesh.group(device, sorted(done))
            addends = [self.whole(self.addend_of(member)) for member in members]
            op = self.step.op if isinstance(self.step, ReduceScatter | AllReduce) else "sum"
            result[device] = _reduced(torch.stack(addends), op)[_index(after, device)]
        return result


def _index(layout: Layout, device: int) -> tuple[slice, ...]:
    return slices_within(layout.box(device), tuple((0, size) for size in layout.global_shape))


def _reduced(stacked: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    if len(stacked) == 1:
        return stacked[0]
    match op:
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "avg":
            return stacked.sum(0) / len(stacked)
        case "prod":
            return stacked.prod(0, dtype=stacked.dtype)
        case "min":
            return stacked.amin(0)
        case "max":
            return stacked.amax(0)


_MOVES: list[tuple[Step, str, str]] = [
    (Slice(0, (0,)), "[R,R]", "[S0,R]"),
    (Slice(1, (1, 0)), "[R,R]", "[R,S10]"),
    (AllGather(0, (0,)), "[S0,S1]", "[R,S1]"),
    (AllGather(0, (1,)), "[S01,R]", "[S0,R]"),
    (AllGather(0, (0, 1)), "[S01,R]", "[R,R]"),
    (AllGather(1, (1, 0)), "[R,S10]", "[R,R]"),
    (AllToAll(0, 1, (0,), (0,)), "[S0,R]", "[R,S0]"),
    (AllToAll(0, 1, (1,), (1,)), "[S01,R]", "[S0,S1]"),
    (AllToAll(0, 1, (0, 1), (1, 0)), "[S01,R]", "[R,S10]"),
    (AllToAll(1, 0, (0,), (0,)), "[S1,S0]", "[S10,R]"),
    (Exchange((0, 1)), "[S01,R]", "[S10,R]"),
    (Exchange((0, 1)), "[S0,S1]", "[S1,S0]"),
    (Exchange((0, 1)), "[S1,R]", "[R,S0]"),
    (AllGather(0, (0,)), "[S0,R|P1]", "[R,R|P1]"),
]
_SHAPES = {"even": (12, 18), "uneven": (7, 5), "short": (2, 1), "empty": (0, 3)}
_Move = tuple[Step, str, str]


def _reductions(op: ReduceOp) -> list[_Move]:
    return [
        (ReduceScatter(0, (1,), op), f"[S0,R|P{op}1]", "[S01,R]"),
        (AllReduce((0, 1), op), f"[R,R|P{op}01]", "[R,R]"),
        (ReduceScatter(1, (1, 0), op), f"[R,R|P{op}01]", "[R,S10]"),
        (AllReduce((0,), op), f"[R,S1|P{op}0]", "[R,S1]"),
        (ReduceScatter(0, (0,), op), f"[R,R|P{op}01]", f"[S0,R|P{op}1]"),
    ]


_OPS: tuple[ReduceOp, ...] = ("sum", "avg", "min", "max", "prod")
_SHUFFLED = (4, 0, 5, 2, 1, 3)

CASES: list[Case] = [
    *(
        Case(f"{type(step).__name__} {source}→{target} {kind}", step, source, target, shape)
        for step, source, target in _MOVES
        for kind, shape in _SHAPES.items()
    ),
    *(
        Case(
            f"{type(step).__name__} {source}→{target} shuffled",
            step,
            source,
            target,
            (7, 5),
            ids=_SHUFFLED,
        )
        for step, source, target in _MOVES
    ),
    *(
        Case(
            f"{type(step).__name__} {source}→{target} {dtype}", step, source, target, (7, 6), dtype
        )
        for step, source, target in _MOVES[3:8] + _MOVES[10:11]
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    ),
    *(
        Case(f"{type(step).__name__} {op} {source}→{target} {kind}", step, source, target, shape)
        for op in _OPS
        for kind, shape in _SHAPES.items()
        for step, source, target in _reductions(op)
    ),
    *(
        Case(
            f"{type(step).__name__} {op} {dtype}",
            step,
            source,
            target,
            (7, 5),
            dtype,
            ids=_SHUFFLED,
        )
        for op in ("sum", "min", "max", "prod")
        for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.float64)
        for step, source, target in _reductions(op)[:2]
    ),
    Case("AllReduce complex", AllReduce((1,), "sum"), "[S0|P1]", "[S0]", (5,), torch.complex64),
    Case("AllReduce bool max", AllReduce((1,), "max"), "[S0|Pmax1]", "[S0]", (5,), torch.bool),
    Case("AllReduce scalar", AllReduce((0, 1), "sum"), "[|P01]", "[]", ()),
    Case("Permute", Permute((0, 1)), "[S01,R]", "[S10,R]", (12, 5)),
    *(
        Case(
            f"Permute {source}→{target} {shape}",
            Permute((0, 1)),
            source,
            target,
            shape,
            ids=(3, 0, 5, 2),
            mesh_shape=(2, 2),
        )
        for source, target, shape in [
            ("[S0,R]", "[S1,R]", (6, 2)),
            ("[S0,R]", "[S1,R]", (7, 2)),
            ("[S01,R]", "[S10,R]", (8, 3)),
            ("[S0,S1]", "[S1,S0]", (5, 3)),
            ("[S0]", "[S1]", (1,)),
            ("[S0]", "[S1]", (0,)),
        ]
        if len(source.split(",")) == len(shape)
    ),
]


class CommunicatorContract:
    """Inherit, and say how a case is run."""

    def results(self, case: Case) -> Mapping[int, tuple[torch.Tensor, list[str]]]:
        """Per device its shard after the step, and what was found wrong with how it came."""
        raise NotImplementedError

    def test_there_are_cases_of_every_step(self):
        assert len(CASES) == len({case.name for case in CASES}) == 268
        assert {type(case.step) for case in CASES} == {
            Slice,
            AllGather,
            AllToAll,
            ReduceScatter,
            AllReduce,
            Permute,
            Exchange,
        }

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_a_step_gives_every_device_its_shard(self, case: Case):
        got, expected = self.results(case), case.expected()
        assert set(got) == set(expected)
        for device, (shard, complaints) in got.items():
            assert complaints == []
            assert shard.shape == expected[device].shape
            assert shard.dtype == case.dtype
            torch.testing.assert_close(
                shard.to(torch.float32) if "float8" in str(case.dtype) else shard,
                expected[device].to(torch.float32)
                if "float8" in str(case.dtype)
                else expected[device],
                rtol=0,
                atol=0,
            )


def complaints(
    before: Mapping[int, torch.Tensor],
    copies: Mapping[int, torch.Tensor],
    after: Mapping[int, torch.Tensor],
) -> dict[int, list[str]]:
    """Say where inputs were changed, or results share memory with them or are not contiguous."""
    found: dict[int, list[str]] = {}
    held = {t.untyped_storage().data_ptr() for t in before.values() if t.numel()}
    for device, shard in after.items():
        found[device] = []
        if before[device].tolist() != copies[device].tolist():
            found[device].append("the input was changed")
        if shard.numel() and shard.untyped_storage().data_ptr() in held:
            found[device].append("the result shares memory with an input")
        if not shard.is_contiguous():
            found[device].append("the result is not contiguous")
    return found


def crossing(communicator: Communicator, dtype: torch.dtype) -> list[str]:
    """Say what is wrong after an exchange between two meshes that share one device of four.

    The devices 0, 1 and 2 hold a third of the rows each, the devices 2 and 3 want half of the
    columns each; who is outside of a mesh holds, or wants, an empty box.
    """
    whole = torch.arange(7 * 6).reshape(7, 6).to(dtype)
    nothing = ((7, 7), (6, 6))
    rows = {0: ((0, 3), (0, 6)), 1: ((3, 6), (0, 6)), 2: ((6, 7), (0, 6)), 3: nothing}
    columns = {0: nothing, 1: nothing, 2: ((0, 7), (0, 3)), 3: ((0, 7), (3, 6))}
    shards = {
        device: whole[slices_within(rows[device], ((0, 7), (0, 6)))].clone()
        for device in communicator.addressable
    }
    ids = communicator.mesh.ids
    before, after = (tuple(boxes[device] for device in ids) for boxes in (rows, columns))
    transfers = Transfers(Exchange(()), communicator.mesh, before, after)
    results = communicator.run(transfers, shards)
    assert tuple(results) == communicator.addressable
    return [
        f"device {device} got {result}"
        for device, result in results.items()
        if result.dtype != dtype
        or not torch.equal(result, whole[slices_within(columns[device], ((0, 7), (0, 6)))])
    ]
