"""Provides `merge` and `reshard`: writes a checkpoint as whole tensors, or as the shards of a mesh.

Both select tensors, let a format lay out the files, check source and destination, and then copy.
Overwriting replaces the files of a checkpoint, and its config and tokenizer files. A directory with
any other file is refused, and so is an output that would change its own source.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, TypeAlias, Unpack

from shardspec.checkpoint.catalog import Catalog, Target
from shardspec.checkpoint.compare.digest import check_digests_file, write_digests
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.checksums import crc32_combine
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout
from shardspec.layout.rules import Rules
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.text import Argument

if TYPE_CHECKING:
    from shardspec.checkpoint.convert.numeric import CastLosses

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from shardspec.checkpoint.catalog import Carried, OutputTensor
from shardspec.checkpoint.compare.coverage import check_tensors
from shardspec.checkpoint.convert.layout import (
    ON_ONE_DEVICE,
    layouts_by_rules,
    layouts_given,
    layouts_like,
)
from shardspec.checkpoint.convert.select import (
    Choice,
    Patterns,
    Selection,
    carried_values,
    check_drop,
    check_dropped,
    config_of,
    select,
)
from shardspec.checkpoint.convert.sidecars import WITHOUT_SIDECARS, add_sidecars
from shardspec.checkpoint.formats import (
    Format,
    Wanted,
    Way,
    default_format,
    format_of,
    formats,
    merged_format,
    written_format,
)
from shardspec.checkpoint.open import as_catalog, open_checkpoint
from shardspec.checkpoint.quantization.cuts import (
    check_blocks,
    grid_layout,
    quantized_in,
    refuse_casts,
)
from shardspec.checkpoint.storage.checksums import crc_text
from shardspec.checkpoint.storage.path import (
    Entry,
    Identity,
    StoragePath,
    is_temporary,
    output_exists,
    output_replaced,
)
from shardspec.dtypes import dtype_name
from shardspec.errors import ShardSpecError
from shardspec.layout.rules import winning_patterns
from shardspec.resharding.name_map import Names
from shardspec.text import shown

if TYPE_CHECKING:
    from shardspec.checkpoint.convert.numeric import CastLosses
from shardspec.checkpoint.convert.copy import Destination, Output, Progress
from shardspec.checkpoint.quantization import mapped_source


class WriteKeywords(Selection, total=False):
    """Options of both `merge` and `reshard`; see `merge`."""

    format: str | None
    dtype: str | None
    names: Names | None
    overwrite: bool
    quantize: str | None
    quantize_include: Patterns | None
    drop_values: bool
    threads: int
    metadata: bool
    strict_cast: bool
    verify: bool
    dry_run: bool
    sidecars: bool
    progress: Progress | None
    digests: PurePath | str | None
    weights: Sequence[float] | None
    take_first: Patterns
    lora: PurePath | str | Catalog | None


Checkpoints: TypeAlias = PurePath | str | Catalog | Sequence[PurePath | str | Catalog]
"""One checkpoint, or several to be summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(Choice):
    """Options for writing: selection, format and sharding; see `merge` and `reshard`."""

    way: Way
    format: str | None = None
    """Name of the format; None for the default."""
    max_shard_bytes: int | None = None
    in_directory: bool = False
    """True if the path of the output ends like a directory."""
    names: Names | None = None
    device_mesh: DeviceMesh | None = None
    rules: Rules | None = None
    like: PurePath | str | Catalog | Mapping[str, Layout] | None = None
    quantize: str | None = None
    quantize_include: Patterns | None = None
    drop_values: bool = False
    threads: int = 1
    metadata: bool = True
    strict_cast: bool = False
    overwrite: bool = False
    verify: bool = True
    dry_run: bool = False
    sidecars: bool = True
    progress: Progress | None = None
    digests: PurePath | str | None = None
    weights: Sequence[float] | None = None
    take_first: Patterns = ()
    lora: PurePath | str | Catalog | None = None


