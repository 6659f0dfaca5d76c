"""Errors with a remedy where torch refuses an operation on some layouts, or computes it wrongly.

Other layouts are tried on meta tensors, which only propagates shapes and layouts. What torch
computes wrongly was found by comparing torch 2.13 with one process, over layouts of a mesh of two
axes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, islice, product
from math import inf
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardspec.comm.steps import ReduceOp
from shardspec.comm.torch_mesh import from_torch
from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import is_strided, layout_of, torch_dtensor
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

REFUSALS: Final = (RuntimeError, ValueError, AssertionError, TypeError)
"""What torch raises where it cannot propagate a layout."""

_MOST_TRIALS: Final = 400
_SHOWN: Final = 4

_Function: TypeAlias = Callable[..., Any]
_Args: TypeAlias = Sequence[object]
_Kwargs: TypeAlias = Mapping[str, object]
_Use: TypeAlias = int | ReduceOp | None
"""What an axis does: the dim that it shards, the reduction pending over it, or nothing."""


class Call:
    """A function and its arguments, DTensors of torch on one mesh, to be tried without data."""

    def __init__(self, function: _Function, args: _Args, kwargs: _Kwargs, mesh: DeviceMesh) -> None:
        self._function = function
        self._leaves, self._structure = tree_flatten((tuple(args), dict(kwargs)))
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, TorchDTensor)]
        self.layouts = [layout_of(self._leaves[place], mesh) for place in self._places]

    def is_possible(self, layouts: Sequence[Layout]) -> bool:
        """Try it on meta tensors of these layouts; it fails too if it reads values."""
        # With the shapes of this rank: views of shards may be of other shapes on other ranks.
        rank, tried = dist.get_rank(), list(self._leaves)
        for place, layout in zip(self._places, layouts, strict=True):
            given = self._leaves[place]
            shape = layout.local_shape(rank if rank in layout.mesh else layout.mesh.ids[0])
            empty = torch.empty(shape, dtype=given.dtype, device="meta")
            tried[place] = torch_dtensor(empty, layout, given.device_mesh)
        args, kwargs = tree_unflatten(tried, self._structure)
        try:
            with torch.no_grad():
                self._function(*args, **kwargs)
        except (*REFUSALS, IndexError, KeyError):
            return False
        return True


def refusal(name: str, call: Call, error: Exception) -> LayoutError | None:
    """Return the error for a call that torch has refused; None where layouts are not the reason."""
    given = call.layouts
    replicated = [layout.with_spec(ShardingSpec(layout.spec.dims)) for layout in given]
    reason = str(error).strip().partition("\n")[0].rstrip(".") + "."
    if not call.is_possible(replicated):
        if isinstance(error, NotImplementedError):
            return LayoutError(
                f"{name}: torch {torch.__version__} has no rule for it on DTensors, on any "
                f"layout ({reason}); do it on to_global()"
            )
        return None
    if call.is_possible(given):
        return None
    accepted = filter(call.is_possible, islice(_nearest(given), _MOST_TRIALS))
    found: list[Sequence[Layout]] = [*islice(accepted, _SHOWN)] or [replicated]
    return LayoutError(
        f"{name} is not possible on {_text(given)}: {reason} It is on "
        f"{', '.join(map(_text, found))}; redistribute first"
    )


def _nearest(given: Sequence[Layout]) -> Iterator[list[Layout]]:
    """Yield combinations of layouts, those that change the fewest axes first."""
    uses = {
        (place, axis): use
        for place, layout in enumerate(given)
        for axis, use in enumerate(_uses(layout))
    }
    for number in range(1, len(uses) + 1):
        for changed in combinations(uses, number):
            others = (
                [use for use in (None, *range(given[place].spec.dims)) if use != uses[place, axis]]
                for place, axis in changed
            )
            for chosen in product(*others):
                layouts = list(given)
                for (place, axis), use in zip(changed, chosen, strict=True):
                    layouts[place] = _with_use(layouts[place], axis, use)
                yield layouts


def _uses(layout: Layout) -> list[_Use]:
    dims = {axis: dim for dim, axes in layout.spec.dim_partition_dict.items() for axis in axes}
    return [dims.get(axis, layout.spec.partial.get(axis)) for axis in range(layout.mesh.ndim)]


def _with_use(layout: Layout, axis: int, use: int | None) -> Layout:
    """Return the layout with another use of one axis; the axes of each dim ascend."""
    uses = _uses(layout)
    uses[axis] = use
    by_dim = {dim: [a for a, u in enumerate(uses) if u == dim] for dim in range(layout.spec.dims)}
    partial: dict[Axis, ReduceOp] = {a: u for a, u in enumerate(uses) if isinstance(u, str)}
    return layout.with_spec(ShardingSpec(layout.spec.dims, by_dim, partial=partial))


def _text(layouts: Sequence[Layout]) -> str:
    specs = [str(layout.labelled_spec) for layout in layouts]
    return specs[0] if len(specs) == 1 else f"({', '.join(specs)})"


GOING_BACK: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""These compute gradients, by operations that `shardspec.operations.apply` does not see."""


