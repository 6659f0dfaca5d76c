"""What the page takes for granted when it draws pieces that move."""

from itertools import pairwise

from shardspec import CostModel, LayoutConverter
from shardspec.boxes import intersect
from shardspec.comm.curves import Link
from shardspec.explorer import all_layouts
from shardspec.layout.moving import transfers_of
from tests.explorer.test_page import DTYPE, MESHES


def test_what_a_move_brings_is_what_the_sender_shares():
    """The page draws a piece as the overlap of two boxes; that is so for every kind of step."""
    checked = set()
    for mesh in MESHES.values():
        converter = LayoutConverter(CostModel(mesh.shape, (Link(3.4e-6, 1 / 362e9),) * mesh.ndim))
        for shape in ((7, 5), (12, 16)):
            for source in all_layouts(mesh, shape, DTYPE):
                for target in all_layouts(mesh, shape, DTYPE):
                    if not set(target.spec.partials) <= set(source.spec.partials):
                        continue
                    plan = converter.plan(source, target)
                    for step, (a, b) in zip(plan.steps, pairwise(plan.layouts), strict=True):
                        if (step, a, b) in checked:
                            continue
                        checked.add((step, a, b))
                        for device in mesh.ids:
                            schedule = transfers_of(step, a, b).of(device)
                            for copy in schedule.incoming:
                                assert intersect(a.box(copy.sender), b.box(device)) == copy.box
    assert len({type(step) for step, _, _ in checked}) == 7