@dataclass(frozen=True, slots=True)
class WriteReport:
    """Facts about an output of `merge` or `reshard`: files and bytes; planned ones if a dry run."""

    path: PurePath
    """The output, as the user named it."""
    format: str
    """The format of the output, as `merge` and `reshard` name it."""
    read: str
    """Title of the source's format."""
    reads: Mapping[str, int]
    """Source file to the bytes read from it; each box is read once."""
    tensors: int
    writes: Mapping[str, int]
    """Output file to its size; the name of the output itself if it is one file."""
    left_out: tuple[str, ...]
    """Skipped entries of the source that are not tensors; the metadata of safetensors files is
    ``"__metadata__"``."""
    sidecars: tuple[str, ...]
    """Names of the non-weight files copied from the source."""
    weight_files: int
    """Number of files with tensors, without an index and copied files."""
    not_copied: tuple[str, ...] = ()
    """Names of files beside the source that were not copied; directories end in a slash."""
    filled: tuple[str, ...] = ()
    """Names of the tensors taken from `fill_from`."""
    summed: tuple[str, ...] = ()
    """Notes on how checkpoints or an adapter were combined."""
    seconds: float = 0.0
    crc32: int | None = None
    """CRC-32 of all files in their order; None if it was not computed."""
    cast_losses: "CastLosses | None" = None
    """Counts of numbers lost in casts; None if nothing was cast."""
    written: bool = False
    """False after a dry run."""
    digests: Digests | None = None
    """Digests of the output's tensors, if requested."""
    sharding: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """After a dry run of `reshard`: tensor to its rule (empty if none matches) and its spec."""

    @property
    def read_files(self) -> int:
        """Number of files that tensors are read from."""
        return len(self.reads)

    @property
    def read_bytes(self) -> int:
        """Number of bytes read from all files."""
        return sum(self.reads.values())

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the written files."""
        return tuple(self.writes)

    @property
    def num_bytes(self) -> int:
        """Total size of the written files."""
        return sum(self.writes.values())

    def to_json(self) -> dict[str, object]:
        """Return the report as a dict of plain values, ready for JSON."""
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
            "filled": list(self.filled),
            "summed": list(self.summed),
            "written": self.written,
            "digest": None if self.digests is None else self.digests.value,
            "sharding": {
                name: {"rule": rule or None, "spec": spec}
                for name, (rule, spec) in self.sharding.items()
            },
        }


def merge(
    directory: Checkpoints,
    output: PurePath | str,
    *,
    max_shard_bytes: int | None = None,
    **options: Unpack[WriteKeywords],
) -> WriteReport:
    """Write the global tensors of a checkpoint into one file, or into files of a limited size.

    Headers, tiling and replicas are checked before the first byte is written, except the headers
    of chunks in torch's DCP. Pending reductions are finished. The output appears under its name
    once it is complete and flushed to the disk. Needs neither torch nor a process group. Memory
    does not grow with the sizes of the tensors.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` reads, or an open one; several are summed
        by `weights`.
    output
        The file to write; a directory for the formats ``"huggingface"`` and ``"dcp"``.
    max_shard_bytes
        Most bytes of tensors in a file of the format ``"huggingface"``; 5 GB by default.

    Other Parameters
    ----------------
    format
        The default is a torch file if the output ends in ``.pt``, ``.pth`` or ``.bin``,
        ``"huggingface"`` if `max_shard_bytes` is given or the output is text that ends in ``/``,
        else one safetensors file. Installed packages may have others (``shardspec.formats``).
    dtype
        Cast floating point tensors to this dtype; quantized weights are dequantized to it.
    names
        A map to the tensors of another model: a `NameMap`, a list of them to apply in order, or new
        names. It must use every selected tensor. `include` and `exclude` match names before the
        map, `rename` those after it.
    overwrite
        Replace an existing checkpoint: its weights, config and tokenizer files. A directory with
        any other file is refused.
    include, exclude
        Shell patterns of names, one or several. A tensor is written if its name matches any of
        `include` (None matches all) and none of `exclude`.
    rename
        Regular expressions with their replacements, ``{"^model[.]": ""}`` or pairs. In order, each
        replaces its first match in every name.
    drop
        Shell patterns of names whose tensors the map need not use.
    quantize
        Quantize the weights of linear layers: ``"fp8-128x128"``, ``"mxfp8"`` or ``"mxfp4"``. The
        model's config selects the layers, or without a config their names.
    quantize_include
        Shell patterns of names in the output: only matching tensors are quantized.
    drop_values
        Drop entries that the format cannot store, which is an error otherwise; `merge` always
        drops those without tensors. Both sharded formats keep plain values (None, numbers, texts,
        bytes, lists and dicts of them). Between checkpoints of torch all entries are copied
        unread.
    threads
        Number of threads. Each copies a few tensors at a time, or one file to an object store.
    metadata
        Copy the metadata of safetensors files into safetensors files.
    strict_cast
        Refuse a cast that does not keep a number: one that overflows, becomes 0, or becomes NaN.
        Otherwise the report counts them.
    verify
        Compare all bytes read with the digests of the checkpoint, if it has any.
    dry_run
        Do all checks that come before writing, and write nothing.
    sidecars
        Copy non-weight files into directories, such as ``config.json``, tokenizer files and
        ``adapter_config.json``; into the format ``"dcp"`` also Megatron's ``common.pt`` and
        Lightning's ``meta.pt``.
    progress
        Called with the bytes written so far and in all.
    digests
        A file for the digests of the output's tensors, as `digest` computes them. They are
        computed while writing.
    weights
        Factor of each checkpoint. Floating point tensors become ``w1 * a + w2 * b + ...``, computed
        in float32 (float64 in float64) in this order and rounded once. Names, shapes and, without
        `dtype`, dtypes must be equal; formats and sharding may differ. Other tensors must be equal.
        Optimizer state is excluded, unless `include` names it.
    take_first
        Shell patterns of names whose tensors and values are those of the first checkpoint.
    lora
        An adapter of PEFT to merge into the checkpoint: LoRA, rank-stabilized LoRA or DoRA, in any
        format, with its ``adapter_config.json``. An adapter with an unused tensor is refused.

    Raises
    ------
    OutputExistsError
        If the output exists and `overwrite` is not set; it is kept.
    CheckpointError
        If the checkpoint is missing, unfinished, damaged or inconsistent, if an object in it has
        tensors that would be lost, if the output would overwrite a part of it, or if the disk is
        full. Then no output appears under its name, and no temporary file is left.

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
    how = WriteOptions(way="merged", max_shard_bytes=max_shard_bytes, **options)
    return _converted(directory, output, how)


def reshard(
    directory: Checkpoints,
    output: PurePath | str,
    *,
    device_mesh: DeviceMesh | None = None,
    rules: Rules | None = None,
    like: PurePath | str | Catalog | Mapping[str, Layout] | None = None,
    **options: Unpack[WriteKeywords],
) -> WriteReport:
    """Write a checkpoint of any format as the ranks of a mesh would have saved it.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` reads, or an open one; several are summed
        by `weights`.
    output
        The directory to write.
    device_mesh
        The devices to shard for.
    rules
        Name pattern to spec, matched against the new names as by `match_rules`: the last matching
        rule applies. A tensor without a matching rule is replicated.
    like
        Replaces `device_mesh` and `rules`: a checkpoint whose mesh and specs, by name, are used;
        or the layout of each tensor, as `model_layouts` returns them.

    Other Parameters
    ----------------
    format
        shardspec's own, which is the default, or that of `torch.distributed.checkpoint`.
    dtype, names, overwrite, ...
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
    how = WriteOptions(way="sharded", device_mesh=device_mesh, rules=rules, like=like, **options)
    return _converted(directory, output, how)


