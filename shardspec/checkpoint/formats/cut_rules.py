"""Merges tensor parallel files of Megatron and Meta by rules such as "``wo`` is cut along dim 1".

The files do not record how a tensor was sharded. A rule maps a shell pattern of names to a spec
over the axis ``tp``. A fused tensor, such as q, k and v in one, also has parts of the sharded dim:
every rank has a shard of each part. In TOML::

    "*.linear_fc2.weight" = "[R,S(tp)]"
    "*.linear_fc1.weight" = { spec = "[S(tp),R]", parts = 2 }
    "*.qkv.weight" = { spec = "[S(tp),R]", parts = [4, 1, 1] }

Rules of the caller come before those of the model families. A tensor without a rule is refused:
equal bytes on all ranks prove nothing. Every rank stores the unsharded tensors, and the copies are
compared. Each file numbers its layers and experts from 0; in the catalog, numbers continue from the
previous stage or expert parallel rank.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Final, NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import StoredTensor, replica_keys
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.torch_files import states
from shardspec.checkpoint.torch_files.states import TorchState, mismatch_error
from shardspec.checkpoint.torch_files.values import TorchTensor
from shardspec.errors import CheckpointError, InputFileError, LayoutError, ShardSpecError
from shardspec.input_files import MAX_TOML_BYTES, parse_toml, read_input_file
from shardspec.layout.layout import Layout
from shardspec.layout.rules import RuleSpec, last_match, misfit_text, winning_patterns
from shardspec.layout.spec import DimSpec, Part, ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import Argument

CutRules: TypeAlias = Mapping[str, object] | PurePath | str | None
"""Rules of a caller: None, pattern -> spec or table, or a TOML file of these."""

_AXIS: Final = "tp"
_MOST_PARTS: Final = 1023
_LAYER: Final = re.compile(r"((?:.*?\.)?layers\.)(\d{1,6})(?=\.)()", re.DOTALL)
_EXPERT: Final = re.compile(
    r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d{1,6})((?:\..*)?\Z)",
    re.DOTALL,
)
"""Matches names of experts in a list; group 2 is the number of the expert."""
_FUSED_QKV: Final = re.compile(r".*query_key_value\.(weight|bias)", re.DOTALL)


def read_toml(path: PurePath) -> dict[str, object]:
    """Read a small TOML file of rules; raises `CheckpointError` if it is not one."""
    try:
        return parse_toml(read_input_file(path, MAX_TOML_BYTES).decode("utf-8-sig"))
    except InputFileError as error:
        raise CheckpointError(str(error)) from None
    except ValueError as error:
        raise CheckpointError(
            f'{path}: is not TOML: {error}; write one rule a line: "*.weight" = "[S(tp),R]"'
        ) from None


def cut_rules(rules: CutRules) -> dict[str, RuleSpec]:
    """Parse sharding rules from a table or a TOML file; `parts` become shares of the dim.

    >>> str(cut_rules({"*.fc1.weight": {"spec": "[S(tp),R]", "parts": 2}})["*.fc1.weight"].spec)
    '[S(tp){1,1},R]'
    """
    origin = "rules"
    if isinstance(rules, PurePath | str):
        rules, origin = read_toml(PurePath(rules)), str(rules)
    return {
        pattern: _rule(value, f"{origin}: the rule of {pattern!r}")
        for pattern, value in (rules or {}).items()
    }


def _rule(value: object, title: str) -> RuleSpec:
    table = value if isinstance(value, Mapping) else {"spec": value}
    spec, parts = table.get("spec"), table.get("parts", 1)
    if type(parts) is int and parts <= _MOST_PARTS:
        parts = (1,) * parts
    if (
        isinstance(spec, str | ShardingSpec)
        and table.keys() <= {"spec", "parts"}
        and isinstance(parts, Sequence)
        and 0 < len(parts) <= _MOST_PARTS
        and all(type(part) is int and part > 0 for part in parts)
    ):
        try:
            rule = RuleSpec.of(spec)
        except ShardSpecError as error:
            raise CheckpointError(f"{title} is not a spec: {error}") from None
        parsed = rule.spec
        cut = DimSpec((_AXIS,), tuple(map(Part, parts)) if len(parts) > 1 else ())
        over_tp = parsed.is_plain and not parsed.partials and {*parsed.axes} <= {_AXIS}
        if over_tp and (parsed.axes or cut.is_plain):
            cuts = dict.fromkeys(parsed.dim_partition_dict, cut)
            return replace(rule, spec=ShardingSpec(parsed.dims, cuts))
    raise CheckpointError(
        f"{title} is {value!r:.80}; give a spec in quotes, over the axis {_AXIS} alone, or a table "
        "of spec and parts (a number or proportions); quote patterns with dots or stars too"
    )


class SourceRules(NamedTuple):
    """Sharding rules: those of the caller, then those of model families."""

    own: Mapping[str, RuleSpec]
    shipped: Mapping[str, RuleSpec]
    old_qkv: bool = False
    """True for old files, whose query_key_value is not sorted by heads."""

    def find(self, name: str, dims: int, path: StoragePath) -> ShardingSpec:
        """Return the spec of a tensor with `dims` dims; CheckpointError if no rule matches."""
        for rules in (self.own, self.shipped):
            pattern = last_match(rules, name)
            if pattern is not None:
                spec = rules[pattern].for_dims(dims)
                if spec is None:
                    raise CheckpointError(misfit_text(pattern, rules[pattern], name, dims))
                return spec
            if self.old_qkv and _FUSED_QKV.fullmatch(name):
                raise CheckpointError(
                    f"{path}: tensor {name!r} is of checkpoint version 0, where each rank "
                    "stores q, then k, then v; give it a rule with 3 parts: "
                    f'"{name}" = {{ spec = "[S(tp),R]", parts = 3 }}'
                )
        raise CheckpointError(
            f"{path}: no rule says how tensor {name!r} is sharded over tensor parallel ranks; give "
            f'one, such as "{name}" = "[S(tp),R]", or "[R,R]" if all are equal, in ',
            Argument("source_rules"),
        )


class ModelChunk(NamedTuple):
    """Consecutive layers of a model, as one file of each tensor parallel rank."""

    states: Sequence[TorchState]
    first_rank: int = 0
    """Global rank of the first state."""
    expert_rank: int = 0
    """Expert parallel rank; tensors that are not experts are copies of those of rank 0."""
    expert_ranks: int = 1


def merged_tensors(chunks: Sequence[ModelChunk], rules: SourceRules) -> dict[str, StoredTensor]:
    """Return the tensors of the model, its layers and experts renumbered over all chunks."""
    tensors: dict[str, StoredTensor] = {}
    layers_before: Counter[str] = Counter()
    for chunk in chunks:
        states.check_same_names((state.path, state.tensors) for state in chunk.states)
        layers, experts = _count(chunk, _LAYER, "layer"), _count_experts(chunk)
        for local_name in sorted(chunk.states[0].tensors):
            name = local_name
            if match := _LAYER.match(name):
                number = int(match[2]) + layers_before[match[1]]
                name = f"{match[1]}{number}{name[match.end() :]}"
            if match := _EXPERT.match(name):
                number = int(match[2]) + chunk.expert_rank * experts
                name = f"{match[1]}{number}{match[3]}"
            tensor = _tensor(name, local_name, chunk, rules)
            first = tensors.setdefault(name, tensor)
            if first is not tensor:
                if _kind_text(first) != _kind_text(tensor):
                    title, before = f"tensor {name!r}", "an earlier stage"
                    path = chunk.states[0].path
                    raise mismatch_error(path, title, _kind_text(tensor), before, _kind_text(first))
                tensors[name] = replace(first, boxes=first.boxes + tensor.boxes)
        if chunk.expert_rank + 1 == chunk.expert_ranks:
            layers_before.update({before: count for (before, _), count in layers.items()})
    try:
        winning_patterns(list(rules.own), tensors)
    except LayoutError as error:
        raise CheckpointError(Argument("source_rules"), f" {error}") from None
    return tensors


def _count(chunk: ModelChunk, pattern: re.Pattern[str], kind: str) -> dict[tuple[str, str], int]:
    """Return (prefix, suffix) -> count of layers or experts: "x.0.w", "x.1.w" are 2 of (x., .w)."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(pattern.match, chunk.states[0].tensors)):
        numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (before, after), counted in numbers.items():
        missing = min(set(range(len(counted))) - counted, default=None)
        if missing is not None:
            raise CheckpointError(
                f"{chunk.states[0].path}: has no {kind} {before}{missing}{after}, but "
                f"{before}{max(counted)}{after}; each file counts {kind}s from 0; the file was "
                "changed, restore it"
            )
    return {key: len(counted) for key, counted in numbers.items()}


