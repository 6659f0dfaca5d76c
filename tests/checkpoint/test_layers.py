"""Names of repeated layers in one, and their order."""

import random
from itertools import product

import pytest

from shardspec.checkpoint.compare.inspect import groups_of, repeated_layers
from shardspec.text import natural_order


def expanded(title):
    """Return the names that a title stands for."""
    texts, *rest = title.split("{", 1)
    if not rest:
        return [title]
    inside, after = rest[0].split("}", 1)
    numbers: list[int] = []
    for part in inside.split(","):
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    return [f"{texts}{n}{tail}" for n, tail in product(numbers, expanded(after))]


@pytest.mark.parametrize("seed", range(40))
def test_titles_stand_for_exactly_the_names_that_are_alike(seed):
    random.seed(seed)
    forms = ["a.{}.w", "a.{}.e.{}.w", "{}.b", "{}", "c", "d.{}.{}.{}"]
    alike = {}
    for _ in range(60):
        form = random.choice(forms)
        numbers = [random.choice([0, 1, 2, 3, 10, 11]) for _ in range(form.count("{}"))]
        alike[form.format(*numbers)] = random.randrange(2)
    rows = repeated_layers(alike)
    assert sorted(name for _, names in rows for name in names) == sorted(alike)
    for title, names in rows:
        assert sorted(expanded(title)) == sorted(names)
        assert len({alike[name] for name in names}) == 1
    firsts = [names[0] for _, names in rows]
    assert firsts == natural_order(firsts)


def test_numbers_that_are_parts_of_words_are_no_layers():
    names = dict.fromkeys(["l.w1", "l.w2", "l.01", "l.02", "l.-1", "", "l..3", "l..4", "²"])
    titles = [title for title, _ in repeated_layers(names)]
    assert sorted(titles) == sorted(["l.w1", "l.w2", "l.01", "l.02", "l.-1", "", "l..{3,4}", "²"])


def test_no_names_have_no_layers():
    assert repeated_layers({}) == []
    assert groups_of([]) == {}


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["0.w", "1.w", "2.w"], {"(numbered)": 3}),
        (["w", "b"], {"b": 1, "w": 1}),
        (["a.b.c.0.w", "a.b.d.w", "a.e"], {"a.b.c": 1, "a.b.d": 1, "a": 1}),
        ([f"m.{c}.w" for c in "abcdefghijklmnop"], {"m": 16}),
        ([f"{c}.w" for c in "abcdefghijklmnop"], dict.fromkeys("abcdefghijklmnop", 1)),
    ],
)
def test_groups_are_few(names, groups):
    found = groups_of(names)
    assert {group: len(of) for group, of in found.items()} == groups


def test_numbers_of_any_length_are_in_order():
    long = "9" * 5000
    assert natural_order([f"w.1{long}", f"w.{long}", "w.007", "w.10"]) == [
        *("w.007", "w.10", f"w.{long}", f"w.1{long}")
    ]
