"""Folders of transformers, and the name maps that come along, by what its models answer."""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from tests.tools.commands import shardspec
from tests.tools.language_models import CONFIGS, answers, loaded, model_of
from tests.tools.table import Row, write_rows

Shapes = dict[str, tuple[int, ...]]


def shapes_in(folder: Path) -> Shapes:
    """Return the shapes in the safetensors files of a folder, by the library of that name."""
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = file.keys()
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def rules_for(shapes: Shapes, path: Path) -> Path:
    """Write rules that cut every tensor, its first dim or its last by turns."""
    lines = []
    for number, (name, shape) in enumerate(shapes.items()):
        dims = ["R"] * len(shape)
        dims[-(number % 2)] = "S0"
        lines.append(f'"{name}" = "[{",".join(dims)}]"')
    path.write_text("\n".join(lines))
    return path


def same_answers(folder: Path, wanted: torch.Tensor) -> None:
    assert torch.equal(answers(loaded(folder)), wanted), folder


def saved_and_resharded(folder: Path, place: Path, wanted: torch.Tensor) -> None:
    """Merge a folder; reshard it for three ranks and merge that; the model answers as before."""
    found = json.loads(shardspec("inspect", folder, "--json"))
    shapes = shapes_in(folder)
    assert {t["name"]: tuple(t["shape"]) for t in found["tensors"]} == shapes
    shardspec("verify", folder)
    shardspec("merge", folder, "-o", f"{place}/merged/")
    same_answers(place / "merged", wanted)
    shardspec("merge", folder, "-o", f"{place}/small", "--max-shard-size", "50kB")
    assert len(list((place / "small").glob("*.safetensors"))) > 1
    same_answers(place / "small", wanted)
    rules = rules_for(shapes, place / "rules.toml")
    shardspec("reshard", folder, "-o", place / "own", "--mesh", "3", "--rules", rules)
    shardspec("merge", place / "own", "-o", f"{place}/back/")
    same_answers(place / "back", wanted)


def numbered_files(folder: Path, place: Path, wanted: torch.Tensor) -> None:
    """Merge numbered ``.bin`` files, which transformers reads too, and files without an index."""
    bins = place / "bin"
    bins.mkdir()
    shutil.copy(folder / "config.json", bins)
    index: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        held, name = load_file(path), f"pytorch_{path.stem}.bin"
        torch.save(held, bins / name)
        index |= dict.fromkeys(held, name)
    listed = bins / "pytorch_model.bin.index.json"
    listed.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    same_answers(bins, wanted)
    shardspec("merge", bins, "-o", f"{place}/of-bin/")
    same_answers(place / "of-bin", wanted)
    listed.unlink()
    shutil.copytree(folder, place / "numbered")
    (place / "numbered" / "model.safetensors.index.json").unlink()
    for name, given in (("of-bin-alone", bins), ("of-numbered", place / "numbered")):
        shardspec("merge", given, "-o", f"{place}/{name}/")
        same_answers(place / name, wanted)


def there_and_back(
    target: str, folder: Path, sizes: Path, place: Path, wanted: torch.Tensor
) -> None:
    """Take a model to other names and back, on one rank and on three."""
    place.mkdir()
    by = ("--model", sizes)
    forth = (*by, "--names", target)
    mapped, back = place / "mapped", place / "back"
    shardspec("merge", folder, "-o", f"{mapped}/", *forth)
    shutil.copy(sizes, mapped / "config.json")
    shardspec("merge", mapped, "-o", f"{back}/", *by)
    assert shapes_in(back) == shapes_in(folder)
    shutil.copy(folder / "config.json", back)
    same_answers(back, wanted)
    rules = rules_for(shapes_in(mapped), place / "rules.toml")
    cut = ("--mesh", "3", "--rules", rules)
    shardspec("reshard", folder, "-o", place / "own", *cut, *forth)
    shardspec("merge", place / "own", "-o", f"{place}/again/", *by)
    shutil.copy(folder / "config.json", place / "again")
    same_answers(place / "again", wanted)


