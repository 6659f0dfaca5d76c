"""From a checkpoint to an output: open, select and lay out, plan, execute, commit."""

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, TypeAlias

from isal.isal_zlib import crc32_combine

from shardspec.boxes import box_size
from shardspec.checkpoint.catalog import (
    AnyOutline,
    Catalog,
    check_tiling,
    distinct,
    memoize_by_boxes,
)
from shardspec.checkpoint.commit import Destination, names_below, opened
from shardspec.checkpoint.coordinate import Member, Workers, together
from shardspec.checkpoint.executor import Execution, WriteOptions
from shardspec.checkpoint.formats.names import (
    BIN_INDEX,
    DEEPSPEED_MODEL,
    DEEPSPEED_UNIVERSAL,
    INDEX_SUFFIX,
    INFO_NAME,
    METADATA_NAME,
    UNIVERSAL_LATEST,
    UNIVERSAL_OPTIMIZER,
    format_of_names,
    is_data_file,
)
from shardspec.checkpoint.open import as_catalog, open_checkpoint
from shardspec.checkpoint.output_files import in_store, on_disk
from shardspec.checkpoint.read_boxes import check_replicas, crc_text
from shardspec.checkpoint.source_files import OpenFiles
from shardspec.checkpoint.store import RemotePath, output_exists, path_errors
from shardspec.checkpoint.targets import OutputTensor, Target, add_sidecars
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, ShardSpecError

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

LayOut: TypeAlias = Callable[[Catalog, str], tuple[Sequence[OutputTensor], Target]]
"""Selects tensors of a catalog and lays out the files for them, given a text to name them by."""
_LISTS: Final = {
    "shardspec": INFO_NAME,
    "dcp": METADATA_NAME,
    "huggingface": f"model{INDEX_SUFFIX}",
}
"""The file that lists the others of an output, by its format."""
_LISTS_OF_FILES: Final = (INFO_NAME, METADATA_NAME, BIN_INDEX, INDEX_SUFFIX)
_DATA: Final = (".safetensors", ".distcp", ".bin")
_OWN_NAMES: Final = re.compile(
    r"(model(-\d{5}-of-\d{5})?|shard-\d+-model-\d+-of-\d+|shard-\d{5,}-[0-9a-f]{16})\.safetensors"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin"
)
"""Files that are parts of a checkpoint by their names, also where nothing lists them."""


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was written, or what would be."""

    path: Path
    """The output, as the user named it."""
    format: str
    """Its format, as `merge` and `reshard` name it."""
    read: str
    """What the source is."""
    reads: Mapping[str, int]
    """The files that tensors are read from, and the bytes of their boxes, each read once."""
    tensors: int
    writes: Mapping[str, int]
    """The files of the output, or the output itself if it is one, and their sizes."""
    seconds: float
    crc32: int | None
    """CRC-32 of all files in their order; None if it was not computed."""
    cast_losses: "CastLosses | None"
    """What a cast to another dtype did not keep; None if nothing was cast."""
    left_out: tuple[str, ...]
    """Entries of the source that are not tensors and that the output lacks; the metadata of
    safetensors files is ``"__metadata__"``."""
    sidecars: tuple[str, ...]
    """Names of the files beside the weights of the source that were copied along."""
    written: bool
    """False after a dry run."""

    @property
    def read_files(self) -> int:
        """How many files tensors are read from."""
        return len(self.reads)

    @property
    def read_bytes(self) -> int:
        """Bytes of all boxes that are read, each once."""
        return sum(self.reads.values())

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files; that of the output itself if it is one."""
        return tuple(self.writes)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(self.writes.values())

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "path": str(self.path),
            "format": self.format,
            # Its former name.
            "form": self.format,
            "read": self.read,
            "read_files": self.read_files,
            "read_bytes": self.read_bytes,
            "reads": dict(self.reads),
            "writes": dict(self.writes),
            "tensors": self.tensors,
            "files": list(self.files),
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "crc32": None if self.crc32 is None else crc_text(self.crc32),
            "cast": None if self.cast_losses is None else self.cast_losses.to_json(),
            "left_out": list(self.left_out),
            "sidecars": list(self.sidecars),
            "written": self.written,
        }


def write_checkpoint(
    checkpoint: Path | str | Catalog,
    output: Path,
    format: str,  # as the report names it
    lay_out: LayOut,
    options: WriteOptions,
) -> WriteReport:
    """Check that an output can be made of a checkpoint and may be written, and write it.

    Raises as `merge` does.
    """
    started = time.monotonic()
    if options.threads < 1:
        raise CheckpointError(f"{options.threads} threads write nothing; give at least 1")
    member = None if options.dry_run else options.member
    with together(member, output.absolute()) as workers:
        source = as_catalog(checkpoint)
        tensors, target = lay_out(source, workers.token)
        if options.sidecars:
            target = add_sidecars(source, target, format)
        if isinstance(output, RemotePath) and any("/" in file.name for file in target.files):
            raise CheckpointError(
                f"{output}: the format {format!r} has files in directories, which are not written "
                "into a store; write to a directory here, and copy that"
            )
        destination = Destination(output)
        if workers.member.rank == 0:
            destination = _check_place(output, source, target, format, options.overwrite)
        reads = _check_tensors(source, tensors, options.verify, workers.member)
        report = WriteReport(
            path=output,
            format=format,
            read=source.format,
            reads={
                str(path).removeprefix(f"{source.directory}{os.sep}"): num_bytes
                for path, num_bytes in sorted(reads.items())
            },
            tensors=len(tensors),
            writes={file.name: file.num_bytes for file in target.files},
            seconds=0.0,
            crc32=None,
            cast_losses=None,
            left_out=_left_out(source, target),
            sidecars=target.sidecars,
            written=False,
        )
        if not options.dry_run:
            report = _write(report, source, target, destination, options, workers)
    return replace(report, seconds=time.monotonic() - started)


