"""Directories of zips that are read by others: only those that say the same but for digests."""

import struct

import pytest

from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.torch_files.torch_lines import AlikeLines
from shardspec.checkpoint.torch_files.torch_zip import read_torch_zip
from shardspec.errors import CheckpointError
from tests.checkpoint.zips import handmade


def records(archive, data=b"abcd", key="0"):
    names = ("data.pkl", f"data/{key}", "version")
    return [(f"{archive}/{name}".encode(), data) for name in names]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


def read(path, data, alike=None):
    """Return what a directory says, or how it is refused; and whose lines it shares."""
    path.write_bytes(data)
    with SourceFile(path) as file:
        try:
            found = read_torch_zip(file, alike=alike)
            said = [(found.num_bytes(key), found.record(file, key)) for key in found.keys]
            return (found.keys, said, found.pickle(file)), found.lines
        except CheckpointError as error:
            return str(error), None


def shared(path, first, second):
    """Say whether the second is read by the first; what it says is as when it is read alone."""
    alike = AlikeLines()
    _, lines = read(path, first, alike)
    assert lines is not None
    found, others = read(path, second, alike)
    assert found == read(path, second)[0]
    return others is lines


def test_names_of_archives_and_digests_may_differ(path):
    first = handmade(records("rank_0"))
    assert shared(path, first, handmade(records("rank_1")))
    assert shared(path, first, handmade(records("rank_1", b"efgh")))
    assert shared(path, first, first)


def test_all_else_may_not(path):
    first = handmade(records("rank_0"))
    assert not shared(path, first, handmade(records("rank_10")))
    assert not shared(path, first, handmade(records("rank_1", key="1")))
    assert not shared(path, first, handmade(records("rank_1", b"abcde")))
    assert not shared(path, first, handmade(records("rank_1")[:2]))


def test_several_kinds_are_known(path):
    alike = AlikeLines()
    kinds = [handmade(records("rank_0", key=key)) for key in "0123"]
    lines = [read(path, data, alike)[1] for data in kinds]
    assert len({id(one) for one in lines}) == 4
    for key, known in zip("0123", lines, strict=True):
        assert read(path, handmade(records("rank_1", key=key)), alike)[1] is known


def test_a_folder_that_is_a_path(path):
    assert not shared(path, handmade(records("abcde")), handmade(records("ab/de")))


def test_names_of_archives_within_names(path):
    first = handmade([*records("aaaaa"), (b"aaaaa/data/aaaaa/x", b"1")])
    second = handmade([*records("bbbbb"), (b"bbbbb/data/bbbbb/x", b"1")])
    mixed = handmade([*records("bbbbb"), (b"bbbbb/data/aaaaa/x", b"1")])
    assert not shared(path, first, second)
    assert not shared(path, first, mixed)
    assert not shared(path, mixed, first)
    strange = handmade([*records("bbbbb"), (b"aaaaa/data/x", b"1")])
    assert not shared(path, handmade([*records("aaaaa"), (b"aaaaa/data/x", b"1")]), strange)


def test_archives_whose_names_could_be_digests(path):
    assert not shared(path, handmade(records("abc")), handmade(records("abd")))
    assert shared(path, handmade(records("abcd")), handmade(records("abce")))


def test_lines_in_another_order_than_records(path):
    names = [(f"rank_0/{name}".encode(), b"abcd") for name in ("data.pkl", "data/123", "versions")]
    straight = handmade(names)
    at, end = straight.index(b"PK\1\2"), straight.index(b"PK\5\6")
    size = (end - at) // 3
    assert struct.unpack_from("<4s", straight, at + size) == (b"PK\1\2",)
    lines = [straight[at + n * size :][:size] for n in range(3)]
    data = straight[:at] + b"".join(reversed(lines)) + straight[end:]
    assert read(path, data)[0] == read(path, straight)[0]
    assert not shared(path, data, data)
