"""Converting checkpoints: merged into global tensors, or resharded for the ranks of a mesh.

Both choose tensors and lay out the files for them. The rest is the same for all formats: check that
the output can be made and may be written, plan the copies, execute them, commit.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from isal.isal_zlib import crc32_combine

from shardspec.boxes import box_size
from shardspec.checkpoint.agree import Processes
from shardspec.checkpoint.catalog import (
    ZEROS,
    AnyOutline,
    Catalog,
    check_tiling,
    distinct,
    memoize_by_boxes,
)
from shardspec.checkpoint.check_quantized import check_blocks
from shardspec.checkpoint.choice import Choice, Patterns, Renames
from shardspec.checkpoint.destination import Destination, check_destination
from shardspec.checkpoint.mapped import Names, check_drop, mapped
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.output import Output, WriteOptions
from shardspec.checkpoint.read_boxes import Progress, check_replicas, crc_text
from shardspec.checkpoint.select import (
    carried_values,
    check_dropped,
    layouts_by_rules,
    layouts_like,
    select,
    tied,
)
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.checkpoint.targets import OutputTensor, Target, add_sidecars
from shardspec.comm.communicator import Communicator
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError
from shardspec.layout.rules import Rules, winning_patterns
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import Argument, Part, shown

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

MergedFormat: TypeAlias = Literal["safetensors", "huggingface", "torch", "dcp"]
MERGED_FORMATS: Final[tuple[MergedFormat, ...]] = get_args(MergedFormat)
ReshardedFormat: TypeAlias = Literal["shardspec", "dcp", "deepspeed-universal"]
RESHARDED_FORMATS: Final[tuple[ReshardedFormat, ...]] = get_args(ReshardedFormat)
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")
_SHARD_BYTES: Final = 5 * 10**9
"""Most bytes of tensors in a file, as transformers has it."""
_ADAPTER: Final = "adapter_model.safetensors"

_CHOICE: Final[tuple[Part, ...]] = (
    *(Argument("dtype"), ", ", Argument("include"), ", ", Argument("exclude"), ", "),
    *(Argument("rename"), " and ", Argument("names")),
)
"""The arguments that choose tensors and name them, for a message."""

_LaidOut: TypeAlias = tuple[Sequence[OutputTensor], Target]
_LayOut: TypeAlias = Callable[[Catalog, str], _LaidOut]
"""Selects tensors of a catalog and lays out the files for them, given a text to name them by."""
_Prepared: TypeAlias = "tuple[Catalog, Target, Destination, WriteReport]"


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was written, or what would be."""

    path: PurePath
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
    left_out: tuple[str, ...]
    """Entries of the source that are not tensors and that the output lacks; the metadata of
    safetensors files is ``"__metadata__"``."""
    sidecars: tuple[str, ...]
    """Names of the files beside the weights of the source that were copied along."""
    weight_files: int
    """How many files of the output hold tensors: without an index and what was copied along."""
    not_copied: tuple[str, ...] = ()
    """Names of what lies there too and was not copied; a directory ends in a slash."""
    seconds: float = 0.0
    crc32: int | None = None
    """CRC-32 of all files in their order; None if it was not computed."""
    cast_losses: "CastLosses | None" = None
    """What a cast to another dtype did not keep; None if nothing was cast."""
    written: bool = False
    """False after a dry run."""
    sharding: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """After a dry run of `reshard`: tensor to the rule for it, empty where no rule matches, and its
    spec."""

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
            "read": self.read,
            "read_files": self.read_files,
            "read_bytes": self.read_bytes,
            "reads": dict(self.reads),
            "writes": dict(self.writes),
            "tensors": self.tensors,
            "files": list(self.files),
            "weight_files": self.weight_files,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "crc32": None if self.crc32 is None else crc_text(self.crc32),
            "cast": None if self.cast_losses is None else self.cast_losses.to_json(),
            "left_out": list(self.left_out),
            "sidecars": list(self.sidecars),
            "not_copied": list(self.not_copied),
            "written": self.written,
            "sharding": {
                name: {"rule": rule or None, "spec": spec}
                for name, (rule, spec) in self.sharding.items()
            },
        }


