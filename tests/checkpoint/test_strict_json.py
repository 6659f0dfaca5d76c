"""JSON that breaks a rule is refused by one short line."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from shardspec import DeviceMesh, DTensor, save_sharded
from shardspec.checkpoint.formats import native
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage import strict_json
from shardspec.checkpoint.storage.strict_json import parse_json
from shardspec.errors import CheckpointError

MANY = ",".join(f'"k{n:05}":{{"é":[{n},"}}{{"]}}' for n in range(2_000)).encode()


def test_a_text_says_what_it_says():
    text = b"{ " + MANY + b" \t}\n"
    assert parse_json(text, Path("f"), "header") == json.loads(text)


def test_pairs_of_surrogates_are_characters():
    assert parse_json(rb'{"\ud83d\ude00": "\\ud800"}', Path("f"), "header") == {"😀": "\\ud800"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{" + MANY + b',"k00007":{}}', "has the key 'k00007' twice"),
        (b'{"a": [{"b": 1, "b": 1}]}', "has the key 'b' twice"),
        (b"{" + MANY, "is not JSON: Expecting ',' delimiter at character"),
        (b"{" + MANY + b",}", "is not JSON: "),
        (b"{" + MANY + b"}x", "Extra data at character"),
        (b'{"a" 5}', "Expecting ':' delimiter at character 5"),
        (b"{5:5}", "Expecting property name enclosed in double quotes at character 1"),
        (b'{"a":NaN}', "contains NaN, which is not JSON"),
        (b'{"a":-Infinity}', "contains -Infinity, which is not JSON"),
        (b"{" + MANY + b',"\xff":1}', f"is not UTF-8 (byte {len(MANY) + 3} is 0xff)"),
        (b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
        (b'{"a":' + b"[" * 90_000, "nests too deep"),
        (b'{"a":1' + b"1" * 90_000 + b"}", "contains a number of thousands of digits"),
        (b'{"\\ud800":1}', "contains text with lone surrogates"),
        (b'{"a":["\\ude00\\ud83d"]}', "contains text with lone surrogates"),
        (b"", "is not JSON: Expecting value at character 0"),
    ],
)
def test_a_text_that_breaks_a_rule(text, problem):
    with pytest.raises(CheckpointError) as caught:
        parse_json(text, Path("f"), "header")
    message = str(caught.value)
    assert message.startswith("f: the header ")
    assert problem in message
    assert message.endswith("; the file is damaged, restore it")
    assert len(message) < 200


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * 5_000_000 + b"1]",
        b"{" + b",".join(b'"%d":0' % n for n in range(3_000_000)) + b"}",
        '"😀'.encode() + b"a" * 60_000_000 + b'"',
    ],
    ids=["lists", "keys", "wide"],
)
def test_texts_that_would_fill_the_memory_are_refused(text):
    with pytest.raises(CheckpointError, match=r"f: the header has \d+ bytes, .* more than 448 MiB"):
        parse_json(text, Path("f"), "header")


def test_boxes_count_as_the_entries_that_they_become(tmp_path, monkeypatch):
    """An info fits because equal boxes are shared; boxes that differ, or other objects, do not."""
    weights = {f"layer.{number}.weight": torch.ones(8, 2) for number in range(300)}
    mesh = DeviceMesh(range(8))
    save_sharded({n: DTensor(t, mesh, "[S0,R]") for n, t in weights.items()}, tmp_path / "a")
    info = tmp_path / "a" / native.INFO_NAME
    text = info.read_text()
    for module in (native, strict_json):
        monkeypatch.setattr(module, "ROOM_BYTES", 2 << 20)
    assert strict_json.values_bytes(text.encode()) > 2 << 20
    assert len(open_checkpoint(tmp_path / "a").names) == 300
    numbers = itertools.count(1000)
    others = re.sub(r'"box": \[\[\d+', lambda _: f'"box": [[{next(numbers)}', text)
    for spoiled in (others, text.replace('{"box": ', '{"bax": ')):
        info.write_text(spoiled)
        with pytest.raises(CheckpointError, match="more than 2 MiB of memory"):
            open_checkpoint(tmp_path / "a")
