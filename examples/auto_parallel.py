"""Let a solver choose how to shard a transformer, from cost tables of conversions.

    python examples/auto_parallel.py
    torchrun --standalone --nproc_per_node 4 examples/auto_parallel.py

In a job of four processes the links are measured first, and the chosen conversions are run. Needs
scipy: ``pip install "shardspec[solver]"``.
"""

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import fx, nn

from shardspec import CostModel, DeviceMesh, DTensor, Layout, LayoutConverter
from shardspec.comm.curves import Link
from shardspec.comm.presets import preset_cluster
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.layout.table import CostTable
from shardspec.profiling.fit import fitted_links
from shardspec.profiling.measure import measure
from shardspec.text import bytes_text, seconds_text

WIDTH, TOKENS = 256, (8, 96)
AXES = 2
MEMORY = 1.0
"""Limit, relative to data parallelism: a device's weights, gradients and two optimizer moments."""

Move = tuple[tuple[int, ...], str, str]
"""The shape of a tensor, and the specs before and after."""


class Attention(nn.Module):
    """Attention between the projections of a layer."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the values, weighted per head."""
        q, k, v = (x.view(*x.shape[:2], 8, -1).transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.attention, self.gelu = Attention(), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input."""
        y = self.norms[0](x)
        x = x + self.out(self.attention(self.q(y), self.k(y), self.v(y)))
        y = self.gelu(self.up(self.norms[1](x)))
        return torch.add(x, self.down(y))


class Tracer(fx.Tracer):
    """Keeps attention in one piece."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True if a module is one operator of the graph."""
        return isinstance(m, Attention) or super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True)
class Way:
    """Sharding of an operator along one mesh axis: a sharded dim, R, or P for a pending sum."""

    name: str
    put_in: str
    come_out: str
    grad_out: str
    """Required sharding of the output's gradient."""
    grad_in: str
    """Resulting sharding of the inputs' gradients."""
    weight: str = "R"
    weight_grad: str = "R"


SAME = {
    dim: Way(name, dim, dim, dim, dim)
    for dim, name in zip("R012", ("whole", "data", "sequence", "width"), strict=True)
}
SUM = Way("sum", "P", "P", "R", "R")
MATMUL = (
    Way("data", "0", "0", "0", "0", "R", "P"),
    Way("sequence", "1", "1", "1", "1", "R", "P"),
    Way("column", "R", "2", "2", "P", "0", "0"),
    Way("row", "2", "P", "R", "2", "1", "1"),
)
# Attention is sharded by heads, a part of the width. No device repeats another's matrix product.
WAYS: dict[type[nn.Module] | None, tuple[Way, ...]] = {
    nn.Linear: MATMUL,
    Attention: (SAME["0"], SAME["2"]),
    nn.LayerNorm: (SAME["R"], SAME["0"], SAME["1"]),
    nn.GELU: tuple(SAME.values()),
    None: (*SAME.values(), SUM),
}
Strategy = tuple[Way, ...]


def spec(codes: Sequence[str], dims: int) -> str:
    """Return the spec for the code of each mesh axis."""
    parts = ["".join(str(a) for a, code in enumerate(codes) if code == str(d)) for d in range(dims)]
    pending = "".join(str(a) for a, code in enumerate(codes) if code == "P")
    text = ",".join(f"S{part}" if part else "R" for part in parts)
    return f"[{text}|P{pending}]" if pending else f"[{text}]"


@dataclass(frozen=True)
class Operator:
    """A node of the captured graph."""

    name: str
    inputs: tuple[str, ...]
    module: nn.Module | None
    strategies: tuple[Strategy, ...]
    width: int
    """Width of the output."""


def capture(model: nn.Module) -> list[Operator]:
    """Trace a model; return its operators, each with the ways to shard it."""
    widths: dict[str, int] = {}
    found = []
    for node in Tracer().trace(model).nodes:
        if node.op == "output":
            continue
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        inputs = tuple(each.name for each in node.all_input_nodes)
        ways = WAYS[type(module) if module is not None else None]
        if not inputs:
            ways = (SAME["0"],)  # the batch arrives in parts
        widths[node.name] = (
            module.out_features
            if isinstance(module, nn.Linear)
            else max([widths[name] for name in inputs], default=WIDTH)
        )
        strategies = tuple(product(ways, repeat=AXES))
        found.append(Operator(node.name, inputs, module, strategies, widths[node.name]))
    return found


