"""Digests of checkpoints and state dicts: the same whatever the layout, format and names."""

import json
from itertools import product

import pytest
import torch
from click.testing import CliRunner

from shardspec import (
    DeviceMesh,
    Digests,
    DTensor,
    Layout,
    NameMap,
    ShardingSpec,
    digest,
    merge,
    model_names,
    reshard,
    save_sharded,
)
from shardspec.checkpoint.compare.digest import read_digests
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError, LayoutError, OutputExistsError
from shardspec.resharding.digests import TensorDigest
from tests.dist.processes import run_ranks
from tests.families.maps import load_map

MESH = DeviceMesh(range(6), (2, 3))


def values(shape, dtype):
    width = torch.empty(0, dtype=dtype).element_size()
    torch.manual_seed(len(shape))
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, width), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int32,
]
STATE = {
    f"{number}.{dtype}".replace("torch.", ""): values(shape, dtype)
    for number, (dtype, shape) in enumerate(product(DTYPES, [(), (5,), (7, 4), (0, 3), (3, 5, 2)]))
}
SPECS = ["S0", "S1", "S01", "S10", "R"]


def cut(state, spec, mesh=MESH):
    return {
        n: DTensor(t, mesh, f"[{spec}{',R' * (t.dim() - 1)}]") if t.dim() else t
        for n, t in state.items()
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    at = tmp_path_factory.mktemp("digests")
    save_sharded(cut(STATE, "S01"), at / "ckpt", digests=at / "saved.json")
    return at


@pytest.mark.parametrize("spec", SPECS)
def test_every_spec_has_the_same_digests(spec):
    assert digest(cut(STATE, spec)) == digest(STATE)
    last = {
        n: DTensor(t, MESH, f"[{'R,' * (t.dim() - 1)}{spec}]") if t.dim() else t
        for n, t in STATE.items()
    }
    assert digest(last) == digest(STATE)


def test_memory_with_gaps_counts_by_its_elements():
    w = torch.arange(60.0).view(6, 10)
    c = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    state = {"a": w.T, "b": w[::2, 1::3], "c": c.conj(), "d": w[1].expand(4, 10)}
    assert digest(state) == digest(
        {n: t.resolve_conj().contiguous().clone() for n, t in state.items()}
    )
    layout = Layout(MESH, "[S(0){4,2},R]", (6, 10), "float32")
    whole = DTensor(w, MESH, "[R,R]").redistribute("[S(0){4,2},R]")
    assert whole.layout == layout
    assert digest({"w": whole}) == digest({"w": w})


def test_what_is_saved_and_written_has_the_digests_of_what_is_read(place):
    due = digest(STATE)
    assert read_digests(place / "saved.json") == digest(place / "ckpt") == due
    outputs: tuple[tuple[str, str | None, int], ...] = (
        ("a.safetensors", None, 1),
        ("a.pt", None, 2),
        ("hf", "huggingface", 3),
        ("dcp", "dcp", 2),
    )
    for name, format, threads in outputs:
        report = merge(
            place / "ckpt",
            place / name,
            format=format,
            threads=threads,
            digests=place / "w.json",
            overwrite=True,
        )
        assert report.digests == read_digests(place / "w.json") == due == digest(place / name), name
    onto = ("shardspec", "dcp")
    for to in onto:
        report = reshard(
            place / "dcp",
            place / "cut",
            device_mesh=MESH,
            rules={"17.*": "[S10,R]"},
            format=to,
            digests=place / "w.json",
            overwrite=True,
        )
        assert report.digests == due == digest(place / "cut")
    floats = ["*.float32", "*.bfloat16"]
    report = merge(
        place / "ckpt",
        place / "cast.safetensors",
        dtype="bf16",
        include=floats,
        digests=place / "c.json",
    )
    assert (
        report.digests
        == digest(place / "cast.safetensors")
        != digest(place / "ckpt", include=floats)
    )


def test_tied_tensors_are_each_in_the_digests(tmp_path):
    t = torch.randn(4, 4)
    torch.save({"a": t, "b": t, "n": torch.zeros(0)}, tmp_path / "tied.pt")
    report = merge(tmp_path / "tied.pt", tmp_path / "out.pt", digests=tmp_path / "d.json")
    assert report.digests == digest({"a": t, "b": t, "n": torch.zeros(0)})


def llama():
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "vocab_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    rows = {"q": (32, 32), "k": (8, 32), "v": (8, 32), "o": (32, 32)}
    shapes = {
        "model.embed_tokens.weight": (64, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (64, 32),
    }
    for i in range(2):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{n}_proj.weight": shape for n, shape in rows.items()}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (48, 32) for n in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (32, 48)}
        shapes |= {f"{at}.{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
    return {n: torch.randn(shape) for n, shape in shapes.items()}, sizes


@pytest.mark.parametrize("name", ["llama-hf-to-megatron", "llama-hf-to-fused"])
def test_names_of_another_model_have_the_digests_that_the_map_makes(tmp_path, name):
    state, sizes = llama()
    map_, due = load_map(name, sizes), digest(state)
    save_sharded(cut(state, "S0"), tmp_path / "hf")
    merge(tmp_path / "hf", tmp_path / "other.safetensors", names=map_)
    there = digest(tmp_path / "other.safetensors")
    assert there != due
    assert (
        digest(state, names=map_)
        == digest(cut(state, "S1"), names=map_)
        == digest(tmp_path / "hf", names=map_)
        == there
    )
    assert digest(tmp_path / "other.safetensors", names=map_.reversed()) == due
    config = {"model_type": "llama", **sizes}
    by_config = model_names(config, "fused" if name.endswith("fused") else "megatron")
    for source in (state, cut(state, "S1"), tmp_path / "hf", tmp_path / "other.safetensors"):
        assert digest(source, names=by_config) == there


PADDED = """
[[map]]
source = ["w", "n c"]
target = ["w", "r c", "r[:n]"]
[[zeros]]
target = ["w", "r c", "r[n:]"]
[sizes]
r = 8
n = 5
"""


def test_padding_of_a_map_counts_as_zeros():
    w = torch.randn(5, 3)
    map_ = NameMap.parse(PADDED)
    assert digest({"w": w}, names=map_) == digest({"w": torch.cat([w, torch.zeros(3, 3)])})


def test_what_has_no_digest_is_refused(tmp_path):
    w = torch.randn(4, 3)
    shards = {d: torch.full((3,), float(d)) for d in range(6)}
    spec = ShardingSpec(1, {}, partial={0: "sum", 1: "sum"})
    pending = DTensor.from_shards(shards, Layout(MESH, spec, (3,), "float32"))
    with pytest.raises(CheckpointError, match="reduction pending"):
        digest({"w": pending})
    with pytest.raises(CheckpointError, match="reduction pending"):
        save_sharded({"w": pending}, tmp_path / "pending", digests=tmp_path / "p.json")
    save_sharded({"w": pending}, tmp_path / "pending")
    with pytest.raises(LayoutError, match="reduction pending"):
        digest(tmp_path / "pending")
    differ = DTensor.from_shards(shards, Layout(MESH, "[R]", (3,), "float32"))
    with pytest.raises(CheckpointError, match="'w': its copies of box"):
        digest({"w": differ})
    with pytest.raises(LayoutError, match="seed=-1"):
        digest({"w": w}, seed=-1)
    with pytest.raises(LayoutError, match="are for checkpoints"):
        digest({"w": w}, include="w")
    with pytest.raises(CheckpointError, match="lacks"):
        digest({"w": w}, names={"x": "y"})
    assert digest({"w": w}, names={"w": "y"}) == digest({"y": w})
    save_sharded({"w": w}, tmp_path / "ckpt")
    (tmp_path / "d.json").write_text("{}")
    for output, problem in (
        ("d.json", "exists"),
        ("out/d.json", "would be inside the output"),
        ("no/d.json", "does not exist"),
    ):
        kind = OutputExistsError if output == "d.json" else CheckpointError
        with pytest.raises(kind, match=problem):
            merge(
                tmp_path / "ckpt", tmp_path / "out", format="huggingface", digests=tmp_path / output
            )
        assert not (tmp_path / "out").exists()
    with pytest.raises(OutputExistsError):
        save_sharded({"w": w}, tmp_path / "other", digests=tmp_path / "d.json")
    assert not (tmp_path / "other").exists()


def run(*args):
    return CliRunner().invoke(cli, list(map(str, args)), prog_name="shardspec")


def test_the_command_writes_digests_that_verify_takes(place, tmp_path):
    done = run("digest", place / "ckpt", "-o", tmp_path / "d.json")
    due = digest(STATE)
    assert done.exit_code == 0, done.output
    assert ": 40 tensors, " in done.output
    assert f"digest {due.value}\n" in done.output
    assert json.loads(run("digest", place / "ckpt", "--json").output) == due.to_json()
    again = run("digest", place / "ckpt", "-o", tmp_path / "d.json")
    assert again.exit_code == 3
    assert "exists" in again.output
    merge(place / "ckpt", tmp_path / "m.safetensors")
    good = run("verify", tmp_path / "m.safetensors", "--digests", tmp_path / "d.json")
    assert good.exit_code == 0, good.output
    assert f"and the same as {tmp_path / 'd.json'}" in good.output
    with open(tmp_path / "m.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    bad = run("verify", tmp_path / "m.safetensors", "--digests", tmp_path / "d.json")
    assert bad.exit_code == 3
    assert "Error: " in bad.output
    assert "in one and" in bad.output
    every = run("verify", tmp_path / "m.safetensors", "--digests", tmp_path / "d.json", "--all")
    assert every.exit_code == 3
    assert "1 problem" in every.output
    assert run("verify", place / "ckpt", "--map", "m.toml").exit_code == 2
    assert run("verify", place / "ckpt", "--digests", tmp_path / "m.safetensors").exit_code == 3


def parts_of_two_jobs(rank, directory, half):
    """Write the digests of one half of the columns, in a job that knows of no other."""
    mesh, whole = DeviceMesh(range(2), (2,)), torch.arange(40.0).view(5, 8)
    own = DTensor(whole[:, 4 * half : 4 * half + 4], mesh, "[S0,R]")
    shard, ((lo, hi), (_, width)) = own.to_local().numpy(), own.layout.box(rank)
    box = ((lo, hi), (4 * half, 4 * half + width))
    wide = TensorDigest.of_box(shard, box, (5, 8), "float32")
    part = Digests({"wide": wide}) + digest({f"of job {half}": own}, part=True)
    place = directory / f"{half}{rank}.json"
    place.write_text(json.dumps(part.to_json()))


def test_ranks_of_two_jobs_write_parts_that_the_command_adds_up(tmp_path):
    for half in (0, 1):
        (tmp_path / f"{half}").mkdir()
        run_ranks(2, tmp_path / f"{half}", parts_of_two_jobs, tmp_path, half)
    files = [tmp_path / f"{half}{rank}.json" for half in (0, 1) for rank in (0, 1)]
    whole = torch.arange(40.0).view(5, 8)
    due = digest({"wide": whole, "of job 0": whole[:, :4], "of job 1": whole[:, 4:]})
    done = run("digest", "--add", *files, "-o", tmp_path / "all.json")
    assert (done.exit_code, due.value in done.output) == (0, True), done.output
    assert read_digests(tmp_path / "all.json") == due
    for wrong, name in ((files[:3], "'of job 1'"), (files[2:], "'wide'"), (files * 2, "'of job")):
        refused = run("digest", "--add", *wrong, "-o", tmp_path / "no.json")
        assert (refused.exit_code, name in refused.output) == (3, True), refused.output
        assert not (tmp_path / "no.json").exists()
    save_sharded({"wide": whole}, tmp_path / "ckpt")
    partial = run("verify", tmp_path / "ckpt", "--digests", files[0], "--include", "wide")
    assert partial.exit_code == 3
    assert run("digest", *files).exit_code == 2
    assert run("digest", "--add", *files, "--include", "wide").exit_code == 2
    with pytest.raises(LayoutError, match="include="):
        digest(tmp_path / "ckpt", part=True)
