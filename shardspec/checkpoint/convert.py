"""Converting checkpoints: merged into global tensors, or resharded for the ranks of a mesh.

Both choose tensors and lay out the files for them; `write_checkpoint` does the rest.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.coordinate import Member, Progress
from shardspec.checkpoint.executor import WriteOptions
from shardspec.checkpoint.mapped import Names, mapped
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.select import (
    Choice,
    Patterns,
    Renames,
    carried_values,
    check_blocks,
    layouts_by_rules,
    layouts_like,
    select,
    tied,
)
from shardspec.checkpoint.store import as_path
from shardspec.checkpoint.targets import OutputTensor, Target
from shardspec.checkpoint.write import WriteReport, write_checkpoint
from shardspec.errors import CheckpointError
from shardspec.layout.layout import Layout, SpecLike
from shardspec.mesh import DeviceMesh
from shardspec.renamed import renamed
from shardspec.text import shown

MergedFormat: TypeAlias = Literal["safetensors", "huggingface", "torch", "dcp"]
MERGED_FORMATS: Final[tuple[MergedFormat, ...]] = get_args(MergedFormat)
ReshardedFormat: TypeAlias = Literal["shardspec", "dcp", "deepspeed-universal"]
RESHARDED_FORMATS: Final[tuple[ReshardedFormat, ...]] = get_args(ReshardedFormat)
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")
_SHARD_BYTES: Final = 5 * 10**9
"""Most bytes of tensors in a file, as transformers has it."""
_ADAPTER: Final = "adapter_model.safetensors"

_LaidOut: TypeAlias = tuple[Sequence[OutputTensor], Target]


@renamed(form="format", force="overwrite")
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
) -> WriteReport:
    """Write the global tensors of a checkpoint into one file, or into files of a limited size.

    Headers, tiling and replicas are checked before the first byte is written (but the headers that
    torch's DCP puts before chunks). Pending reductions are finished. The output appears under its
    name once it is complete, flushed to the disk, and read again. Needs neither torch nor a process
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
        new names. The patterns above then match the names that it gives. `WriteReport.left_out`
        lists the tensors that it does not use.
    threads
        How many threads copy: each a few tensors at a time, or to a store a file.
    metadata
        Copy the metadata of safetensors files into safetensors files.
    strict_cast
        Refuse a cast that does not keep a number: one that overflows, becomes 0, or becomes NaN.
        Otherwise the report counts them.
    overwrite
        Replace the output if it exists.
    verify
        Compare all bytes that are read with the digests of the checkpoint, if it has any, and all
        bytes that were written with what was meant.
    reread
        Read the output again, the slowest part of `verify`. Without it, faults of memory or disk
        while writing go unnoticed.
    dry_run
        Do all checks that come before writing, and write nothing.
    sidecars
        Copy the files beside the weights into directories, such as ``config.json``, a tokenizer's
        files and ``adapter_config.json``; into the format ``"dcp"`` also Megatron's ``common.pt``
        and Lightning's ``meta.pt``.
    progress
        Called with the bytes written so far and in all.
    member
        Which of several processes this is. They share the work and a file system, call this with
        the same arguments, and need no process group.

    The former names `form` and `force` of `format` and `overwrite` still work, with a warning.

    Raises
    ------
    OutputExistsError
        If the output exists and `overwrite` is not set; it is kept.
    CheckpointError
        If the checkpoint is missing, unfinished, damaged or contradicts itself, if the output
        would overwrite a part of it, or if the disk is full. Nothing appears under the name of the
        output, and no temporary file is left.

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
    in_directory = isinstance(output, str) and output.endswith(("/", os.sep))
    chosen = _merged_format(place, format, max_shard_bytes, in_directory)
    choice = Choice(include, exclude, rename, dtype)

    def lay_out(source: Catalog, _: str) -> _LaidOut:
        return _merged(source, choice, place.name, chosen, max_shard_bytes, metadata)

    options = WriteOptions(
        threads, strict_cast, overwrite, verify, reread, dry_run, sidecars, progress, member
    )
    source = directory if names is None else mapped(as_catalog(directory), names)
    return write_checkpoint(source, place, chosen, lay_out, options)


@renamed(mesh="device_mesh", form="format", force="overwrite")
def reshard(
    directory: Path | str | Catalog,
    output: Path | str,
    *,
    device_mesh: DeviceMesh | None = None,
    rules: Mapping[str, SpecLike] | None = None,
    like: Path | str | Catalog | None = None,
    format: ReshardedFormat | None = None,
    dtype: str | None = None,
    include: Patterns | None = None,
    exclude: Patterns = (),
    rename: Renames = (),
    names: Names | None = None,
    threads: int = 1,
    strict_cast: bool = False,
    overwrite: bool = False,
    verify: bool = True,
    reread: bool = True,
    dry_run: bool = False,
    sidecars: bool = True,
    progress: Progress | None = None,
    member: Member | None = None,
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
        Name pattern to spec, matched against the new names as by `match_rules`. A tensor that no
        rule matches is replicated.
    like
        A checkpoint to take mesh and specs from, by name, in place of the two above.
    format
        shardspec's own, which is the default, that of `torch.distributed.checkpoint`, or
        ``"deepspeed-universal"``, which any number of ranks loads. That one is made of a whole run
        of DeepSpeed's ZeRO, without mesh and rules.
    dtype, include, exclude, rename, names, threads, strict_cast
        As for `merge`.
    overwrite, verify, reread, dry_run, sidecars, progress, member
        As for `merge`.

    The former names `mesh`, `form` and `force` of `device_mesh`, `format` and `overwrite` still
    work, with a warning.

    Raises
    ------
    LayoutError, AxisError
        If the rules do not fit the tensors or the mesh.
    OutputExistsError, CheckpointError
        As for `merge`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import save_sharded
    >>> place = Path(tempfile.mkdtemp())
    >>> save_sharded({"w": torch.arange(12.0).view(4, 3)}, place / "whole")
    >>> mesh = DeviceMesh(range(4), (4,))
    >>> report = reshard(place / "whole", place / "cut", device_mesh=mesh, rules={"w": "[S0,R]"})
    >>> len(report.files)
    5
    """
    chosen = format or "shardspec"
    choice = Choice(include, exclude, rename, dtype)
    universal, onto = chosen == "deepspeed-universal", device_mesh
    for wrong, problem in (
        (
            chosen not in RESHARDED_FORMATS,
            f"there is no format {chosen!r} for shards; choose one of "
            f"{', '.join(RESHARDED_FORMATS)}",
        ),
        (
            like is not None and (onto is not None or rules is not None),
            "give either a checkpoint to shard like, or a mesh and rules",
        ),
        (
            not isinstance(onto, DeviceMesh | None),
            f"a {type(onto).__name__} is not a mesh to shard for; give a DeviceMesh, as of "
            "DeviceMesh(range(8), (2, 4))",
        ),
        (
            universal and (onto is not None or like is not None or rules or any(choice) or names),
            "a Universal Checkpoint has all tensors of a run as DeepSpeed saved them, for any "
            "number of ranks; leave out the mesh, the rules, the checkpoint to shard like, and "
            "--dtype, --include, --exclude, --rename and --map",
        ),
        (
            not universal and onto is None and like is None,
            "give the mesh to shard for (--mesh), or a checkpoint to shard like",
        ),
    ):
        if wrong:
            raise CheckpointError(problem)

    def lay_out(source: Catalog, save: str) -> _LaidOut:
        if universal:
            from shardspec.checkpoint.formats.deepspeed_universal import universal_target

            return universal_target(source)
        wanted = select(source, choice)
        if onto is None:
            assert like is not None, "checked before"
            mesh, layouts = layouts_like(as_catalog(like), wanted)
        else:
            mesh, layouts = onto, layouts_by_rules(onto, rules or {}, wanted)
        return _resharded(
            source, choice, wanted, mesh, layouts, save if chosen == "shardspec" else None
        )

    options = WriteOptions(
        threads, strict_cast, overwrite, verify, reread, dry_run, sidecars, progress, member
    )
    source = directory if names is None else mapped(as_catalog(directory), names)
    return write_checkpoint(source, as_path(output), chosen, lay_out, options)


def _merged_format(
    output: Path, format: MergedFormat | None, max_shard_bytes: int | None, in_directory: bool
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
            f"{output}: a limit of {max_shard_bytes} bytes a file (max_shard_bytes) is not for the "
            f"format {chosen!r}, or below 1; leave it out, or choose the format 'huggingface' and "
            "name a directory"
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
    # The other formats have no room for entries that are not tensors.
    carried, values = frozenset[str](), dict[str, object]()
    if chosen in ("torch", "dcp"):
        carried, values = carried_values(source, choice, objects=chosen == "dcp")
    if source.extras and not (wanted or carried):
        raise CheckpointError(
            f"{source.directory}: holds no tensor that could be written, but "
            f"{min(source.extras)!r} and the like; name the checkpoint of the model"
        )
    if chosen == "torch":
        from shardspec.checkpoint.formats.torch_file import torch_target

        target = torch_target(name, wanted, values, tied(source, wanted))
    elif chosen == "dcp":
        from shardspec.checkpoint.formats.dcp_target import dcp_target

        alone = DeviceMesh((0,), (1,))
        target = dcp_target(alone, wanted, layouts_by_rules(alone, {}, wanted), values)
    else:
        from shardspec.checkpoint.formats import safetensors

        found = source.file_metadata
        for key, (first, other) in found.contradictions.items() if metadata else ():
            raise CheckpointError(
                f"{source.directory}: {first.name} and {other.name} have different metadata under "
                f"{shown(key, 100)}, and one output cannot have both; leave all such metadata out "
                "with --no-metadata (metadata=False)"
            )
        said = found.values if metadata else {}
        carried, said = frozenset(said), {**safetensors.METADATA, **said}
        if chosen == "safetensors":
            target = Target((safetensors.output_file(name, wanted, said),), directory=False)
        else:
            # PEFT expects its own name, also where the adapter was resharded in between.
            adapter = {file.name for file in source.files} == {_ADAPTER} or (
                (source.directory / "adapter_config.json").is_file()
                and not (source.directory / "config.json").is_file()
            )
            alone_name = _ADAPTER if adapter else "model.safetensors"
            limit = max_shard_bytes or _SHARD_BYTES
            target = safetensors.huggingface_target(wanted, limit, said, alone_name)
    return wanted, target._replace(carried=carried)


def _resharded(
    source: Catalog,
    choice: Choice,
    wanted: Sequence[OutputTensor],
    mesh: DeviceMesh,
    layouts: Mapping[str, Layout],
    save: str | None,
) -> _LaidOut:
    """Lay out the files that ranks would have written: with `save` in our own format, else DCP."""
    check_blocks(source, {tensor.source: layouts[tensor.name] for tensor in wanted})
    if save is None:
        from shardspec.checkpoint.formats.dcp_target import dcp_target

        carried, values = carried_values(source, choice, objects=True)
        return wanted, dcp_target(mesh, wanted, layouts, values)._replace(carried=carried)
    from shardspec.checkpoint.formats.native import sharded_target

    return wanted, sharded_target(mesh, wanted, layouts, save, source.file_metadata.values)