# torch leaves the methods of TorchDispatchMode untyped.
class ExplainedRefusals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where torch refuses an operation on DTensors, say which layouts it would take.

    ``backward()`` of a `DTensor` does so by itself. Where the loss is a plain tensor, made by
    `DTensor.to_local` or `DTensor.to_global`, call it in this context, as in ``with
    ExplainedRefusals(): loss.to_global().backward()``. Plain tensors that torch makes on the way
    are taken to be replicated. A LayoutError replaces torch's error if other layouts are possible.
    """

    def __torch_dispatch__(
        self, func: _Function, _types: object, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> object:
        """Call the operation; explain the error if it is refused."""
        kwargs = kwargs or {}
        try:
            with implicit_replication():
                return func(*args, **kwargs)
        except ShardSpecError:
            raise
        except REFUSALS as error:
            leaves = tree_leaves((tuple(args), dict(kwargs)))
            meshes = {leaf.device_mesh for leaf in leaves if isinstance(leaf, TorchDTensor)}
            found = None
            # Where no spec expresses the layout, torch's own error has to do.
            with suppress(ShardSpecError):
                if len(meshes) == 1:
                    call = Call(func, args, kwargs, from_torch(meshes.pop()))
                    name = str(func).removeprefix("aten.").split(".")[0]
                    found = refusal(f"{name} on the way back", call, error)
            if found is None:
                raise
            raise found from None


_VIEWS: Final = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
)


class RefusedStridedViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse views of tensors that torch has as strided shards, as of S10, in a named function.

    Where a dim after the first is sharded in descending order of axes, torch flattens it in another
    order than the tensor's, inside matrix products too. Sizes do not matter here, so that all ranks
    refuse alike.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._name = name

    def __torch_dispatch__(
        self, func: _Function, _types: object, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> object:
        """Call the operation unless it is such a view."""
        if func in _VIEWS and isinstance(args[0], TorchDTensor) and is_strided(args[0]):
            raise LayoutError(
                f"{self._name}: it takes a view of a tensor of shape {tuple(args[0].shape)} whose "
                "axes split a dim in descending order, as S10 does, and torch mixes up its parts; "
                "redistribute to ascending order first, as to S01"
            )
        return func(*args, **(kwargs or {}))


_MEANS: Final = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")
_NORMS: Final = ("linalg_vector_norm", "norm")


def check_gradient(name: str, args: _Args, kwargs: _Kwargs) -> None:
    """Raise `LayoutError` if the gradient of this call on DTensors would be wrong.

    The gradient of a mean loss is divided by the size of the shard. That of a largest element is
    distributed shard by shard; where several axes split one dim, ranks may wait for each other.
    """
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    if name in _MEANS and kwargs.get("reduction", "mean") == "mean":
        remedy = "take .mean() of its result with reduction='none'"
    elif name in ("amax", "amin") and len(args) < 2 and not kwargs.get("dim"):
        remedy = f"name the dims, as in {name}((0, 1))"
    elif name in _NORMS and isinstance(order, float) and abs(order) == inf:
        remedy = "use .abs().amax() or .abs().amin() with the dims named"
    else:
        return
    raise LayoutError(
        f"{name}: torch {torch.__version__} computes a wrong gradient of it on DTensors; "
        f"{remedy}, or detach its arguments"
    )
