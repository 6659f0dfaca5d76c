"""Which files of a folder are one model: by an index, by their numbers, by their names."""

import json
import re

import pytest
import safetensors.torch
import torch

from shardspec import merge
from shardspec.checkpoint.open import open_checkpoint
from tests.checkpoint.formats.reading import assert_same, read_whole, refused

A, B = {"a": torch.tensor([1.0])}, {"b": torch.tensor([2.0])}
SUFFIXES = ("safetensors", "bin")
SPELLINGS = (
    "model-0000N-of-00002.SUFFIX",
    "model-N-of-2.SUFFIX",
    "model_N_of_2.SUFFIX",
    "model.0000N-of-00002.SUFFIX",
    "model-0000N-of-000002.SUFFIX",
    "model--0000N-of-00002.SUFFIX",
    "model-0000N-of-00002.fp16.SUFFIX",
    "model.fp16-0000N-of-00002.SUFFIX",
    "model.SUFFIX-0000N-of-00002",
    "diffusion_pytorch_model-0000N-of-00002.SUFFIX",
    "diffusion_pytorch_model.fp16-0000N-of-00002.SUFFIX",
    "pytorch_model-0000N-of-00002.SUFFIX",
    "consolidated-0000N-of-00002.SUFFIX",
    "adapter_model-0000N-of-00002.SUFFIX",
    "0000N-of-00002.SUFFIX",
    "my model-0000N-of-00002.SUFFIX",
)


