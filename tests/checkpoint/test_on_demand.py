"""Tensors that are looked up when they are wanted, and what follows from boxes in common."""

from pathlib import Path
from threading import Barrier, Thread

import pytest

from shardspec.checkpoint.catalog import (
    Digest,
    FileBox,
    LazyTensorCache,
    Outline,
    StoredBox,
    StoredReduction,
    StoredTensor,
)
from shardspec.checkpoint.tiling import MemoizedByBoxes
from shardspec.errors import CheckpointError


def tensor(name, boxes):
    box = StoredBox(((0, 1),), (), 0, Path("x"), 0)
    return StoredTensor(name, (1,), "int8", None, (), (box,) * boxes)


def counting(boxes):
    """Return a list, and what looks tensors up and notes their names there."""
    looked_up = []

    def look_up(name):
        looked_up.append(name)
        return tensor(name, boxes)

    return looked_up, look_up


def test_all_are_looked_up_once_and_those_wanted_last_are_kept_as_they_are():
    looked_up, look_up = counting(3)
    find = LazyTensorCache(look_up, outline, most_boxes=6)
    a, b = find("a"), find("b")
    assert find("a") is a
    c = find("c")
    assert find("a") is a
    # b was packed; it is made again, and then c is.
    again = find("b")
    assert again == b
    assert again is not b
    assert find("a") is a
    assert find("c") == c
    assert looked_up == ["a", "b", "c"]


def test_packed_ones_are_as_they_were():
    digests = [None, Digest(2**32 - 1, 2**63, 2**62), Digest(0, 0, 0)]
    boxes = tuple(
        StoredBox(((at, at + 1),), (at,), at, Path(f"{at}"), 2**63 + at, digest, strides)
        for at, (digest, strides) in enumerate(zip(digests, (None, (4, 1), ()), strict=True))
    )
    whole = StoredTensor("w", (3,), "int8", None, (StoredReduction("sum", 3),), boxes)
    looked_up = []

    def look_up(name):
        looked_up.append(name)
        return whole if name == "w" else tensor(name, 3)

    held = tuple(FileBox(box.box, box.addend, box.rank, box.path) for box in boxes)
    find = LazyTensorCache(
        look_up, lambda _: Outline("w", (3,), "int8", None, whole.pending, held), 3
    )
    assert find("w") is whole
    find("other")
    assert find("w") == whole
    assert find("w") is not whole
    assert looked_up == ["w", "other"]


def outline(name):
    whole = tensor(name, 3)
    held = tuple(FileBox(box.box, box.addend, box.rank, box.path) for box in whole.boxes)
    return Outline(name, whole.shape, whole.dtype, None, (), held)


def test_one_that_is_larger_than_all_is_kept_until_the_next():
    looked_up, look_up = counting(3)
    find = LazyTensorCache(look_up, outline, most_boxes=2)
    assert find("a") is find("a")
    assert find("b") is find("b")
    assert looked_up == ["a", "b"]


def test_of_threads_that_want_the_same_one_looks():
    looked_up, look_up = counting(1)
    begin = Barrier(8)
    find, found = LazyTensorCache(look_up, outline), []

    def want():
        begin.wait()
        found.append(find("a"))

    threads = [Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert looked_up == ["a"]
    assert len(found) == 8
    assert all(one is found[0] for one in found)


def test_what_fails_is_looked_up_again():
    answers = [CheckpointError("gone"), tensor("a", 1)]

    def look_up(_):
        answer = answers.pop(0)
        if isinstance(answer, CheckpointError):
            raise answer
        return answer

    find = LazyTensorCache(look_up, outline)
    with pytest.raises(CheckpointError, match="gone"):
        find("a")
    assert find("a").name == "a"


def test_what_follows_from_boxes_in_common():
    asked = []

    def outline(name, boxes, shape=(4,), pending=()):
        return Outline(name, shape, "int8", None, pending, boxes)

    def find(one):
        asked.append(one.name)
        return one.name

    boxes = (FileBox(((0, 4),), (), 0, Path("x")),)
    equal = (FileBox(((0, 4),), (), 0, Path("x")),)
    found = MemoizedByBoxes(find)
    assert [found(outline(name, boxes)) for name in "abc"] == ["a", "a", "a"]
    # They have to be the same ones, and mean the same.
    assert found(outline("d", equal)) == "d"
    assert found(outline("e", boxes, shape=(5,))) == "e"
    assert found(outline("f", boxes, shape=(5,))) == "e"
    assert found(outline("g", boxes, (5,), (StoredReduction("sum", 2),))) == "g"
    for place in range(64):
        found(outline(f"{place}", (*boxes,)))
    assert found(outline("h", equal)) == "h"
    assert asked == ["a", "d", "e", "g", *map(str, range(64)), "h"]