def _write(
    report: WriteReport,
    source: Catalog,
    target: Target,
    destination: Destination,
    options: WriteOptions,
    workers: Workers,
) -> WriteReport:
    """Write all files; the first process completes the output."""
    begin = in_store if isinstance(destination.path, RemotePath) else on_disk
    job = Execution(source, target, options, workers, destination.path)
    # The other processes are told of an error before their files are removed.
    with begin(job, destination) as output, workers.failing_together():
        job.run(output.copy)
        if job.member.rank:
            source.check_unchanged()
        every = workers.gather("findings", job.findings())
        if job.member.rank == 0:
            job.join(every[1:])
            written = output.finish()
        else:
            # Only the first process knows whether all went well.
            written = workers.broadcast("written")
    workers.broadcast("written", written)
    crc = 0
    for _, num_bytes, value in written:
        crc = int(crc32_combine(crc, value, num_bytes))
    return replace(
        report,
        writes={name: num_bytes for name, num_bytes, _ in written},
        crc32=crc if job.digested else None,
        cast_losses=job.losses,
        written=True,
    )


def _left_out(source: Catalog, target: Target) -> tuple[str, ...]:
    """Return the names of what is not carried along."""
    left = sorted(source.extras.keys() - target.carried)
    metadata = source.file_metadata
    if (metadata.values.keys() | metadata.contradictions.keys()) - target.carried:
        left.append("__metadata__")
    return tuple(left)


def _check_tensors(
    source: Catalog, tensors: Sequence[OutputTensor], verify: bool, member: Member
) -> Counter[Path]:
    """Check that the boxes of every tensor tile it, and that copies agree.

    Returns how many bytes of each file will be read.
    """
    copies_of = memoize_by_boxes(check_tiling)
    elements_of = memoize_by_boxes(_elements_by_file)
    # Tensors that are sharded alike share one count.
    widths: dict[int, tuple[Counter[Path], int]] = {}
    with OpenFiles() as files:
        for place, name in enumerate(sorted({tensor.source for tensor in tensors})):
            outline = source.outline(name)
            unsure = copies_of(outline) and not (verify and source.copies_agree(name))
            # Each of several processes compares its share.
            if unsure and place % member.size == member.rank:
                tensor = source.tensor(name)
                for group in check_tiling(tensor):
                    check_replicas(tensor, group, files, trust_digests=verify)
            elements = elements_of(outline)
            _, width = widths.get(id(elements), (elements, 0))
            widths[id(elements)] = elements, width + item_bytes(outline.dtype)
    reads: Counter[Path] = Counter()
    for elements, width in widths.values():
        for path, count in elements.items():
            reads[path] += count * width
    return reads


def _elements_by_file(outline: AnyOutline) -> Counter[Path]:
    found: Counter[Path] = Counter()
    for stored in distinct(outline):
        found[stored.path] += box_size(stored.box)
    return found


def _check_place(
    output: Path, source: Catalog, target: Target, format: str, overwrite: bool
) -> Destination:
    """Return where to write, links resolved, and what is replaced, if that does no harm.

    No part of the `source` is overwritten, and what is there is a directory or a file like the
    output. Raises an `OutputExistsError` if it exists and `overwrite` is not set, a
    `CheckpointError` otherwise.
    """
    directory = target.directory
    if "\0" in str(output):
        raise CheckpointError(f"{str(output)!r}: a file name cannot hold a NUL; choose another")
    here = not isinstance(output, RemotePath)
    # Somebody else's link may lead to any file of this user. Path.is_symlink raises where a name is
    # too long.
    if here and os.path.islink(output):
        owner = os.lstat(output).st_uid
        if owner not in (os.geteuid(), 0):
            raise CheckpointError(
                f"{output}: is a link that another user has made (user id {owner}); remove it, or "
                "choose another name"
            )
    path = _real(output)
    kind = _kind(output, path)
    # Without an index, every file of the directory counts.
    listed = any(file.name.endswith((".json", ".metadata")) for file in source.files)
    all_count = kind is None and not listed and source.directory.is_dir()
    for file in source.files:
        same = path == _real(file)
        if not same and here and kind == "a file":
            same = not isinstance(file, RemotePath) and path.samefile(file)
        if directory and (same or path in _real(file).parents):
            raise CheckpointError(f"{output}: holds the checkpoint itself; choose another name")
        if same:
            raise CheckpointError(
                f"{output}: is {file.name} of the checkpoint itself; choose another name"
            )
        if all_count and file.suffix == path.suffix and _real(file.parent) == path.parent:
            raise CheckpointError(
                f"{output}: would be among the files of the checkpoint, which no index lists, and "
                "count as one of them; choose another directory"
            )
    due = "a directory" if directory else "a file"
    if kind not in (None, due):
        raise CheckpointError(f"{output}: is {kind}; name {due} to write")
    # A directory in a store may be an empty mark.
    if kind and not overwrite and (here or not path.is_dir() or any(path.iterdir())):
        raise output_exists(output)
    if here and not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        problem = "is not writable" if path.parent.is_dir() else "does not exist"
        raise CheckpointError(
            f"{output}: its directory {path.parent} {problem}; make it first, or write elsewhere"
        )
    return _check_replaced(path, target, format) if overwrite and directory else Destination(path)


