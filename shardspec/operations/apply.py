"""Torch operations on DTensors, done by torch's own DTensor; errors with a remedy where it fails.

Where torch refuses layouts, others are tried on meta tensors, which only propagates shapes and
layouts. What torch computes wrongly was found by comparing torch 2.13 with one process, over
layouts of a mesh of two axes.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, combinations, islice, product
from math import inf
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import in_our_words, is_strided, layout_of, torch_dtensor
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.operations.tensor import TensorLike
from shardspec.shards import check_copies

_REFUSALS: Final = (RuntimeError, ValueError, AssertionError, TypeError)
"""What torch raises where it cannot propagate a layout."""

_MOST_TRIALS: Final = 400
_SHOWN: Final = 4

_Function: TypeAlias = Callable[..., Any]
_Args: TypeAlias = Sequence[object]
_Kwargs: TypeAlias = Mapping[str, object]


class _Call:
    """A function of torch and the leaves of its arguments, some of them DTensors on one mesh."""

    def __init__(
        self, function: _Function, leaves: list[Any], structure: TreeSpec, mesh: DeviceMesh
    ) -> None:
        self._function, self._leaves, self._structure = function, leaves, structure
        self._mesh = mesh
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, TorchDTensor)]

    def result(self, tensors: Iterable[torch.Tensor]) -> Any:  # noqa: ANN401
        """Call the function with other tensors in place of the DTensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TorchDTensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._function(*args, **kwargs)

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
        reason = str(error).strip().partition("\n")[0].rstrip(".") + "."
        if not self.is_possible(replicated):
            if not isinstance(error, NotImplementedError):
                return None
            return LayoutError(
                f"{name}: torch {torch.__version__} has no rule for it on DTensors, on any "
                f"layout ({reason}); do it on to_global()"
            )
        if self.is_possible(given):
            return None
        accepted = filter(self.is_possible, islice(_nearest(given), _MOST_TRIALS))
        found: list[Sequence[Layout]] = [*islice(accepted, _SHOWN)] or [replicated]
        return LayoutError(
            f"{name} is not possible on {_text(given)}: {reason} It is on "
            f"{', '.join(map(_text, found))}; redistribute first"
        )


def _nearest(given: Sequence[Layout]) -> Iterator[tuple[Layout, ...]]:
    """Yield combinations of layouts, those that change the fewest axes first."""
    axes = [(place, axis) for place, one in enumerate(given) for axis in range(one.mesh.ndim)]
    seen = {tuple(given)}
    for changed in chain.from_iterable(combinations(axes, n + 1) for n in range(len(axes))):
        for dims in product(*((None, *range(given[place].spec.dims)) for place, _ in changed)):
            layouts = list(given)
            for (place, axis), dim in zip(changed, dims, strict=True):
                layouts[place] = _moved(layouts[place], axis, dim)
            if tuple(layouts) not in seen:
                seen.add(tuple(layouts))
                yield tuple(layouts)


def _moved(layout: Layout, axis: int, dim: int | None) -> Layout:
    """Return the layout where an axis shards another dim or none; the axes of each dim ascend."""
    spec, by_dim = layout.spec.without_partial([axis]), {}
    for d, cut in enumerate(spec.dim_specs):
        by_dim[d] = sorted({*cut.axes, axis} if d == dim else {*cut.axes} - {axis}, key=int)
    return layout.with_spec(ShardingSpec(spec.dims, by_dim, partial=spec.partial))


def _text(layouts: Sequence[Layout]) -> str:
    specs = [str(layout.labelled_spec) for layout in layouts]
    return specs[0] if len(specs) == 1 else f"({', '.join(specs)})"


