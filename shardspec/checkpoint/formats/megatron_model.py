"""From the parts of a Megatron model to its tensors: global layer numbers, and boxes by rules."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Final

from shardspec.boxes import Box
from shardspec.checkpoint.catalog import StoredBox, StoredTensor
from shardspec.checkpoint.formats.cut_rules import CutRule, find_rule
from shardspec.checkpoint.torch_files.state import StateTensor
from shardspec.dtypes import item_bytes
from shardspec.errors import CheckpointError, LayoutError
from shardspec.layout.spec import ShardingSpec

__all__ = ["Chunk", "Rules", "merged_tensors"]

_AXIS: Final = "tp"
_LAYER: Final = re.compile(r"((?:.*?\.)?layers)\.(\d{1,6})\.(.*)", re.DOTALL)
_EXPERT: Final = re.compile(
    r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,6})((?:\..*)?)",
    re.DOTALL,
)
_FUSED_QKV: Final = re.compile(r".*query_key_value\.(weight|bias)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The layers that follow each other in one stage: what each tensor parallel rank holds."""

    paths: tuple[Path, ...]
    """The file of each rank."""
    first_rank: int
    """The number of the first of them among all ranks."""
    tensors: tuple[Mapping[str, StateTensor], ...]
    expert_rank: int = 0
    """The expert parallel rank of all of them; their other tensors are copies of the first's."""
    expert_ranks: int = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """What says how tensors are cut."""

    own: Mapping[str, CutRule]
    """Of the caller; they come first."""
    shipped: Mapping[str, CutRule]
    old_qkv: bool
    """Whether the files are so old that query_key_value is not sorted by heads."""

    def find(self, name: str, path: Path) -> CutRule:
        """Return the rule of a tensor."""
        try:
            rule = find_rule(self.own, name)
            if rule is None and self.old_qkv and _FUSED_QKV.fullmatch(name):
                raise CheckpointError(
                    f"{path}: tensor {name!r} is of checkpoint version 0, where ranks hold all of "
                    "their q above k above v; give it a rule with 3 parts: "
                    f'"{name}" = {{ spec = "[S(tp),R]", parts = 3 }}'
                )
            rule = find_rule(self.shipped, name) if rule is None else rule
        except LayoutError as error:
            raise CheckpointError(str(error)) from None
        if rule is None:
            raise CheckpointError(
                f"{path}: no rule says how tensor {name!r} is cut over tensor parallel ranks; give "
                f'one, such as "{name}" = "[S(tp),R]", or "[R,R]" if all hold the same '
                "(--source-rules FILE, rules=)"
            )
        if set(rule.spec.axes) - {_AXIS}:
            raise CheckpointError(
                f"tensor {name!r}: its rule {rule} has another axis than {_AXIS!r}, which is the "
                "one over which Megatron cuts"
            )
        return rule


def merged_tensors(chunks: Sequence[Chunk], rules: Rules) -> dict[str, StoredTensor]:
    """Return the tensors of the whole model."""
    tensors: dict[str, StoredTensor] = {}
    layers_before: dict[str, int] = {}
    for chunk in chunks:
        _check_names(chunk)
        counts = _count_layers(chunk)
        local = _count_experts(chunk)
        for name in sorted(chunk.tensors[0]):
            whole = _global_expert(_global_name(name, layers_before), local, chunk)
            found = _tensor(whole, name, chunk, rules)
            known = tensors.setdefault(found.name, found)
            if known is not found:
                if (known.shape, known.dtype) != (found.shape, found.dtype):
                    raise CheckpointError(
                        f"tensor {found.name!r} is {known.dtype} of shape {list(known.shape)} in "
                        f"one pipeline stage and {found.dtype} of {list(found.shape)} in another "
                        f"({chunk.paths[0]}); the files are not of one save"
                    )
                tensors[found.name] = replace(known, boxes=known.boxes + found.boxes)
        if chunk.expert_rank + 1 < chunk.expert_ranks:
            continue
        for prefix, count in counts.items():
            layers_before[prefix] = layers_before.get(prefix, 0) + count
    return tensors


def _check_names(chunk: Chunk) -> None:
    sides = tuple(zip(chunk.paths, chunk.tensors, strict=True))
    for (has, held), (other, lacks) in (*product(sides, sides[:1]), *product(sides[:1], sides)):
        lacking = held.keys() - lacks.keys()
        if lacking:
            raise CheckpointError(
                f"{other}: lacks tensor {min(lacking)!r}, which {has} holds; the files are not "
                "of one save"
            )


def _count_layers(chunk: Chunk) -> dict[str, int]:
    """Return per list of layers how many of them a chunk has."""
    numbers: dict[str, set[int]] = {}
    for name in chunk.tensors[0]:
        match = _LAYER.fullmatch(name)
        if match is not None:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    for prefix, found in numbers.items():
        if found != set(range(len(found))):
            missing = min(set(range(len(found))) - found)
            raise CheckpointError(
                f"{chunk.paths[0]}: has no layer {prefix}.{missing}, but {prefix}.{max(found)}; "
                "each stage counts its layers from 0, so that the file was changed, restore it"
            )
    return {prefix: len(found) for prefix, found in numbers.items()}


