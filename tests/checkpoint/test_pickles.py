"""Pickles read without being run: what plain ones say, and what must never happen with others."""

import collections
import pickle
import pickletools
import random
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec.checkpoint.torch_files.unpickler import (
    Global,
    PickleError,
    Record,
    StateDict,
    made_by,
    mere_name,
    record_class,
    unpickle,
)
from shardspec.errors import CheckpointError

PLACE = Path("x.pt")
NOT_WRITTEN = "is not as pickle writes it; it is damaged, restore it"
TOO_MUCH = "needs more memory or time than a checkpoint does"
OUTSIDE = "which does not belong in a checkpoint; nothing of it was run."
LISTED: dict[str, Global] = {
    "a.Thing": record_class("Thing"),
    "a.named": mere_name("a.named"),
    "collections.OrderedDict": made_by("collections.OrderedDict", StateDict),
    "a.first": made_by("a.first", lambda first, *_: first),
    "a.number": made_by("a.number", lambda text: int(text)),
}


def read(data, allowed=LISTED, **options):
    return unpickle(data, allowed, PLACE, "pickle", **options)


def refused(data, allowed=LISTED, **options):
    """Return the one line that refuses it."""
    with pytest.raises(CheckpointError) as caught:
        read(data, allowed, **options)
    message = str(caught.value)
    assert message.startswith("x.pt: the pickle ")
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    return message.removeprefix("x.pt: the pickle ")


# --- what may be in a checkpoint

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda parts: (
        st.lists(parts)
        | st.tuples(parts)
        | st.tuples(parts, parts, parts, parts)
        | st.dictionaries(st.text() | st.integers(-(2**40), 2**40), parts)
    ),
    max_leaves=20,
)


@settings(max_examples=100)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_values_come_back(value, protocol):
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value)


def test_long_ones():
    value = [list(range(70_000)), "é" * 70_000, b"x" * 70_000, {i: str(i) for i in range(3000)}]
    for protocol in (3, 4, 5):
        assert read(pickle.dumps(value, protocol)) == value
        assert read(pickletools.optimize(pickle.dumps(value, protocol))) == value


def test_parts_that_are_shared_stay_so():
    inner: list[object] = [1]
    found = read(pickle.dumps([inner, inner, ("a", inner)]))
    assert found[0] is found[1]
    assert found[2][1] is found[0]
    inner.append(inner)
    around = read(pickle.dumps(inner))
    assert around[1] is around


def test_protocol_2_as_torch_writes_it():
    value = {"lr": 0.5, "betas": (0.9, 0.99), "n": [2**31, -1, 2**70], "deep": {"a": {}}}
    assert read(pickle.dumps(value, 2)) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [1, 127, 128, 255, 256, 257, 65537])
def test_values_that_are_numbered_and_taken_up_again(protocol, count):
    """Numbers of one byte and of four; Python's own reader says what is due."""
    parts = [[n] for n in range(count)]
    data = pickle.dumps([parts, parts[::-1]], protocol)
    there, back = read(data)
    assert there == parts
    assert all(part is again for part, again in zip(there, reversed(back), strict=True))


@pytest.mark.parametrize("code", [b"r", b"j", b"M", b"J", b"X"])
def test_numbers_that_are_cut(code):
    """Instructions with numbers of two and four bytes, at the end of what is there."""
    size = 2 if code == b"M" else 4
    for left in range(size):
        data = b"\x80\x02]" + code + bytes(left)
        assert refused(data) == NOT_WRITTEN
    whole = b"\x80\x02]q\x00" + code + bytes(size)
    assert refused(whole) == NOT_WRITTEN


@pytest.mark.parametrize("put", [b"q\x00", b"r\x00\x00\x00\x00"])
@pytest.mark.parametrize("get", [b"h\x00", b"j\x00\x00\x00\x00"])
def test_a_number_given_again_means_the_later_value(put, get):
    assert read(b"\x80\x02K\x07" + put + b"K\x08" + put + get + b"\x87.") == (7, 8, 8)


