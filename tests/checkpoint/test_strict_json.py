"""Long texts are parsed a part at a time, and are held to the same rules."""

from pathlib import Path

import pytest

from shardspec.checkpoint.strict_json import parse_json, parse_members
from shardspec.errors import CheckpointError

# Few enough to be parsed in no time, and long enough to be more than one part.
LONG = "}{" * 120
MANY = ",".join(f'"k{n:07}":{{"é":[{n},"{LONG}"]}}' for n in range(20_000)).encode()
MORE = 5 << 20


def members(text):
    return parse_members(lambda at, count: text[at : at + count], len(text), Path("f"), "header")


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