def _count_experts(chunk: ModelChunk) -> int:
    """Return the number of experts per layer in a file; 0 if numbers count through all files."""
    path, tensors = chunk.states[0].path, chunk.states[0].tensors
    if chunk.expert_ranks == 1:
        return 0
    for name in tensors:
        if ".experts." in name and not _EXPERT.match(name):
            raise CheckpointError(
                f"{path}: tensor {name!r} has several experts, as the old grouped "
                "kernels store them; with expert parallel ranks, save as torch_dist "
                "(megatron.core.dist_checkpointing)"
            )
    counts = set(_count(chunk, _EXPERT, "expert").values())
    if len(counts) > 1:
        raise CheckpointError(
            f"{path}: has layers with {min(counts)} and with {max(counts)} experts, but all layers "
            "should have the same number; restore the file"
        )
    return max(counts, default=0)


def _tensor(name: str, local_name: str, chunk: ModelChunk, rules: SourceRules) -> StoredTensor:
    """Return one tensor: its global shape, and the box that each tensor parallel rank stores."""
    shards = [(state.path, *state.tensors[local_name]) for state in chunk.states]
    first_path, first, _ = shards[0]
    for path, local, _ in shards:
        if _kind_text(local) != _kind_text(first):
            title = f"tensor {local_name!r}"
            raise mismatch_error(path, title, _kind_text(local), first_path, _kind_text(first))
    dims, shape = len(first.shape), list(first.shape)
    rule = spec = ShardingSpec(dims)
    if len(shards) > 1:
        rule = rules.find(name, dims, first_path)
    for dim in rule.dim_partition_dict:
        parts = [part.size for part in rule.dim_specs[dim].parts] or [1]
        if shape[dim] % sum(parts):
            raise CheckpointError(
                f"tensor {name!r}: dim {dim} has {shape[dim]} elements in {first_path}, which "
                f"cannot be made of parts {parts}; correct its rule"
            )
        shape[dim] *= len(shards)
        unit = shape[dim] // sum(parts)
        sizes = tuple(Part(unit * part) for part in parts if unit)
        spec = ShardingSpec(dims, {dim: DimSpec((0,), sizes if len(sizes) > 1 else ())})
    ranks = range(chunk.first_rank, chunk.first_rank + len(shards))
    layout = Layout(DeviceMesh(ranks), spec, shape, first.dtype)
    boxes = tuple(
        states.stored_box_of_rank(layout, rank, part, path, place)
        for rank, (path, _, place) in zip(ranks, shards, strict=True)
        for part in replica_keys(layout, rank)
    )
    known_spec = spec if rule.is_plain else None
    return StoredTensor(name, layout.global_shape, first.dtype, known_spec, (), boxes)


def _kind_text(tensor: StoredTensor | TorchTensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"
