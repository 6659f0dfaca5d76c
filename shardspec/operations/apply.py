"""One torch operation on DTensors, done by torch's own DTensor."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardspec.comm.communicator import Communicator
from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import in_our_words, is_strided
from shardspec.layout.layout import Layout
from shardspec.mesh import DeviceMesh
from shardspec.operations.refusals import (
    GOING_BACK,
    REFUSALS,
    Call,
    ExplainedRefusals,
    check_gradient,
    refusal,
    refuse_strided_views,
)
from shardspec.shards import check_copies


class Sharded(Protocol):
    """A DTensor, as operations see it."""

    layout: Layout
    communicator: Communicator

    def to_torch(self) -> TorchDTensor:
        """Return it as torch's, the same object as long as nothing has changed."""

    def follow(self, tensor: TorchDTensor) -> None:
        """Take note that torch's tensor may have been written to."""

    def is_leaf_with_gradient(self) -> bool:
        """Whether gradients are collected at it."""


T = TypeVar("T", bound=Sharded)


def apply(
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    kind: type[T],
    wrap: Callable[[TorchDTensor, T], T],
) -> Any:  # noqa: ANN401
    """Call a torch function, DTensors of class `kind` among its arguments, which may be nested.

    `wrap` makes one of torch's DTensor, on the mesh of another one.

    Raises
    ------
    LayoutError
        If the tensors are on different meshes, one of them is a plain tensor with dims, or torch
        has no rule for their layouts; then the message says which it would take.
    CommunicatorError
        If there is no job.
    """
    name = getattr(function, "__name__", str(function)).strip("_")
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    sharded: list[T] = [leaf for leaf in leaves if isinstance(leaf, kind)]
    first = sharded[0]
    mesh = _one_mesh(name, sharded)
    if torch.is_grad_enabled() and _writes(function, kwargs):
        _check_no_leaf(name, (args[:1], kwargs.get("out")), kind)
    for tensor in sharded:
        # torch would take them as strided shards, of which most of its rules know nothing.
        tensor.layout.spec.check_plain("torch's operators")
    known = {id(tensor): tensor.to_torch() for tensor in sharded}
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in known.values()):
        check_gradient(name, args, kwargs)
    torch_mesh = known[id(first)].device_mesh
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            _check_plain(name, leaf, first, torch_mesh)

    in_torch = [known[id(leaf)] if isinstance(leaf, kind) else leaf for leaf in leaves]
    torch_args, torch_kwargs = tree_unflatten(in_torch, structure)
    try:
        with ExitStack() as stack:
            _enter_rules(stack, function, torch_args, torch_kwargs, first)
            if any(map(is_strided, known.values())):
                stack.enter_context(refuse_strided_views(name))
            result = function(*torch_args, **torch_kwargs)
    except ShardSpecError:
        raise
    except REFUSALS as error:
        found = refusal(name, Call.of(function, torch_args, torch_kwargs, mesh), error)
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
        return wrap(in_our_words(leaf), first)

    if isinstance(result, TorchDTensor):
        return ours(result)
    if any(isinstance(leaf, int | float | complex) for leaf in tree_leaves(result)):
        call = Call.of(function, torch_args, torch_kwargs, mesh)
        if not call.is_possible(call.layouts):
            # It reads values. torch would read this rank's shard, or its addend.
            global_args, global_kwargs = tree_map(_gathered, (torch_args, torch_kwargs))
            return function(*global_args, **global_kwargs)
    return tree_map(ours, result)


def _gathered(leaf: object) -> object:
    return leaf.full_tensor().detach() if isinstance(leaf, TorchDTensor) else leaf


def _enter_rules(
    stack: ExitStack,
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    first: Sharded,
) -> None:
    """Let torch make do with the rules that it has.

    Plain tensors that torch makes on the way are replicated. Of its kernels for attention, the one
    for the CPU has no rule, but the products that it consists of have.
    """
    stack.enter_context(implicit_replication())
    if first.to_torch().device_mesh.device_type == "cpu":
        if getattr(function, "__name__", "") in _WITH_ATTENTION:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if _draws(function, args, kwargs):
            generator = kwargs.get("generator")
            assert generator is None or isinstance(generator, torch.Generator)
            stack.enter_context(_same_numbers(first.layout, first.communicator, generator))
    if function in GOING_BACK:
        stack.enter_context(ExplainedRefusals())


_WITH_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")


def _one_mesh(name: str, tensors: Sequence[Sharded]) -> DeviceMesh:
    mesh = tensors[0].layout.mesh
    for tensor in tensors:
        other = tensor.layout.mesh
        if other is not mesh and other != mesh:
            raise LayoutError(
                f"{name}: one tensor is on mesh {mesh} of ids {mesh.ids}, another on mesh {other} "
                f"of ids {other.ids}; bring them to one mesh first, by redistribute(device_mesh=)"
            )
    return mesh


def _check_plain(name: str, leaf: torch.Tensor, first: Sharded, torch_mesh: TorchMesh) -> None:
    """Refuse plain tensors with dims: nobody has said that all ranks hold the same."""
    if isinstance(leaf, TorchDTensor):
        if leaf.device_mesh != torch_mesh:
            mesh = first.layout.mesh
            raise LayoutError(
                f"{name}: one tensor is on mesh {mesh} of ids {mesh.ids}, another is a torch "
                f"DTensor on {leaf.device_mesh}; bring them to one mesh first, by redistribute"
            )
    elif leaf.dim() > 0:
        raise LayoutError(
            f"{name}: a plain tensor of shape {tuple(leaf.shape)} is mixed with a DTensor; shard "
            "or replicate it first, by distribute_tensor"
        )
    else:
        copies = dict.fromkeys(first.communicator.addressable, leaf)
        check_copies(first.communicator, copies, f"{name}: a plain tensor without dims")


def _writes(function: Callable[..., Any], kwargs: Mapping[str, object]) -> bool:
    """Whether an operation writes to its first argument or to `out`, by torch's way of naming."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", *_IN_PLACE) or kwargs.get("out") is not None


_IN_PLACE = tuple(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


def _check_no_leaf(name: str, written: object, kind: type[Sharded]) -> None:
    for leaf in tree_leaves(written):
        if isinstance(leaf, kind) and leaf.is_leaf_with_gradient():
            raise LayoutError(
                f"{name} would write to a leaf that requires a gradient; do it under "
                "torch.no_grad(), or without writing in place"
            )


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


def _draws(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    """Whether a call draws random numbers, by torch's way of naming."""
    name = getattr(function, "__name__", "")
    if name == "scaled_dot_product_attention":
        place = args[_DROPOUT_PLACE] if len(args) > _DROPOUT_PLACE else 0
        return bool(kwargs.get("dropout_p", place))
    return name in _RANDOM and kwargs.get("training") is not False


@contextmanager
def _same_numbers(
    layout: Layout, communicator: Communicator, generator: torch.Generator | None = None
) -> Iterator[None]:
    """Let devices that hold the same box draw the same numbers, and others draw others.

    On CUDA torch's DTensor keeps the generators of all ranks in step. On the CPU it does not:
    copies would draw different numbers, or different boxes the same. The seed is drawn on the first
    device of the mesh, from `generator` or torch's own for the CPU, which are afterwards where one
    number more leaves them, on every rank. The numbers depend on mesh and spec, unlike those of
    `shardspec.rand`. Every rank of the tensor's mesh takes part.
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
