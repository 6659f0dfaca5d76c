"""Where torch refuses an operation on some layouts: an error that says which it would take.

Layouts are tried on meta tensors: only shapes and layouts are propagated, and nothing is sent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardspec.comm.torch_mesh import from_torch
from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import layout_of, torch_dtensor
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import Axis, DeviceMesh

__all__ = [
    "REFUSALS",
    "ExplainedRefusals",
    "goes_back",
    "reads_values",
    "refusal",
    "specs_on",
]

_MOST_TRIALS: Final = 400
"""Combinations of layouts that are tried, those nearest to the given ones first."""

REFUSALS: Final = (RuntimeError, ValueError, AssertionError, TypeError)
"""What torch raises where it cannot propagate a layout."""

_SHOWN: Final = 4
_FAILURES: Final = (*REFUSALS, IndexError, KeyError)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function and its arguments, to be tried on other layouts, without data."""

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
    ) -> "_Call":
        """Take a call apart."""
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, TorchDTensor)]
        return cls(
            function, leaves, structure, places, [layout_of(leaves[p], mesh) for p in places]
        )

    def is_possible(self, layouts: Sequence[Layout]) -> bool:
        """Try it on tensors of these layouts."""
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


def reads_values(
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    mesh: DeviceMesh,
) -> bool:
    """Say whether a result depends on values: on meta tensors it fails."""
    call = _Call.of(function, args, kwargs, mesh)
    return not call.is_possible(call.layouts)


def refusal(
    name: str,
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    mesh: DeviceMesh,
    error: Exception,
) -> LayoutError | None:
    """Return what to say where torch has refused an operation, or None where layouts are not why.

    Parameters
    ----------
    name, function
        What was called.
    args, kwargs
        Its arguments, DTensors as torch's.
    mesh
        The mesh that all of them are on.
    error
        What torch has raised.
    """
    call = _Call.of(function, args, kwargs, mesh)
    given = call.layouts
    whole = [layout.with_spec(ShardingSpec(layout.spec.dims)) for layout in given]
    if not call.is_possible(whole):
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
    found: list[Sequence[Layout]] = [*islice(accepted, _SHOWN)] or [whole]
    return LayoutError(
        f"{name} is not possible on {_text(given)}: {_first_line(error)} It is on "
        f"{', '.join(map(_text, found))}; redistribute first"
    )


def specs_on(mesh: DeviceMesh, dims: int) -> Iterator[ShardingSpec]:
    """Yield every spec with nothing pending whose axes split a dim in ascending order.

    Examples
    --------
    >>> [str(spec) for spec in specs_on(DeviceMesh(range(4), (2, 2)), 1)]
    ['[R]', '[S1]', '[S0]', '[S01]']
    """
    for chosen in product(range(-1, dims), repeat=mesh.ndim):
        cuts: dict[int, list[Axis]] = {}
        for axis, dim in enumerate(chosen):
            if dim >= 0:
                cuts.setdefault(dim, []).append(axis)
        yield ShardingSpec(dims, cuts)


def _nearest(given: Sequence[Layout]) -> Iterator[tuple[Layout, ...]]:
    """Yield combinations of layouts, those that change the fewest axes first."""
    choices = [
        [layout, *(layout.with_spec(spec) for spec in specs_on(layout.mesh, layout.spec.dims))]
        for layout in given
    ]
    distances = [
        [_distance(layout, choice) for choice in options]
        for layout, options in zip(given, choices, strict=True)
    ]
    furthest = sum(max(row) for row in distances)
    for wanted in range(1, furthest + 1):
        for picks in product(*(range(len(options)) for options in choices)):
            steps = [row[pick] for row, pick in zip(distances, picks, strict=True)]
            # A tensor that stays as it is stands first among its choices, once.
            stays = all(step > 0 or pick == 0 for step, pick in zip(steps, picks, strict=True))
            if stays and sum(steps) == wanted:
                yield tuple(choices[place][pick] for place, pick in enumerate(picks))


def _distance(a: Layout, b: Layout) -> int:
    return sum(_use(a.spec, axis) != _use(b.spec, axis) for axis in range(a.mesh.ndim))


def _use(spec: ShardingSpec, axis: int) -> object:
    """Return what an axis does: the dim it splits, the reduction pending over it, or None."""
    for dim, axes in spec.dim_partition_dict.items():
        if axis in axes:
            return dim
    return spec.partial.get(axis)


def _text(layouts: Sequence[Layout]) -> str:
    specs = [str(layout.labelled_spec) for layout in layouts]
    return specs[0] if len(specs) == 1 else f"({', '.join(specs)})"


def _first_line(error: Exception) -> str:
    line = str(error).strip().split("\n")[0].rstrip(".")
    return f"{line}."


_BACKWARD: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def goes_back(function: Callable[..., Any]) -> bool:
    """Whether a function computes gradients, out of sight of `shardspec.operations.apply`."""
    return function in _BACKWARD


# torch leaves the methods of its class untyped.
class ExplainedRefusals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where torch refuses an operation on DTensors, say which layouts it would take.

    ``backward()`` of a `DTensor` does so by itself. Where the loss is a plain tensor, made by
    `DTensor.to_local` or `DTensor.to_global`, call it in this context. Plain tensors that
    torch makes on the way are taken to be replicated.

    Raises
    ------
    LayoutError
        In place of torch's error, if other layouts are possible.

    Examples
    --------
    ::

        with ExplainedRefusals():
            loss.to_global().backward()
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do one operation."""
        del types
        given = kwargs or {}
        try:
            with implicit_replication():
                return func(*args, **given)
        except REFUSALS as error:
            found = _explained(func, args, given, error)
            if found is None:
                raise
            raise found from None


def _explained(
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    error: Exception,
) -> ShardSpecError | None:
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    cut = [leaf for leaf in leaves if isinstance(leaf, TorchDTensor)]
    if isinstance(error, ShardSpecError) or len({tensor.device_mesh for tensor in cut}) != 1:
        return None
    try:
        mesh = from_torch(cut[0].device_mesh)
        name = f"{str(function).removeprefix('aten.').split('.')[0]} on the way back"
        return refusal(name, function, args, kwargs, mesh, error)
    except ShardSpecError:
        return None  # a layout that specs cannot say; torch's own error has to do
