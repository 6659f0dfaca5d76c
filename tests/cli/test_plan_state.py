"""`shardspec plan-state`: who reads what from which file of a checkpoint."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from shardspec import DeviceMesh, DTensor, Layout, load_sharded, plan_reshard, save_sharded
from shardspec.checkpoint.job.load_plan import stored_layouts
from shardspec.checkpoint.open import open_checkpoint
from shardspec.cli.main import cli

FOUR = DeviceMesh(range(4), (2, 2))


@pytest.fixture
def checkpoint(tmp_path):
    w, b = torch.randn(8, 6), torch.randn(12)
    save_sharded({"w": DTensor(w, FOUR, "[S0,R]"), "b": DTensor(b, FOUR, "[S01]")}, tmp_path / "c")
    return tmp_path / "c"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["plan-state", *map(str, arguments)])
    return result.exit_code, result.output


def test_what_devices_receive_is_what_they_will_hold(checkpoint):
    code, text = run(checkpoint, "--mesh", "3", "--rule", "w", "[S0{6,2}*2,R]", "--json")
    assert code == 0, text
    plan = json.loads(text)
    layouts = {
        "w": Layout(DeviceMesh(range(3), (3,)), "[S0{6,2}*2,R]", (8, 6), "float32"),
        "b": Layout(DeviceMesh(range(3), (3,)), "[R]", (12,), "float32"),
    }
    for device in range(3):
        held = sum(
            4 * torch.Size(layout.local_shape(device)).numel() for layout in layouts.values()
        )
        assert plan["received"][str(device)] == held
    assert len(plan["files"]) == 4
    assert sum(plan["sent"][number] for number in plan["files"]) == sum(plan["received"].values())
    got = load_sharded(
        checkpoint, device_mesh=layouts["w"].mesh, rules={"w": "[S0{6,2}*2,R]", "b": "[R]"}
    )
    assert got["w"].layout == layouts["w"]


def test_the_table_names_files_and_links_count(checkpoint):
    code, text = run(checkpoint, "--mesh", "2", "--links", "unit")
    assert (code, "from 4 files" in text, "safetensors" in text) == (0, True, True), text
    seconds = [
        json.loads(run(checkpoint, "--mesh", "2", "--json", *more)[1])["cost_seconds"]
        for more in ((), ("--links", "1:0"))
    ]
    assert seconds[0] < 1 <= seconds[1]


def test_a_map_on_the_way(checkpoint, tmp_path):
    (tmp_path / "map.toml").write_text(
        '[[map]]\nsource = ["w", "a b"]\ntarget = ["x.weight", "b a"]\n'
        '[[map]]\nsource = "b"\ntarget = "x.bias"\n'
    )
    code, text = run(
        checkpoint,
        "--mesh",
        "2",
        "--map",
        tmp_path / "map.toml",
        "--rule",
        "x.weight",
        "[S0,R]",
        "--json",
    )
    assert code == 0, text
    assert set(json.loads(text)["received"].values()) >= {8 * 6 * 2 + 12 * 4}


def test_what_is_refused(checkpoint):
    assert run(checkpoint, "--mesh", "2", "--rule", "nothing", "[R]")[0] == 2
    assert run(checkpoint.parent / "none", "--mesh", "2")[0] == 3
    pending = DTensor.from_local({d: torch.ones(3) for d in range(4)}, FOUR, "[R|P1]")
    save_sharded({"p": pending}, checkpoint.parent / "p")
    assert "reduction pending" in run(checkpoint.parent / "p", "--mesh", "2")[1]


def test_a_plan_of_a_checkpoint_by_its_path(checkpoint):
    mesh, rules = DeviceMesh([5, 9, 2], (3,)), {"w": "[S0{6,2}*2,R]"}
    layouts = {
        "w": Layout(mesh, rules["w"], (8, 6), "float32"),
        "b": Layout(mesh, "[R]", (12,), "float32"),
    }
    source, _ = stored_layouts(open_checkpoint(checkpoint), 10)
    for place in (checkpoint, str(checkpoint)):
        for target in ((mesh, rules), layouts):
            plan = plan_reshard(place, target)
            assert plan.moves == plan_reshard(source, target).moves


def test_transfers_are_written_for_every_device_and_the_index_last(checkpoint, tmp_path):
    code, text = run(
        checkpoint, "--mesh", "3", "--rule", "w", "[S0,R]", "--transfers", tmp_path / "t"
    )
    assert code == 0, text
    names = sorted(path.name for path in (tmp_path / "t").iterdir())
    assert names == ["device-0.npz", "device-1.npz", "device-2.npz", "transfers.json"]
    index = json.loads((tmp_path / "t" / "transfers.json").read_text("utf-8"))
    assert index["format"] == "shardspec-transfers-1"
    assert [tensor["target"] for tensor in index["tensors"]] == ["b", "w"]
    wanted = load_sharded(
        checkpoint, device_mesh=DeviceMesh(range(3)), rules={"w": "[S0,R]", "b": "[R]"}
    )
    files = {int(number): checkpoint / name for number, name in index["files"].items()}
    for device in range(3):
        with np.load(tmp_path / "t" / f"device-{device}.npz") as stored:
            assert bytes(stored["digest"]).decode() == index["digest"]
            made = [
                np.zeros(4 * np.prod(shape[: len(tensor["target_shape"])]), np.uint8)
                for shape, tensor in zip(stored["target_shapes"], index["tensors"], strict=True)
            ]
            assert stored["target_strides"][1].tolist() == [24, 4]
            for row in stored["rows"]:
                data = np.fromfile(files[row["sender"]], np.uint8)
                for turn in range(int(row["count"])):
                    start, to = (
                        int(row[f"{end}_offset"] + turn * row[f"{end}_step"].astype("u8"))
                        for end in ("source", "target")
                    )
                    size = int(row["run_bytes"])
                    made[row["tensor"]][to : to + size] = data[start : start + size]
        for tensor, got in zip(index["tensors"], made, strict=True):
            shard = wanted[tensor["target"]].shards[device]
            assert (got.view("f4") == shard.numpy().ravel()).all()


def test_transfers_are_refused_before_anything_is_written(checkpoint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep me")
    code, text = run(checkpoint, "--mesh", "2", "--transfers", tmp_path / "mine")
    assert (code, "give a new or an empty directory" in text) == (3, True), text
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
    code, text = run(checkpoint, "--mesh", "2", "--dtype", "bf16", "--transfers", tmp_path / "cast")
    assert (code, "is cast from float32 to bfloat16" in text) == (2, True), text
    assert not (tmp_path / "cast").exists()
