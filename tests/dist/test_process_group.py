"""The communicator over torch.distributed: the contract, on six real processes.

Once with processes that read each other's memory, once with everything sent by messages.
`make test` runs a third of the cases in each way, and `make exhaustive` all in both.
"""

import os
import time
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor, Layout
from shardspec.comm.process_group import ProcessGroupCommunicator
from shardspec.comm.steps import AllReduce, ReduceOp
from shardspec.errors import CommunicatorError
from shardspec.layout.moving import transfers_of
from tests.comm.contract import CASES, Case, CommunicatorContract, complaints, crossing
from tests.dist.processes import communicator_by, run_ranks, substitute

pytestmark = pytest.mark.dist


TRANSPORT = {True: "memory", False: "messages"}


def _run_cases(rank: int, reads_peers: bool, cases: Sequence[Case]):
    results = {}
    made: dict[DeviceMesh, ProcessGroupCommunicator] = {}
    for case in cases:
        if case.mesh not in made:
            made[case.mesh] = communicator_by(case.mesh, reads_peers=reads_peers)
        communicator = made[case.mesh]
        before, after = case.layouts
        if rank not in case.mesh:
            assert communicator.addressable == ()
            assert communicator.run(transfers_of(case.step, before, after), {}) == {}
            assert communicator.gather({}) == {}
            continue
        shard = case.shards()[rank]
        shards, copies = {rank: shard}, {rank: shard.clone()}
        got = communicator.run(transfers_of(case.step, before, after), shards)
        raw = got[rank].reshape(-1).view(torch.uint8).numpy().tobytes()
        results[case.name] = (
            raw,
            tuple(got[rank].shape),
            got[rank].dtype,
            complaints(shards, copies, got)[rank],
        )
    assert {made[mesh].transport_name for mesh in made if rank in mesh} == {TRANSPORT[reads_peers]}
    return results


def _first_steps(rank: int) -> list[str]:
    """Say what goes wrong where ranks differ in the first step of a mesh, in which they join."""
    wrong = []
    ops: tuple[ReduceOp, ...] = ("sum", "max")
    for reads_peers, pending in product((True, False, rank != 2), ops):
        # Of two rows on three devices one has none, and nothing to reduce with its neighbor.
        mesh = DeviceMesh(range(6), (3, 2))
        communicator = communicator_by(mesh, reads_peers=reads_peers)
        before = Layout(mesh, f"[S0,R|P{pending}1]", (2, 5), "float32")
        shard = torch.full(before.local_shape(rank), 2.0)
        step, after = AllReduce((1,), pending), before.with_spec("[S0,R]")
        (got,) = communicator.run(transfers_of(step, before, after), {rank: shard}).values()
        if got.tolist() != (shard * (2 if pending == "sum" else 1)).tolist():
            wrong.append(f"{pending} {reads_peers}: {got}")
    # The last two communicators: one rank does not let itself be read.
    return wrong + (["read"] if communicator.transport_name == "memory" else [])


def _run_all(rank: int, every: int):
    results = {way: _run_cases(rank, way, CASES[way % every :: every]) for way in (False, True)}
    four = DeviceMesh([2, 0, 3, 1], (4,))
    crossed = [
        crossing(communicator_by(four, reads_peers=reads_peers), dtype)
        for reads_peers in (True, False)
        for dtype in (torch.int64, torch.bfloat16, torch.bool)
    ]
    assert crossed == [[]] * 6
    assert _first_steps(rank) == []
    mesh = DeviceMesh([4, 0, 5], (3,))
    gathered = ProcessGroupCommunicator.of(mesh).gather({rank: rank * 10} if rank in mesh else {})
    for end in ("", str(rank)):  # values that are longer than a note, equal and not
        long = ProcessGroupCommunicator.of(mesh).gather(
            {rank: "y" * 10_000 + end} if rank in mesh else {}
        )
        ids = mesh.ids if rank in mesh else ()
        assert long == {id_: "y" * 10_000 + (str(id_) if end else "") for id_ in ids}
    same = ProcessGroupCommunicator.of(mesh) is ProcessGroupCommunicator.of(
        DeviceMesh([4, 0, 5], (3,))
    )
    try:
        ProcessGroupCommunicator.of(DeviceMesh([0, 9], (2,)))
        outside = "accepted"
    except CommunicatorError as error:
        outside = str(error)
    return results, list(gathered.items()), same, outside


