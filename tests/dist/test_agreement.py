"""Ranks that do not ask for the same conversion, and copies of what they convert."""

import copy
import io
import os
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.steps import AllGather
from shardspec.errors import CommunicatorError, DTypeError
from shardspec.layout.moving import transfers_of
from tests.dist.processes import communicator_by, run_ranks, substitute

pytestmark = pytest.mark.dist


SOON_S = 60.0
"""For a busy machine; the timeout of the process group is 30 minutes."""
BOTH = pytest.mark.parametrize("reads_peers", [True, False], ids=["memory", "messages"])


def _told(call: Callable[[], Any]) -> str:
    try:
        return f"nothing was raised: {call()}"
    except CommunicatorError as error:
        return str(error)


def _out_of_order(rank: int, reads_peers: bool) -> list[Any]:
    """Ranks that convert two tensors in another order, though all plans are agreed on."""
    told: list[Any] = []
    mesh = DeviceMesh(range(3), (3,))
    communicator = communicator_by(mesh, reads_peers=reads_peers)
    rows = DTensor(torch.arange(36.0).reshape(6, 6), mesh, "[S0,R]", communicator=communicator)
    columns = DTensor(rows.to_global(), mesh, "[R,S0]", communicator=communicator)
    alone = DTensor(columns.to_global(), mesh, "[R,R]", communicator=communicator)
    calls = [
        lambda: rows.redistribute("[R,S0]"),
        lambda: columns.redistribute("[S0,R]"),
        lambda: alone.redistribute("[S0,R]"),
    ]
    for call in calls:
        call()
    for first, second in ((0, 1), (0, 2), (1, 2)):
        started = time.monotonic()
        told.append(_told(calls[second if rank == 1 else first]))
        told.append(time.monotonic() - started)
        dist.barrier()
    told.append(torch.equal(rows.redistribute("[R,R]").to_local(), alone.to_local()))
    if reads_peers:  # raw steps have no words; this transport compares them all the same
        before = Layout(mesh, "[S0,R]" if rank else "[R,S0]", (6, 6), "float32")
        after = before.with_spec("[R,R]")
        step = AllGather(0 if rank else 1, (0,))
        shard = torch.ones(before.local_shape(rank))
        told.append(
            _told(lambda: communicator.run(transfers_of(step, before, after), {rank: shard}))
        )
    return told


@BOTH
def test_another_order_is_an_error_that_names_both(tmp_path, reads_peers):
    plans = [
        ("source [R,S0] where rank 0 has [S0,R]", "target [S0,R] where rank 0 has [R,S0]"),
        ("source [R,R] where rank 0 has [S0,R]", "plan Slice"),
        ("source [R,R] where rank 0 has [R,S0]", "plan Slice"),
    ]
    found = run_ranks(3, tmp_path, _out_of_order, reads_peers)
    if reads_peers:
        raw = [told.pop() for told in found]
        # Whoever gives up first has gone for the others.
        assert any("executes another step" in text for text in raw)
        assert all(re.search("executes another step|ended or given up", text) for text in raw)
    for told in found:
        assert told[6] is True
        for words, seconds, text in zip(plans, told[1:6:2], told[0:6:2], strict=True):
            assert text.startswith("rank 1 asks for another conversion than rank 0: "), text
            assert all(word in text for word in words)
            assert "; rank 0 asks for a conversion (" in text
            assert seconds < SOON_S


def _another_mesh(rank: int, reads_peers: bool) -> list[Any]:
    """Rank 1 takes up a smaller mesh first, and so does rank 2 a larger one."""
    meshes = [DeviceMesh(range(4)), DeviceMesh(range(2)), DeviceMesh([1, 2])]
    tensors = []
    for mesh in meshes:
        substitute(communicator_by(mesh, reads_peers=reads_peers))
        tensors.append(DTensor(torch.arange(6.0), mesh, "[S0]"))
        tensors[-1].redistribute("[R]")
    dist.barrier()
    told: list[Any] = []
    for firsts in ((0, 1, 0, 0), (0, 2, 0, 0), (1, 0, 0, 0)):
        started = time.monotonic()
        told.append(_told(lambda: tensors[firsts[rank]].redistribute("[R]")))  # noqa: B023
        assert time.monotonic() - started < SOON_S
        dist.barrier()
        # The job goes on.
        told.append(tensors[0].redistribute("[R]").to_local().tolist())
    return told


@BOTH
def test_another_mesh_first_is_an_error_on_all_ranks_at_once(tmp_path, reads_peers):
    for rank, told in enumerate(run_ranks(4, tmp_path, _another_mesh, reads_peers)):
        for text in told[::2]:
            assert "than rank" in text, (rank, text)
            assert "mesh 2 of ids" in text
            assert "mesh 4 of ids 0,1,2,3" in text
        assert told[1::2] == [[float(number) for number in range(6)]] * 3


