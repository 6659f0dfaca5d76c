"""Finds the files of a model in a directory: those of its index, a numbered set, or a single file.

Both safetensors and ``.bin`` files are found by these rules:

- An index, ``{"weight_map": {tensor name: file name}}``, decides the file of each tensor, even if
  another file has a tensor of that name. Its files may be in subdirectories. A numbered file of
  the same model that the index does not list (``-00001-of-00003``, ``part-1``) is an error, and so
  is a file that lacks a listed tensor.
- Without an index, all files numbered ``-00001-of-00003`` must exist. Also recognized are
  ``model-1-of-3``, ``model.fp16-00001-of-00003``, ``model-00001-of-00003.fp16`` and
  ``model.safetensors-00001-of-00003``; some tools count from 0.
- A directory contains one model. If it has files or indexes of several (``model`` beside
  ``consolidated`` or ``adapter_model``, or variants of a model), the caller must name one.

`from_pretrained` of transformers reads ``model.safetensors``, else its index, else
``pytorch_model.bin`` or its index; other tools prefer others.

Sources: ``_get_resolved_checkpoint_files`` of transformers/modeling_utils.py and
``get_checkpoint_shard_files`` of transformers/utils/hub.py; ``split_torch_state_dict_into_shards``
of huggingface_hub; ``variant_compatible_siblings`` of diffusers.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple

from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.reading import Snapshot
from shardspec.checkpoint.storage.strict_json import checked, field, read_json
from shardspec.errors import CheckpointError
from shardspec.text import shown

_INDEX: Final = re.compile(r".*\.safetensors\.index(?:\.[^.]+)?\.json", re.DOTALL)
is_index: Final = _INDEX.fullmatch
"""Matches names of indexes of safetensors files, also of a variant such as ``fp16``."""
_NUMBER: Final = r"\d+[-_](?i:of)[-_]\d+"
_DATA_FILE: Final = re.compile(rf"(?!\.).*\.safetensors(?:[-_.]{_NUMBER})?", re.DOTALL)
is_data_file: Final = _DATA_FILE.fullmatch
"""Matches the name of a finished safetensors file."""

BIN_NAME: Final = "pytorch_model.bin"
_BIN_NUMBERED: Final = re.compile(
    rf"(?!\.)(?:.*[-_.])?{_NUMBER}(?:[-_.].*)?\.bin|(?!\.).*\.bin[-_.]{_NUMBER}", re.DOTALL
)
is_numbered_bin: Final = _BIN_NUMBERED.fullmatch
"""Matches the name of one of several ``.bin`` files."""
_BIN_FILE: Final = re.compile(
    rf"(?:(?:diffusion_)?pytorch|adapter)_model(?:\..*)?\.bin|{_BIN_NUMBERED.pattern}", re.DOTALL
)
is_bin_file: Final = _BIN_FILE.fullmatch
"""Matches the name of a ``.bin`` file with a model, or a numbered part of one."""
_BIN_INDEX: Final = re.compile(r".*\.bin\.index(?:\.[^.]+)?\.json", re.DOTALL)
is_bin_index: Final = _BIN_INDEX.fullmatch
"""Matches names of indexes of ``.bin`` files; also ``….bin.index.fp16.json``, of a variant."""

_NUMBERED: Final = re.compile(
    r"(.*?)(?:^|[-_.]+)(\d+)[-_](?i:of)[-_](\d+)((?:[-_.].*)?)", re.DOTALL
)
_ANY_NUMBER: Final = re.compile(r"(?<![^\W_])\d+(?![^\W_])")
"""A number in a file name, but not that of ``fp16``."""
_SUFFIX: Final = re.compile(r"\.(?:safetensors|bin)(?=[-_.]|\Z)(?:\.index)?")
_COMPLETE: Final = re.compile(
    r"(?:(?:pytorch_|diffusion_pytorch_|adapter_)?model|consolidated|optimizer)(?:\..*)?", re.DOTALL
)
"""Files that are a model, or an optimizer, by themselves, and their variants."""
_MODEL: Final = "model"
_BIN_PREFIX: Final = "pytorch_"
_MAX_SHOWN: Final = 3


class _Place(NamedTuple):
    """Parsed name of a file: ``model-00001-of-00003.safetensors`` is number 1 of 3 of "model"."""

    model: str
    """Name of the model: the file name without number and suffix."""
    number: int | None
    """Number of the file among `total`; None if it has none."""
    total: int


class ModelFiles(NamedTuple):
    """The files of one model."""

    files: Mapping[StoragePath, Set[str]]
    """File -> names that the index assigns to it; empty sets without an index."""
    index_path: StoragePath | None = None
    names: Set[str] = frozenset()
    """All names in the index."""
    below: tuple[Snapshot, ...] = ()
    """Snapshots of the subdirectories with some of the files."""
    notes: tuple[str, ...] = ()
    """Warnings for the user."""

    @property
    def paths(self) -> tuple[StoragePath, ...]:
        """All files of the model: the index, if there is one, and the files with weights."""
        return (*self.files,) if self.index_path is None else (self.index_path, *self.files)

    def names_to_read(self, path: StoragePath, stored: Collection[str]) -> Collection[str]:
        """Return the names of the tensors to read from a file.

        Raises `CheckpointError` if it lacks a tensor that the index assigns to it, or has one that
        the index does not list.
        """
        if self.index_path is None:
            return stored
        listed = self.files[path]
        for name in sorted(listed - set(stored)) or sorted(set(stored) - self.names):
            verb, lists = ("lacks", "lists") if name in listed else ("has", "does not list")
            raise CheckpointError(
                f"{path}: {verb} tensor {name!r}, which {self.index_path.name} {lists} for it; "
                "index and files are not of one save, restore them"
            )
        return listed


def _place(name: str) -> _Place:
    """Split the name of a data file or an index into model, number and total."""
    match = _NUMBERED.fullmatch(name)
    groups = match.groups() if match else (name.removesuffix(".json"), None, "0", "")
    stem, number, count, rest = groups
    bare = (_SUFFIX.sub("", text, count=1).strip("-_.") for text in (stem, rest))
    return _Place(".".join(filter(None, bare)), None if number is None else int(number), int(count))


def find_safetensors(directory: StoragePath) -> ModelFiles:
    """Return the files of the model in a folder with safetensors files."""
    every_name = directory.names()
    indexes, names = list(filter(is_index, every_name)), list(filter(is_data_file, every_name))
    _check_no_bin_model(directory, every_name, {_place(name).model for name in (indexes or names)})
    if indexes:
        return _by_only_index(directory, indexes, names)
    models = _models(names)
    complete = [
        model for model, files in models.items() if _COMPLETE.fullmatch(model) or files[0][1]
    ]
    if len(models) > 1 and complete:
        raise _several_models(directory, [files[0][0] for files in models.values()])
    notes: tuple[str, ...] = ()
    if len(models) > 1:
        some = ", ".join(names[:_MAX_SHOWN]) + ", …" * (len(names) > _MAX_SHOWN)
        notes = (f"took all {len(names)} files for one model, as no index says more: {some}",)
    return _without_index(directory, names)._replace(notes=notes)


def find_bins(directory: StoragePath) -> ModelFiles:
    """Return the files of the model in a folder with ``.bin`` files."""
    every_name = directory.names()
    indexes, names = list(filter(is_bin_index, every_name)), list(filter(is_bin_file, every_name))
    if indexes:
        return _by_only_index(directory, indexes, names)
    if BIN_NAME in names:
        # Trainers leave other files beside it; transformers reads this one.
        return _without_index(directory, [BIN_NAME])
    models = _models(names)
    if len(models) > 1:
        raise _several_models(directory, [files[0][0] for files in models.values()])
    return _without_index(directory, names)


def _without_index(directory: StoragePath, names: Sequence[str]) -> ModelFiles:
    """Return the files of the only model without index; CheckpointError if a number is missing."""
    if not names:
        # Files existed when the format was recognized.
        raise CheckpointError(
            f"{directory}: its files were removed while it was opened; run again when nothing "
            "writes to it"
        )
    for files in _models(names).values():
        _check_numbers(directory, files)
    paths = (file_inside(directory, name, directory, weights=True) for name in names)
    return ModelFiles(dict.fromkeys(paths, frozenset()))


def _models(names: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
    """Return the (file, total) pairs of each model: ``model-00001-of-00002.bin`` has the total 2.

    Files with different totals, or with and without a number, belong to different models.
    """
    files_of: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for name in names:
        model, _, count = _place(name)
        files_of.setdefault((model, count), []).append((name, count))
    several = {model for model, _ in files_of if sum(key[0] == model for key in files_of) > 1}
    return {
        f"{model} of {count}" if model in several and count else model: files
        for (model, count), files in files_of.items()
    }


def _check_numbers(directory: StoragePath, files: Sequence[tuple[str, int]]) -> None:
    """Check that each numbered file of one model exists exactly once."""
    count = files[0][1]
    if not count:
        return
    by_number: dict[int, str] = {}
    for name, _ in files:
        first_name = by_number.setdefault(_place(name).number or 0, name)
        if first_name != name:
            raise CheckpointError(
                f"{directory}: {first_name} and {name} have the same number; move the file of the "
                "other save away"
            )
    first = 0 if 0 in by_number and count not in by_number else 1
    expected = range(first, first + count)
    for missing in (number for number in expected if number not in by_number):
        raise CheckpointError(
            f"{directory}: {_sibling(files[0][0], missing)} is missing from the numbered files; "
            "restore it"
        )
    for odd in (name for number, name in by_number.items() if number not in expected):
        raise CheckpointError(
            f"{directory}: {odd} has a number that is not from 1 to {count}; move that file away"
        )


def _sibling(name: str, number: int) -> str:
    """Return a file name with another number: ``model-00002-of-00003.bin`` for number 2."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None, name
    start, end = match.span(2)
    return f"{name[:start]}{number:0{end - start}d}{name[end:]}"


