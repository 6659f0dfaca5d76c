"""Torch operations on DTensors, done by torch's own DTensor; errors with a remedy where it fails.

What torch computes wrongly was found by comparing torch 2.13 with one process, over the samples of
its own tests. It is given other arguments, watched, or refused; what decides is layouts, so that
all ranks do alike.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from math import inf
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import in_our_words, is_strided, layout_of, torch_dtensor
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tensor.operators.conditions import (
    arguments_for,
    facts_of,
    is_mean,
    never_merge_gathers,
)
from shardspec.tensor.operators.tensor import TensorLike
from shardspec.tensor.operators.watch import Watch, is_alias, is_copy_of, specs_text, was_right
from shardspec.tensor.shards import check_copies

_REFUSALS: Final = (RuntimeError, ValueError, AssertionError, TypeError)
"""What torch raises where it cannot propagate a layout."""

_Function: TypeAlias = Callable[..., Any]
_Args: TypeAlias = Sequence[object]
_Kwargs: TypeAlias = Mapping[str, object]


class _Call:
    """A function of torch and the leaves of its arguments, some of them DTensors on one mesh."""

    def __init__(
        self, function: _Function, leaves: list[Any], structure: TreeSpec, mesh: DeviceMesh
    ) -> None:
        self.function, self._leaves, self._structure = function, leaves, structure
        self._mesh = mesh
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, TorchDTensor)]

    def result(self, tensors: Iterable[torch.Tensor]) -> Any:  # noqa: ANN401
        """Call the function with other tensors in place of the DTensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TorchDTensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self.function(*args, **kwargs)

    def layouts(self) -> list[Layout]:
        """Return the layout of every DTensor."""
        return [layout_of(tensor, self._mesh) for tensor in self.tensors]

    def is_possible(self, layouts: Sequence[Layout]) -> bool:
        """Try it on meta tensors of these layouts; it fails too if it reads values."""
        # With the shapes of this rank: views of shards may be of other shapes on other ranks.
        rank, tried = dist.get_rank(), []
        for given, layout in zip(self.tensors, layouts, strict=True):
            shape = layout.local_shape(rank if rank in layout.mesh else layout.mesh.ids[0])
            empty = torch.empty(shape, dtype=given.dtype, device="meta")
            tried.append(torch_dtensor(empty, layout, given.device_mesh))
        try:
            with torch.no_grad():
                self.result(tried)
        except (*_REFUSALS, IndexError, KeyError):
            return False
        return True

    def refusal(self, name: str, error: Exception) -> LayoutError | None:
        """Return the error for what torch has refused; None where layouts are not the reason."""
        given = self.layouts()
        replicated = [layout.with_spec(ShardingSpec(layout.spec.dims)) for layout in given]
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if not self.is_possible(replicated):
            if not isinstance(error, NotImplementedError):
                return None
            return LayoutError(
                f"{name}: torch {torch.__version__} has no rule for it on DTensors, on any "
                f"layout ({reason}); do it on to_global()"
            )
        if self.is_possible(given):
            return None
        specs = specs_text(str(layout.labelled_spec) for layout in given)
        return LayoutError(f"{name} is not possible on {specs}: {reason}; redistribute first")


_NORMS: Final = ("linalg_vector_norm", "norm")


def _check_gradient(name: str, args: _Args, kwargs: _Kwargs) -> None:
    """Raise `LayoutError` if the gradient of this call on DTensors would be wrong.

    That of a largest element is distributed shard by shard; where several axes split one dim, ranks
    may wait for each other.
    """
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    if name in ("amax", "amin") and len(args) < 2 and not kwargs.get("dim"):
        remedy = f"name the dims, as in {name}((0, 1))"
    elif name in _NORMS and isinstance(order, float) and abs(order) == inf:
        remedy = "use .abs().amax() or .abs().amin() with the dims named"
    else:
        return
    raise LayoutError(
        f"{name}: torch {torch.__version__} computes a wrong gradient of it on DTensors; "
        f"{remedy}, or detach its arguments"
    )


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


