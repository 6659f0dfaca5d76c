"""Records that are read as a whole say what the same instructions say one by one."""

import io
import pickle
import random
from collections import Counter
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardspec.checkpoint.formats.dcp_metadata import read_metadata
from shardspec.checkpoint.formats.dcp_records import (
    RECORD_NAMES,
    RECORD_SHORTCUTS,
    ChunkRecord,
    IndexRecord,
    InfoRecord,
)
from shardspec.checkpoint.torch_files.pickle_values import Record, as_record
from shardspec.checkpoint.torch_files.pickles import no_storage, unpickle
from shardspec.checkpoint.torch_files.torch_values import TORCH_NAMES
from shardspec.errors import CheckpointError

HOME = "torch.distributed.checkpoint.metadata"
NAMES = {
    **TORCH_NAMES,
    **RECORD_NAMES,
    **{
        f"{HOME}.{kind}": as_record(kind)
        for kind in ("Metadata", "TensorStorageMetadata", "TensorProperties")
    },
    f"{HOME}._MEM_FORMAT_ENCODING": as_record("memory format"),
}
SHAPES = ((), (5,), (3, 4), (300, 2, 70_000), (2, 2, 2, 3), (1, 2, 3, 4, 5, 6), (0, 2**33))
PLACES = (0, 255, 256, 65_536, 2**31 - 1, 2**31, 2**40 + 7)


