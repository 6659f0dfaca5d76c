import pytest

from shardspec.errors import AxisError, LayoutError, SpecSyntaxError
from shardspec.layout.layout import SpecLike, match_rules
from shardspec.layout.spec import ShardingSpec

TENSORS = {"layers.0.up.weight": 2, "layers.10.up.weight": 2, "layers.0.up.bias": 1, "Norm": 1}


def test_names_and_order_are_those_of_the_tensors():
    rules: dict[str, SpecLike] = {
        "*.bias": "[S0]",
        "layers.[0-9].up.weight": ShardingSpec(2, {1: ["tp"]}),
    }
    found = match_rules(rules, TENSORS)
    assert list(found) == ["layers.0.up.weight", "layers.0.up.bias"]
    assert list(map(str, found.values())) == ["[R,S(tp)]", "[S0]"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.?.*", ["layers.0.up.weight", "layers.0.up.bias"]),
        ("layers.??.*", ["layers.10.up.weight"]),
        ("Norm", ["Norm"]),
        ("[!l]*", ["Norm"]),
    ],
)
def test_patterns_match_whole_names_with_case(pattern, names):
    tensors = dict.fromkeys(TENSORS, 1)
    assert list(match_rules({pattern: "[R]"}, tensors)) == names


def test_no_rules_match_nothing():
    assert match_rules({}, TENSORS) == {}
    assert match_rules({}, {}) == {}


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"norm": "[R]"}, LayoutError, ["'norm'", "matches no tensor", "'layers.0.up.weight'"]),
        (
            {"*.bias": "[R]", "layers.0*s": "[R]"},
            LayoutError,
            ["'layers.0.up.bias'", "'*.bias'", "'layers.0*s'", "narrow"],
        ),
        ({"*.weight": "[S0]"}, LayoutError, ["'*.weight'", "[S0]", "of 1 dim,", "has 2", "narrow"]),
        ({"Norm": "[Q]"}, SpecSyntaxError, ["rule 'Norm': expected R or S", "[Q]", "^"]),
        ({"Norm": "[S00]"}, AxisError, ["rule 'Norm': ", "axis 0 is used twice"]),
    ],
)
def test_bad_rules(rules, error, words):
    with pytest.raises(error) as caught:
        match_rules(rules, TENSORS)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_rule_for_no_tensors_at_all():
    with pytest.raises(LayoutError, match="there are none"):
        match_rules({"*": "[R]"}, {})
