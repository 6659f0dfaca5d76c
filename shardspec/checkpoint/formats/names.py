"""How formats are told apart: by the names of the files in a directory.

A format is a module that reads it and one entry in `FORMATS`; only the module that is needed is
imported.
"""

import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

NATIVE: Final = "shardspec"
INFO_NAME: Final = "sharding_info.json"

DCP: Final = "torch distributed checkpoint"
METADATA_NAME: Final = ".metadata"
DCP_OF_A_RANK: Final = re.compile(r"__(\d{1,9})_\d+\.distcp")
DCP_OWN_METADATA: Final = re.compile(r"__\d+\.metadata")
"""What each rank writes with use_collectives=False."""

MEGATRON_OBJECT: Final = re.compile(r"/shard_[0-9.]+_[0-9.]+\Z")
"""End of the names of Megatron-core's objects in DCP, such as ``/shard_0.1_4.2``."""

DCP_HF: Final = "torch DCP, Hugging Face format"
DCP_HF_SHARD: Final = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")

MEGATRON: Final = "Megatron-LM"
MEGATRON_FILE: Final = "model_optim_rng.pt"
MEGATRON_TRACKER: Final = "latest_checkpointed_iteration.txt"
MEGATRON_RANK: Final = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
MEGATRON_ITERATION: Final = re.compile(r"iter_\d{7,12}|release")
VERL_STEP: Final = "global_step_"
"""Checkpoints in a run of verl, which has a tracker as Megatron has."""

DEEPSPEED: Final = "DeepSpeed ZeRO"
DEEPSPEED_UNIVERSAL: Final = "DeepSpeed Universal Checkpoint"
DEEPSPEED_LATEST: Final = "latest"
DEEPSPEED_SCRIPT: Final = "zero_to_fp32.py"
UNIVERSAL_LATEST: Final = "latest_universal"
UNIVERSAL_OPTIMIZER: Final = "zero/optimizer_state.pt"
DEEPSPEED_OPTIMIZER: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt"
)
DEEPSPEED_MODEL: Final = re.compile(
    r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_model_states\.pt"
)

META: Final = "Meta's model parallel"
META_FILE: Final = re.compile(r"consolidated\.(\d\d)\.pth")
META_PARAMS: Final = "params.json"

RANK_FILES: Final = "torch files per rank"
RANK_FILE: Final = re.compile(
    r"(?!\.)(|.*?[_.-])(?:world_size_(\d{1,9})_)?rank[_-]?(\d{1,9})\.(?:pt|pth|bin)", re.DOTALL
)
is_rank_file: Final = RANK_FILE.fullmatch
"""Says whether a file name is that of one rank, such as ``model_world_size_2_rank_0.pt``."""

NATIVE_SHARD: Final = re.compile(r"shard-(\d{5,})-([0-9a-f]{16})\.safetensors")

SAFETENSORS: Final = "safetensors"
_INDEX: Final = re.compile(r".*\.safetensors\.index(?:\.[^.]+)?\.json", re.DOTALL)
is_index: Final = _INDEX.fullmatch
"""Says whether a file name is that of an index of safetensors files, perhaps of a variant."""
_NUMBER: Final = r"\d+[-_]of[-_]\d+"
_DATA_FILE: Final = re.compile(rf"(?!\.).*\.safetensors(?:[-_.]{_NUMBER})?", re.DOTALL)
is_data_file: Final = _DATA_FILE.fullmatch
"""Says whether a file name is that of a finished safetensors file."""

TORCH_FILE: Final = "torch file"
BIN_NAME: Final = "pytorch_model.bin"
_BIN_NUMBERED: Final = re.compile(
    rf"(?!\.)(?:.*[-_.])?{_NUMBER}(?:[-_.].*)?\.bin|(?!\.).*\.bin[-_.]{_NUMBER}", re.DOTALL
)
_BIN_FILE: Final = re.compile(
    rf"(?:(?:diffusion_)?pytorch|adapter)_model(?:\..*)?\.bin|{_BIN_NUMBERED.pattern}", re.DOTALL
)
is_bin_file: Final = _BIN_FILE.fullmatch
"""Says whether a file name is that of a whole model, or of a numbered part of one."""
_BIN_INDEX: Final = re.compile(r".*\.bin\.index(?:\.[^.]+)?\.json", re.DOTALL)
is_bin_index: Final = _BIN_INDEX.fullmatch
"""Says whether a file name is that of an index of ``.bin`` files, perhaps of a variant."""


