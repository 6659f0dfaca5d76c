"""Operations that draw random numbers, such as dropout: copies of a box draw the same.

On CUDA torch's DTensor keeps the generators of all ranks in step. On the CPU it does not: devices
that hold the same box would draw different numbers, or those of different boxes the same.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from shardspec.comm.communicator import Communicator
from shardspec.layout.layout import Layout

__all__ = ["draws", "same_numbers"]

_RANDOM: Final = frozenset(
    [
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"),
        *("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_dropout"),
        *("bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "cauchy_"),
        *("log_normal_", "geometric_", "rand_like", "randn_like", "randint_like", "multinomial"),
        *("poisson", "rrelu", "rrelu_", "gumbel_softmax"),
    ]
)
_DROPOUT_PLACE: Final = 4
"""Where the probability stands among the arguments of attention."""


def draws(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    """Whether a call draws random numbers, by torch's way of naming."""
    name = getattr(function, "__name__", "")
    if name == "scaled_dot_product_attention":
        place = args[_DROPOUT_PLACE] if len(args) > _DROPOUT_PLACE else 0
        return bool(kwargs.get("dropout_p", place))
    return name in _RANDOM and kwargs.get("training") is not False


@contextmanager
def same_numbers(
    layout: Layout, communicator: Communicator, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Let devices that hold the same box draw the same numbers, and others draw others.

    The seed is drawn on the first device of the mesh, from `generator` or torch's own for the CPU,
    which are afterwards where one number more leaves them, on every rank. The numbers depend on
    mesh and spec, unlike those of `shardspec.rand`. Every rank of the tensor's mesh takes part.
    """
    source = torch.default_generator if generator is None else generator
    own = int(torch.randint(2**48, (), generator=source))
    here = communicator.addressable
    seeds = communicator.gather(dict.fromkeys(here, own))
    # torch's DTensor draws from its own generator whatever it is given.
    generators = {source, torch.default_generator}
    after = {each: each.get_state() for each in generators}
    if here:
        mesh, place = layout.mesh, 0
        coordinates = mesh.coordinates(here[0])
        for dim_spec in layout.spec.dim_specs:
            for axis in map(int, dim_spec.axes):
                place = place * mesh.shape[axis] + coordinates[axis]
        for each in generators:
            each.manual_seed(seeds[mesh.ids[0]] + place)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
            yield
    finally:
        for each, state in after.items():
            each.set_state(state)
