"""Long texts are parsed a part at a time, and are held to the same rules."""

from pathlib import Path

import pytest

from shardspec.checkpoint.strict_json import JSONStream, parse_json
from shardspec.errors import CheckpointError

# Few enough to be parsed in no time, and long enough to be more than one part.
LONG = "}{" * 120
MANY = ",".join(f'"k{n:07}":{{"é":[{n},"{LONG}"]}}' for n in range(20_000)).encode()
MORE = 5 << 20


def members(text):
    stream = JSONStream(lambda at, n: text[at : at + n], len(text), Path("f"), "header")
    for key in stream.members():
        yield key, stream.value()
    stream.end()


def test_a_long_text_says_what_it_says_at_once():
    text = b"{ " + MANY + b" \t}\n"
    assert len(text) > MORE
    assert dict(members(text)) == parse_json(text, Path("f"), "header")


@pytest.mark.parametrize("shift", range(6))
def test_letters_of_several_bytes_may_lie_across_parts(shift):
    names = ["x" * shift, "é\U0001f600" * 600_000, "y"]
    text = b"{" + b",".join(b'"%s":%d' % (name.encode(), n) for n, name in enumerate(names))
    text += b"}" + b" " * MORE
    assert list(members(text)) == [(name, n) for n, name in enumerate(names)]


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (b',"k0000007":{}}', "has the key 'k0000007' twice"),
        (b"", "Expecting , or } at character"),
        (b",}", "Expecting value at character"),
        (b"}x", "Extra data at character"),
        (b"}" + b" " * MORE + b"x", "Extra data at character"),
        (b',"a" 5}', "Expecting : at character"),
        (b",5:5}", "has the key 5, which is no string"),
        (b',"a":NaN}', "holds NaN, which is not JSON"),
        (b',"\xff":1}', f"is not UTF-8 (byte {len(MANY) + 3} is 0xff)"),
        (b',"a":[' + b"[" * 90_000, "nests too deep"),
        (b',"a":1' + b"1" * 90_000 + b"}", "a number of thousands of digits"),
        (b',"\\ud800":1}', "without lone surrogates"),
        (b',"' + b"a" * 2 * MORE + b'":1}', "or has a member of more than 4194304 bytes"),
    ],
)
def test_a_long_text_that_breaks_a_rule(end, problem):
    with pytest.raises(CheckpointError) as caught:
        list(members(b"{" + MANY + end))
    message = str(caught.value)
    assert message.startswith("f: the header ")
    assert problem in message
    assert len(message) < 200


def test_a_long_text_that_is_no_object():
    with pytest.raises(CheckpointError, match=r"Expecting \{ at character 0"):
        list(members(b"[" + MANY + b"]"))


def test_what_lies_within_is_gone_through_too():
    text = b'{"none": {}, "empty" : [ ] ,"deep":[[1,2],[ {"b":"}"} ]], "n": 12} '
    stream = JSONStream(lambda at, n: text[at : at + n], len(text), Path("f"), "header")
    found: dict[str, object] = {}
    for key in stream.members("the header"):
        if key == "none":
            found[key] = {inner: stream.value() for inner in stream.members(key)}
        elif key == "empty":
            found[key] = [stream.value() for _ in stream.items(key)]
        elif key == "deep":
            found[key] = [[stream.value() for _ in stream.items(key)] for _ in stream.items(key)]
        else:
            found[key] = stream.value()
    stream.end()
    assert found == parse_json(text, Path("f"), "header")


@pytest.mark.parametrize(("text", "problem"), [(b"[]", "an object but is []"), (b"5", "is 5")])
def test_what_lies_within_is_of_the_kind_that_is_due(text, problem):
    stream = JSONStream(lambda at, n: text[at : at + n], len(text), Path("f"), "header")
    with pytest.raises(CheckpointError, match="f: the header should be") as caught:
        next(stream.members("the header"))
    assert problem in str(caught.value)
    stream = JSONStream(lambda at, n: b"{}"[at : at + n], 2, Path("f"), "header")
    with pytest.raises(CheckpointError, match=r"files should be a list but is \{\}"):
        next(stream.items("files"))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_what_is_read_in_small_pieces_says_the_same(chunk):
    text = '{ "é\\n": [1, 23 , -4.5e1], "k" :{"true":true},"last": 678 }'.encode()
    stream = JSONStream(lambda at, n: text[at : at + min(n, chunk)], len(text), Path("f"), "header")
    found = {key: stream.value() for key in stream.members()}
    stream.end()
    assert found == parse_json(text, Path("f"), "header")
