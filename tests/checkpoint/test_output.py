"""Files that appear whole or not at all, and ranks that fail together."""

import errno
import os
from pathlib import Path

import pytest

from shardspec import DeviceMesh
from shardspec.checkpoint.storage import storage_path
from shardspec.comm.communicator import SimulatedCommunicator
from shardspec.comm.consensus import Failure, agree
from shardspec.errors import CheckpointError, OutputExistsError


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def fail(error):
    def act(*_):
        raise error

    return act


def failing(error):
    """Pieces of a file that cannot be made."""
    return map(fail(error), [0])


def test_the_file_appears_when_it_is_full(tmp_path):
    seen = []

    def pieces():
        names = names_in(tmp_path)
        seen.append((names, (tmp_path / names[0]).stat().st_size))
        yield b"12"
        yield memoryview(b"345")

    storage_path(tmp_path / "out").write(5, pieces(), overwrite=False)
    ((names, size),) = seen
    assert "out" not in names
    assert len(names) == 1
    assert size == 5
    assert names_in(tmp_path) == ["out"]
    assert (tmp_path / "out").read_bytes() == b"12345"


def test_an_existing_file_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(OutputExistsError):
        storage_path(tmp_path / "out").write(3, [b"new"], overwrite=False)
    assert (tmp_path / "out").read_bytes() == b"old"
    storage_path(tmp_path / "out").write(3, [b"new"], overwrite=True)
    assert (tmp_path / "out").read_bytes() == b"new"
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, CheckpointError])
def test_whatever_goes_wrong_no_temporary_file_stays(tmp_path, error):
    with pytest.raises(error):
        storage_path(tmp_path / "out").write(10, failing(error), overwrite=True)
    assert names_in(tmp_path) == []


def test_errors_of_the_system_become_one_line(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(CheckpointError) as caught:
        storage_path(tmp_path / "out").write(10, failing(full), overwrite=True)
    assert str(caught.value) == (
        f"{tmp_path}/out: cannot be written: No space left on device (10 bytes are needed); make "
        "room or write elsewhere"
    )
    with pytest.raises(CheckpointError, match="no/out: cannot be written: No such file"):
        storage_path(tmp_path / "no" / "out").write(10, failing(full), overwrite=True)


def refuse(code):
    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    return refused


def test_file_systems_without_hard_links_or_that_count_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result([0] * 11))
    storage_path(tmp_path / "out").write(5, [b"12345"], overwrite=False)
    assert (tmp_path / "out").read_bytes() == b"12345"
    assert names_in(tmp_path) == ["out"]
    # Pages of 4 KiB, of which one is free.
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result([4096, 4096, 9, 1, *[0] * 7]))
    storage_path(tmp_path / "fits").write(4096, [b"12345"], overwrite=False)
    (tmp_path / "fits").unlink()
    with pytest.raises(CheckpointError, match="No space left on device"):
        storage_path(tmp_path / "full").write(4097, [b"12345"], overwrite=False)
    assert names_in(tmp_path) == ["out"]


class Ranks(SimulatedCommunicator):
    """One rank of three, or none of them, that is told what the others say."""

    def __init__(self, others, own=(1,)):
        super().__init__(DeviceMesh(range(3), (3,)))
        self._others = others
        self._own = own

    @property
    def addressable(self):
        return self._own

    def gather(self, values):
        return {rank: values.get(rank, self._others.get(rank)) for rank in self.mesh.ids}


def test_a_failure_elsewhere_is_raised_here():
    ranks = Ranks({2: Failure(CheckpointError, "disk full")})
    with pytest.raises(CheckpointError, match=r"^rank 2: disk full$"):
        agree(ranks, lambda: 5)
    with pytest.raises(OutputExistsError, match=r"^rank 0: exists$"):
        agree(Ranks({0: Failure(OutputExistsError, "exists")}), lambda: 5)
    assert agree(Ranks({}), lambda: 5) == 5


def test_a_failure_here_is_named_and_keeps_its_cause():
    error = RuntimeError("out of memory")
    with pytest.raises(CheckpointError, match=r"^rank 1: RuntimeError: out of memory$") as caught:
        agree(Ranks({}), fail(error))
    assert caught.value.__cause__ is error
    others = Ranks({2: Failure(CheckpointError, "another's")})
    with pytest.raises(CheckpointError, match=r"^rank 1: mine$"):
        agree(others, fail(CheckpointError("mine")))


def test_a_failure_everywhere_names_no_rank():
    simulated = SimulatedCommunicator(DeviceMesh(range(3), (3,)))
    with pytest.raises(CheckpointError, match=r"^no such file$"):
        agree(simulated, fail(CheckpointError("no such file")))


def test_a_process_outside_the_mesh_acts_for_itself():
    outside = Ranks({}, own=())
    assert agree(outside, lambda: Path("x")) == Path("x")
    with pytest.raises(FileNotFoundError):
        agree(outside, fail(FileNotFoundError("x")))
