"""What refusals say: of this file and no other case, with remedies that work when they are run."""

import pickle
import subprocess
import tarfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from shardspec.checkpoint.compare.verify import verify_checkpoint
from tests.checkpoint.formats.reading import assert_same, read_whole, refused
from tests.faults.checks import command

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(4)}


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0,), (3, 4)), ((0, 0), (3,)), ((0, 0, 0), (3, 4, 1)), ((), ())]
)
def test_chunks_of_other_dims_are_described(tmp_path, offsets, sizes):
    save(STATE, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    metadata.state_dict_metadata["w"].chunks = [chunk]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert refused(tmp_path).endswith(
        f"a chunk at {list(offsets)} of shape {list(sizes)} is in a tensor with 2 dims; "
        "the metadata is inconsistent, save again"
    )


@pytest.mark.parametrize(
    "view",
    [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64)._neg_view()],
)
def test_a_file_that_is_whole_is_not_to_be_restored(tmp_path, view):
    torch.save({"w": STATE["w"], "c": view}, tmp_path / "x.pt")
    code, _, message = command(["merge", tmp_path / "x.pt", "-o", tmp_path / "out"])
    assert code == 3
    assert "'a view that conjugates or negates; save tensor.resolve_conj()" in message
    assert "restore" not in message
    resolved = {"w": STATE["w"], "c": view.resolve_conj().resolve_neg()}
    torch.save(resolved, tmp_path / "x.pt")
    assert_same(read_whole(tmp_path / "x.pt"), resolved)


def test_plain_tensors_that_differ_by_rank(tmp_path):
    for rank in range(2):
        state = {"w": STATE["w"] + rank, "b": STATE["b"]}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    assert refused(tmp_path).endswith(
        "keep the right one of the two if they should be equal, as plain tensors are on all ranks; "
        "if each rank has a part, save it as a DTensor, and what is its own under a name for each "
        "rank"
    )


def test_a_run_of_deepspeed_without_zero(tmp_path):
    step = tmp_path / "global_step3"
    step.mkdir()
    (tmp_path / "latest").write_text(step.name)
    torch.save({"module": STATE, "ds_version": "0.19.8"}, step / "mp_rank_00_model_states.pt")
    message = refused(tmp_path)
    assert "has no ZeRO optimizer states (…_optim_states.pt)" in message
    named = message.partition("without ZeRO, name ")[2]
    assert named == str(step / "mp_rank_00_model_states.pt")
    assert_same(read_whole(Path(named)), {f"module.{k}": v for k, v in STATE.items()})


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x"])
def test_a_file_of_no_bytes_is_empty(tmp_path, name):
    (tmp_path / name).touch()
    assert refused(tmp_path / name) == f"{tmp_path / name}: is empty; restore it"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_with_an_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    assert refused(tmp_path) == f"{tmp_path / name}: is empty; restore it"


def test_text_that_ends_within_a_string_in_an_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "mo')
    assert "Unterminated string starting at character 21; the file is" in refused(tmp_path)


def test_nothing_is_not_all_with_digests(tmp_path):
    safetensors.torch.save_file({}, tmp_path / "none.safetensors")
    report = verify_checkpoint(tmp_path / "none.safetensors")
    assert (report.tensors, report.num_bytes, report.flaws) == (0, 0, ())
    code, said, error = command(["verify", tmp_path / "none.safetensors"])
    assert (code, error) == (0, "")
    assert said.endswith("0 tensors in 0 boxes, 0 B, no data to check; no problems found\n")


def test_a_nemo_file_is_unpacked_as_the_refusal_says(tmp_path):
    save(STATE, checkpoint_id=tmp_path / "model_weights", no_dist=True)
    with tarfile.open(tmp_path / "x.nemo", "w") as archive:
        archive.add(tmp_path / "model_weights", "model_weights")
    message = refused(tmp_path / "x.nemo")
    words = message.partition("unpack it with ")[2].partition(",")[0].split()
    words = [word.replace("FILE", "../x.nemo") for word in words]
    (tmp_path / "out").mkdir()
    subprocess.run(words, cwd=tmp_path / "out", check=True)
    assert_same(read_whole(tmp_path / "out" / "model_weights"), STATE)


def test_a_file_of_torch_before_version_1_6_is_saved_again(tmp_path):
    torch.save(STATE, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert "load it with torch.load(weights_only=True) and save it again" in (
        refused(tmp_path / "x.pt")
    )
    torch.save(torch.load(tmp_path / "x.pt", weights_only=True), tmp_path / "y.pt")
    assert_same(read_whole(tmp_path / "y.pt"), STATE)


def test_the_command_for_a_mixture_of_experts_is_run(tmp_path):
    """With files named and filled as DeepSpeed does; with its own by `make compat`."""
    shared = {"a.weight": torch.ones(2, 2), "m.deepspeed_moe.gate.wg.weight": torch.ones(2, 2)}
    held = {"module": shared, "ds_version": "0.19.8", "mp_world_size": 1, "num_experts": [2]}
    torch.save(held, tmp_path / "mp_rank_00_model_states.pt")
    due = dict(shared)
    for expert in range(2):
        name = f"m.deepspeed_moe.experts.deepspeed_experts.{expert}.weight"
        due[name] = torch.full((2, 2), float(expert))
        torch.save(
            {name: due[name]}, tmp_path / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt"
        )
    messages = {refused(path).partition(": is ")[2] for path in sorted(tmp_path.iterdir())}
    assert len(messages) == 1
    (tmp_path / "alone").mkdir()
    torch.save(held, tmp_path / "alone" / "mp_rank_00_model_states.pt")
    assert refused(tmp_path / "alone" / "mp_rank_00_model_states.pt").endswith(
        messages.copy().pop()
    )
    code = messages.pop().partition('python -c "')[2].removesuffix('"')
    exec(code.replace("RUN", str(tmp_path)).replace("OUT.pt", str(tmp_path / "out.pt")), {})
    assert_same(read_whole(tmp_path / "out.pt"), due)
