"""Name maps: what they move, against numpy, and that faults in them are found."""

import itertools
import random
import re
import runpy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from shardspec import DeviceMesh, DTensor, Layout, NameMap, check_map, plan_reshard, reshard_state
from shardspec.errors import LayoutError, SpecSyntaxError
from shardspec.resharding.name_map import Equation, target_shapes
from shardspec.resharding.views import View, composed, views_of
from tests.jobs import EXAMPLES
from tests.resharding.states import random_mesh, random_spec, wrong_shards

trace_map = runpy.run_path(str(EXAMPLES / "trace_map.py"))["trace_map"]

TEXT = """
[sizes]
g = 2
q = 3
d = 4
r = "q + 2"
vocab = 10
padded = 16

[[map]]
source = ["embed.weight", "v h"]
target = ["word.weight", "w h", "w[:vocab]"]

[[zeros]]
target = ["word.weight", "w h", "w[vocab:]"]

[[map]]
source = ["layers.{i}.q.weight", "(g q d) h"]
target = ["decoder.{i}.qkv.weight", "(g r d) h", "r[:q]"]

[[map]]
source = ["layers.{i}.k.weight", "(g d) h"]
target = ["decoder.{i}.qkv.weight", "(g r d) h", "r[q]"]

[[map]]
source = ["layers.{i}.v.weight", "(g d) h"]
target = ["decoder.{i}.qkv.weight", "(g r d) h", "r[q+1]"]

[[map]]
source = ["layers.{i}.experts.{e}.down.weight", "a b"]
target = ["decoder.{i}.experts.weight", "e b a", "e[{e}]"]

[[map]]
source = "norm.weight"
target = "final_norm.weight"

[[unused]]
source = "rotary.inv_freq"
"""
MAP = NameMap.parse(TEXT)
H = 5
SOURCE = {
    "embed.weight": (10, H),
    "norm.weight": (H,),
    "rotary.inv_freq": (7,),
    **{f"layers.{i}.q.weight": (24, H) for i in range(2)},
    **{f"layers.{i}.{x}.weight": (8, H) for i in range(2) for x in "kv"},
    **{f"layers.{i}.experts.{e}.down.weight": (6, 3) for i in range(2) for e in range(3)},
}
TARGET = {
    "word.weight": (16, H),
    "final_norm.weight": (H,),
    **{f"decoder.{i}.qkv.weight": (40, H) for i in range(2)},
    **{f"decoder.{i}.experts.weight": (3, 3, 6) for i in range(2)},
}