def _several_models(directory: StoragePath, names: Sequence[str]) -> CheckpointError:
    """Return the error for a directory with several models; it names one file of each."""
    some = f"{', '.join(names[:-1])} and {names[-1]}"
    remedy = "name the one to read instead of the directory"
    if any(_place(name).total > 1 for name in names):
        remedy += ", or move numbered files that have no index into a folder of their own"
    return CheckpointError(f"{directory}: has several models, {some}; {remedy}")


def _check_no_bin_model(directory: StoragePath, names: Iterable[str], models: Set[str]) -> None:
    """Refuse a directory whose ``.bin`` files are a different model than its safetensors files.

    transformers tries only safetensors files named ``model`` before ``pytorch_model.bin``.
    """
    for name in names if _MODEL not in models else ():
        is_of_model = is_bin_index(name) or is_bin_file(name)
        if is_of_model and _place(name).model.removeprefix(_BIN_PREFIX) not in models:
            examples = (f"{model}.safetensors" for model in sorted(models))
            raise _several_models(directory, [name, *examples])


# --- with an index


def _by_only_index(
    directory: StoragePath, indexes: Sequence[str], names: Sequence[str]
) -> ModelFiles:
    """Return the files that the only index lists; raises CheckpointError if there are others."""
    if len(indexes) > 1:
        raise CheckpointError(
            f"{directory}: has the indexes {', '.join(indexes)}; name the one to read instead of "
            "the directory"
        )
    model_files = files_of_index(file_inside(directory, indexes[0], directory))
    named = {path.name for path in model_files.files if path.parent == directory}
    model = _place(indexes[0]).model
    for name in names:
        if name not in named and _place(name)[:2] in ((model, None), (_MODEL, None)):
            raise _several_models(directory, [name, indexes[0]])
    return model_files


