"""A program: which boxes JAX gives to eight devices that it makes up.

JAX runs threads of its own, so it has a process of its own, and nothing here imports it before the
program runs. A line of JSON on standard input is a mesh, a shape and specs. A line comes back with
each spec's answer: the boxes of the mesh's devices in the order of their ids, or an error's name.
"""

import json
import os
import sys
from typing import Any

from shardspec import DeviceMesh, ShardingSpec
from shardspec.errors import LossyConversionError
from shardspec.interop.notations import from_named_sharding, to_jax_mesh, to_partition_spec


def boxes(mesh, shape, entries, unreduced):
    from jax.sharding import NamedSharding, PartitionSpec

    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in entries]
    sharding = NamedSharding(mesh, PartitionSpec(*entries, unreduced=set(unreduced)))
    found_mesh, spec = from_named_sharding(sharding, len(shape))
    assert found_mesh.ids == tuple(device.id for device in mesh.devices.flat)
    assert (found_mesh.shape, found_mesh.axis_names) == (mesh.devices.shape, mesh.axis_names)
    assert to_partition_spec(spec, found_mesh) == (tuple(entries), frozenset(unreduced))
    # JAX lists no boxes of a tensor with pending sums, though it knows how large they are; the
    # devices hold what they would hold of a finished one.
    finished = NamedSharding(mesh, PartitionSpec(*entries))
    try:
        size = sharding.shard_shape(tuple(shape))
        of_devices: dict[Any, Any] = dict(finished.devices_indices_map(tuple(shape)))
    except ValueError as error:
        return type(error).__name__
    found = {
        device.id: [list(each.indices(size)[:2]) for each, size in zip(at, shape, strict=True)]
        for device, at in of_devices.items()
    }
    for box in found.values():
        assert tuple(hi - lo for lo, hi in box) == size
    return [found[device.id] for device in mesh.devices.flat]


def refused(mesh):
    """Return what is said where JAX tells of gradients, which no spec does."""
    from jax.sharding import NamedSharding, PartitionSpec

    try:
        from_named_sharding(NamedSharding(mesh, PartitionSpec(None, reduced={"x"})), 1)
    except LossyConversionError as error:
        return str(error)
    return "nothing was raised"


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import jax
    from jax.sharding import AxisType, Mesh

    found: list[Any] = jax.devices()
    assert [device.id for device in found] == list(range(8))
    for line in sys.stdin:
        asked = json.loads(line)
        # Sums may be pending over explicit axes only; boxes are the same on both kinds.
        ours = DeviceMesh(asked["ids"], asked["shape"], axis_names=asked["names"])
        grid, names = to_jax_mesh(ours, reversed(found))
        mesh = Mesh(grid, names, axis_types=(AxisType.Explicit,) * len(names))
        assert "a spec cannot say that gradients are unreduced over ['x']" in refused(mesh)
        answers = {}
        for text in asked.pop("specs"):
            entries, unreduced = to_partition_spec(ShardingSpec.parse(text), ours)
            answers[text] = boxes(mesh, asked["tensor"], entries, sorted(unreduced))
        print(json.dumps({**asked, "answers": answers}, separators=(",", ":")))


if __name__ == "__main__":
    main()