def _copies(_: int) -> list[str]:
    """A DTensor is copied and pickled after its first conversion, meta tensors move as shapes."""
    mesh = DeviceMesh(range(2), (2,))
    start = DTensor(torch.arange(5.0), mesh, "[S0]")
    start.redistribute("[R]")
    file = io.BytesIO()
    torch.save({"t": start}, file)
    file.seek(0)
    made = [
        copy.deepcopy(start),
        pickle.loads(pickle.dumps(start)),
        torch.load(file, weights_only=False)["t"],
    ]
    for one in made:
        assert one.communicator is start.communicator is ProcessGroupCommunicator.of(mesh)
        assert one.redistribute("[R]").to_local().tolist() == [0, 1, 2, 3, 4]
    apart = communicator_by(mesh, reads_peers=False)
    assert copy.deepcopy(apart) is apart
    return []


def _meta(rank: int) -> list[Any]:
    mesh, one = DeviceMesh(range(3), (3,)), DeviceMesh([2], (1,))
    start = DTensor(torch.empty(7, 5, device="meta"), mesh, "[S0,R]")
    found: list[Any] = []
    for target in ("[R,S0]", "[R,R]"):
        shard = start.redistribute(target).to_local()
        found.append((shard.device.type, tuple(shard.shape)))
    local = torch.empty(7, 5, device="meta")
    pending = DTensor.from_local(local, mesh, "[R,R|P0]", global_shape=(7, 5))
    found += [tuple(pending.redistribute(spec).to_local().shape) for spec in ("[S0,R]", "[R,R]")]
    moved = start.redistribute("[R,R]", device_mesh=one).shards
    found.append(
        {device: (shard.device.type, tuple(shard.shape)) for device, shard in moved.items()}
    )
    # A rank whose shard is on another kind of device is named.
    kind = "cpu" if rank == 1 else "meta"
    shard = torch.empty(start.to_local().shape, device=kind)
    mixed = DTensor.from_shards({rank: shard}, start.layout)
    found.append(_told(lambda: mixed.redistribute("[R,R]")))
    return found


def test_meta_tensors_move_as_shapes(tmp_path):
    rows = {0: 3, 1: 3, 2: 1}
    for rank, found in enumerate(run_ranks(3, tmp_path, _meta)):
        columns = {0: 2, 1: 2, 2: 1}[rank]
        assert found[0] == ("meta", (7, columns))
        assert found[1] == ("meta", (7, 5))
        assert found[2:4] == [(rows[rank], 5), (7, 5)]
        assert found[4] == ({2: ("meta", (7, 5))} if rank == 2 else {})
        assert "different device types: rank " in found[5]
        assert "rank 1 on cpu" in found[5]


def _unsigned(_: int) -> list[str]:
    mesh = DeviceMesh(range(2), (2,))
    told = []
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        local = torch.ones(4, dtype=torch.uint8).to(dtype)
        try:
            DTensor.from_local(local, mesh, "[R|P0]", global_shape=(4,)).redistribute("[S0]")
            told.append("nothing was raised")
        except DTypeError as error:
            told.append(str(error))
        moved = DTensor(local, mesh, "[S0]").redistribute("[R]").to_local()
        assert moved.dtype == dtype
        assert moved.tolist() == [1] * 4
    return told


def test_sums_of_unsigned_numbers_are_refused(tmp_path):
    for told in run_ranks(2, tmp_path, _unsigned):
        assert [text.split(";")[0] for text in told] == [
            f"no reduction is defined for uint{bits}" for bits in (16, 32, 64)
        ]


def test_copies_of_tensors(tmp_path):
    assert run_ranks(2, tmp_path, _copies) == [[], []]


def test_a_job_of_one(tmp_path):
    """Axes of one device: what is pending over them is there already."""
    store = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        for shape in ((1,), (1, 1)):
            mesh = DeviceMesh([0], shape)
            for op in ("sum", "avg", "max"):
                start = DTensor.from_local(torch.ones(3, 2), mesh, f"[R,R|P{op}0]")
                for target in ("[S0,R]", "[R,S0]", "[R,R]"):
                    assert start.redistribute(target).to_local().tolist() == [[1.0] * 2] * 3
    finally:
        dist.destroy_process_group()
    assert os.environ["SHARDSPEC_CHECK"] == "1"


def _backwards(rank: int) -> str:
    """Rank 1 takes up another backward first, in which it would wait for the other one."""
    mesh = DeviceMesh(range(2), (2,))
    ones = torch.ones(4, requires_grad=True)
    gathered = DTensor(ones, mesh, "[S0]").redistribute("[R]").to_local().sum()
    cut = DTensor(ones, mesh, "[R]").redistribute("[S0]").to_local().sum()
    said = _told((cut if rank == 1 else gathered).backward)
    dist.barrier()
    return said


def test_another_order_of_backwards_is_an_error(tmp_path):
    for said in run_ranks(2, tmp_path, _backwards):
        assert said.startswith("rank 1 asks for another conversion than rank 0: source [R] where")
        assert "gradient backward" in said
