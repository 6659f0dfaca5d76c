import copy
import dataclasses
import pickle
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardspec import ShardingSpec, ShardSpecError
from shardspec.comm.steps import ReduceOp
from shardspec.errors import AxisError
from shardspec.layout.spec import DimSpec, Partial

AXES = [*range(14), "dp", "tp", "R", "S0", "P", "_x", "é"]
OPS = get_args(ReduceOp)


@st.composite
def specs(draw):
    """Any spec: up to 14 numbered and some named axes, each used at most once."""
    left = draw(st.permutations(AXES))[: draw(st.integers(0, len(AXES)))]
    dims = draw(st.integers(0, 5))
    ops = draw(st.sampled_from([[op] for op in OPS] + [["sum", "avg"]]))
    cuts: dict[int, list[int | str]] = {}
    partial = {}
    for axis in left:
        dim = draw(st.integers(-1, dims - 1))
        if dim < 0:
            partial[axis] = draw(st.sampled_from(ops))
        else:
            cuts.setdefault(dim, []).append(axis)
    return ShardingSpec(dims, cuts, partial=partial)


@settings(max_examples=100)
@given(specs())
def test_the_text_reads_back_as_the_same_spec(spec):
    assert ShardingSpec.parse(str(spec)) == spec
    assert hash(ShardingSpec.parse(str(spec))) == hash(spec)
    assert str(ShardingSpec.parse(str(spec))) == str(spec)
    if spec.dims:
        assert ShardingSpec.parse(str(spec)[1:-1]) == spec
    assert eval(repr(spec)) == spec


@settings(max_examples=100)
@given(specs())
def test_the_parts_make_the_same_spec(spec):
    assert ShardingSpec(spec.dims, spec.dim_partition_dict, partial=spec.partial) == spec
    assert len(spec.dim_specs) == spec.dims
    assert len(set(spec.axes)) == len(spec.axes)
    assert set(spec.axes) == {a for axes in spec.dim_partition_dict.values() for a in axes} | set(
        spec.partial
    )


@pytest.mark.parametrize(
    ("dims", "cuts", "partial", "text"),
    [
        (0, {}, {}, "[]"),
        (1, None, None, "[R]"),
        (2, {0: [0]}, {}, "[S0,R]"),
        (2, {0: [0, 1]}, {}, "[S01,R]"),
        (2, {0: [1, 0]}, {}, "[S10,R]"),
        (2, {1: [1], 0: [0]}, {}, "[S0,S1]"),
        (2, {0: []}, {}, "[R,R]"),
        (1, {0: [10]}, {}, "[S(10)]"),
        (1, {0: [1, 10, 0]}, {}, "[S(1,10,0)]"),
        (2, {0: ["dp"], 1: ["tp"]}, {}, "[S(dp),S(tp)]"),
        (1, {0: (0, "tp")}, {}, "[S(0,tp)]"),
        (2, {0: [0]}, {1: "sum"}, "[S0,R|P1]"),
        (0, {}, {2: "sum", 0: "sum"}, "[|P02]"),
        (1, {}, {11: "sum", 2: "sum"}, "[R|P(2,11)]"),
        (1, {}, {"tp": "sum", "dp": "sum", 3: "sum"}, "[R|P(3,dp,tp)]"),
        (1, {}, {0: "avg", 1: "sum"}, "[R|P1,Pavg0]"),
        (1, {}, {1: "max", 0: "max"}, "[R|Pmax01]"),
        (1, {}, {0: "min"}, "[R|Pmin0]"),
        (1, {}, {"x": "prod"}, "[R|Pprod(x)]"),
    ],
)
def test_text_of_a_spec_is_canonical(dims, cuts, partial, text):
    spec = ShardingSpec(dims, cuts, partial=partial)
    assert str(spec) == text
    assert repr(spec) == f"ShardingSpec.parse({text!r})"


def test_s01_and_s10_differ():
    assert ShardingSpec.parse("[S01]") != ShardingSpec.parse("[S10]")
    assert ShardingSpec.parse("[S10]").dim_partition_dict == {0: [1, 0]}


def test_the_order_in_which_partials_are_given_means_nothing():
    a = ShardingSpec(1, partial={0: "avg", 2: "sum", 1: "sum"})
    b = ShardingSpec(1, partial={1: "sum", 2: "sum", 0: "avg"})
    assert a == b
    assert hash(a) == hash(b)
    assert a.partials == (Partial(1), Partial(2), Partial(0, "avg"))
    assert a.axes == (1, 2, 0)


def test_views_of_a_spec():
    spec = ShardingSpec.parse("[S10,R,S(tp)|P2]")
    assert spec.dims == 3
    assert spec.sharding_sequence == [DimSpec((1, 0)), DimSpec(), DimSpec(("tp",))]
    assert str(spec.sharding_sequence) == "[S10, R, S(tp)]"
    assert [str(dim) for dim in spec.dim_specs] == ["S10", "R", "S(tp)"]
    assert spec.dim_partition_dict == {0: [1, 0], 2: ["tp"]}
    assert spec.partial == {2: "sum"}
    assert spec.axes == (1, 0, "tp", 2)
    assert ShardingSpec.of(spec) is spec
    assert ShardingSpec.of(str(spec)) == spec


