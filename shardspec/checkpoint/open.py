"""From a path to a checkpoint that can be read, whatever wrote it.

A format is one module of `shardspec.checkpoint.formats` and one line in `FORMATS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardspec.checkpoint.files import SourceFile, reason
from shardspec.checkpoint.formats import (
    dcp,
    dcp_hf,
    hf_index,
    megatron,
    native,
    rank_files,
    single_file,
    torch_file,
)
from shardspec.checkpoint.info import INFO_NAME
from shardspec.checkpoint.remote import as_path
from shardspec.checkpoint.source import CheckpointSource
from shardspec.errors import CheckpointError

__all__ = ["FORMATS", "Format", "as_source", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write checkpoints that can be read here."""

    name: str
    """What the user calls it."""
    finds: Callable[[frozenset[str]], bool]
    """Whether a directory with entries of these names is one."""
    opens: Callable[..., CheckpointSource]
    """Reads what describes it; not its data. Called with the directory and what `takes` names."""
    takes: frozenset[str] = frozenset()
    """What the caller may add of his own: options of `open_checkpoint`."""


FORMATS: Final = (
    Format(native.FORMAT, lambda names: INFO_NAME in names, native.open_native),
    Format(dcp.FORMAT, dcp.find_dcp, dcp.open_dcp),
    Format(
        megatron.FORMAT,
        megatron.find_megatron,
        megatron.open_megatron,
        frozenset(("ranks", "rules")),
    ),
    Format(dcp_hf.FORMAT, dcp_hf.find_dcp_hf, dcp_hf.open_dcp_hf, frozenset(("ranks",))),
    Format(hf_index.FORMAT, hf_index.find_index, hf_index.open_index_directory),
    Format(hf_index.FORMAT, hf_index.find_plain, hf_index.open_plain),
    Format(rank_files.FORMAT, rank_files.find_rank_files, rank_files.open_rank_files),
    Format(torch_file.FORMAT, torch_file.find_bin, torch_file.open_bin_directory),
)
"""Asked in this order."""


def open_checkpoint(
    path: Path | str,
    *,
    ranks: int | None = None,
    rules: Mapping[str, object] | Path | str | None = None,
) -> CheckpointSource:
    """Open a checkpoint; what describes it is read and checked, its data is not.

    Parameters
    ----------
    path
        A directory in any of the forms of `FORMATS`, a file of one rank of those, one safetensors
        file, one file of `torch.save`, or the index of several; here, or in a store by its URL.
    ranks
        How many ranks have written files, for forms that do not say it.
    rules
        How ranks have cut tensors, for forms that do not say it: pattern of names to spec, or the
        path of a TOML file (`shardspec.checkpoint.cut_rules`).

    Raises
    ------
    CheckpointError
        If it is missing, holds no finished save, contradicts itself, or knows by itself what the
        caller has added.
    """
    place = as_path(path)
    options = (("ranks", ranks), ("rules", rules))
    if "\0" in str(place):
        raise CheckpointError(f"{str(place)!r}: a path cannot hold a NUL; check it")
    added = {name: value for name, value in options if value is not None}
    try:
        names = frozenset(path.name for path in place.iterdir())
    except NotADirectoryError:
        return _open_file(place, added)
    except FileNotFoundError:
        raise CheckpointError(f"{place}: there is no such checkpoint; check the path") from None
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {reason(error)}") from None
    if not names:
        raise CheckpointError(f"{place}: is empty, there is no checkpoint in it")
    for form in FORMATS:
        if form.finds(names):
            _check_added(place, form.name, form.takes, added)
            return form.opens(place, **added)
    raise CheckpointError(
        f"{place}: has no {INFO_NAME}, which is written last; the save did not finish, or "
        f"this is no checkpoint of a form that is known ({', '.join(f.name for f in FORMATS)})"
    )


def as_source(checkpoint: Path | str | CheckpointSource) -> CheckpointSource:
    """Return a checkpoint that may be open already."""
    return open_checkpoint(checkpoint) if isinstance(checkpoint, Path | str) else checkpoint


def _open_file(place: Path, added: Mapping[str, object]) -> CheckpointSource:
    """Open what is no directory."""
    _check_added(place, "a single file", frozenset(), added)
    if place.name.endswith(hf_index.INDEX_SUFFIX):
        return hf_index.open_index_file(place)
    if place.name == torch_file.BIN_INDEX:
        return torch_file.open_bin_index(place)
    with SourceFile(place) as file:
        head = file.read(0, min(file.num_bytes, 4))
    if torch_file.is_torch_file(head):
        if rank_files.is_rank_file(place.name):
            return rank_files.open_family(place)
        return torch_file.open_torch_file(place)
    return single_file.SingleFile(place)


def _check_added(
    place: Path, form: str, takes: frozenset[str], added: Mapping[str, object]
) -> None:
    for name in sorted(added.keys() - takes):
        raise CheckpointError(
            f"{place}: {name} was given, but a checkpoint of this form ({form}) needs none: it "
            f"says so itself; leave {name} out"
        )
