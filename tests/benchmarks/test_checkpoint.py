"""A small run of the benchmark of checkpoints: real writers, real tools, a few MiB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkpoint_holes import FORMATS as HOLES
from benchmarks.checkpoint_holes import many_tensors
from benchmarks.checkpoint_shapes import model_of
from benchmarks.checkpoint_timing import cat_command, cats_command, python, run, touch
from shardspec import DeviceMesh, Layout
from shardspec.checkpoint.open import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def _benchmark(*options):
    """Run it in a process of its own, since it has to be small."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.exhaustive
@pytest.mark.dist
def test_a_small_run_has_a_line_for_every_command(tmp_path):
    lines = _benchmark(
        *("--at", tmp_path, "--gib", 0.02, "--rounds", 1, "--formats", "dcp-hf"),
        *("--parts", "formats,peers,planning", "--planned", "50:2x2x2"),
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    head, rows = rows[0], rows[2:]
    assert [row[1] for row in rows] == [
        "cat",
        "merge",
        "merge --no-verify",
        "merge, 2 threads, 4 files",
        "the same, --no-verify",
        "two cats at once",
        "two bare loops, checked",
        "inspect",
        "consolidate",
        "consolidate-2",
    ]
    assert {len(row) for row in rows} == {len(head)}
    peaks = {row[1]: float(row[head.index("peak MiB")]) for row in rows[1:]}
    assert 20 < peaks["merge"] < 64
    assert peaks["merge"] < peaks["consolidate"]
    assert [line.partition(":")[0] for line in lines[-9:-1]] == [
        f"{command}, {form}, 50 tensors on 2x2x2 ranks"
        for form in (
            "shardspec's own",
            "torch DCP",
            "DCP's Hugging Face format",
            "a .pt of each rank",
        )
        for command in ("merge --dry-run", "inspect")
    ]
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_holes_hold_the_same_in_every_form(tmp_path):
    mesh, tensors = DeviceMesh(range(12), (2, 2, 3)), many_tensors(9)
    held = {}
    for form, write in HOLES.items():
        write(tmp_path / form, mesh, tensors)
        source = open_checkpoint(tmp_path / form, ranks=12 if form == "dcp-hf" else None)
        outlines = [source.outline(name) for name in source.names]
        held[form] = [
            (o.name, o.shape, o.dtype, sorted((box.box, box.rank) for box in o.boxes))
            for o in outlines
        ]
    assert [(name, shape) for name, shape, _, _ in held["dcp"]] == sorted(
        (name, shape) for name, (shape, _) in tensors.items()
    )
    assert held["dcp"] == held["dcp-hf"] == held["shardspec"]
    # There every rank has stored its own copy.
    for name, shape, dtype, boxes in held["ranks"]:
        layout = Layout(mesh, tensors[name][1], shape, dtype)
        assert boxes == sorted((box, rank) for rank, box in layout.boxes().items())
    assert [one[:3] for one in held["ranks"]] == [one[:3] for one in held["dcp"]]


def test_models_have_the_tensors_and_sizes_that_are_asked_for():
    for gib in (1, 2, 4, 16):
        model = model_of(gib)
        assert len(model.shapes) == 201
        assert abs(model.num_bytes / 2**30 / gib - 1) < 0.03
    assert model_of(2).hidden == 2048
    assert model_of(2, big=True).largest > 2**30


def test_eight_ranks_cut_the_rows_of_two_gib_to_512_and_1408_bytes():
    shapes = model_of(2).shapes
    layer = "model.layers.0"
    assert shapes[f"{layer}.self_attn.o_proj.weight"][1] * 2 // 8 == 512
    assert shapes[f"{layer}.mlp.down_proj.weight"][1] * 2 // 8 == 1408


def test_a_command_is_timed_with_its_memory_and_a_failure_is_told(tmp_path):
    words = "import json; x = bytearray(b'1') * (100 << 20); print(json.dumps({'seconds': 7}))"
    found = run([sys.executable, "-c", words])
    assert found.inside == 7
    assert found.seconds > 0
    assert found.cpu_seconds > 0
    assert found.peak_mib > 100
    with pytest.raises(RuntimeError, match=r"ended with 1: .*No module named benchmarks\.none"):
        run(python("benchmarks.none"))
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"3")
    run(cat_command([tmp_path / "a", tmp_path / "b"], tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == b"123"
    ways = {
        "cats": cats_command,
        "loops": lambda files, out: python("benchmarks.checkpoint_loops", out, *files),
    }
    for name, command in ways.items():
        place = tmp_path / name
        run(command([tmp_path / "a", tmp_path / "b", tmp_path / "a"], place))
        assert [path.read_bytes() for path in sorted(place.iterdir())] == [b"1212", b"3"]
        with pytest.raises(RuntimeError, match="ended with 1"):
            run(command([tmp_path / "a", tmp_path / "none"], tmp_path / f"{name} fail"))


def test_memory_that_cannot_be_touched_is_said_and_not_that_others_waited(tmp_path):
    with pytest.raises(FileNotFoundError, match="touched-"):
        touch(tmp_path / "none", 1 << 20)
    core = max(os.sched_getaffinity(0))
    (tmp_path / f"touched-{core}").mkdir()
    with pytest.raises(IsADirectoryError, match=f"touched-{core}"):
        touch(tmp_path, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == [f"touched-{core}"]