def test_names_and_calls():
    thing = raw(b"ca\nThing\n)\x81}X\1\0\0\0kK\7sb")
    found = read(thing)
    assert isinstance(found, Record)
    assert (found.name, found.args, found.state, found.get("k")) == ("Thing", (), {"k": 7}, 7)
    assert found.get("other") is None
    assert repr(found) == "<Thing>"
    assert read(raw(b"ca\nnamed\n")) is LISTED["a.named"]
    assert read(raw(b"ca\nfirst\nK\5\x85R")) == 5
    ordered = pickle.dumps(collections.OrderedDict(a=1, b=[2]), 2)
    assert read(ordered) == {"a": 1, "b": [2]}


def test_references():
    assert read(raw(b"K\7Q"), persistent=lambda key: ("outside", key)) == ("outside", 7)
    assert "refers to 7, which is not in the file" in refused(raw(b"K\7Q"))

    def never(_):
        raise ValueError("no such thing")

    assert refused(raw(b"K\7Q"), persistent=never).endswith("outside of the file: no such thing")


# --- what must never run


def raw(body, protocol=2):
    return b"\x80" + bytes([protocol]) + body + b"."


class Calls:
    """Makes a pickle that calls something."""

    def __init__(self, function, *args, state=None):
        self.parts = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.parts


MARK = "/tmp/shardspec-was-run"


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def called(module, name, *args):
    """Return a pickle of protocol 2 that calls by name, whether or not the name exists here."""
    return raw(f"c{module}\n{name}\n".encode() + b"(" + b"".join(map(text, args)) + b"tR")


