import pytest

from shardspec import ShardingSpec, match_rules
from shardspec.errors import AxisError, LayoutError, SpecSyntaxError
from shardspec.layout.layout import SpecLike
from shardspec.layout.rules import RuleSpec

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
            ["rule '*.bias' has no effect", "'layers.0*s' matches every tensor that it does"],
        ),
        (
            {"*.weight": "[S0]"},
            LayoutError,
            ["'*.weight'", "[S0]", "of 1 dim,", "has 2; write [S0,...]", "such as [R,R]"],
        ),
        (
            {"Norm": "[Q]"},
            SpecSyntaxError,
            ["rule 'Norm': expected R or S and its axes (character 2 of '[Q]')"],
        ),
        ({"Norm": "[...,R,...]"}, SpecSyntaxError, ["'...' may stand once", "character 8"]),
        ({"Norm": "[S00]"}, AxisError, ["rule 'Norm': ", "axis 0 is used twice"]),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, error, words):
    with pytest.raises(error) as caught:
        match_rules(rules, TENSORS)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_rule_for_no_tensors_at_all():
    with pytest.raises(LayoutError, match="there are no tensors"):
        match_rules({"*": "[R]"}, {})


@pytest.mark.parametrize(
    ("rule", "by_dims"),
    [
        ("[...]", {0: "[]", 1: "[R]", 3: "[R,R,R]"}),
        ("[S(dp),...]", {0: "[]", 1: "[S(dp)]", 2: "[S(dp),R]", 4: "[S(dp),R,R,R]"}),
        ("[...,S(dp)]", {0: "[]", 1: "[S(dp)]", 2: "[R,S(dp)]", 4: "[R,R,R,S(dp)]"}),
        ("S0, ... , S1", {0: "[]", 1: None, 2: "[S0,S1]", 3: "[S0,R,S1]"}),
        ("[R,S1,...]", {0: "[]", 1: None, 2: "[R,S1]", 3: "[R,S1,R]"}),
        ("[S0{4,8}*2,...|P1]", {0: "[|P1]", 1: "[S0{4,8}*2|P1]", 2: "[S0{4,8}*2,R|P1]"}),
        ("[S0,R]", {0: None, 1: None, 2: "[S0,R]", 3: None}),
    ],
)
def test_an_ellipsis_stands_for_as_many_whole_dims_as_a_tensor_has_left(rule, by_dims):
    for dims, expected in by_dims.items():
        spec = RuleSpec.of(rule).for_dims(dims)
        assert (spec and str(spec)) == expected, dims
    assert RuleSpec.of(str(RuleSpec.of(rule))) == RuleSpec.of(rule)


@pytest.mark.parametrize("text", ["[S0,...]", "...", "[...,...]"])
def test_an_ellipsis_is_for_rules_only(text):
    with pytest.raises(SpecSyntaxError, match="stands for dims only in rules"):
        ShardingSpec.parse(text)


@pytest.mark.parametrize("text", ["[S0...]", "[..]", "[....]", "[...R]", "[R|...]"])
def test_what_is_no_ellipsis(text):
    with pytest.raises(SpecSyntaxError):
        match_rules({"Norm": text}, TENSORS)


def test_the_last_rule_that_matches_counts():
    rules: dict[str, SpecLike] = {"*": "[S0,...]", "layers.0.*": "[...,S1]", "*.bias": "[R]"}
    found = {name: str(spec) for name, spec in match_rules(rules, TENSORS).items()}
    assert found == {
        "layers.0.up.weight": "[R,S1]",
        "layers.10.up.weight": "[S0,R]",
        "layers.0.up.bias": "[R]",
        "Norm": "[S0]",
    }


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        (["Norm", "*"], "rule 'Norm' has no effect, since later rules win and '*' matches every"),
        (
            ["*.up.*", "*.bias", "*.weight"],
            "'*.up.*' has no effect, since later rules win and '*.weight', '*.bias' match every",
        ),
        (["*", *TENSORS], "'layers.0.up.bias' and 1 more match every"),
    ],
)
def test_a_rule_that_later_ones_leave_nothing_to_is_an_error(patterns, problem):
    with pytest.raises(LayoutError) as caught:
        match_rules(dict.fromkeys(patterns, "[...]"), TENSORS)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "spec", "remedies"),
    [
        (
            "N*",
            "[S(tp),R]",
            "write [S(tp),...], which fits any number of dims from 1, or give that",
        ),
        ("N*", "[R,S(tp)]", "has 1; give that tensor a rule of its own after it, such as [R]"),
        ("N*", "[R,R]", "write [...], which fits any number of dims from 0"),
        ("Norm", "[R,S0]", "has 1; give it a spec of 1 dim"),
        ("Norm", "[S0,R]", "has 1; write [S0,...], which fits any number of dims from 1"),
        ("N*", "[S0,...,S1]", "of at least 2 dims, but tensor 'Norm' has 1; give that tensor"),
    ],
)
def test_a_rule_that_does_not_fit_says_what_to_write(pattern, spec, remedies):
    with pytest.raises(LayoutError) as caught:
        match_rules({pattern: spec}, TENSORS)
    assert remedies in str(caught.value)
    assert "tensor 'Norm'" in str(caught.value)
