"""Notes as they travel, and what is said where they differ."""

import pytest

from shardspec.comm.agreement import (
    NOTE_BYTES,
    NOTE_ROOM,
    Note,
    check_agreement,
    description,
)
from shardspec.errors import CommunicatorError


def note(words: dict[str, str] | None = None, **changed) -> Note:
    content = description(words or {"source": "[S0]", "target": "[R]"})
    facts = {"members": 7, "device": "cpu", "length": len(content), "content": content}
    return Note(**{"kind": "conversion", **facts, **changed})


def test_a_note_comes_back_from_its_bytes():
    for given in (note(), note(kind="value", device=""), note(members=1 << 500)):
        packed = given.pack()
        assert len(packed) <= NOTE_BYTES
        assert Note.unpack(packed) == given
        assert Note.unpack(packed.ljust(NOTE_BYTES)) == given  # as a message of one size


def test_the_longest_content_fits():
    ranks = 4096
    given = note(members=1 << ranks - 1, value=b"y" * NOTE_ROOM, content=b"", length=10_000)
    assert len(given.pack()) <= NOTE_BYTES + ranks // 8
    assert Note.unpack(given.pack()) == given


def test_where_shards_are():
    assert check_agreement({0: note(), 1: note()}) == "cpu"
    assert check_agreement({0: note(device=""), 1: note(device="cuda")}) == "cuda"
    assert check_agreement({4: note(device="")}) == ""
    with pytest.raises(CommunicatorError, match="types: rank 0 on cpu, rank 1 on meta; move"):
        check_agreement({0: note(), 1: note(device="meta")})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            note({"source": "[S0]", "target": "[S1]"}),
            "rank 5 asks for another conversion than rank 2: target [S1] where rank 2 has [R]; "
            "rank 2 asks for a conversion (source [S0], target [R]), rank 5 asks for a conversion "
            "(source [S0], target [S1]); every rank",
        ),
        (
            note(members=3, words={"source": "[S0]", "target": "[R]", "mesh": "2"}),
            "rank 5 asks for another conversion than rank 2",
        ),
        (
            note(kind="value"),
            "rank 5 gathers a value of ranks 0, 1, 2, but rank 2 asks for a conversion (source",
        ),
    ],
)
def test_what_differs_is_named(other, said):
    with pytest.raises(CommunicatorError) as caught:
        check_agreement({2: note(), 5: other})
    assert str(caught.value).startswith(said)


def test_values_may_differ():
    assert check_agreement({0: note(value=b"a"), 1: note(value=b"bc", length=2)}) == "cpu"


def test_long_words_that_differ_in_the_middle():
    here, there = ({"plan": "a" * 400 + middle + "b" * 400} for middle in "xy")
    with pytest.raises(CommunicatorError, match="they differ in a part too long to show"):
        check_agreement({0: note(here), 1: note(there)})