def merge(
    directory: PurePath | str | Catalog,
    output: PurePath | str,
    *,
    format: MergedFormat | None = None,
    max_shard_bytes: int | None = None,
    dtype: str | None = None,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Renames = (),
    names: Names | None = None,
    drop: Patterns = (),
    threads: int = 1,
    metadata: bool = True,
    strict_cast: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    sidecars: bool = True,
    progress: Progress | None = None,
    communicator: Communicator | None = None,
) -> WriteReport:
    """Write the global tensors of a checkpoint into one file, or into files of a limited size.

    Headers, tiling and replicas are checked before the first byte is written (but the headers that
    torch's DCP puts before chunks). Pending reductions are finished. The output appears under its
    name once it is complete and flushed to the disk. Needs neither torch nor a process
    group; memory does not grow with the sizes of the tensors.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or one that it has opened.
    output
        The file to write; a directory for the formats ``"huggingface"`` and ``"dcp"``.
    format
        The default is a torch file if the output ends in ``.pt``, ``.pth`` or ``.bin``,
        ``"huggingface"`` if `max_shard_bytes` is given or the output is text that ends in ``/``,
        else one safetensors file.
    max_shard_bytes
        Most bytes of tensors in a file of the format ``"huggingface"``; 5 GB by default.
    dtype
        Cast floating point tensors to this dtype.
    include, exclude
        Shell patterns of names, one or several. What matches any of `include`, or all if it is
        None, and none of `exclude`, is written.
    rename
        Regular expressions with their replacements, ``{"^model[.]": ""}`` or pairs. Each is applied
        in turn to its first match in every name.
    names
        A map to the tensors of another model: a `NameMap`, a list of them to be applied in turn, or
        new names. It has to have a use for every tensor that is to be written. `include` and
        `exclude` match names before it, `rename` those that it gives.
    drop
        Shell patterns of names whose tensors the map need not use.
    threads
        How many threads copy: each a few tensors at a time, or to a store a file.
    metadata
        Copy the metadata of safetensors files into safetensors files.
    strict_cast
        Refuse a cast that does not keep a number: one that overflows, becomes 0, or becomes NaN.
        Otherwise the report counts them.
    overwrite
        Replace the checkpoint that is there: its own files, and those beside the weights that
        belong to it. A directory with any other file is refused.
    verify
        Compare all bytes that are read with the digests of the checkpoint, if it has any.
    dry_run
        Do all checks that come before writing, and write nothing.
    sidecars
        Copy the files beside the weights into directories, such as ``config.json``, a tokenizer's
        files and ``adapter_config.json``; into the format ``"dcp"`` also Megatron's ``common.pt``
        and Lightning's ``meta.pt``.
    progress
        Called with the bytes written so far and in all.
    communicator
        Whose processes share the work, as `ProcessGroupCommunicator.of(mesh)`; by default this one
        does it alone. All of them call this with the same arguments, on one file system or store.

    Raises
    ------
    OutputExistsError
        If the output exists and `overwrite` is not set; it is kept.
    CheckpointError
        If the checkpoint is missing, unfinished, damaged or contradicts itself, if an object in it
        has tensors that would be lost, if the output would overwrite a part of it, or if the disk
        is full. Nothing appears under the name of the
        output, and no temporary file is left.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from shardspec import DTensor, DeviceMesh, save_sharded
    >>> directory = Path(tempfile.mkdtemp())
    >>> w = DTensor(torch.arange(12.0).view(4, 3), DeviceMesh(range(4), (2, 2)), "[S01,R]")
    >>> save_sharded({"w": w}, directory / "ckpt")
    >>> report = merge(directory / "ckpt", directory / "model.safetensors")
    >>> report.tensors, report.num_bytes
    (1, 144)
    """
    place = storage_path(output)
    in_directory = isinstance(output, str) and output.endswith(("/", os.sep))
    chosen = _merged_format(place, format, max_shard_bytes, in_directory)
    given = Choice(include, exclude, rename, dtype, drop)
    choice = given if names is None else given.after_map()

    def lay_out(source: Catalog, _: str) -> _LaidOut:
        return _merged(source, choice, place.name, chosen, max_shard_bytes, metadata)

    options = WriteOptions(
        threads, strict_cast, overwrite, verify, dry_run, sidecars, progress, communicator
    )
    return _converted(partial(_mapped, directory, names, given), place, chosen, lay_out, options)


