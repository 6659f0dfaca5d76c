"""A rank that dies while a state dict moves: an error on the others, whose `out` cannot be read."""

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, plan_reshard
from shardspec.comm.transports.messages import Messages
from shardspec.comm.transports.peer_memory import PeerMemory
from shardspec.errors import CommunicatorError
from tests.dist.processes import communicator_by, rank_context, substitute

pytestmark = pytest.mark.dist

MESH = DeviceMesh(range(3), (3,))


def _die(*_: object) -> None:
    os._exit(3)


def _rank(rank: int, store: str, reads_peers: bool, told: Any) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=20),
    )
    substitute(communicator_by(MESH, reads_peers=reads_peers))
    state = {"w": DTensor(torch.arange(36.0).reshape(6, 6), MESH, "[S0,R]")}
    out = {"w": DTensor(torch.zeros(6, 6), MESH, "[R,S0]")}
    plan = plan_reshard(state, {"w": out["w"].layout})
    plan.run(state, out)
    assert torch.equal(out["w"].to_global(), torch.arange(36.0).reshape(6, 6))
    said = []
    if rank == 1:
        mock.patch.object(PeerMemory if reads_peers else Messages, "move", _die).start()
    try:
        plan.run(state, out)
    except CommunicatorError as error:
        said.append(str(error))
    for read in (out["w"].to_local, lambda: out["w"] + 1):
        try:
            read()
        except CommunicatorError as error:
            said.append(str(error))
    told.put((rank, said))
    told.close()
    told.join_thread()
    os._exit(0)


@pytest.mark.parametrize("reads_peers", [True, False])
def test_out_is_unusable(tmp_path, reads_peers):
    context = rank_context()
    told = context.Queue()
    args = (str(tmp_path / "store"), reads_peers, told)
    ranks = [context.Process(target=_rank, args=(rank, *args)) for rank in range(3)]
    for process in ranks:
        process.start()
    found = dict(told.get(timeout=60) for _ in range(2))
    for process in ranks:
        process.join()
    assert found.keys() == {0, 2}
    for said in found.values():
        assert len(said) == 3
        assert all("failed on the way, so `out` is half written" in text for text in said)
        assert "the job cannot go on" in said[0]
