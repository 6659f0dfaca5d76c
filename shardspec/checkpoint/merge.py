"""Merging a checkpoint into one file of whole tensors, in one process and little memory."""

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shardspec.checkpoint.copy import Buffers, FileSink, copy_box, write_all
from shardspec.checkpoint.digests import Checks
from shardspec.checkpoint.files import OpenFiles, reason
from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.output import write_atomically
from shardspec.checkpoint.replicas import check_replicas
from shardspec.checkpoint.safetensors_file import Header, TensorSlot, encode_header
from shardspec.checkpoint.source import CheckpointSource
from shardspec.checkpoint.tiling import check_tiling
from shardspec.errors import CheckpointError, OutputExistsError

__all__ = ["MergeReport", "Progress", "merge"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write in all."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge has written."""

    path: Path
    """The file."""
    tensors: int
    num_bytes: int
    """Size of the file."""
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "path": str(self.path),
            "tensors": self.tensors,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
        }


def merge(
    directory: Path | str,
    output: Path | str,
    *,
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> MergeReport:
    """Write the whole tensors of a checkpoint into one safetensors file.

    Everything is checked before the first byte is written: headers against the sharding info, that
    the boxes of every tensor tile it, and that boxes stored twice agree. Pending reductions are
    finished. The file appears under its name when it is complete. Needs neither torch nor a
    process group, and memory that does not grow with the checkpoint.

    Parameters
    ----------
    directory
        What `save_sharded` wrote.
    output
        The file to write.
    force
        Replace the file if it exists.
    verify
        Compare every byte that is read with the digests of the checkpoint, where it has them.
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
    source = open_checkpoint(directory)
    path = _check_output(Path(output), source, force)
    slots = []
    with OpenFiles() as files:
        for name in source.names:
            tensor = source.tensor(name)
            for group in check_tiling(tensor):
                check_replicas(tensor, group, files)
            slots.append(TensorSlot(name, tensor.dtype, tensor.shape))
        head, header = encode_header(slots, {"format": "pt"})
        write_atomically(
            path,
            header.file_bytes,
            lambda fd: _fill(fd, path, head, header, source, files, progress, verify),
            overwrite=force,
        )
    return MergeReport(Path(output), len(slots), header.file_bytes, time.monotonic() - started)


def _fill(
    fd: int,
    path: Path,
    head: bytes,
    header: Header,
    source: CheckpointSource,
    files: OpenFiles,
    progress: Progress | None,
    verify: bool,
) -> None:
    """Write the header, then tensor by tensor in the order of the file."""
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, header.file_bytes)

    write_all(fd, memoryview(head), 0, path)
    advance(len(head))
    buffers = Buffers()
    for entry in header.entries:
        tensor = source.tensor(entry.name)
        whole = tuple((0, size) for size in tensor.shape)
        sink = FileSink(fd, path, entry.offset, buffers, advance)
        checks = Checks(tensor) if verify else None
        copy_box(tensor, whole, sink, files, buffers, checks=checks)


def _check_output(output: Path, source: CheckpointSource, force: bool) -> Path:
    """Return the file to write, links followed, once it is clear that writing it does no harm."""
    path = Path(os.path.realpath(output))
    try:
        at = path.stat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise CheckpointError(
                f"{output}: its directory {path.parent} does not exist; make it first"
            ) from None
        return path
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {reason(error)}") from None
    if not stat.S_ISREG(at.st_mode):
        kind = "a directory" if stat.S_ISDIR(at.st_mode) else "no regular file"
        raise CheckpointError(f"{output}: is {kind}; name a file to write")
    for file in source.files:
        if path.samefile(file):
            raise CheckpointError(
                f"{output}: is {file.name} of the checkpoint itself; choose another name"
            )
    if not force:
        raise OutputExistsError(
            f"{output}: exists; choose another name, or overwrite it with --force (force=True)"
        )
    return path
