"""torch's zips: every byte where torch put it, and zips of others."""

import io
import zipfile

import pytest
import torch

from shardspec import merge
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.checksums import crc32
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.values import TorchTensor, tensor_place
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError
from tests.checkpoint.zips import Counted, read, record, refused

STATE = {"w": torch.arange(15.0).view(3, 5), "b": torch.arange(4), "s": torch.tensor(1.5)}


def saved(value, **options):
    """Return the bytes that torch writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pt"


def due():
    return {name: tensor.numpy().tobytes() for name, tensor in STATE.items()}


def test_records_are_read_where_they_lie(path):
    assert read(path, saved(STATE)) == due()
    torch.save(STATE, path)
    with storage_path(path).open() as file:
        found = read_torch_zip(file)
        assert {"data/0", "data/1", "data/2"} <= set(found.directory)
        records = [record(found, file, key) for key in ("0", "1", "2")]
        for at, tensor in zip(records, STATE.values(), strict=True):
            data = tensor.numpy().tobytes()
            assert file.read(at.offset, at.num_bytes) == data
            assert at.crc32 == crc32(data)
            assert at.offset % 64 == 0
        with pytest.raises(CheckpointError, match=r"x\.pt: has no record 'data/3'; it is damaged"):
            record(found, file, "3")


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
    with Counted(LocalPath(path)) as file:
        found = read_torch_zip(file)
        tensor = read_torch(found, found.pickle(file))
        assert isinstance(tensor, TorchTensor)
        tensor_place(tensor, file, found)
    assert (file.reads, file.total < 4000) == (4, True)


def test_a_file_of_thousands_of_records_is_read(path):
    many = {str(i): torch.tensor([i]) for i in range(3000)}
    found = read(path, saved(many))
    assert found == {name: tensor.numpy().tobytes() for name, tensor in many.items()}


def test_a_file_without_checksums_has_no_digests(path):
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(STATE)
    finally:
        torch.serialization.set_crc32_options(True)
    assert read(path, data) == due()
    with storage_path(path).open() as file:
        assert record(read_torch_zip(file), file, "0").crc32 is None


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


def test_compressed_records_are_refused(path):
    line = refused(path, rezipped(method=zipfile.ZIP_DEFLATED))
    assert "record b'archive/data.pkl' is compressed" in line
    assert "save it again" in line


def test_a_zip_that_unpacks_to_much_more_is_refused(path):
    """A zip that would unpack to many times its size is refused by its directory."""
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", method) as zipped:
            zipped.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * (1 << 20) + b"N.")
        assert len(buffer.getvalue()) < 1 << 15
        assert "is compressed" in refused(path, buffer.getvalue())


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
            "record b'other/version' contradicts itself",
        ),
        (replaced("data/1", (None, b"short")), "record data/1 has 5 bytes, but the pickle says 4"),
    ],
)
def test_records_that_contradict_the_directory_are_refused(path, change, message):
    assert message in refused(path, rezipped(change))


def test_a_name_twice(path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = rezipped(replaced("data/1", (None, None), (None, None)))
    assert "record b'archive/data/1' contradicts itself" in refused(path, data)


# --- files of other kinds


NOT_READ = "is not a whole zip of torch.save"


def test_what_torch_wrote_long_ago(path):
    line = refused(path, saved(STATE, _use_new_zipfile_serialization=False))
    assert line.startswith(NOT_READ)
    assert "load it with torch.load and save it again" in line


@pytest.mark.parametrize("data", [b"x", b"PK", b"\x93NUMPY" * 50, b"\0" * 5000])
def test_what_torch_never_wrote(path, data):
    assert refused(path, data).startswith(NOT_READ)


def test_a_scripted_file_is_named_and_bytes_behind_the_end_are_refused(tmp_path):
    with pytest.warns((DeprecationWarning, FutureWarning), match="deprecated"):
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "scripted.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "longer.pt")
    with (tmp_path / "longer.pt").open("ab") as file:
        file.write(b"more")
    for name, said in (("scripted", "TorchScript"), ("longer", NOT_READ)):
        with pytest.raises(CheckpointError, match=said):
            merge(tmp_path / f"{name}.pt", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
