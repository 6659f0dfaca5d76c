import pickle
from copy import deepcopy

import pytest
import torch

from shardspec import DeviceMesh, DTensor, save_sharded
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.layout.moving import transfers_of
from tests.comm.contract import Case, CommunicatorContract, complaints, crossing


class TestSimulated(CommunicatorContract):
    def results(self, case: Case):
        before, after = case.layouts
        shards, copies = case.shards(), case.shards()
        got = SimulatedCommunicator(case.mesh).run(transfers_of(case.step, before, after), shards)
        found = complaints(shards, copies, got)
        return {device: (got[device], found[device]) for device in case.mesh.ids}


def test_it_holds_every_device_and_gathers_in_the_order_of_the_mesh():
    communicator = SimulatedCommunicator(DeviceMesh([5, 0, 3], (3,)))
    assert communicator.addressable == (5, 0, 3)
    assert list(communicator.gather({0: "a", 3: "b", 5: "c"}).items()) == [
        (5, "c"),
        (0, "a"),
        (3, "b"),
    ]
    with pytest.raises(KeyError):
        communicator.gather({0: "a"})


def test_an_exchange_between_two_meshes():
    communicator = SimulatedCommunicator(DeviceMesh([2, 0, 3, 1], (4,)))
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        assert crossing(communicator, dtype) == []


def test_a_tensor_is_copied_and_pickled_while_it_is_saved(tmp_path):
    mesh = DeviceMesh(range(2))
    communicator = SimulatedCommunicator(mesh)
    tensor = DTensor(torch.arange(4), mesh, "[S0]", communicator=communicator)
    pending = save_sharded({"t": tensor}, tmp_path / "saved", asynchronous=True)
    for copied in (deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert copied.to_global().tolist() == [0, 1, 2, 3]
    pending.wait()
