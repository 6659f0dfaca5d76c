"""Which tensors, under which names, in which dtype."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardspec import merge
from shardspec.errors import CheckpointError, DTypeError

STATE = {
    "model.a.weight": torch.tensor([[1.0, 3.3e38, float("nan")], [1e-45, -0.0, 65520.0]]),
    "model.a.bias": torch.tensor([1.00390625, 1.01171875]),
    "model.steps": torch.arange(3),
    "optim.a.exp_avg": torch.tensor([2.0], dtype=torch.float64),
    "rope": torch.tensor([1 + 2j]),
}


@pytest.fixture
def source(tmp_path):
    save_file(STATE, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def merged(source, **options):
    out = source.with_name("out.safetensors")
    merge(source, out, overwrite=True, **options)
    return load_file(out)


def test_patterns_choose_tensors(source):
    assert merged(source, include=["model.*"]).keys() == {
        "model.a.weight", "model.a.bias", "model.steps"
    }  # fmt: skip
    assert merged(source, include=["*.a.*"], exclude=["optim.*", "*.bias"]).keys() == {
        "model.a.weight"
    }
    assert merged(source, exclude=["m*"]).keys() == {"optim.a.exp_avg", "rope"}


def test_regular_expressions_rename_tensors(source):
    found = merged(source, rename=[(r"^model\.", ""), (r"\.([ab])\w*$", r"/\1")])
    assert found.keys() == {"a.weight", "a/b", "steps", "optim.a.exp_avg", "rope"}
    assert found["a/b"].equal(STATE["model.a.bias"])


def test_one_pattern_and_a_table_of_names(source):
    found = merged(source, include="model.*", exclude="*.bias", rename={"^model": "m", "a": "b"})
    assert found.keys() == {"m.b.weight", "m.steps"}


def test_expressions_that_match_nothing(source):
    with pytest.raises(CheckpointError, match=r"'\^module' matches no name .* 'model.a.bias'"):
        merged(source, rename=[("^model", "m"), ("^module", "")])
    # One may be about the names that another has made.
    found = merged(source, include=["rope"], rename=[("rope", "freqs"), ("freqs", "f")])
    assert found.keys() == {"f"}
    with pytest.raises(CheckpointError, match="matches no name"):
        merged(source, include=["rope"], rename=[("^model", "m")])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_casts_are_those_of_torch(source, dtype):
    found = merged(source, dtype=dtype)
    for name, value in STATE.items():
        cast = value.is_floating_point()
        wanted = value.to(getattr(torch, dtype)) if cast else value
        assert found[name].dtype == wanted.dtype
        if cast:
            # Which NaN a NaN becomes is nobody's promise.
            nan = wanted.float().isnan()
            assert found[name].float().isnan().equal(nan)
            assert found[name].float()[~nan].equal(wanted.float()[~nan])
            zero = wanted.double() == 0
            assert found[name].double()[zero].signbit().equal(wanted.double()[zero].signbit())
        else:
            assert found[name].equal(wanted)


def test_patterns_that_match_nothing_are_refused(source):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"include": ["nope*"]}, "pattern 'nope\\*' matches nothing"),
        ({"exclude": ["nope"]}, "pattern 'nope' matches nothing"),
        ({"include": []}, "include is empty; omit it"),
        ({"include": ["rope"], "exclude": ["r*"]}, "none of the .* tensors of .* is selected"),
        (
            {"rename": [("(", "")]},
            r"cannot rename by the regular expressions \[\('\(', ''\)\]: missing \)",
        ),
        ({"rename": [("a", r"\9")]}, "cannot rename by .*: invalid group reference 9"),
        ({"rename": [("^.*$", "x")]}, "would both be named 'x'"),
        ({"include": ["rope"], "rename": [(".*", "")]}, "would get an empty name"),
        ({"threads": 0}, "threads is 0"),
        ({"format": "zip"}, "there is no format 'zip'"),
        ({"include": ["rope"], "rename": [("rope", "r"), ("[", "")]}, "cannot rename by"),
    ]
    for options, problem in cases:
        with pytest.raises(CheckpointError, match=problem):
            merged(source, **options)
    for dtype in ("int8", "complex64", "float7", "float8_e8m0fnu"):
        with pytest.raises(DTypeError):
            merged(source, dtype=dtype)
    assert not source.with_name("out.safetensors").exists()
