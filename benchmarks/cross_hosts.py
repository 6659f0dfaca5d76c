"""What crosses hosts in published cases, and what three publications say of them.

    python -m benchmarks.cross_hosts

Hosts of four devices, 4 µs and 100 GB/s inside, 40 µs and 1.25 GB/s a device between. The first
table has the micro-benchmarks of "On Optimizing the Communication of Model Parallelism" (arXiv
2211.05322, section 5.1), as `benchmark/alpa/resharding/suite.py` of Alpa has them. The second has
the three permutes of "Memory-efficient array redistribution through portable collective
communication" (arXiv 2112.01075), and counts plans that keep its bound: no intermediate exceeds the
larger of source and target. The third has a conversion that XLA answers with "involuntary full
rematerialization" (https://github.com/openxla/xla/issues/15207).
"""

from dataclasses import dataclass
from itertools import permutations, product
from math import prod

from shardspec import DeviceMesh, Layout, LayoutConverter, ShardingSpec, plan_reshard
from shardspec.comm.cluster import Cluster
from shardspec.comm.curves import Link
from shardspec.layout.spec import DimSpec
from shardspec.text import bytes_text, seconds_text, table_text

PER_NODE = 4
CLUSTER = Cluster(Link(4e-6, 1e-11, "near"), Link(4e-5, 8e-10, "far"), PER_NODE)

ONE, GIB = (1 << 28,), (1024, 1024, 512)
WHOLE, ROWS, COLUMNS = "[R,R,R]", "[S0,R,R]", "[R,S0,R]"
CASES = {
    **{
        f"1 to {hosts}x{devices}": ((1, 1), "[R]", (hosts, devices), "[R]", ONE)
        for hosts, devices in [
            *product([1], [1, 2, 3, 4]),
            *product([2, 3, 4], [2]),
            *product([2, 3, 4, 8], [4]),
        ]
    },
    "case 1": ((2, 4), ROWS, (2, 4), ROWS, GIB),
    "case 2": ((2, 4), WHOLE, (2, 4), ROWS, GIB),
    "case 3": ((2, 4), COLUMNS, (2, 4), ROWS, GIB),
    "case 4": ((2, 4), "[R,S01,R]", (2, 4), "[S01,R,R]", GIB),
    "case 5": ((2, 4), "[S1,R,R]", (2, 4), ROWS, GIB),
    "case 6": ((2, 4), ROWS, (3, 4), ROWS, (3072, 1024, 170)),
    "cases 7, 8": ((1, 4), "[S1,R,R]", (2, 4), WHOLE, GIB),
    "case 9": ((2, 4), COLUMNS, (2, 4), "[R,R,S0]", GIB),
}
"""Hosts and devices, and specs, of source and target; and the shape of the float32 tensor."""

PERMUTES = {
    "axes of a dim": ("[S01,R]", "[S10,R]"),
    "axes of two dims": ("[S0,S1]", "[S1,S0]"),
    "an unused axis": ("[S0,R]", "[S1,R]"),
}
"""Source and target of the permutes, on a mesh whose axes are equally long."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """What a case moves between hosts."""

    leaves: int
    """Bytes that leave the hosts of the source."""
    busiest: int
    """Bytes into or out of the busiest host."""
    sent_to_each: int
    """Bytes that leave if every device is sent what it lacks (`send_recv` of Alpa's benchmark)."""
    seconds: float


def crossing(case: str) -> Crossing:
    """Plan a case. The devices of both meshes come first on their hosts."""
    hosts, spec, target_hosts, target_spec, shape = CASES[case]
    meshes, first = [], 0
    for count, devices in (hosts, target_hosts):
        ids = [(first + host) * PER_NODE + at for host in range(count) for at in range(devices)]
        meshes.append(DeviceMesh(ids, (count, devices)))
        first += count
    source = Layout(meshes[0], spec, shape, "float32")
    plan = plan_reshard({"w": source}, (meshes[1], {"w": target_spec}), links=CLUSTER)
    entered, left = (dict.fromkeys(range(hosts[0] + target_hosts[0]), 0) for _ in range(2))
    for (sender, receiver), num_bytes in plan.copies.traffic.items():
        if CLUSTER.crosses(sender, receiver):
            left[CLUSTER.host(sender)] += num_bytes
            entered[CLUSTER.host(receiver)] += num_bytes
    target = Layout(meshes[1], target_spec, shape, "float32")
    return Crossing(
        sum(left[host] for host in range(hosts[0])),
        max(*entered.values(), *left.values()),
        sum(4 * prod(target.local_shape(device)) for device in meshes[1].ids),
        plan.cost_seconds,
    )


def plain_specs(dims: int, axes: int) -> list[ShardingSpec]:
    """Return every spec of some dims on some axes, in every order of axes that share a dim."""
    specs = []
    for at in product(range(-1, dims), repeat=axes):
        groups = [[axis for axis in range(axes) if at[axis] == dim] for dim in range(dims)]
        for orders in product(*map(permutations, groups)):
            cuts = {dim: DimSpec(order) for dim, order in enumerate(orders) if order}
            specs.append(ShardingSpec(dims, cuts))
    return specs


def within_bound(side: int) -> tuple[int, int]:
    """Return how many plans between two specs of a matrix keep the bound, and of how many."""
    mesh, converter = DeviceMesh(range(8), (2, 2, 2)), LayoutConverter()
    pairs = list(permutations(plain_specs(2, mesh.ndim), 2))
    kept = 0
    for source, target in pairs:
        plan = converter.plan(Layout(mesh, source, (side, side), "float32"), target)
        held = [layout.max_local_bytes for layout in plan.layouts]
        kept += max(held) <= max(held[0], held[-1])
    return kept, len(pairs)


def main() -> None:
    """Print the three tables."""
    rows = []
    for case in CASES:
        found = crossing(case)
        amounts = (found.sent_to_each, found.leaves, found.busiest)
        rows.append([case, *map(bytes_text, amounts), seconds_text(found.seconds)])
    print(table_text(["case", "sent to each", "leaves", "busiest host", "time"], rows))

    mesh, converter = DeviceMesh(range(4), (2, 2)), LayoutConverter()
    rows = []
    for name, (spec, target) in PERMUTES.items():
        for side in (8192, 64):
            plan = converter.plan(Layout(mesh, spec, (side, side), "float32"), target)
            steps = ", ".join(type(step).__name__ for step in plan.steps)
            held = [layout.max_local_bytes for layout in plan.layouts]
            ratio = max(held) / max(held[0], held[-1])
            rows.append([name, f"{spec} → {target}", f"{side}²", steps, f"{ratio:.0f}×"])
    print(table_text(["permute", "specs", "matrix", "steps", "held"], rows))
    for side in (8192, 64):
        print("{:,} of {:,} plans of {}² keep the bound".format(*within_bound(side), side))

    mesh = DeviceMesh(range(8), (4, 2), axis_names=("x", "y"))
    source = Layout(mesh, "[S(y),R,S(x)]", (1024, 1024, 1024), "float32")
    print(converter.plan(source, "[R,S(x,y),R]"))


if __name__ == "__main__":
    main()
