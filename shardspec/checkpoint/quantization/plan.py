"""Plans resharding that also quantizes to FP8, at the sender or the receiver of each weight."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Never

from shardspec.checkpoint.convert.select import Choice
from shardspec.checkpoint.job.load_plan import (
    NO_COPY,
    CheckpointReader,
    plan_stored,
    stored_layouts,
)
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.quantization.cuts import grid_layout, origins, refuse_quantized
from shardspec.checkpoint.quantization.detect import find_quantized
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.errors import LayoutError
from shardspec.families.linear import LinearLayers
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.resharding.name_map import NameMap
from shardspec.resharding.plan import (
    ReshardPlan,
    ReshardTarget,
    check_move,
    layouts_of,
    plan_state,
)
from shardspec.resharding.stages import TensorMove
from shardspec.resharding.state import flat_state
from shardspec.text import Argument, first_of, shown

if TYPE_CHECKING:
    import torch

_SIDE: Final = 128
_SCALES: Final = "_scale_inv"
_WEIGHTS: Final = frozenset({"bfloat16", "float16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Runs a plan whose target has codes and scales instead of the weights of linear layers."""

    by_senders: tuple[tuple[str, Layout, Layout], ...]
    """Source weights that are quantized before sending: (name, layout, layout of the scales)."""

    def __str__(self) -> str:
        return "quantizes weights"

    def run(
        self, plan: ReshardPlan, state: Mapping[str, object], out: Mapping[str, object] | None
    ) -> dict[str, Any]:
        """Execute the plan; see `ReshardPlan.run`."""
        import torch

        from shardspec.comm.process_group import communicator_of, telling_job
        from shardspec.resharding.execute import run_reshard
        from shardspec.tensor.dtensor import DTensor

        dist, every = torch.distributed, plan.copies.devices
        if dist.is_available() and dist.is_initialized() and dist.get_rank() not in every:
            return {}
        tensors, filled = flat_state(state), None if out is None else flat_state(out)
        targets = {move.target_name: move.target for move in plan.moves}
        arriving = {}
        with telling_job(every), torch.no_grad():
            for name, layout, grid in self.by_senders:
                if name in tensors:
                    codes, scales = _quantized(name, tensors.pop(name), layout, grid)
                    tensors |= {name: codes, name + _SCALES: scales}
            for name in plan.quantized if filled is not None else ():
                layout = targets[name]
                devices = communicator_of(layout.mesh).addressable
                dtype = getattr(torch, layout.dtype)
                shards = {d: torch.empty(layout.local_shape(d), dtype=dtype) for d in devices}
                arriving[name] = DTensor.from_shards(shards, layout)
        lacking = {name + end for name in arriving for end in ("", _SCALES)}
        rest = filled and {name: value for name, value in filled.items() if name not in lacking}
        into = None if rest is None else {**rest, **arriving}
        result, _ = run_reshard(plan.copies, tensors, into)
        with telling_job(every), torch.no_grad():
            for name in plan.quantized:
                if name not in result:
                    continue
                scales_at = _grid(targets[name])
                assert scales_at is not None, "the plan cuts it at blocks"
                made = _quantized(name, result.pop(name), targets[name], scales_at)
                for key, tensor in zip((name, name + _SCALES), made, strict=True):
                    if filled is None:
                        result[key] = tensor
                        continue
                    result[key] = filled[key]
                    for device, shard in _shards(key, filled[key], tensor.layout).items():
                        shard.copy_(tensor.shards[device])
        return result

    def regions(self, plan: ReshardPlan) -> Never:  # noqa: ARG002  # as of others
        """Raise LayoutError: byte copies cannot quantize."""
        raise LayoutError(NO_COPY)


def plan_quantized(
    source: Mapping[str, object],
    target: ReshardTarget,
    names: Mapping[str, str] | NameMap | None,
    max_bytes: int | None,
    drop: str | Sequence[str],
) -> ReshardPlan:
    """Plan resharding of a state dict, with the weights of linear layers in FP8 at the target.

    Raises LayoutError if source and target both split a weight inside blocks.
    """
    target, scale_layouts = _without_scales(target, flat_state(source))
    plan = plan_state(source, target, names, None, max_bytes, drop)
    tensors = {m.source_name: (m.source.global_shape, m.source.dtype) for m in plan.moves}
    why = find_quantized(tensors).why
    refuse_quantized(why, tensors, "leave out ", Argument("dtype"))
    moves: list[TensorMove] = []
    senders: list[tuple[str, Layout, Layout]] = []
    receivers: list[str] = []
    groups: dict[str, list[TensorMove]] = {}
    for move in plan.moves:
        groups.setdefault(move.target_name, []).append(move)
    linear = LinearLayers({})
    for name, group in groups.items():
        dtypes, after = {move.source.dtype for move in group}, group[0].target
        if name not in linear or len(after.global_shape) < 2 or dtypes - _WEIGHTS:
            moves += group
            continue
        # Codes are computed from the numbers of the source, in any dtype of the target.
        after = _with_dtype(after, "float32" if len(dtypes) > 1 else dtypes.pop())
        move, *more = group = [replace(move, target=after) for move in group]
        grid, scales = _grid(after), name + _SCALES
        before = _grid(move.source) if not more and move.view is None else None
        if before is not None:
            senders.append((move.source_name, move.source, before))
            codes = [_with_dtype(layout, "float8_e4m3fn") for layout in (move.source, after)]
            moves.append(replace(move, source=codes[0], target=codes[1]))
            grid = scale_layouts.pop(scales, grid) or _everywhere(after, before)
            moves.append(TensorMove(move.source_name + _SCALES, scales, before, grid))
            check_move(moves[-1])
        elif grid is not None:
            if (requested := scale_layouts.pop(scales, grid)) != grid:
                raise LayoutError(
                    f"tensor {scales!r} is computed from {name!r}, with layout {grid}, but the "
                    f"target has {requested}; remove it from the target, or give it the first "
                    "layout"
                )
            receivers.append(name)
            moves += group
        else:
            raise LayoutError(
                f"tensor {name!r}: neither {move.source.spec} in the source nor {after.spec} in "
                f"the target splits {list(after.global_shape)} at multiples of {_SIDE} (a scale "
                "per block); change one spec, or omit dtype="
            )
    if scale_layouts:
        raise LayoutError(f"the source lacks {first_of([*map(shown, sorted(scale_layouts))])}")
    moves.sort(key=lambda move: (move.target_name, move.source_name))
    by = Quantizer(tuple(senders))
    return replace(plan, moves=tuple(moves), quantized=tuple(receivers), executor=by)


