"""Values of pickles made plain, whatever they hold and how often."""

import pytest

from shardspec.checkpoint.catalog import OpaqueValue
from shardspec.checkpoint.torch_files.states import plain_value
from shardspec.checkpoint.torch_files.unpickler import foreign_class, mere_name, record_class
from shardspec.checkpoint.torch_files.values import Complex, TorchStorage, TorchTensor

TENSOR = TorchTensor("float32", (2, 3), (3, 1), 0, TorchStorage("0", "float32", 6))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        -(2**70),
        1.5,
        "text",
        b"abc",
        [],
        (),
        {},
        [1, (2, {"a": None})],
        {7: {(1, "b"): [[]]}},
    ],
)
def test_plain_values_stay(value):
    assert plain_value(value) == value
    assert type(plain_value(value)) is type(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (foreign_class("os.system")("ls"), "<os.system>, not read and not run"),
        (bytes(2**20 + 1), "1048577 bytes"),
        (Complex("(1+2j)"), "(1+2j)"),
        (mere_name("torch.float32"), "torch.float32"),
        (record_class("device")("cuda"), "<device>"),
        (TENSOR, "tensor of shape [2, 3]"),
        (object(), "object"),
    ],
)
def test_other_ones_are_described_where_they_stand(value, text):
    opaque = plain_value(value)
    assert isinstance(opaque, OpaqueValue)
    assert opaque.text == text
    assert plain_value({"a": [value, 1]}) == {"a": [opaque, 1]}


def test_dicts_with_objects_as_keys_are_objects():
    kind = foreign_class("m.Color")
    digests = set()
    for number in (1, 2):
        found = plain_value({kind(number): 1})
        assert isinstance(found, OpaqueValue)
        assert found.text == "a dict with keys such as <m.Color>, not read and not run"
        digests.add(found.digest)
    assert len(digests) == 2


def test_values_without_an_end():
    own: list[object] = []
    own.append(own)
    assert plain_value(own) == OpaqueValue("a list of many or deeply nested parts")
    laughs: object = ()
    for _ in range(90):
        laughs = (laughs, laughs)
    assert plain_value(laughs) == OpaqueValue("a tuple of many or deeply nested parts")
    assert plain_value({"a": [0] * 100_000}) == OpaqueValue("a dict of many or deeply nested parts")
    assert plain_value([0] * 99_000) == [0] * 99_000