WITHOUT_VALUES: Final = frozenset((SAFETENSORS, DCP_HF))
"""Formats that hold nothing but tensors."""


WITH_OBJECTS: Final = frozenset((NATIVE, DCP, TORCH_FILE, RANK_FILES))
"""Formats of one state dict; what runs of Megatron or DeepSpeed note of themselves is theirs."""


class Format(NamedTuple):
    """A way to write checkpoints that can be read."""

    name: str
    known_by: str
    """Example of a file in its directories, for errors."""
    reader: str
    """Module of `shardspec.checkpoint.formats` and its function that opens a directory."""
    files: tuple[str | re.Pattern[str], ...] = ()
    """Names that only directories of this format have."""
    takes: tuple[str, ...] = ()
    """Options of `open_checkpoint` that the reader takes."""
    in_parts: bool = False
    """Whether a file of such a name stands for its directory."""
    nested: bool = False
    """Whether its files lie in directories below."""
    beside: str = ""
    """What has to lie beside it too."""
    owns: str = ""
    """Pattern of the relative names of its files that nothing which can be read need list."""

    def finds(self, names: Iterable[str]) -> bool:
        """Return whether a directory with these names is of this format."""
        there = {*names, ""}
        return self.beside in there and any(
            file in there if isinstance(file, str) else any(map(file.fullmatch, there))
            for file in self.files
        )


_OF_DCP: Final = (METADATA_NAME, DCP_OF_A_RANK, DCP_OWN_METADATA)
_OF_MEGATRON: Final = (MEGATRON_TRACKER, MEGATRON_RANK, re.compile(r"iter_\d{7,12}"))
_OF_DEEPSPEED: Final = (
    *(DEEPSPEED_SCRIPT, re.compile(r"global_step\d+"), DEEPSPEED_OPTIMIZER),
    # A single file of model states of all ranks may be of a run without ZeRO.
    re.compile(rf"(?!mp_){DEEPSPEED_MODEL.pattern}"),
)
_UNIVERSAL: Final = "zero beside mp_rank_00_model_states.pt"
_OWN_SAFETENSORS: Final = r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
_OWN_DCP: Final = "|".join(("\\" + METADATA_NAME, DCP_OF_A_RANK.pattern, DCP_OWN_METADATA.pattern))
_OWN_UNIVERSAL: Final = (
    rf"zero/optimizer_state\.pt|zero/[^/]+/(fp32|exp_avg|exp_avg_sq|step)\.pt|{UNIVERSAL_LATEST}"
    r"|mp_rank_\d{2,6}_model_states\.pt"
)
_OWN_BIN: Final = r"pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"

FORMATS: Final = (
    Format(NATIVE, INFO_NAME, "native:open_native", (INFO_NAME,), in_parts=True, owns=INFO_NAME),
    Format(DCP, METADATA_NAME, "dcp:open_dcp", _OF_DCP, in_parts=True, owns=_OWN_DCP),
    Format(
        *(
            MEGATRON,
            "mp_rank_00",
            "megatron:open_megatron",
            _OF_MEGATRON,
            ("ranks", "source_rules"),
        ),
        in_parts=True,
        nested=True,
    ),
    Format(
        *(DCP_HF, "shard-00001-model-….safetensors", "dcp_hf:open_dcp_hf"),
        *((DCP_HF_SHARD,), ("ranks",)),
        in_parts=True,
        owns=DCP_HF_SHARD.pattern,
    ),
    *(
        Format(SAFETENSORS, known_by, "safetensors:open_directory", (file,), owns=_OWN_SAFETENSORS)
        for known_by, file in (("an index", _INDEX), ("*.safetensors", _DATA_FILE))
    ),
    Format(
        *(DEEPSPEED_UNIVERSAL, _UNIVERSAL, "deepspeed_universal:open_universal"),
        (DEEPSPEED_MODEL,),
        nested=True,
        beside="zero",
        owns=_OWN_UNIVERSAL,
    ),
    Format(
        *(DEEPSPEED, "zero_pp_rank_0_…_states.pt", "deepspeed:open_deepspeed", _OF_DEEPSPEED),
        in_parts=True,
    ),
    Format(
        *(
            META,
            "consolidated.00.pth",
            "tensor_parallel:open_meta",
            (META_FILE,),
            ("source_rules",),
        ),
        in_parts=True,
    ),
    Format(RANK_FILES, "…_rank_0.pt", "rank_files:open_rank_files", (RANK_FILE,)),
    Format(
        *(TORCH_FILE, BIN_NAME, "torch_file:open_bin_directory"),
        (_BIN_INDEX, BIN_NAME, _BIN_NUMBERED),
        owns=_OWN_BIN,
    ),
)
"""In the order in which they are tried."""


