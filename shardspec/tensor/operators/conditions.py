"""Replaces arguments with which torch's DTensor computes wrong results.

The decisions depend on layouts alone, so that all ranks agree.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, _redistribute

from shardspec.layout.layout import Layout


class LayoutFacts(NamedTuple):
    """The properties of a layout that torch's operators get wrong."""

    is_sharded: bool
    is_pending: bool
    has_empty_shards: bool
    """Whether a tensor that is not empty has empty shards."""
    is_uneven_over_axes: bool
    """Whether several axes split a dim together into shards of different sizes."""

    @property
    def is_whole(self) -> bool:
        """Whether every device has the tensor."""
        return not self.is_sharded and not self.is_pending


@lru_cache(maxsize=4096)
def layout_facts(layout: Layout) -> LayoutFacts:
    """Return the properties of a layout that torch's operators get wrong."""
    spec, sizes, mesh = layout.spec, layout.global_shape, layout.mesh
    local_sizes = [
        {layout.local_shape(device)[dim] for device in mesh.group(mesh.ids[0], cut.axes)}
        for dim, cut in enumerate(spec.dim_specs)
    ]
    return LayoutFacts(
        bool(spec.axes),
        bool(spec.partials),
        any(0 in of_dim and size > 0 for of_dim, size in zip(local_sizes, sizes, strict=True)),
        any(
            len(cut.axes) > 1 and size % prod(mesh.shape[int(axis)] for axis in cut.axes)
            for size, cut in zip(sizes, spec.dim_specs, strict=True)
        ),
    )


def never_merge_gathers(mesh: TorchMesh) -> None:
    """Stop torch, in this process, from gathering over several axes of a mesh at once.

    If a program has flattened axes of the mesh, torch confuses uneven shards with those of the
    flattened axis, which have other sizes. This stays in effect, because gradients may be computed
    at any later time.
    """
    if mesh._get_root_mesh()._flatten_mapping:
        _redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION = True


_WEIGHTED: Final = ("cross_entropy", "nll_loss", "ctc_loss")
"""Losses whose mean is not the mean of their elements."""


def is_mean(name: str, kwargs: Mapping[str, object]) -> bool:
    """Return whether a function returns the mean of a loss, which torch computes per shard."""
    legacy = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
    return kwargs.get("reduction") == "mean" and not legacy and name not in _WEIGHTED


_LINEAR: Final = re.compile("[ir]?(add|sub|mul|truediv)|subtract|multiply|div|divide|true_divide")
"""Functions that map a pending sum to a pending sum, without or with another tensor."""
_NUMBERS: Final = (torch.int64, torch.float64, torch.complex128, torch.bool)
"""The dtypes that torch gives to Python's numbers."""


def arguments_for(
    name: str, leaves: Sequence[object], layouts: Sequence[Layout], written: Sequence[object]
) -> list[TorchDTensor]:
    """Return the DTensors among a function's arguments, redistributed where torch needs that.

    torch caches layout propagation by arguments, and confuses scalar tensors with Python's numbers
    there. So reductions pending beside such a tensor are finished, unless the function is linear or
    writes to it. So are those in the arguments of `addcdiv`: its backward pass fills a pending sum
    with a number.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, TorchDTensor)]
    facts = [layout_facts(layout) for layout in layouts]
    if not any(each.is_pending for each in facts) or _LINEAR.fullmatch(name):
        return tensors
    apart = {id(tensor) for tensor, each in zip(tensors, facts, strict=True) if not each.is_whole}
    if name != "addcdiv" and not any(
        isinstance(leaf, torch.Tensor)
        and leaf.dim() == 0
        and leaf.dtype in _NUMBERS
        and id(leaf) not in apart
        for leaf in leaves
    ):
        return tensors
    for place, (tensor, each) in enumerate(zip(tensors, facts, strict=True)):
        if each.is_pending and not any(tensor is other for other in written):
            whole = [Replicate()] * tensor.device_mesh.ndim
            tensors[place] = tensor.redistribute(placements=whole)
    return tensors
