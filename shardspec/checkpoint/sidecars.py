"""Files beside the weights of a checkpoint that go along, so that its tool loads the output.

Only names that tools give to such files count. They are copied with the weights, and are committed
together.
"""

import re
from pathlib import Path
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import file_inside
from shardspec.checkpoint.strict_json import parse_json
from shardspec.checkpoint.targets import OutputFile, RawBytes, Target, made_bytes
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.errors import CheckpointError

_HUGGING_FACE: Final = re.compile(
    r"(adapter_|generation_|tokenizer_|(video_|image_)?(pre)?processor_|quantize_|hf_quant_)?"
    r"config\.json"
    r"|(tokenizer|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|vocab\.txt|merges\.txt|chat_template\.jinja|tokenizer\.tiktoken"
    r"|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model"
    r"|(configuration|modeling|tokenization|processing)_\w{1,60}\.py"
)
"""Of `transformers` and PEFT."""
_MEGATRON: Final = frozenset(("common.pt", "metadata.json"))
"""Of Megatron-core; one of them alone is something else."""
_LIGHTNING: Final = "meta.pt"
_MOST_BYTES: Final = 2**28
"""Of one file; tokenizers have some ten million."""
_PIECE: Final = 2**20
_WITHOUT: Final = "--no-sidecars (sidecars=False)"


def add_sidecars(source: Catalog, target: Target, format: str) -> Target:
    """Return an output directory with the files that lie beside the weights of a checkpoint."""
    directory = source.directory
    if not target.directory or not directory.is_dir():
        return target
    # A store that has been opened has been listed.
    there = frozenset(path.name for path in directory.iterdir())
    wanted = set(filter(_HUGGING_FACE.fullmatch, there))
    if format == "dcp":
        _check_megatron(source, there)
        wanted |= there & {_LIGHTNING, *(_MEGATRON if there >= _MEGATRON else ())}
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
            raise CheckpointError(f"{path}: {problem}; leave such files behind with {_WITHOUT}")
        files.append(file)
    source.beside = tuple(directory / file.name for file in files)
    names = tuple(file.name for file in files)
    return target._replace(files=(*target.files, *files), sidecars=names)


def _check_megatron(source: Catalog, there: frozenset[str]) -> None:
    """Check that Megatron-core can load what is written, if it has written what is read."""
    directory = source.directory
    said: object = None
    if "metadata.json" in there:
        path = file_inside(directory, "metadata.json", directory)
        with SourceFile(path) as file:
            data = file.read(0, min(file.num_bytes, _PIECE))
        # Other tools have files of this name too.
        if source.objects or b'"sharded_backend"' in data:
            said = parse_json(data, path, "description")
    if said is None and not source.objects:
        return
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    problem = f"metadata.json says sharded_backend {backend!r}, and not 'torch_dist'"
    if missing := min(_MEGATRON - there, default=""):
        problem = f"{missing} is missing"
    if missing or backend != "torch_dist":
        raise CheckpointError(
            f"{directory}: {problem}, and Megatron-core would not load what is written; restore "
            f"it, or write the tensors alone with {_WITHOUT}"
        )
    with SourceFile(file_inside(directory, "common.pt", directory)) as file:
        read_torch_zip(file)


def copied_file(path: Path, name: str) -> OutputFile:
    """Return a file that holds what another one does; it is read when it is written."""
    with SourceFile(path) as file:
        size = file.num_bytes

    def piece(number: int) -> RawBytes:
        start = number * _PIECE
        with SourceFile(path) as file:
            return RawBytes(start, file.read(start, min(_PIECE, size - start)))

    return OutputFile(name, size, made_bytes(-(-size // _PIECE), piece), ())