def _count_experts(chunk: Chunk) -> int:
    """Return how many experts each layer of a chunk has; 0 if they are not to be numbered anew."""
    numbers: dict[str, set[int]] = {}
    for name in chunk.tensors[0] if chunk.expert_ranks > 1 else ():
        match = _EXPERT.fullmatch(name)
        if match is not None:
            numbers.setdefault(match[1] + match[3], set()).add(int(match[2]))
        elif ".experts." in name:
            raise CheckpointError(
                f"{chunk.paths[0]}: tensor {name!r} is of several experts at once, as the old "
                "grouped kernels keep them, which is not read of expert parallel runs; save with "
                "--ckpt-format torch_dist (megatron.core.dist_checkpointing)"
            )
    for key, found in numbers.items():
        if found != set(range(len(found))):
            raise CheckpointError(
                f"{chunk.paths[0]}: has of {key!r} the experts {sorted(found)}; each rank counts "
                "its experts from 0, so that the file was changed, restore it"
            )
    counts = {len(found) for found in numbers.values()}
    if len(counts) > 1:
        raise CheckpointError(
            f"{chunk.paths[0]}: has layers with {min(counts)} and with {max(counts)} experts, but "
            "all have as many; restore the file"
        )
    return max(counts, default=0)


def _global_expert(name: str, local: int, chunk: Chunk) -> str:
    """Return the name of a tensor with the number that its expert has among all."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{int(match[2]) + chunk.expert_rank * local}{match[3]}"


def _global_name(name: str, layers_before: Mapping[str, int]) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    prefix, number, rest = match.groups()
    return f"{prefix}.{int(number) + layers_before.get(prefix, 0)}.{rest}"


def _tensor(name: str, local_name: str, chunk: Chunk, rules: Rules) -> StoredTensor:
    """Return a tensor of one chunk, by its global name, with what every rank holds."""
    held = [tensors[local_name] for tensors in chunk.tensors]
    first = held[0].local
    for path, other in zip(chunk.paths, held, strict=True):
        if (other.local.dtype, other.local.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"tensor {local_name!r} is {first.dtype} of shape {list(first.shape)} in "
                f"{chunk.paths[0]}, but {other.local.dtype} of {list(other.local.shape)} in "
                f"{path}; the files are not of one save"
            )
    alone = CutRule(ShardingSpec(len(first.shape), {}))
    rule = alone if len(held) == 1 else rules.find(name, chunk.paths[0])
    if rule.spec.dims != len(first.shape):
        raise CheckpointError(
            f"tensor {name!r}: its rule {rule} is for {rule.spec.dims} dims, but it has "
            f"{len(first.shape)}; give it a rule of its own"
        )
    cut = next(iter(rule.spec.dim_partition_dict), None)
    shape = list(first.shape)
    if cut is not None:
        if shape[cut] % sum(rule.parts):
            raise CheckpointError(
                f"tensor {name!r}: dim {cut} has {shape[cut]} elements in {chunk.paths[0]}, which "
                f"cannot be made of parts {list(rule.parts)}; correct its rule"
            )
        shape[cut] *= len(held)
    boxes = [
        box
        for place, one in enumerate(held)
        for box in _boxes(one, cut, rule.parts, place, chunk)
        if 0 not in shape
    ]
    spec = ShardingSpec(len(shape), {} if cut is None else {cut: [0]})
    parted = cut is not None and len(rule.parts) > 1
    return StoredTensor(name, tuple(shape), first.dtype, None if parted else spec, (), tuple(boxes))


def _boxes(
    held: StateTensor, cut: int | None, parts: tuple[int, ...], rank: int, chunk: Chunk
) -> list[StoredBox]:
    """Return the boxes that one rank holds: one, or one for each part of the cut dim."""
    shape, place = held.local.shape, held.place
    path, ranks = chunk.paths[rank], len(chunk.paths)
    whole = tuple((0, size) for size in shape)
    writer = chunk.first_rank + rank
    if cut is None:
        return [StoredBox(whole, (), writer, path, place.offset, place.digest, place.strides)]
    size = item_bytes(held.local.dtype)
    strides = place.strides
    if strides is None:
        strides = tuple(prod(shape[dim + 1 :]) * size for dim in range(len(shape)))
    # Parts of the outermost dim that is longer than 1 lie one after the other.
    apart = len(parts) > 1 and prod(shape[:cut]) > 1
    unit = shape[cut] // sum(parts)
    boxes = []
    before = 0
    for part in parts:
        length = part * unit
        lo = before * ranks + rank * length
        box: Box = (*whole[:cut], (lo, lo + length), *whole[cut + 1 :])
        start, steps = place.offset + before * strides[cut], strides if apart else place.strides
        boxes.append(StoredBox(box, (), writer, path, start, place.digest, steps))
        before += length
    return boxes
