"""Converting checkpoints: merged into global tensors, or resharded for the ranks of a mesh.

Both choose tensors and lay out the files for them; `write_checkpoint` does the rest.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
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
    layouts_by_rules,
    layouts_like,
    select,
    tied,
)
from shardspec.checkpoint.store import as_path
from shardspec.checkpoint.targets import OutputTensor, Target
from shardspec.checkpoint.write import WriteReport, write_checkpoint
from shardspec.errors import CheckpointError
from shardspec.layout.layout import SpecLike
from shardspec.mesh import DeviceMesh
from shardspec.renamed import renamed_argument
from shardspec.text import shown

MergedFormat: TypeAlias = Literal["safetensors", "huggingface", "torch", "dcp"]
MERGED_FORMATS: Final[tuple[MergedFormat, ...]] = get_args(MergedFormat)
ReshardedFormat: TypeAlias = Literal["shardspec", "dcp", "deepspeed-universal"]
RESHARDED_FORMATS: Final[tuple[ReshardedFormat, ...]] = get_args(ReshardedFormat)
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin")
_SHARD_BYTES: Final = 5 * 10**9  # as transformers has it
_ADAPTER: Final = "adapter_model.safetensors"

_LaidOut: TypeAlias = tuple[Sequence[OutputTensor], Target]


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
        Carry along into directories what lies beside the weights, such as ``config.json``, a
        tokenizer's files and ``adapter_config.json``; into the format ``"dcp"`` Megatron's
        ``common.pt`` and Lightning's ``meta.pt`` too.
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
    chosen = _merged_format(
        place,
        renamed_argument("merge", "format", format, "form", form),
        max_shard_bytes,
        directory=isinstance(output, str) and output.endswith(("/", os.sep)),
    )
    replace = renamed_argument("merge", "overwrite", overwrite, "force", force)
    choice = Choice(include, exclude, rename, dtype)
    lay_out = partial(_merged, choice, place, chosen, max_shard_bytes, metadata)
    options = WriteOptions(
        threads, strict_cast, replace, verify, reread, dry_run, sidecars, progress, member
    )
    source = directory if names is None else mapped(as_catalog(directory), names)
    return write_checkpoint(source, place, chosen, lay_out, options)


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
    mesh: DeviceMesh | None = None,
    form: ReshardedFormat | None = None,
    force: bool | None = None,
) -> WriteReport:
    """Write a checkpoint of any format as one that the ranks of a mesh could have saved.

    Parameters
    ----------
    directory
        A checkpoint in any format that `open_checkpoint` knows, or what that has made of it.
    output
        The directory to write.
    device_mesh
        The devices to shard for.
    rules
        Name pattern to spec, matched against the new names as by `match_rules`. A tensor that no
        rule matches is kept whole on every device.
    like
        A checkpoint that says mesh and specs, instead of the two above: every tensor is cut as
        the one of its name there.
    format
        shardspec's own, which is the default, that of `torch.distributed.checkpoint`, or
        ``"deepspeed-universal"``, which any number of ranks loads: give neither mesh nor rules,
        and as `directory` a run of DeepSpeed's ZeRO, all of it.
    dtype, include, exclude, rename, names, threads, strict_cast
        As for `merge`.
    overwrite, verify, reread, dry_run, sidecars, progress, member
        As for `merge`.
    mesh, form, force
        Former names of `device_mesh`, `format` and `overwrite`.

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
    onto_mesh = renamed_argument("reshard", "device_mesh", device_mesh, "mesh", mesh)
    chosen = renamed_argument("reshard", "format", format, "form", form) or "shardspec"
    replace = renamed_argument("reshard", "overwrite", overwrite, "force", force)
    if chosen not in RESHARDED_FORMATS:
        raise CheckpointError(
            f"there is no format {chosen!r} for shards; choose one of "
            f"{', '.join(RESHARDED_FORMATS)}"
        )
    if like is not None and (onto_mesh is not None or rules is not None):
        raise CheckpointError("give either a checkpoint to cut like, or a mesh and rules")
    if onto_mesh is not None and not isinstance(onto_mesh, DeviceMesh):
        raise CheckpointError(
            f"a {type(onto_mesh).__name__} is no mesh to cut for; give a DeviceMesh, as of "
            "DeviceMesh(range(8), (2, 4))"
        )
    choice = Choice(include, exclude, rename, dtype)
    if chosen == "deepspeed-universal":
        if onto_mesh is not None or like is not None or rules:
            raise CheckpointError(
                "a Universal Checkpoint is for any number of ranks; leave out the mesh, the rules "
                "and the checkpoint to cut like"
            )
        if any(choice) or names:
            raise CheckpointError(
                "a Universal Checkpoint has all tensors of a run as DeepSpeed saved them; leave "
                "out --dtype, --include, --exclude, --rename and --map"
            )
    lay_out = partial(_resharded, choice, onto_mesh, rules or {}, like, chosen)
    options = WriteOptions(
        threads, strict_cast, replace, verify, reread, dry_run, sidecars, progress, member
    )
    source = directory if names is None else mapped(as_catalog(directory), names)
    return write_checkpoint(source, as_path(output), chosen, lay_out, options)