def _converted(
    checkpoint: Checkpoints, place: PurePath | str, options: WriteOptions
) -> WriteReport:
    """Plan and check an output, then write it, unless this is a dry run."""
    started = time.monotonic()
    output = storage_path(place)
    if isinstance(place, str) and place.endswith(("/", os.sep)):
        options = replace(options, in_directory=True)
    digests_file = None if options.digests is None else storage_path(options.digests)
    prepared = prepared_output(checkpoint, output, options, os.urandom(8).hex())
    if digests_file is not None:
        check_digests_file(digests_file, output, overwrite=options.overwrite)
    report = prepared.report
    if not options.dry_run:
        begun = Output(
            *prepared[:3],
            threads=options.threads,
            verify=options.verify,
            digests=digests_file is not None,
            strict_cast=options.strict_cast,
            progress=options.progress,
        )
        written = begun.write()
        crc = 0
        for _, num_bytes, value in written:
            crc = crc32_combine(crc, value, num_bytes)
        digests = None
        if digests_file is not None:
            digests = _digests(prepared.target, begun)
            write_digests(digests_file, digests, overwrite=options.overwrite)
        report = replace(
            report,
            writes={name: num_bytes for name, num_bytes, _ in written},
            crc32=crc if begun.digested else None,
            cast_losses=begun.losses,
            written=True,
            digests=digests,
        )
    return replace(report, seconds=time.monotonic() - started)