def apply(function: _Function, args: _Args, kwargs: _Kwargs) -> Any:  # noqa: ANN401
    """Call a torch function with DTensors among its arguments, which may be nested."""
    name = getattr(function, "__name__", str(function))
    shown = name.strip("_")
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    sharded = [leaf for leaf in leaves if isinstance(leaf, TensorLike)]
    first, mesh = sharded[0], sharded[0].layout.mesh
    out = kwargs.get("out")
    if out is not None:
        _check_out(shown, sharded, out)
    if torch.is_grad_enabled() and (_WRITES.fullmatch(name) or out is not None):
        for leaf in tree_leaves((args[:1], out)):
            if isinstance(leaf, TensorLike) and leaf.is_leaf_with_gradient():
                raise LayoutError(
                    f"{shown} would write to a leaf that requires a gradient; do it under "
                    "torch.no_grad(), or without writing in place"
                )
    for leaf in leaves:
        _check_leaf(shown, leaf, first)
    facts = [facts_of(tensor.layout) for tensor in sharded]
    if is_mean(shown, kwargs) and any(each.is_sharded for each in facts):
        return apply(function, args, {**kwargs, "reduction": "none"}).mean()
    owners = {id(tensor.to_torch()): tensor for tensor in reversed(sharded)}
    copies = [tensor.to_torch() for tensor in sharded if tensor.is_copied_part]
    if any(each.is_uneven_over_axes for each in facts):
        never_merge_gathers(first.to_torch().device_mesh)
    leaves = [_in_torch(leaf, first) for leaf in leaves]
    call = _Call(function, leaves, structure, mesh)
    written = [
        leaf.to_torch()
        for leaf in tree_leaves((args[:1] if _WRITES.fullmatch(name) else (), out))
        if isinstance(leaf, TensorLike)
    ]
    layouts = call.layouts()
    tensors = arguments_for(shown, leaves, layouts, written)
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    if tracked:
        _check_gradient(shown, args, kwargs)
    strided = any(map(is_strided, call.tensors))
    earlier = was_right(function, tracked, *kwargs, *map(_key, leaves), *layouts)
    watch = Watch(shown, copies) if strided or copies or not earlier.found else None
    try:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())  # of plain tensors that torch makes
            if first.to_torch().device_mesh.device_type == "cpu":
                if name in _ATTENTION:
                    # The fused kernel for the CPU has no rule, but its matrix products have.
                    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                if _draws(name, args, kwargs):
                    stack.enter_context(_same_numbers(first, kwargs.get("generator")))
            if watch is not None:
                stack.enter_context(watch)
            result = call.result(tensors)
        earlier.found = watch is None or not watch.mended
        if tracked and written:
            _keep_layout_of_gradient(written)
    except ShardSpecError:
        lost = watch is not None and watch.lost
        if not lost or copies or function is not torch.Tensor.__setitem__:
            raise
        _set_in_whole(call)
        return None
    except _REFUSALS as error:
        found = call.refusal(shown, error)
        if found is None:
            raise
        raise found from None

    numbers = any(isinstance(leaf, int | float | complex) for leaf in tree_leaves(result))
    if numbers and not call.is_possible(call.layouts()):
        # It reads values. torch would read this rank's shard, or its addend.
        return call.result(tensor.full_tensor().detach() for tensor in call.tensors)

    def ours(leaf: object) -> object:
        if not isinstance(leaf, TorchDTensor):
            return leaf
        if id(leaf) in owners:
            owners[id(leaf)].follow(leaf)
            _check_shard(shown, owners[id(leaf)])
            return owners[id(leaf)]
        try:
            spoken = in_our_words(leaf)
            wrapped = first._wrap(spoken)
        except (RuntimeError, IndexError) as error:
            specs = specs_text(str(layout.labelled_spec) for layout in call.layouts())
            raise LayoutError(
                f"{shown}: torch {torch.__version__} cannot finish the sum that it leaves pending "
                f"on {specs} ({error}); redistribute first"
            ) from None
        _check_shard(shown, wrapped)
        wrapped.is_copied_part = (
            (watch is not None and watch.is_copy(leaf))
            or any(is_copy_of(leaf, tensor) for tensor in call.tensors)
            or any(is_alias(leaf, copy) for copy in copies)
            or (spoken is not leaf and any(is_alias(leaf, t) for t in call.tensors))
        )
        return wrapped

    return tree_map(ours, result)


def _in_torch(leaf: Any, first: TensorLike) -> Any:  # noqa: ANN401
    """Return an argument as torch's DTensor where it is one of ours or has a gradient."""
    if isinstance(leaf, TensorLike):
        return leaf.to_torch()
    if isinstance(leaf, TorchDTensor) or not isinstance(leaf, torch.Tensor):
        return leaf
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        return leaf
    # A plain tensor without dims: torch would hand it a DTensor as its gradient.
    layout = Layout(first.layout.mesh, ShardingSpec(0), (), leaf.dtype)
    return torch_dtensor(leaf, layout, first.to_torch().device_mesh)