# torch leaves the methods of TorchDispatchMode untyped.
class ExplainedRefusals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where torch refuses an operation on DTensors, say which layouts it would take.

    ``backward()`` of a `DTensor` does so by itself. Where the loss is a plain tensor, made by
    `DTensor.to_local` or `DTensor.to_global`, call it in this context, as in ``with
    ExplainedRefusals(): loss.to_global().backward()``. Plain tensors that torch makes on the way
    are taken to be replicated. A LayoutError replaces torch's error if other layouts are possible.
    """

    def __torch_dispatch__(
        self, func: _Function, _types: object, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> object:
        """Call the operation; explain the error if it is refused."""
        kwargs, found = kwargs or {}, None
        try:
            with implicit_replication():
                return func(*args, **kwargs)
        except ShardSpecError:
            raise
        except _REFUSALS as error:
            leaves, structure = tree_flatten((args, kwargs))
            meshes = {leaf.device_mesh for leaf in leaves if isinstance(leaf, TorchDTensor)}
            # Where no spec expresses the layout, torch's own error has to do.
            with suppress(ShardSpecError):
                if len(meshes) == 1:
                    call = _Call(func, leaves, structure, DeviceMesh.from_torch(meshes.pop()))
                    name = str(func).removeprefix("aten.").split(".")[0]
                    found = call.refusal(f"{name} on the way back", error)
            if found is None:
                raise
            raise found from None


_VIEWS: Final = (
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
)


class _RefusedStridedViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse views of tensors that torch has as strided shards, as of S10, in a named function.

    Where a dim after the first is sharded in descending order of axes, torch flattens it in another
    order than the tensor's, inside matrix products too. Sizes do not matter here, so that all ranks
    refuse alike.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._name = name

    def __torch_dispatch__(
        self, func: _Function, _types: object, args: _Args = (), kwargs: _Kwargs | None = None
    ) -> object:
        """Call the operation unless it is such a view."""
        if func in _VIEWS and isinstance(args[0], TorchDTensor) and is_strided(args[0]):
            raise LayoutError(
                f"{self._name}: it takes a view of a tensor of shape {tuple(args[0].shape)} whose "
                "axes split a dim in descending order, as S10 does, and torch mixes up its parts; "
                "redistribute to ascending order first, as to S01"
            )
        return func(*args, **(kwargs or {}))


_MEANS: Final = ("binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss")
_NORMS: Final = ("linalg_vector_norm", "norm")


def _check_gradient(name: str, args: _Args, kwargs: _Kwargs) -> None:
    """Raise `LayoutError` if the gradient of this call on DTensors would be wrong.

    The gradient of a mean loss is divided by the size of the shard. That of a largest element is
    distributed shard by shard; where several axes split one dim, ranks may wait for each other.
    """
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    if name in _MEANS and kwargs.get("reduction", "mean") == "mean":
        remedy = "take .mean() of its result with reduction='none'"
    elif name in ("amax", "amin") and len(args) < 2 and not kwargs.get("dim"):
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
    if torch.is_grad_enabled() and (_WRITES.fullmatch(name) or out is not None):
        for leaf in tree_leaves((args[:1], out)):
            if isinstance(leaf, TensorLike) and leaf.is_leaf_with_gradient():
                raise LayoutError(
                    f"{shown} would write to a leaf that requires a gradient; do it under "
                    "torch.no_grad(), or without writing in place"
                )
    for leaf in leaves:
        _check_leaf(shown, leaf, first)
    owners = {id(tensor.to_torch()): tensor for tensor in reversed(sharded)}
    leaves = [_in_torch(leaf, first) for leaf in leaves]
    call = _Call(function, leaves, structure, mesh)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors):
        _check_gradient(shown, args, kwargs)
    try:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())  # of plain tensors that torch makes
            if first.to_torch().device_mesh.device_type == "cpu":
                if name in _ATTENTION:
                    # The fused kernel for the CPU has no rule, but its matrix products have.
                    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                if _draws(name, args, kwargs):
                    stack.enter_context(_same_numbers(first, kwargs.get("generator")))
            if any(map(is_strided, call.tensors)):
                stack.enter_context(_RefusedStridedViews(shown))
            result = call.result(call.tensors)
    except ShardSpecError:
        raise
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
        if id(leaf) not in owners:
            return first._wrap(in_our_words(leaf))
        owners[id(leaf)].follow(leaf)
        return owners[id(leaf)]

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
