"""Copies the non-weight files that tools need, such as configs and tokenizers."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

from shardspec.checkpoint.catalog import Catalog, OutputFile, RawBytes, Target, copied_file
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.strict_json import parse_json
from shardspec.errors import CheckpointError
from shardspec.text import Argument

_CONFIG: Final = "config.json"
_STATE_DTYPES: Final = frozenset({_CONFIG, "generation_config.json"})
"""Files that record the dtype of weights, also nested: ``dtype`` or ``torch_dtype``."""
_WEIGHTS: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Names of weights' dtypes in configs."""
_OF_MODELS: Final = frozenset({_CONFIG, "adapter_config.json"})
_HUGGING_FACE: Final = re.compile(
    r"(\w{1,60}_)?config\.json|params\.json|chat_template\.\w{1,10}"
    r"|(tokenizer|tekken|special_tokens_map|added_tokens|normalizer|emoji|encoder)\.json"
    r"|((entity|target)_)?vocab(-src|-tgt)?\.(json|txt|bpe)|(word_\w{1,20}|byte_maps)\.json"
    r"|merges\.txt|dict\.txt|bpe\.codes|prophetnet\.tokenizer|[\w.-]{1,60}\.(tiktoken|spm)"
    r"|(tokenizer|spiece|sentencepiece(\.bpe)?|spm(_char)?|tiktoken)\.model(\.v\w{1,10})?"
    r"|(configuration|modeling|tokenization|(image_|video_)?processing|feature_extraction)_\w{1,60}"
    r"\.py"
)
"""Files of `transformers` and PEFT: configs, the files of every tokenizer, and code."""
_OWN_CODE: Final = b'"auto_map"'
"""Key in the config of a model with its own code; that code may import files beside it."""
SECTIONS: Final = frozenset({"quantization_config", "quantization", "compression_config"})
QUANTIZED_BY: Final = frozenset(
    {
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
    }
)
"""Files that only describe the quantization of weights."""
_MOST_BYTES: Final = 2**28
"""Maximum bytes of one file; tokenizers have some ten million."""
WITHOUT_SIDECARS: Final = Argument("sidecars", value=False)


def add_sidecars(
    source: Catalog,
    target: Target,
    sidecars: Callable[[StoragePath, Collection[str]], set[str]],
    dtype: str | None = None,
) -> Target:
    """Return an output with the config, tokenizer and other non-weight files of its source added.

    A directory gets the files that `sidecars` selects. If the source is a single file, or the model
    has a separate directory, only known model files are copied. Configs get the new quantization,
    and the new `dtype` of the weights.
    """
    described_in = source.facts.described_in
    elsewhere = described_in is not None
    directory = source.home if described_in is None else described_in
    is_directory = not elsewhere and directory == source.directory
    weights = (file for file in source.files if directory in file.parents)
    beside = {*directory.names()} - {file.relative_to(directory).parts[0] for file in weights}
    to_copy: set[str] = set()
    if target.directory and (is_directory or elsewhere or beside & _OF_MODELS):
        to_copy = (sidecars if is_directory else model_sidecars)(directory, beside)
    section = source.facts.quantization
    if section is not None:
        to_copy -= QUANTIZED_BY
    elif elsewhere and not _has_codes(target):
        section = {}
    if dtype is None and elsewhere:
        dtype = _one_dtype(target)
    output_names = {file.name for file in target.files}
    files = []
    for name in sorted(to_copy):
        path = file_inside(directory, name, directory)
        if not path.is_file():
            continue
        file = copied_file(path, name)
        problem = ""
        if name in output_names:
            problem = "has the name of a file of the output"
        elif file.num_bytes > _MOST_BYTES:
            problem = f"has {file.num_bytes} bytes, more than the {_MOST_BYTES} of a sidecar"
        if problem:
            why = f"{path}: this file cannot be copied: it {problem}; copy only weights, with "
            raise CheckpointError(why, WITHOUT_SIDECARS)
        of_model = name in _STATE_DTYPES and dtype is not None
        if of_model or (name == _CONFIG and section is not None):
            file = _restated(file, path, section if name == _CONFIG else None, dtype)
        files.append(file)
    names = tuple(file.name for file in files)
    others = sorted(beside.difference(names)) if is_directory else ()
    not_copied = tuple(f"{name}/" if (directory / name).is_dir() else name for name in others)
    # The snapshot of a single file does not include files beside it.
    beside_paths = tuple(directory / name for name in names) if is_directory else ()
    if section and target.directory and _CONFIG not in {*output_names, *names}:
        data = json.dumps({"quantization_config": section}, indent=2).encode()
        files.append(OutputFile(_CONFIG, len(data), [RawBytes(0, data)], ()))
    return target._replace(
        files=(*target.files, *files), sidecars=names, beside=beside_paths, not_copied=not_copied
    )


def _has_codes(target: Target) -> bool:
    dtypes = (extent.tensor.dtype for file in target.files for extent in file.extents)
    return any(dtype.startswith(("float8", "uint8", "int8")) for dtype in dtypes)


def _one_dtype(target: Target) -> str | None:
    """Return the dtype that all floating point tensors of an output share; None if they differ."""
    dtypes = {tensor.dtype for tensor in target.tensors if tensor.dtype in _WEIGHTS}
    return dtypes.pop() if len(dtypes) == 1 else None


def _restated(
    file: OutputFile, path: StoragePath, section: Mapping[str, object] | None, dtype: str | None
) -> OutputFile:
    """Return a copy of a config file with the output's quantization section and dtype in it.

    An empty section removes the existing one. None keeps the section, or the dtype.
    """
    data = b"".join(raw.made() for raw in file.raw)
    config = parse_json(data, path, "config")
    if isinstance(config, dict):
        changed = False
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        for each in parts if section is not None else ():
            for key in SECTIONS & each.keys():
                changed = True
                del each[key]
        if section:
            config["quantization_config"], changed = section, True
        below: list[object] = [config] if dtype is not None else []
        while below:
            part = below.pop()
            if not isinstance(part, dict):
                continue
            for key, value in part.items():
                known = isinstance(value, str) and value.removeprefix("torch.") in _WEIGHTS
                if key in ("dtype", "torch_dtype") and known and value != dtype:
                    part[key], changed = dtype, True
                elif key not in SECTIONS:
                    below.append(value)
        if changed:
            data = json.dumps(config, indent=2).encode()
    return OutputFile(file.name, len(data), [RawBytes(0, data)], ())


def model_sidecars(directory: StoragePath, names: Collection[str]) -> set[str]:
    """Return those of `names` that go with Hugging Face models: configs, tokenizers, code."""
    sidecars = {name for name in names if _HUGGING_FACE.fullmatch(name)}
    if any(_has_code(directory, name) for name in sidecars if name.endswith("config.json")):
        sidecars |= {name for name in names if name.endswith(".py")}
    return sidecars


def _has_code(directory: StoragePath, name: str) -> bool:
    path = file_inside(directory, name, directory)
    if not path.is_file():
        return False
    with path.open() as file:
        return _OWN_CODE in file.read(0, min(file.num_bytes, _MOST_BYTES))