def plan_quantized_load(
    checkpoint: StoragePath,
    target: ReshardTarget,
    names: Mapping[str, str] | NameMap | None,
    max_bytes: int | None,
    drop: str | Sequence[str],
) -> ReshardPlan:
    """Plan a load of a checkpoint with the weights of linear layers in FP8.

    Weights are quantized while they are read, so shards of the target may begin inside blocks.
    """
    from shardspec.checkpoint.quantization.quantize import with_codes

    stored = as_catalog(checkpoint)
    source = with_codes(stored, names, Choice(drop=drop))
    target, scale_layouts = _without_scales(target, ())
    _, plan, _, files = plan_stored(source.base, target, None, None, max_bytes)
    layouts, _ = stored_layouts(source, min(files, default=0))
    after = {move.target_name: move.target for move in plan.moves}
    for scales in {*source.names} - {*source.base.names}:
        name = scales.removesuffix(_SCALES)
        after[name] = _with_dtype(after[name], layouts[name].dtype)
        after[scales] = _grid(after[name]) or _everywhere(after[name], layouts[scales])
    plan = plan_state(layouts, {**after, **scale_layouts}, None, None, max_bytes)
    dropped = tuple(sorted({*stored.names} - origins(source.base, source.base.names)))
    names = dict(names) if isinstance(names, Mapping) else names
    reader = CheckpointReader(checkpoint, names, None, quantizes=True)
    return replace(plan, dropped=dropped, executor=reader)


def _without_scales(
    target: ReshardTarget, source: Collection[str]
) -> tuple[ReshardTarget, dict[str, Layout]]:
    """Return `target` without the scales that the source lacks, and the layouts of those scales."""
    if isinstance(target, tuple):
        return target, {}
    flat = flat_state(target)
    scales = ({name + _SCALES for name in flat} & flat.keys()) - {*source}
    rest = {name: value for name, value in flat.items() if name not in scales}
    return rest, layouts_of({name: flat[name] for name in scales})


def _everywhere(weight: Layout, scales: Layout) -> Layout:
    """Return `scales` replicated over the mesh of `weight`, which is split inside blocks."""
    shape = scales.global_shape
    return Layout(weight.mesh, ShardingSpec(len(shape)), shape, scales.dtype)


def _grid(weight: Layout) -> Layout | None:
    """Return the layout of a weight's scales; None if shards begin or end inside blocks."""
    return grid_layout(weight, (_SIDE, _SIDE))


def _with_dtype(layout: Layout, dtype: str) -> Layout:
    return Layout(layout.mesh, layout.spec, layout.global_shape, dtype)


def _shards(name: str, value: object, layout: Layout) -> "dict[int, torch.Tensor]":
    """Return the shards of a tensor that are in this process; LayoutError if they do not fit."""
    from shardspec.comm.process_group import communicator_of
    from shardspec.resharding.inputs import shard_of

    devices = [d for d in communicator_of(layout.mesh).addressable if d in layout.mesh]
    alone, values = len(devices) == 1, {name: value}
    return {d: shard_of(name, repr(name), layout, d, values, alone=alone) for d in devices}


def _quantized(name: str, value: object, layout: Layout, grid: Layout) -> tuple[Any, Any]:
    """Quantize a weight; return a DTensor of codes with `layout`, and one of scales with `grid`."""
    from shardspec.tensor.dtensor import DTensor

    pairs = {d: _in_blocks(name, shard) for d, shard in _shards(name, value, layout).items()}
    layouts = _with_dtype(layout, "float8_e4m3fn"), grid
    codes, scales = (
        DTensor.from_shards({d: pair[at] for d, pair in pairs.items()}, of_part)
        for at, of_part in enumerate(layouts)
    )
    return codes, scales


def _in_blocks(name: str, weight: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Quantize a shard; return its codes and scales, equal to those that `merge` writes."""
    import torch

    high, wide = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -wide % _SIDE, 0, -high % _SIDE))
    sides = -(-high // _SIDE), -(-wide // _SIDE)
    tiles = padded.reshape(*weight.shape[:-2], sides[0], _SIDE, sides[1], _SIDE)
    most = tiles.abs().amax((-3, -1))
    if not bool(most.isfinite().all()):
        raise LayoutError(f"tensor {name!r} has NaN or infinity, which no scale fits")
    factors = 448.0 / most
    factors = torch.where((most > 0) & factors.isfinite(), factors, torch.ones_like(most))
    scaled = tiles * factors[..., :, None, :, None]
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.reshape(padded.shape)[..., :high, :wide].contiguous()
    return codes.view(torch.float8_e4m3fn), 1.0 / factors
