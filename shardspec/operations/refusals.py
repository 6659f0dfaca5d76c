"""Where torch refuses an operation on some layouts, or gets it wrong: an error with the remedy.

Layouts are tried on meta tensors: only shapes and layouts are propagated, and nothing is sent. What
torch gets wrong was found by comparing torch 2.13 with one process, over layouts of a mesh of two
axes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from math import inf
from operator import ne
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardspec.comm.torch_mesh import from_torch
from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import is_strided, layout_of, torch_dtensor
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

_MOST_TRIALS: Final = 400
"""Combinations of layouts that are tried, those nearest to the given ones first."""

REFUSALS: Final = (RuntimeError, ValueError, AssertionError, TypeError)
"""What torch raises where it cannot propagate a layout."""

_SHOWN: Final = 4
_FAILURES: Final = (*REFUSALS, IndexError, KeyError)


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments, DTensors of torch on one mesh, to be tried without data."""

    function: Callable[..., Any]
    leaves: list[Any]
    """The arguments, flat."""
    structure: TreeSpec
    places: list[int]
    """Which of them are DTensors."""
    layouts: list[Layout]
    """Of these."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        mesh: DeviceMesh,
    ) -> "Call":
        """Take a call apart."""
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, TorchDTensor)]
        layouts = [layout_of(leaves[place], mesh) for place in places]
        return cls(function, leaves, structure, places, layouts)

    def is_possible(self, layouts: Sequence[Layout]) -> bool:
        """Try it on meta tensors of these layouts; it fails too if it reads values."""
        # Of this rank: where a dim is sharded, views are of other shapes on other ranks.
        rank, tried = dist.get_rank(), list(self.leaves)
        for place, layout in zip(self.places, layouts, strict=True):
            given = self.leaves[place]
            shape = layout.local_shape(rank if rank in layout.mesh else layout.mesh.ids[0])
            empty = torch.empty(shape, dtype=given.dtype, device="meta")
            tried[place] = torch_dtensor(empty, layout, given.device_mesh)
        args, kwargs = tree_unflatten(tried, self.structure)
        try:
            with torch.no_grad():
                self.function(*args, **kwargs)
        except _FAILURES:
            return False
        return True


def refusal(name: str, call: Call, error: Exception) -> LayoutError | None:
    """Return what to say where torch has refused a call, or None where layouts are not why."""
    given = call.layouts
    replicated = [layout.with_spec(ShardingSpec(layout.spec.dims)) for layout in given]
    if not call.is_possible(replicated):
        if isinstance(error, NotImplementedError):
            return LayoutError(
                f"{name}: torch {torch.__version__} has no rule for it on DTensors, on any "
                f"layout ({_first_line(error)}); do it on to_global()"
            )
        return None
    if call.is_possible(given):
        return None
    accepted = (
        layouts for layouts in islice(_nearest(given), _MOST_TRIALS) if call.is_possible(layouts)
    )
    found: list[Sequence[Layout]] = [*islice(accepted, _SHOWN)] or [replicated]
    return LayoutError(
        f"{name} is not possible on {_text(given)}: {_first_line(error)} It is on "
        f"{', '.join(map(_text, found))}; redistribute first"
    )


def specs_on(mesh: DeviceMesh, dims: int) -> Iterator[ShardingSpec]:
    """Yield every spec with nothing pending whose axes split a dim in ascending order."""
    for chosen in product(range(-1, dims), repeat=mesh.ndim):
        axes: dict[int, list[Axis]] = {}
        for axis, dim in enumerate(chosen):
            if dim >= 0:
                axes.setdefault(dim, []).append(axis)
        yield ShardingSpec(dims, axes)


def _nearest(given: Sequence[Layout]) -> Iterator[tuple[Layout, ...]]:
    """Yield combinations of layouts, those that change the fewest axes first."""
    choices = []  # of each tensor, by how many axes change
    for layout in given:
        by_distance: dict[int, list[Layout]] = {0: [layout]}
        for spec in specs_on(layout.mesh, layout.spec.dims):
            use, other = (_uses(each, layout.mesh.ndim) for each in (layout.spec, spec))
            changed = sum(map(ne, use, other))
            if changed:
                by_distance.setdefault(changed, []).append(layout.with_spec(spec))
        choices.append(by_distance)
    for total in range(1, sum(map(max, choices)) + 1):
        for distances in product(*choices):
            if sum(distances) == total:
                picked = zip(choices, distances, strict=True)
                yield from product(*(options[distance] for options, distance in picked))


def _uses(spec: ShardingSpec, axes: int) -> list[object]:
    """Return what each axis does: the dim it splits, the reduction pending over it, or None."""
    dims = {axis: dim for dim, found in spec.dim_partition_dict.items() for axis in found}
    return [dims.get(axis, spec.partial.get(axis)) for axis in range(axes)]


def _text(layouts: Sequence[Layout]) -> str:
    specs = [str(layout.labelled_spec) for layout in layouts]
    return specs[0] if len(specs) == 1 else f"({', '.join(specs)})"


def _first_line(error: Exception) -> str:
    line, _, _ = str(error).strip().partition("\n")
    return f"{line.rstrip('.')}."


GOING_BACK: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""What computes gradients, out of sight of `shardspec.operations.apply`."""