def save(path, tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".safetensors" in path.name:
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


def write_index(path, weight_map):
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def halves(directory, spelling, suffix, first=1):
    """Write two numbered files, each with half of the model."""
    name = spelling.replace("SUFFIX", suffix)
    files = [directory / name.replace("N", str(number)) for number in (first, first + 1)]
    for path, tensors in zip(files, (A, B), strict=True):
        save(path, tensors)
    return files


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_numbers_are_read_in_every_spelling(tmp_path, spelling, suffix):
    first, second = halves(tmp_path, spelling, suffix)
    assert_same(read_whole(tmp_path), A | B)
    alone = f"{first}: is by its name file 1 of 2 of a model; name"
    assert refused(first) == f"{alone} the directory, {tmp_path}"
    data = second.read_bytes()
    second.unlink()
    assert refused(tmp_path) == (
        f"{tmp_path}: {second.name} is missing from the numbered files; restore it"
    )
    second.write_bytes(data)
    model = re.sub(r"[-_.]*\d*N[-_]of[-_]0*2|\.SUFFIX", "", spelling).strip("-_.")
    index = write_index(
        tmp_path / f"{model}.{suffix}.index.json", {"a": first.name, "b": second.name}
    )
    assert_same(read_whole(tmp_path), A | B)
    assert refused(first) == f"{alone} the index, {index}"
    for listed in ({"a": first.name}, {"b": second.name}):
        (left_out,) = {first.name, second.name} - set(listed.values())
        write_index(index, listed)
        for place in (tmp_path, index):
            assert refused(place) == (
                f"{index}: does not name {tmp_path / left_out}, which is one of 2 files by its "
                "number; restore the index of all, or move the file away"
            )


@pytest.mark.parametrize("spelling", ["part-N.SUFFIX", "N.weights.0.SUFFIX", "shard.0N.SUFFIX"])
def test_an_index_names_all_that_differ_by_a_number_alone(tmp_path, spelling):
    first, second = halves(tmp_path, spelling, "safetensors")
    index = tmp_path / "model.safetensors.index.json"
    write_index(index, {"a": first.name, "b": second.name})
    assert_same(read_whole(tmp_path), A | B)
    write_index(index, {"a": first.name})
    assert refused(tmp_path) == (
        f"{index}: does not name {second}, which differs from {first.name} by its number alone; "
        "restore the index of all, or move the file away"
    )


def test_digits_inside_a_word_are_no_number(tmp_path):
    half, _ = halves(tmp_path, "model.fpN6.SUFFIX", "safetensors")
    write_index(tmp_path / "model.safetensors.index.fp16.json", {"a": half.name})
    assert_same(read_whole(tmp_path), A)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_index_of_a_variant_is_an_index(tmp_path, suffix):
    first, second = halves(tmp_path, "model.fp16-0000N-of-00002.SUFFIX", suffix)
    index = write_index(
        tmp_path / f"model.{suffix}.index.fp16.json", {"a": first.name, "b": second.name}
    )
    assert_same(read_whole(tmp_path), A | B)
    assert open_checkpoint(tmp_path).files[0] == index
    write_index(index, {"a": first.name})
    assert "does not name" in refused(tmp_path)


def test_capitals_make_no_difference_to_numbers(tmp_path):
    first, second = halves(tmp_path, "MODEL-0000N-OF-00002.SUFFIX", "safetensors")
    assert_same(read_whole(tmp_path), A | B)
    assert refused(first).startswith(f"{first}: is by its name file 1 of 2 of a model")
    second.unlink()
    assert refused(tmp_path).startswith(f"{tmp_path}: {second.name} is missing")


def test_some_tools_count_from_zero(tmp_path):
    halves(tmp_path, "model-0000N-of-00002.SUFFIX", "safetensors", first=0)
    assert_same(read_whole(tmp_path), A | B)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors is missing" in refused(tmp_path)


def test_the_only_one_of_one_is_read_alone(tmp_path):
    path = save(tmp_path / "model-00001-of-00001.safetensors", A)
    assert_same(read_whole(path), A)


def test_two_spellings_of_one_number_contradict_each_other(tmp_path):
    halves(tmp_path, "model-0000N-of-00002.SUFFIX", "safetensors")
    save(tmp_path / "model-2-of-2.safetensors", {"c": torch.ones(1)})
    assert "model-00002-of-00002.safetensors and model-2-of-2.safetensors have the same number" in (
        refused(tmp_path)
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_index_that_names_nothing_is_refused(tmp_path, suffix):
    halves(tmp_path, "model-0000N-of-00002.SUFFIX", suffix)
    index = write_index(tmp_path / f"model.{suffix}.index.json", {})
    assert refused(tmp_path) == (
        f"{index}: its weight_map is empty, so it names no file; restore the index, or remove "
        "it to have all files read"
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_index_says_which_of_two_counts(tmp_path, suffix):
    """As after a layer was replaced by an overlay beside the files of the model."""
    first, second = halves(tmp_path / "m", "model-0000N-of-00002.SUFFIX", suffix)
    overlay = save(tmp_path / "m" / f"overlay.{suffix}", {"b": torch.tensor([7.0])})
    save(second, {**B, "c": torch.tensor([3.0])})
    where = {"a": first.name, "b": overlay.name, "c": second.name}
    write_index(tmp_path / "m" / f"model.{suffix}.index.json", where)
    due = {**A, "b": torch.tensor([7.0]), "c": torch.tensor([3.0])}
    assert_same(read_whole(tmp_path / "m"), due)
    merge(tmp_path / "m", tmp_path / "out.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "out.safetensors"), due)
    write_index(tmp_path / "m" / f"model.{suffix}.index.json", {**where, "b": second.name})
    del where["c"]
    write_index(tmp_path / "m" / f"model.{suffix}.index.json", {**where, "x": second.name})
    assert f"{second}: lacks tensor 'x'" in refused(tmp_path / "m")


def test_an_index_of_a_part_of_the_numbers_leaves_a_note(tmp_path):
    """As where all tensors of a file were replaced, and the file was removed."""
    first, second = halves(tmp_path, "model-0000N-of-00002.SUFFIX", "safetensors")
    second.unlink()
    overlay = save(tmp_path / "overlay.safetensors", B)
    write_index(tmp_path / "model.safetensors.index.json", {"a": first.name, "b": overlay.name})
    assert_same(read_whole(tmp_path), A | B)
    assert open_checkpoint(tmp_path).facts.notes == (
        f"model.safetensors.index.json names files of 2, but not {second.name}, which is not there "
        "either",
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_index_may_name_files_in_folders_below(tmp_path, suffix):
    ckpt = tmp_path / "m"
    first, second = halves(ckpt / "parts" / "x", "model-0000N-of-00002.SUFFIX", suffix)
    top = save(ckpt / f"top.{suffix}", {"c": torch.ones(1)})
    where = {"a": f"parts/x/{first.name}", "b": f"parts/x/{second.name}", "c": top.name}
    index = write_index(ckpt / f"model.{suffix}.index.json", where)
    due = A | B | {"c": torch.ones(1)}
    assert_same(read_whole(ckpt), due)
    merge(ckpt, tmp_path / "out.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "out.safetensors"), due)
    source = open_checkpoint(ckpt)
    source.check_unchanged()
    save(first, {"a": torch.zeros(2)})
    with pytest.raises(ValueError, match=f"{first.name}: changed while it was read"):
        source.check_unchanged()
    write_index(index, {"a": where["a"], "c": top.name})
    assert f"does not name {second}" in refused(ckpt)
    for name in ("parts/../../out.safetensors", "/etc/passwd", "parts//x", "./top.safetensors"):
        write_index(index, {**where, "c": name})
        assert f"file name {name!r} is not a plain name" in refused(ckpt)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.S", "consolidated.S"], "model.S"),
        (["model.S", "adapter_model.S"], "adapter_model.S"),
        (["model.S", "model.fp16.S"], "model.fp16.S"),
        (["model.S", "optimizer.S"], "model.S"),
        (["model.S", "model_1.S"], "model_1.S"),
        (["model.S", "value_head.S"], "model.S"),
        (["diffusion_pytorch_model.S", "diffusion_pytorch_model.non_ema.S"], None),
        (["consolidated.S", "x.S"], "x.S"),
        (["model-1-of-1.S", "model.fp16-1-of-1.S"], "model-1-of-1.S"),
        (["model.S", "model-1-of-1.S"], "model.S"),
        (["a-1-of-1.S", "b-1-of-1.S"], "a-1-of-1.S"),
        (["a-1-of-1.S", "b.S"], "b.S"),
    ],
)
def test_a_folder_is_one_model(tmp_path, names, chosen):
    names = sorted(name.replace("S", "safetensors") for name in names)
    for name, tensors in zip(names, (A, B), strict=True):
        save(tmp_path / name, tensors)
    message = refused(tmp_path)
    first, second = sorted(names, key=message.index)
    assert message.startswith(f"{tmp_path}: has several models, {first} and {second}; name the ")
    if chosen is not None:
        chosen = chosen.replace("S", "safetensors")
        assert_same(read_whole(tmp_path / chosen), A if chosen == names[0] else B)


def test_files_that_no_tool_takes_for_a_model_are_one_with_a_note(tmp_path):
    for name, tensors in (("layers", A), ("embedding", B)):
        save(tmp_path / f"{name}.safetensors", tensors)
    assert_same(read_whole(tmp_path), A | B)
    assert open_checkpoint(tmp_path).facts.notes == (
        "took all 2 files for one model, as no index says more: embedding.safetensors, "
        "layers.safetensors",
    )


def test_the_model_that_transformers_reads_has_to_be_named(tmp_path):
    """It reads ``model`` before an index, and ``pytorch_model`` before other safetensors."""
    first, second = halves(tmp_path, "model-0000N-of-00002.SUFFIX", "safetensors")
    index = write_index(
        tmp_path / "model.safetensors.index.json", {"a": first.name, "b": second.name}
    )
    alone = save(tmp_path / "model.safetensors", {"c": torch.ones(1)})
    assert f"has several models, {alone.name} and {index.name}" in refused(tmp_path)
    assert_same(read_whole(index), A | B)
    assert_same(read_whole(alone), {"c": torch.ones(1)})
    alone.rename(tmp_path / "consolidated.safetensors")
    assert_same(read_whole(tmp_path), A | B)


@pytest.mark.parametrize(
    "other", ["adapter_model.safetensors", "model.fp16.safetensors", "x.safetensors"]
)
@pytest.mark.parametrize(
    "bins", [["pytorch_model.bin"], ["pytorch_model-1-of-2.bin", "pytorch_model-2-of-2.bin"]]
)
def test_bins_are_another_model_than_other_safetensors(tmp_path, other, bins):
    for name, tensors in zip(bins, (A, B), strict=False):
        save(tmp_path / name, tensors)
    save(tmp_path / other, {"c": torch.ones(1)})
    assert refused(tmp_path).startswith(f"{tmp_path}: has several models, {bins[0]} and {other};")
    assert_same(read_whole(tmp_path / other), {"c": torch.ones(1)})
    (tmp_path / other).rename(tmp_path / "model.safetensors")
    assert_same(read_whole(tmp_path), {"c": torch.ones(1)})


def test_two_models_in_bins(tmp_path):
    halves(tmp_path, "pytorch_model-0000N-of-00002.SUFFIX", "bin")
    halves(tmp_path, "ema-0000N-of-00002.SUFFIX", "bin")
    assert "has several models, ema-00001-of-00002.bin and pytorch_model-0" in refused(tmp_path)
    # transformers reads this one, whatever is beside it.
    alone = save(tmp_path / "pytorch_model.bin", {"c": torch.ones(1)})
    assert_same(read_whole(tmp_path), {"c": torch.ones(1)})
    index = write_index(
        tmp_path / "pytorch_model.bin.index.json",
        {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"},
    )
    assert f"has several models, {alone.name} and {index.name}" in refused(tmp_path)
    assert_same(read_whole(index), A | B)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_another_save_is_not_named(tmp_path, suffix):
    first, second = halves(tmp_path, "model-0000N-of-00002.SUFFIX", suffix)
    where = {"a": first.name, "b": second.name}
    write_index(tmp_path / f"model.{suffix}.index.json", where)
    old = save(tmp_path / f"model-00003-of-00003.{suffix}", {"c": torch.ones(1)})
    assert f"does not name {old}, which is one of 3 files" in refused(tmp_path)
    old.rename(tmp_path / f"consolidated-00003-of-00003.{suffix}")
    assert_same(read_whole(tmp_path), A | B)


@pytest.mark.parametrize("nested", ["", "unet"])
def test_a_folder_of_links_is_read(tmp_path, nested):
    real, cache, plain = tmp_path / "real", tmp_path / "models--x", tmp_path / "links" / nested
    halves(real, "model-0000N-of-00002.SUFFIX", "safetensors")
    names = sorted(path.name for path in real.iterdir())
    write_index(real / "model.safetensors.index.json", dict(zip("ab", names, strict=True)))
    (real / "config.json").write_text("{}")
    snapshot = cache / "snapshots" / "0a1b" / nested
    for place in (snapshot, plain, cache / "blobs"):
        place.mkdir(parents=True)
    for number, path in enumerate(sorted(real.iterdir())):
        (plain / path.name).symlink_to(path)
        blob = cache / "blobs" / f"{number:040x}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)
    elsewhere = tmp_path / "local"
    elsewhere.mkdir()
    for path in snapshot.iterdir():
        (elsewhere / path.name).symlink_to(path.readlink())
    for number, place in enumerate((snapshot, plain, elsewhere)):
        assert_same(read_whole(place), A | B)
        report = merge(place, f"{tmp_path}/out{number}/")
        assert report.sidecars == ("config.json",)
    odd = plain / "generation_config.json"
    odd.symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="is a link to /etc/passwd, outside the checkpoint"):
        merge(plain, f"{tmp_path}/out/")


def test_metadata_may_be_null(tmp_path):
    path = save(tmp_path / "model.safetensors", A)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = json.dumps({"__metadata__": None, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + A["a"].numpy().tobytes())
    assert_same(safetensors.torch.load_file(path), A)
    assert_same(read_whole(path), A)


def test_a_name_may_claim_any_count(tmp_path):
    first, second = (f"model-{n}-of-9{'0' * 30}.safetensors" for n in (1, 9))
    save(tmp_path / first, A)
    save(tmp_path / second, B)
    assert "model-2-of-9000" in refused(tmp_path)
    write_index(tmp_path / "model.safetensors.index.json", {"a": first, "b": second})
    assert_same(read_whole(tmp_path), A | B)
