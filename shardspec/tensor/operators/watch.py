"""What torch's DTensor does inside a function, watched: writes that would be lost, and the like.

All of it is decided from layouts, so that every rank refuses alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Final

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardspec.errors import LayoutError
from shardspec.interop.torch_dtensor import is_strided, layout_of
from shardspec.interop.torch_parts import like_parts, parts_of, places_of, shard_memory
from shardspec.tensor.operators.conditions import layout_facts

_aten: Final = torch.ops.aten
_VIEWS: Final = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_FILLS: Final = (_aten.fill_.Scalar, _aten.fill_.Tensor)
_SQUEEZES: Final = {
    _aten.squeeze_copy.default: _aten.squeeze_copy.dims,
    _aten.squeeze_.default: _aten.squeeze_.dims,
}
"""What leaves out all dims of size 1, and what leaves out those that are named."""
_SUMS: Final = (_aten.add.Tensor, _aten.sub.Tensor, _aten.add_.Tensor, _aten.sub_.Tensor)
_EXTREMA: Final = (
    *(_aten.max, _aten.min, _aten.amax, _aten.amin),
    *(_aten.aminmax, _aten.argmax, _aten.argmin),
)
_TRANSPOSED: Final = 6
"""Where it is among the arguments of a convolution."""
_NORMS: Final = {_aten.linalg_vector_norm: 1, _aten.norm: 1, _aten.dist: 2}
"""Norms, and the position of the order among their arguments."""
_SUM: Final = Partial("sum")
_FILLED_ALIKE: Final = (Partial("avg"), Partial("max"), Partial("min"))
"""Reductions of equal addends that return the addend."""


def is_copy_of(view: TorchDTensor, base: TorchDTensor) -> bool:
    """Return whether a tensor is a view by torch's account, but its shards are in other memory."""
    return is_alias(view, base) and not is_alias(shard_memory(view), shard_memory(base))


