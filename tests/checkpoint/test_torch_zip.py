"""torch's zips: every byte where torch put it, and what lies about itself refused."""

import io
import random
import struct
import zipfile

import pytest
import torch

from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.files import SourceFile
from shardspec.checkpoint.torch_values import TorchTensor, read_torch, tensor_place
from shardspec.checkpoint.torch_zip import read_torch_zip
from shardspec.errors import CheckpointError

STATE = {"w": torch.arange(15.0).view(3, 5), "b": torch.arange(4), "s": torch.tensor(1.5)}


class Counted(SourceFile):
    """A file that counts how often it is read, and how much."""

    reads = 0
    total = 0

    def read_into(self, buffer, offset):
        self.reads += 1
        self.total += len(buffer)
        super().read_into(buffer, offset)


def saved(value, **options):
    """Return the bytes that torch writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def read(path, data, *stretch):
    """Return the bytes of every tensor of a dict that torch has saved."""
    path.write_bytes(data)
    with SourceFile(path) as file:
        found = read_torch_zip(file, *stretch)
        state = read_torch(file, found)
        assert isinstance(state, dict)
        places = {name: tensor_place(tensor, file, found) for name, tensor in state.items()}
        sizes = {name: found.num_bytes(tensor.storage.key) for name, tensor in state.items()}
        for name, place in places.items():
            assert place.digest is None or place.digest.num_bytes == sizes[name]
        return {name: file.read(place.offset, sizes[name]) for name, place in places.items()}


def refused(path, data, *stretch):
    """Return the one line that refuses it."""
    with pytest.raises(CheckpointError) as caught:
        read(path, data, *stretch)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(path))
    return message.removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


def due():
    return {name: tensor.numpy().tobytes() for name, tensor in STATE.items()}


def test_records_are_read_where_they_lie(path):
    assert read(path, saved(STATE)) == due()
    torch.save(STATE, path)
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        assert sorted(found.keys) == ["0", "1", "2"]
        records = [found.record(file, key) for key in ("0", "1", "2")]
        for record, tensor in zip(records, STATE.values(), strict=True):
            data = tensor.numpy().tobytes()
            assert file.read(record.offset, record.num_bytes) == data
            assert record.crc32 == crc32(data)
            assert record.offset % 64 == 0
        with pytest.raises(CheckpointError, match=r"x\.pt: has no record 'data/3'; it is damaged"):
            found.record(file, "3")


def test_a_stretch_of_a_larger_file(path):
    data = saved(STATE)
    for before, after in ((0, 5), (1, 0), (777, 3000)):
        whole = b"PK\5\6" * 900 + b"x" * 3
        spoiled = whole[:before] + data + whole[:after]
        assert read(path, spoiled, before, len(data)) == due()
    assert refused(path, data, 0, len(data) + 1).endswith(
        f"bytes 0 to {len(data) + 1} are needed, but the file has {len(data)}; it was cut short, "
        "restore it"
    )


def test_few_and_small_reads(path):
    torch.save(torch.zeros(1000, 1000), path)
    with Counted(path) as file:
        found = read_torch_zip(file)
        tensor = read_torch(file, found)
        assert isinstance(tensor, TorchTensor)
        tensor_place(tensor, file, found)
    assert (file.reads, file.total < 4000) == (3, True)


def test_many_records(path):
    many = {str(i): torch.tensor([i]) for i in range(3000)}
    found = read(path, saved(many))
    assert found == {name: tensor.numpy().tobytes() for name, tensor in many.items()}


def test_no_crc(path):
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(STATE)
    finally:
        torch.serialization.set_crc32_options(True)
    assert read(path, data) == due()
    with SourceFile(path) as file:
        assert read_torch_zip(file).record(file, "0").crc32 is None


def test_cut_at_every_byte(path):
    data = saved(STATE)
    for size in range(len(data)):
        assert refused(path, data[:size])


def test_any_byte_changed_is_told_or_does_not_matter(path):
    """The digests of torch cover the bytes of tensors, and those of the pickle."""
    data = saved(STATE)
    draw = random.Random(3)
    told = 0
    for at in range(len(data)):
        other = data[:at] + bytes([data[at] ^ (1 + draw.randrange(255))]) + data[at + 1 :]
        path.write_bytes(other)
        with SourceFile(path) as file:
            try:
                found = read_torch_zip(file)
                state = read_torch(file, found)
                assert isinstance(state, dict)
                records = [found.record(file, state[name].storage.key) for name in STATE]
            except CheckpointError:
                told += 1
                continue
            for record, good in zip(records, due().values(), strict=True):
                data_then = file.read(record.offset, record.num_bytes)
                assert data_then == good or record.crc32 != crc32(data_then)
    assert told > 500


# --- zips that others write


def rezipped(change=lambda name, data: [(name, data)], method=zipfile.ZIP_STORED):
    """Return what Python's own zipfile makes of torch's records."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(STATE))) as old,
        zipfile.ZipFile(buffer, "w", method) as new,
    ):
        for info in old.infolist():
            for name, data in change(info.filename, old.read(info)):
                new.writestr(name, data)
    return buffer.getvalue()


