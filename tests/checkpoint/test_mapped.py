"""Checkpoints by name maps, against the conversions written by hand in numpy."""

import json
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from shardspec import (
    DeviceMesh,
    DTensor,
    Layout,
    NameMap,
    load_sharded,
    merge,
    reshard,
    save_sharded,
)
from shardspec.checkpoint.open import open_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError, LayoutError
from tests.families.maps import load_map
from tests.resharding.test_shipped import CASES, V, sizes_of

SQUARE, THREE = DeviceMesh([4, 1, 0, 2], (2, 2)), DeviceMesh([1, 3, 2], (3,))


def spec_of(shape: tuple[int, ...], place: int) -> str:
    """Return one spec or another, parts and blocks among them."""
    rows, *rest = shape
    first = (f"S0{{{rows - 1},1}}", "S01", "S10*2", "S0", "R")[place % 5]
    other = "S1" if "1" not in first.partition("{")[0] and place % 2 else "R"
    return f"[{','.join([first, *([other] + ['R'] * 9)[: len(rest)]])}]"


@pytest.mark.parametrize("name", CASES)
def test_every_shipped_map_on_disk(tmp_path, name):
    state, convert = CASES[name]
    vocab = V + 3 * name.endswith("megatron")
    map_ = load_map(name, {**sizes_of(name), "padded_vocab": vocab})
    wanted = convert(state, vocab)
    cut = {
        n: DTensor(torch.tensor(array), SQUARE, spec_of(array.shape, at))
        for at, (n, array) in enumerate(state.items())
    }
    save_sharded(cut, tmp_path / "ckpt")
    report = merge(tmp_path / "ckpt", tmp_path / "merged.safetensors", names=map_)
    assert report.left_out == ()
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == wanted.keys()
    for n, array in wanted.items():
        assert np.array_equal(merged[n].numpy(), array), n
    # Back again, of one whole file.
    merge(tmp_path / "merged.safetensors", tmp_path / "back.safetensors", names=map_.reversed())
    for n, tensor in load_file(tmp_path / "back.safetensors").items():
        assert np.array_equal(tensor.numpy(), state[n]), n
    rules = {n: f"[{','.join(['S0'] + ['R'] * (a.ndim - 1))}]" for n, a in wanted.items()}
    loaded = load_sharded(tmp_path / "ckpt", THREE, rules, names=map_)
    reshard(tmp_path / "ckpt", tmp_path / "cut", device_mesh=THREE, rules=rules, names=map_)
    for found in (loaded, load_sharded(tmp_path / "cut")):
        assert found.keys() == wanted.keys()
        for n, array in wanted.items():
            assert found[n].layout == Layout(THREE, rules[n], array.shape, "float32")
            assert np.array_equal(found[n].to_global().numpy(), array), n
    into = {n: DTensor(torch.zeros(a.shape), THREE, rules[n]) for n, a in wanted.items()}
    load_sharded(tmp_path / "ckpt", into=into, names=map_)
    assert all(np.array_equal(into[n].to_global().numpy(), wanted[n]) for n in wanted)


