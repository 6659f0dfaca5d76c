"""Models that torchao and bitsandbytes have quantized, merged and resharded, and loaded again."""

import sys
from importlib.metadata import version
from pathlib import Path

import torch
from torchao.quantization import Int8WeightOnlyConfig, PerGroup
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, TorchAoConfig

from tests.tools.commands import shardspec
from tests.tools.language_models import answers, loaded, model_of
from tests.tools.table import Row, write_rows

KINDS = {
    "torchao int8": TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao int8 in groups": TorchAoConfig(Int8WeightOnlyConfig(granularity=PerGroup(32))),
    "bitsandbytes nf4": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    ),
    "bitsandbytes int8": BitsAndBytesConfig(load_in_8bit=True),
}
CUT = {
    "torchao int8 in groups": ("*.k_proj._weight_qdata", "[R,S0]"),
    "bitsandbytes nf4": ("*.k_proj.weight", "[S0,R]"),
}
"""Cuts of codes over three ranks."""


# The kernels of bitsandbytes for CPUs take multiples of 32.
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main(place: Path, rows_file: str) -> None:
    plain = model_of(CONFIG)
    plain.save_pretrained(place / "plain")
    rows = []
    for kind, config in KINDS.items():
        here = place / kind.replace(" ", "-")
        model = AutoModelForCausalLM.from_pretrained(
            place / "plain", quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        model.save_pretrained(here / "saved", max_shard_size="60KB")
        wanted = answers(loaded(here / "saved"))
        assert not torch.equal(wanted, answers(plain)), "it is quantized"
        assert len(list((here / "saved").glob("*.safetensors"))) > 1
        shardspec("verify", here / "saved")
        shardspec("merge", here / "saved", "-o", f"{here}/merged/")
        shardspec("reshard", here / "saved", "-o", here / "own", "--mesh", "2", "--rule",
                  "*norm.weight", "[S0]")  # fmt: skip
        shardspec("merge", here / "own", "-o", f"{here}/back/")
        for folder in ("merged", "back"):
            assert torch.equal(answers(loaded(here / folder)), wanted), (kind, folder)
        if kind in CUT:
            cut = ("--mesh", "3", "--rule", *CUT[kind])
            said = shardspec("reshard", here / "saved", "-o", here / "cut", *cut, code=2)
            assert "replicate it" in said, said
            assert not (here / "cut").exists()
        said = shardspec("merge", here / "saved", "-o", here / "cast", "--dtype", "bf16", code=2)
        assert "is quantized" in said, said
        tool, _, how = kind.partition(" ")
        rows.append(
            Row(
                *(tool, version(tool), f"{how} of a LLaMA, several safetensors files"),
                *("yes", "yes, by the logits", "`--to huggingface`"),
                "yes, by transformers: the logits are equal; a cut of the codes is refused"
                if kind in CUT
                else "yes, by transformers: the logits are equal",
            )
        )
    write_rows(rows_file, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
