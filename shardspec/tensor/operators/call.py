"""Defines `Call`: a torch function and its arguments, with DTensors among them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardspec.layout.layout import Layout
from shardspec.tensor.operators.rules import Named
from shardspec.tensor.operators.tensor import TensorLike

REFUSALS: Final = (
    *(RuntimeError, ValueError, AssertionError, TypeError, IndexError, KeyError),
    AttributeError,
)
"""The errors that torch raises if it cannot propagate a layout."""


@dataclass(frozen=True, slots=True)
class Call:
    """A torch function and its arguments, with DTensors among their leaves."""

    function: Callable[..., Any]
    names: Named
    leaves: Sequence[Any]
    structure: TreeSpec | None
    """The structure of the leaves; None if they are the arguments by position."""
    arguments: tuple[Sequence[Any], Mapping[str, Any]]
    """The arguments by position and by keyword."""
    tensors: Sequence[TensorLike]
    """The DTensors among the arguments, each once."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        names: Named,
        leaves: Sequence[Any],
        structure: TreeSpec | None,
    ) -> "Call":
        """Return the call of a function; `leaves` are the arguments, or what is nested in them."""
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, TensorLike)}
        arguments = _arguments(leaves, structure)
        return cls(function, names, leaves, structure, arguments, list(tensors.values()))

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layout of each DTensor among the arguments."""
        return tuple(tensor.layout for tensor in self.tensors)

    @property
    def is_tracked(self) -> bool:
        """True if autograd records the call, as some argument requires a gradient."""
        return torch.is_grad_enabled() and any(
            leaf.requires_grad for leaf in self.leaves if isinstance(leaf, torch.Tensor)
        )

    @property
    def may_write(self) -> bool:
        """True for `add_`, or with ``inplace=True``: the function may write to an argument."""
        return (
            self.names.writes
            or any(leaf is True for leaf in self.leaves)
            or "out" in self.arguments[1]
        )

    def on(self, replaced: Mapping[int, Any]) -> Any:  # noqa: ANN401
        """Call the function with `replaced[id(tensor)]` in place of each DTensor."""
        leaves = [replaced.get(id(leaf), leaf) for leaf in self.leaves]
        args, kwargs = _arguments(leaves, self.structure)
        return self.function(*args, **kwargs)


def leaves_of(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], TreeSpec | None]:
    """Flatten nested arguments; return leaves and structure (None if nothing was nested)."""
    if not kwargs and not any(isinstance(arg, tuple | list | dict) for arg in args):
        return list(args), None  # in a tenth of the time
    return tree_flatten((tuple(args), dict(kwargs)))


def _arguments(
    leaves: Sequence[Any], structure: TreeSpec | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if structure is None:
        return leaves, {}
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs
