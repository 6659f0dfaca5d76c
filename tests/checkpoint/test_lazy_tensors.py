"""What follows from the boxes that tensors have in common is found once."""

from shardspec.checkpoint.catalog import FileBox, Outline, StoredReduction
from shardspec.checkpoint.compare.coverage import memoize_by_boxes
from shardspec.checkpoint.storage.local import LocalPath


def test_what_follows_from_boxes_in_common():
    asked = []

    def outline(name, boxes, shape=(4,), pending=()):
        return Outline(name, shape, "int8", None, pending, boxes)

    def find(one):
        asked.append(one.name)
        return one.name

    boxes = (FileBox(((0, 4),), (), 0, LocalPath("x")),)
    equal = (FileBox(((0, 4),), (), 0, LocalPath("x")),)
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
