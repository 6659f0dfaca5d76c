"""Merging a checkpoint into whole tensors, in one process and little memory."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from shardspec.checkpoint.destination import check_destination
from shardspec.checkpoint.digests import stored_bytes
from shardspec.checkpoint.files import OpenFiles
from shardspec.checkpoint.open import as_source
from shardspec.checkpoint.replicas import check_replicas
from shardspec.checkpoint.report import WriteReport
from shardspec.checkpoint.select import Renames, plain, select, tied
from shardspec.checkpoint.source import CheckpointSource, StoredBox, distinct
from shardspec.checkpoint.targets import Target, Wanted
from shardspec.checkpoint.tiling import check_tiling
from shardspec.checkpoint.write import Progress, write_target
from shardspec.checkpoint.writers.dcp import dcp_target
from shardspec.checkpoint.writers.huggingface import huggingface_target
from shardspec.checkpoint.writers.safetensors_file import safetensors_target
from shardspec.checkpoint.writers.torch_file import torch_target
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

__all__ = ["MERGED_FORMS", "MergedForm", "check_tensors", "merge", "produce"]

MergedForm: TypeAlias = Literal["safetensors", "huggingface", "torch", "dcp"]
MERGED_FORMS: Final[tuple[MergedForm, ...]] = get_args(MergedForm)
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")


def merge(
    directory: Path | str | CheckpointSource,
    output: Path | str,
    *,
    form: MergedForm | None = None,
    max_shard_bytes: int | None = None,
    dtype: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Renames = (),
    threads: int = 1,
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> WriteReport:
    """Write the whole tensors of a checkpoint into one file, or into files of a limited size.

    Everything is checked before the first byte is written: headers against what describes them,
    that the boxes of every tensor tile it, and that boxes stored twice agree. Pending reductions
    are finished. The output appears under its name when it is complete, was flushed to the disk,
    read again and found to be right. Needs neither torch nor a process group, and memory that does
    not grow with the checkpoint.

    Parameters
    ----------
    directory
        A checkpoint in any form that `open_checkpoint` knows, or what that has made of it.
    output
        The file to write; a directory for the forms ``"huggingface"`` and ``"dcp"``.
    form
        What to write. By default a torch file if the output ends in ``.pt``, ``.pth`` or ``.bin``,
        ``"huggingface"`` if there is a limit to its files, else one safetensors file.
    max_shard_bytes
        Most bytes of tensors in a file of the form ``"huggingface"``; 5 GB by default.
    dtype
        What floating point tensors are cast to; by default none is.
    include, exclude, rename
        Which tensors, and their names; as for `select`.
    threads
        How many files are written at once.
    force
        Replace the output if it exists.
    verify
        Compare every byte that is read with the digests of the checkpoint, where it has them, and
        what was written with what should be there.
    dry_run
        Check everything and write nothing.
    progress
        Called with the bytes written so far and in all.

    Raises
    ------
    OutputExistsError
        If the output exists and `force` is not set; it is kept.
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
    started = time.monotonic()
    chosen = _form(Path(output), form, max_shard_bytes)
    source = as_source(directory)
    wanted = select(source, include=include, exclude=exclude, rename=rename, dtype=dtype)
    target = _target(chosen, Path(output), source, wanted, max_shard_bytes)
    return produce(
        source,
        wanted,
        target,
        Path(output),
        chosen,
        started=started,
        threads=threads,
        force=force,
        verify=verify,
        dry_run=dry_run,
        progress=progress,
    )


def _form(output: Path, form: MergedForm | None, max_shard_bytes: int | None) -> MergedForm:
    if form is None:
        if max_shard_bytes is not None:
            return "huggingface"
        return "torch" if output.suffix in _TORCH_SUFFIXES else "safetensors"
    if form not in MERGED_FORMS:
        raise CheckpointError(f"there is no form {form!r}; choose one of {', '.join(MERGED_FORMS)}")
    if max_shard_bytes is not None and form != "huggingface":
        raise CheckpointError(
            f"the form {form!r} has no limit of the size of its files; leave it out, or choose "
            "the form 'huggingface'"
        )
    return form


_SHARD_BYTES: Final = 5 * 10**9
"""What transformers takes for the largest file unless told otherwise."""


def _target(
    form: MergedForm,
    output: Path,
    source: CheckpointSource,
    wanted: Sequence[Wanted],
    max_shard_bytes: int | None,
) -> Target:
    match form:
        case "safetensors":
            return safetensors_target(output.name, wanted)
        case "huggingface":
            limit = _SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
            if limit < 1:
                raise CheckpointError(f"a file of at most {limit} bytes holds nothing")
            return huggingface_target(wanted, limit)
        case "torch":
            return torch_target(output.name, wanted, plain(source.others), tied(source, wanted))
        case "dcp":
            alone = DeviceMesh((0,), (1,))
            whole = {
                tensor.name: Layout(
                    alone, ShardingSpec(len(tensor.shape), {}), tensor.shape, tensor.dtype
                )
                for tensor in wanted
            }
            return dcp_target(alone, wanted, whole, plain(source.others))


def produce(
    source: CheckpointSource,
    wanted: Sequence[Wanted],
    target: Target,
    output: Path,
    form: str,
    *,
    started: float,
    threads: int,
    force: bool,
    verify: bool,
    dry_run: bool,
    progress: Progress | None,
) -> WriteReport:
    """Check that an output can be made of a source and may be written, and write it.

    Raises
    ------
    OutputExistsError, CheckpointError
        As for `merge`.
    """
    if threads < 1:
        raise CheckpointError(f"{threads} threads write nothing; give at least 1")
    path = check_destination(output, source, directory=target.directory, force=force)
    read = check_tensors(source, wanted, trust_digests=verify)
    report = WriteReport(
        output,
        form,
        source.format,
        len({stored.path for stored, _ in read}),
        sum(num_bytes for _, num_bytes in read),
        len(wanted),
        tuple(file.name for file in target.files),
        target.num_bytes,
        0.0,
        None,
        tuple(sorted(source.others.keys() - target.carried)),
        written=False,
    )
    if dry_run:
        return replace(report, seconds=time.monotonic() - started)
    done = write_target(
        source, target, path, overwrite=force, verify=verify, threads=threads, progress=progress
    )
    return replace(
        report,
        files=done.files,
        num_bytes=done.num_bytes,
        crc32=done.crc32,
        seconds=time.monotonic() - started,
        written=True,
    )


def check_tensors(
    source: CheckpointSource, wanted: Sequence[Wanted], *, trust_digests: bool
) -> list[tuple[StoredBox, int]]:
    """Check that the boxes of every tensor tile it, and that those stored twice agree.

    Returns
    -------
    list
        The boxes to read, and the bytes of each.

    Raises
    ------
    CheckpointError
        If they do not.
    """
    read = []
    with OpenFiles() as files:
        for name in sorted({tensor.source for tensor in wanted}):
            tensor = source.tensor(name)
            for group in check_tiling(tensor):
                check_replicas(tensor, group, files, trust_digests=trust_digests)
            read += [(stored, stored_bytes(tensor, stored)) for stored in distinct(tensor)]
    return read
