"""What is written of a checkpoint: which tensors and other entries, under which names, and where.

`merge` and `reshard` ask for a format and a way; it is laid out by that format.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog, OpaqueValue, is_plain_entry, opaque_parts
from shardspec.checkpoint.check_quantized import (
    check_blocks,
    grid_layout,
    quantised_in,
    refuse_casts,
)
from shardspec.checkpoint.choice import Choice, Renames, first_names, wanted_names
from shardspec.checkpoint.format import Format, Wanted, Way
from shardspec.checkpoint.formats.registry import default_format, merged_format, written_format
from shardspec.checkpoint.mapped import Names
from shardspec.checkpoint.numbers_of import config_of, mapped_source
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.options import WriteOptions
from shardspec.checkpoint.sidecars import add_sidecars
from shardspec.checkpoint.state_dict import unflatten
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.targets import Carried, OutputTensor, Target
from shardspec.dtypes import dtype_name, is_cast, is_floating, keeps_dtype, packed
from shardspec.errors import CheckpointError, DTypeError, LayoutError, ShardSpecError
from shardspec.layout.common_mesh import on_common_mesh
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.rules import Rules, match_rules, winning_patterns
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import Argument, TextPart, counted, shown

_CHOICE: Final[tuple[TextPart, ...]] = (
    *(Argument("dtype"), ", ", Argument("include"), ", ", Argument("exclude"), ", "),
    *(Argument("rename"), " and ", Argument("names")),
)
"""The arguments that choose tensors and name them, for a message."""
_ALONE: Final = DeviceMesh((0,), (1,))


def select(source: Catalog, choice: Choice) -> list[OutputTensor]:
    """Return the tensors that are wanted of a checkpoint, sorted by their new names.

    A pattern or an expression that matches nothing is a `CheckpointError`, as are two tensors of
    one name and a choice of none.
    """
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    names = wanted_names(source, choice)
    if target is not None:
        refuse_casts(source, names, target)
    renamed, idle = _renamed(names, choice.rename)
    for pattern in idle:
        if not any(re.search(pattern, name) for name in source.extras):
            raise CheckpointError(
                f"the expression {pattern!r} matches no name that is to be renamed in "
                f"{source.directory}; the names start with {first_names(names)}"
            )
    wanted = []
    for name in names:
        tensor = source.outline(name)
        stays = keeps_dtype(name) or name in source.keeps_dtype
        casts = target is not None and is_cast(tensor.dtype, target) and not stays
        dtype = target if target and casts else tensor.dtype
        wanted.append(OutputTensor(renamed[name], name, tensor.shape, dtype))
    return sorted(wanted, key=lambda tensor: tensor.name)


def _float_dtype(dtype: str) -> str:
    name = dtype_name(dtype)
    scales = name == "float8_e8m0fnu"  # neither signs nor 0
    if scales or not is_floating(name) or name.startswith("complex") or packed(name) > 1:
        raise DTypeError(
            f"cannot cast to {name}: only floating point tensors are cast, to another dtype of "
            "floating point numbers such as bf16 or float8_e4m3fn"
        )
    return name


def _renamed(names: Sequence[str], renames: Renames) -> tuple[dict[str, str], list[str]]:
    """Return the new name of every tensor, and the expressions that match none."""
    pairs = list(renames.items()) if isinstance(renames, Mapping) else renames
    matched: set[str] = set()
    renamed: dict[str, str] = {}
    try:
        expressions = [(re.compile(pattern), replacement) for pattern, replacement in pairs]
        for name in names:
            new = name
            for expression, replacement in expressions:
                new, count = expression.subn(replacement, new, count=1)
                if count:
                    matched.add(expression.pattern)
            renamed[name] = new
    except (re.error, IndexError) as error:
        raise CheckpointError(
            f"cannot rename by the regular expressions {pairs!r}: {error}; escape what should "
            "stand for itself with a backslash"
        ) from None
    old: dict[str, str] = {}
    for name, new in renamed.items():
        if old.setdefault(new, name) != name:
            raise CheckpointError(
                f"tensors {old[new]!r} and {name!r} would both be named {new!r}; rename them apart"
            )
        if name and not new:
            raise CheckpointError(f"tensor {name!r} would have no name left; rename it otherwise")
    return renamed, [pattern for pattern, _ in pairs if names and pattern not in matched]


def renamed_names(names: Sequence[str], renames: Renames) -> dict[str, str]:
    """Return the new name of each."""
    return _renamed(names, renames)[0]


def carried_values(
    source: Catalog, choice: Choice, wanted: Sequence[OutputTensor], *, objects: bool
) -> Carried:
    """Return what an output with `wanted` tensors takes along of the other entries.

    With `objects`, those that only torch could unpickle are copied as they are stored. Raises
    CheckpointError if two entries would have one name.
    """
    known = source.objects if objects else {}
    names = plain({**source.extras, **dict.fromkeys(known)}, choice)
    values = {new: known.get(name, source.extras[name]) for name, new in names.items()}
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    for name in names if target else ():
        for tensor in source.pickled.get(name, ()):
            if target and is_cast(tensor.dtype, target):
                raise CheckpointError(
                    f"{source.directory}: entry {name!r} is copied as it is stored, and tensor "
                    f"{tensor.name!r} in its pickle is not cast; exclude the entry, or choose "
                    "another format"
                )
    old = {tensor.name: tensor.source for tensor in wanted}
    for name, new in names.items():
        if new in old:
            raise CheckpointError(
                f"tensor {old[new]!r} and value {name!r} would both be named {new!r}; rename them "
                "apart"
            )
    old |= {new: name for name, new in names.items()}
    paths = {n: path for n, path in source.paths.items() if old.get(n) == n}
    if paths:
        try:
            unflatten({name: paths.get(name, (name,)) for name in old}, lambda _: None)
        except CheckpointError:  # a list lacks items that were left out
            paths = {}
    return Carried(frozenset(names), values, paths)


def check_dropped(
    source: Catalog, choice: Choice, carried: Collection[str], drop: bool | None
) -> None:
    """Refuse to lose entries that are not tensors, if they are wanted and not `carried`.

    With `drop` they may be lost, and some are; None allows to lose those without tensors in them.
    """
    lost = {
        name: parts
        for name, value in source.extras.items()
        if name not in carried and choice.wants(name)
        for parts in [list(opaque_parts(value))]
        if all(part.inside for part in parts)
        and (drop is not None or any(part.tensors for part in parts))
    }
    if drop and not lost:
        raise CheckpointError(
            f"{source.directory}: no value would be lost, so there is nothing for ",
            Argument("drop_values", value=True),
            " to drop; leave it out",
        )
    if not lost or drop:
        return
    name = min(lost)
    rest = counted(len(lost) - 1, "other entry", "other entries")
    more = f" (and {rest})" if len(lost) > 1 else ""
    if drop is None:
        raise CheckpointError(
            f"{source.directory}: {name!r}{more} may be, or have in it, tensors that cannot be "
            f"written: {_text_of(lost[name])}; leave it out with ",
            Argument("exclude"),
        )
    raise CheckpointError(
        f"{source.directory}: {name!r}{more} would be lost, since the output has no place for it: "
        f"{_text_of(lost[name])}; leave out what is lost with ",
        Argument("drop_values", value=True),
        ", or name it in ",
        Argument("exclude"),
    )


def _text_of(parts: Sequence[OpaqueValue]) -> str:
    return shown(parts[0].text, 200) if parts else "a plain value"


def plain(others: Mapping[str, object], choice: Choice) -> dict[str, str]:
    """Return name to new name of the wanted values that are plain: numbers, text, lists of such."""
    wanted = [
        name for name, value in others.items() if is_plain_entry(value) and choice.wants(name)
    ]
    return renamed_names(wanted, choice.rename)


def layouts_by_rules(
    mesh: DeviceMesh,
    rules: Mapping[str, SpecLike],
    wanted: Sequence[OutputTensor],
    otherwise: Callable[[OutputTensor], ShardingSpec] | None = None,
) -> dict[str, Layout]:
    """Return the layout of each tensor: by the rule for it, else `otherwise`, else replicated."""
    specs = match_rules(rules, {tensor.name: tensor.shape for tensor in wanted}, mesh)
    layouts = {}
    layout = lru_cache(None)(partial(Layout, mesh))
    for tensor in wanted:
        spec = specs.get(tensor.name)
        if spec is None:
            spec = ShardingSpec(len(tensor.shape)) if otherwise is None else otherwise(tensor)
        if spec.partials:
            raise LayoutError(
                f"tensor {tensor.name!r}: spec {spec} has pending reductions, but what is written "
                "or loaded has none; leave them out"
            )
        try:
            layouts[tensor.name] = layout(spec, tensor.shape, tensor.dtype)
        except ShardSpecError as error:
            raise LayoutError(f"tensor {tensor.name!r}: {error}") from None
    return layouts


_MESH_AND_RULES: Final = (Argument("device_mesh"), " and ", Argument("rules"))


def layouts_like(
    other: Catalog, wanted: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of another checkpoint, and its layout of each tensor for these shapes."""
    if other.mesh is None:
        raise CheckpointError(
            f"{other.directory}: a checkpoint in the format of {other.format} does not say its "
            "mesh and specs; give ",
            *_MESH_AND_RULES,
        )
    known = frozenset(other.names)

    def spec_of(tensor: OutputTensor) -> ShardingSpec:
        if tensor.name not in known:
            raise CheckpointError(
                f"{other.directory}: has no tensor {tensor.name!r} that says how to shard it; "
                "rename it, exclude it, or give ",
                *_MESH_AND_RULES,
            )
        spec = other.outline(tensor.name).spec
        if spec is None or spec.dims != len(tensor.shape):
            said = "does not say how it is sharded" if spec is None else f"shards it by {spec}"
            raise CheckpointError(
                f"{other.directory}: {said}, but tensor {tensor.name!r} has {len(tensor.shape)} "
                "dims; give ",
                *_MESH_AND_RULES,
            )
        return spec.without_partial()

    return other.mesh, layouts_by_rules(other.mesh, {}, wanted, spec_of)


