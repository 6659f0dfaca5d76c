"""What Megatron-core 0.15 and 0.16 have written, against what each rank held."""

import os
import pickle
import shutil
import types
from itertools import product

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.open import open_checkpoint
from shardspec.cli.main import cli
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.reading import read_whole

STACKED = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
}
MOMENTS = ("exp_avg", "exp_avg_sq")
CUT = {"word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_proj": 1, "linear_fc2": 1}


def global_part(whole, name, tp, stage, experts):
    """Return the part of the global tensors that a rank of TP2xPP2 (EP2xPP2) calls by a name."""
    words = name.split(".")
    at: tuple[int, ...] = ()
    if words[1] == "layers":
        at = (int(words.pop(2)) + 2 * stage,)
        if words[2] in STACKED:
            words[2:] = (STACKED[words[2]] + words[3]).split(".")
        if "local_experts" in words:
            place = words.index("local_experts")
            at += (int(words.pop(place + 1)) + 2 * experts,)
            words[place] = "experts"
    tensor = whole[".".join(words)][at]
    return tensor if tp is None or "layer_norm_" in words[-1] else share(tensor, words, tp)


def share(tensor, words, tp):
    """Return what one of two tensor parallel ranks holds of a tensor."""
    if "linear_fc1" in words:
        return torch.cat([half.chunk(2)[tp] for half in tensor.chunk(2)])
    dim = next((CUT[word] for word in words if word in CUT), None)
    return tensor if dim is None else tensor.chunk(2, dim)[tp]


@pytest.mark.parametrize("name", ["megatron-0.16", "megatron-experts"])
def test_every_rank_finds_its_tensors_in_the_whole_ones(real, name):
    whole = read_whole(real(name) / name)
    seen = set()
    for rank in range(4):
        held = torch.load(real(name) / f"{name}-rank{rank}.pt", weights_only=True)
        share, stage = rank % 2, rank // 2
        experts = name == "megatron-experts"
        for key, tensor in held.items():
            # Of data parallel ranks the first one stores what all of them hold.
            if experts and share and "local_experts" not in key:
                continue
            # As does the first tensor parallel one of what is not cut.
            cut = experts or any(word in key for word in (*CUT, "linear_fc1"))
            if not cut and share:
                continue
            found = global_part(whole, key, None if experts else share, stage, share)
            assert torch.equal(found, tensor), (rank, key)
            seen.add(key)
    assert len(seen) == (27 if experts else 21)


@pytest.mark.parametrize(
    ("name", "master"), [("megatron-0.16", "param"), ("megatron-0.15", "fp32_param")]
)
def test_the_optimizer_is_that_of_the_model(real, name, master):
    whole = read_whole(real(name) / name)
    start = f"optimizer.state.{master}."
    masters = {key.removeprefix(start): found for key, found in whole.items() if start in key}
    model = {key: found for key, found in whole.items() if not key.startswith("optimizer.")}
    assert masters.keys() == model.keys()
    assert len(model) == 13
    for key, tensor in model.items():
        # The run was in float32, so that masters are the weights: in 0.15 they are stored flat.
        assert torch.equal(masters[key], tensor)
        first, second = (whole[f"optimizer.state.{kind}.{key}"] for kind in MOMENTS)
        # After one step of Adam: 0.1 times the gradient, and 0.001 times its square.
        assert torch.allclose(second, first * first / 10, rtol=1e-5, atol=0)
        assert first.shape == tensor.shape


def objects_of(directory):
    """Return the bytes of every object, by torch's own reading of the metadata."""
    said = FileSystemReader(directory).read_metadata()
    found = {}
    for index, place in said.storage_data.items():
        if isinstance(said.state_dict_metadata[index.fqn], BytesStorageMetadata):
            with open(os.path.join(directory, place.relative_path), "rb") as file:
                file.seek(place.offset)
                found[index.fqn] = file.read(place.length)
    return found


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", ["megatron-0.16", "megatron-experts"])
def test_what_is_written_is_what_torch_reads_and_megatron_needs(real, tmp_path, name, cut):
    source, out = real(name) / name, tmp_path / "out"
    if cut:
        mesh = DeviceMesh(range(2), (2,), axis_names=("tp",))
        rules = {"*linear_proj.weight": "[R,R,S(tp)]"}
        report = reshard(source, out, device_mesh=mesh, rules=rules, format="dcp")
    else:
        report = merge(source, out, format="dcp")
    assert report.sidecars == ("common.pt", "metadata.json")
    for sidecar in report.sidecars:
        assert (out / sidecar).read_bytes() == (source / sidecar).read_bytes()
    assert objects_of(out) == objects_of(source)
    assert len(objects_of(out)) == (40 if name == "megatron-experts" else 16)
    whole = read_whole(source)
    state = {key: torch.empty_like(tensor) for key, tensor in whole.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(state, checkpoint_id=out, no_dist=True)
    for key, tensor in whole.items():
        assert torch.equal(state[key], tensor)


def test_a_spoiled_object_is_refused_before_anything_is_written(real, tmp_path):
    source = shutil.copytree(real("megatron-0.16") / "megatron-0.16", tmp_path / "ckpt")
    said = FileSystemReader(source).read_metadata().storage_data
    place = next(at for index, at in said.items() if index.fqn.endswith("/shard_0_4"))
    path = source / place.relative_path
    data = bytearray(path.read_bytes())
    # The pickle of the object, in the middle of its zip.
    at = data.index(b"data.pkl", place.offset) + 100
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="restore it"):
        merge(source, tmp_path / "out", format="dcp")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "short", "other"])
