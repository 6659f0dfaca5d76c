"""JAX as the oracle: the boxes it gives to devices are ours, and it refuses what we do.

Its answers are recorded in jax_boxes.json, one mesh and shape a line. `make compat` asks JAX again,
and `make compat RECORD=1` records what it says.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardspec import DeviceMesh, Layout, ShardingSpec
from shardspec.errors import LossyConversionError
from shardspec.interop.notations import from_partition_spec, to_partition_spec
from shardspec.layout.graph import count_states, space_of, spec_of

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("jax_boxes.json")
MESHES = [
    DeviceMesh(range(8), (8,), axis_names=("x",)),
    DeviceMesh([3, 1, 0], (3,), axis_names=("x",)),
    DeviceMesh(range(4), (2, 2), axis_names=("x", "y")),
    DeviceMesh([5, 0, 3, 7, 1, 2], (2, 3), axis_names=("x", "y")),
    DeviceMesh(range(8), (4, 2), axis_names=("x", "y")),
    DeviceMesh([7, 6, 5, 4, 3, 2, 1, 0], (2, 4), axis_names=("x", "y")),
    DeviceMesh(range(8), (2, 2, 2), axis_names=("x", "y", "z")),
    DeviceMesh(range(6), (1, 2, 3), axis_names=("x", "y", "z")),
]
# The first of each rank divides whatever the cut; the others only under some.
SHAPES = [(24,), (12,), (7,), (24, 48), (6, 20), (24, 48, 72), (4, 9, 10)]


def specs_of(mesh, dims):
    """Return every spec of a mesh and a rank, sums pending included."""
    pending = tuple((axis, "sum") for axis in range(mesh.ndim))
    states = space_of(mesh.ndim, dims, pending).states
    assert len(states) == count_states(mesh.ndim, dims, mesh.ndim)
    return [spec_of(state) for state in states]


def asked():
    """Return what JAX is asked: every mesh with every shape, in every spec."""
    return [
        {
            "ids": list(mesh.ids),
            "shape": list(mesh.shape),
            "names": list(mesh.axis_names or ()),
            "tensor": list(shape),
            "specs": [str(spec) for spec in specs_of(mesh, len(shape))],
        }
        for mesh in MESHES
        for shape in SHAPES
    ]


@pytest.fixture(scope="module")
def answers():
    """What JAX says, per mesh and shape, of every spec."""
    recorded = [json.loads(line) for line in RECORDED.read_text("utf-8").splitlines()]
    found = [each.pop("answers") for each in recorded]
    questions = [{**each, "specs": list(of)} for each, of in zip(recorded, found, strict=True)]
    assert questions == asked(), "ask again: make compat RECORD=1"
    places = [(mesh, shape) for mesh in MESHES for shape in SHAPES]
    return {place: list(of.values()) for place, of in zip(places, found, strict=True)}


@pytest.mark.compat
def test_jax_says_what_is_recorded():
    """`make compat` asks JAX itself, in a process of its own since it runs threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.jax_boxes"],
        input="\n".join(map(json.dumps, asked())),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    if os.environ.get("RECORD"):
        RECORDED.write_text(done.stdout, "utf-8")
    assert done.stdout == RECORDED.read_text("utf-8")


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_layout_has_the_boxes_that_jax_gives_it(answers, mesh):
    taken = refused = 0
    for shape in SHAPES:
        specs = specs_of(mesh, len(shape))
        for spec, answer in zip(specs, answers[mesh, shape], strict=True):
            if isinstance(answer, str):
                refused += 1
                assert answer == "IndivisibleError"
                with pytest.raises(LossyConversionError, match="JAX refuses to split dim"):
                    to_partition_spec(spec, mesh, shape)
                continue
            taken += 1
            entries, unreduced = to_partition_spec(spec, mesh, shape)
            back = from_partition_spec(entries, len(shape), unreduced=unreduced)
            layout = Layout(mesh, back, shape, "float32")
            assert layout.spec == spec
            assert dict(zip(mesh.ids, answer, strict=True)) == {
                device: [list(side) for side in box] for device, box in layout.boxes().items()
            }
    assert taken > 0
    assert refused > 0


def test_every_layout_of_sizes_that_divide_is_taken(answers):
    for mesh in MESHES:
        for shape in ((24,), (24, 48), (24, 48, 72)):
            assert all(size % mesh.size() == 0 for size in shape)
            assert not any(isinstance(answer, str) for answer in answers[mesh, shape])


def test_the_whole_space_is_asked():
    assert len(specs_of(MESHES[2], 2)) == 18
    assert len({str(spec) for spec in specs_of(MESHES[6], 3)}) == count_states(3, 3, 3)
    assert ShardingSpec.parse("[S21,R,S0]") in specs_of(MESHES[6], 3)
