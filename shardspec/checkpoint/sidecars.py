"""What lies beside the weights of a checkpoint and goes along, so that its tool loads the output.

Only names that tools give to such files count. They are copied as they are, by the machinery that
writes the weights, and appear with these.
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
    """Return an output with what lies beside the weights of a checkpoint.

    Nothing is added to one file, and what only readers of torch's DCP know goes into DCP only.
    Refused are links that lead out of the checkpoint, and files that are too large or have the name
    of a file of weights.
    """
    directory = source.directory
    if not target.directory or not directory.is_dir():
        return target
    # A store that has been opened has been listed.
    there = frozenset(path.name for path in directory.iterdir())
    wanted = set(filter(_HUGGING_FACE.fullmatch, there))
    if format == "dcp":
        _check_megatron(source, there)
        wanted |= there & {_LIGHTNING, *(_MEGATRON if there >= _MEGATRON else ())}
    taken = wanted.intersection(file.name for file in target.files)
    if taken:
        raise CheckpointError(
            f"{directory}: {min(taken)} lies beside the weights, but the output has a file of that "
            f"name already; leave such files behind with {_WITHOUT}"
        )
    paths = [file_inside(directory, name, directory) for name in sorted(wanted)]
    files = tuple(copied_file(path, path.name) for path in paths if path.is_file())
    for file in files:
        if file.num_bytes > _MOST_BYTES:
            raise CheckpointError(
                f"{directory / file.name}: has {file.num_bytes} bytes, more than the {_MOST_BYTES} "
                f"of a file that goes along with weights; leave such files behind with {_WITHOUT}"
            )
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
        # Without Megatron's file beside it, it is something else, whatever it says.
        if source.objects or b'"sharded_backend"' in data:
            said = parse_json(data, path, "description")
    if said is None and not source.objects:
        return
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    problem = f"metadata.json says sharded_backend {backend!r}, and not 'torch_dist'"
    missing = min(_MEGATRON - there, default=None)
    if missing is None and backend == "torch_dist":
        with SourceFile(file_inside(directory, "common.pt", directory)) as file:
            read_torch_zip(file)
        return
    raise CheckpointError(
        f"{directory}: {f'{missing} is missing' if missing else problem}, and Megatron-core would "
        f"not load what is written; restore it, or write the tensors alone with {_WITHOUT}"
    )


def copied_file(path: Path, name: str) -> OutputFile:
    """Return a file that holds what another one does; it is read when it is written."""
    with SourceFile(path) as file:
        size = file.num_bytes

    def piece(number: int) -> RawBytes:
        start = number * _PIECE
        with SourceFile(path) as file:
            return RawBytes(start, file.read(start, min(_PIECE, size - start)))

    return OutputFile(name, size, made_bytes(-(-size // _PIECE), piece), ())
