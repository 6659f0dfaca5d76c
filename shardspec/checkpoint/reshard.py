"""Resharding on disk: a checkpoint cut for one mesh becomes one cut for another."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.coordinate import Member, Progress
from shardspec.checkpoint.formats.cut_rules import read_toml
from shardspec.checkpoint.formats.dcp_target import dcp_target
from shardspec.checkpoint.formats.deepspeed_universal_target import universal_target
from shardspec.checkpoint.formats.native import sharded_target
from shardspec.checkpoint.mapped import Names, mapped
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.quantized import check_blocks
from shardspec.checkpoint.select import Choice, Patterns, Renames, carried_by_dcp, select
from shardspec.checkpoint.store import as_path
from shardspec.checkpoint.targets import OutputTensor, Target
from shardspec.checkpoint.write import WriteOptions, WriteReport, write_checkpoint
from shardspec.errors import CheckpointError, LayoutError, ShardSpecError
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.rules import match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.renamed import renamed_argument

__all__ = ["RESHARDED_FORMATS", "ReshardedFormat", "read_rules", "reshard"]

ReshardedFormat: TypeAlias = Literal["shardspec", "dcp", "deepspeed-universal"]
RESHARDED_FORMATS: Final[tuple[ReshardedFormat, ...]] = get_args(ReshardedFormat)


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
    universal = chosen == "deepspeed-universal"
    if universal and (onto_mesh is not None or like is not None or rules):
        raise CheckpointError(
            "a Universal Checkpoint is for any number of ranks; leave out the mesh, the rules and "
            "the checkpoint to cut like"
        )
    if universal and (any(choice) or names):
        raise CheckpointError(
            "a Universal Checkpoint has all tensors of a run as DeepSpeed saved them; leave out "
            "--dtype, --include, --exclude, --rename and --map"
        )

    def lay_out(source: Catalog, save: str) -> tuple[Sequence[OutputTensor], Target]:
        if universal:
            return universal_target(source)
        wanted = select(source, choice)
        if like is not None:
            onto, layouts = _like(as_catalog(like), wanted)
        elif onto_mesh is not None:
            onto, layouts = onto_mesh, _by_rules(onto_mesh, rules or {}, wanted)
        else:
            raise CheckpointError("give the mesh to cut for (--mesh), or a checkpoint to cut like")
        check_blocks(source, {tensor.source: layouts[tensor.name] for tensor in wanted})
        if chosen == "dcp":
            names, others = carried_by_dcp(source, choice)
            return wanted, dcp_target(onto, wanted, layouts, others)._replace(carried=names)
        return wanted, sharded_target(onto, wanted, layouts, save, source.file_metadata.values)

    options = WriteOptions(
        threads, strict_cast, replace, verify, reread, dry_run, sidecars, progress, member
    )
    if names is not None:
        directory = mapped(as_catalog(directory), names)
    return write_checkpoint(directory, as_path(output), chosen, lay_out, options)


def _by_rules(
    mesh: DeviceMesh, rules: Mapping[str, SpecLike], wanted: Sequence[OutputTensor]
) -> dict[str, Layout]:
    """Return how each tensor is cut."""
    specs = match_rules(rules, {tensor.name: len(tensor.shape) for tensor in wanted})
    layouts = {}
    # One for all tensors that are alike.
    layout = lru_cache(None)(partial(Layout, mesh))
    for tensor in wanted:
        spec = specs.get(tensor.name, ShardingSpec(len(tensor.shape), {}))
        if spec.partials:
            raise LayoutError(
                f"tensor {tensor.name!r}: spec {spec} has pending reductions, but what is written "
                "has none; leave them out"
            )
        try:
            layouts[tensor.name] = layout(spec, tensor.shape, tensor.dtype)
        except ShardSpecError as error:
            raise LayoutError(f"tensor {tensor.name!r}: {error}") from None
    return layouts


def _like(other: Catalog, wanted: Sequence[OutputTensor]) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of another checkpoint, and each tensor cut as there."""
    if other.mesh is None:
        raise CheckpointError(
            f"{other.directory}: a checkpoint in the format of {other.format} does not say its "
            "mesh and specs; give --mesh and --rules"
        )
    known = set(other.names)
    layouts = {}
    for tensor in wanted:
        if tensor.name not in known:
            raise CheckpointError(
                f"{other.directory}: has no tensor {tensor.name!r} that says how to cut it; "
                "--rename it, --exclude it, or give --mesh and --rules"
            )
        spec = other.outline(tensor.name).spec
        if spec is None or spec.dims != len(tensor.shape):
            said = "does not say how it is cut" if spec is None else f"cuts it by {spec}"
            raise CheckpointError(
                f"{other.directory}: {said}, but tensor {tensor.name!r} has {len(tensor.shape)} "
                "dims; give --mesh and --rules"
            )
        layouts[tensor.name] = Layout(
            other.mesh, spec.without_partial(), tensor.shape, tensor.dtype
        )
    return other.mesh, layouts


def read_rules(path: Path) -> dict[str, str]:
    """Read rules from a TOML file: one line a pattern, ``"*.weight" = "[S0,R]"``.

    Raises
    ------
    CheckpointError
        If the file cannot be read, is no TOML, or holds something else.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rules.toml"
    >>> _ = path.write_text('"*.weight" = "[S0,R]"')
    >>> read_rules(path)
    {'*.weight': '[S0,R]'}
    """
    table = read_toml(path)
    for pattern, spec in table.items():
        if not isinstance(spec, str):
            raise CheckpointError(
                f"{path}: the rule of {pattern!r} is {spec!r}, not a spec in quotes; a pattern "
                "with dots or stars has to be in quotes too"
            )
    return {pattern: str(spec) for pattern, spec in table.items()}
