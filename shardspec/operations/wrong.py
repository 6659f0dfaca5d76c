"""Gradients that torch's DTensor gets wrong without a word: refused, so that nobody trains on them.

Found by comparing torch 2.13 with one process, over layouts of a mesh of two axes. The gradient of
a mean loss is divided by the size of the shard. That of a largest element is shared out shard by
shard, and where several axes cut one dim, ranks may wait for each other.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import torch

from shardspec.errors import LayoutError

__all__ = ["check_gradient"]

_MEANS: Final = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")
_EXTREMES: Final = ("amax", "amin")
_NORMS: Final = ("linalg_vector_norm", "norm")
_SUSPECT: Final = frozenset([*_MEANS, *_EXTREMES, *_NORMS])


def check_gradient(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Raise `LayoutError` if the gradient of this call on cut tensors would be wrong.

    Parameters
    ----------
    name, args, kwargs
        A function of torch and what it is called with, where a gradient is wanted.

    Examples
    --------
    >>> check_gradient("amax", (torch.ones(2, 2), 0), {})
    """
    if name not in _SUSPECT:
        return
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
            f"{name}: torch {torch.__version__} computes a wrong gradient of it on cut tensors; "
            f"{remedy}, or detach what it takes"
        )