def test_files_that_are_not_as_the_metadata_says(real, tmp_path, damage):
    source = shutil.copytree(real("megatron-0.15") / "megatron-0.15", tmp_path / "ckpt")
    path = source / "__2_0.distcp"
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        shutil.copyfile(source / "__0_0.distcp", path)
    with pytest.raises(CheckpointError, match=r"__2_0\.distcp"):
        merge(source, tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


class Unpickler(pickle.Unpickler):
    """Leaves out what only Megatron could load."""

    def find_class(self, module, name):
        if module.startswith("megatron."):
            return lambda *args: args
        return super().find_class(module, name)


def model_of(path):
    """Return the tensors of the model in a file, by torch."""
    module = types.SimpleNamespace(
        Unpickler=Unpickler, load=pickle.load, __name__="pickle", UnpicklingError=ValueError
    )
    state = torch.load(path, pickle_module=module, weights_only=False)
    return {key: found for key, found in state["model"].items() if torch.is_tensor(found)}


@pytest.mark.parametrize(
    ("name", "ranks", "stages"), [("legacy-stages-experts", 1, 2), ("legacy-tensor-experts", 2, 1)]
)
def test_legacy_checkpoints_with_experts(real, name, ranks, stages):
    place = real("megatron-legacy") / name
    found = read_whole(place)
    files = {}
    for tp, stage, expert in product(range(ranks), range(stages), range(2)):
        folder = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if stages > 1 else "") + f"_{expert:03d}"
        path = place / "iter_0000010" / folder / "model_optim_rng.pt"
        files[tp, stage, expert] = model_of(path)
    experts = 0
    for (tp, stage, expert), held in files.items():
        for key, tensor in held.items():
            words = key.split(".")
            if words[1] == "layers":
                words[2] = str(int(words[2]) + 4 // stages * stage)
            if "local_experts" in words:
                at = words.index("local_experts") + 1
                words[at] = str(int(words[at]) + 2 * expert)
                experts += 1
            whole = found[".".join(words)]
            whole = share(whole, words, tp) if ranks > 1 else whole
            assert torch.equal(whole, tensor), key
    assert experts == ranks * stages * 2 * (4 // stages) * 2 * 2
    assert sum("local_experts" in key for key in found) == 4 * 4 * 2


def test_the_checkpoint_of_a_run_that_counts_is_read_and_named(real, tmp_path):
    run = tmp_path / "run"
    for number, name in ((10, "iter_0000010"), (20, "global_step_20"), (30, "iter_0000030")):
        shutil.copytree(real("megatron-0.16") / "megatron-0.16", run / name)
        tracker = run / "latest_checkpointed_iteration.txt"
        tracker.write_text(f"{number}\n")
        for path in (run, tracker):
            found = open_checkpoint(path)
            assert (found.directory, found.format) == (run / name, "torch distributed checkpoint")
            assert found.facts.notes == (f"reading {name}, which {tracker.name} names",)
    result = CliRunner().invoke(cli, ["merge", str(run), "-o", str(tmp_path / "out.safetensors")])
    assert result.exit_code == 0
    assert result.stderr == (
        f"note: {run}/iter_0000030: reading iter_0000030, which {tracker.name} names\n"
    )
    quiet = CliRunner().invoke(cli, ["merge", str(run), "-o", f"{tmp_path}/o.pt", "--quiet"])
    assert (quiet.exit_code, quiet.output) == (0, "")
    shutil.rmtree(run / "iter_0000030")
    with pytest.raises(CheckpointError, match="names '30', but no such checkpoint is beside"):
        open_checkpoint(run)
