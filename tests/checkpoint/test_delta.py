"""Deltas: what changed between two checkpoints, written, applied, and refused where it is wrong."""

import json
import os
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash
import zstandard
from click.testing import CliRunner

from shardspec import (
    DeviceMesh,
    DTensor,
    apply_delta,
    delta,
    digest,
    merge,
    save_sharded,
)
from shardspec.checkpoint.convert.copy import Buffers, read_box_into
from shardspec.checkpoint.deltas.apply import with_deltas
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError, LayoutError, OutputExistsError
from tests.dist.processes import run_ranks

INDEX = "model.safetensors.index.json"
MESH = DeviceMesh(range(4), (2, 2))


def state(version):
    torch.manual_seed(0)
    found = {
        "a": torch.randn(300, 40).bfloat16(),
        "b": torch.randn(2, 3, 5),
        "n": torch.randn(9),
        "s": torch.tensor(1.0),
        "e": torch.zeros(0, 4),
        "large": torch.randn(700, 1000).bfloat16(),
    }
    for number in range(version):
        found["a"][number::17, 3] += 1
        found["large"].view(-1)[number * 1000 :: 5003] *= 2
        if number == 1:
            found["b"][1, 0, 0] = 0
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    at = tmp_path_factory.mktemp("deltas")
    for version in range(4):
        cut = {
            n: DTensor(t, MESH, f"[S{version % 2}{',R' * (t.dim() - 1)}]") if t.dim() else t
            for n, t in state(version).items()
        }
        save_sharded(cut, at / f"v{version}")
    merge(at / "v0", at / "base.safetensors")
    for encoding in ("xor", "overwrite"):
        for checksum in ("xxh3-128", "adler32"):
            for version in (1, 2, 3):
                delta(
                    at / f"v{version - 1}",
                    at / f"v{version}",
                    at / f"{encoding}-{checksum}-{version}",
                    version=version,
                    encoding=encoding,
                    checksum=checksum,
                )
    return at


def chain(place, last=3, kind="xor-xxh3-128"):
    return [place / f"{kind}-{version}" for version in range(1, last + 1)]


@pytest.mark.parametrize(
    "kind", ["xor-xxh3-128", "xor-adler32", "overwrite-xxh3-128", "overwrite-adler32"]
)
@pytest.mark.parametrize("base", ["v0", "base.safetensors"])
def test_a_chain_of_deltas_makes_the_later_checkpoint(place, tmp_path, base, kind):
    for last in (1, 3):
        report = apply_delta(
            place / base, chain(place, last, kind), tmp_path / f"{last}.safetensors", threads=last
        )
        assert report.tensors == 6
        assert digest(tmp_path / f"{last}.safetensors") == digest(state(last))


def test_files_are_laid_out_as_others_read_them(place):
    index = json.loads((place / "xor-xxh3-128-2" / INDEX).read_text())
    about = index["metadata"]
    assert (about["version"], about["base_version"]) == ("000002", "000001")
    assert (about["delta_encoding"], about["compression_format"], about["checksum_format"]) == (
        "xor",
        "zstd",
        "xxh3-128",
    )
    assert about["base_digest"] == digest(state(1)).value
    assert about["digest"] == digest(state(2)).value
    changed = {name: digest(state(2))[name].value for name in ("a", "b", "large")}
    assert about["tensor_digests"] == changed
    assert index["weight_map"] == dict.fromkeys(
        ("a", "b", "large"), "model-00000-of-00001.safetensors"
    )
    file = place / "xor-xxh3-128-2" / "model-00000-of-00001.safetensors"
    with safetensors.safe_open(file, "np") as opened:
        sums = opened.metadata()
        for name in ("a", "b", "large"):
            new, old = (state(v)[name].view(torch.uint8).numpy().reshape(-1) for v in (2, 1))
            frame = opened.get_tensor(name).tobytes()
            # One shot, without a size: as slime does.
            assert zstandard.ZstdDecompressor().decompress(frame) == (new ^ old).tobytes()
            assert sums[name] == xxhash.xxh3_128(new.tobytes()).hexdigest()
    with safetensors.safe_open(place / "overwrite-adler32-2" / file.name, "np") as opened:
        plain = zstandard.ZstdDecompressor().decompress(opened.get_tensor("a").tobytes())
        new, old = (state(v)["a"].view(torch.uint8).numpy().reshape(-1) for v in (2, 1))
        at = np.flatnonzero(new != old)
        assert (
            plain
            == np.array([len(at)], "<u4").tobytes() + at.astype("<u4").tobytes() + new[at].tobytes()
        )


