"""One torch operation on DTensors, done by torch's own DTensor."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import in_our_words, is_strided
from shardspec.operations.refusals import (
    GOING_BACK,
    REFUSALS,
    Call,
    ExplainedRefusals,
    RefusedStridedViews,
    check_gradient,
    refusal,
)
from shardspec.operations.tensor import TensorLike
from shardspec.shards import check_copies

_WRITES: Final = re.compile(
    "__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|.*[^_]_"
)
"""Names of functions that write to their first argument."""
_ATTENTION: Final = ("scaled_dot_product_attention", "multi_head_attention_forward")
_DROPOUT_PLACE: Final = 4
"""Where the probability is among the arguments of attention."""
_RANDOM: Final = re.compile(
    "((native|alpha|feature|feature_alpha)_)?dropout_?|dropout[123]d|(rand|randn|randint)_like|"
    "(bernoulli|rrelu)_?|(normal|uniform|exponential|random|cauchy|log_normal|geometric)_|"
    "multinomial|poisson|gumbel_softmax"
)
"""Names of functions that draw random numbers, besides attention with dropout."""


def apply(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:  # noqa: ANN401
    """Call a torch function with DTensors among its arguments, which may be nested.

    Raises `LayoutError` if the tensors are on different meshes, one of them is a plain tensor with
    dims, or torch has no rule for their layouts; `CommunicatorError` if there is no job.
    """
    name = getattr(function, "__name__", str(function))
    shown = name.strip("_")
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    sharded = [leaf for leaf in leaves if isinstance(leaf, TensorLike)]
    first, mesh = sharded[0], sharded[0].layout.mesh
    out = kwargs.get("out")
    if torch.is_grad_enabled() and (_WRITES.fullmatch(name) or out is not None):
        for leaf in tree_leaves((args[:1], out)):
            if isinstance(leaf, TensorLike) and leaf.is_leaf_with_gradient():
                raise LayoutError(
                    f"{shown} would write to a leaf that requires a gradient; do it under "
                    "torch.no_grad(), or without writing in place"
                )
    for leaf in leaves:
        _check_mesh(shown, leaf, first)
    for tensor in sharded:
        # torch would take them as strided shards, for which most of its rules fail.
        tensor.layout.spec.check_plain("torch's operators")
    known = {id(tensor): tensor.to_torch() for tensor in sharded}
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in known.values()):
        check_gradient(shown, args, kwargs)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, TorchDTensor):
            copies = dict.fromkeys(first.communicator.addressable, leaf)
            check_copies(first.communicator, copies, f"{shown}: a plain tensor without dims")

    torch_leaves = [known.get(id(leaf), leaf) for leaf in leaves]
    torch_args, torch_kwargs = tree_unflatten(torch_leaves, structure)
    try:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())  # of plain tensors that torch makes
            if known[id(first)].device_mesh.device_type == "cpu":
                if name in _ATTENTION:
                    # The fused kernel for the CPU has no rule, but its matrix products have.
                    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                if _draws(name, torch_args, torch_kwargs):
                    stack.enter_context(_same_numbers(first, kwargs.get("generator")))
            if function in GOING_BACK:
                # torch leaves the constructor untyped.
                stack.enter_context(ExplainedRefusals())  # type: ignore[no-untyped-call]
            if any(map(is_strided, known.values())):
                stack.enter_context(RefusedStridedViews(shown))
            result = function(*torch_args, **torch_kwargs)
    except ShardSpecError:
        raise
    except REFUSALS as error:
        found = refusal(shown, Call(function, torch_args, torch_kwargs, mesh), error)
        if found is None:
            raise
        raise found from None

    def ours(leaf: object) -> object:
        if not isinstance(leaf, TorchDTensor):
            return leaf
        for tensor in sharded:
            if known[id(tensor)] is leaf:
                tensor.follow(leaf)
                return tensor
        return first._wrap(in_our_words(leaf))

    if any(isinstance(leaf, int | float | complex) for leaf in tree_leaves(result)):
        call = Call(function, torch_args, torch_kwargs, mesh)
        if not call.is_possible(call.layouts):
            # It reads values. torch would read this rank's shard, or its addend.
            global_args, global_kwargs = tree_map(_gathered, (torch_args, torch_kwargs))
            return function(*global_args, **global_kwargs)
    return tree_map(ours, result)


def _gathered(leaf: object) -> object:
    return leaf.full_tensor().detach() if isinstance(leaf, TorchDTensor) else leaf


def _check_mesh(name: str, leaf: object, first: TensorLike) -> None:
    """Refuse tensors on other meshes, and plain ones with dims, which may differ by rank."""
    mesh, other = first.layout.mesh, ""
    if isinstance(leaf, TensorLike) and leaf.layout.mesh != mesh:
        other = f"on mesh {leaf.layout.mesh} of ids {leaf.layout.mesh.ids}"
    elif isinstance(leaf, TorchDTensor) and leaf.device_mesh != first.to_torch().device_mesh:
        other = f"is a torch DTensor on {leaf.device_mesh}"
    elif isinstance(leaf, torch.Tensor) and not isinstance(leaf, TorchDTensor) and leaf.dim() > 0:
        raise LayoutError(
            f"{name}: a plain tensor of shape {tuple(leaf.shape)} is mixed with a DTensor; shard "
            "or replicate it first, by distribute_tensor"
        )
    if other:
        raise LayoutError(
            f"{name}: one tensor is on mesh {mesh} of ids {mesh.ids}, another {other}; bring them "
            "to one mesh first, by redistribute(device_mesh=)"
        )


def _draws(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    if name == "scaled_dot_product_attention":
        place = args[_DROPOUT_PLACE] if len(args) > _DROPOUT_PLACE else 0
        return bool(kwargs.get("dropout_p", place))
    return bool(_RANDOM.fullmatch(name)) and kwargs.get("training") is not False


@contextmanager
def _same_numbers(tensor: TensorLike, generator: object) -> Iterator[None]:
    """Let devices that hold the same box draw the same numbers, and others draw others.

    torch's DTensor does so on CUDA only. The seed is drawn on the first device of the mesh, from
    `generator` or torch's own for the CPU, which are afterwards where one number more leaves them,
    on every rank. The numbers depend on mesh and spec, unlike those of `shardspec.rand`. Every rank
    of the mesh takes part.
    """
    source = generator if isinstance(generator, torch.Generator) else torch.default_generator
    own = int(torch.randint(2**48, (), generator=source))
    mesh, here = tensor.layout.mesh, tensor.communicator.addressable
    seeds = tensor.communicator.gather(dict.fromkeys(here, own))
    # torch's DTensor draws from its own generator whatever it is given.
    after = {each: each.get_state() for each in (source, torch.default_generator)}
    if here:
        place, coordinates = 0, mesh.coordinates(here[0])
        for axis in (int(a) for dim_spec in tensor.layout.spec.dim_specs for a in dim_spec.axes):
            place = place * mesh.shape[axis] + coordinates[axis]
        for each in after:
            each.manual_seed(seeds[mesh.ids[0]] + place)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
            yield
    finally:
        for each, state in after.items():
            each.set_state(state)