def _real(path: Path) -> Path:
    """Return a path with links resolved."""
    return path if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def _kind(output: Path, path: Path) -> str | None:
    """Return what is there, in words; None if there is nothing."""
    if isinstance(path, RemotePath):
        info = path.info()
        return None if info is None else f"a {info['type']}"
    with path_errors(output, "written"):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return None
    if stat.S_ISDIR(mode):
        return "a directory"
    return "a file" if stat.S_ISREG(mode) else "not a regular file"


def _check_replaced(path: Path, target: Target, format: str) -> Destination:
    """Return which files of a directory an output replaces.

    Refuse it where others would count as parts of what is new, or be read instead: a kept index,
    for example.
    """
    inode: int | None = None
    if not isinstance(path, RemotePath):
        inode = path.stat().st_ino if path.exists() else 0
    replaced = _files_of_checkpoint(path)
    new = {file.name for file in target.files}
    if target.last is not None:
        new.add(_LISTS[format])
    inner = {name.split("/")[0] for name in new if "/" in name}
    heads = {name for name in new if "/" not in name} - inner
    _check_kinds(path, new)
    kept = _names_in(path, inner) - replaced - new
    counted: list[str] = []
    if format not in ("shardspec", "dcp"):  # these list their files
        counted = sorted(
            name
            for name in kept
            if is_data_file(name)
            or name.endswith(INDEX_SUFFIX)
            # Of a Universal Checkpoint.
            or (inner and DEEPSPEED_MODEL.fullmatch(name))
            or ("/" in name and name.endswith(".pt"))
        )
    read: list[str] = []
    known = format_of_names(heads)
    if format_of_names(heads | kept) is not known:
        read = sorted(name for name in kept if format_of_names(heads | {name}) is not known)
        read = read or sorted(kept)
    for names, do in ((counted, "count as parts of"), (read, "be read instead of")):
        if names:
            raise CheckpointError(
                f"{path}: holds {', '.join(map(repr, names[:3]))}, which would {do} what is "
                "written there; move them, or choose another directory"
            )
    return Destination(path, replaced, inode)


def _files_of_checkpoint(directory: Path) -> frozenset[str]:
    """Return the names of the files that make up the checkpoint in a directory.

    Only what can be opened counts, and in it only what an index or a sharding info lists, or what
    has a name that only parts of checkpoints have. All other files are somebody else's.
    """
    try:
        source = open_checkpoint(directory)
        for name in source.names:
            source.tensor(name)
    except ShardSpecError:
        return frozenset(name for name in _names_in(directory) if _OWN_NAMES.fullmatch(name))
    if source.format == DEEPSPEED_UNIVERSAL:
        below = (file.relative_to(source.directory).as_posix() for file in source.files)
        return frozenset((*below, UNIVERSAL_OPTIMIZER, UNIVERSAL_LATEST))
    inside = {file.name for file in source.files if file.parent == source.directory}
    lists = {name for name in inside if name.endswith(_LISTS_OF_FILES)}
    listed = {name for name in inside if lists and name.endswith(_DATA)}
    return frozenset(lists | listed | {name for name in inside if _OWN_NAMES.fullmatch(name)})


def _names_in(directory: Path, inner: Collection[str] = ()) -> set[str]:
    """Return the names in a directory, and instead of `inner` directories what is below them."""
    try:
        if isinstance(directory, RemotePath):
            return set(directory.listing())
        found = set(os.listdir(directory))
        for name in found & set(inner):
            with opened(directory / name) as fd:
                found = found - {name} | {f"{name}/{below}" for below in names_below(fd)}
    except OSError:
        return set()
    return found


def _check_kinds(output: Path, new: Collection[str]) -> None:
    """Refuse to write files where directories are, or directories where anything else is."""
    if isinstance(output, RemotePath):
        return
    due = dict.fromkeys(new, "file")
    due |= {str(at): "directory" for name in new for at in PurePosixPath(name).parents}
    for name, kind in due.items():
        try:
            mode = os.lstat(output / name).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) != (kind == "directory"):
            raise CheckpointError(
                f"{output}: holds {name!r}, where a {kind} is to be written; move it, or choose "
                "another directory"
            )
