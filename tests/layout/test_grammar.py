import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec import ShardingSpec
from shardspec.errors import AxisError, SpecSyntaxError

CORPUS = json.loads(Path(__file__).with_name("grammar_corpus.json").read_text("utf-8"))


def test_the_corpus_is_there_and_names_each_text_once():
    assert set(CORPUS) == {"accepted", "rejected"}
    assert len(CORPUS["accepted"]) >= 30
    assert len(CORPUS["rejected"]) >= 40
    texts = [case["text"] for cases in CORPUS.values() for case in cases]
    assert len(set(texts)) == len(texts)


def axis_of(key):
    return int(key) if key.isdecimal() else key


@pytest.mark.parametrize("case", CORPUS["accepted"], ids=lambda case: case["text"])
def test_texts_of_the_grammar_are_read(case):
    spec = ShardingSpec.parse(case["text"])
    assert spec.dims == case["dims"]
    assert spec.dim_partition_dict == {int(dim): axes for dim, axes in case["cuts"].items()}
    assert spec.partial == {axis_of(axis): op for axis, op in case["partial"].items()}
    assert str(spec) == case["canonical"]
    assert ShardingSpec.parse(str(spec)) == spec
    assert ShardingSpec.parse(case["text"]) == spec


@pytest.mark.parametrize("case", CORPUS["rejected"], ids=lambda case: case["text"])
def test_other_texts_are_refused_at_a_character(case):
    with pytest.raises(SpecSyntaxError) as caught:
        ShardingSpec.parse(case["text"])
    error = caught.value
    assert (error.problem, error.position) == (case["problem"], case["at"])
    assert error.text == case["text"]
    assert str(error).startswith(f"{case['problem']} (")


def test_the_texts_are_well_formed_where_only_the_axes_are_wrong():
    cases = {
        "[S00]": "axis 0 is used twice, by dim 0 and by dim 0; ",
        "[S0,S0]": "axis 0 is used twice, by dim 0 and by dim 1; ",
        "[S(tp),S(dp,tp)]": "axis tp is used twice, by dim 0 and by dim 1; ",
        "[S1|Pavg1]": "axis 1 is used twice, by dim 0 and by the pending avg; ",
    }
    for text, start in cases.items():
        with pytest.raises(AxisError) as caught:
            ShardingSpec.parse(text)
        assert str(caught.value) == start + "a mesh axis can shard a tensor only once"


@settings(max_examples=100)
@given(st.text(alphabet="[]RSP0123(),|avgtp minx", max_size=14))
def test_any_text_is_either_read_or_refused_at_a_place_within_it(text):
    position = 0
    try:
        spec = ShardingSpec.parse(text)
    except SpecSyntaxError as error:
        position = error.position
    except AxisError:
        pass
    else:
        assert ShardingSpec.parse(str(spec)) == spec
    assert 0 <= position <= len(text)


TOKENS = [
    ["[", "]"],
    ["[", "R", "]"],
    ["[", "S", "(", "dp", ")", "|", "P", "min", "0", "]"],
    ["[", "S", "0", "1", ",", "R", ",", "S", "(", "10", ",", "tp", ")", "|", "P", "avg", "2", "]"],
]


@settings(max_examples=100)
@given(st.sampled_from(TOKENS), st.lists(st.tuples(st.integers(0, 40), st.sampled_from(" \t\n"))))
def test_blanks_between_the_tokens_mean_nothing(tokens, blanks):
    pieces = list(tokens)
    for at, blank in blanks:
        pieces.insert(at, blank)
    assert ShardingSpec.parse("".join(pieces)) == ShardingSpec.parse("".join(tokens))


def test_a_blank_inside_a_number_or_a_name_is_refused():
    for text, at in {"[S(1 0)]": 5, "[S(d p)]": 5, "[R|P a vg0]": 5}.items():
        with pytest.raises(SpecSyntaxError) as caught:
            ShardingSpec.parse(text)
        assert caught.value.position == at