def test_with_dims_and_without_partial():
    spec = ShardingSpec.parse("[S0,R|P1,Pavg2]")
    assert str(spec.with_dims({1: [3]})) == "[S0,S3|P1,Pavg2]"
    assert str(spec.with_dims({0: []})) == "[R,R|P1,Pavg2]"
    assert spec.with_dims({}) == spec
    assert str(spec.without_partial()) == "[S0,R]"
    assert str(spec.without_partial([1])) == "[S0,R|Pavg2]"
    assert spec.without_partial([]) == spec
    assert str(spec.without_partial([1, 2]).with_dims({1: [1]})) == "[S0,S1]"


def test_a_spec_is_a_value_of_its_own():
    axes = [0]
    cuts = {0: axes}
    spec = ShardingSpec(2, cuts)
    axes.append(1)
    cuts[1] = [2]
    assert str(spec) == "[S0,R]"
    spec.dim_partition_dict[0].append(5)
    spec.partial[3] = "sum"
    assert str(spec) == "[S0,R]"
    for again in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert again == spec
        assert hash(again) == hash(spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.dim_specs = ()  # type: ignore[misc]  # the very thing that must fail


def axis_error(make):
    with pytest.raises(AxisError) as caught:
        make()
    assert isinstance(caught.value, ShardSpecError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_dim_the_tensor_lacks():
    assert axis_error(lambda: ShardingSpec(2, {2: [0]})) == (
        "dim_partition_dict names dim 2, but the tensor has 2 dims, numbered from 0"
    )
    assert axis_error(lambda: ShardingSpec(1, {-1: [0]})) == (
        "dim_partition_dict names dim -1, but the tensor has 1 dim, numbered from 0"
    )
    assert axis_error(lambda: ShardingSpec(0, {0: []})) == (
        "dim_partition_dict names dim 0, but the tensor has 0 dims, numbered from 0"
    )
    assert axis_error(lambda: ShardingSpec.parse("[R]").with_dims({1: [0]})) == (
        "dim_partition_dict names dim 1, but the tensor has 1 dim, numbered from 0"
    )
    assert axis_error(lambda: ShardingSpec(-1)) == ("a tensor cannot have -1 dims, only 0 to 1024")


def test_an_axis_used_twice():
    once = "a mesh axis can shard a tensor only once"
    assert axis_error(lambda: ShardingSpec(2, {0: [0], 1: [1, 0]})) == (
        f"axis 0 is used twice, by dim 0 and by dim 1; {once}"
    )
    assert axis_error(lambda: ShardingSpec(1, {0: [3, 3]})) == (
        f"axis 3 is used twice, by dim 0 and by dim 0; {once}"
    )
    assert axis_error(lambda: ShardingSpec(1, {0: ["tp"]}, partial={"tp": "max"})) == (
        f"axis tp is used twice, by dim 0 and by the pending max; {once}"
    )


def test_axes_that_are_none():
    for axis in (-1, True, 1.5, None):
        assert axis_error(lambda axis=axis: ShardingSpec(1, {0: [axis]})) == (
            f"axis {axis!r}: give a number from 0 or a name"
        )
        assert axis_error(lambda axis=axis: Partial(axis)) == (
            f"axis {axis!r}: give a number from 0 or a name"
        )
    for name in ("", "0", "a b", "d-p"):
        assert axis_error(lambda name=name: DimSpec((name,))) == (
            f"axis name {name!r}: use letters, digits and '_', a letter first"
        )


def test_axes_that_are_not_in_a_list():
    assert axis_error(lambda: ShardingSpec(1, {0: "tp"})) == (
        "dim_partition_dict has 'tp' for dim 0; give a list: ['tp']"
    )
    assert axis_error(lambda: ShardingSpec(2, {1: 3})) == (  # type: ignore[arg-type]  # as users do
        "dim_partition_dict has 3 for dim 1; give a list: [3]"
    )


def test_reductions_that_are_none_or_do_not_commute():
    assert axis_error(lambda: Partial(2, "mean")) == (  # type: ignore[arg-type]  # as users do
        "reduction 'mean' over axis 2: use one of ('sum', 'avg', 'min', 'max', 'prod')"
    )
    for a in OPS:
        for b in OPS:
            if a == b or {a, b} == {"sum", "avg"}:
                assert ShardingSpec(0, partial={0: a, 1: b}).partial == {0: a, 1: b}
            else:
                message = axis_error(lambda a=a, b=b: ShardingSpec(0, partial={0: a, 1: b}))
                assert message == (
                    f"pending reductions {sorted([a, b])} do not commute, so their result depends "
                    "on the order; finish one before starting the other (sum and avg may be mixed)"
                )


def test_the_number_of_dims_under_both_names():
    assert ShardingSpec(dim_size=2, dim_partition_dict={0: [0]}) == ShardingSpec(2, {0: [0]})
    for numbers in ((None, None), (2, 2)):
        with pytest.raises(AxisError, match="give the number of dims once"):
            ShardingSpec(numbers[0], dim_size=numbers[1])