def _merged_format(
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


def _merged(
    choice: Choice,
    output: Path,
    chosen: MergedFormat,
    max_shard_bytes: int | None,
    metadata: bool,
    source: Catalog,
    _: str,
) -> _LaidOut:
    """Choose tensors, and lay out the files that have all of each."""
    wanted = select(source, choice)
    # The other formats have no room for what is no tensor.
    carried, values = frozenset[str](), dict[str, object]()
    if chosen in ("torch", "dcp"):
        carried, values = carried_values(source, choice, objects=chosen == "dcp")
    if source.extras and not (wanted or carried):
        raise CheckpointError(
            f"{source.directory}: holds no tensor that could be written, but "
            f"{min(source.extras)!r} and the like; name the checkpoint of the model"
        )
    # One of them is needed, and starting is a tenth of merging a gigabyte.
    if chosen == "torch":
        from shardspec.checkpoint.formats.torch_file import torch_target

        target = torch_target(output.name, wanted, values, tied(source, wanted))
    elif chosen == "dcp":
        from shardspec.checkpoint.formats.dcp_target import dcp_target

        alone = DeviceMesh((0,), (1,))
        target = dcp_target(alone, wanted, layouts_by_rules(alone, {}, wanted), values)
    else:
        from shardspec.checkpoint.formats.safetensors import (
            METADATA,
            huggingface_target,
            safetensors_target,
        )

        said = _file_metadata(source) if metadata else {}
        carried, noted = frozenset(said), {**METADATA, **said}
        if chosen == "safetensors":
            target = safetensors_target(output.name, wanted, noted)
        else:
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
            name = _ADAPTER if adapter else "model.safetensors"
            target = huggingface_target(wanted, limit, noted, name)
    return wanted, target._replace(carried=carried)


def _file_metadata(source: Catalog) -> Mapping[str, str]:
    """Return what files of safetensors say besides their tensors, as how they are quantised."""
    for key, (first, other) in source.file_metadata.contradictions.items():
        raise CheckpointError(
            f"{source.directory}: {first.name} and {other.name} say different things in their "
            f"metadata under {shown(key, 100)}, and one output cannot say both; leave all such "
            "metadata out with --no-metadata (metadata=False)"
        )
    return source.file_metadata.values


def _resharded(
    choice: Choice,
    mesh: DeviceMesh | None,
    rules: Mapping[str, SpecLike],
    like: Path | str | Catalog | None,
    chosen: ReshardedFormat,
    source: Catalog,
    save: str,
) -> _LaidOut:
    """Choose tensors, and lay out the files that ranks would have written; `save` names them."""
    if chosen == "deepspeed-universal":
        from shardspec.checkpoint.formats.deepspeed_universal import universal_target

        return universal_target(source)
    from shardspec.checkpoint.tiling import check_blocks

    wanted = select(source, choice)
    if like is not None:
        mesh, layouts = layouts_like(as_catalog(like), wanted)
    elif mesh is not None:
        layouts = layouts_by_rules(mesh, rules, wanted)
    else:
        raise CheckpointError("give the mesh to cut for (--mesh), or a checkpoint to cut like")
    check_blocks(source, {tensor.source: layouts[tensor.name] for tensor in wanted})
    if chosen == "dcp":
        from shardspec.checkpoint.formats.dcp_target import dcp_target

        carried, values = carried_values(source, choice, objects=True)
        return wanted, dcp_target(mesh, wanted, layouts, values)._replace(carried=carried)
    from shardspec.checkpoint.formats.native import sharded_target

    return wanted, sharded_target(mesh, wanted, layouts, save, source.file_metadata.values)
