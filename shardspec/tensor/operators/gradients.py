"""Computes gradients of DTensors: `grad`, hooks, `detach`, `backward`, `torch.autograd.grad`.

Autograd tracks only the shards of a DTensor, `TensorLike._nodes`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from shardspec.errors import LayoutError
from shardspec.tensor.compiling import outside_graphs
from shardspec.tensor.operators.tensor import TensorLike
from shardspec.tensor.run import with_gradient_shared
from shardspec.tensor.shards import is_torch_dtensor


class Differentiable(TensorLike):
    """Adds the attributes and methods of torch's tensors that concern gradients."""

    __slots__ = ()

    @outside_graphs
    def _of_gradients(self, gradients: Sequence[torch.Tensor | None]) -> Self | None:
        """Return the gradients of this process's shards as one DTensor; None if all are None.

        A None beside others, as for a device whose shard was not used, counts as zeros. All
        addends of a pending reduction have the same gradient.
        """
        if all(each is None for each in gradients):
            return None
        addends = prod(self.layout.mesh.shape[int(p.axis)] for p in self.layout.spec.partials)
        shards = {
            device: torch.zeros_like(shard) if each is None else with_gradient_shared(each, addends)
            for (device, shard), each in zip(self.shards.items(), gradients, strict=True)
        }
        layout = self.layout.with_spec(self.layout.spec.without_partial())
        return self._made(layout, self.communicator, shards)

    def _as_gradients(self, gradient: Self) -> tuple[torch.Tensor, ...]:
        """Return the shards of a gradient, one per shard of this tensor; every rank calls it."""
        complete = gradient.redistribute(self.layout.spec.without_partial())
        return complete._nodes()

    # torch declares an attribute; gradients belong to the shards, so this collects them.
    @property  # type: ignore[override]
    def grad(self) -> Self | None:
        """The gradient, with nothing pending; None if absent.

        Gradients accumulate until it is set to None.
        """
        # torch warns if the gradient of a non-leaf is requested.
        return self._of_gradients(
            [node.grad if node.is_leaf or node.retains_grad else None for node in self._nodes()]
        )

    @grad.setter
    def grad(self, gradient: Self | None) -> None:
        nodes = self._nodes()
        given = [None] * len(nodes) if gradient is None else self._as_gradients(gradient)
        for node, of_node in zip(nodes, given, strict=True):
            node.grad = of_node

    # torch declares an attribute here, too.
    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        """True if the gradient is retained although this is not a leaf."""
        return any(node.retains_grad for node in self._nodes())

    def retain_grad(self) -> None:
        """Retain the gradient even if this is not a leaf."""
        for node in self._nodes():
            node.retain_grad()

    def register_hook(self, hook: Callable[[Self], Self | None]) -> RemovableHandle:
        """Call a function with each gradient of the tensor; return a handle to remove it.

        The function's result, unless None, replaces the gradient. If this process holds several
        shards, whose gradients arrive one at a time, the function is called after the last one, and
        a replacement raises `LayoutError`.
        """
        nodes = self._nodes()
        gradients: dict[int, torch.Tensor] = {}

        def arrived(number: int, gradient: torch.Tensor) -> torch.Tensor | None:
            if number in gradients:  # of a backward that did not reach all shards
                gradients.clear()
            gradients[number] = gradient
            if len(gradients) < len(nodes):
                return None
            whole = self._of_gradients([gradients.pop(each) for each in range(len(nodes))])
            other = None if whole is None else hook(whole)
            if other is not None and len(nodes) > 1:
                raise LayoutError(
                    "a hook cannot replace the gradient of a tensor where one process holds "
                    f"{len(nodes)} shards of it; return None, or hook the shards themselves"
                )
            return None if other is None else self._as_gradients(other)[0]

        # torch leaves register_hook untyped.
        return _Handles(
            [node.register_hook(partial(arrived, number)) for number, node in enumerate(nodes)]  # type: ignore[no-untyped-call]
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[[Self], object]) -> RemovableHandle:
        """Call a function with this tensor, a leaf, whenever a gradient was added to `grad`.

        If this process holds several shards, it is called once each has its gradient.
        """
        nodes = self._nodes()
        missing = len(nodes)

        def arrived(_: torch.Tensor) -> None:
            nonlocal missing
            missing = (missing or len(nodes)) - 1
            if not missing:
                hook(self)

        # torch leaves this untyped too.
        return _Handles(
            [node.register_post_accumulate_grad_hook(arrived) for node in nodes]  # type: ignore[no-untyped-call]
        )

    def detach(self) -> Self:
        """Return a tensor of the same shards for which no gradients are tracked."""
        return self._view(torch.Tensor.detach)

    def detach_(self) -> Self:
        """Detach the tensor from its history in place; return the tensor itself."""
        for node in self._nodes():
            node.detach_()
        self._show_tracking(False)
        return self

    @outside_graphs
    def view_as(self, other: torch.Tensor) -> torch.Tensor:
        """Return a view of the shape of another tensor."""
        if other.shape == self.shape:  # torch uses this to find where gradients arrive
            view = self._view(lambda shard: shard.view_as(shard))
            view._become_part_of(self)
            return view
        return self.view(other.shape)

    @outside_graphs
    def _view(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return a DTensor whose shards are views of this one's, made by `view`."""
        shards = {device: view(shard) for device, shard in self.shards.items()}
        made = self._made(self.layout, self.communicator, shards)
        made._part_of = self._part_of
        return made


class _Handles(RemovableHandle):
    """A handle that removes several hooks."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = tuple(handles)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


GOING_BACK: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""torch's functions that compute gradients; outputs and inputs may be DTensors."""


def go_back(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:  # noqa: ANN401
    """Run `backward` or `torch.autograd.grad` on DTensors, by their shards."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    ends, sources = _listed(given.pop(next(iter(given)))), _listed(given.pop("inputs", None))
    names = ("gradient", "grad_tensors", "grad_outputs")
    starts = _listed(next((given.pop(name) for name in names if name in given), None))
    if given.pop("is_grads_batched", False):
        raise LayoutError(
            "torch.autograd.grad of a DTensor takes one gradient at a time: call it for each "
            "instead of is_grads_batched"
        )
    pairs = zip(ends, starts or [None] * len(ends), strict=True)
    started = [node for end, start in pairs for node in _started(end, start)]
    outputs, gradients = [node for node, _ in started], [gradient for _, gradient in started]
    nodes = [s._nodes() if isinstance(s, TensorLike) else (s,) for s in sources]
    inputs = [node for of_source in nodes for node in of_source]
    if function is not torch.autograd.grad:
        with _of_plain_tensors():
            return torch.autograd.backward(
                outputs, gradients, **given, inputs=inputs if sources else None
            )
    zeros, unused = given.pop("materialize_grads", False), given.pop("allow_unused", None)
    with _of_plain_tensors():
        results_of_torch = iter(
            torch.autograd.grad(outputs, inputs, gradients, **given, allow_unused=True)
        )
    results = []
    for source, of_source in zip(sources, nodes, strict=True):
        of_nodes = [next(results_of_torch) for _ in of_source]
        if all(gradient is None for gradient in of_nodes):
            if zeros:
                tracked = bool(given.get("create_graph"))
                of_nodes = [torch.zeros_like(node, requires_grad=tracked) for node in of_source]
            elif not unused:
                raise RuntimeError(
                    "One of the differentiated Tensors appears to not have been used in the "
                    "graph. Set allow_unused=True if this is the desired behavior."
                )
        ours = isinstance(source, Differentiable)
        results.append(source._of_gradients(of_nodes) if ours else of_nodes[0])
    return tuple(results)


def _listed(value: Any) -> list[Any]:  # noqa: ANN401
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    is_tensor = isinstance(value, torch.Tensor | torch.autograd.graph.GradientEdge)
    return [value] if is_tensor else list(value)


def _started(end: Any, start: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    """Return (shard, initial gradient or None) pairs of output `end`, with reductions finished."""
    if not isinstance(end, Differentiable):
        return [(end, start.to_torch() if isinstance(start, TensorLike) else start)]
    if is_torch_dtensor(start):
        start = end._wrap(start)
    if isinstance(start, torch.Tensor) and start.dim() and not isinstance(start, TensorLike):
        raise LayoutError(
            f"backward: a plain tensor of shape {tuple(start.shape)} is the gradient of a "
            "DTensor; shard or replicate it first, by distribute_tensor"
        )
    if isinstance(start, TensorLike) and start.shape != end.shape:
        raise LayoutError(
            f"backward: a gradient of shape {tuple(start.shape)} is given for a tensor of shape "
            f"{tuple(end.shape)}"
        )
    if start is None and end.shape.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    complete = end.redistribute(end.layout.spec.without_partial())
    if isinstance(start, Differentiable):
        return list(zip(complete._nodes(), complete._as_gradients(start), strict=True))
    return [(node, torch.ones_like(node) if start is None else start) for node in complete._nodes()]


@contextmanager
def _of_plain_tensors() -> Iterator[None]:
    """Let torch's DTensor treat plain tensors in a backward pass as replicated."""
    if not dist.is_initialized():
        yield
        return
    from torch.distributed.tensor.experimental import implicit_replication

    with implicit_replication():
        yield