def format_of_names(names: Iterable[str]) -> Format | None:
    """Return the format of a directory with these names."""
    there = list(names)
    return next((one for one in FORMATS if one.finds(there)), None)


_ALL_OF_THEM: Final = "name the directory with the files of all of them"
EXPERTS: Final = "DeepSpeed's mixture of experts"
PIPELINE: Final = "DeepSpeed's pipeline"
TENSOR_PARALLEL: Final = "DeepSpeed's tensor parallel"
PARTS: Final = {
    DEEPSPEED: (
        re.compile(r"(?:(?:bf16|fp16)_)?zero_pp_rank_\d+_mp_rank_\d+_(?:model|optim)_states\.pt"),
        _ALL_OF_THEM,
    ),
    EXPERTS: (
        re.compile(
            r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"
            r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
        ),
        'put the weights together with python -c "import glob, torch; '
        "s = torch.load('RUN/mp_rank_00_model_states.pt', weights_only=False)['module']; "
        "[s.update(torch.load(f)) for f in glob.glob('RUN/*expert_*_model_states.pt')]; "
        "torch.save(s, 'OUT.pt')\"",
    ),
    PIPELINE: (
        re.compile(r"layer_\d+-model_(?:\d+-model_)?states\.pt"),
        "load it in a run of as many stages, and save the whole state dict",
    ),
    TENSOR_PARALLEL: (
        re.compile(r"mp_rank_(\d+)_model_states\.pt"),
        "load it in a run of as many ranks, and save the whole state dict",
    ),
    META: (META_FILE, _ALL_OF_THEM),
}
"""Formats with a file for each rank: pattern of the files, and what helps. A file whose number is 0
may be the only one."""

_WHOLE_TENSORS: Final = "load it with the tool that wrote it, and save whole tensors as safetensors"
_NOT_READ: Final = (
    (
        "orbax (OCDBT)",
        r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_sharding",
        _WHOLE_TENSORS,
    ),
    (
        "zarr, as Megatron-core had it before torch_dist",
        r"\.zarray|\.zgroup",
        "load it with Megatron, and save it as torch_dist",
    ),
    ("Flax", r"flax_model.*\.msgpack", _WHOLE_TENSORS),
    (
        "TensorFlow",
        r"tf_model.*\.h5|model\.ckpt.*\.(index|meta)|saved_model\.pb",
        _WHOLE_TENSORS,
    ),
    ("llama.cpp (GGUF)", r".*\.gguf", "name the checkpoint that it was made of"),
    ("NeMo", r".*\.nemo", "unpack it with tar -xf FILE, and name the directory in it"),
    (
        "the optimizer of data parallel ranks, in buckets (Megatron's distrib_optim.pt)",
        r"distrib_optim\.pt",
        "name the model beside it, or save optimizers as torch_dist",
    ),
)
"""What is recognised and not read: its name, its files, and what helps."""


def not_read(names: Iterable[str]) -> str | None:
    """Return what a directory with these names, or a file, is that is not read, and what helps."""
    there = tuple(names)
    for kind, pattern, remedy in _NOT_READ:
        if any(re.fullmatch(pattern, name) for name in there):
            return f"is of {kind}, which is not read; {remedy}"
    return None


def part_of_several(name: str, beside: Callable[[], Iterable[str]]) -> str | None:
    """Return which of `PARTS` a file is one of, by its name and those beside it."""
    for kind, (pattern, _) in PARTS.items():
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if not match.groups():
            return kind
        others = list(beside())
        if kind == TENSOR_PARALLEL:
            # The parts that are the same on all ranks, beside those that are not.
            for other in (EXPERTS, PIPELINE):
                if any(map(PARTS[other][0].fullmatch, others)):
                    return other
        if int(match[1]) or sum(pattern.fullmatch(other) is not None for other in others) > 1:
            return kind
    return None


def part_text(kind: str) -> str:
    """Return what a file of one of `PARTS` is, for errors."""
    return f"one of several files of {kind}, which are not read one by one; {PARTS[kind][1]}"