def test_deltas_of_tensors_in_memory_are_those_of_checkpoints(place, tmp_path):
    """Plain tensors, and DTensors of which this process has all shards."""
    new = state(2)
    new["a"] = DTensor(new["a"], MESH, "[S1,S0]")
    new["large"] = DTensor(new["large"], MESH, "[R,S01]")
    new["b"] = new["b"].transpose(0, 2).contiguous().transpose(0, 2)
    delta(state(1), new, tmp_path / "live", version=2)
    for file in (place / "xor-xxh3-128-2").iterdir():
        assert (tmp_path / "live" / file.name).read_bytes() == file.read_bytes()
    delta(place / "v1", new, tmp_path / "mixed", version=2)
    assert (tmp_path / "mixed" / INDEX).read_bytes() == (tmp_path / "live" / INDEX).read_bytes()
    pending = DTensor.from_local(dict.fromkeys(MESH.ids, torch.ones(9)), MESH, "[R|P0]")
    with pytest.raises(LayoutError, match="pending"):
        delta(state(1), {**new, "n": pending}, tmp_path / "no", version=2)
    assert not (tmp_path / "no").exists()


def delta_of_one_rank(rank, place):
    """In a job, rank 1 writes a delta of plain tensors by itself."""
    if rank == 1:
        delta(state(1), state(2), place / "alone", version=2)


def test_plain_tensors_are_whole_on_each_rank_of_a_job(place, tmp_path):
    run_ranks(2, tmp_path, delta_of_one_rank, tmp_path)
    for file in (place / "xor-xxh3-128-2").iterdir():
        assert (tmp_path / "alone" / file.name).read_bytes() == file.read_bytes()


def test_where_nothing_changed_there_is_no_file(place, tmp_path):
    report = delta(place / "v1", place / "v1", tmp_path / "same", version=5, base_version=2)
    assert (report.changed, report.written_bytes) == (0, 0)
    assert os.listdir(tmp_path / "same") == [INDEX]
    apply_delta(place / "v1", [tmp_path / "same"], tmp_path / "out")
    assert digest(tmp_path / "out") == digest(state(1))


def test_parts_of_a_changed_tensor_are_read_in_any_order(place):
    """A frame is read from its beginning; what is made of it is the same wherever one begins."""
    tensor = with_deltas(open_checkpoint(place / "v0"), chain(place)).tensor("large")
    want = state(3)["large"]
    boxes = [((600, 700), (0, 1000)), ((0, 5), (0, 1000)), ((3, 650), (10, 990))]
    for box in boxes:
        ((top, bottom), (left, right)) = box
        room = bytearray(2 * (bottom - top) * (right - left))
        with OpenFiles() as files:
            read_box_into(tensor, box, memoryview(room), files, Buffers())
        assert room == want[top:bottom, left:right].contiguous().view(torch.uint8).numpy().tobytes()


def test_chains_with_gaps_circles_and_other_orders_are_refused(place, tmp_path):
    one, two, three = chain(place)
    wrong = [
        ([one, three], "from version 2 to 3, but .* version 1"),
        ([two, one], "from version 0 to 1, but .* version 2"),
        ([one, one], "from version 0 to 1"),
        ([place / "v0"], "cannot be read|no such"),
    ]
    delta(place / "v1", place / "v0", tmp_path / "back", version=0, base_version=1)
    wrong.append(([one, tmp_path / "back"], "version 0, as the base does"))
    delta(place / "v2", place / "v3", tmp_path / "other", version=2, base_version=1)
    wrong.append(([one, tmp_path / "other"], "starts from a checkpoint with digest"))
    for deltas, problem in wrong:
        with pytest.raises(CheckpointError, match=problem):
            apply_delta(place / "v0", deltas, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="give a list"):
        apply_delta(place / "v0", str(one), tmp_path / "out")


