"""Reshard plans that quantise, on senders whose cuts fall on blocks, else on receivers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from shardspec.checkpoint.check_quantized import grid_layout
from shardspec.checkpoint.quantized import Stated, quantised
from shardspec.errors import DTypeError, LayoutError
from shardspec.families.linear import LinearLayers
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.resharding.copies import TensorMove
from shardspec.resharding.name_map import NameMap
from shardspec.resharding.plan import ReshardPlan, ReshardTarget, plan_state
from shardspec.resharding.state import flat_state
from shardspec.resharding.transfers import Declared, End, Rows

if TYPE_CHECKING:
    import torch

FP8_BLOCKS: Final = "fp8-128x128"
_SIDE: Final = 128
_SCALES: Final = "_scale_inv"
_WEIGHTS: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class QuantisingPlan(ReshardPlan):
    """A reshard plan whose target has codes and scales for the weights of linear layers."""

    by_senders: tuple[tuple[str, Layout, Layout], ...] = ()
    """Weights of the source that are quantised before they travel: their layouts, and those of
    their scales."""
    by_receivers: tuple[tuple[str, Layout, Layout], ...] = ()
    """The same of weights of the target that are quantised where they arrive."""

    @cached_property
    def digest(self) -> str:
        """What is equal on ranks whose plans are; hexadecimal."""
        names = [[name for name, *_ in weights] for weights in (self.by_senders, self.by_receivers)]
        return hashlib.sha256(f"{super().digest} {names}".encode()).hexdigest()

    def run(  # type: ignore[override]  # what arrives is not what was sent, so there is no receipt
        self,
        state: Mapping[str, object],
        out: Mapping[str, object] | None = None,
        *,
        receipt: bool = False,
        version: int | None = None,
    ) -> dict[str, Any]:
        """Carry the plan out; see `ReshardPlan.run`."""
        import torch

        from shardspec.comm.process_group import communicator_of, telling_job
        from shardspec.tensor.dtensor import DTensor

        if receipt or version is not None:
            raise LayoutError("a plan that quantises gives no receipt; compare digest(out)")
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_rank() not in self.devices:
            return super().run(state, out)
        values, filled = flat_state(state), None if out is None else flat_state(out)
        arriving = {}
        with telling_job(self.devices), torch.no_grad():
            for name, layout, grid in self.by_senders:
                if name in values:
                    codes, scales = _quantised(name, values.pop(name), layout, grid)
                    values |= {name: codes, name + _SCALES: scales}
            for name, layout, _ in self.by_receivers if filled is not None else ():
                devices = communicator_of(layout.mesh).addressable
                dtype = getattr(torch, layout.dtype)
                shards = {d: torch.empty(layout.local_shape(d), dtype=dtype) for d in devices}
                arriving[name] = DTensor.from_shards(shards, layout)
        lacking = {name + end for name in arriving for end in ("", _SCALES)}
        rest = filled and {name: value for name, value in filled.items() if name not in lacking}
        results = super().run(values, None if rest is None else {**rest, **arriving})
        with telling_job(self.devices), torch.no_grad():
            for name, layout, grid in self.by_receivers:
                if name not in results:
                    continue
                made = _quantised(name, results.pop(name), layout, grid)
                for key, tensor in zip((name, name + _SCALES), made, strict=True):
                    if filled is None:
                        results[key] = tensor
                        continue
                    results[key] = filled[key]
                    for device, shard in _shards(key, filled[key], tensor.layout).items():
                        shard.copy_(tensor.shards[device])
        return results

    def transfers(
        self,
        device: int,  # noqa: ARG002  # as that of other plans
        end: End = "receiver",  # noqa: ARG002
        *,
        strides: Declared | None = None,  # noqa: ARG002
    ) -> Rows:
        """Raise LayoutError: what copies bytes does not quantise."""
        raise LayoutError(
            "this plan quantises, which no copy of bytes does; quantise before, and plan that"
        )


def plan_quantised(
    source: Mapping[str, object],
    target: ReshardTarget,
    names: Mapping[str, str] | NameMap | None,
    max_bytes: int | None,
    drop: str | Sequence[str],
) -> QuantisingPlan:
    """Plan how a state dict gets to other layouts, with weights of linear layers in FP8 there.

    Raises LayoutError if neither the source nor the target of a weight is cut at blocks.
    """
    plan = plan_state(source, target, names, None, max_bytes, drop)
    tensors = {m.source_name: (m.source.global_shape, m.source.dtype) for m in plan.moves}
    for name, why in quantised(tensors, Stated()).why.items():
        raise DTypeError(f"tensor {name!r} is quantised already ({why}); leave out dtype=")
    moves: list[TensorMove] = []
    senders, receivers = [], []
    groups: dict[str, list[TensorMove]] = {}
    for move in plan.moves:
        groups.setdefault(move.target_name, []).append(move)
    linear = LinearLayers({})
    for name, group in groups.items():
        (move, *others), after = group, group[0].target
        many = len(after.global_shape) >= 2 and after.dtype in _WEIGHTS
        if not (many and name in linear):
            moves += group
            continue
        grid = grid_layout(after, (_SIDE, _SIDE))
        whole = not others and move.view is None and move.source.dtype in _WEIGHTS
        before = grid_layout(move.source, (_SIDE, _SIDE)) if whole else None
        if before is not None:
            senders.append((move.source_name, move.source, before))
            codes = [_with_dtype(layout, "float8_e4m3fn") for layout in (move.source, after)]
            moves.append(replace(move, source=codes[0], target=codes[1]))
            # Where blocks are cut, all scales are everywhere.
            shape = before.global_shape
            grid = grid or Layout(after.mesh, ShardingSpec(len(shape)), shape, "float32")
            ends = move.source_name + _SCALES, name + _SCALES
            moves.append(TensorMove(*ends, before, grid))
        elif grid is not None:
            receivers.append((name, after, grid))
            moves += group
        else:
            raise LayoutError(
                f"tensor {name!r}: neither {move.source.spec} in the source nor {after.spec} in "
                f"the target cuts {list(after.global_shape)} at multiples of {_SIDE}, the side of "
                "a block that shares a scale; cut one of them there, or leave out dtype="
            )
    moves.sort(key=lambda move: (move.target_name, move.source_name))
    made = (tuple(moves), plan.max_bytes, plan.values, plan.padded, plan.dropped)
    return QuantisingPlan(*made, tuple(senders), tuple(receivers))


def _with_dtype(layout: Layout, dtype: str) -> Layout:
    return Layout(layout.mesh, layout.spec, layout.global_shape, dtype)


def _shards(name: str, value: object, layout: Layout) -> "dict[int, torch.Tensor]":
    """Return the shards of a tensor that are in this process; LayoutError if they do not fit."""
    from shardspec.comm.process_group import communicator_of
    from shardspec.resharding.given import shard_of

    devices = [d for d in communicator_of(layout.mesh).addressable if d in layout.mesh]
    alone, values = len(devices) == 1, {name: value}
    return {d: shard_of(name, repr(name), layout, d, values, alone=alone) for d in devices}


def _quantised(name: str, value: object, layout: Layout, grid: Layout) -> tuple[Any, Any]:
    """Return a weight as a DTensor of codes and one of scales."""
    from shardspec.tensor.dtensor import DTensor

    pairs = {d: _in_blocks(name, shard) for d, shard in _shards(name, value, layout).items()}
    layouts = _with_dtype(layout, "float8_e4m3fn"), grid
    codes, scales = (
        DTensor.from_shards({d: pair[at] for d, pair in pairs.items()}, of_part)
        for at, of_part in enumerate(layouts)
    )
    return codes, scales


def _in_blocks(name: str, weight: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Return codes and scales of a shard, by the rule ``transformers``; see `merge`."""
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