def metadata(names=("w", "größe", "x" * 255, "y" * 256), shapes=SHAPES):
    """Return metadata with sizes and places of every width, and with texts that recur or do not."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    properties = TensorProperties(dtype=torch.bfloat16)
    places = cycle(PLACES)
    for name, shape in product(names, shapes):
        fqn = f"{name}.{len(shape)}.{sum(shape)}"
        chunks = []
        for part in range(3):
            offsets = torch.Size([part * size for size in shape])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
            index = MetadataIndex(fqn, torch.Size(tuple(offsets)), part)
            path = "__0_0.distcp" if part else f"__{len(storage)}_0.distcp"
            storage[index] = _StorageInfo(path, next(places), next(places))
        tensors[fqn] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return Metadata(tensors, storage_data=storage)


def _in_python(value, protocol):
    """Pickle by the pickler that is written in Python."""
    out = io.BytesIO()
    pickle._Pickler(out, protocol).dump(value)
    return out.getvalue()


def plain(value):
    """Return a value of the machine as one that can be compared: records are equal by identity."""
    match value:
        case ChunkRecord() | IndexRecord() | InfoRecord():
            # Damaged ones lack members.
            return value.name, [plain(getattr(value, name, "none")) for name in value.__slots__]
        case Record():
            return value.name, plain(value.args), plain(value.state)
        case dict():
            return [(plain(key), plain(item)) for key, item in value.items()]
        case list() | tuple():
            return type(value), [plain(item) for item in value]
        case _:
            return type(value), value


def counted(met):
    """Return the shortcuts; they count in a `Counter` which records they read, and which not."""

    def counting(make):
        def made():
            read = make()

            def reads(data, at, memo):
                found = read(data, at, memo)
                met[make, found is not None] += 1
                return found

            return reads

        return made

    return {name: counting(make) for name, make in RECORD_SHORTCUTS.items()}


def read(data, shortcuts=None):
    """Return what a pickle says, or the error."""
    try:
        return plain(unpickle(data, NAMES, "x", "metadata", no_storage, shortcuts))
    except CheckpointError as error:
        return str(error)
    except RecursionError:
        return "holds itself"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dumps", [pickle.dumps, _in_python])
def test_the_same_as_by_instructions(dumps, protocol):
    data = dumps(metadata(), protocol=protocol)
    assert read(data, RECORD_SHORTCUTS) == read(data)


def test_nearly_all_of_what_torch_writes_is_read_so():
    names = [f"layers.{layer}.{kind}.weight" for layer in range(40) for kind in "qkvo"]
    # Sizes from 2**31 on are rare enough; and all chunks of a scalar are one.
    shapes = [shape for shape in SHAPES if 0 < max(shape, default=0) < 2**31]
    data = pickle.dumps(metadata(names, shapes))
    met: Counter[tuple[object, bool]] = Counter()
    assert read(data, counted(met)) == read(data)
    for kind in RECORD_SHORTCUTS.values():
        # The first of each states its words; and a frame may start within one.
        assert met[kind, True] > 3 * len(names) * len(shapes) - 20


def test_pickles_without_numbers_are_read_by_instructions():
    """Protocols before 4 number by other instructions; then no shortcut is asked in vain."""
    met: Counter[tuple[object, bool]] = Counter()
    data = pickle.dumps(metadata(), protocol=2)
    assert read(data, counted(met)) == read(data)
    assert met == {}


def test_any_byte_changed_changes_both_alike():
    """But for references to what only the making of a record needs, which nothing takes."""
    data = pickle.dumps(metadata(("w", "größe")))
    draw = random.Random(3)
    others = []
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 + draw.randrange(255)
        found, due = read(bytes(changed), RECORD_SHORTCUTS), read(bytes(changed))
        if found != due:
            others.append(found)
    assert len(others) < 0.1 * len(data)
    for found in others:
        assert "InsideOfRecord" in str(found) or str(found).endswith("it is damaged")


def test_a_changed_word_is_no_shortcut():
    """Records whose members are named otherwise have other members."""
    data = pickle.dumps([ChunkStorageMetadata(torch.Size([1]), torch.Size([2])) for _ in range(3)])
    changed = data.replace(b"offsets", b"offsetz")
    assert read(changed, RECORD_SHORTCUTS) == read(changed)
    assert "'offsets'" not in str(read(changed))
    shown = read(changed, RECORD_SHORTCUTS)[1]
    assert shown == [("chunk", [(type(None), None), (tuple, [(int, 2)])])] * 3


def test_numbers_that_are_given_anew_end_shortcuts():
    """A word may be another one later on."""
    kind = b"c" + HOME.encode() + b"\nChunkStorageMetadata\n\x94"
    size = b"ctorch\nSize\n\x94"
    words = b"\x8c\x07offsets\x94\x8c\x05sizes\x94"
    record = b"h\0)\x81\x94}\x94(h\2h\1K\1\x85\x94\x85\x94R\x94h\3h\1K\2\x85\x94\x85\x94R\x94ub"
    # Checkpoints need no POP, so all of it is kept in a list.
    start = b"\x80\4](" + kind + size + words
    data = start + record + record + b"e."
    met: Counter[tuple[object, bool]] = Counter()
    twice = read(data, counted(met))[1]
    assert twice[4:] == [("chunk", [(tuple, [(int, 1)]), (tuple, [(int, 2)])])] * 2
    assert met == {(RECORD_SHORTCUTS[f"{HOME}.ChunkStorageMetadata"], True): 2}
    anew = start + record + b"\x8c\x05other" + b"q\2" + record + b"e."
    assert read(anew, RECORD_SHORTCUTS) == read(anew)
    assert read(anew)[1][6] == ("chunk", [(type(None), None), (tuple, [(int, 2)])])


def test_empty_tuples_where_nothing_stands_before_them():
    chunk = ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
    data = pickle.dumps([chunk, ((), 1, 2, ()), chunk])
    assert b"()K" in data
    assert read(data, RECORD_SHORTCUTS) == read(data)
    assert read(data)[1][1] == (tuple, [(tuple, []), (int, 1), (int, 2), (tuple, [])])


def test_what_is_within_a_record_is_no_value():
    record = pickle.dumps(
        [ChunkStorageMetadata(torch.Size([n]), torch.Size([n])) for n in range(2)]
    )
    # Of the last record, the arguments of its last `torch.Size`, which are numbered before it.
    last = pickle.loads(record)[-1]
    assert last.sizes == (1,)
    end = record.rindex(b"e.")
    memo = record.count(b"\x94") - 2
    data = record[:end] + b"j" + memo.to_bytes(4, "little") + b"e."
    data = data[:2] + data[11:] if data[2:3] == b"\x95" else data
    assert read(data)[1][2] == (tuple, [(tuple, [(int, 1)])])
    assert "InsideOfRecord" in str(read(data, RECORD_SHORTCUTS)[1][2])


def test_memory_is_counted():
    """Records take of the memory that a pickle may take, as others do."""
    data = pickle.dumps(metadata())
    more = {name: (lambda make=make: greedy(make())) for name, make in RECORD_SHORTCUTS.items()}
    assert "it is made to fill the memory" in read(data, more)


def greedy(reads):
    """Return a shortcut that claims to have taken very much."""

    def read_so(data, at, memo):
        found = reads(data, at, memo)
        return None if found is None else (*found[:2], 1 << 40)

    return read_so


def test_boxes_outside_of_a_tensor_are_told_however_often_they_come(tmp_path):
    """The box of the same offsets and sizes is made once for each shape."""
    told = metadata(("w",))
    told.state_dict_metadata = {"w.2.7": told.state_dict_metadata["w.2.7"]}
    entry = told.state_dict_metadata["w.2.7"]
    entry.chunks[:] = [ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 4]))] * 2
    (tmp_path / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointError, match=r"its chunk \[2:4, 0:4\] lies outside of shape"):
        read_metadata(tmp_path / ".metadata")
