"""Files beside the weights that tools need to load them: which go along into an output."""

import re
from collections.abc import Callable, Collection
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.targets import Target, copied_file
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
    itself, those of the model, if it is one.
    """
    directory = source.home
    there = frozenset(directory.names())
    alone = directory != source.directory
    if alone and not there & {"config.json", "adapter_config.json"}:
        return target
    beside = there - {file.relative_to(directory).parts[0] for file in source.files}
    chosen = model_sidecars if alone else sidecars
    wanted = chosen(directory, beside) if target.directory else ()
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
        files.append(file)
    # The state of one file was taken without what lies beside it.
    source.beside = () if alone else tuple(directory / file.name for file in files)
    names = tuple(file.name for file in files)
    others = [] if alone else sorted(beside.difference(names))
    left = tuple(f"{name}/" if (directory / name).is_dir() else name for name in others)
    return target._replace(files=(*target.files, *files), sidecars=names, not_copied=left)


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
