"""Keeps conversions and operators out of the graphs that `torch.compile` makes."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_REASON: Final = (
    "shardspec moves shards between devices outside of graphs; compile with fullgraph=False, or "
    "only the functions that work on to_local()"
)


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that `torch.compile` runs it eagerly; ``fullgraph=True`` refuses it.

    Otherwise it might trace only a part of the function, and a different part on each rank,
    depending on what ran there before.
    """
    disabled: list[Callable[P, T]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # its import takes a second
            return function(*args, **kwargs)
        import torch

        if torch._C._dynamo.eval_frame.get_eval_frame_callback() is None:  # nothing is compiled
            return function(*args, **kwargs)
        if not disabled:
            # torch leaves this function untyped.
            made = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
            disabled.append(made)
        return disabled[0](*args, **kwargs)

    # torch.compiler.disable marks functions so, but imports the compiler.
    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_REASON)
    return call