def files_of_index(index: StoragePath) -> ModelFiles:
    """Read an index, and return the files that it lists; all must exist.

    Raises `CheckpointError` if it lists no file, or not all numbered files in the directory.
    """
    names: dict[str, set[str]] = {}
    content = read_json(index, "index")
    for name, home in field(content, "weight_map", dict, index, "").items():
        home = checked(home, str, index, f"weight_map[{shown(name)}]")
        names.setdefault(home, set()).add(name)
    if not names:
        raise CheckpointError(
            f"{index}: its weight_map is empty, so it names no file; restore the index, or "
            "remove it to have all files read"
        )
    files: dict[StoragePath, set[str]] = {}
    for home, listed in sorted(names.items()):
        path = file_inside(index.parent, home, index, weights=True)
        if not path.exists():
            raise CheckpointError(
                f"{path}: is missing, but {index.name} puts {len(listed)} tensors into it, "
                f"{min(listed)!r} first; restore it"
            )
        files.setdefault(path, set()).update(listed)
    folders = sorted({path.parent for path in files} - {index.parent})
    below = tuple(map(Snapshot.of, folders))
    notes = _check_siblings(index, files)
    return ModelFiles(files, index, frozenset().union(*files.values()), below, notes)


def _check_siblings(index: StoragePath, files: Mapping[StoragePath, Set[str]]) -> tuple[str, ...]:
    """Refuse an index that omits an existing numbered file; return notes about missing ones."""
    listing_bins = is_bin_index(index.name) is not None
    is_part = is_bin_file if listing_bins else is_data_file
    notes = []
    for folder in sorted({path.parent for path in files} | {index.parent}):
        named = {path.name for path in files if path.parent == folder}
        models = {_place(name).model for name in named} | {_place(index.name).model}
        by_pattern = {_ANY_NUMBER.sub("0", name): name for name in sorted(named, reverse=True)}
        for name in sorted(filter(is_part, {*folder.names()} - named)):
            place, match = _place(name), by_pattern.get(_ANY_NUMBER.sub("0", name))
            if place.number is not None and place.model in models:
                problem = f"is one of {place.total} files by its number"
            elif match is not None:
                problem = f"differs from {match} by its number alone"
            else:
                continue
            raise CheckpointError(
                f"{index}: does not name {folder / name}, which {problem}; restore the index of "
                "all, or move the file away"
            )
        for (name, count), *more in _models(named).values():
            numbers = {_place(at).number or 0 for at, _ in ((name, count), *more)}
            # A name may claim any count.
            if len(numbers) < count:
                after = {1, *(number + 1 for number in numbers)} - numbers
                notes.append(
                    f"{index.name} names files of {count}, but not {_sibling(name, min(after))}, "
                    "which is not there either"
                )
    return tuple(notes)


def check_alone(path: StoragePath) -> None:
    """Raise CheckpointError for ``model-00001-of-00003.bin``, as it is only one of three files."""
    model, number, count = _place(path.name)
    is_listing = is_bin_index if is_bin_file(path.name) else is_index
    if number is None or count < 2 or not (is_bin_file(path.name) or is_data_file(path.name)):
        return
    siblings = path.parent.names()
    indexes = (name for name in siblings if is_listing(name) and _place(name).model == model)
    index = next(indexes, None)
    place = f"directory, {path.parent}" if index is None else f"index, {path.parent / index}"
    raise CheckpointError(
        f"{path}: is by its name file {number} of {count} of a model; name the {place}"
    )