def test_zips_of_others(path):
    assert read(path, rezipped()) == due()


def test_compressed_ones(path):
    assert refused(path, rezipped(method=zipfile.ZIP_DEFLATED)) == (
        "record b'archive/data.pkl' is compressed (method 8), which torch never does; unpack it "
        "and save it again with torch.save"
    )


def test_bombs(path):
    """A zip that would unpack to 10,000 times its size is refused by its directory."""
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as zipped:
            zipped.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * (5 << 20) + b"N.")
        assert len(buffer.getvalue()) < 1 << 17
        assert "is compressed (method" in refused(path, buffer.getvalue())


def replaced(wanted, *others):
    return lambda name, data: (
        [(n or name, data if d is None else d) for n, d in others]
        if name == f"archive/{wanted}"
        else [(name, data)]
    )


def test_other_byte_orders(path):
    assert read(path, rezipped(replaced("byteorder"))) == due()
    for order in (b"big", b"unsure", b"little" * 50):
        assert "was written on a machine with byte order" in refused(
            path, rezipped(replaced("byteorder", (None, order)))
        )


def test_programs_are_no_checkpoints(path):
    data = rezipped(replaced("byteorder", (None, None), ("archive/constants.pkl", b"N.")))
    assert refused(path, data).startswith("is a TorchScript program, not a checkpoint; save the")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("data.pkl"), "has no record 'data.pkl'; it is damaged"),
        (replaced("data/1"), "has no record 'data/1'; it is damaged"),
        (
            replaced("version", ("other/version", None)),
            "record b'other/version' is there twice, or belongs to another archive than b'archive'",
        ),
        (replaced("data/1", (None, b"short")), "record data/1 has 5 bytes, but the pickle says 4"),
    ],
)
def test_wrong_records(path, change, message):
    assert message in refused(path, rezipped(change))


def test_a_name_twice(path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = rezipped(replaced("data/1", (None, None), (None, None)))
    assert "record b'archive/data/1' is there twice" in refused(path, data)


# --- zips made by hand


def handmade(records, end=b"", **changes):
    """Return a zip of (name, data) pairs; what is written of each entry may be changed.

    Changes are functions of the entry's number and true value.
    """
    changes = {
        "header": lambda _, value: value,
        "size": lambda _, value: value,
        "packed": lambda _, value: value,
        "flags": lambda _, value: value,
        "name": lambda _, value: value,
        "count": lambda _, value: value,
        "start": lambda _, value: value,
        "length": lambda _, value: value,
        "disk": lambda _, value: value,
    } | changes
    body, listing = b"", b""
    for number, (name, data) in enumerate(records):
        header = len(body)
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0)
        body += name + data
        own = changes["name"](number, name)
        listing += struct.pack(
            "<4s6H3L5H2L",
            *(b"PK\1\2", 20, 20, changes["flags"](number, 0), 0, 0, 0, crc32(data)),
            *(changes["packed"](number, len(data)), changes["size"](number, len(data))),
            *(len(own), 0, 0, changes["disk"](number, 0), 0, 0),
            changes["header"](number, header),
        )
        listing += own
    count = changes["count"](0, len(records))
    start, length = changes["start"](0, len(body)), changes["length"](0, len(listing))
    return (
        body
        + listing
        + end
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, start, 0)
    )


PICKLE = b"\x80\x02}."
RECORDS = [(b"x/data.pkl", PICKLE), (b"x/data/0", b"abcd"), (b"x/data/1", b"efgh")]


def test_the_handmade_one_is_good(path):
    assert read(path, handmade(RECORDS)) == {}
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        assert file.read(found.record(file, "1").offset, 4) == b"efgh"


def to(value):
    return lambda *_: value


def plus(step):
    return lambda _, value: value + step