def loader(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the map says, as people write it."""
    word = torch.zeros(16, H, dtype=state["embed.weight"].dtype)
    word[:10] = state["embed.weight"]
    out = {"word.weight": word, "final_norm.weight": state["norm.weight"].clone()}
    for i in range(2):
        q, k, v = (state[f"layers.{i}.{x}.weight"] for x in "qkv")
        groups = [part.reshape(2, -1, H) for part in (q, k, v)]
        out[f"decoder.{i}.qkv.weight"] = torch.cat(groups, dim=1).reshape(40, H)
        out[f"decoder.{i}.experts.weight"] = torch.stack(
            [state[f"layers.{i}.experts.{e}.down.weight"].T for e in range(3)]
        )
    return out


def moved(equations: tuple[Equation, ...] | list[Equation]) -> dict[str, np.ndarray]:
    """Carry equations out on places, element by element; -1 where nothing is written."""
    starts, end = {}, 0
    for name, shape in SOURCE.items():
        starts[name] = end
        end += int(np.prod(shape))
    out = {name: np.full(shape, -1) for name, shape in TARGET.items()}
    for e in equations:
        source = np.arange(int(np.prod(SOURCE[e.source]))).reshape(SOURCE[e.source])
        for at in np.ndindex(*e.view.shape):
            place = []
            for side in (e.view.source, e.view.target):
                index = []
                for factors in side.dims:
                    value = 0
                    for factor in factors:
                        value = value * factor.size + factor.start + at[factor.axis]
                    index.append(value)
                place.append(tuple(index))
            out[e.target][place[1]] = source[place[0]] + starts[e.source]
    return out


def expected() -> dict[str, np.ndarray]:
    state, end = {}, 0
    for name, shape in SOURCE.items():
        state[name] = torch.arange(end, end + int(np.prod(shape))).reshape(shape) + 1
        end += int(np.prod(shape))
    return {name: tensor.numpy() - 1 for name, tensor in loader(state).items()}


def test_equations_are_what_the_loader_does():
    report = check_map(MAP, SOURCE, TARGET)
    assert report.problems == ()
    assert report.unused == ()
    got, wanted = moved(report.equations), expected()
    assert got.keys() == wanted.keys()
    for name, places in wanted.items():
        assert np.array_equal(got[name], places), name


def test_a_traced_loader_gives_the_same_places():
    got, wanted = moved(trace_map(loader, SOURCE)), expected()
    for name, places in wanted.items():
        assert np.array_equal(got[name], places), name


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.exhaustive)], ids=len
)
def test_random_meshes_both_ways(backwards, seeds):
    torch.manual_seed(0)
    state = {name: torch.randn(shape) for name, shape in SOURCE.items()}
    there = loader(state)
    kept = {name: tensor for name, tensor in state.items() if name != "rotary.inv_freq"}
    given, wanted = (there, kept) if backwards else (state, there)
    map_ = MAP.reversed() if backwards else MAP
    for seed in seeds:
        random_ = random.Random(seed)
        a, b = random_mesh(random_, 8), random_mesh(random_, 8)
        source = {
            n: Layout(a, random_spec(random_, a, t.shape), t.shape, t.dtype)
            for n, t in given.items()
        }
        target = {
            n: Layout(b, random_spec(random_, b, t.shape), t.shape, t.dtype)
            for n, t in wanted.items()
        }
        plan = plan_reshard(source, target, names=map_, max_bytes=(None, 512)[seed % 2] or None)
        tensors = {n: DTensor(t, a, source[n].spec) for n, t in given.items()}
        assert wrong_shards(wanted, target, plan.run(tensors), b.ids) == [], seed
        # What is filled held something else, also where it is padding.
        out = {n: DTensor(torch.randn_like(t), b, target[n].spec) for n, t in wanted.items()}
        assert wrong_shards(wanted, target, plan.run(tensors, out), b.ids) == [], seed


def test_the_target_is_implied_by_views_and_sizes():
    sized = MAP.with_sizes({"w": 16, "e": 3})
    assert target_shapes(sized, SOURCE) == TARGET
    mesh = DeviceMesh(range(2), (2,))
    source = {
        n: Layout(mesh, f"[S0{',R' * (len(s) - 1)}]", s, "float32") for n, s in SOURCE.items()
    }
    plan = plan_reshard(source, (mesh, {"*.qkv.weight": "[S0,R]"}), names=sized)
    assert {move.target_name: move.target.global_shape for move in plan.moves} == TARGET
    with pytest.raises(LayoutError, match="the size 'w' is not known"):
        target_shapes(MAP, SOURCE)


@pytest.mark.parametrize("view", ["", "a b", "one", "(a one) b"])
def test_a_part_of_a_dim_is_paired_in_order(view):
    """Views with other names than the target's, or no view at all."""
    shape = (1, 2, 3) if view == "one" else (2, 3)
    source = ["k", *([view] if " " in view else [])]
    text = f"""
    [sizes]
    r = 5
    one = 1
    [[map]]
    source = "q"
    target = ["qk", "r c", "r[:3]"]
    [[map]]
    source = {source}
    target = ["qk", "r c", "r[3:]"]
    """
    q, k = torch.arange(9.0).view(3, 3), torch.arange(6.0).view(shape)
    mesh = DeviceMesh(range(2), (2,))
    state = {
        name: DTensor(t, mesh, f"[{','.join('R' * t.dim())}]")
        for name, t in {"q": q, "k": k}.items()
    }
    moved = reshard_state(state, {"qk": "[S0,R]"}, names=NameMap.parse(text))
    assert torch.equal(moved["qk"].to_global(), torch.cat([q, k.view(2, 3)]))


def faults() -> list[tuple[str, str, str]]:
    return [
        ("missing expert", 'source = ["layers.{i}.experts.{e}.down', 'source = ["layers.{i}.x.{e}'),
        ("one too many", "r[:q]", "r[:q+1]"),
        ("one too few", "r[q+1]", "r[q]"),
        ("doubled", 'target = "final_norm.weight"', 'target = "word.weight"'),
        ("padding short", "w[vocab:]", "w[vocab+1:]"),
        ("head count", "g = 2", "g = 4"),
    ]


@pytest.mark.parametrize(("name", "old", "new"), faults(), ids=lambda value: str(value)[:12])
def test_faults_that_the_check_alone_finds(name, old, new):
    assert old in TEXT, name
    try:
        report = check_map(NameMap.parse(TEXT.replace(old, new)), SOURCE, TARGET)
    except LayoutError:
        return
    assert report.problems, name


def mutated(random_: random.Random) -> str:
    """Return the map with a fault: a token, two factors of a view, or two slices exchanged."""
    lines = TEXT.splitlines()
    at = random_.choice([n for n, line in enumerate(lines) if "=" in line])
    line = lines[at]
    match random_.randrange(3):
        case 0:
            tokens = ["g", "q", "d", "h", "r", "(", ")", "0", "1", "2", ":", "[", "]", "k", "+ 1"]
            place = random_.randrange(line.index("=") + 1, len(line))
            line = line[:place] + random_.choice(tokens) + line[place + random_.randrange(2) :]
        case 1:
            factors = sorted(set(re.findall(r"\b[a-z]\b", line)))
            if len(factors) > 1:
                one, other = random_.sample(factors, 2)
                names = {one: other, other: one}
                line = re.sub(r"\b[a-z]\b", lambda m: names.get(m[0], m[0]), line)
        case 2:
            other = random_.choice([n for n, text in enumerate(lines) if '", "' in text])
            if '", "' in line:
                ends = [lines[n].rsplit('", "', 1) for n in (at, other)]
                lines[other] = f'{ends[1][0]}", "{ends[0][1]}'
                line = line if at == other else f'{ends[0][0]}", "{ends[1][1]}'
    lines[at] = line
    return "\n".join(lines)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_faults_are_found_by_the_check_or_by_the_loader(count):
    wanted = expected()
    random_ = random.Random(count + 3)
    by_check = by_loader = same = 0
    for _ in range(count):
        try:
            report = check_map(NameMap.parse(mutated(random_)), SOURCE, TARGET)
        except LayoutError:
            by_check += 1
            continue
        if report.problems:
            by_check += 1
            continue
        got = moved(report.equations)
        if any(not np.array_equal(got[name], wanted[name]) for name in wanted):
            by_loader += 1
        else:
            same += 1  # no element goes elsewhere, as where a factor has another name
    assert by_check > count // 20
    assert by_loader > min(10, count // 200)
    assert same > min(10, count // 200)


def test_a_tensor_without_elements_is_written():
    map_ = NameMap.parse(
        '[sizes]\ng = 2\n[[map]]\nsource = ["a", "(g d) c"]\ntarget = ["b", "c d g"]'
    )
    report = check_map(map_, {"a": (0, 3)}, {"b": (3, 0, 2)})
    assert (report.problems, report.unused) == ((), ())


@pytest.mark.parametrize(
    ("source", "target", "shapes", "says"),
    [
        (["(a b"], ["c"], ((4,), (4,)), "not closed"),
        (["a)"], ["c"], ((4,), (4,)), "no partner"),
        (["a a"], ["c"], ((4, 4), (4,)), "named twice"),
        (["a b"], ["c"], ((4,), (4,)), "the view has 2 dims"),
        (["(a b)"], ["c"], ((4,), (4,)), "give all but one"),
        (["(n b)"], ["c"], ((4,), (4,)), "multiple of 3"),
        (["a"], ["c d"], ((4,), (4, 2)), "that the source lacks"),
        (["a"], ["c"], ((4,), (5,)), "4 long in the source"),
        (["a", "a[:9]"], ["c"], ((4,), (4,)), "is outside"),
        (["a", "x[:1]"], ["c"], ((4,), (4,)), "no factor 'x'"),
        (["a", "nonsense"], ["c"], ((4,), (4,)), "a slice like"),
        (["a", "a[z]"], ["c"], ((4,), (4,)), "'z' is not known"),
        (["a", "a[__import__('os')]"], ["c"], ((4,), (4,)), "only names"),
    ],
)
def test_views_that_are_refused(source, target, shapes, says):
    with pytest.raises(SpecSyntaxError) as error:
        views_of(source, target, shapes[0], shapes[1], {"n": 3})
    assert says in str(error.value)


def elements(view: View) -> dict[int, int]:
    """Return source to target index of each element of an equation between tensors of one dim."""
    pairs = {}
    for index in itertools.product(*map(range, view.shape)):
        ends = []
        for side in (view.source, view.target):
            at = 0
            for factor in side.dims[0]:
                at = at * factor.size + factor.start + index[factor.axis]
            ends.append(at)
        pairs[ends[0]] = ends[1]
    return pairs


def test_two_equations_are_one_where_a_slice_has_several_factors():
    """Rows of heads leave one fused tensor and enter a slice of another one, and back."""
    composed_ones = 0
    for g, q, d, more in itertools.product((1, 2, 3), (1, 2, 3), (1, 2), (0, 1, 2)):
        rows, sizes = g * q * d, {"g": g, "q": q, "d": d}
        fused = (g * (q + more) * d,)
        first = views_of(["(g r d)", f"r[{more}:]"], ["(g q d)"], fused, (rows,), sizes)
        for start, behind in itertools.product(range(7), (0, 1, 4)):
            length = start + rows + behind
            slice_ = ["x", f"x[{start}:{start + rows}]"]
            second = views_of(["x"], slice_, (rows,), (length,), {})
            for a, b in ((first, second), (turned(second), turned(first))):
                both = composed(a, b)
                assert (both is None) == bool(start % (q * d)), (g, q, d, start)
                if both is not None:
                    composed_ones += 1
                    then = elements(b)
                    assert elements(both) == {x: then[y] for x, y in elements(a).items()}
    assert composed_ones > 500


def turned(view: View) -> View:
    return View(view.shape, view.target, view.source)


def test_maps_in_turn_give_what_each_gives_after_the_other():
    """Rename, fuse, rename, transpose and pad: as one plan, and map by map."""
    texts = [
        '[[map]]\nsource = "a.{i}"\ntarget = "q.{i}"\n[[map]]\nsource = "n"\ntarget = "norm"',
        '[[map]]\nsource = ["q.{i}", "r c"]\ntarget = ["qkv", "(s r) c", "s[{i}]"]\n'
        '[[map]]\nsource = "norm"\ntarget = "norm"\n[sizes]\ns = 3',
        '[[map]]\nsource = ["qkv", "r c"]\ntarget = ["t", "c r"]\n'
        '[[map]]\nsource = "norm"\ntarget = ["pad", "x", "x[:4]"]\n'
        '[[zeros]]\ntarget = ["pad", "x", "x[4:]"]\n[sizes]\nx = 6',
    ]
    maps = [NameMap.parse(text) for text in texts]
    mesh, other = DeviceMesh(range(4), (2, 2)), DeviceMesh([7, 3], (2,))
    whole = {f"a.{i}": torch.randn(4, 6) for i in range(3)} | {"n": torch.randn(4)}
    state = {n: DTensor(w, mesh, "[S0,S1]" if w.dim() > 1 else "[S0]") for n, w in whole.items()}
    rules = {"*": "[S0,...]", "t": "[R,S0]"}
    wanted: dict[str, Any] = dict(state)
    for map_ in maps:
        wanted = plan_reshard(wanted, (other, {}), names=map_).run(wanted)
    plan = plan_reshard(state, (other, rules), names=maps)
    got, receipt = plan.run(state, receipt=True)
    assert got.keys() == wanted.keys() == {"t", "pad"}
    for name, tensor in got.items():
        assert torch.equal(tensor.to_global(), wanted[name].to_global()), name
    assert receipt.digests["t"].shape == (6, 12)
    assert torch.equal(
        reshard_state(state, rules, device_mesh=other, names=maps)["t"].to_global(),
        torch.cat([whole[f"a.{i}"] for i in range(3)]).t(),
    )
    apart = NameMap.parse(
        '[[map]]\nsource = ["qkv", "(b r) c", "b[{k}]"]\ntarget = ["x.{k}", "r c"]\n'
        '[[map]]\nsource = "norm"\ntarget = "norm"\n[sizes]\nb = 2'
    )
    with pytest.raises(LayoutError, match="one plan for each map"):
        plan_reshard(state, (other, {}), names=[*maps[:2], apart])
    for wrong in ("text", [], [1]):
        with pytest.raises(LayoutError, match="names= is a"):
            plan_reshard(state, (other, {}), names=wrong)  # type: ignore[arg-type]