@pytest.mark.parametrize("name", ["a", "n"])
def test_another_base_is_refused_also_where_nothing_changed(place, tmp_path, name):
    other = state(0)
    other[name].view(-1)[1] += 1
    save_sharded(other, tmp_path / "other")
    for kind in ("xor-adler32", "overwrite-xxh3-128"):
        with pytest.raises(CheckpointError, match=r"or a file is damaged|the digest is"):
            apply_delta(tmp_path / "other", chain(place, 1, kind), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_delta_does_not_replace_what_it_is_made_of(place):
    for base, new in (("v0", "v1"), ("v1", "v0")):
        with pytest.raises(CheckpointError, match="contains the checkpoint itself"):
            delta(place / base, place / new, place / "v0", version=1, overwrite=True)


def test_names_turn_the_new_state_into_the_names_of_the_base(place, tmp_path):
    due = (place / "xor-xxh3-128-2" / INDEX).read_bytes()
    names = {name: f"module.{name}" for name in state(2)}
    back = {new: old for old, new in names.items()}
    other = {names[name]: tensor for name, tensor in state(2).items()}
    save_sharded(other, tmp_path / "other")
    for number, new in enumerate((other, tmp_path / "other")):
        delta(place / "v1", new, tmp_path / f"d{number}", version=2, names=back)
        assert (tmp_path / f"d{number}" / INDEX).read_bytes() == due
    with pytest.raises(LayoutError, match="nothing"):
        delta(place / "v1", other, tmp_path / "no", version=2, names={"nothing": "a"})
    assert not (tmp_path / "no").exists()


def test_other_names_shapes_and_dtypes_need_a_full_checkpoint(place, tmp_path):
    for change, problem in (
        ({"a": torch.zeros(300, 41).bfloat16()}, r"'a' is \[300, 40\] bfloat16 .* \[300, 41\]"),
        ({"a": torch.zeros(300, 40).half()}, "'a' is .* bfloat16 .* float16"),
        ({"x": torch.zeros(1)}, "lacks 'x'"),
    ):
        save_sharded({**state(0), **change}, tmp_path / "other", overwrite=True)
        with pytest.raises(CheckpointError, match=f"{problem}.*publish a full checkpoint"):
            delta(place / "v0", tmp_path / "other", tmp_path / "d", version=1)
        assert not (tmp_path / "d").exists()
    save_sharded({**state(0), "n": -state(0)["n"] - 3}, tmp_path / "other", overwrite=True)
    with pytest.raises(CheckpointError, match=r"'n': .* larger than the tensor"):
        delta(place / "v0", tmp_path / "other", tmp_path / "d", version=1, encoding="overwrite")
    for how, problem in (
        ({"version": -1}, "not a version"),
        ({"version": 1, "base_version": 1}, "both 1"),
        ({"version": 1, "encoding": "and"}, "no encoding"),
        ({"version": 1, "checksum": "md5"}, "md5"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            delta(place / "v0", place / "v1", tmp_path / "d", **how)
    assert os.listdir(tmp_path) == ["other"]
    delta(place / "v0", place / "v1", tmp_path / "d", version=1)
    with pytest.raises(OutputExistsError):
        delta(place / "v0", place / "v1", tmp_path / "d", version=1)
    delta(place / "v0", place / "v2", tmp_path / "d", version=2, overwrite=True)
    (tmp_path / "d" / "mine.txt").write_text("kept")
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        delta(place / "v0", place / "v2", tmp_path / "d", version=2, overwrite=True)


def rewritten(source, target, entries=None, sums=None, about=None, weight_map=None):
    """A delta with some of what it says replaced."""
    file = "model-00000-of-00001.safetensors"
    index = json.loads((source / INDEX).read_text())
    with safetensors.safe_open(source / file, "np") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in metadata}
    tensors = {n: t for n, t in {**tensors, **(entries or {})}.items() if t is not None}
    target.mkdir()
    safetensors.numpy.save_file(tensors, target / file, {**metadata, **(sums or {})})
    index["metadata"] |= about or {}
    index["metadata"] = {k: v for k, v in index["metadata"].items() if v is not None}
    index["weight_map"] = weight_map or index["weight_map"]
    (target / INDEX).write_text(json.dumps(index))
    return target


def frame(data, **how):
    return np.frombuffer(zstandard.ZstdCompressor(**how).compress(data), np.uint8)


FILE = "model-00000-of-00001.safetensors"
ALL = dict.fromkeys(("a", "large"), FILE)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"about": {"compression_format": "lz4"}}, "compression_format 'lz4'"),
        ({"about": {"delta_encoding": "add"}}, "delta_encoding 'add'"),
        ({"about": {"delta_encoding": None}}, "is a full checkpoint"),
        ({"about": {"checksum_format": "md5"}}, "md5"),
        ({"about": {"version": None}}, "no version"),
        ({"about": {"version": True}}, "no version"),
        ({"weight_map": {**ALL, "a": "../x.safetensors"}}, "do not agree"),
        ({"weight_map": {**ALL, "b": FILE}}, "do not agree on tensor 'b'"),
        ({"weight_map": {"a": FILE}}, "do not agree on tensor 'large'"),
        ({"weight_map": {**ALL, "b": "gone.safetensors"}}, "do not agree on 'gone"),
        ({"sums": {"a": "0" * 32}}, "'a': after .* instead of"),
        ({"sums": {"a": "0" * 31}}, "'a' has no xxh3-128"),
        (
            {
                "entries": {"zz": frame(b"x")},
                "sums": {"zz": "0" * 32},
                "weight_map": {**ALL, "zz": FILE},
            },
            "'zz', which .* lacks",
        ),
        (
            {"entries": {"a": frame(bytes(24001))}},
            "24001 bytes of xor, for a tensor of 24000",
        ),
        ({"entries": {"a": frame(bytes(1 << 30))}}, "1073741824 bytes"),
        (
            {"entries": {"a": frame(bytes(24000), write_content_size=False)}},
            "lacks its decompressed size",
        ),
        ({"entries": {"a": np.append(frame(bytes(24000)), np.uint8(0))}}, "the delta is damaged"),
        ({"entries": {"a": frame(bytes(24000))[:-1]}}, "cut short|damaged"),
        ({"entries": {"a": np.zeros(30, np.uint8)}}, "is damaged"),
        ({"entries": {"a": np.zeros((3, 4), np.uint8)}}, "this is not a delta"),
        ({"about": {"digest": "0" * 32}}, "the digest is"),
        ({"about": {"tensor_digests": {"a": "0" * 32}}}, "the digest is"),
        ({"about": {"tensor_digests": {"a": "0" * 31}}}, "bad: tensor 'a': .* not a digest"),
        ({"about": {"tensor_digests": {"a": 0}}}, None),
        ({"about": {"tensor_digests": []}}, "tensor_digests"),
        ({"about": {"tensor_digests": None}}, None),
    ],
)
def test_what_a_delta_says_is_checked(place, tmp_path, changes, problem):
    bad = rewritten(place / "xor-xxh3-128-1", tmp_path / "bad", **changes)
    if problem is None:
        apply_delta(place / "v0", [bad], tmp_path / "out")
        assert digest(tmp_path / "out") == digest(state(1))
        return
    with pytest.raises(CheckpointError, match=problem):
        apply_delta(place / "v0", [bad], tmp_path / "out")
    assert os.listdir(tmp_path) == ["bad"]


