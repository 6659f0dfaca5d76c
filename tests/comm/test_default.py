import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.comm.process_group import ProcessGroupCommunicator, communicator_of
from shardspec.errors import CommunicatorError

MESH = DeviceMesh(range(4), (2, 2))


@pytest.mark.parametrize("world_size", [None, "1"])
def test_alone_a_process_holds_the_mesh(monkeypatch, world_size):
    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    communicator = communicator_of(MESH)
    assert isinstance(communicator, SimulatedCommunicator)
    assert communicator.mesh == MESH


def test_a_job_that_is_not_initialized(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for attempt in (
        lambda: communicator_of(MESH),
        lambda: DTensor(torch.ones(4), MESH, "[S0]"),
        lambda: DTensor.from_local(torch.ones(1), MESH, "[S01]"),
    ):
        with pytest.raises(CommunicatorError, match=r"one of 4 processes .*init_process_"):
            attempt()


def test_a_job_of_one(tmp_path):
    """In an initialized job the process group is used, however small."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        one = DeviceMesh([0], (1,))
        communicator = communicator_of(one)
        assert isinstance(communicator, ProcessGroupCommunicator)
        assert communicator_of(one) is communicator
        assert communicator.gather({0: "here"}) == {0: "here"}
        with pytest.raises(CommunicatorError, match="device 1 of mesh 2x2 is not a rank of"):
            communicator_of(MESH)
    finally:
        dist.destroy_process_group()
