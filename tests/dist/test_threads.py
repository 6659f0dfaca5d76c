"""Threads of one process: one converts at a time, and a second one is refused at once."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardspec import DeviceMesh, DTensor
from shardspec.comm.process_group import communicator_of
from shardspec.errors import CommunicatorError
from tests.dist.processes import communicator_by, run_ranks, substitute

pytestmark = pytest.mark.dist

MESHES = DeviceMesh(range(2), axis_names=("a",)), DeviceMesh(range(2), axis_names=("b",))
NUMBERS = [0.0, 1.0, 2.0, 3.0]
SOON_S = 60.0
"""For a busy machine; the timeout of the process group is 30 minutes."""


def _said(work: Callable[[], object]) -> str:
    try:
        return f"nothing was raised: {work()}"
    except CommunicatorError as error:
        return str(error)


def _in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(_said(work)))
    thread.start()
    return thread, said


def _two(rank: int, other: int, reads_peers: bool) -> list[str]:
    """On rank 0 a thread comes while another converts; on rank 1 it waits for the other's end."""
    for mesh in MESHES:
        substitute(communicator_by(mesh, reads_peers=reads_peers))
    communicator = communicator_of(MESHES[0])
    tensor = DTensor(torch.tensor(NUMBERS), MESHES[other], "[S0]")
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with communicator.telling(), communicator.conversion(b'{"words": "the same"}', "cpu"):
            entered.set()
            if rank == 0:
                leave.wait()

    staying, said_staying = _in_thread(stay)
    entered.wait()
    if rank == 1:
        staying.join()
    started = time.monotonic()
    coming, said_coming = _in_thread(lambda: tensor.redistribute("[R]"))
    if rank == 0:
        coming.join()
        leave.set()
        assert time.monotonic() - started < SOON_S
    coming.join()
    staying.join()
    dist.barrier()
    again = tensor.redistribute("[R]").to_local().tolist()  # the job goes on
    return [*said_staying, *said_coming, str(again)]


@pytest.mark.parametrize("reads_peers", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("other", [0, 1], ids=["the same mesh", "another mesh"])
def test_a_second_thread_is_refused_and_all_ranks_are_told(tmp_path, other, reads_peers):
    (staying, coming, after), (there, told, after_there) = run_ranks(
        2, tmp_path, _two, other, reads_peers
    )
    assert "two threads of this process converted" in staying
    assert coming.startswith("another thread of this process is converting")
    assert there.startswith("nothing was raised")
    assert told.startswith("rank 0 has failed, so the call ends on all ranks of the mesh: another")
    assert after == after_there == str(NUMBERS)


def _crossed(rank: int) -> list[list[str]]:
    """Ranks whose first threads are not the same one: each refuses the other, and none waits."""
    tensors = [DTensor(torch.tensor(NUMBERS), mesh, "[S0]") for mesh in MESHES]
    lines = [threading.Barrier(2), threading.Barrier(2)]
    said: list[list[str]] = []
    started = time.monotonic()
    for number in range(3):

        def convert(tensor: DTensor, late: bool) -> object:
            lines[0].wait()
            time.sleep(0.05 if late else 0.0)
            return tensor.redistribute("[R]").to_local().tolist()

        threads = [
            _in_thread(lambda n=n: convert(tensors[n], n != (rank + number) % 2))  # type: ignore[misc]  # noqa: B023
            for n in range(2)
        ]
        for thread, _ in threads:
            thread.join()
        said.append([words for _, (words,) in threads])
    assert time.monotonic() - started < SOON_S
    return said


def test_threads_in_another_order_on_each_rank_do_not_wait(tmp_path):
    for of_rank in run_ranks(2, tmp_path, _crossed):
        for said in of_rank:
            assert any(not words.startswith("nothing was raised") for words in said)


def _one_after_the_other(_: int) -> list[object]:
    found: list[object] = []
    for mesh in MESHES:
        ones = torch.ones(4, requires_grad=True)

        def work() -> None:
            tensor = DTensor.from_local(ones, mesh, "[S0]")  # noqa: B023
            tensor.redistribute("[R]").to_local().sum().backward()
            found.append(ones.grad.tolist())  # type: ignore[union-attr]  # noqa: B023

        thread, said = _in_thread(work)
        thread.join()
        found += said
    return found


def test_any_thread_may_convert_while_no_other_does(tmp_path):
    for found in run_ranks(2, tmp_path, _one_after_the_other):
        assert found == [[1.0] * 4, "nothing was raised: None"] * 2