SHELL = f"touch {MARK}"
CODE = f"open({MARK!r}, 'w')"
# Names of functions are tried in files, by `tests.faults`; here are ways to name one.
MALICIOUS = {
    "os.system": called("os", "system", SHELL),
    "eval": pickle.dumps(Calls(eval, CODE)),
    "getattr": called("builtins", "getattr", "os", "system"),
    "torch.load": called("torch", "load", MARK),
    "a name in two steps": raw(
        text("os") + text("system") + b"\x93" + b"(" + text(SHELL) + b"tR", 4
    ),
    "a name with a path": raw(text("a") + text("Thing.__init__.__globals__") + b"\x93", 4),
    "a dunder of a listed class": called("a.Thing", "__reduce_ex__", "x"),
    "another name of the listed module": called("a", "thing", "x"),
    "a name made longer": called("a", "Thing ", "x"),
    "a name with a line's end": raw(text("a") + text("Thing\nos") + b"\x93", 4),
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_what_would_run_code_is_refused_by_name(case):
    Path(MARK).unlink(missing_ok=True)
    before = set(sys.modules)
    with pytest.raises(PickleError) as caught:
        read(MALICIOUS[case])
    assert OUTSIDE in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not Path(MARK).exists()
    assert set(sys.modules) == before


INSTRUCTIONS = {
    "instance by name": b"(ios\nsystem\n",
    "object of a stacked class": b"(cos\nsystem\no",
    "object of a listed class": b"(ca\nThing\no",
    "object with keywords": b"ca\nThing\n)}\x92",
    "extension registry": b"\x82\1",
    "reference by line": b"Px\n",
    "text by line": b"Vx\n",
    "quoted text": b"S'x'\n",
    "number by line": b"I1\n",
    "fraction by line": b"F1\n",
    "long by line": b"L1L\n",
    "memo by line": b"Np0\n",
    "buffer outside": b"\x97",
    "read-only buffer": b"N\x98",
    "byte array": b"\x96" + bytes(8),
    "pop": b"N0",
    "pop to a mark": b"(N1",
    "twice": b"N2",
    "zero byte": b"\0",
}


@pytest.mark.parametrize("case", INSTRUCTIONS)
def test_instructions_that_no_checkpoint_needs(case):
    message = refused(raw(INSTRUCTIONS[case]))
    assert "which no checkpoint needs; nothing of it was run" in message or OUTSIDE in message


MISUSED = {
    "a call of a value": (b"K\1)R", NOT_WRITTEN),
    "a call of text": (text("os.system") + b")R", NOT_WRITTEN),
    "a call of a record": (b"ca\nThing\n)\x81)R", NOT_WRITTEN),
    "a call of a mere name": (b"ca\nnamed\n)R", "calls a.named, which is not a function"),
    "a call with no tuple": (b"ca\nThing\n]R", NOT_WRITTEN),
    "arguments that do not fit": (b"ca\nnumber\n" + text("x") + b"\x85R", "calls a.number"),
    "too few arguments": (b"ca\nfirst\n)R", "calls a.first with arguments that it does not take"),
    "a state for a name": (b"ca\nnamed\n}b", NOT_WRITTEN),
    "a state for a list": (b"]}b", NOT_WRITTEN),
    "a state twice": (b"ca\nThing\n)\x81K\1bK\2b", NOT_WRITTEN),
    "a name of numbers": (b"K\1K\2\x93", NOT_WRITTEN),
    "an item for a tuple": (b")K\1a", NOT_WRITTEN),
    "items for a dict": (b"}(K\1e", NOT_WRITTEN),
    "a pair for a tuple": (b")K\1K\2s", NOT_WRITTEN),
    "half a pair": (b"}(K\1u", NOT_WRITTEN),
    "a list as a key": (b"}]K\1s", NOT_WRITTEN),
    "a dict as a key": (b"}}K\1s", NOT_WRITTEN),
    "a nested tuple as a key": (b"})" + b"\x85" * 70 + b"K\1s", TOO_MUCH),
    "a list in a key": (b"}]\x85K\1s", NOT_WRITTEN),
    "a wide tuple as a key": (b"}(" + b"K\1" * 70 + b"tK\1s", TOO_MUCH),
    "a huge number": (b"\x8b" + struct.pack("<I", 1000) + b"\1" * 1000, TOO_MUCH),
    "text that is not UTF-8": (b"X\1\0\0\0\xff", "contains text that is not UTF-8"),
    "text past the end": (b"X\xff\xff\xff\xff", NOT_WRITTEN),
    "text of 2**64 bytes": (b"\x8d" + b"\xff" * 8, NOT_WRITTEN),
    "bytes past the end": (b"B\xff\xff\xff\xff", NOT_WRITTEN),
    "a frame past the end": (b"N\x95" + b"\xff" * 8, NOT_WRITTEN),
    "a frame that is cut": (b"N\x95" + b"\xff" + bytes(7), NOT_WRITTEN),
    "a memo far ahead": (b"Nr\xff\xff\xff\xff", NOT_WRITTEN),
    "an unknown memo": (b"h\7", NOT_WRITTEN),
    "memo of nothing": (b"\x94", NOT_WRITTEN),
    "nothing to take": (b"a", NOT_WRITTEN),
    "no mark": (b"Nt", NOT_WRITTEN),
    "a tuple of too much": (b"N\x86", NOT_WRITTEN),
    "below a mark": (b"N(\x85t", NOT_WRITTEN),
    "a mark left": (b"N(N", NOT_WRITTEN),
    "two values": (b"NN", NOT_WRITTEN),
    "no value": (b"", NOT_WRITTEN),
    "a long name": (b"c" + b"a" * 5000 + b"\nx\n", "which does not belong in a checkpoint"),
    "a name without an end": (b"ca\nThing", NOT_WRITTEN),
    "another protocol": (b"\x80\x09N", "which no checkpoint needs"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_instructions_that_make_no_sense(case):
    body, message = MISUSED[case]
    found = refused(raw(body))
    assert message in found
    # What Python says of its own objects.
    assert not any(word in found for word in ("' object", "argument list", "unhashable"))


@pytest.mark.parametrize("data", [b"", b"\x80", b"x", b"PK\3\4", b"(dp0\n.", b"\x80\x02", b"N."])
def test_what_is_no_pickle(data):
    refused(data)


def test_cut_at_every_byte():
    value = {"a": [1, 2.5, (None, True)], "b": {"c": b"xyz", 7: "text"}, "d": 2**70}
    for protocol in (2, 4, 5):
        data = pickle.dumps({**value, "b": {7: "text"}} if protocol == 2 else value, protocol)
        for size in range(len(data)):
            refused(data[:size])


def test_any_bytes_are_read_or_refused():
    """Nothing but our own error comes of 20,000 damaged pickles and 20,000 random programs."""
    draw = random.Random(1)
    good = pickle.dumps({"a": [1, 2.5, (None, True)], "b": {7: "text", "t": (1, 2, 3)}}, 4)
    codes = [op.code.encode("latin-1") for op in pickletools.opcodes]
    read_well = 0
    for number in range(40_000):
        if number % 2:
            data = bytearray(good)
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            program = bytes(data)
        else:
            body = [draw.choice(codes) + draw.randbytes(draw.randrange(3)) for _ in range(12)]
            program = raw(b"".join(body))
        try:
            read(program)
            read_well += 1
        except CheckpointError as error:
            message = str(error)
            assert len(message) < 500, message
    assert 1000 < read_well < 20_000


def small_objects(count):
    """Return the instructions of objects that are alike, as metadata lists them, and a name."""
    return b"ca\nThing\n\x94\x8c\1k\x94" + b"h\0)\x81\x94}\x94(h\1K\1\x8c\1v\x94Nub" * count


@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 2500])
def test_many_objects_that_are_alike(count):
    """What comes after them is found by its number."""
    found = read(
        raw(
            b"]("
            + small_objects(count)
            + b"\x8c\4last\x94j"
            + (3 * count + 2).to_bytes(4, "little")
            + b"e",
            4,
        )
    )
    assert [type(part) for part in found[2:-2]] == [LISTED["a.Thing"]] * count
    assert all(part.state == {"k": 1, "v": None} for part in found[2:-2])
    assert found[-2:] == ["last", "last"]


def test_tuples_behind_many_objects():
    """Keys are told from the parts of tuples wherever those are made."""
    pair = b"\x8c\1a\x94K\1\x86\x94"
    after = 3 * 20 + 2
    body = b"](" + small_objects(20) + pair + b"}j" + (after + 1).to_bytes(4, "little") + b"Nse"
    assert read(raw(body, 4))[-2:] == [("a", 1), {("a", 1): None}]
    for level in range(40):
        place = (after + 1 + level).to_bytes(4, "little")
        pair += b"j" + place + b"j" + place + b"\x86\x94"
    body = b"](" + small_objects(20) + pair + b"}j" + (after + 41).to_bytes(4, "little") + b"Nse"
    assert TOO_MUCH in refused(raw(body, 4))


@pytest.mark.parametrize("put", [b"q\0", b"r\0\0\0\0", b"\x94"])
def test_wide_tuples_as_keys_within_objects_that_are_alike(put):
    wide = b"(" + b"K\1" * 1000 + b"t" + put
    kind = b"ca\nThing\n\x94"
    objects = b"h\1)\x81\x94}\x94(h\0K\1h\0Nub" * 50
    assert TOO_MUCH in refused(raw(b"](" + wide + kind + objects + b"e", 4))


STATES = {
    "attributes for a name": b"ca\nnamed\n}X\4\0\0\0nameK\7sb",
    "slots for a name": b"ca\nnamed\nN}X\4\0\0\0nameK\7s\x86b",
    "attributes for a class": b"ca\nThing\n}X\4\0\0\0nameK\7sb",
    "slots for a class": b"ca\nThing\nN}X\4\0\0\0nameK\7s\x86b",
    "attributes for a function": b"ca\nfirst\n}X\7\0\0\0__new__K\7sb",
    "slots for a function": b"ca\nfirst\nN}X\7\0\0\0__new__K\7s\x86b",
    "an item of a name": b"ca\nnamed\nK\1K\2s",
    "a name made an object": b"ca\nnamed\n)\x81",
}


@pytest.mark.parametrize("case", STATES)
def test_names_cannot_be_changed(case):
    before = {name: dict(vars(kind)) for name, kind in LISTED.items()}
    refused(raw(STATES[case]))
    assert {name: dict(vars(kind)) for name, kind in LISTED.items()} == before


def test_attributes_of_dicts_are_left_out():
    slots = b"N}X\1\0\0\0aK\7s\x86b"
    found = read(raw(b"ccollections\nOrderedDict\n)R" + slots))
    assert found == {}
    assert not hasattr(found, "a")
