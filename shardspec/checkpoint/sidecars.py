"""Files beside the weights that tools need to load them: which go along into an output."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.quantized import QUANTISED_BY, SECTIONS
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.strict_json import parse_json
from shardspec.checkpoint.targets import OutputFile, RawBytes, Target, copied_file
from shardspec.errors import CheckpointError
from shardspec.text import Argument

_HUGGING_FACE: Final = re.compile(
    r"(\w{1,60}_)?config\.json|params\.json|chat_template\.\w{1,10}"
    r"|(tokenizer|tekken|special_tokens_map|added_tokens|normalizer|emoji|encoder)\.json"
    r"|((entity|target)_)?vocab(-src|-tgt)?\.(json|txt|bpe)|(word_\w{1,20}|byte_maps)\.json"
    r"|merges\.txt|dict\.txt|bpe\.codes|prophetnet\.tokenizer|[\w.-]{1,60}\.(tiktoken|spm)"
    r"|(tokenizer|spiece|sentencepiece(\.bpe)?|spm(_char)?|tiktoken)\.model(\.v\w{1,10})?"
    r"|(configuration|modeling|tokenization|(image_|video_)?processing|feature_extraction)_\w{1,60}"
    r"\.py"
)
"""Of `transformers` and PEFT: configs, the files of every tokenizer, and code."""
_OWN_CODE: Final = b'"auto_map"'
"""Says in a config that a model brings code, which may import what lies beside it."""
_MOST_BYTES: Final = 2**28
"""Of one file; tokenizers have some ten million."""
WITHOUT_SIDECARS: Final = Argument("sidecars", value=False)


def add_sidecars(
    source: Catalog, target: Target, sidecars: Callable[[StoragePath, Collection[str]], set[str]]
) -> Target:
    """Return an output with the files that lie beside the weights of a checkpoint.

    Into a directory go those that `sidecars` names; of what lies beside one file that is named
    itself, those of the model, if it is one. How weights are quantised is in a config in any case.
    """
    target = _with_sidecars(source, target, sidecars)
    names = {file.name for file in target.files}
    if source.quantization and target.directory and "config.json" not in names:
        data = json.dumps({"quantization_config": source.quantization}, indent=2).encode()
        config = OutputFile("config.json", len(data), [RawBytes(0, data)], ())
        target = target._replace(files=(*target.files, config))
    return target


def _with_sidecars(
    source: Catalog, target: Target, sidecars: Callable[[StoragePath, Collection[str]], set[str]]
) -> Target:
    if source.described_in is not None:
        return _with_config(source, source.described_in, target)
    directory = source.home
    there = frozenset(directory.names())
    alone = directory != source.directory
    if alone and not there & {"config.json", "adapter_config.json"}:
        return target
    beside = there - {file.relative_to(directory).parts[0] for file in source.files}
    chosen = model_sidecars if alone else sidecars
    wanted = chosen(directory, beside) if target.directory else set()
    if source.quantization is not None:
        wanted -= QUANTISED_BY
    taken = {file.name for file in target.files}
    files = []
    for name in sorted(wanted):
        path = file_inside(directory, name, directory)
        if not path.is_file():
            continue
        file = copied_file(path, name)
        problem = ""
        if name in taken:
            problem = "lies beside the weights, but the output has a file of that name already"
        elif file.num_bytes > _MOST_BYTES:
            problem = f"has {file.num_bytes} bytes, more than the {_MOST_BYTES} of a sidecar"
        if problem:
            raise CheckpointError(
                f"{path}: {problem}; leave such files behind with ", WITHOUT_SIDECARS
            )
        if name == "config.json" and source.quantization is not None:
            file = _restated(file, path, source.quantization)
        files.append(file)
    # The state of one file was taken without what lies beside it.
    source.beside = () if alone else tuple(directory / file.name for file in files)
    names = tuple(file.name for file in files)
    others = [] if alone else sorted(beside.difference(names))
    left = tuple(f"{name}/" if (directory / name).is_dir() else name for name in others)
    return target._replace(files=(*target.files, *files), sidecars=names, not_copied=left)


def _with_config(source: Catalog, directory: StoragePath, target: Target) -> Target:
    """Return an output directory with a model's config and tokenizer, from where these are.

    Where no weight is quantised, the config does not say so.
    """
    if not target.directory:
        return target
    names = model_sidecars(directory, directory.names())
    if source.quantization is not None:
        names -= QUANTISED_BY
    taken = {file.name for file in target.files}
    dtypes = (extent.tensor.dtype for file in target.files for extent in file.extents)
    codes = any(dtype.startswith(("float8", "uint8", "int8")) for dtype in dtypes)
    files = []
    for name in sorted(names - taken):
        path = file_inside(directory, name, directory)
        file = copied_file(path, name)
        section = source.quantization
        if section is None and not codes:
            section = {}
        if name == "config.json" and section is not None:
            file = _restated(file, path, section)
        files.append(file)
    return target._replace(
        files=(*target.files, *files), sidecars=tuple(file.name for file in files)
    )


def _restated(file: OutputFile, path: StoragePath, section: Mapping[str, object]) -> OutputFile:
    """Return a config that says of how weights are quantised what a section does, or nothing."""
    data = b"".join(raw.made() for raw in file.raw)
    config = parse_json(data, path, "config")
    if isinstance(config, dict):
        parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
        stated = [(part, key) for part in parts for key in SECTIONS & part.keys()]
        for part, key in stated:
            del part[key]
        if section:
            config["quantization_config"] = section
        if section or stated:
            data = json.dumps(config, indent=2).encode()
    return OutputFile(file.name, len(data), [RawBytes(0, data)], ())


def model_sidecars(directory: StoragePath, names: Collection[str]) -> set[str]:
    """Return which of the files in a directory are of a model of Hugging Face's."""
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