def _digests(target: Target, output: Output) -> Digests:
    """Return the digests of all tensors of an output; tied tensors have the same digest."""
    digests = {}
    for tensor in target.tensors:
        empty = TensorDigest(tensor.dtype, tensor.shape)
        written = target.same.get(tensor.name, tensor.name)
        digests[tensor.name] = output.tensor_digests.get(written, empty)
    return Digests(digests).require_complete()


# --- before the first byte

_SHOWN: Final = 3
_MOST_LOOKED_AT: Final = 1000
"""Maximum number of names that are sorted to show the first."""
_KINDS: Final = {"file": "a file", "directory": "a directory", "other": "not a regular file"}


class Prepared(NamedTuple):
    """A planned output that has passed all checks; only the bytes are missing."""

    source: Catalog
    """The source checkpoint with maps applied."""
    target: Target
    destination: Destination
    report: WriteReport
    """The report so far, before anything is written."""


def prepared_output(
    checkpoint: Checkpoints,
    output: StoragePath,
    options: WriteOptions,
    save: str,
) -> Prepared:
    """Plan and check an output, and write nothing; `save` is the random id of this save."""
    if options.threads < 1:
        raise CheckpointError(f"threads is {options.threads}; give at least 1")
    format = _format(output, options)
    source, target = _laid_out(checkpoint, output, options, format, save)
    destination = check_destination(output, source, target, options.overwrite)
    names = (tensor.source for tensor in target.tensors)
    reads = check_tensors(source, names, options.verify)
    pickled = source.facts.pickled
    report = WriteReport(
        path=output.public(),
        format=format.name,
        read=source.format,
        reads={
            str(path).removeprefix(f"{source.directory}{os.sep}"): num_bytes
            for path, num_bytes in sorted(reads.items())
        },
        tensors=len(target.tensors) + sum(len(pickled.get(n, ())) for n in target.carried),
        writes={file.name: file.num_bytes for file in target.files},
        left_out=_left_out(source, target),
        sidecars=target.sidecars,
        weight_files=sum(bool(file.extents) for file in target.files),
        not_copied=target.not_copied,
        filled=source.facts.filled,
        summed=source.facts.summed,
        sharding=target.sharding if options.dry_run else {},
    )
    return Prepared(source, target, destination, report)


