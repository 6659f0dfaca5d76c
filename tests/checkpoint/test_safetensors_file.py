"""Headers: every rule of the format, with safetensors' own library as the judge where it judges."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardspec.checkpoint.formats.safetensors import encode_header, read_header
from shardspec.checkpoint.storage import storage_path
from shardspec.errors import CheckpointError

GOOD = {
    "a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
}


def read(path):
    with storage_path(path).open() as file:
        return read_header(file)


def write(path, header, data=bytes(11), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(**changes):
    return GOOD | {"b": GOOD["b"] | changes}


TOO_LONG = "has 21 bytes and a header of 100000001"
BAD = [
    (b"{}", {"length": 100_000_001}, TOO_LONG),
    (b"{}", {"length": 1 << 63}, "has 21 bytes and a header of 9223372036854775808"),
    (
        b"{}",
        {"length": 50},
        "has 21 bytes and a header of 50, but at most 13 fit",
    ),
    (b"", {"data": b""}, "the header does not start with '{'"),
    (b"{", {}, "is not JSON"),
    (b"\x7b\xff\x7d", {}, "is not UTF-8 (byte 1 is 0xff)"),
    (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", {}, "nests too deep"),
    (b"{} x", {"data": b""}, "is not JSON: Extra data"),
    (entry(data_offsets=[7, 10]), {"data": bytes(10)}, "'b' starts at byte"),
    (entry(data_offsets=[9, 12]), {"data": bytes(12)}, "the data has a hole"),
    (entry(data_offsets=[0, 3]), {"data": bytes(8)}, "the data overlaps"),
    (entry(data_offsets=[11, 8]), {}, "takes 3 bytes, which its data_offsets [11, 8] do not span"),
    (entry(data_offsets=[8]), {}, "takes 3 bytes, which its data_offsets [8] do not span"),
    (
        entry(data_offsets=[8, 12]),
        {"data": bytes(12)},
        "takes 3 bytes, which its data_offsets [8, 12] do not span",
    ),
    (entry(shape=[4]), {}, "of shape [4] and dtype uint8 takes 4 bytes"),
    (entry(shape=[-3]), {}, "tensor 'b'.shape should be a list of whole numbers"),
    (entry(shape=[3.0]), {}, "tensor 'b'.shape should be a list of whole numbers"),
    (entry(shape=[True, 3]), {}, "tensor 'b'.shape should be a list of whole numbers"),
    (entry(shape="3"), {}, "whole numbers from 0 to 2**63 - 1 but is '3'"),
    (entry(shape=[1 << 62, 1 << 62]), {}, "takes 21267647932558653966460912964485513216 bytes"),
    (entry(shape=[1 << 64]), {}, "should be a list of whole numbers from 0 to 2**63 - 1"),
    (entry(dtype="I33"), {}, "tensor 'b' cannot be read: unknown safetensors dtype 'I33'"),
    (entry(dtype="F4", shape=[]), {}, "a multiple of 2 for F4"),
    (entry(dtype="F4", shape=[3, 4]), {}, "of shape [3, 2] and dtype float4_e2m1fn_x2 takes 6"),
    (entry(dtype=8), {}, "tensor 'b'.dtype should be a string but is 8"),
    (GOOD | {"b": {}}, {}, "tensor 'b'.dtype is missing"),
    (GOOD | {"b": []}, {}, "tensor 'b' should be an object but is []"),
    (GOOD | {"__metadata__": {"a": 1}}, {}, "__metadata__['a'] should be a string but is 1"),
    (GOOD | {"__metadata__": []}, {}, "__metadata__ should be an object but is []"),
    (GOOD, {"data": bytes(10)}, "its header describes"),
    (GOOD, {"data": bytes(12)}, "there are bytes past its end"),
]
NOTHING = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
# The specification forbids these too, or they make no sense; the library of today lets them pass.
STRICTER = [
    (entry(dtype="F4", shape=[3, 2, 1]), {}, "a multiple of 2 for F4"),
    (b" {}", {"data": b""}, "the header does not start with '{'"),
    (b'{"a":%b,"a":%b}' % (NOTHING, NOTHING), {}, "has the key 'a' twice"),
    (entry(shape=[3] + [1] * 64), {}, "tensor 'b' cannot be read: has 65 dims"),
    (entry(more=1), {}, "tensor 'b' should have dtype, shape, data_offsets but has ['dtype',"),
]


@pytest.mark.parametrize(("header", "how", "problem"), [*BAD, *STRICTER])
def test_a_header_that_breaks_a_rule(tmp_path, header, how, problem):
    path = write(tmp_path / "file", header, **how)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert problem in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("header", "how"), [(header, how) for header, how, _ in BAD])
def test_the_library_refuses_it_too(tmp_path, header, how):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(write(tmp_path / "file", header, **how), "np")


def test_a_good_header(tmp_path):
    header = read(write(tmp_path / "file", GOOD | {"__metadata__": {"k": "v"}}))
    start = header.file_bytes - 11
    assert [(e.name, e.dtype, e.shape, e.offset - start, e.num_bytes) for e in header.entries] == [
        ("a", "int32", (2,), 0, 8),
        ("b", "uint8", (3,), 8, 3),
    ]
    assert header.metadata == {"k": "v"}


def test_entries_without_bytes_may_stand_between_others(tmp_path):
    tensors = {"a": np.zeros((0, 3)), "b": np.ones(2), "c": np.zeros(0), "d": np.ones(())}
    path = tmp_path / "file"
    safetensors.numpy.save_file(tensors, path)
    assert {e.name: e.shape for e in read(path).entries} == {k: v.shape for k, v in tensors.items()}


@given(
    st.dictionaries(
        st.text().filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["float32", "int64", "uint8", "bool", "float16", "uint16", "int32"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=6,
    )
)
def test_written_headers_are_those_of_the_library_and_read_back(tmp_path_factory, tensors):
    slots = [(name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()]
    head, header = encode_header(slots, {"format": "pt"})
    arrays = {name: np.zeros(shape, dtype) for name, dtype, shape in slots}
    assert head + bytes(header.file_bytes - len(head)) == safetensors.numpy.save(
        arrays, {"format": "pt"}
    )
    path = tmp_path_factory.mktemp("header") / "file"
    path.write_bytes(head + bytes(header.file_bytes - len(head)))
    assert read(path) == header


def test_names_that_no_header_can_carry():
    with pytest.raises(CheckpointError, match="cannot be named '__metadata__': the safetensors"):
        encode_header([("__metadata__", "int8", ())], {})
    with pytest.raises(CheckpointError, match="which UTF-8 cannot express; rename the tensor"):
        encode_header([("\ud800", "int8", ())], {})


def test_a_header_past_the_limit_is_not_written():
    slots = ((f"{n:0100000d}", "int8", ()) for n in range(1_000))
    with pytest.raises(CheckpointError, match=r"1000 tensors need a header of 10.* bytes, past"):
        encode_header(slots, {})


def test_numbers_of_four_bits_are_counted_one_by_one_in_a_header_and_in_pairs_in_torch(tmp_path):
    # Next to each other by width and name, as the library orders them.
    tensors = {
        "p": torch.arange(15, dtype=torch.uint8).view(3, 5).view(torch.float4_e2m1fn_x2),
        "b": torch.ones(3, dtype=torch.bool),
        "u": torch.ones(2, dtype=torch.uint8),
    }
    path = tmp_path / "file"
    safetensors.torch.save_file(tensors, path)
    names = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    slots = [(name, names[name], tuple(at.shape)) for name, at in tensors.items()]
    head, header = encode_header(slots, {})
    assert path.read_bytes().startswith(head)
    assert b'"p":{"dtype":"F4","shape":[3,10],' in head
    assert read(path) == header
    assert [entry.shape for entry in header.entries] == [(2,), (3, 5), (3,)]
    with pytest.raises(CheckpointError, match=r"cannot express.*; give it the shape \[1\]"):
        encode_header([("p", "float4_e2m1fn_x2", ())], {})


def test_too_short_for_any_header(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1234567")
    with pytest.raises(
        CheckpointError,
        match=r"has 7 bytes and a header of .*, but at most 0 fit; it is not a",
    ):
        read(path)
