import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardspec import DeviceMesh, DTensor, Layout, distribute_tensor
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.errors import AxisError, CommunicatorError, LayoutError

MESH = DeviceMesh([4, 0, 5, 2, 1, 3], (2, 3), axis_names=("dp", "tp"))
WHOLE = torch.arange(35.0).reshape(7, 5)


def test_a_whole_tensor_is_cut_into_the_boxes_of_its_layout():
    t = DTensor(WHOLE, MESH, "[S(tp),S(dp)]")
    assert str(t.sharding_spec) == "[S1,S0]"
    assert t.shape == (7, 5)
    assert t.dtype == torch.float32
    assert t.device_mesh == MESH
    assert t.dim() == 2
    assert not t.requires_grad
    assert repr(t) == f"DTensor([S1,S0] of [7, 5] float32 on dp=2,tp=3; values:\n{WHOLE!r})"
    assert t.to_local(4).tolist() == WHOLE[0:3, 0:3].tolist()
    assert t.to_local(3).tolist() == WHOLE[6:7, 3:5].tolist()
    assert torch.equal(t.to_global(), WHOLE)
    assert distribute_tensor(WHOLE, MESH, "[R,R]").layout == Layout(MESH, "[R,R]", (7, 5), "f32")


def test_shards_are_copies():
    whole = WHOLE.clone()
    t = DTensor(whole, MESH, "[R,R]")
    whole.zero_()
    t.to_local(4)[0, 0] = -1
    assert t.to_local(0)[0, 0] == 0
    assert t.to_local(0)[0, 1] == 1


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1)])
def test_odd_shapes_go_round(shape):
    whole = torch.full(shape, 3.5)
    spec = "[" + ",".join(["S01", "R"][: len(shape)]) + "]"
    assert torch.equal(DTensor(whole, MESH, spec).to_global(), whole)


def test_non_contiguous_input():
    whole = torch.arange(35).reshape(5, 7).t()
    t = DTensor(whole, MESH, "[S1,R]")
    assert all(shard.is_contiguous() for shard in t.shards.values())
    strided = {d: shard.t().contiguous().t() for d, shard in t.shards.items()}
    again = DTensor.from_shards(strided, t.layout).redistribute("[R,S10]")
    assert torch.equal(again.to_global(), whole)


def test_the_same_layout_shares_its_shards():
    t = DTensor(WHOLE, MESH, "[S0,R]")
    same = t.redistribute("[S(dp),R]")
    assert all(same.shards[d] is t.shards[d] for d in MESH.ids)


def test_from_local_adds_up_an_uneven_global_shape():
    cut = DTensor(WHOLE, MESH, "[S1,S0]")
    again = DTensor.from_local(cut.shards, MESH, "[S1,S0]")
    assert again.shape == (7, 5)
    assert torch.equal(again.to_global(), WHOLE)
    assert again.shards[4] is cut.shards[4]


def test_mixed_sum_and_mean():
    addends = {d: torch.full((2,), float(i + 1)) for i, d in enumerate(MESH.ids)}
    t = DTensor.from_local(addends, MESH, "[R|P0,Pavg1]")
    assert t.to_global().tolist() == [7.0, 7.0]


def refused(error, *words):
    return pytest.raises(error, match="(?s)" + ".*".join(words))


def test_one_tensor_is_the_shard_of_every_device_of_one_process():
    """As each rank of a job gives its own: gradients are those of the first, writes stay apart."""
    local = torch.ones(2, 5, requires_grad=True)
    t = DTensor.from_local(local, MESH, placements=[Shard(0), Replicate()])
    assert t.shape == (4, 5)
    (3 * t.to_global()).sum().backward()
    assert local.grad is not None
    assert torch.equal(local.grad, torch.full((2, 5), 3.0))
    with torch.no_grad():
        t.to_local(4).zero_()
    assert t.to_global().sum() == 10


def test_a_tensor_shows_its_values_or_those_of_a_shard():
    pending = DTensor.from_local(torch.tensor(2.0), MESH, placements=[Partial(), Replicate()])
    assert "sum over axis 0 is pending; addend of device 4:\ntensor(2.)" in repr(pending)
    large = DTensor(torch.ones(70, 50), MESH, "[S0,R]")
    assert repr(large).endswith(f"shard of device 4:\n{torch.ones(35, 50)!r})")


def test_shards_that_do_not_fit_are_refused():
    t = DTensor(WHOLE, MESH, "[S0,R]")
    with refused(LayoutError, r"\[S0\]", "1 dim", "2 dims"):
        DTensor(WHOLE, MESH, "[S0]")
    with refused(LayoutError, "pending", "from_local"):
        DTensor(WHOLE, MESH, "[R,R|P0]")
    with refused(AxisError, "axis 2 is out of range"):
        t.redistribute("[S2,R]")
    with refused(AxisError, "'pp'", "dp, tp"):
        t.redistribute("[S(pp),R]")
    with refused(LayoutError, "the target has a pending sum", "never starts one"):
        t.redistribute("[R,R|P1]")
    with refused(CommunicatorError, "6 devices", r"to_local\(4\)"):
        t.to_local()
    with refused(CommunicatorError, "device 9"):
        t.to_local(9)
    with refused(LayoutError, "shape \\(2, 5\\)", "shape \\(4, 5\\)"):
        DTensor.from_shards({**t.shards, 4: torch.ones(2, 5)}, t.layout.with_spec("[S0,R]"))
    with refused(LayoutError, "device 4", "missing"):
        DTensor.from_shards({}, t.layout)
    with refused(LayoutError, "dict with one shard for each"):
        DTensor.from_local({4: WHOLE}, MESH, "[R,R]")
    with refused(LayoutError, "dict of shards", "Layout and dict"):
        DTensor.from_shards(t.layout, t.shards)  # type: ignore[arg-type]
    with refused(LayoutError, "shape \\(5,\\)", "2 dims"):
        DTensor.from_local(dict.fromkeys(MESH.ids, torch.ones(5)), MESH, "[R,R]")
    with refused(LayoutError, "communicator is for mesh 2"):
        DTensor(WHOLE, MESH, "[R,R]", communicator=SimulatedCommunicator(DeviceMesh([0, 1], (2,))))
    with refused(LayoutError, r"starts from \[S0,R\]"):
        from shardspec import LayoutConverter

        DTensor(WHOLE, MESH, "[R,R]").convert(LayoutConverter().plan(t.layout, "[R,R]"))
