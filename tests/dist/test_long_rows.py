"""Steps on shards that travel in several chunks, and whose rows are long enough to go alone."""

from collections.abc import Iterator

import pytest

from shardspec import DeviceMesh, Layout
from tests.conversions import Move, collectives, partial_specs, plain_specs, routed, run_moves
from tests.dist.processes import communicator_by, run_ranks

pytestmark = pytest.mark.dist

MESH = DeviceMesh([2, 0, 3, 1], (2, 2))
SHAPES = [(3, 140001), (1301, 517)]
"""Of 1.7 and 2.7 MB: more than one chunk, the last one shorter."""


def moves(shape: tuple[int, ...]) -> Iterator[Move]:
    plain = [Layout(MESH, spec, shape, "float32") for spec in plain_specs(2, 2)]
    pending = [Layout(MESH, s, shape, "float32") for s in partial_specs(2, 2, ("sum", "max"))]
    yield from (move for layout in plain for move in collectives(layout))
    yield from (move for layout in pending for move in collectives(layout))
    yield from (move for layout in plain for move in routed(plain[5], layout))


def _run(rank: int, every: int) -> list[tuple[int, tuple[str, ...]]]:
    found = []
    for reads_peers in (True, False):
        communicator = communicator_by(MESH, reads_peers=reads_peers)
        for at, shape in enumerate(SHAPES):
            for gaps in (False, True):
                some = list(moves(shape))[at + 2 * gaps :: every]
                outcome = run_moves(communicator, some, with_gaps=gaps)
                found.append((outcome.shards, outcome.wrong))
        assert (communicator.transport_name == "memory") == reads_peers
        assert communicator.addressable == (rank,)
    return found


@pytest.mark.parametrize("every", [27, pytest.param(11, marks=pytest.mark.exhaustive)])
def test_boxes_in_chunks(tmp_path, every):
    for found in run_ranks(4, tmp_path, _run, every):
        assert [wrong for _, wrong in found] == [()] * 8
        assert [shards for shards, _ in found] == [{27: 6, 11: 13}[every]] * 8