def test_a_stated_digest_counts_only_beside_a_checksum_that_shows_it(place, tmp_path):
    """An adler32 may be right by accident, so the digest of such a tensor is computed."""
    for kind in ("xor-xxh3-128", "xor-adler32"):
        about = json.loads((place / f"{kind}-1" / INDEX).read_text())["metadata"]
        wrong = about["tensor_digests"] | {"a": "0" * 32}
        rewritten(place / f"{kind}-1", tmp_path / kind, about={"tensor_digests": wrong})
    with pytest.raises(CheckpointError, match="the digest is"):
        apply_delta(place / "v0", [tmp_path / "xor-xxh3-128"], tmp_path / "out")
    apply_delta(place / "v0", [tmp_path / "xor-adler32"], tmp_path / "out")
    assert digest(tmp_path / "out") == digest(state(1))


def places(count, at, values):
    return np.array([count], "<u4").tobytes() + np.array(at, "<u4").tobytes() + bytes(values)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (places(3, [1, 5], [7, 7]), "3 positions and has 2"),
        (places(2, [5, 1], [7, 7]), "do not ascend"),
        (places(2, [5, 5], [7, 7]), "do not ascend"),
        (places(1, [24000], [7]), "past its 24000 bytes"),
        (places(1, [2**32 - 1], [7]), "past its 24000 bytes"),
        (places(1, [5], [7, 7]), "10 bytes of overwrite"),
        (b"", "0 bytes of overwrite"),
    ],
)
def test_positions_are_checked(place, tmp_path, data, problem):
    bad = rewritten(place / "overwrite-xxh3-128-1", tmp_path / "bad", {"a": frame(data)})
    with pytest.raises(CheckpointError, match=problem):
        apply_delta(place / "v0", [bad], tmp_path / "out")
    assert os.listdir(tmp_path) == ["bad"]