_Function: TypeAlias = Callable[..., Any]


# torch leaves the methods of its class untyped.
class _Intercepted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations are handed to a function, with their arguments."""

    def __init__(
        self, do: Callable[[_Function, Sequence[object], Mapping[str, object]], Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._do = do

    def __torch_dispatch__(
        self,
        func: _Function,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        return self._do(func, args, kwargs or {})


class ExplainedRefusals(_Intercepted):  # type: ignore[no-untyped-call]  # untyped in torch
    """Where torch refuses an operation on DTensors, say which layouts it would take.

    ``backward()`` of a `DTensor` does so by itself. Where the loss is a plain tensor, made by
    `DTensor.to_local` or `DTensor.to_global`, call it in this context, as in ``with
    ExplainedRefusals(): loss.to_global().backward()``. Plain tensors that torch makes on the way
    are taken to be replicated. A LayoutError comes in place of torch's error if other layouts are
    possible.
    """

    def __init__(self) -> None:
        super().__init__(_explained)


def _explained(function: _Function, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401
    try:
        with implicit_replication():
            return function(*args, **kwargs)
    except ShardSpecError:
        raise
    except REFUSALS as error:
        leaves = tree_leaves((tuple(args), dict(kwargs)))
        meshes = {leaf.device_mesh for leaf in leaves if isinstance(leaf, TorchDTensor)}
        found = None
        # Of a layout that specs cannot say, torch's own error has to do.
        with suppress(ShardSpecError):
            if len(meshes) == 1:
                call = Call.of(function, args, kwargs, from_torch(meshes.pop()))
                name = str(function).removeprefix("aten.").split(".")[0]
                found = refusal(f"{name} on the way back", call, error)
        if found is None:
            raise
        raise found from None


_MEANS: Final = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")
_EXTREMES: Final = ("amax", "amin")
_NORMS: Final = ("linalg_vector_norm", "norm")


def check_gradient(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise `LayoutError` if the gradient of this call on DTensors would be wrong.

    The gradient of a mean loss is divided by the size of the shard. That of a largest element is
    shared out shard by shard, and where several axes split one dim, ranks may wait for each other.
    """
    remedy = None
    if name in _MEANS and kwargs.get("reduction", "mean") == "mean":
        remedy = "take .mean() of its result with reduction='none'"
    elif name in _EXTREMES and len(args) < 2 and not kwargs.get("dim"):
        remedy = f"name the dims, as in {name}((0, 1))"
    elif name in _NORMS:
        order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
        if isinstance(order, float) and abs(order) == inf:
            remedy = "use .abs().amax() or .abs().amin() with the dims named"
    if remedy is not None:
        raise LayoutError(
            f"{name}: torch {torch.__version__} computes a wrong gradient of it on DTensors; "
            f"{remedy}, or detach its arguments"
        )


_VIEWS: Final = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
)


def refuse_strided_views(name: str) -> TorchDispatchMode:
    """Refuse views of tensors that torch has as strided shards, as of S10, while in this context.

    Where a dim after the first is split in descending order of axes, torch flattens it into
    another order than the tensor's, inside matrix products too. Sizes do not matter here, so that
    all ranks refuse alike. `name` is that of the function that is called.
    """

    def checked(function: _Function, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401
        if function in _VIEWS and isinstance(args[0], TorchDTensor) and is_strided(args[0]):
            raise LayoutError(
                f"{name}: it takes a view of a tensor of shape {tuple(args[0].shape)} whose axes "
                "split a dim in descending order, as S10 does, and torch mixes up its parts; "
                "redistribute to ascending order first, as to S01"
            )
        return function(*args, **kwargs)

    return _Intercepted(checked)