EVERY = 3


@pytest.fixture(scope="module", params=[EVERY, pytest.param(1, marks=pytest.mark.exhaustive)])
def every(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, every):
    return run_ranks(6, tmp_path_factory.mktemp("contract"), _run_all, every)


def sampled(reads_peers: bool) -> pytest.MarkDecorator:
    """Parametrize by the cases of a way, with the job that has run them."""
    cases = [pytest.param(EVERY, case, id=case.name) for case in CASES[reads_peers::EVERY]]
    cases += [
        pytest.param(1, case, id=f"{case.name}, all", marks=pytest.mark.exhaustive)
        for case in CASES
    ]
    return pytest.mark.parametrize(("every", "case"), cases, scope="module")


class TestReadingPeers(CommunicatorContract):
    reads_peers = True

    @pytest.fixture(autouse=True)
    def _started(self, ranks):
        self.ranks = ranks

    @sampled(reads_peers=True)
    def test_a_step_gives_every_device_its_shard(self, case: Case):
        super().test_a_step_gives_every_device_its_shard(case)

    def results(self, case: Case):
        found = {}
        for device in case.mesh.ids:
            raw, shape, dtype, wrong = self.ranks[device][0][self.reads_peers][case.name]
            data = (
                torch.frombuffer(bytearray(raw), dtype=dtype)
                if raw
                else torch.empty(0, dtype=dtype)
            )
            found[device] = (data.reshape(shape), wrong)
        return found


class TestByMessages(TestReadingPeers):
    reads_peers = False

    @sampled(reads_peers=False)
    def test_a_step_gives_every_device_its_shard(self, case: Case):
        super().test_a_step_gives_every_device_its_shard(case)


def test_gather_returns_every_value_in_the_order_of_the_mesh(ranks):
    for rank, (_, gathered, same, _) in enumerate(ranks):
        assert gathered == ([(4, 40), (0, 0), (5, 50)] if rank in (4, 0, 5) else [])
        assert same


def test_a_device_outside_the_job_is_named(ranks):
    for _, _, _, message in ranks:
        assert "device 9 of mesh 2 is not a rank of this job, which has 6 ranks" in message


def test_without_a_job():
    assert not dist.is_initialized()
    with pytest.raises(CommunicatorError, match="torchrun"):
        ProcessGroupCommunicator.of(DeviceMesh([0], (1,)))
    with pytest.raises(CommunicatorError, match="torchrun --nproc_per_node 4"):
        DeviceMesh(range(4), (2, 2), init_process_group=True)


def _convert_in_a_forked_child(_: int, reads_peers: bool) -> str:
    mesh = DeviceMesh(range(2), (2,))
    substitute(communicator_by(mesh, reads_peers=reads_peers))
    tensor = DTensor(torch.arange(4.0), mesh, "[S0]")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            tensor.redistribute("[R]")
        except CommunicatorError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert tensor.redistribute("[R]").to_local().tolist() == [0, 1, 2, 3]
    return os.read(reader, 1000).decode()


@pytest.mark.parametrize("reads_peers", [True, False])
def test_a_forked_child_is_told_at_once(tmp_path, reads_peers):
    started = time.monotonic()
    told = run_ranks(2, tmp_path, _convert_in_a_forked_child, reads_peers)
    assert time.monotonic() - started < 60
    for rank, text in enumerate(told):
        assert text.startswith(f"this process is a forked child of rank {rank}, not a rank")
