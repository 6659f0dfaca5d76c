"""Merging a checkpoint into whole tensors, in one process and little memory."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.coordinate import Member, Progress
from shardspec.checkpoint.mapped import Names, mapped
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.report import WriteReport
from shardspec.checkpoint.select import (
    Choice,
    Patterns,
    Renames,
    carried_by_dcp,
    plain,
    select,
    tied,
)
from shardspec.checkpoint.store import as_path
from shardspec.checkpoint.targets import OutputTensor, Target
from shardspec.checkpoint.write import WriteOptions, write_checkpoint
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.renamed import renamed_argument
from shardspec.text import shown

__all__ = ["MERGED_FORMATS", "MergedFormat", "merge"]

MergedFormat: TypeAlias = Literal["safetensors", "huggingface", "torch", "dcp"]
MERGED_FORMATS: Final[tuple[MergedFormat, ...]] = get_args(MergedFormat)
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")


def merge(
    directory: Path | str | Catalog,
    output: Path | str,
    *,
    format: MergedFormat | None = None,
    max_shard_bytes: int | None = None,
    dtype: str | None = None,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Renames = (),
    names: Names | None = None,
    threads: int = 1,
    metadata: bool = True,
    strict_cast: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    reread: bool = True,
    dry_run: bool = False,
    sidecars: bool = True,
    progress: Progress | None = None,
    member: Member | None = None,
    form: MergedFormat | None = None,
    force: bool | None = None,
) -> WriteReport:
    """Write the whole tensors of a checkpoint into one file, or into files of a limited size.

    Everything is checked before the first byte is written: headers against what describes them,
    that the boxes of every tensor tile it, and that boxes stored twice agree; only the headers that
    torch's DCP puts before each chunk are read, and checked, with the chunk. Pending reductions are
    finished. The output appears under its name when it is complete, was flushed to the disk,
    read again and found to be right. Needs neither torch nor a process group, and memory that does
    not grow with the checkpoint.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or what that has made of it.
    output
        The file to write; a directory for the formats ``"huggingface"`` and ``"dcp"``.
    format
        What to write. By default a torch file if the output ends in ``.pt``, ``.pth`` or ``.bin``,
        ``"huggingface"`` if there is a limit to its files or the output is text that ends in
        ``/``, else one safetensors file.
    max_shard_bytes
        Most bytes of tensors in a file of the format ``"huggingface"``; 5 GB by default.
    dtype
        What floating point tensors are cast to; by default none is.
    include, exclude
        Patterns as in a shell, one or several: what matches any of `include`, all if it is
        None, and none of `exclude`, is written.
    rename
        Regular expressions, and what the first match of each in every name is replaced with, one
        after the other: ``{"^model[.]": ""}``, or pairs.
    names
        What makes of these tensors those of another model: a `NameMap`, a list of some to be taken
        one after the other, or new names. The patterns above then are of the names that it gives.
        Tensors that it does not use are left out, and `WriteReport.left_out` names them.
    threads
        How many files are written at once.
    metadata
        Carry along what safetensors files say in their metadata, into safetensors files.
    strict_cast
        Refuse a cast that does not keep a number: one too large for the dtype, one that is not 0
        and would become 0, or one that would become NaN. Otherwise the report counts them.
    overwrite
        Replace the output if it exists.
    verify
        Compare every byte that is read with the digests of the checkpoint, where it has them, and
        what was written with what should be there.
    reread
        What of this takes longest, to read again what was written; without it a fault of the
        memory or of the disk on the way out goes unseen.
    dry_run
        Check what describes the checkpoint, as before writing, and write nothing.
    sidecars
        Carry along what lies beside the weights, such as ``config.json``, a tokenizer's files,
        ``adapter_config.json``, or Megatron's ``common.pt`` and Lightning's ``meta.pt`` into the
        format ``"dcp"``; into directories only, as they are.
    progress
        Called with the bytes written so far and in all.
    member
        Which of several processes this is that do the work together, on a file system that all of
        them see; all call this with the same arguments. They need no process group.
    form, force
        Former names of `format` and `overwrite`.

    Raises
    ------
    OutputExistsError
        If the output exists and `overwrite` is not set; it is kept.
    CheckpointError
        If the checkpoint is missing, unfinished, damaged or contradicts itself, if the output
        would overwrite a part of it, or if the disk is full. Nothing is written under the name of
        the output, and no temporary file stays.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import DTensor, DeviceMesh, save_sharded
    >>> directory = Path(tempfile.mkdtemp())
    >>> w = DTensor(torch.arange(12.0).view(4, 3), DeviceMesh(range(4), (2, 2)), "[S01,R]")
    >>> save_sharded({"w": w}, directory / "ckpt")
    >>> report = merge(directory / "ckpt", directory / "model.safetensors")
    >>> report.tensors, report.num_bytes
    (1, 144)
    """
    place = as_path(output)
    directory_named = isinstance(output, str) and output.endswith(("/", os.sep))
    chosen = _format(
        place,
        renamed_argument("merge", "format", format, "form", form),
        max_shard_bytes,
        directory=directory_named,
    )
    replace = renamed_argument("merge", "overwrite", overwrite, "force", force)
    choice = Choice(include, exclude, rename, dtype)

    def lay_out(source: Catalog, _: str) -> tuple[Sequence[OutputTensor], Target]:
        wanted = select(source, choice)
        # The other formats have no room for what is no tensor.
        names: Iterable[str] = ()
        others: dict[str, object] = {}
        if chosen == "dcp":
            names, others = carried_by_dcp(source, choice)
        elif chosen == "torch":
            renamed = plain(source.extras, choice)
            names, others = renamed, {new: source.extras[name] for name, new in renamed.items()}
        if source.extras and not (wanted or names):
            raise CheckpointError(
                f"{source.directory}: holds no tensor that could be written, but "
                f"{min(source.extras)!r} and the like; name the checkpoint of the model"
            )
        noted = _file_metadata(source) if metadata and chosen in _WITH_METADATA else {}
        target = _target(chosen, place, source, wanted, others, max_shard_bytes, noted)
        return wanted, target._replace(carried=frozenset([*names, *noted]))

    options = WriteOptions(
        threads, strict_cast, replace, verify, reread, dry_run, sidecars, progress, member
    )
    if names is not None:
        directory = mapped(as_catalog(directory), names)
    return write_checkpoint(directory, place, chosen, lay_out, options)


def _format(
    output: Path, chosen: MergedFormat | None, max_shard_bytes: int | None, *, directory: bool
) -> MergedFormat:
    if chosen is None:
        one_file = output.suffix in (".safetensors", *_TORCH_SUFFIXES)
        if max_shard_bytes is not None and one_file and not directory:
            raise CheckpointError(
                f"{output}: is named as one file, but files of a limited size make a directory; "
                "name one, or leave out the limit"
            )
        if max_shard_bytes is not None or directory:
            return "huggingface"
        return "torch" if output.suffix in _TORCH_SUFFIXES else "safetensors"
    if chosen not in MERGED_FORMATS:
        raise CheckpointError(
            f"there is no format {chosen!r}; choose one of {', '.join(MERGED_FORMATS)}"
        )
    if max_shard_bytes is not None and chosen != "huggingface":
        raise CheckpointError(
            f"the format {chosen!r} has no limit of the size of its files; leave it out, or choose "
            "the format 'huggingface'"
        )
    if directory and chosen in ("safetensors", "torch"):
        raise CheckpointError(
            f"{output}/: is named as a directory, but the format {chosen!r} is one file; leave out "
            "the slash, or choose another format"
        )
    return chosen


_SHARD_BYTES: Final = 5 * 10**9
"""What transformers takes for the largest file unless told otherwise."""


_ADAPTER: Final = "adapter_model.safetensors"
_WITH_METADATA: Final = ("safetensors", "huggingface")


def _file_metadata(source: Catalog) -> Mapping[str, str]:
    """Return what files of safetensors say besides their tensors; refuse what contradicts itself.

    Libraries keep there what their tensors mean, such as how they are quantised.
    """
    for key, (first, other) in source.file_metadata.contradictions.items():
        raise CheckpointError(
            f"{source.directory}: {first.name} and {other.name} say different things in their "
            f"metadata under {shown(key, 100)}, and one output cannot say both; leave all such "
            "metadata out with --no-metadata (metadata=False)"
        )
    return source.file_metadata.values


def _target(
    chosen: MergedFormat,
    output: Path,
    source: Catalog,
    wanted: Sequence[OutputTensor],
    others: Mapping[str, object],
    max_shard_bytes: int | None,
    metadata: Mapping[str, str],
) -> Target:
    # One of them is needed, and starting is a tenth of merging a gigabyte.
    match chosen:
        case "safetensors":
            from shardspec.checkpoint.formats.safetensors import METADATA, safetensors_target

            return safetensors_target(output.name, wanted, {**METADATA, **metadata})
        case "huggingface":
            from shardspec.checkpoint.formats.safetensors import METADATA, huggingface_target

            limit = _SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
            if limit < 1:
                raise CheckpointError(
                    f"files of at most {limit} bytes hold nothing; give max_shard_bytes from 1"
                )
            # PEFT looks for its own name, also where the adapter was resharded in between.
            adapter = {file.name for file in source.files} == {_ADAPTER} or (
                (source.directory / "adapter_config.json").is_file()
                and not (source.directory / "config.json").is_file()
            )
            named = _ADAPTER if adapter else "model.safetensors"
            return huggingface_target(wanted, limit, {**METADATA, **metadata}, named)
        case "torch":
            from shardspec.checkpoint.formats.torch_file import torch_target

            return torch_target(output.name, wanted, others, tied(source, wanted))
        case "dcp":
            from shardspec.checkpoint.formats.dcp_target import dcp_target

            alone = DeviceMesh((0,), (1,))
            # One for all tensors that are alike.
            layout = lru_cache(None)(partial(Layout, alone))
            whole = {
                tensor.name: layout(ShardingSpec(len(tensor.shape), {}), tensor.shape, tensor.dtype)
                for tensor in wanted
            }
            return dcp_target(alone, wanted, whole, others)