class Costs:
    """Prices of conversions, from one cost table per shape."""

    def __init__(self, mesh: DeviceMesh, model: CostModel) -> None:
        self.mesh, self.converter = mesh, LayoutConverter(model)
        self.tables: dict[tuple[int, ...], CostTable] = {
            shape: self.converter.cost_table(mesh, shape, "float32", partial=("sum",))
            for width in (WIDTH, 4 * WIDTH)
            for shape in ((*TOKENS, width), (width, WIDTH), (WIDTH, width))
        }

    def moves(self, operator: Operator, mine: Strategy) -> list[Move]:
        """Return the conversions inside an operator: that of its weight's gradient."""
        if not isinstance(operator.module, nn.Linear):
            return []
        shape = tuple(operator.module.weight.shape)
        return [(shape, spec([w.weight_grad for w in mine], 2), spec([w.weight for w in mine], 2))]

    def edge(self, width: int, here: Strategy, there: Strategy) -> list[Move]:
        """Return the conversions between two operators, forward and backward."""
        shape = (*TOKENS, width)
        made, taken = spec([w.come_out for w in here], 3), spec([w.put_in for w in there], 3)
        back, wanted = spec([w.grad_in for w in there], 3), spec([w.grad_out for w in here], 3)
        return [(shape, made, taken), (shape, back, wanted)]

    def seconds(self, moves: Iterable[Move]) -> float:
        """Return the seconds of conversions; inf if one is impossible."""
        return sum(self.tables[shape].cost(a, b) for shape, a, b in moves)

    def held(self, operator: Operator, mine: Strategy) -> int:
        """Return the bytes of an operator's weight on a device, with gradient and moments."""
        return sum(
            4 * self.layout(shape, target).max_local_bytes
            for shape, _, target in self.moves(operator, mine)
        )

    def layout(self, shape: tuple[int, ...], text: str) -> Layout:
        """Return the layout of a float32 tensor by the text of its spec."""
        return Layout(self.mesh, text, shape, "float32")


def solve(operators: Sequence[Operator], costs: Costs, most_bytes: float) -> dict[str, Strategy]:
    """Choose a strategy per operator by an integer linear program.

    There is one variable per strategy of an operator, and one per pair of strategies along an
    edge, which is 1 if both are chosen.
    """
    by_name = {operator.name: operator for operator in operators}
    first: dict[str, int] = {}
    price: list[float] = []
    held: list[int] = []
    for operator in operators:
        first[operator.name] = len(price)
        price += [costs.seconds(costs.moves(operator, s)) for s in operator.strategies]
        held += [costs.held(operator, s) for s in operator.strategies]
    choices = len(price)
    rows: list[tuple[int, int, float]] = []
    right: list[float] = []
    for operator in operators:
        rows += [
            (len(right), first[operator.name] + s, 1.0) for s in range(len(operator.strategies))
        ]
        right.append(1.0)
    upper = [1.0] * choices
    for operator in operators:
        for name in operator.inputs:
            source = by_name[name]
            a, b = len(source.strategies), len(operator.strategies)
            pairs = [
                costs.seconds(costs.edge(source.width, here, there))
                for here in source.strategies
                for there in operator.strategies
            ]
            at = len(price) + np.arange(a * b).reshape(a, b)
            price += [each if np.isfinite(each) else 0.0 for each in pairs]
            upper += [float(np.isfinite(each)) for each in pairs]
            for start, lines in ((first[name], at), (first[operator.name], at.T)):
                for offset, line in enumerate(lines):
                    rows += [(len(right), int(place), 1.0) for place in line]
                    rows.append((len(right), start + offset, -1.0))
                    right.append(0.0)
    row, column, value = zip(*rows, strict=True)
    matrix = coo_array((value, (row, column)), shape=(len(right), len(price)))
    memory = coo_array(np.array([held + [0] * (len(price) - choices)], dtype=float))
    whole = np.arange(len(price)) < choices
    found = milp(
        np.array(price) * 1e6,
        integrality=whole,
        bounds=Bounds(0, np.array(upper)),
        constraints=[
            LinearConstraint(matrix.tocsr(), right, right),
            LinearConstraint(memory, 0, most_bytes),
        ],
        options={"time_limit": 60, "mip_rel_gap": 1e-3},
    )
    assert found.x is not None, found.message
    return {
        o.name: o.strategies[int(found.x[first[o.name] :][: len(o.strategies)].argmax())]
        for o in operators
    }


