"""Pickles that are written without Python's pickler mean to Python what they should."""

import io
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardspec.checkpoint.torch_files.unpickler import unpickle
from shardspec.checkpoint.torch_files.writer import Made, Name, Outside, Pairs, PickledCall, pickled
from shardspec.errors import CheckpointError

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31)]),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.sampled_from(["x" * 255, "x" * 256, "\u00e4" * 128]),
)


def nested(of):
    return st.recursive(
        of,
        lambda inner: st.one_of(
            st.lists(inner),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(st.text(st.characters(max_codepoint=127), max_size=2), inner),
        ),
        max_leaves=20,
    )


values = nested(st.one_of(plain, st.binary(max_size=4)))


@given(values)
def test_plain_values(value):
    data = pickled(value)
    found = pickle.loads(data)
    assert repr(found) == repr(value)
    # It looks whether all that is taken up has been numbered, and nothing is left.
    pickletools.dis(data, io.StringIO())


class Thing:
    """Something that is made without a call, and given a state."""

    state: object = None

    def __setstate__(self, state):
        self.state = state


def test_names_calls_and_objects():
    kind = Name(__name__, "Thing")
    pairs = Pairs(((("a", 1), Made(kind)), ("b", PickledCall(Name("collections", "OrderedDict")))))
    value = [Made(kind, {"x": kind}), Made(kind, ("x", "x")), pairs]
    first, second, last = pickle.loads(pickled(value))
    assert (first.state, second.state) == ({"x": Thing}, ("x", "x"))
    assert list(last) == [("a", 1), "b"]
    assert type(last["b"]) is OrderedDict
    assert type(last[("a", 1)]) is Thing
    assert last[("a", 1)].state is None


def test_references_to_what_is_outside():
    data = pickled([Outside(("storage", 7)), "storage"])
    found = unpickle(data, {}, Path("x"), "example", lambda key: ("found", key))
    assert found == [("found", ("storage", 7)), "storage"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (object(), "is a object, which cannot be written"),
        (1 << 3000, "a whole number of more than 255 bytes cannot be written"),
        ("\ud800", "contains '\\ud800', which UTF-8 cannot express; rename it"),
    ],
)
def test_what_cannot_be_written(value, problem):
    with pytest.raises(CheckpointError) as caught:
        pickled([value])
    assert problem in str(caught.value)