def fused_as_others_fuse(place: Path, wanted: torch.Tensor) -> None:
    """Load LLaMA's fused form as Phi-3, whose layers are LLaMA's with just these matrices fused."""
    folder = place / "llama" / "fused" / "mapped"
    config = json.loads((folder / "config.json").read_text())
    kept = {k: v for k, v in config.items() if k not in ("architectures", "head_dim", "model_type")}
    phi3 = transformers.Phi3Config(**kept)
    phi3.architectures = ["Phi3ForCausalLM"]
    phi3.save_pretrained(folder)
    difference = (answers(loaded(folder)) - wanted).abs().max()
    assert difference < 1e-5, difference


def experts_in_memory(model: torch.nn.Module, place: Path) -> None:
    """Compare the stacks of experts with those of transformers, and merge what a trainer saves."""
    state = model.state_dict()
    mapped = load_file(place / "fused" / "mapped" / "model.safetensors")
    for layer in range(2):
        ours = f"model.layers.{layer}.block_sparse_moe.experts.routed_experts."
        theirs = f"model.layers.{layer}.mlp.experts."
        assert torch.equal(mapped[f"{ours}w13_weight"], state[f"{theirs}gate_up_proj"])
        assert torch.equal(mapped[f"{ours}w2_weight"], state[f"{theirs}down_proj"])


def names_in_memory(model: torch.nn.Module, place: Path, wanted: torch.Tensor) -> None:
    """Merge what `torch.distributed.checkpoint` saves of a model; transformers takes its names."""
    saved, merged = place / "dcp", place / "of-dcp"
    save(model.state_dict(), checkpoint_id=saved, no_dist=True)
    shutil.copy(place / "hf" / "config.json", saved)
    shardspec("merge", saved, "-o", f"{merged}/")
    same_answers(merged, wanted)
    for target in ("fused", "megatron"):
        mapped, back = place / f"of-dcp-{target}", place / f"of-dcp-{target}-back"
        shardspec("merge", saved, "-o", f"{mapped}/", "--model", saved, "--names", target)
        shardspec("merge", mapped, "-o", f"{back}/", "--model", saved)
        same_answers(back, wanted)


def main(place: Path, rows_file: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    for label, config in CONFIGS.items():
        here = place / label.replace(", ", "-").replace(" ", "-")
        model = model_of(config)
        wanted = answers(model)
        folder = here / "hf"
        model.save_pretrained(folder, max_shard_size="60KB")
        assert len(list(folder.glob("*.safetensors"))) > 5
        same_answers(folder, wanted)
        saved_and_resharded(folder, here, wanted)
        names_in_memory(model, here, wanted)
        sizes = here / "sizes.json"
        config_sizes = json.loads((folder / "config.json").read_text())
        sizes.write_text(json.dumps({**config_sizes, "padded_vocab": 128}))
        there_and_back("megatron", folder, sizes, here / "megatron", wanted)
        there_and_back("fused", folder, folder / "config.json", here / "fused", wanted)
        if label == "llama":
            fused_as_others_fuse(place, wanted)
            numbered_files(folder, here, wanted)
        if label == "mixtral":
            experts_in_memory(model, here)
        print(f"{label}: equal logits", file=sys.stderr)
    tool = ("transformers", transformers.__version__)
    models = "LLaMA, Qwen2, Mistral, GPT-2, GPT-NeoX, Mixtral"
    rows = [
        Row(
            *(
                *tool,
                f"folders with an index, 6 to 9 safetensors files: {models}; tied, with biases too",
            ),
            *("yes", "yes, by their logits", "`--to huggingface`, whole and resharded"),
            "yes, the logits are equal",
        ),
        Row(
            *(
                *tool,
                f"the same by the maps to Megatron-core (vocabulary padded) and back: {models}",
            ),
            *("yes", "yes, by their logits", "`--to huggingface`, whole and resharded"),
            "yes, the logits are equal",
        ),
        Row(
            *(*tool, f"the same by the maps to fused serving and back: {models}"),
            *("yes", "experts: yes, by the stacks in memory", "`--to huggingface`, resharded"),
            "yes, the logits are equal; LLaMA's fused form as Phi-3",
        ),
        Row(
            *(*tool, f"DCP of `model.state_dict()`, with `config.json`: {models}"),
            *("yes", "yes, by their logits", "`--to huggingface`, also by the maps and back"),
            "yes, the logits are equal",
        ),
        Row(
            *(*tool, "numbered `.bin` with an index and without, `.safetensors` without: LLaMA"),
            *("yes", "yes, by the logits", "`--to huggingface`", "yes, the logits are equal"),
        ),
    ]
    write_rows(rows_file, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
