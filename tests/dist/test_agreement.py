"""Two threads, each with a mesh of its own, convert at once; and conversions that do not agree."""

import copy
import io
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout, ProcessGroupCommunicator
from shardspec.comm.steps import AllGather
from shardspec.errors import CommunicatorError, DTypeError
from shardspec.layout.moving import transfers_of
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist


def _many(mesh: DeviceMesh, reads_peers: bool, factor: int, times: int, wrong: list[str]) -> None:
    """Convert by gathers and by sums, and compare with what must come out."""
    try:
        communicator = ProcessGroupCommunicator(mesh, reads_peers=reads_peers)
        whole = torch.arange(48.0).reshape(8, 6) * factor
        cuts = "[S0,R]" if mesh.ndim == 1 else "[S0,S1]"
        start = DTensor(whole, mesh, cuts, communicator=communicator)
        pending = "[R,R|P0]" if mesh.ndim == 1 else "[R,R|P01]"
        addends = DTensor.from_local(
            whole, mesh, pending, global_shape=whole.shape, communicator=communicator
        )
        for _ in range(times):
            if not torch.equal(start.redistribute("[R,R]").to_local(), whole):
                wrong.append(f"{mesh} gathers {factor}")
            if not torch.equal(addends.redistribute("[R,R]").to_local(), whole * mesh.size()):
                wrong.append(f"{mesh} sums {factor}")
        if communicator.reads_peers != reads_peers:
            wrong.append(f"reads peers: {not reads_peers}")
    except Exception as error:  # told to the test, which fails
        wrong.append(f"{type(error).__name__}: {error}")


def _two_threads(_: int, many: int) -> list[str]:
    torch.set_num_threads(1)
    line, grid = DeviceMesh(range(4), (4,)), DeviceMesh(range(4), (2, 2))
    wrong: list[str] = []
    for reads_peers in (True, False):
        # Two threads with a mesh each; then the main thread and another one on the same mesh.
        for here, there, times in ((line, grid, many), (None, grid, many // 5)):
            calls = [(there, reads_peers, 5, times, wrong)]
            if here is not None:
                calls.append((here, reads_peers, 3, times, wrong))
            threads = [threading.Thread(target=_many, args=args) for args in calls]
            for thread in threads:
                thread.start()
            if here is None:
                _many(grid, reads_peers, 11, times, wrong)
            for thread in threads:
                thread.join()
            dist.barrier()
    return wrong


@pytest.mark.parametrize("many", [20, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_two_threads_convert_at_once(tmp_path, many):
    assert run_ranks(4, tmp_path, _two_threads, many) == [[]] * 4


def _told(call: Callable[[], Any]) -> str:
    try:
        return f"nothing was raised: {call()}"
    except CommunicatorError as error:
        return str(error)


def _one_mesh_in_two_threads(_: int) -> list[str]:
    """While one thread is in a conversion, another one that uses the mesh is told so."""
    mesh = DeviceMesh(range(2), (2,))
    communicator = ProcessGroupCommunicator.of(mesh)
    start = DTensor(torch.arange(4.0), mesh, "[S0]")
    told: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with communicator.conversion(b'{"words": "of a thread"}', "cpu"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    other = threading.Thread(target=lambda: told.append(_told(lambda: start.redistribute("[R]"))))
    other.start()
    other.join()
    leave.set()
    thread.join()
    dist.barrier()
    told.append(str(start.redistribute("[R]").to_local().tolist()))
    return told


def test_a_second_thread_on_one_mesh_is_told_before_anything_moves(tmp_path):
    for told in run_ranks(2, tmp_path, _one_mesh_in_two_threads):
        assert told[0].startswith("another thread is converting cpu tensors on mesh 2; ")
        assert told[1] == "[0.0, 1.0, 2.0, 3.0]"


def _out_of_order(rank: int) -> list[Any]:
    """Ranks that convert two tensors in another order, though all plans are agreed on."""
    told: list[Any] = []
    for reads_peers in (False, True):
        mesh = DeviceMesh(range(3), (3,))
        communicator = ProcessGroupCommunicator(mesh, reads_peers=reads_peers)
        rows = DTensor(torch.arange(36.0).reshape(6, 6), mesh, "[S0,R]", communicator=communicator)
        columns = DTensor(rows.to_global(), mesh, "[R,S0]", communicator=communicator)
        alone = DTensor(columns.to_global(), mesh, "[R,R]", communicator=communicator)
        calls = [
            lambda: rows.redistribute("[R,S0]"),  # noqa: B023
            lambda: columns.redistribute("[S0,R]"),  # noqa: B023
            lambda: alone.redistribute("[S0,R]"),  # noqa: B023
        ]
        for call in calls:
            call()
        for first, second in ((0, 1), (0, 2), (1, 2)):
            started = time.monotonic()
            told.append(_told(calls[second if rank == 1 else first]))
            told.append(time.monotonic() - started)
            dist.barrier()
        told.append(torch.equal(rows.redistribute("[R,R]").to_local(), alone.to_local()))
        # Raw steps have no words; where peers are read they are compared all the same.
        if reads_peers:
            before = Layout(mesh, "[S0,R]" if rank else "[R,S0]", (6, 6), "float32")
            after = before.with_spec("[R,R]")
            step = AllGather(0 if rank else 1, (0,))
            shard = torch.ones(before.local_shape(rank))
            told.append(
                _told(lambda: communicator.run(transfers_of(step, before, after), {rank: shard}))  # noqa: B023
            )
            dist.barrier()
    return told


def test_another_order_is_an_error_that_names_both(tmp_path):
    plans = [
        ("source [R,S0] where rank 0 has [S0,R]", "target [S0,R] where rank 0 has [R,S0]"),
        ("source [R,R] where rank 0 has [S0,R]", "plan Slice"),
        ("source [R,R] where rank 0 has [R,S0]", "plan Slice"),
    ]
    found = run_ranks(3, tmp_path, _out_of_order)
    raw = [told.pop() for told in found]
    # Whoever gives up first has gone for the others.
    assert any("carries out another step" in text for text in raw)
    assert all(re.search("carries out another step|has ended or given up", text) for text in raw)
    for told in found:
        for way in (told[:7], told[7:]):
            assert way[6] is True
            for words, seconds, text in zip(plans, way[1:6:2], way[0:6:2], strict=True):
                assert text.startswith("rank 1 asks for another conversion than rank 0: "), text
                assert all(word in text for word in words)
                assert "; rank 0 asks for conversion " in text
                assert seconds < 10


def _another_mesh(rank: int) -> list[str]:
    """Rank 1 takes up a smaller mesh first."""
    all_three, pair = DeviceMesh(range(3), (3,)), DeviceMesh(range(2), (2,))
    wide = DTensor(torch.arange(6.0), all_three, "[S0]")
    small = DTensor(torch.arange(6.0), pair, "[S0]")
    wide.redistribute("[R]")
    small.redistribute("[R]")
    dist.barrier()
    started = time.monotonic()
    told = [_told(lambda: (small if rank == 1 else wide).redistribute("[R]"))]
    assert time.monotonic() - started < 20
    return told


def test_another_mesh_first(tmp_path):
    zero, one, two = (told for (told,) in run_ranks(3, tmp_path, _another_mesh))
    assert "mesh 2 of ids 0,1" in zero
    assert "mesh 3 of ids 0,1,2" in zero
    assert "rank 1 asks for another conversion than rank 0" in one
    assert "did not say what to convert: rank " in two


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
    apart = ProcessGroupCommunicator(mesh, reads_peers=False)
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
        assert "different kinds of devices: rank " in found[5]
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
