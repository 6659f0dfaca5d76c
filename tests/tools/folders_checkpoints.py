"""Folders of safetensors as transformers' own loader reads them: indexes, links, folders below."""

import json
import shutil
import sys
from itertools import islice
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import _get_resolved_checkpoint_files

from tests.faults.checks import command
from tests.faults.indexes import Folder, every_folder, written
from tests.tools.commands import shardspec
from tests.tools.language_models import CONFIGS, answers, loaded, model_of
from tests.tools.table import Row, write_rows

INDEX = "model.safetensors.index.json"
STEP = 7


def read_by_transformers(folder: Path, variant: str | None) -> dict[str, torch.Tensor] | None:
    """Return the tensors in the files that `from_pretrained` would read; None if it fails."""
    try:
        files, _ = _get_resolved_checkpoint_files(str(folder), variant, None, None, None, False)
        return {name: found for file in files or () for name, found in load_file(file).items()}
    except (OSError, SafetensorError):
        return None


def compared(folder: Folder, place: Path) -> bool:
    """Merge a folder; say whether both read it, and then check that both read the same."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "model").mkdir(parents=True)
    written(folder, place / "model")
    variant = folder.model.partition(".")[2] or None
    theirs = read_by_transformers(place / "model", variant)
    code, _, error = command(["merge", place / "model", "-o", place / "out"])
    if code or theirs is None:
        return False
    ours = load_file(place / "out")
    assert ours.keys() == theirs.keys(), (folder, ours.keys() ^ theirs.keys(), error)
    for name, found in theirs.items():
        # Of two that hold a tensor transformers takes the later name, and we that of the index.
        doubled = name == "a1" and folder.listed in ("an overlay", "a tensor that two files hold")
        assert doubled or torch.equal(ours[name], found), (folder, name)
    return True


def same_answers(folder: Path, out: Path, wanted: torch.Tensor) -> None:
    """Load a folder and what we merge of it; both answer as the model does."""
    assert torch.equal(answers(loaded(folder)), wanted), folder
    shardspec("verify", folder)
    shardspec("merge", folder, "-o", f"{out}/")
    assert torch.equal(answers(loaded(out)), wanted), folder


def main(place: Path, rows_file: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    both = sum(
        compared(folder, place / "small") for folder in islice(every_folder(), 0, None, STEP)
    )
    assert both > 20, both

    model = model_of(CONFIGS["llama"])
    wanted = answers(model)
    plain = place / "plain"
    model.save_pretrained(plain, max_shard_size="60KB")
    index = json.loads((plain / INDEX).read_text())
    below, cache, links, overlay, null = (
        place / name for name in ("below", "models--x", "links", "overlay", "null")
    )
    shutil.copytree(plain, below)
    (below / "parts").mkdir()
    for path in below.glob("*.safetensors"):
        path.rename(below / "parts" / path.name)
    where = {name: f"parts/{home}" for name, home in index["weight_map"].items()}
    (below / INDEX).write_text(json.dumps({**index, "weight_map": where}))
    snapshot = cache / "snapshots" / "0a1b"
    for made in (snapshot, cache / "blobs", links):
        made.mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        (links / path.name).symlink_to(path)
        shutil.copy(path, cache / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    shutil.copytree(plain, overlay)
    # Later than the others by its name, so that transformers takes it.
    moved = "model.norm.weight"
    old = overlay / index["weight_map"][moved]
    held = load_file(old)
    save_file({moved: held[moved]}, overlay / "overlay.safetensors", {"format": "pt"})
    save_file({**held, moved: torch.zeros_like(held[moved])}, old, {"format": "pt"})
    where = {**index["weight_map"], moved: "overlay.safetensors"}
    (overlay / INDEX).write_text(json.dumps({**index, "weight_map": where}))
    for folder in (plain, below, snapshot, links, overlay):
        same_answers(folder, place / f"{folder.name}-merged", wanted)
    shutil.copytree(plain, null)
    for path in null.glob("*.safetensors"):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = {**json.loads(data[8:end]), "__metadata__": None}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    same_answers(null, place / "null-merged", wanted)
    found = "an index with files in folders below, an overlay, links, a hub cache, no metadata"
    rows = [
        Row(
            *("transformers", transformers.__version__, f"LLaMA, {found}"),
            *("yes", "yes, by the logits and its own loader", "`--to huggingface`"),
            "yes, the logits are equal",
        ),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
