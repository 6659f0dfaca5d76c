"""Which tensors of a checkpoint are written: their names, dtypes and layouts."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache, partial, reduce
from itertools import chain
from math import prod
from operator import getitem
from typing import Final, NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.store import SourceFile, file_inside
from shardspec.checkpoint.targets import OutputTensor
from shardspec.dtypes import dtype_name, is_cast, is_floating, packed
from shardspec.errors import CheckpointError, DTypeError, LayoutError, ShardSpecError
from shardspec.layout.layout import Layout, SpecLike, match_rules
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh

_MOST_CONFIG_BYTES: Final = 2**20

Patterns: TypeAlias = str | Sequence[str]
"""One pattern of names, or several."""
Renames: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]]
"""Regular expressions, each with what its first match in a name is replaced with."""


class Choice(NamedTuple):
    """Which tensors are wanted of a checkpoint, and how; see `merge`."""

    include: Patterns | None = None
    exclude: Patterns = ()
    rename: Renames = ()
    dtype: str | None = None
    drop: Patterns = ()

    def wants(self, name: str) -> bool:
        """Return whether something of a name is wanted."""
        included = self.include is None or _matches(name, self.include)
        return included and not (_matches(name, self.exclude) or _matches(name, self.drop))

    def after_map(self) -> "Choice":
        """Return what is left to be done where a map has been taken of what is wanted."""
        return Choice(None, (), self.rename, self.dtype)


def _patterns(patterns: Patterns) -> Sequence[str]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _matches(name: str, patterns: Patterns) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _patterns(patterns))


def select(source: Catalog, choice: Choice) -> list[OutputTensor]:
    """Return the tensors that are wanted of a checkpoint, sorted by their new names.

    A pattern or an expression that matches nothing is a `CheckpointError`, as are two tensors of
    one name and a choice of none.
    """
    target = None if choice.dtype is None else _float_dtype(choice.dtype)
    names = wanted_names(source, choice)
    renamed, idle = _renamed(names, choice.rename)
    for pattern in idle:
        if not any(re.search(pattern, name) for name in source.extras):
            raise CheckpointError(
                f"the expression {pattern!r} matches no name that is to be renamed in "
                f"{source.directory}; the names start with {_first(names)}"
            )
    wanted = []
    for name in names:
        tensor = source.outline(name)
        dtype = target if target and is_cast(tensor.dtype, target) else tensor.dtype
        wanted.append(OutputTensor(renamed[name], name, tensor.shape, dtype))
    return sorted(wanted, key=lambda tensor: tensor.name)


def wanted_names(source: Catalog, choice: Choice) -> list[str]:
    """Return the names of the tensors that patterns choose; see `select`."""
    if choice.include is not None and not choice.include:
        raise CheckpointError("include has no pattern; leave it out where all is wanted")
    known = (*source.names, *source.extras)
    patterns = (choice.include or (), choice.exclude, choice.drop)
    for pattern in chain.from_iterable(map(_patterns, patterns)):
        if not any(fnmatchcase(name, pattern) for name in known):
            raise CheckpointError(
                f"pattern {pattern!r} matches nothing of {source.directory}; the names start "
                f"with {_first(source.names)}"
            )
    names = [name for name in source.names if choice.wants(name)]
    if not names and source.names:
        raise CheckpointError(
            f"no tensor of {source.directory} is left of {len(source.names)}; include more, or "
            "exclude less"
        )
    return names


def _first(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) or "(there are none)"


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


def carried_values(
    source: Catalog, choice: Choice, *, objects: bool
) -> tuple[frozenset[str], dict[str, object]]:
    """Return the entries for formats of torch that are not tensors: old names, and new to value.

    With `objects`, those that only torch could unpickle are copied as they are stored.
    """
    known = source.objects if objects else {}
    names = plain({**source.extras, **dict.fromkeys(known)}, choice)
    values = {new: known.get(name, source.extras[name]) for name, new in names.items()}
    return frozenset(names), values


def plain(others: Mapping[str, object], choice: Choice) -> dict[str, str]:
    """Return name to new name of the wanted values that are plain: numbers, text, lists of such."""
    wanted = [name for name, value in others.items() if _is_plain(value) and choice.wants(name)]
    return _renamed(wanted, choice.rename)[0]


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def tied(source: Catalog, wanted: Sequence[OutputTensor]) -> dict[str, str]:
    """Return the tensors that share storage: name to the first name of the same bytes.

    Tensors that lie elsewhere in the files do not count, whatever their values.
    """
    by_place: dict[object, list[OutputTensor]] = {}
    for tensor in wanted:
        outline = source.outline(tensor.source)
        if outline.boxes:
            key = outline.shape, outline.dtype, tensor.dtype, source.origin(tensor.source)
            by_place.setdefault(key, []).append(tensor)
    same = {}
    for alike in by_place.values():
        first: dict[object, str] = {}
        # Tensors that start at one place may have other strides.
        for tensor in alike if len(alike) > 1 else ():
            boxes = source.tensor(tensor.source).boxes
            places = frozenset((box.path, box.offset, box.box, box.strides) for box in boxes)
            name = first.setdefault(places, tensor.name)
            if name != tensor.name:
                same[tensor.name] = name
    return same


def layouts_by_rules(
    mesh: DeviceMesh,
    rules: Mapping[str, SpecLike],
    wanted: Sequence[OutputTensor],
    otherwise: Callable[[OutputTensor], ShardingSpec] | None = None,
) -> dict[str, Layout]:
    """Return the layout of each tensor: by the rule for it, else `otherwise`, else replicated."""
    specs = match_rules(rules, {tensor.name: len(tensor.shape) for tensor in wanted})
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


def layouts_like(
    other: Catalog, wanted: Sequence[OutputTensor]
) -> tuple[DeviceMesh, dict[str, Layout]]:
    """Return the mesh of another checkpoint, and its layout of each tensor for these shapes."""
    if other.mesh is None:
        raise CheckpointError(
            f"{other.directory}: a checkpoint in the format of {other.format} does not say its "
            "mesh and specs; give --mesh and --rules"
        )
    known = frozenset(other.names)

    def spec_of(tensor: OutputTensor) -> ShardingSpec:
        if tensor.name not in known:
            raise CheckpointError(
                f"{other.directory}: has no tensor {tensor.name!r} that says how to shard it; "
                "--rename it, --exclude it, or give --mesh and --rules"
            )
        spec = other.outline(tensor.name).spec
        if spec is None or spec.dims != len(tensor.shape):
            said = "does not say how it is sharded" if spec is None else f"shards it by {spec}"
            raise CheckpointError(
                f"{other.directory}: {said}, but tensor {tensor.name!r} has {len(tensor.shape)} "
                "dims; give --mesh and --rules"
            )
        return spec.without_partial()

    return other.mesh, layouts_by_rules(other.mesh, {}, wanted, spec_of)


# --- blocks of quantised tensors, each with a scale
#
# torchao says in the metadata of its safetensors files where blocks lie (block_size). For fp8
# weights config.json says it (quantization_config.weight_block_size): each such weight W has a
# W_scale_inv. GPTQ and AWQ have a row of W.scales for so many rows of W.qweight; bitsandbytes has a
# number of W.absmax for so many bytes of a 4-bit W, a power of two.


def check_blocks(source: Catalog, layouts: Mapping[str, Layout]) -> None:
    """Refuse layouts, by name in a checkpoint, that cut a tensor inside a block."""
    blocks = dict(_blocks(source))
    for name in sorted(blocks.keys() & layouts.keys()):
        layout = layouts[name]
        if len(blocks[name]) != len(layout.global_shape):
            continue
        for device in layout.mesh.ids:
            sides = zip(layout.box(device), blocks[name], layout.global_shape, strict=True)
            for dim, ((lo, hi), block, size) in enumerate(sides):
                if lo < hi and (lo % block or (hi % block and hi != size)):
                    raise LayoutError(
                        f"tensor {name!r}: spec {layout.spec} cuts dim {dim} at {lo}:{hi}, inside "
                        f"a block of {block} elements that share a scale; cut another dim, or over "
                        "fewer devices"
                    )


def _blocks(source: Catalog) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors that are quantised in blocks, and the shape of these."""
    for key, text in source.file_metadata.values.items():
        block = _sizes(text, "_data", "block_size")
        if block and _member(text, "_tensor_data_names"):
            home, _, weight = key.rpartition(".")
            yield f"{home}._{weight}_qdata".lstrip("."), block
    known = set(source.names)
    config = source.directory / "config.json"
    scaled = [name for name in source.names if f"{name}_scale_inv" in known]
    if scaled and config.is_file():
        with SourceFile(file_inside(source.directory, config.name, source.directory)) as file:
            said = file.read(0, min(file.num_bytes, _MOST_CONFIG_BYTES))
        if block := _sizes(said, "quantization_config", "weight_block_size"):
            yield from ((name, block) for name in scaled)
    for name in source.names:
        home, _, last = name.rpartition(".")
        if last == "qweight" and f"{home}.scales" in known:
            rows, groups = (source.outline(f"{home}.{of}").shape[0] for of in (last, "scales"))
            if groups and rows % groups == 0:
                yield name, (rows // groups, 1)
        elif f"{name}.absmax" in known:
            num_bytes, count = (prod(source.outline(of).shape) for of in (name, f"{name}.absmax"))
            powers = (1 << power for power in range(num_bytes.bit_length() + 1))
            size = next((size for size in powers if -(-num_bytes // size) == count), None)
            if size is not None:
                yield name, (size, 1)


def _member(text: str | bytes, *keys: str) -> object:
    """Return a member of an object in JSON; None where there is none."""
    with suppress(ValueError, RecursionError, LookupError, TypeError):
        found: object = reduce(getitem, keys, json.loads(text))
        return found
    return None


def _sizes(text: str | bytes, *keys: str) -> tuple[int, ...]:
    said = _member(text, *keys)
    if not isinstance(said, list) or not all(type(size) is int and size > 0 for size in said):
        return ()
    return tuple(said)