def is_alias(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether torch considers two tensors to share memory."""
    # torch's stubs lack it.
    return bool(torch._C._is_alias_of(view, base))  # type: ignore[attr-defined]


# torch leaves the methods of TorchDispatchMode untyped.
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watch the operations of a function; correct or refuse those that torch gets wrong silently.

    - A view of a tensor with strided shards in torch, such as S10, is refused: torch flattens it
      in an order other than the tensor's, even inside matrix products.
    - A write to a view whose shards torch has moved to other memory is refused: the tensor itself
      would not change.
    - A pending sum is filled on one device, and the addends of the others become zero. Torch has no
      rule for filling with a tensor, as assignments to parts do; its number is used instead.
    - An empty shard has no largest element, so a tensor with empty shards is gathered.
    - A shard may have one row where the tensor has several, so dims of size 1 are named.
    - Torch passes tensors given by keyword on unchanged, so all arguments are gathered if one of
      these is not whole.
    - A convolution is refused unless only the batch is sharded: torch has rules for others, but
      treats each shard as the whole tensor, and gets the sizes of transposed ones wrong.
    - A tensor without dims is added to a pending sum as another pending sum. Torch does this too,
      but then confuses Python numbers with such tensors in its cache.

    Parameters
    ----------
    name
        The function's name.
    copies
        Arguments that are already views with shards in other memory.
    back
        Whether gradients are computed: then the error for an operation that torch refuses names
        the specs of its arguments.
    frozen
        Arguments that must not be written to.
    """

    def __init__(
        self,
        name: str,
        copies: Iterable[TorchDTensor],
        *,
        back: bool = False,
        frozen: Sequence[TorchDTensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._name, self._copies, self._back = name, list(copies), back
        self._frozen = frozen
        self.mended = False
        """Whether the function is right only while it is watched."""
        self.lost = False
        """Whether a write was refused because the tensor itself would not change."""
        self._written: list[TorchDTensor] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call the operation unless its result would be wrong."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, TorchDTensor)]
        first = args[0] if args else None
        if func in _VIEWS and isinstance(first, TorchDTensor) and is_strided(first):
            raise LayoutError(
                f"{self._name}: it takes a view of a tensor of shape {tuple(first.shape)} whose "
                "axes split a dim in descending order, as S10 does, and torch mixes up its parts; "
                "redistribute to ascending order first, as to S01"
            )
        spec, into = None, []
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            into = self._check_writes(func, args, kwargs)
            spec = first._spec if isinstance(first, TorchDTensor) else None
        if func in _FILLS and isinstance(first, TorchDTensor):
            self._check_filled(first)
            if isinstance(args[1], torch.Tensor):
                self.mended = True
                func, args = _aten.fill_.Scalar, (first, _number(args[1]))
        elif _fails_on_empty(func, args) and any(map(_has_empty_shards, tensors)):
            self.mended = True
            args = tuple(_gathered(arg) if isinstance(arg, TorchDTensor) else arg for arg in args)
        elif self._has_named_tensor(func, kwargs, into):
            self.mended = True
            args, kwargs = tree_map_only(
                TorchDTensor, lambda t: t if _is_among(t, into) else _gathered(t), (args, kwargs)
            )
        elif func in _SQUEEZES and isinstance(first, TorchDTensor):
            self.mended = True
            ones = [dim for dim, size in enumerate(first.shape) if size == 1]
            func, args = _SQUEEZES[func], (first, ones)
        elif func is _aten.convolution.default:
            self._check_convolution(args)
        elif func in _SUMS:
            args = self._addends(args)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            reason, _, rest = str(error).strip().partition("\n")
            if not self._back or "Sharding propagation failed" not in rest:
                raise
            name = str(func).removeprefix("aten.").partition(".")[0]
            specs = specs_text(str(layout_of(t).labelled_spec) for t in tensors)
            raise LayoutError(
                f"{name} on the way back is not possible on {specs}: {reason.rstrip('.')}; "
                "redistribute first"
            ) from None
        if isinstance(first, TorchDTensor) and spec is not None:
            self._check_kept(first, spec)
            if func in _FILLS:
                for part, is_first in zip(
                    parts_of(shard_memory(first)), _are_first(first), strict=True
                ):
                    if not is_first:
                        part.zero_()
        self._note_copies(func, tensors, result)
        return result

    def _note_copies(
        self, func: Callable[..., object], tensors: Sequence[TorchDTensor], result: object
    ) -> None:
        views = [leaf for leaf in tree_leaves(result) if isinstance(leaf, TorchDTensor)]
        for view in views:
            if any(is_alias(view, t) and self.is_copy(t) for t in tensors) or any(
                is_copy_of(view, t) for t in tensors
            ):
                self._copies.append(view)
        # Of several views torch does not say of what they are.
        if isinstance(result, list | tuple) and isinstance(func, torch._ops.OpOverload):
            base = shard_memory(tensors[0]) if tensors and func._schema._is_view_op() else None
            for view in views:
                if base is not None and not is_alias(shard_memory(view), base):
                    self._copies.append(view)
                    self.mended = True

    def is_copy(self, tensor: object) -> bool:
        """Whether a tensor is a view whose shards torch has moved."""
        return _is_among(tensor, self._copies)

    def check_written_to(self, into: Iterable[TorchDTensor]) -> None:
        """Refuse what no operation of the function has written to, though it is its ``out=``."""
        for tensor in into:
            if not any(is_alias(written, tensor) for written in self._written):
                raise LayoutError(
                    f"{self._name}: torch {torch.__version__} does not write to out= where that is "
                    "a DTensor; use what it returns without out="
                )

    def _has_named_tensor(
        self,
        func: Callable[..., object],
        kwargs: Mapping[str, object],
        into: Sequence[TorchDTensor],
    ) -> bool:
        """Whether a tensor is read that is given by keyword, and not whole."""
        if not kwargs or not isinstance(func, torch._ops.OpOverload):
            return False
        given = [tensor for tensor in kwargs.values() if isinstance(tensor, TorchDTensor)]
        if all(_is_whole(tensor) or _is_among(tensor, into) for tensor in given):
            return False
        if not all(map(_is_whole, into)):
            texts = (str(layout_of(tensor).labelled_spec) for tensor in into)
            raise LayoutError(
                f"{self._name}: torch {torch.__version__} takes each shard of a tensor given by "
                f"keyword for the whole, and writes to {specs_text(texts)}; redistribute first"
            )
        return True

    def _check_writes(
        self, func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> list[TorchDTensor]:
        """Return what is written to; refuse it if the write would be lost."""
        into = []
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, TorchDTensor)]
            if any(is_alias(leaf, tensor) for leaf in leaves for tensor in self._frozen):
                raise LayoutError(
                    f"{self._name} would write in place where gradients are tracked, which needs "
                    "one process per device: start the program with torchrun, or write under "
                    "torch.no_grad()"
                )
            into += leaves
            if any(map(self.is_copy, leaves)):
                self.lost = True
                raise LayoutError(
                    f"{self._name}: it writes to a part of a tensor that torch has gathered into a "
                    "copy, so that the tensor itself would not change; redistribute first, so that "
                    "the dims that are indexed are not sharded, or clone() the part"
                )
        if func is _aten.expand_copy.out and not all(map(_is_whole, into)):
            raise LayoutError(
                f"{self._name}: torch {torch.__version__} takes the sizes of the whole for those "
                "of each shard of out=; use what it returns without out="
            )
        if func is _aten.index_put_.default and not all(map(_is_whole, into)):
            masks = [key for key in tree_leaves(args[1]) if isinstance(key, TorchDTensor)]
            if any(mask.dtype == torch.bool for mask in masks):
                self.lost = True
                raise LayoutError(
                    f"{self._name}: torch takes each shard of a mask for one of the shard that it "
                    "sets; use torch.where, or redistribute first, so that both are whole"
                )
        if func is not _aten.resize_.default:
            self._written += into
        return into

    def _check_kept(self, tensor: TorchDTensor, before: DTensorSpec) -> None:
        """Refuse a write after which torch takes a shard, or an addend, for something else."""
        pairs = zip(tensor.placements, before.placements, strict=True)
        if any(type(p) is not type(q) for p, q in pairs):
            tensor._spec = before
            raise LayoutError(
                f"{self._name}: torch {torch.__version__} cannot write to a tensor of layout "
                f"{layout_of(tensor).labelled_spec} here; redistribute first"
            )

    def _check_convolution(self, args: Sequence[object]) -> None:
        given, weight, bias = args[:3]
        right = not args[_TRANSPOSED]
        for tensor in (given, weight, bias):
            if isinstance(tensor, TorchDTensor):
                batch = (Shard(0),) if tensor is given else ()
                right &= all(p in (Replicate(), *batch) for p in tensor.placements)
                right &= not _has_empty_shards(tensor)
        if not right:
            texts = (
                str(layout_of(t).labelled_spec) for t in args[:3] if isinstance(t, TorchDTensor)
            )
            raise LayoutError(
                f"{self._name}: torch {torch.__version__} computes "
                f"{'a transposed' if args[_TRANSPOSED] else 'a'} convolution wrongly on "
                f"{specs_text(texts)}; "
                + (
                    "do it on to_global()"
                    if args[_TRANSPOSED]
                    else "redistribute first, so that weight and bias are whole on every device, "
                    "and only the batch is sharded, with some of it on each"
                )
            )

    def _check_filled(self, tensor: TorchDTensor) -> None:
        for placement in tensor.placements:
            if placement == _SUM:
                self.mended = True
            elif placement.is_partial() and placement not in _FILLED_ALIKE:
                raise LayoutError(
                    f"{self._name}: torch {torch.__version__} fills every addend of the pending "
                    f"reduction of {layout_of(tensor).labelled_spec}; redistribute first"
                )

    def _addends(self, args: Sequence[object]) -> Sequence[object]:
        """Return two summands; if one is a pending sum and the other has no dims, both pending."""
        sums = [t for t in args[:2] if isinstance(t, TorchDTensor) and _SUM in t.placements]
        if len(sums) != 1:
            return args
        (pending,) = sums
        other = args[0] if pending is args[1] else args[1]
        if not isinstance(other, torch.Tensor) or other.dim() > 0:
            return args
        if isinstance(other, TorchDTensor):
            if any(placement.is_partial() for placement in other.placements):
                return args
            other = shard_memory(other)
        self.mended = True
        are_first, others = _are_first(pending), parts_of(other)
        others *= len(are_first) // len(others)
        pairs = zip(others, are_first, strict=True)
        parts = [part if is_first else torch.zeros_like(part) for part, is_first in pairs]
        addend = like_parts(shard_memory(pending), parts)
        placements = [p if p.is_partial() else Replicate() for p in pending.placements]
        both = TorchDTensor.from_local(addend, pending.device_mesh, placements, run_check=False)
        return *((t if t is pending else both) for t in args[:2]), *args[2:]


def _fails_on_empty(func: Callable[..., object], args: Sequence[object]) -> bool:
    """Whether a reduction has no value for an empty shard."""
    kind = getattr(func, "overloadpacket", None)
    if kind in _NORMS:
        order = args[_NORMS[kind]] if len(args) > _NORMS[kind] else 2
        return isinstance(order, int | float) and (order < 0 or order == inf)
    return kind in _EXTREMA


def _is_among(tensor: object, tensors: Iterable[object]) -> bool:
    return any(tensor is other for other in tensors)


def _is_whole(tensor: TorchDTensor) -> bool:
    return layout_facts(layout_of(tensor)).is_whole


def _has_empty_shards(tensor: TorchDTensor) -> bool:
    return layout_facts(layout_of(tensor)).has_empty_shards


def _gathered(tensor: TorchDTensor) -> TorchDTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _number(tensor: torch.Tensor) -> float | complex:
    """Return the number of a tensor without dims."""
    if isinstance(tensor, TorchDTensor):
        tensor = shard_memory(tensor if _is_whole(tensor) else _gathered(tensor))
    return parts_of(tensor)[0].item()


def _are_first(tensor: TorchDTensor) -> list[bool]:
    """Say of each part whether its device is the first of those whose addends are added up."""
    return [
        all(at == 0 for p, at in zip(tensor.placements, places, strict=True) if p == _SUM)
        for places in places_of(tensor)
    ]


def specs_text(specs: Iterable[str]) -> str:
    """Return the specs of one tensor or several as text."""
    texts = list(specs)
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