CONTRADICTS = "contradicts itself; the file is damaged"
ENDS = "the records at its end contradict each other; damaged"
LIES = {
    "two entries share all bytes": ({"header": lambda n, v: 0 if n == 1 else v}, "runs into"),
    "two entries share some bytes": ({"header": lambda n, v: v - 1 if n == 2 else v}, "runs into"),
    "a nest of entries": ({"header": to(0), "size": to(1)}, CONTRADICTS),
    "every entry holds the next": (
        {"size": to(200), "packed": to(200)},
        "of 200 bytes at byte 0 runs into",
    ),
    "longer than the file": (
        {"size": to(2**31), "packed": to(2**31)},
        "of 2147483648 bytes at byte 0 runs into",
    ),
    "longer than 32 bits, without saying": ({"size": to(2**32 - 1)}, CONTRADICTS),
    "packed to less": ({"packed": plus(-1)}, CONTRADICTS),
    "after the directory": ({"header": plus(5000)}, "runs into"),
    "encrypted": ({"flags": to(1)}, CONTRADICTS),
    "encrypted strongly": ({"flags": to(64)}, CONTRADICTS),
    "on another disk": ({"disk": to(1)}, CONTRADICTS),
    "too few entries": ({"count": plus(-1)}, "its directory has 3 lines, not 2"),
    "too many entries": ({"count": plus(1)}, "its directory has 3 lines, not 4"),
    "as many as 16 bits hold": ({"count": to(2**16 - 1)}, ENDS),
    "no directory": ({"length": to(0)}, "its directory is said to have 0 bytes"),
    "shorter directory": ({"length": plus(-1)}, "its directory is said to have"),
    "directory elsewhere": ({"start": plus(-1)}, "its directory is said to have"),
    "directory past the end": ({"start": to(2**31)}, "its directory is said to have"),
    "huge directory": (
        {"start": to(0), "length": to(2**31)},
        "its directory has 2147483648 bytes, past the limit",
    ),
    "another name": (
        {"name": lambda _, v: v.replace(b"0", b"7")},
        "has no record 'data/0'; it is damaged",
    ),
    "a name that is longer": ({"name": lambda _, v: v + b"!" * 60}, "runs into"),
    "no archive": ({"name": to(b"x")}, "is there twice"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_of_the_directory(path, lie):
    changes, message = LIES[lie]
    path.write_bytes(handmade(RECORDS, **changes))
    with SourceFile(path) as file, pytest.raises(CheckpointError) as caught:
        read_torch_zip(file).record(file, "0")
    assert message in str(caught.value)
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
        with SourceFile(path) as file, pytest.raises(CheckpointError) as caught:
            read_torch_zip(file).record(file, "0")
        assert str(caught.value) == (
            f"{path}: the header of record b'x/data/0' at byte {first} contradicts the directory; "
            "the file is damaged"
        )


def test_a_pickle_that_is_not_as_saved(path):
    data = handmade([(b"x/data.pkl", PICKLE)])
    at = data.index(PICKLE)
    assert refused(path, data[: at + 2] + b"]" + data[at + 3 :]) == (
        "the bytes of record b'x/data.pkl' are not as saved (CRC-32); restore the file or save "
        "again"
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
    with Counted(path) as file:
        found = read_torch_zip(file)
        at = 0
        for number, size in enumerate(sizes):
            at += 30 + len(b"x/data/0")
            record = found.record(file, str(number))
            assert (record.offset, record.num_bytes, record.crc32) == (at, size, 7)
            at += size
    assert file.total < 8000


def test_more_records_than_16_bits_count(path):
    wide(path, [1] * 70_000)
    with SourceFile(path) as file:
        found = read_torch_zip(file)
        assert len(found.keys) == 70_000
        assert found.record(file, "69999").num_bytes == 1


def test_64_bit_ends_that_lie(path):
    wide(path, [3, 4], lie=1)
    with SourceFile(path) as file, pytest.raises(CheckpointError, match="contradict each other"):
        read_torch_zip(file)


# --- files of other kinds


def test_what_torch_wrote_long_ago(path):
    assert refused(path, saved(STATE, _use_new_zipfile_serialization=False)) == (
        "is in the form that torch wrote before version 1.6; load it with torch.load and save it "
        "again"
    )
    tar = bytearray(2048)
    tar[257:262] = b"ustar"
    assert refused(path, bytes(tar)).startswith("is in the tar form that torch wrote before")


@pytest.mark.parametrize("data", [b"", b"x", b"PK", b"\x93NUMPY" * 50, b"\0" * 5000])
def test_what_torch_never_wrote(path, data):
    assert refused(path, data).startswith("is nothing that torch.save writes (it starts with ")
