"""Tensors that are looked up when they are wanted, and what follows from boxes in common."""

from pathlib import Path
from threading import Barrier, Thread

import pytest

from shardspec.checkpoint.catalog import (
    FileBox,
    LazyTensorCache,
    Outline,
    StoredBox,
    StoredReduction,
    StoredTensor,
)
from shardspec.checkpoint.tiling import memoize_by_boxes
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


def test_those_asked_for_last_are_kept():
    looked_up, look_up = counting(3)
    find = LazyTensorCache(look_up, most_boxes=6)
    a, b = find("a"), find("b")
    assert find("a") is a
    c = find("c")
    # b was the one that nobody had asked for the longest.
    assert (find("a"), find("c")) == (a, c)
    assert find("b") == b
    assert looked_up == ["a", "b", "c", "b"]


def test_one_that_is_larger_than_all_is_kept_until_the_next():
    looked_up, look_up = counting(3)
    find = LazyTensorCache(look_up, most_boxes=2)
    assert find("a") is find("a")
    assert find("b") is find("b")
    assert looked_up == ["a", "b"]


def test_threads_may_ask_at_once():
    looked_up, look_up = counting(3)
    begin = Barrier(8)
    find = LazyTensorCache(look_up, most_boxes=6)
    found: list[StoredTensor] = []

    def want():
        begin.wait()
        found.extend(find(name) for name in "abcd" * 50)

    threads = [Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1600
    assert {one.name for one in found} == set("abcd") == set(looked_up)
    assert {id(find("a")), id(find("a"))} == {id(find("a"))}


def test_what_fails_is_looked_up_again():
    answers = [CheckpointError("gone"), tensor("a", 1)]

    def look_up(_):
        answer = answers.pop(0)
        if isinstance(answer, CheckpointError):
            raise answer
        return answer

    find = LazyTensorCache(look_up)
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
    found = memoize_by_boxes(find)
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
