"""Plans as text, which every process finds alike; as a module that is run it prints them."""

import json
from collections.abc import Iterator
from itertools import product
from math import prod

from shardspec import DeviceMesh, Layout, LayoutConverter, ShardingSpec
from shardspec.layout.graph import explore, spec_of


def plan_texts() -> Iterator[str]:
    """Yield some plans of two, three and five axes as JSON."""
    for mesh_shape, shape, every in [((2, 3), (7, 5), 1), ((2, 2, 2), (8, 16), 23)]:
        mesh = DeviceMesh(range(prod(mesh_shape)), mesh_shape)
        nodes = explore(mesh.ndim, ShardingSpec(2)).nodes
        specs = sorted(str(spec_of(state)) for state in nodes)
        for a, b in list(product(specs, repeat=2))[::every]:
            yield json.dumps(LayoutConverter().plan(Layout(mesh, a, shape, "f32"), b).as_dict())
    mesh = DeviceMesh(range(32), (2, 2, 2, 2, 2), axis_names=tuple("vwxyz"))
    for a, b in [("[S(v,w),R|P(z)]", "[R,S(x)]"), ("[S01,S23,S4]", "[S4,S01,R]")]:
        global_shape = (64,) * ShardingSpec.parse(a).dims
        yield json.dumps(LayoutConverter().plan(Layout(mesh, a, global_shape, "f32"), b).as_dict())


if __name__ == "__main__":
    print("\n".join(plan_texts()))