def reshard(
    directory: PurePath | str | Catalog,
    output: PurePath | str,
    *,
    device_mesh: DeviceMesh | None = None,
    rules: Rules | None = None,
    like: PurePath | str | Catalog | None = None,
    format: ReshardedFormat | None = None,
    dtype: str | None = None,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Renames = (),
    names: Names | None = None,
    drop: Patterns = (),
    threads: int = 1,
    strict_cast: bool = False,
    drop_values: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    sidecars: bool = True,
    progress: Progress | None = None,
    communicator: Communicator | None = None,
) -> WriteReport:
    """Write a checkpoint of any format as the ranks of a mesh would have saved it.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or one that it has opened.
    output
        The directory to write.
    device_mesh
        The devices to shard for.
    rules
        Name pattern to spec, matched against the new names as by `match_rules`: the last rule that
        matches a tensor counts. One that no rule matches is replicated.
    like
        A checkpoint to take mesh and specs from, by name, in place of the two above.
    format
        shardspec's own, which is the default, that of `torch.distributed.checkpoint`, or
        ``"deepspeed-universal"``, which any number of ranks loads. That one is made of a whole run
        of DeepSpeed's ZeRO, without mesh and rules.
    dtype, include, exclude, rename, names, drop, threads, strict_cast
        As for `merge`.
    drop_values
        Leave out the entries that the format has no place for, which is an error otherwise. Both
        formats of shards keep plain values (None, numbers, texts, bytes, lists and dicts of them);
        between checkpoints of torch everything is copied as it is stored.
    overwrite, verify, dry_run, sidecars, progress, communicator
        As for `merge`.

    Raises
    ------
    LayoutError, AxisError
        If the rules do not fit the tensors or the mesh.
    OutputExistsError, CheckpointError
        As for `merge`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from shardspec import save_sharded
    >>> place = Path(tempfile.mkdtemp())
    >>> save_sharded({"w": torch.arange(12.0).view(4, 3)}, place / "whole")
    >>> mesh = DeviceMesh(range(4), (4,))
    >>> report = reshard(place / "whole", place / "cut", device_mesh=mesh, rules={"w": "[S0,R]"})
    >>> len(report.files)
    5
    """
    chosen = format or "shardspec"
    given = Choice(include, exclude, rename, dtype, drop)
    universal, onto = chosen == "deepspeed-universal", device_mesh
    checks: tuple[tuple[object, tuple[Part, ...]], ...] = (
        (
            chosen not in RESHARDED_FORMATS,
            (f"there is no format {chosen!r}; choose one of {', '.join(RESHARDED_FORMATS)}",),
        ),
        (
            like is not None and (onto is not None or rules is not None),
            ("give either a checkpoint to shard like, or a mesh and rules",),
        ),
        (
            not isinstance(onto, DeviceMesh | None),
            (
                f"a {type(onto).__name__} is not a mesh to shard for; give a DeviceMesh, as of "
                "DeviceMesh(range(8), (2, 4))",
            ),
        ),
        (
            universal and (onto is not None or like is not None or rules or any(given) or names),
            (
                "a Universal Checkpoint has all tensors of a run as DeepSpeed saved them, for any "
                "number of ranks; leave out the mesh, the rules, the checkpoint to shard like, ",
                *_CHOICE,
            ),
        ),
        (
            not universal and onto is None and like is None,
            (
                "give the mesh to shard for, ",
                Argument("device_mesh"),
                ", or a checkpoint to shard like",
            ),
        ),
    )
    for wrong, problem in checks:
        if wrong:
            raise CheckpointError(*problem)
    choice = given if names is None else given.after_map()

    def lay_out(source: Catalog, save: str) -> _LaidOut:
        if universal:
            from shardspec.checkpoint.formats.deepspeed_universal import universal_target

            found = universal_target(source)
            check_dropped(source, choice, found[1].carried, drop_values)
            return found
        wanted = select(source, choice)
        if onto is None:
            assert like is not None, "checked before"
            mesh, layouts = layouts_like(as_catalog(like), wanted)
        else:
            mesh, layouts = onto, layouts_by_rules(onto, rules or {}, wanted)
        check_blocks(source, {tensor.source: layouts[tensor.name] for tensor in wanted})
        kept = carried_values(source, choice, wanted, objects=chosen == "dcp")
        check_dropped(source, choice, kept.names, drop_values)
        if chosen == "dcp":
            from shardspec.checkpoint.formats.dcp_target import dcp_target

            target = dcp_target(mesh, wanted, layouts, kept.values, kept.paths)
        else:
            from shardspec.checkpoint.formats.native import sharded_target

            metadata = source.file_metadata.values
            target = sharded_target(mesh, wanted, layouts, save, metadata, kept.values, kept.paths)
        winners = winning_patterns(list(rules or {}), layouts)
        sharding = {
            name: (winners.get(name, ""), str(layout.labelled_spec))
            for name, layout in layouts.items()
        }
        return wanted, target._replace(carried=target.carried | kept.names, sharding=sharding)

    options = WriteOptions(
        threads, strict_cast, overwrite, verify, dry_run, sidecars, progress, communicator
    )
    opening = partial(_mapped, directory, names, given)
    return _converted(opening, storage_path(output), chosen, lay_out, options)