def _key(leaf: object) -> object:
    """Return what of an argument decides which operations a function does, besides layouts."""
    if isinstance(leaf, slice):
        return leaf.start, leaf.stop, leaf.step
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    return type(leaf) if isinstance(leaf, float | complex) or leaf.__hash__ is None else leaf


def _set_in_whole(call: _Call) -> None:
    """Set a part of a tensor whose shards the part does not share: in the whole, then in all."""
    tensor, *others = call.tensors
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    with implicit_replication():
        call.result([whole, *others])
        _keep_layout_of_gradient([whole])
        tensor.copy_(whole)


def _keep_layout_of_gradient(written: Sequence[TorchDTensor]) -> None:
    """Let the gradient of what was written to in part arrive in its layout.

    Autograd takes the part from it by the same views, which do not share the shards of any layout.
    """
    for tensor in written:
        base = tensor if tensor._base is None else tensor._base
        assert isinstance(base, TorchDTensor)
        if type(base.grad_fn).__name__ == "CopySlices":
            to = [Replicate() if p.is_partial() else p for p in base.placements]
            # torch leaves register_hook untyped.
            base.register_hook(partial(TorchDTensor.redistribute, placements=to))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=4096)
def _local_shape(layout: Layout, device: int) -> tuple[int, ...]:
    return layout.local_shape(device)


def _check_shard(name: str, result: TensorLike) -> None:
    """Refuse a result whose shard on this rank is not of the shape that its layout says."""
    for device in result.communicator.addressable:
        shape = tuple(result.to_torch()._local_tensor.shape)
        if shape != _local_shape(result.layout, device):
            raise LayoutError(
                f"{name}: torch {torch.__version__} made a shard of shape {shape} on rank {device} "
                f"of a tensor of layout {result.layout}; redistribute first, or do it on "
                "to_global()"
            )


def _check_out(name: str, sharded: Sequence[TensorLike], out: object) -> None:
    """Refuse to write to shards what has no DTensor among its arguments, as `torch.eye`."""
    into = [leaf for leaf in tree_leaves(out) if isinstance(leaf, TensorLike)]
    if len(into) == len(sharded) and any(not facts_of(t.layout).is_whole for t in into):
        raise LayoutError(
            f"{name}: torch makes each shard of out= as if it were the whole tensor of layout "
            f"{into[0].layout}; make a plain tensor, and shard it by distribute_tensor"
        )


def _check_leaf(name: str, leaf: object, first: TensorLike) -> None:
    """Refuse tensors on other meshes, and plain ones with dims, which may differ by rank."""
    mesh, other = first.layout.mesh, ""
    if isinstance(leaf, TensorLike):
        if leaf.layout.mesh != mesh:
            other = f"on mesh {leaf.layout.mesh} of ids {leaf.layout.mesh.ids}"
        # torch would take others as strided shards, for which most of its rules fail.
        leaf.layout.spec.check_plain("torch's operators")
    elif isinstance(leaf, TorchDTensor):
        if leaf.device_mesh != first.to_torch().device_mesh:
            other = f"is a torch DTensor on {leaf.device_mesh}"
    elif isinstance(leaf, torch.Tensor):
        if leaf.dim() > 0:
            raise LayoutError(
                f"{name}: a plain tensor of shape {tuple(leaf.shape)} is mixed with a DTensor; "
                "shard or replicate it first, by distribute_tensor"
            )
        copies = dict.fromkeys(first.communicator.addressable, leaf)
        check_copies(first.communicator, copies, f"{name}: a plain tensor without dims")
    if other:
        raise LayoutError(
            f"{name}: one tensor is on mesh {mesh} of ids {mesh.ids}, another {other}; bring them "
            "to one mesh first, by redistribute(device_mesh=)"
        )


def _draws(name: str, args: _Args, kwargs: _Kwargs) -> bool:
    if name == "scaled_dot_product_attention":
        place = args[_DROPOUT_PLACE] if len(args) > _DROPOUT_PLACE else 0
        return bool(kwargs.get("dropout_p", place))
    return bool(_RANDOM.fullmatch(name)) and kwargs.get("training") is not False


@contextmanager
def _same_numbers(tensor: TensorLike, generator: object) -> Iterator[None]:
    """Let devices that hold the same box draw the same numbers, and others draw others.

    torch's DTensor does so on CUDA only. The seed is drawn on the first device of the mesh, from
    `generator` or torch's own for the CPU, which are afterwards where one number more leaves them,
    on every rank. The numbers depend on mesh and spec, unlike those of `shardspec.rand`.
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
