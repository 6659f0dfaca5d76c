"""Broken checkpoints: each is refused by one clear line, and nothing is written."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from shardspec import load_sharded, merge
from shardspec.checkpoint.compare.inspect import inspect_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.handmade import handmade, sample


def refused(ckpt, *, by_header=True):
    """Return the one line with which merge, inspect, load and the command line refuse it."""
    out = ckpt.parent / "out.safetensors"
    before = sorted(ckpt.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        merge(ckpt, out)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    if by_header:
        with pytest.raises(CheckpointError) as caught:
            inspect_checkpoint(ckpt)
        assert str(caught.value) == message
        with pytest.raises(CheckpointError) as caught:
            load_sharded(ckpt)
        assert str(caught.value) == message
    assert sorted(ckpt.parent.iterdir()) == before
    return message


def test_no_directory(tmp_path, capsys):
    assert "no: there is no such checkpoint" in refused(tmp_path / "no")
    with pytest.raises(SystemExit) as caught:
        cli(["merge", str(tmp_path / "no"), "-o", str(tmp_path / "out")])
    assert caught.value.code == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (f"Error: {tmp_path}/no: there is no such checkpoint; check the path\n")


def test_a_file_instead_of_a_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "file").endswith(
        "file: is neither a safetensors file nor one of torch.save; name one of these, or the "
        "directory of a checkpoint"
    )


def test_an_empty_directory(tmp_path):
    (tmp_path / "ckpt").mkdir()
    assert refused(tmp_path / "ckpt").endswith(
        "ckpt: is empty, so there is no checkpoint in it; check the path"
    )


def test_an_unfinished_save(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    (ckpt / "sharding_info.json").unlink()
    assert "has no sharding_info.json, which is written last; the save did not finish" in refused(
        ckpt
    )


def test_a_missing_file_of_a_rank(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    (ckpt / "rank4.safetensors").unlink()
    assert refused(ckpt) == (
        f"{ckpt}/rank4.safetensors: the file of rank 4 is missing; restore it or save again"
    )


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_truncated_file(tmp_path, kept):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    path = ckpt / "rank4.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = refused(ckpt)
    assert message.startswith(f"{path}: ")
    assert message.endswith("truncated" if kept else ": is empty; restore it")


def test_bytes_past_the_end(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    with (ckpt / "rank4.safetensors").open("ab") as file:
        file.write(b"x")
    assert refused(ckpt).endswith("there are bytes past its end")


def test_another_size_than_the_info_says(tmp_path):
    made = handmade(sample())
    made.file(4)["bytes"] = 1000
    message = refused(made.write(tmp_path / "ckpt"))
    assert "but sharding_info.json says 1000; the file was changed or belongs elsewhere" in message


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (
            np.zeros(12, np.int32),
            "has tensor 'w' as int32 of shape [12], but sharding_info.json says int32 of shape "
            "[4, 3]; the",
        ),
        (
            np.zeros((3, 4), np.int32),
            "has tensor 'w' as int32 of shape [3, 4], but sharding_info.json says int32 of shape "
            "[4, 3]; the",
        ),
        (
            np.zeros((4, 3), np.float32),
            "has tensor 'w' as float32 of shape [4, 3], but sharding_info.json says int32 of "
            "shape [4, 3]; the",
        ),
    ],
)
def test_another_shape_or_dtype_than_the_info_says(tmp_path, array, problem):
    made = handmade(sample())
    made.shards["rank4.safetensors"]["w"] = array
    ckpt = made.write(tmp_path / "ckpt")
    message = refused(ckpt)
    assert message.startswith(f"{ckpt}/rank4.safetensors: {problem}")


def test_a_tensor_that_the_info_does_not_list_and_one_that_the_file_lacks(tmp_path):
    made = handmade(sample())
    made.shards["rank4.safetensors"]["x"] = np.zeros(3, np.int32)
    message = refused(made.write(tmp_path / "more"))
    assert "rank4.safetensors: has tensor 'x' as int32 of shape [3], but sharding_info" in message
    assert "sharding_info.json says nothing; the file was changed, restore it" in message
    made = handmade(sample())
    del made.shards["rank2.safetensors"]["b"]
    message = refused(made.write(tmp_path / "less"))
    assert "rank2.safetensors: has tensor 'b' as nothing, but sharding_info.json says" in message


def test_swapped_files_and_files_of_another_save(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    a, b, spare = (ckpt / f"rank{n}.safetensors" for n in (3, 4, 99))
    a.rename(spare)
    b.rename(a)
    spare.rename(b)
    assert "shardspec.rank is '4' but sharding_info.json says '3'" in refused(ckpt)
    made = handmade(sample())
    made.metadata["rank4.safetensors"]["shardspec.save"] = "beef"
    message = refused(made.write(tmp_path / "other"))
    assert "shardspec.save is 'beef' but sharding_info.json says 'feed'" in message


def test_a_box_that_no_file_holds(tmp_path):
    made = handmade(sample())
    del made.file(1)["boxes"]["b"]
    del made.shards["rank1.safetensors"]["b"]
    message = refused(made.write(tmp_path / "ckpt"))
    assert message.startswith(
        f"{tmp_path}/ckpt: tensor 'b': no file contains box [3:6] (rank 1,4); restore"
    )
    made = handmade({"p": ("[S0|P1]", {(i,): np.zeros(4, np.int32) for i in range(3)})})
    del made.file(4)["boxes"]["p"]
    del made.shards["rank4.safetensors"]["p"]
    message = refused(made.write(tmp_path / "pending"))
    assert "no file contains box [2:4] of addend [1] (rank 4); restore" in message


def test_a_box_that_the_layout_does_not_give(tmp_path):
    made = handmade(sample())
    made.file(4)["boxes"]["w"]["box"] = [[4, 8], [4, 7]]
    assert (
        "tensor 'w': rank 4 is listed with box [4:8, 4:7], but under spec [S0,S1] it has "
        "[4:8, 3:6]; the file is inconsistent"
    ) in refused(made.write(tmp_path / "ckpt"))
    made = handmade({"p": ("[S0|P1]", {(i,): np.zeros(4, np.int32) for i in range(3)})})
    made.file(4)["boxes"]["p"]["addend"] = [2]
    message = refused(made.write(tmp_path / "pending"))
    assert "box [2:4] of addend [2], but under spec [S0|P1] it has [2:4] of addend [1]" in message


def test_two_ranks_that_claim_different_data_for_one_box(tmp_path):
    made = handmade(sample(), replicas=True)
    made.shards["rank5.safetensors"]["b"] = np.array([7.0], np.float32)
    ckpt = made.write(tmp_path / "ckpt")
    assert refused(ckpt, by_header=False) == (
        "tensor 'b': ranks 2 and 5 claim different data for box [6:7], first at index [6], in "
        f"{ckpt}/rank2.safetensors and {ckpt}/rank5.safetensors; keep the right one of the two"
    )


def test_the_first_difference_is_found_in_a_large_box(tmp_path):
    array = np.arange(1_200_000, dtype=np.int32).reshape(3, 400, 1000)
    made = handmade({"w": ("[R,R,R]", array)}, replicas=True)
    other = array.copy()
    other[2, 17, 5] = other[2, 399, 0] = -1
    made.shards["rank5.safetensors"]["w"] = other
    message = refused(made.write(tmp_path / "ckpt"), by_header=False)
    assert "ranks 0 and 5 claim different data" in message
    assert "first at index [2, 17, 5]," in message


def test_equal_bits_are_equal_data_even_where_they_are_no_numbers(tmp_path):
    array = np.array([np.nan, -0.0, np.inf], np.float32)
    merge(handmade({"n": ("[R]", array)}, replicas=True).write(tmp_path / "ckpt"), tmp_path / "out")
    made = handmade({"n": ("[R]", array)}, replicas=True)
    made.shards["rank1.safetensors"]["n"] = np.array([np.nan, 0.0, np.inf], np.float32)
    message = refused(made.write(tmp_path / "signs"), by_header=False)
    assert "first at index [1]" in message


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "../ckpt/rank4.safetensors"],
)
def test_names_that_are_not_plain(tmp_path, name):
    made = handmade(sample())
    made.file(4)["bytes"] = 1
    made.file(4)["name"] = name
    message = refused(made.write(tmp_path / "ckpt"))
    assert f"sharding_info.json: file name {name!r} is not a plain name" in message


def test_links_that_lead_outside_or_in_a_circle(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    inside, outside = ckpt / "rank4.safetensors", tmp_path / "real"
    inside.rename(outside)
    inside.symlink_to(outside)
    assert f"is a link to {outside}, outside the checkpoint; put the file itself" in refused(ckpt)
    inside.unlink()
    inside.symlink_to(inside)
    assert "the file of rank 4 is missing" in refused(ckpt)
    inside.unlink()
    outside.rename(ckpt / "moved")
    inside.symlink_to("moved")
    merge(ckpt, tmp_path / "out")  # a link within the directory is fine


def test_the_info_may_not_be_a_link_that_leads_outside(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    (ckpt / "sharding_info.json").rename(tmp_path / "real")
    (ckpt / "sharding_info.json").symlink_to(tmp_path / "real")
    assert "outside the checkpoint" in refused(ckpt)


def test_pipes_and_directories_as_files(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    (ckpt / "rank4.safetensors").unlink()
    os.mkfifo(ckpt / "rank4.safetensors")
    assert refused(ckpt).endswith("rank4.safetensors: is not a regular file")
    (ckpt / "rank4.safetensors").unlink()
    (ckpt / "rank4.safetensors").mkdir()
    assert refused(ckpt).endswith("rank4.safetensors: is not a regular file")


NEWER = (
    "has format 'shardspec' and version 2, but this shardspec reads 'shardspec' version 1; upgrade"
)


def put(*keys_and_value):
    """Return a change of the info: the last argument goes where the keys before it lead."""
    *keys, last, value = keys_and_value

    def change(info):
        for key in keys:
            info = info[key]
        info[last] = value

    return change


def drop(*keys):
    def change(info):
        for key in keys[:-1]:
            info = info[key]
        del info[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put("version", 2), NEWER),
        (put("version", 0), "version 0, but this shardspec reads 'shardspec' version 1; upgrade"),
        (put("version", "1"), "version should be a whole number from 0 to 2**63 - 1 but is '1'"),
        (put("version", True), "version should be a whole number from 0 to 2**63 - 1 but is True"),
        (drop("version"), "version is missing"),
        (put("format", "other"), "has format 'other' and version 1, but this shardspec reads"),
        (drop("format"), "format is missing"),
        (put("save", 7), "save should be a string but is 7"),
        (drop("mesh"), "mesh is missing"),
        (
            put("mesh", "ids", [0, 0, 1, 2, 3, 4]),
            "mesh is invalid: device id 0 appears more than once",
        ),
        (put("mesh", "ids", [-1, 0, 1, 2, 3, 4]), "mesh.ids should be a list of whole numbers"),
        (
            put("mesh", "shape", [2, 2]),
            "mesh is invalid: mesh shape 2x2 needs 4 device ids, but 6 were given",
        ),
        (put("mesh", "shape", [1.5]), "mesh.shape should be a list of whole numbers from 0"),
        (put("mesh", "axis_names", ["a", "a"]), "mesh is invalid: axis names ('a', 'a') repeat"),
        (drop("mesh", "axis_names"), "mesh.axis_names is missing"),
        (put("tensors", []), "tensors should be an object but is []"),
        (put("tensors", "w", "shape", [8, -7]), "tensors['w'].shape should be a list of whole"),
        (
            put("tensors", "w", "shape", [8]),
            "tensors['w'] with spec '[S0,S1]' is invalid: spec [S0,S1] is for 2 dims",
        ),
        (
            put("tensors", "w", "shape", [1] * 65),
            "has 65 dims and a spec of 7 characters, more than the limits 64 and 4096",
        ),
        (
            put("tensors", "w", "dtype", "I33"),
            "tensors['w'] with spec '[S0,S1]' is invalid: unknown safetensors dtype 'I33'",
        ),
        (
            put("tensors", "w", "spec", "[S0,X]"),
            "tensors['w'] with spec '[S0,X]' is invalid: expected R or S",
        ),
        (
            put("tensors", "w", "spec", "[S0,S0]"),
            "tensors['w'] with spec '[S0,S0]' is invalid: axis 0 is used twice",
        ),
        (
            put("tensors", "w", "spec", "[S0,S2]"),
            "tensors['w'] with spec '[S0,S2]' is invalid: spec [S0,S2]: axis 2 is out of",
        ),
        (put("tensors", "w", "spec", "[S(dp),R]"), "has no axis named 'dp'"),
        (drop("tensors", "w", "spec"), "tensors['w'].spec is missing"),
        (drop("tensors", "w"), "boxes['w'] is of a tensor that 'tensors' does not list"),
        (put("files", {}), "files should be a list but is {}"),
        (put("files", 1, 5), "files[1] should be an object but is 5"),
        (put("files", 1, "rank", 6), "files[1].rank is 6, which is not a device of the mesh"),
        (put("files", 1, "name", "rank0.safetensors"), "files repeats the file name 'rank0"),
        (put("files", 1, "name", 5), "files[1].name should be a string but is 5"),
        (
            drop("files", 1, "boxes", "w", "box"),
            "files[1].boxes['w'] should have a box of [low, high] pairs",
        ),
        (put("files", 1, "boxes", "w", "box", [[0, 4]]), "is listed with box [0:4], but under"),
        (
            put("files", 1, "boxes", "w", "box", [[0, 9], [3, 6]]),
            "is listed with box [0:9, 3:6]",
        ),
        (
            put("files", 1, "boxes", "w", "box", [[4, 4], [3, 6]]),
            "is listed with box [4:4, 3:6]",
        ),
        (put("files", 1, "boxes", "w", "box", [[0, 4, 5], [3, 6]]), "[low, high] pairs, an addend"),
        (put("files", 1, "boxes", "w", "box", {}), "[low, high] pairs, an addend"),
        (put("files", 1, "boxes", "w", "box", [[0, True], [3, 6]]), "[low, high] pairs, an addend"),
        (put("files", 1, "boxes", "w", "box", ["04", [3, 6]]), "[low, high] pairs, an addend"),
        (put("files", 1, "boxes", "w", 5), "an addend of whole numbers if any, and a crc32 of"),
        (
            put("files", 1, "boxes", "w", "addend", {}),
            "but is {'box': [[0, 4], [3, 6]], 'addend': {}",
        ),
        (put("files", 1, "boxes", "w", "addend", [-1]), "an addend of whole numbers if any, and a"),
        (put("files", 1, "boxes", "w", "crc32", "0123456"), "a crc32 of eight hexadecimal digits"),
        (
            put("files", 1, "boxes", "w", "crc32", None),
            "a crc32 of eight hexadecimal digits if any",
        ),
        (put("file_metadata", {"a": 1}), "file_metadata['a'] should be a string but is 1"),
        (put("values", {"w": 1}), "'w' is both a tensor and a value"),
        (put("paths", {"x": ["x"]}), "paths['x'] is neither a tensor nor a value"),
        (put("files", 1, "boxes", "w", "addend", [0]), "box [0:4, 3:6] of addend [0], but under"),
    ],
)
def test_an_info_that_breaks_a_rule(tmp_path, change, problem):
    made = handmade(sample())
    change(made.info)
    ckpt = tmp_path / "ckpt"
    # Sizes as they are before the change, which may have renamed the file they belong to.
    written = handmade(sample()).write(ckpt)
    sizes = {path.name: path.stat().st_size for path in written.iterdir()}
    for rank, file in enumerate(made.info.get("files", [])):
        if isinstance(file, dict):
            file.setdefault("bytes", sizes[f"rank{rank}.safetensors"])
    (ckpt / "sharding_info.json").write_text(json.dumps(made.info))
    message = refused(ckpt)
    assert message.startswith(f"{ckpt}/sharding_info.json: ")
    assert problem in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "is not JSON: Expecting value at character 0"),
        (
            b'{"format": "shardspec",',
            "is not JSON: Expecting property name enclosed in double quotes at",
        ),
        (b"\xff{}", "is not UTF-8 (byte 0 is 0xff)"),
        (b'{"format": "shardspec", "format": "x"}', "has the key 'format' twice"),
        (b'{"version": NaN}', "contains NaN, which is not JSON"),
        (b"[" * 100_000, "nests too deep"),
        (b'{"version": ' + b"1" * 5000 + b"}", "contains a number of thousands of digits"),
        (b"[]", "the sharding info should be an object but is []"),
        (b'{"\\ud800": 1}', "contains text with lone surrogates"),
    ],
)
def test_an_info_that_is_no_json(tmp_path, text, problem):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    (ckpt / "sharding_info.json").write_bytes(text)
    message = refused(ckpt)
    assert message.startswith(f"{ckpt}/sharding_info.json: ")
    assert problem in message


def test_keys_that_are_not_known_are_passed_over(tmp_path):
    made = handmade(sample())
    made.info["written_by"] = {"name": "x"}
    made.info["tensors"]["w"]["digest"] = 5
    made.file(1)["boxes"]["w"]["digest"] = 5
    assert merge(made.write(tmp_path / "ckpt"), tmp_path / "out").tensors == 2


def test_an_unreadable_directory_is_told_by_its_reason(tmp_path):
    # A name longer than the system allows is refused by every system, to root too.
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        merge(Path(tmp_path, "x" * 300), tmp_path / "out")


def test_an_info_of_gigabytes_is_not_read(tmp_path):
    ckpt = handmade(sample()).write(tmp_path / "ckpt")
    info = ckpt / "sharding_info.json"
    # A hole in the file: it takes no room.
    os.truncate(info, 3 << 30)
    assert "would take more than 448 MiB of memory" in refused(ckpt)


@pytest.mark.parametrize("spec", [f"[S{'9' * 5000},R]", f"[S({'9' * 5000}),R]"])
def test_axes_of_thousands_of_digits(tmp_path, capsys, spec):
    made = handmade(sample())
    made.info["tensors"]["w"]["spec"] = spec
    ckpt = made.write(tmp_path / "ckpt")
    assert "has 2 dims and a spec of 500" in refused(ckpt)
    for command in ("inspect", "verify"):
        with pytest.raises(SystemExit) as caught:
            cli([command, str(ckpt)])
        assert caught.value.code == 3
        assert len(capsys.readouterr().err) < 300