def _merged_format(
    output: StoragePath,
    format: MergedFormat | None,
    max_shard_bytes: int | None,
    in_directory: bool,
) -> MergedFormat:
    """Return the format of an output; `in_directory` says whether it is named as a directory."""
    chosen = format
    if chosen is None:
        one_file = output.suffix in (".safetensors", *_TORCH_SUFFIXES) or max_shard_bytes is None
        chosen = "torch" if output.suffix in _TORCH_SUFFIXES else "safetensors"
        chosen = chosen if one_file and not in_directory else "huggingface"
    if chosen not in MERGED_FORMATS:
        raise CheckpointError(
            f"there is no format {chosen!r}; choose one of {', '.join(MERGED_FORMATS)}"
        )
    if max_shard_bytes is not None and (max_shard_bytes < 1 or chosen != "huggingface"):
        raise CheckpointError(
            f"{output}: a limit of {max_shard_bytes} bytes a file (",
            Argument("max_shard_bytes"),
            f") is not for the format {chosen!r}, or below 1; leave it out, or choose the format "
            "'huggingface' and name a directory",
        )
    if in_directory and chosen in ("safetensors", "torch"):
        raise CheckpointError(
            f"{output}/: is named as a directory, but the format {chosen!r} is one file; leave out "
            "the slash, or choose another format"
        )
    return chosen


def _merged(
    source: Catalog,
    choice: Choice,
    name: str,
    chosen: MergedFormat,
    max_shard_bytes: int | None,
    metadata: bool,
) -> _LaidOut:
    """Choose tensors, and lay out the files for all of each; formats are imported when needed."""
    wanted = select(source, choice)
    kept = carried_values(source, choice, wanted, objects=chosen == "dcp")
    # The other formats have no room for entries that are not tensors.
    carried = kept.names if chosen in ("torch", "dcp") else frozenset[str]()
    check_dropped(source, choice, carried, None)
    if source.extras and not (wanted or carried):
        raise CheckpointError(
            f"{source.directory}: holds no tensor that could be written, but "
            f"{min(source.extras)!r} and the like; name the checkpoint of the model"
        )
    if chosen == "torch":
        from shardspec.checkpoint.formats.torch_file import torch_target

        target = torch_target(name, wanted, kept.values, tied(source, wanted))
    elif chosen == "dcp":
        from shardspec.checkpoint.formats.dcp_target import dcp_target

        alone = DeviceMesh((0,), (1,))
        layouts = layouts_by_rules(alone, {}, wanted)
        target = dcp_target(alone, wanted, layouts, kept.values, kept.paths)
    else:
        from shardspec.checkpoint.formats import safetensors

        found = source.file_metadata
        for key, (first, other) in found.contradictions.items() if metadata else ():
            raise CheckpointError(
                f"{source.directory}: {first.name} and {other.name} have different metadata under "
                f"{shown(key, 100)}, and one output cannot have both; leave all such metadata out "
                "with ",
                Argument("metadata", value=False),
            )
        said = found.values if metadata else {}
        carried, said = frozenset(said), {**safetensors.METADATA, **said}
        if chosen == "safetensors":
            target = Target((safetensors.output_file(name, wanted, said),), directory=False)
        else:
            # PEFT expects its own name, also where the adapter was resharded in between.
            adapter = {file.name for file in source.files} == {_ADAPTER} or (
                (source.home / "adapter_config.json").is_file()
                and not (source.home / "config.json").is_file()
            )
            alone_name = _ADAPTER if adapter else "model.safetensors"
            limit = max_shard_bytes or _SHARD_BYTES
            target = safetensors.huggingface_target(wanted, limit, said, alone_name)
    return wanted, target._replace(carried=carried)


def _mapped(checkpoint: PurePath | str | Catalog, names: Names | None, choice: Choice) -> Catalog:
    """Return a checkpoint as what a map makes of what is chosen."""
    if names is None:
        check_drop(choice)
        return as_catalog(checkpoint)
    return mapped(as_catalog(checkpoint), names, choice)


