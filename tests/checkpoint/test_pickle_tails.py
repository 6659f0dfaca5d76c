"""Pickles that end alike: two are taken for the same only if reading both says so."""

import pickle
from collections import OrderedDict
from copy import deepcopy
from itertools import product
from math import copysign
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardspec.checkpoint.torch_files.pickle_machine import run_head
from shardspec.checkpoint.torch_files.pickle_tails import TracedPickle, same
from shardspec.checkpoint.torch_files.pickle_values import Global, Record, Trace, as_record
from shardspec.checkpoint.torch_files.pickles import no_storage, unpickle


class Mesh:
    """What differs between ranks, and is one thing to those that refer to it."""

    def __init__(self, inside):
        self.inside = inside

    def __reduce__(self):
        return Mesh, (self.inside,)


NAMES = {
    f"{__name__}.Mesh": as_record("mesh"),
    "collections.OrderedDict": lambda args: {} if not args else None,
    "_codecs.encode": lambda args: args[0].encode("latin1"),
    "x.Mesh": as_record("x.Mesh"),
    "builtins.complex": lambda args: complex(*args),
    "__builtin__.complex": lambda args: complex(*args),
}


def by_what_they_hold(*_):
    return None


def any_mesh(a, _):
    return True if isinstance(a, Record) else None


def read(data):
    return unpickle(data, NAMES, "x", "pickle")


def traced(data):
    trace = Trace()
    value = unpickle(data, NAMES, "x", "pickle", trace=trace)
    return value, TracedPickle(data, trace, 0)


def alike(first, second, special=by_what_they_hold):
    """Say whether the second is taken to mean what the first does; None if that is not tried."""
    _, known = traced(first)
    ends = known.common_tail(second)
    if ends is None:
        return None
    one = run_head(known.start, ends[0], NAMES, no_storage)
    other = run_head(second, ends[1], NAMES, no_storage)
    return known.goes_on_alike(one, other, special)


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([0.0, -0.0, 1.5, float("nan")]),
    st.sampled_from(["", "a", "b", "cpu"]),
    st.just(b"a"),
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
        st.builds(OrderedDict, st.just(())),
        st.builds(Mesh, inner),
    ),
    max_leaves=6,
)


def parts(value):
    """Return a value and all that it holds."""
    found = [value]
    if isinstance(value, Mesh):
        found += parts(value.inside)
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        for part in inside:
            found += parts(part)
    return found


def written(value, seen=None):
    """Write a value that was read, without what meshes hold, and with what is one object."""
    seen = {} if seen is None else seen
    if isinstance(value, dict | list | Record):
        if id(value) in seen:
            return f"#{seen[id(value)]}"
        seen[id(value)] = len(seen)
    if isinstance(value, Record):
        return "mesh"
    if isinstance(value, dict):
        return f"dict({','.join(f'{key!r}:{written(at, seen)}' for key, at in value.items())})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({','.join(written(part, seen) for part in value)})"
    return repr(value)


@st.composite
def pairs(draw):
    """Two values that begin as they will, and go on alike: with new things, and with old ones."""
    picks = draw(st.lists(st.integers(0, 30), max_size=4))
    rest = draw(values)
    made = []
    heads = [draw(st.lists(values, max_size=3)) for _ in range(2)]
    if draw(st.booleans()):
        # As ranks do it: the same but for what is in a mesh.
        heads = [[Mesh(head), 1] for head in heads]
    for head in heads:
        known = parts(head)
        old = [known[pick % len(known)] for pick in picks]
        made.append([head, OrderedDict(), old, rest, OrderedDict()])
    return made


@given(pairs(), st.sampled_from([2, 3]))
def test_what_is_taken_for_the_same_is_the_same(made, protocol):
    first, second = (pickle.dumps(value, protocol) for value in made)
    if alike(first, second, any_mesh):
        assert written(read(first)) == written(read(second))
    if alike(first, second):
        assert first == second


INSIDE = ["a", "b", 7, (), ("a",), ("a", "b"), ["a"], ["b"], {"k": "a"}, [["a"]]]


def small(inside, beside, taken):
    """Return a value that begins with a mesh and something beside it, and then takes up either.

    None if there is nothing of that number to take up.
    """
    held = deepcopy(inside)
    mesh = Mesh(held)
    other = ["a", ["a"], held, [held], Mesh(held)][beside]
    inside = held if isinstance(held, list | tuple) else ()
    choices = [1, mesh, held, other, (mesh, other), *inside]
    if taken >= len(choices):
        return None
    return [[mesh, other], OrderedDict(), choices[taken], "end", OrderedDict()]


def test_all_small_pickles_that_differ_in_a_mesh():
    same_ones = different = refused = 0
    for first, second, *which in product(INSIDE, INSIDE, range(5), range(7)):
        values = small(first, *which), small(second, *which)
        if None in values:
            continue
        one, other = (pickle.dumps(value, 2) for value in values)
        found = alike(one, other, any_mesh)
        if found:
            assert written(read(one)) == written(read(other))
        same_ones += one == other
        different += found is True and one != other
        refused += found is False
    # That which is taken for the same though it differs is what all of it is for.
    assert (same_ones, different, refused) == (280, 238, 282)


@given(pairs(), st.sampled_from([2, 3]))
def test_a_pickle_is_like_itself(made, protocol):
    data = pickle.dumps(made[0], protocol)
    assert alike(data, bytes(data)) is True


