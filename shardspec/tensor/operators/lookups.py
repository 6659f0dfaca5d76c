"""Computes embeddings and losses on shards: each device looks up the rows that it has.

With the weight sharded by rows over 2 devices, each one returns zeros for indices of the other's
rows, and the sum of both is the result. The mean of a loss needs the number of targets of all.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from shardspec.layout.converter import LayoutConverter
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.tensor.operators.tensor import TensorLike
from shardspec.tensor.run import with_gradient_reduced


def _bound(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any] | None:  # noqa: ANN401
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:  # torch raises its own error for wrong arguments
        return None
    bound.apply_defaults()
    return bound.arguments


def _is_plain(*tensors: object) -> bool:
    """Return True if all are DTensors that are only sharded: no pending sums, parts or blocks."""
    return all(
        isinstance(tensor, TensorLike)
        and not tensor.layout.spec.partials
        and tensor.layout.spec.is_plain
        and bool(tensor.communicator.addressable)
        for tensor in tensors
    )


def _embedding(args: Sequence[object], kwargs: Mapping[str, object]) -> TensorLike | None:
    """Return an embedding, with a pending sum if rows are sharded; None for other arguments."""
    given = _bound(F.embedding, args, kwargs)
    if given is None or not _is_plain(given["input"], given["weight"]):
        return None
    indices, weight = given["input"], given["weight"]
    if (
        given["max_norm"] is not None
        or given["scale_grad_by_freq"]
        or given["sparse"]
        or weight.dim() != 2
        or indices.dtype not in (torch.int32, torch.int64)
    ):
        return None
    rows, columns = weight.layout.spec.dim_specs
    of_indices = indices.layout.spec
    if set(of_indices.axes) & set(weight.layout.spec.axes):
        return None
    cuts = {**dict(enumerate(of_indices.dim_specs)), indices.dim(): columns}
    spec = ShardingSpec(indices.dim() + 1, cuts, partial=dict.fromkeys(rows.axes, "sum"))
    size, width = weight.shape
    shards = weight.shards
    if weight.requires_grad and torch.is_grad_enabled() and of_indices.axes:
        # Each device adds to the gradient for its own indices.
        own = weight.layout.spec
        pending: Any = dict.fromkeys(of_indices.axes, "sum")
        arriving = ShardingSpec(2, dict(enumerate(own.dim_specs)), partial=pending)
        plan = LayoutConverter().plan(weight.layout.with_spec(arriving), own)
        shards = with_gradient_reduced(plan, weight.communicator, shards)
    padding = given["padding_idx"]
    padding = padding + size if padding is not None and padding < 0 else padding
    found = {}
    with weight.communicator.telling():
        for device, shard in shards.items():
            index, (lo, hi) = indices.shards[device], weight.layout.box(device)[0]
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
                raise IndexError(f"embedding: an index is not in the {size} rows of the weight")
            found[device] = _rows_of(shard, index, lo, hi, padding)
    layout = Layout(weight.layout.mesh, spec, (*indices.shape, width), weight.dtype)
    result: TensorLike = weight._made(layout, weight.communicator, found)
    return result


def _rows_of(
    shard: torch.Tensor, index: torch.Tensor, lo: int, hi: int, padding: int | None
) -> torch.Tensor:
    """Return rows `index` of a tensor whose rows lo to hi are `shard`; other rows are zeros."""
    own = padding - lo if padding is not None and lo <= padding < hi else None
    inside = (index >= lo) & (index < hi)
    if not shard.shape[0]:
        return shard.new_zeros((*index.shape, shard.shape[1])) + shard.sum() * 0
    found = F.embedding(torch.where(inside, index - lo, 0), shard, own)
    return found.masked_fill(~inside.unsqueeze(-1), 0)


def _loss(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> TensorLike | None:
    """Return the loss for logits whose classes are all on one device; None for other arguments."""
    given = _bound(function, args, kwargs)
    if given is None or not _is_plain(given["input"], given["target"]):
        return None
    logits, target, weight = given["input"], given["target"], given["weight"]
    classes = 1 if logits.dim() > 1 else 0
    cuts = list(logits.layout.spec.dim_specs)
    if (
        given["size_average"] is not None
        or given["reduce"] is not None
        or not target.layout.spec.axes
        or target.is_floating_point()
        or logits.dim() != target.dim() + 1
        or cuts.pop(classes).axes
        or tuple(cuts) != target.layout.spec.dim_specs
        or logits.shape[:classes] + logits.shape[classes + 1 :] != target.shape
    ):
        return None
    if weight is not None and (
        not _is_plain(weight) or weight.layout.spec.axes or weight.requires_grad
    ):
        return None
    reduction, ignored = given.pop("reduction"), given["ignore_index"]
    if reduction not in ("none", "sum", "mean"):
        return None
    made: Callable[..., TensorLike] = logits._made
    wide = torch.promote_types(logits.dtype, torch.float32)
    found = {}
    with logits.communicator.telling():
        for device, shard in logits.shards.items():
            labels = target.shards[device]
            of_class = None if weight is None else weight.shards[device]
            here = {**given, "input": shard, "target": labels, "weight": of_class}
            losses = function(**here, reduction="none")
            found[device] = losses
            if reduction == "none":
                continue
            counted = labels != ignored
            share = counted.to(wide)
            if of_class is not None:
                share = of_class[labels.where(counted, 0)].to(wide) * share
            found[device] = torch.stack([losses.sum(dtype=wide), share.sum()])
        layout, communicator = target.layout, logits.communicator
        if reduction == "none":
            each = Layout(layout.mesh, layout.spec, layout.global_shape, logits.dtype)
            return made(each, communicator, found)
        pending = ShardingSpec(1, partial=dict.fromkeys(layout.spec.axes, "sum"))
        sums: Any = made(Layout(layout.mesh, pending, (2,), wide), communicator, found)
        sums = sums.redistribute(ShardingSpec(1))
    whole = {
        device: (shard[0] / shard[1] if reduction == "mean" else shard[0]).to(logits.dtype)
        for device, shard in sums.shards.items()
    }
    return made(Layout(layout.mesh, ShardingSpec(0), (), logits.dtype), communicator, whole)


def _cross_entropy(args: Sequence[object], kwargs: Mapping[str, object]) -> TensorLike | None:
    return _loss(F.cross_entropy, args, kwargs)


def _nll_loss(args: Sequence[object], kwargs: Mapping[str, object]) -> TensorLike | None:
    return _loss(F.nll_loss, args, kwargs)


LOOKUPS: Final[Mapping[Any, Callable[..., TensorLike | None]]] = {
    F.embedding: _embedding,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
}
"""The functions that are computed here; they return None for arguments that they do not take."""