def _left_out(source: Catalog, target: Target) -> tuple[str, ...]:
    """Return the names of the source's values that are missing in the output."""
    names = sorted(source.extras.keys() - target.carried)
    metadata = source.facts.file_metadata
    if (metadata.values.keys() | metadata.contradictions.keys()) - target.carried:
        names.append("__metadata__")
    return tuple(names)


# --- the source, and the files of the output


def _format(output: StoragePath, options: WriteOptions) -> Format:
    """Return the output's format: the requested one, or the default for the path and options."""
    if options.way == "merged":
        return merged_format(output, options.format, options.max_shard_bytes, options.in_directory)
    name = options.format
    format = default_format("sharded") if name is None else written_format(name, "sharded")
    check_sharding(options)
    return format


def _opened(
    checkpoint: Checkpoints, options: WriteOptions, format: Format
) -> tuple[Catalog, Choice]:
    """Open checkpoints, then map, sum and quantize them; also return the options still to apply."""
    several = (checkpoint,) if isinstance(checkpoint, PurePath | str | Catalog) else checkpoint
    sources = [as_catalog(place) for place in several]
    if not sources:
        raise CheckpointError("there is no checkpoint to write; name one, or several to sum")
    if options.lora is not None and (len(sources) > 1 or options.weights is not None):
        raise CheckpointError(
            "an adapter can only be merged into one checkpoint; sum first, then merge with ",
            Argument("lora"),
        )
    sums = len(sources) > 1 or options.weights is not None or bool(options.take_first)
    source, names = sources[0], options.names
    choice: Choice = options
    quantize = options.quantize, options.quantize_include
    combined = sums or options.lora is not None
    if combined or any(value is not None for value in (names, options.dtype, *quantize)):
        config = config_of(source, names)
        if sums:
            from shardspec.checkpoint.convert.sums import summed_source

            weights, first = options.weights, options.take_first
            source, choice = summed_source(sources, weights, names, options, first)
        elif options.lora is not None:
            from shardspec.checkpoint.convert.lora import adapted_source

            source, choice = adapted_source(source, as_catalog(options.lora), names, options)
        else:
            source, choice = mapped_source(source, names, options)
        if quantize != (None, None):
            from shardspec.checkpoint.quantization.quantize import quantize_of, quantized_as

            how = quantize_of(*quantize)
            chosen = options if choice is options else Choice()
            source = quantized_as(source, how, chosen, config, options.rename)
            choice = options.after_map() if options.quantize is not None else choice
    else:
        check_drop(options)
    return source.as_stored() if format.keeps == "objects" else source, choice


def _laid_out(
    checkpoint: Checkpoints,
    output: StoragePath,
    options: WriteOptions,
    format: Format,
    save: str,
) -> tuple[Catalog, Target]:
    """Open a checkpoint, select its tensors, and let the format place them in output files.

    Raises ShardSpecError if the format cannot store the selection.
    """
    merged = options.way == "merged"
    source, choice = _opened(checkpoint, options, format)
    tensors = select(source, choice)
    if choice.dtype is not None:
        refuse_casts(source, [tensor.source for tensor in tensors], dtype_name(choice.dtype))
    mesh, layouts = ON_ONE_DEVICE, dict[str, Layout]()
    if "sharded" in format.writes:
        mesh, layouts = sharding_of(source, options, tensors)
    carried = carried_values(source, choice, tensors, objects=format.keeps == "objects")
    if format.keeps == "tensors":
        carried = Carried(frozenset(), {}, {})
    if differing := carried.names & source.facts.differing:
        raise CheckpointError(
            f"value {min(differing)!r} differs between the checkpoints; exclude it, or keep that "
            "of the first with ",
            Argument("take_first"),
        )
    # A merge is for global tensors: it may lose other entries.
    may_lose = None if merged and not options.drop_values else options.drop_values
    check_dropped(source, choice, carried.names, may_lose)
    if merged and source.extras and not (tensors or carried.names):
        raise CheckpointError(
            f"{source.directory}: has no tensor to write, but entries such as "
            f"{min(source.extras)!r}; name the checkpoint of the model"
        )
    assert format.lay_out is not None, "it is written"
    target = format.lay_out(
        source,
        Wanted(
            *(output.name, options.way, tensors, carried, mesh, layouts, save),
            *(options.metadata, options.sidecars, options.max_shard_bytes),
        ),
    )
    target = target._replace(carried=target.carried | carried.names)
    if not merged:
        winners = winning_patterns(list(options.rules or {}), layouts)
        chosen = {n: (winners.get(n, ""), str(at.labelled_spec)) for n, at in layouts.items()}
        target = target._replace(sharding=chosen)
    if options.quantize is not None and not (target.directory and options.sidecars):
        omit = "omit ", WITHOUT_SIDECARS
        raise CheckpointError(
            f"{output}: {options.quantize} needs a config.json to record its block size; ",
            *(omit if target.directory else ("name a directory, such as model/",)),
        )
    if options.sidecars:
        dtype = None if choice.dtype is None else dtype_name(choice.dtype)
        target = add_sidecars(source, target, format.sidecars, dtype)
    if not output.nests and any("/" in file.name for file in target.files):
        raise CheckpointError(
            f"{output}: the format {format.name!r} has subdirectories, which cannot be written to "
            "an object store; write to a local directory, and copy it"
        )
    return source, target


