"""Threads that move tensors at once: each with meshes of its own, or an error before they mix."""

import threading
import zlib
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    ProcessGroupCommunicator,
    load_sharded,
    plan_reshard,
    save_sharded,
)
from shardspec.comm.channel import channel_tag
from shardspec.comm.process_group import communicator_of
from shardspec.errors import CommunicatorError
from tests.dist.processes import run_ranks

pytestmark = pytest.mark.dist

TIMES = 5
NAMED = [DeviceMesh(range(2), axis_names=(name,)) for name in ("a", "b", "c")]
LINKED = [
    DeviceMesh(range(2), mesh_alpha=[0], mesh_beta=[1]),
    DeviceMesh(range(2), mesh_alpha=[0], mesh_beta=[2]),
    DeviceMesh(range(2), mesh_alpha=[0], mesh_beta=[2], link_model="shared-bus"),
]
Work = Callable[[], None]


def _by_messages(*meshes: DeviceMesh) -> None:
    for mesh in meshes:
        ProcessGroupCommunicator(mesh, reads_peers=False).substitute()


def _at_once(works: list[Work], *, backwards: bool = False) -> list[str]:
    """Do each in a thread, and the first one here too; return what they raise."""
    said: list[str] = []

    def told(work: Work) -> None:
        try:
            work()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=told, args=(work,)) for work in works]
    for thread in reversed(threads) if backwards else threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found, wanted):
        raise AssertionError(f"{found[0, 0]} where {wanted[0, 0]} is right")


def _converts(mesh: DeviceMesh, factor: float, there: DeviceMesh | None = None) -> Work:
    def work() -> None:
        for number in range(TIMES):
            whole = torch.full((16, 8), factor + number)
            tensor = DTensor(whole, mesh, "[S0,R]")
            _equal(tensor.redistribute("[R,S0]", device_mesh=there).to_local(), whole[:, :4])

    return work


def _runs(mesh: DeviceMesh, factor: float) -> Work:
    layout = Layout(mesh, "[S0,R]", (16, 8), "float32")
    plan = plan_reshard({"w": layout}, (mesh, {"w": "[R,S0]"}))

    def work() -> None:
        for number in range(TIMES):
            shard = torch.full((8, 8), factor + number)
            _equal(plan.run({"w": shard})["w"].to_local(), torch.full((16, 4), factor + number))

    return work


def _saves(mesh: DeviceMesh, factor: float, path: Path) -> Work:
    def work() -> None:
        for number in range(3):
            whole = torch.full((16, 8), factor + number)
            save_sharded({"w": DTensor(whole, mesh, "[S0,R]")}, path, overwrite=True)
            _equal(load_sharded(path, mesh, {"w": "[R,S0]"})["w"].to_local(), whole[:, :4])

    return work


def _threads(rank: int, place: Path) -> list[str]:
    torch.set_num_threads(1)
    said = []
    row = DeviceMesh(range(2))
    for by_messages in (False, True):
        if by_messages:
            _by_messages(*NAMED, *LINKED, row)
        backwards = bool(rank)
        for meshes in (NAMED, LINKED):
            works = [_converts(mesh, 1000.0 * n) for n, mesh in enumerate(meshes)]
            said += _at_once(works, backwards=backwards)
            works = [_runs(mesh, 1000.0 * n) for n, mesh in enumerate(meshes)]
            said += _at_once(works, backwards=backwards)
        # Between two meshes each: those of the other thread are none of them.
        works = [
            _converts(NAMED[0], 0.0, LINKED[0]),
            _converts(NAMED[1], 9e3, LINKED[1]),
        ]
        said += _at_once(works, backwards=backwards)
        # A plan in a thread, another one in the main thread over the same ranks; and a save.
        others = [_runs(row, 5e3), _saves(NAMED[2], 7e3, place / str(by_messages))]
        threads = threading.Thread(target=lambda: said.extend(_at_once(others)))  # noqa: B023
        threads.start()
        _runs(row, 3e3)()
        _converts(NAMED[2], 2e3)()
        threads.join()
        dist.barrier()
    return said


def test_threads_with_meshes_of_their_own_do_not_mix(tmp_path):
    assert run_ranks(2, tmp_path, _threads, tmp_path) == [[], []]


def _one_mesh(rank: int) -> list[list[str]]:
    """Threads that share a mesh, and start in another order on rank 1."""
    found = []
    entered = threading.Event()
    communicator = communicator_of(NAMED[0])
    tensor = DTensor(torch.arange(8.0), NAMED[0], "[S0]")

    def stays() -> None:
        with communicator.telling(), communicator.conversion(b'{"words": "the same"}', "cpu"):
            entered.set()
            if rank == 0:
                refused.wait()

    def comes() -> None:
        entered.wait()
        if rank == 1:
            staying.join()
        try:
            tensor.redistribute("[R]")
        finally:
            refused.set()

    # On rank 0 the second comes while the first is there, on rank 1 afterwards, and waits for it.
    refused = threading.Event()
    said: list[str] = []

    def told(work: Work) -> None:
        try:
            work()
        except CommunicatorError as error:
            said.append(str(error))

    staying = threading.Thread(target=told, args=(stays,))
    coming = threading.Thread(target=told, args=(comes,))
    staying.start()
    coming.start()
    coming.join()
    staying.join()
    found.append(sorted(said))
    dist.barrier()
    # The main thread's channel is another one.
    found.append(tensor.redistribute("[R]").to_local().tolist())
    return found


def test_a_second_thread_on_a_mesh_is_an_error_on_all_ranks(tmp_path):
    (here, after), (there, after_there) = run_ranks(2, tmp_path, _one_mesh)
    assert len(here) == 2
    assert "another thread has come to convert on mesh a=2 meanwhile" in here[0]
    assert "another thread is converting cpu tensors on mesh a=2" in here[1]
    (told,) = there
    assert told.startswith("rank 0 has failed, so the call ends on all ranks of the mesh: another")
    assert after == after_there == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def _same_tag(_: int) -> list[str]:
    # Texts of one length and one checksum keep one checksum in whatever text both are put.
    names = "xe1a31e0316", "x4640a9050e"
    assert zlib.crc32(names[0].encode()) == zlib.crc32(names[1].encode())
    said = []
    works = [_converts(DeviceMesh(range(2), axis_names=(name,)), 1.0) for name in names]
    for work in works:
        said += _at_once([work])
    return said


def test_meshes_whose_messages_have_one_tag_are_refused(tmp_path):
    for (said,) in run_ranks(2, tmp_path, _same_tag):
        assert "would be taken for those of another thread" in said
        assert "give an axis another name" in said


def test_meshes_that_differ_in_anything_have_messages_of_their_own():
    ids = tuple(range(1, 13))
    links: dict[str, Any] = {"mesh_alpha": [1e-5], "mesh_beta": [1e-9]}
    meshes = [
        DeviceMesh(ids),
        DeviceMesh((*ids[:-2], 12, 11)),
        DeviceMesh((*ids[:-1], 13)),
        DeviceMesh(ids, (3, 4)),
        DeviceMesh(ids, axis_names=("a",)),
        DeviceMesh(ids, **links),
        DeviceMesh(ids, **{**links, "mesh_alpha": [2e-5]}),
        DeviceMesh(ids, **{**links, "mesh_beta": [2e-9]}),
        DeviceMesh(ids, **links, link_model="shared-bus"),
    ]
    groups = [*([mesh] for mesh in meshes), *combinations(meshes, 2)]
    assert len({channel_tag(group) for group in groups}) == len(groups)
    assert channel_tag(meshes) == channel_tag(reversed(meshes))