def by_hand(operators: Sequence[Operator], *, tensor_parallel: bool) -> dict[str, Strategy]:
    """Return data parallelism, or with Megatron's tensor parallelism along the second axis."""
    chosen: dict[str, Strategy] = {}
    for o in operators:
        second = SAME["0"]
        if isinstance(o.module, nn.Linear):
            second = MATMUL[0]
        if tensor_parallel and o.inputs:
            inner = isinstance(o.module, Attention | nn.GELU)
            second = SAME["2"] if inner else SAME["R"]
            if isinstance(o.module, nn.Linear):
                second = MATMUL[3 if o.name.endswith(("out", "down")) else 2]
        chosen[o.name] = (MATMUL[0] if isinstance(o.module, nn.Linear) else SAME["0"], second)
    return chosen


def all_moves(
    operators: Sequence[Operator], costs: Costs, chosen: dict[str, Strategy]
) -> list[Move]:
    """Return all conversions of a training step that cost time."""
    width = {o.name: o.width for o in operators}
    moves = []
    for o in operators:
        moves += costs.moves(o, chosen[o.name])
        for name in o.inputs:
            moves += costs.edge(width[name], chosen[name], chosen[o.name])
    return [move for move in moves if costs.seconds([move]) > 0]


def run(moves: Sequence[Move], costs: Costs) -> float:
    """Run the conversions; return the seconds of the slowest rank in the median round."""
    rank, rounds = dist.get_rank(), []
    ends = [(costs.layout(shape, a), costs.layout(shape, b)) for shape, a, b in moves]
    shards = [torch.ones(before.local_shape(rank)) for before, _ in ends]
    for _ in range(7):
        dist.barrier()
        started = time.perf_counter()
        for (before, after), shard in zip(ends, shards, strict=True):
            DTensor.from_shards({rank: shard}, before).redistribute(after.spec)
        taken = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        rounds.append(float(taken))
    return statistics.median(rounds[2:])


def main() -> None:
    """Plan in one process; or measure links, plan and run in a job of four."""
    in_job = "RANK" in os.environ
    if in_job:
        mesh = DeviceMesh(range(4), (2, 2), init_process_group=True)
        communicator = ProcessGroupCommunicator.of(mesh)
        sizes = [1 << k for k in range(14, 23, 4)]
        runs = measure(communicator, sizes, 3, device=torch.device("cpu"))
        shared = communicator.gather(dict.fromkeys(communicator.addressable, runs))
        model = CostModel.of_mesh(mesh, preset_cluster(fitted_links("measured", shared[0])))
    else:
        mesh = DeviceMesh(range(4), (2, 2))
        model = CostModel(mesh.shape, (Link(1e-4, 1 / 4e9),) * 2, "shared-bus")
    operators = capture(nn.Sequential(Block(), Block()))
    costs = Costs(mesh, model)
    everything = sum(
        costs.held(o, by_hand(operators, tensor_parallel=False)[o.name]) for o in operators
    )
    plans = {
        "solver": solve(operators, costs, MEMORY * everything),
        "Megatron by hand": by_hand(operators, tensor_parallel=True),
        "data parallel": by_hand(operators, tensor_parallel=False),
    }
    rank = dist.get_rank() if in_job else 0
    if rank == 0:
        print(f"{len(operators)} operators, {sum(len(o.inputs) for o in operators)} edges")
        for o in operators:
            ways = plans["solver"][o.name]
            names = ", ".join(way.name for way in ways)
            print(f"  {o.name:20} {names:20} {spec([way.come_out for way in ways], 3)}")
    for name, chosen in plans.items():
        moves = all_moves(operators, costs, chosen)
        held = sum(costs.held(o, chosen[o.name]) for o in operators)
        predicted = seconds_text(costs.seconds(moves))
        line = f"{name}: {predicted} predicted, weights take {bytes_text(held)}"
        if in_job:
            line += f", {seconds_text(run(moves, costs))} measured"
        if rank == 0:
            print(line, flush=True)
    if in_job:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