# --- the destination


def check_destination(
    output: StoragePath, source: Catalog, target: Target, overwrite: bool
) -> Destination:
    """Return the path to write to, with links resolved, after checking that it may be replaced.

    Raises an `OutputExistsError` if it exists and `overwrite` is not set. Raises a
    `CheckpointError` if the output would overwrite a part of `source`, or a directory would
    replace a file or the reverse.
    """
    directory = target.directory
    if "\0" in str(output):
        raise CheckpointError(f"{str(output)!r}: a file name cannot contain a NUL; choose another")
    path = output.output()
    with output.errors("written"):
        entry = path.look()
    kind = None if entry is None else _KINDS[entry.kind]
    required = "a directory" if directory else "a file"
    parts = (_part_of_source(path, entry, each, directory) for each in source.sources)
    problem = next(filter(None, parts), "")
    if problem:
        pass
    elif kind not in (None, required):
        problem = f"it is {kind}; name {required} to write"
    elif not overwrite and path.taken():
        raise output_exists(output)
    else:
        problem = path.refusal()
    if problem:
        raise CheckpointError(f"{output}: this output cannot be written: {problem}")
    if not (overwrite and directory):
        return Destination(path, overwrite)
    if entry is None:
        return Destination(path, overwrite, identity=())
    new = {file.name for file in target.files}
    if target.listing is not None:
        new.add(target.listing.name)
    return Destination(path, overwrite, _replaced(path, new, entry.identity), entry.identity)


def _part_of_source(
    path: StoragePath, entry: Entry | None, source: Catalog, directory: bool
) -> str:
    """Return the reason why writing `path` would damage the source; "" if it would not."""
    # Without an index, every file of the directory counts.
    listed = any(file.name.endswith((".json", ".metadata")) for file in source.files)
    all_count = entry is None and not listed and source.directory.is_dir()
    for file in source.files:
        same = path == file.resolved()
        # Links to one file have several names; objects have one, and each look costs a request.
        if not same and entry is not None and entry.kind == "file" and not file.requests:
            read = file.look()
            same = read is not None and read.identity == entry.identity
        if directory and (same or path in file.resolved().parents):
            return "it contains the checkpoint itself; choose another name"
        if same:
            return f"it is {file.name} of the checkpoint itself; choose another name"
        if all_count and file.suffix == path.suffix and file.parent.resolved() == path.parent:
            return (
                "it would become a file of the checkpoint, since no index lists its files; choose "
                "another directory"
            )
    return ""