def _converted(
    opening: Callable[[], Catalog],
    output: StoragePath,
    format: str,  # as the report names it
    lay_out: _LayOut,
    options: WriteOptions,
) -> WriteReport:
    """Check that an output can be made of a checkpoint and may be written, and write it."""
    started = time.monotonic()
    processes = Processes(None if options.dry_run else options.communicator)

    def prepared(save: str) -> _Prepared:
        if options.threads < 1:
            raise CheckpointError(f"{options.threads} threads write nothing; give at least 1")
        if not output.shared and processes.size > 1:
            raise CheckpointError(
                f"{output}: memory:// is the memory of one process, and others do not see it; "
                "start one process"
            )
        source = opening()
        if format == "dcp":
            source = source.as_stored()
        tensors, target = lay_out(source, save)
        if options.sidecars:
            target = add_sidecars(source, target, format)
        if not output.nests and any("/" in file.name for file in target.files):
            raise CheckpointError(
                f"{output}: the format {format!r} has files in directories, which are not written "
                "into a store; write to a directory here, and copy that"
            )
        destination = Destination(output)
        if processes.rank == 0:
            destination = check_destination(output, source, target, options.overwrite)
        reads = _check_tensors(source, tensors, options.verify, processes)
        report = WriteReport(
            path=output.public(),
            format=format,
            read=source.format,
            reads={
                str(path).removeprefix(f"{source.directory}{os.sep}"): num_bytes
                for path, num_bytes in sorted(reads.items())
            },
            tensors=len(tensors) + sum(len(source.pickled.get(n, ())) for n in target.carried),
            writes={file.name: file.num_bytes for file in target.files},
            left_out=_left_out(source, target),
            sidecars=target.sidecars,
            weight_files=len(target.files) - len(target.sidecars),
            not_copied=target.not_copied,
            sharding=target.sharding if options.dry_run else {},
        )
        return source, target, destination, report

    with processes.failing_together():
        save = processes.gather(os.urandom(8).hex())[0]
        source, target, destination, report = processes.agree(lambda: prepared(save))
        if not options.dry_run:
            processes.check_same(lambda: _facts(source, target, report, options))
            begun = Output(source, target, destination.path, options, processes)
            written = begun.write(destination)
            crc = 0
            for _, num_bytes, value in written:
                crc = int(crc32_combine(crc, value, num_bytes))
            report = replace(
                report,
                writes={name: num_bytes for name, num_bytes, _ in written},
                crc32=crc if begun.digested else None,
                cast_losses=begun.losses,
                written=True,
            )
    return replace(report, seconds=time.monotonic() - started)


def _facts(
    source: Catalog, target: Target, report: WriteReport, options: WriteOptions
) -> dict[str, str]:
    """Return what several processes that write one output have to agree on."""
    facts = {
        "output": str(storage_path(report.path).absolute()),
        "checkpoint": str(source.directory.absolute()),
        "format": report.format,
    }
    for option in ("strict_cast", "overwrite", "verify"):
        facts[f"option {option}"] = str(getattr(options, option))
    for file in target.files:
        layout = sha256()
        for tensor, box, offset in file.extents:
            layout.update(repr((tensor, box, offset)).encode("utf-8", "surrogatepass"))
        facts[f"file {file.name!r}"] = (
            f"{file.num_bytes} bytes with layout {layout.hexdigest()[:8]}"
        )
    return facts


def _left_out(source: Catalog, target: Target) -> tuple[str, ...]:
    """Return the names of what is not carried along."""
    left = sorted(source.extras.keys() - target.carried)
    metadata = source.file_metadata
    if (metadata.values.keys() | metadata.contradictions.keys()) - target.carried:
        left.append("__metadata__")
    return tuple(left)


def _check_tensors(
    source: Catalog, tensors: Sequence[OutputTensor], verify: bool, processes: Processes
) -> Counter[StoragePath]:
    """Check that boxes tile every tensor, and copies agree; return the bytes to read by file."""
    copies_of = memoize_by_boxes(check_tiling)
    elements_of = memoize_by_boxes(_elements_by_file)
    # Tensors that are sharded alike share one count.
    counts: dict[int, Counter[StoragePath]] = {}
    widths: Counter[int] = Counter()
    with OpenFiles() as files:
        for place, name in enumerate(sorted({tensor.source for tensor in tensors})):
            outline = source.outline(name)
            unsure = copies_of(outline) and not (verify and source.copies_agree(name))
            # Each of several processes compares its share.
            if unsure and place % processes.size == processes.rank:
                tensor = source.tensor(name)
                for group in check_tiling(tensor):
                    check_replicas(tensor, group, files, trust_digests=verify)
            elements = elements_of(outline)
            counts[id(elements)] = elements
            widths[id(elements)] += item_bytes(outline.dtype)
    reads: Counter[StoragePath] = Counter()
    for key, elements in counts.items():
        for path, count in elements.items():
            reads[path] += count * widths[key]
    return reads


def _elements_by_file(outline: AnyOutline) -> Counter[StoragePath]:
    found: Counter[StoragePath] = Counter()
    for stored in distinct(outline):
        if stored.path != ZEROS:
            found[stored.path] += box_size(stored.box)
    return found