def numbered(*items):
    """A pickle of [ordered dict, *items], the items in instructions."""
    made = b"\x80\x02]q\x00(ccollections\nOrderedDict\nq\x01)Rq\x02"
    return made + b"".join(items) + b"e."


def test_a_rest_that_takes_up_what_differs_is_not_the_same():
    def data(text, number):
        mesh = b"cx\nMesh\n(X\x01\x00\x00\x00" + text + b"q\x03tR"
        return numbered(mesh, b"ccollections\nOrderedDict\n)R", b"h" + number)

    assert str(read(data(b"a", b"\x03"))) == "[{}, <x.Mesh>, {}, 'a']"
    assert alike(data(b"a", b"\x03"), data(b"b", b"\x03"), any_mesh) is False
    assert alike(data(b"a", b"\x02"), data(b"b", b"\x02"), any_mesh) is True
    assert alike(data(b"a", b"\x02"), data(b"b", b"\x02")) is False


def test_lists_that_are_one_in_one_only():
    shared, rest = b"]q\x03h\x03", b"ccollections\nOrderedDict\n)R"
    apart = b"]q\x03]"
    grow = b"h\x03K\x07a"
    first, second = numbered(shared, rest, grow), numbered(apart, rest, grow)
    assert read(first) == [{}, [7], [7], {}, [7]]
    assert read(second) == [{}, [7], [], {}, [7]]
    assert alike(first, second) is False
    assert alike(second, first) is False
    assert alike(first, first) is True


def test_an_end_within_an_instruction():
    call = b"ccollections\nOrderedDict\n)R"
    # What is a call in the first is text in the second.
    text = b"X" + (len(call)).to_bytes(4, "little") + call
    first, second = numbered(call, b"K\x01"), numbered(text, b"K\x01")
    assert read(second) == [{}, call.decode(), 1]
    assert not alike(first, second)


def test_starts_that_are_long_are_not_tried():
    def data(first, length):
        return pickle.dumps([first, *range(length), OrderedDict(), 7], 2)

    assert alike(data("a", 10), data("b", 10)) is False
    # The first place between calls is past 64 KiB, and past an eighth of the whole.
    assert alike(data("a", 40_000), data("b", 40_000)) is None
    known = traced(data("a", 40_000))[1]
    assert known.common_tail(data("a", 40_000)) is None


def test_nothing_in_common_and_nothing_called():
    data = pickle.dumps([1, OrderedDict(), 2], 2)
    assert alike(data, pickle.dumps([1, OrderedDict(), 3], 2)) is None
    assert alike(pickle.dumps([1, 2]), pickle.dumps([1, 2])) is None
    assert alike(data, b"") is None


@pytest.mark.parametrize(
    ("one", "other", "due"),
    [
        (1, 1, True),
        (1, True, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        (complex(0, copysign(0, -1)), complex(0, 0), False),
        ((1, [2]), (1, [2]), True),
        ((1, [2]), (1, [2, 3]), False),
        ([1, 2], (1, 2), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (Global("torch.float32"), Global("torch.float32"), True),
        (Global("torch.float32"), Global("torch.int32"), False),
        (as_record("a")((1,)), as_record("a")((1,)), True),
        (as_record("a")((1,)), as_record("a")((2,)), False),
        (as_record("a")(()), as_record("b")(()), False),
        (b"a", b"a", True),
        (object(), object(), False),
    ],
)
def test_values(one, other, due):
    assert same([(one, other)], by_what_they_hold) is due
    assert same([(other, one)], by_what_they_hold) is due


def test_what_is_referred_to_often_is_compared_once():
    asked = []

    def special(a, b):
        asked.append((a, b))

    one, other = (tuple(range(number)) for number in (3, 3))
    assert same([([one] * 100, [other] * 100)], special) is True
    assert len(asked) == 2


def test_very_many_values_are_not_the_same():
    assert same([(list(range(1 << 20)), list(range(1 << 20)))], by_what_they_hold) is False
    assert same([(list(range(1 << 19)), list(range(1 << 19)))], by_what_they_hold) is True


def test_little_is_kept_of_a_pickle_that_refers_to_very_much():
    shown = b"".join(b"X\x01\x00\x00\x00aq" + bytes((n,)) for n in range(3, 200))
    data = numbered(shown, b"ccollections\nOrderedDict\n)R", b"h\x05" * 10_000)
    _, known = traced(data)
    assert known.common_tail(data) is not None
    assert set(known._taken_up) == {5}
    assert known.num_bytes < 2 * len(data)


def test_values_that_hold_themselves_or_one_thing_many_times():
    one: Any = [1]
    other: Any = [1]
    one.append(one)
    other.append(other)
    assert same([(one, other)], by_what_they_hold) is True
    # 2**40 paths lead to the same tuple.
    for _ in range(40):
        one, other = (one, one), (other, other)
    assert same([(one, other)], by_what_they_hold) is True
    assert same([(one, (other[0], ([1], other[1][1])))], by_what_they_hold) is False


def test_what_is_special():
    one, other = Record("mesh", (1,)), Record("mesh", (2,))
    assert same([([one], [other])], by_what_they_hold) is False

    assert same([([one, one], [other, other])], any_mesh) is True
    assert same([([one], [other])], any_mesh) is True
    # One here and two there is not the same, whatever is said of each.
    assert same([([one, one], [other, Record("mesh", (2,))])], any_mesh) is False
