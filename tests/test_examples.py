"""Every example runs as a newcomer would run it, and prints what it should."""

import ctypes
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.jobs import EXAMPLES, run_alone, run_python

ALONE: dict[Path, tuple[str, ...]] = {
    EXAMPLES / "first_layout.py": (),
    EXAMPLES / "cheapest_path.py": (),
    EXAMPLES / "save_and_merge.py": (),
    EXAMPLES / "pull_mapped_files.py": (),
    EXAMPLES / "auto_parallel.py": (),
    EXAMPLES / "delta_sync.py": ("--width", "128"),
    EXAMPLES / "other_meshes.py": (),
    EXAMPLES / "trace_map.py": (),
}
"""Those that are run in no job, with their arguments."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Return what each example printed; one process ran them all."""
    texts = run_alone(tmp_path_factory.mktemp("examples"), [(path, *ALONE[path]) for path in ALONE])
    return {path.name: text for path, text in zip(ALONE, texts, strict=True)}


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


def squeezed(text):
    """Return text without the widths of its tables."""
    return re.sub(r" +", " ", text)


def test_all_examples_are_tried_here():
    files = ("test_examples.py", "dist/test_examples.py", "test_minilm.py")
    tried = "".join((EXAMPLES.parent / "tests" / file).read_text("utf-8") for file in files)
    names = [path.name for path in sorted(EXAMPLES.glob("*.py"))]
    assert len(names) == 19
    for name in names:
        assert f'EXAMPLES / "{name}"' in tried, name


def test_first_layout(printed):
    output = printed["first_layout.py"]
    assert "0:2 │      0,1      │\n" in output
    assert "0:4 │ 0 │ 1 │ 2 │ 3 │\n" in output
    assert "device 3 holds rows and columns ((2, 4), (0, 4)) of shape (2, 4)\n" in output
    assert "slice dim 1 0,1 [R,S01] 0 B 0 s 80 B\n" in squeezed(output)
    assert output.endswith(
        "device 3 held  [[8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0]]\n"
        "device 3 holds [[3.0], [7.0], [11.0], [15.0]]\n"
        "together they are the matrix again: True\n"
    )


def test_trace_map(printed):
    lines = printed["trace_map.py"].splitlines()
    assert lines[:3] == ["q → qkv[0:4 | 0:3]", "k → qkv[4:6 | 0:3]", "v → qkv[6:8 | 0:3]"]
    assert len(lines) == 7


def test_cheapest_path(printed):
    output = printed["cheapest_path.py"]
    one_node, _, two_nodes = squeezed(output).partition("Two nodes")
    # 2^27 bytes: to sum, (n-1)/n of them travel twice, n = 2; to gather, n-1 quarters, n = 4. All
    # of them through the network take 2 * 10 µs + 2^27 / 50 GB/s = 2.70 ms.
    assert "all-reduce sum dp [R,R] 128 MiB 377.6 µs 256 MiB\n" in one_node
    assert "slice dim 1 tp [R,S(tp)|P(dp)] 0 B 0 s 160 MiB\n" in two_nodes
    assert "all-reduce sum dp [R,S(tp)] 32 MiB 691.1 µs 64 MiB\n" in two_nodes
    assert "all-gather dim 1 tp [R,R] 96 MiB 288.3 µs 160 MiB\n" in two_nodes
    assert "the first plan would take 2.70 ms instead of 0.98 ms" in output


def test_save_and_merge(printed):
    assert printed["save_and_merge.py"] == (
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


def test_format_plugin(tmp_path):
    output = squeezed(run_python(EXAMPLES / "format_plugin.py", cwd=tmp_path)[0])
    assert output.startswith(
        "sharded: rank-00000.npz rank-00001.npz rank-00002.npz rank-00003.npz\n"
        "equal: True\n"
        "loaded: w as [S0,S1], (3, 2) on device 3\n"
        "cut: 3 tensors, 36 parameters, 1 element of an optimizer, 176 B, in the format\n"
        "of npz, saved on mesh 2x2 (4 devices)\n"
    )
    assert "\n0 (0, 0) 36 B rank-00000.npz\n" in output
    assert output.endswith(
        "\ncut: 3 tensors in 6 boxes, 176 B, all with digests; no problems found\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_pull_mapped_files(printed):
    assert printed["pull_mapped_files.py"] == (
        "device 4: 6 rows, 12288 bytes, same as the plan: True\n"
        "device 5: 6 rows, 12288 bytes, same as the plan: True\n"
    )


@pytest.mark.compat
def test_pull_nixl(tmp_path):
    output, _ = run_python(EXAMPLES / "pull_nixl.py", cwd=tmp_path)
    assert [line for line in output.splitlines() if "NIXL INFO" not in line] == [
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


def test_auto_parallel(printed):
    output = printed["auto_parallel.py"]
    assert output.startswith("25 operators, 32 edges\n  input_1              data, data ")
    plans = auto_parallel_plans(output)
    solver, *by_hand = (seconds for _, seconds, _ in plans.values())
    assert all(solver < 0.95 * other for other in by_hand)
    # Of 24 MiB with gradients and moments half the layers' weights are cut in two, or all.
    assert [held for held, _, _ in plans.values()] == [16, 12, 24]


def test_delta_sync(printed):
    output = printed["delta_sync.py"]
    found = re.findall(r"version (\d): whole (\d+) bytes in .* delta (\d+) bytes", output)
    assert [int(version) for version, _, _ in found] == [1, 2, 3]
    assert all(int(part) < int(whole) / 5 for _, whole, part in found)


def test_other_meshes(printed):
    output = printed["other_meshes.py"]
    assert output == f"{OTHER_MESHES}device 5 holds columns 18 to 36: True\n"