def _replaced(path: StoragePath, new: Collection[str], identity: Identity) -> frozenset[str]:
    """Return the relative names of all files in a directory that an output may replace.

    Raises `CheckpointError` for a file that is neither of the checkpoint there nor in `new`, the
    output's files. `identity` tells if another run has replaced the directory since it was checked.
    """
    with path.errors("replaced"):
        owned = {*new, *_owned(path)}
        others = (name for name in path.names_below() if name not in owned)
        if strangers := sorted(islice(others, _MOST_LOOKED_AT)):
            now = path.look()
            if now is None or now.identity != identity:
                raise output_replaced(path)
            some = ", ".join(shown(name) for name in strangers[:_SHOWN])
            more = " and more" if len(strangers) > _SHOWN else ""
            raise CheckpointError(
                f"{path}: contains {some}{more}, not part of a checkpoint; move that away, or "
                "choose another directory"
            )
        return frozenset(path.names_below())


def _owned(path: StoragePath) -> Iterable[str]:
    """Return the relative names of the files in a directory that belong to its checkpoint."""
    top = path.names()
    # Includes files of saves that were killed.
    shards = default_format("sharded")
    owned = {name for name in top if shards.owns(name) or is_temporary(name)}
    if (format := format_of(top)) is None:
        return owned
    owned.update(filter(format.owns, path.names_below()))
    for other in formats():
        owned |= other.sidecars(path, top)
    try:
        source = open_checkpoint(path)
        for name in source.names:
            source.tensor(name)  # some formats find files at this point
    except ShardSpecError:
        pass
    else:
        files = (file for file in source.files if path in file.parents)
        owned.update("/".join(file.parts[len(path.parts) :]) for file in files)
    return owned


# --- sharding


def check_sharding(options: WriteOptions) -> None:
    """Raise CheckpointError unless options have either a mesh, or a checkpoint to shard like."""
    mesh: object = options.device_mesh
    rules, like = options.rules, options.like
    if like is not None and (mesh is not None or rules is not None):
        raise CheckpointError("give either a checkpoint to shard like, or a mesh and rules")
    if not isinstance(mesh, DeviceMesh | None):
        raise CheckpointError(
            f"a {type(mesh).__name__} is not a mesh to shard for; give a DeviceMesh, as of "
            "DeviceMesh(range(8), (2, 4))"
        )
    if mesh is None and like is None:
        raise CheckpointError(
            "give the mesh to shard for, ",
            Argument("device_mesh"),
            ", or a checkpoint to shard like",
        )


def _of_scales(
    source: Catalog,
    rules: Rules,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
) -> dict[str, Layout]:
    """Return name -> layout of scales that no rule matches; they are sharded like their codes."""
    winners = winning_patterns(list(rules), layouts)
    new = {tensor.source: tensor.name for tensor in tensors}
    grids: dict[str, Layout] = {}
    for codes, blocks in quantized_in(source).blocks.items():
        scales = blocks.scales
        if {codes, scales} <= new.keys() and new[scales] not in winners:
            grid = grid_layout(layouts[new[codes]], blocks.sides, layouts[new[scales]].dtype)
            grids |= {} if grid is None else {new[scales]: grid}
    return grids


def sharding_of(
    source: Catalog, options: WriteOptions, tensors: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh to write for, and the layout of each tensor by its new name."""
    if isinstance(options.like, Mapping):
        mesh, layouts = layouts_given(options.like, tensors)
    elif options.like is not None:
        mesh, layouts = layouts_like(as_catalog(options.like), tensors)
    else:
        mesh = options.device_mesh or ON_ONE_DEVICE
        layouts = layouts_by_rules(mesh, options.rules or {}, tensors)
        if source.facts.quantization:
            layouts |= _of_scales(source, options.rules or {}, tensors, layouts)
    if options.way == "sharded":
        check_blocks(source, {tensor.source: layouts[tensor.name] for tensor in tensors})
    return mesh, layouts