def layouts_given(
    given: Mapping[str, Layout], wanted: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of given layouts, and those of the tensors; nothing is pending."""
    found = {}
    for tensor in wanted:
        layout = given.get(tensor.name)
        if layout is None or layout.global_shape != tensor.shape:
            said = "no layout is" if layout is None else f"the layout of {layout.global_shape} is"
            raise CheckpointError(
                f"{said} for tensor {tensor.name!r} of shape {tensor.shape}; give one, or exclude "
                "the tensor"
            )
        spec = layout.spec.without_partial()
        found[tensor.name] = Layout(layout.mesh, spec, tensor.shape, tensor.dtype)
    return on_common_mesh(found) if found else (_ALONE, {})


# --- the output that a caller asks for


class Asked(NamedTuple):
    """What a caller wants of an output."""

    way: Way
    format: str | None
    """By its name."""
    options: WriteOptions
    names: Names | None
    mesh: DeviceMesh | None = None
    rules: Rules | None = None
    like: PurePath | str | Catalog | Mapping[str, Layout] | None = None
    limit: int | None = None
    """Most bytes of tensors in a file."""
    directory: bool = False
    """Whether the output is named as a directory."""


class LaidOut(NamedTuple):
    """An output, and what it is made of."""

    source: Catalog
    target: Target
    format: str


def _format(output: StoragePath, asked: Asked) -> Format:
    """Return the format of an output, where it can be sharded as its caller wants it."""
    if asked.way == "merged":
        return merged_format(output, asked.format, asked.limit, asked.directory)
    name = asked.format
    format = default_format("sharded") if name is None else written_format(name, "sharded")
    _check_sharding(asked, format.whole_run)
    return format


def _check_sharding(asked: Asked, whole: str) -> None:
    """Check that a mesh, or a checkpoint to shard like, is given where the format needs one."""
    onto = asked.mesh
    sharding = onto is not None or asked.like is not None or asked.rules
    checks: tuple[tuple[object, tuple[TextPart, ...]], ...] = (
        (
            asked.like is not None and (onto is not None or asked.rules is not None),
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
            whole
            and (sharding or not asked.options.is_all or asked.options.quantize or asked.names),
            (
                f"{whole} has all tensors of a run as they were saved, for any number of ranks; "
                "leave out the mesh, the rules, the checkpoint to shard like, ",
                *_CHOICE,
            ),
        ),
        (
            not whole and onto is None and asked.like is None,
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


def _opened(
    checkpoint: PurePath | str | Catalog, asked: Asked, format: Format
) -> tuple[Catalog, Choice]:
    """Return a checkpoint as what is asked makes of it, and what is left to choose of that."""
    options, source, names = asked.options, as_catalog(checkpoint), asked.names
    config = config_of(source, names)
    source, choice = mapped_source(source, names, options)
    if (options.quantize, options.scale_rule, options.quantize_include) != (None, None, None):
        from shardspec.checkpoint.quantizing import quantise_of, quantised_as

        how = quantise_of(options.quantize, options.scale_rule, options.quantize_include)
        source = quantised_as(source, how, options if names is None else Choice(), config)
        choice = options.after_map() if options.quantize is not None else choice
    return source.as_stored() if format.keeps == "objects" else source, choice


def laid_out(
    checkpoint: PurePath | str | Catalog, output: StoragePath, asked: Asked, save: str
) -> LaidOut:
    """Open a checkpoint, as what a map makes of it, and lay out the files of an output.

    `save` names this save. Raises ShardSpecError if the format cannot hold what is wanted.
    """
    format, options = _format(output, asked), asked.options
    source, choice = _opened(checkpoint, asked, format)
    tensors = select(source, choice)
    mesh, layouts = _sharding(source, asked, format, tensors)
    if format.whole_run:
        carried = Carried(frozenset(source.extras), {}, {})
    else:
        carried = carried_values(source, choice, tensors, objects=format.keeps == "objects")
    if format.keeps == "tensors":
        carried = Carried(frozenset(), {}, {})
    # Whole tensors are what a merge is for: it may lose other entries.
    may_lose = None if asked.way == "merged" and not options.drop_values else options.drop_values
    check_dropped(source, choice, carried.names, may_lose)
    if asked.way == "merged" and source.extras and not (tensors or carried.names):
        raise CheckpointError(
            f"{source.directory}: holds no tensor that could be written, but "
            f"{min(source.extras)!r} and the like; name the checkpoint of the model"
        )
    assert format.lay_out is not None, "it is written"
    target = format.lay_out(
        source,
        Wanted(
            *(output.name, asked.way, tensors, carried, mesh, layouts, save),
            *(options.metadata, options.sidecars, asked.limit),
        ),
    )
    target = target._replace(carried=target.carried | carried.names)
    if asked.way == "sharded":
        winners = winning_patterns(list(asked.rules or {}), layouts)
        said = {n: (winners.get(n, ""), str(at.labelled_spec)) for n, at in layouts.items()}
        target = target._replace(sharding=said)
    if options.sidecars:
        target = add_sidecars(source, target, format.sidecars)
    if not output.nests and any("/" in file.name for file in target.files):
        raise CheckpointError(
            f"{output}: the format {format.name!r} has files in directories, which are not written "
            "into a store; write to a directory here, and copy that"
        )
    return LaidOut(source, target, format.name)


def _of_scales(
    source: Catalog,
    rules: Rules,
    tensors: Sequence[OutputTensor],
    layouts: Mapping[str, Layout],
) -> dict[str, Layout]:
    """Return the layouts of scales that no rule names: they are cut as their codes are."""
    winners = winning_patterns(list(rules), layouts)
    new = {tensor.source: tensor.name for tensor in tensors}
    found: dict[str, Layout] = {}
    for codes, blocks in quantised_in(source).blocks.items():
        for scales, sides in blocks.scales:
            if {codes, scales} <= new.keys() and new[scales] not in winners:
                grid = grid_layout(layouts[new[codes]], sides, layouts[new[scales]].dtype)
                found |= {} if grid is None else {new[scales]: grid}
    return found


def _sharding(
    source: Catalog, asked: Asked, format: Format, tensors: Sequence[OutputTensor]
) -> tuple[DeviceMesh, Mapping[str, Layout]]:
    """Return the mesh of an output and the layouts of its tensors, if its format has shards."""
    if format.whole_run or "sharded" not in format.writes:
        return _ALONE, {}
    if isinstance(asked.like, Mapping):
        mesh, layouts = layouts_given(asked.like, tensors)
    elif asked.like is not None:
        mesh, layouts = layouts_like(as_catalog(asked.like), tensors)
    else:
        mesh = asked.mesh or _ALONE
        layouts = layouts_by_rules(mesh, asked.rules or {}, tensors)
        if source.quantization:
            layouts |= _of_scales(source, asked.rules or {}, tensors, layouts)
    if asked.way == "sharded":
        check_blocks(source, {tensor.source: layouts[tensor.name] for tensor in tensors})
    return mesh, layouts