@pytest.mark.parametrize("model", ["llama", "qwen2", "mixtral", "gpt2", "gpt-neox"])
def test_by_the_config_alone_from_everywhere_to_everywhere(tmp_path, model):
    """GPT-2 has the same names in files and in engines, where its matrices are transposed."""
    state, to_megatron = CASES[f"{model}-hf-to-megatron"]
    tied = {"lm_head.weight"} if model == "gpt2" else set()
    files = {n: array for n, array in state.items() if n not in tied}
    forms = {
        "hf": files,
        "megatron": to_megatron(state, V),
        "fused": CASES[f"{model}-hf-to-fused"][1](state, V),
    }
    config = {**sizes_of(model), "model_type": model.replace("-", "_")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source, target in product(forms, repeat=2):
        tensors = {n: np.ascontiguousarray(array) for n, array in forms[source].items()}
        save_arrays(tensors, tmp_path / "a.safetensors")
        out = tmp_path / f"{source}-{target}.safetensors"
        words = ["--model", str(tmp_path), "--names", target]
        result = CliRunner().invoke(
            cli, ["merge", str(tmp_path / "a.safetensors"), "-o", str(out), *words]
        )
        assert result.exit_code == 0, result.output
        got = load_file(out)
        assert got.keys() == forms[target].keys(), (source, target)
        for n, array in forms[target].items():
            assert np.array_equal(got[n].numpy(), array), (source, target, n)


ORDERS = list(permutations("abc"))


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_and_grouping_of_factors(tmp_path, order, every):
    """Views of three factors between dims of every grouping, from every spec of a small space."""
    sizes = {"a": 2, "b": 3, "c": 4}
    whole = torch.arange(24, dtype=torch.int32)
    groupings = list(enumerate(product(((3,), (1, 2), (2, 1), (1, 1, 1)), repeat=2)))
    # Of one order these, of the next one others.
    for place, (left, right) in groupings[ORDERS.index(order) % every :: every]:

        def text(names, groups):
            parts, at = [], 0
            for count in groups:
                inner = " ".join(names[at : at + count])
                parts.append(f"({inner})" if count > 1 else inner)
                at += count
            return " ".join(parts)

        def shape(names, groups):
            ends = [sum(groups[:n]) for n in range(len(groups) + 1)]
            return [int(np.prod([sizes[x] for x in names[i:j]])) for i, j in pairwise(ends)]

        source = whole.reshape(shape("abc", left))
        turned = whole.reshape(2, 3, 4).permute(["abc".index(x) for x in order])
        target = turned.reshape(shape(order, right))
        # A factor is two pieces, each an equation by itself.
        view, onto = text("abc", left), text(order, right)
        map_ = NameMap(
            tuple((("x", view, cut), ("y", onto, cut)) for cut in ("b[:1]", "b[1:]")), sizes
        )
        rest = ["R"] * (source.ndim - 1)
        first = f"S1{{1,{source.shape[0] - 1}}}*2" if place % 2 else "S01"
        spec = f"[{','.join([first, *rest])}]"
        save_sharded({"x": DTensor(source, SQUARE, spec)}, tmp_path / f"{place}")
        merge(tmp_path / f"{place}", tmp_path / f"{place}.safetensors", names=map_)
        got = load_file(tmp_path / f"{place}.safetensors")["y"]
        assert torch.equal(got, target), (view, onto, spec)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_padding_of_every_width_is_zero(tmp_path, dtype):
    whole = torch.arange(1, 13).view(3, 4).to(dtype)
    text = (
        '[[map]]\nsource = ["a", "x y"]\ntarget = ["b", "(y n) m", "n[1]", "m[1:4]"]\n'
        '[[zeros]]\ntarget = ["b", "(y n) m", "n[0]"]\n'
        '[[zeros]]\ntarget = ["b", "(y n) m", "n[1]", "m[:1]"]\n'
        '[[zeros]]\ntarget = ["b", "(y n) m", "n[1]", "m[4:]"]\n'
        "[sizes]\nn = 2\nm = 6\ny = 4\n"
    )
    save_file({"a": whole}, tmp_path / "a.safetensors")
    report = merge(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", names=NameMap.parse(text)
    )
    # No file has the padding.
    assert {Path(name).name: size for name, size in report.reads.items()} == {
        "a.safetensors": whole.nbytes
    }
    wanted = torch.zeros(8, 6, dtype=dtype)
    wanted[1::2, 1:4] = whole.T
    assert torch.equal(load_file(tmp_path / "b.safetensors")["b"], wanted)


def test_a_map_may_be_names_alone(tmp_path):
    save_sharded({"a": torch.arange(3), "b": torch.ones(2), "step": 7}, tmp_path / "c")
    merge(tmp_path / "c", tmp_path / "m.safetensors", names={"a": "z"})
    assert {n: t.tolist() for n, t in load_file(tmp_path / "m.safetensors").items()} == {
        "z": [0, 1, 2],
        "b": [1, 1],
    }
    assert load_sharded(tmp_path / "c", names={"a": "z"}, rules={"*": "[R]"})["z"].shape == (3,)
    with pytest.raises(LayoutError, match="names= maps 'q', which"):
        merge(tmp_path / "c", tmp_path / "n.safetensors", names={"q": "z"})


def test_what_a_map_cannot_make_is_refused_before_anything_is_written(tmp_path):
    state = {"a": torch.arange(6), "b": torch.ones(2), "c": torch.ones(3)}
    save_file(state, tmp_path / "in.safetensors")
    hole = '[[map]]\nsource = "a"\ntarget = ["y", "n", "n[:6]"]\n[sizes]\nn = 8\n'
    cases = {
        hole: r"the map is not total: 'y': nothing is written at index \(6,\)",
        '[[map]]\nsource = "q"\ntarget = "y"\n': "names no tensor of .* start with 'a', 'b', 'c'",
        '[[unused]]\nsource = "c"\n'
        + hole.replace(
            "[sizes]", '[[map]]\nsource = ["b", "k"]\ntarget = ["y", "n", "n[6:]"]\n[sizes]'
        ): "of int64 and of",
    }
    for text, message in cases.items():
        with pytest.raises(LayoutError, match=message):
            merge(
                tmp_path / "in.safetensors", tmp_path / "out.safetensors", names=NameMap.parse(text)
            )
        assert not (tmp_path / "out.safetensors").exists()
    pending = DTensor.from_local(torch.ones(2), DeviceMesh([0], (1,)), "[R|P0]")
    save_sharded({"p": pending}, tmp_path / "p")
    with pytest.raises(LayoutError, match="'p' is stored with a reduction pending"):
        merge(tmp_path / "p", tmp_path / "out.safetensors", names={"p": "q"})
    # What the map does not use has to be named; damage of what it uses is found.
    map_ = NameMap.parse(
        '[[map]]\nsource = ["a", "(x y)"]\ntarget = ["y", "y x"]\n[sizes]\nx = 2\n'
    )
    with pytest.raises(LayoutError, match="does not use 'b', 'c'"):
        merge(tmp_path / "in.safetensors", tmp_path / "y.safetensors", names=map_)
    merge(tmp_path / "in.safetensors", tmp_path / "y.safetensors", names=map_, drop=["b", "[cd]"])
    assert load_file(tmp_path / "y.safetensors")["y"].tolist() == [[0, 3], [1, 4], [2, 5]]
    save_sharded({"a": torch.arange(6)}, tmp_path / "ckpt")
    (shard,) = (tmp_path / "ckpt").glob("shard-*")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="has CRC-32"):
        merge(tmp_path / "ckpt", tmp_path / "d.safetensors", names=map_)


