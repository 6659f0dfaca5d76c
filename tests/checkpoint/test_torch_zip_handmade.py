"""Zips made by hand: what lies about itself is refused, and more than 32 bits are counted."""

import struct

import pytest

from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError
from tests.checkpoint.zips import Counted, handmade, read, record, refused


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


PICKLE = b"\x80\x02}."
RECORDS = [(b"x/data.pkl", PICKLE), (b"x/data/0", b"abcd"), (b"x/data/1", b"efgh")]


def test_the_handmade_one_is_good(path):
    assert read(path, handmade(RECORDS)) == {}
    with storage_path(path).open() as file:
        found = read_torch_zip(file)
        assert file.read(record(found, file, "1").offset, 4) == b"efgh"


def to(value):
    return lambda *_: value


def plus(step):
    return lambda _, value: value + step


# What a directory may say that is not so, and the fields of its lines or of its end.
LIES = {
    "two entries share all bytes": {"header": lambda n, v: 0 if n == 1 else v},
    "two entries share some bytes": {"header": lambda n, v: v - 1 if n == 2 else v},
    "a nest of entries": {"header": to(0), "size": to(1)},
    "every entry holds the next": {"size": to(200), "packed": to(200)},
    "longer than the file": {"size": to(2**31), "packed": to(2**31)},
    "longer than 32 bits, without saying": {"size": to(2**32 - 1)},
    "packed to less": {"packed": plus(-1)},
    "after the directory": {"header": plus(5000)},
    "encrypted": {"flags": to(1)},
    "encrypted strongly": {"flags": to(64)},
    "on another disk": {"disk": to(1)},
    "too few entries": {"count": plus(-1)},
    "too many entries": {"count": plus(1)},
    "as many as 16 bits hold": {"count": to(2**16 - 1)},
    "no directory": {"length": to(0)},
    "shorter directory": {"length": plus(-1)},
    "directory elsewhere": {"start": plus(-1)},
    "directory past the end": {"start": to(2**31)},
    "huge directory": {"start": to(0), "length": to(2**31)},
    "another name": {"name": lambda _, v: v.replace(b"0", b"7")},
    "a name that is longer": {"name": lambda _, v: v + b"!" * 60},
    "no archive": {"name": to(b"x")},
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_of_the_directory(path, lie):
    path.write_bytes(handmade(RECORDS, **LIES[lie]))
    with storage_path(path).open() as file, pytest.raises(CheckpointError) as caught:
        record(read_torch_zip(file), file, "0")
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_record_whose_own_header_lies(path):
    data = handmade(RECORDS)
    first = data.index(b"PK\3\4", 4)
    for at, value in (
        (0, b"XX"),
        (6, b"\1"),
        (8, b"\x08"),
        (26, b"\x07"),
        (28, b"\xff"),
        (34, b"y"),
    ):
        place = first + at
        path.write_bytes(data[:place] + value + data[place + len(value) :])
        with (
            storage_path(path).open() as file,
            pytest.raises(CheckpointError, match="record b'x/data/0' contradicts itself"),
        ):
            record(read_torch_zip(file), file, "0")


def test_a_pickle_that_is_not_as_saved(path):
    data = handmade([(b"x/data.pkl", PICKLE)])
    at = data.index(PICKLE)
    assert refused(path, data[: at + 2] + b"]" + data[at + 3 :]) == (
        "the bytes of record b'x/data.pkl' have changed since the save (CRC-32); restore the file "
        "or save again"
    )


# --- more than 32 bits


def wide(path, sizes, lie=0, spare=b""):
    """Write a zip with 64-bit fields and records of these sizes, sparse."""
    listing = bytearray()
    with path.open("wb") as file:
        for number, size in enumerate(sizes):
            name = b"x/data/%d" % number
            header = file.tell()
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0, 0, len(name), 0))
            file.write(name)
            file.seek(size, 1)
            full = 2**32 - 1
            fields = [value for value in (size, size, header) if value >= full]
            extra = spare + struct.pack(f"<2H{len(fields)}Q", 1, 8 * len(fields), *fields)
            listing += struct.pack(
                "<4s6H3L5H2L",
                *(b"PK\1\2", 45, 45, 0, 0, 0, 0, 7, min(size, full), min(size, full)),
                *(len(name), len(extra) if fields else 0, 0, 0, 0, 0, min(header, full)),
            )
            listing += name + (extra if fields else b"")
        start = file.tell()
        file.write(listing)
        ends = file.tell()
        count = len(sizes)
        file.write(
            struct.pack(
                "<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(listing) + lie, start
            )
        )
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, ends, 1))
        small = (min(count, 2**16 - 1), len(listing), min(start, 2**32 - 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, small[0], *small, 0))


@pytest.mark.parametrize("spare", [b"", struct.pack("<2H4s", 0x4246, 4, b"ZZZZ")])
def test_more_than_four_gigabytes(path, spare):
    sizes = [3, (5 << 30) + 1, 11, (4 << 30) - 1, 0, 2]
    wide(path, sizes, spare=spare)
    assert path.stat().st_size > 9 << 30
    with Counted(LocalPath(path)) as file:
        found = read_torch_zip(file)
        at = 0
        for number, size in enumerate(sizes):
            at += 30 + len(b"x/data/0")
            place = record(found, file, str(number))
            assert place == (at, size, 7)
            at += size
    assert file.total < 8000


def test_more_records_than_16_bits_count(path):
    wide(path, [1] * 70_000)
    with storage_path(path).open() as file:
        found = read_torch_zip(file)
        assert len(found.directory) == 70_000
        assert record(found, file, "69999").num_bytes == 1


def test_64_bit_ends_that_lie(path):
    wide(path, [3, 4], lie=1)
    with (
        storage_path(path).open() as file,
        pytest.raises(CheckpointError, match="contradicts itself"),
    ):
        read_torch_zip(file)
