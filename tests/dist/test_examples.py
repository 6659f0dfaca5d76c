"""Examples as jobs of several processes."""

import json
import re
import runpy
from functools import cache

import pytest
import torch

from shardspec.text import bytes_text
from tests.jobs import EXAMPLES, run_examples, run_python
from tests.test_examples import OTHER_MESHES, auto_parallel_plans, shown_in_docs

pytestmark = pytest.mark.dist

JOBS = {
    2: (EXAMPLES / "dtensor_tour.py", EXAMPLES / "train_save_merge.py"),
    4: (
        EXAMPLES / "dtensor_tour.py",
        EXAMPLES / "tensor_parallel_mlp.py",
        EXAMPLES / "hsdp.py",
        EXAMPLES / "real_processes.py",
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


def test_pull_send_receive(printed):
    assert sorted(printed("pull_send_receive.py", 4).splitlines()) == [
        "rank 2: down (8, 6), as it should be: True",
        "rank 2: up (6, 5), as it should be: True",
        "rank 3: down (8, 6), as it should be: True",
        "rank 3: up (6, 5), as it should be: True",
    ]


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


@pytest.mark.exhaustive
def test_auto_parallel_in_a_job(tmp_path):
    """Among the other examples it plans in one process."""
    (output,) = run_examples(4, tmp_path, [(EXAMPLES / "auto_parallel.py",)])
    plans = auto_parallel_plans(output)
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


def test_other_meshes_in_a_job(printed):
    output = printed("other_meshes.py", 6)
    assert output.startswith(OTHER_MESHES)
    assert sorted(output[len(OTHER_MESHES) :].splitlines()) == [
        "device 4 holds columns 0 to 18: True",
        "device 5 holds columns 18 to 36: True",
    ]


@pytest.mark.exhaustive
def test_under_torchrun(printed, tmp_path):
    """As a newcomer runs them; the other jobs here are forks of one process."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    output, errors = run_python(*torchrun, EXAMPLES / "dtensor_tour.py", cwd=tmp_path)
    assert errors == "", "an example warns"
    assert list(tmp_path.iterdir()) == []
    assert output == printed("dtensor_tour.py", 2)


LARGE = pytest.param(8, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("world", [2, 4, LARGE])
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
        f"  relu of [S(dp),R|P(tp)]: all-reduce sum ({2 * 64 * (tp - 1) // tp} B)",
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


@pytest.mark.parametrize("world", [4, LARGE])
def test_hsdp(printed, world):
    output = printed("hsdp.py", world)
    rows = 48 // (world // 2)
    assert output.splitlines()[0] == f"0.weight: [S(gpu),R] of (48, 32), ({rows}, 32) here"
    assert output.count("as trained in one process: True") == 4


def test_train_save_merge(printed):
    output = printed("train_save_merge.py", 2)
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[0] > 4
    assert losses[3] < 2.6
    assert "merged: 5 tensors of 2 files" in output
    assert "the same guesses: 512 of 512; scores differ by at most 1e-4: True" in output
    assert "it writes: 'The statement" in output


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
def test_elastic_resume_under_torchrun(tmp_path):
    output, _ = run_python(EXAMPLES / "elastic_resume.py", cwd=tmp_path)
    ranks = [line.partition(" ")[0] for line in output.splitlines()]
    assert ranks == ["8", "4", "6"]
    assert output.count("; as without interruption, to the last bit: True\n") == 3