def test_a_stray_file_is_refused_and_deltas_of_others_have_no_digests(place, tmp_path):
    others = rewritten(
        place / "xor-adler32-1",
        tmp_path / "others",
        about={"digest": None, "base_digest": None, "version": 1, "base_version": "0"},
    )
    apply_delta(place / "v0", [others, place / "xor-xxh3-128-2"], tmp_path / "out.safetensors")
    assert digest(tmp_path / "out.safetensors") == digest(state(2))
    safetensors.numpy.save_file({"x": np.zeros(1)}, others / "stray.safetensors")
    with pytest.raises(CheckpointError, match=r"do not agree on 'stray\.safetensors'"):
        apply_delta(place / "v0", [others], tmp_path / "out2.safetensors")


def run(*args):
    return CliRunner().invoke(cli, list(map(str, args)), prog_name="shardspec")


def test_the_commands_write_and_apply(place, tmp_path):
    done = run(
        "delta",
        "make",
        place / "v0",
        place / "v1",
        "-o",
        tmp_path / "d",
        "--version",
        1,
        "--for",
        "modelexpress",
    )
    assert done.exit_code == 0, done.output
    assert "2 of 6 tensors changed" in done.output
    about = json.loads((tmp_path / "d" / INDEX).read_text())["metadata"]
    assert (about["checksum_format"], about["delta_encoding"]) == ("adler32", "xor")
    deltas = (tmp_path / "d", place / "xor-xxh3-128-2")
    done = run("delta", "apply", place / "v0", *deltas, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "with 2 deltas on" in done.output
    assert digest(tmp_path / "out") == digest(state(2))
    gap = run(
        "delta",
        "apply",
        place / "v0",
        place / "xor-xxh3-128-2",
        place / "xor-xxh3-128-1",
        "-o",
        tmp_path / "x",
    )
    assert (gap.exit_code, gap.output.count("\n")) == (3, 1)
    assert (
        run(
            "delta",
            "make",
            "make",
            place / "v0",
            place / "v1",
            "-o",
            tmp_path / "e",
            "--version",
            1,
            "--for",
            "modelexpress",
            "--encoding",
            "overwrite",
        ).exit_code
        == 2
    )
    assert run("delta", "make", place / "v0", place / "v1", "-o", tmp_path / "e").exit_code == 2
    assert run("delta", "apply", place / "v0", "-o", tmp_path / "e").exit_code == 2


def test_a_missing_package_is_named(place, tmp_path, monkeypatch):
    for name in ("zstandard", "xxhash"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(CheckpointError, match=rf"{name}: pip install 'shardspec\[delta\]'"):
                apply_delta(place / "v0", chain(place, 1), tmp_path / "out")
            with pytest.raises(CheckpointError, match=rf"{name}: pip install"):
                delta(place / "v0", place / "v1", tmp_path / "d", version=1)
    assert os.listdir(tmp_path) == []