@pytest.mark.parametrize("name", ["llama-hf-to-fused", "a", ""])
def test_the_name_of_a_map_is_no_map(tmp_path, name):
    save_sharded({"w": DTensor(torch.zeros(4), SQUARE, "[S0]")}, tmp_path / "ckpt")
    for call in (
        lambda: merge(tmp_path / "ckpt", tmp_path / "out.safetensors", names=name),
        lambda: load_sharded(tmp_path / "ckpt", THREE, {}, names=name),
    ):
        # What goes wrong on a rank that loads is an error of the checkpoint on all.
        with pytest.raises((LayoutError, CheckpointError), match="give a NameMap"):
            call()
    assert not (tmp_path / "out.safetensors").exists()


def test_on_the_command_line(tmp_path):
    state, convert = CASES["llama-hf-to-fused"]
    cut = {n: DTensor(torch.tensor(a), SQUARE, spec_of(a.shape, 3)) for n, a in state.items()}
    save_sharded(cut, tmp_path / "ckpt")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**sizes_of("llama"), "model_type": "llama"}))
    by = ["--model", config]

    def run(*arguments: object) -> None:
        result = CliRunner().invoke(cli, [*map(str, arguments), "--quiet"])
        assert result.exit_code == 0, result.output

    qkv = {"*qkv_proj.weight": "[S0{24,8,8},R]", "*gate_up_proj.weight": "[S0{10,10},R]"}
    rules = [word for pair in qkv.items() for word in ("--rule", *pair)]
    call = ["reshard", tmp_path / "ckpt", "-o", tmp_path / "served", "--mesh", 2, *rules, *by]
    run(*call, "--names", "fused")
    wanted = convert(state, V)
    for name, tensor in load_sharded(tmp_path / "served").items():
        assert np.array_equal(tensor.to_global().numpy(), wanted[name])
        if "qkv_proj.weight" in name:
            q, k, v = np.split(wanted[name], [24, 32])
            mine = np.concatenate([np.split(x, 2)[1] for x in (q, k, v)])
            assert np.array_equal(tensor.shards[1].numpy(), mine)
    run("merge", tmp_path / "served", "-o", tmp_path / "m.safetensors", *by)
    for name, tensor in load_file(tmp_path / "m.safetensors").items():
        assert np.array_equal(tensor.numpy(), state[name])


def test_a_map_that_cuts_a_tensor_into_millions_of_pieces_is_refused(tmp_path):
    size = 1 << 21
    save_file({"a": torch.zeros(4 * size, dtype=torch.uint8)}, tmp_path / "a.safetensors")
    text = (
        '[[map]]\nsource = ["a", "(x y z)"]\ntarget = ["b", "(y x z)"]\n'
        f"[sizes]\nx = 2\nz = 2\ny = {size}\n"
    )
    with pytest.raises(LayoutError, match="more than 1,048,576 pieces"):
        merge(tmp_path / "a.safetensors", tmp_path / "b.safetensors", names=NameMap.parse(text))
    assert not (tmp_path / "b.safetensors").exists()


def test_files_in_folders_that_an_index_names_count_as_those_beside_it(tmp_path):
    """Under other names they were taken for removed."""
    home = tmp_path / "model"
    (home / "deep").mkdir(parents=True)
    save_file({"a": torch.arange(3.0)}, home / "a.safetensors")
    save_file({"b": torch.arange(4.0)}, home / "deep" / "b.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "deep/b.safetensors"}}
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    merge(home, tmp_path / "out.safetensors", names={"b": "c"})
    found = load_file(tmp_path / "out.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [0, 1, 2],
        "c": [0, 1, 2, 3],
    }
    source = open_checkpoint(home)
    save_file({"b": torch.ones(4)}, home / "deep" / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: changed while it was read"):
        merge(source, tmp_path / "again.safetensors", names={"b": "c"})
    assert not (tmp_path / "again.safetensors").exists()
