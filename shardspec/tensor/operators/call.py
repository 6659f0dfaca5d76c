"""Calls a torch function on torch's DTensors, and corrects or refuses what torch gets wrong.

Wrong results were identified by comparing torch 2.13 with a single process on the samples of its
own tests. Such functions get other arguments, are watched, or are refused with a remedy. The
decision depends on layouts alone, so that all ranks agree. A job and its simulation behave alike.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf, isinf
from typing import Any, Final, TypeAlias

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten

from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import in_our_words, is_strided, layout_of, torch_dtensor
from shardspec.interop.torch_parts import like_parts, parts_of, shard_memory
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.tensor.operators.conditions import arguments_for, layout_facts
from shardspec.tensor.operators.simulated import is_branch_of_rank
from shardspec.tensor.operators.tensor import TensorLike
from shardspec.tensor.operators.watch import Watch, is_alias, is_copy_of, specs_text
from shardspec.tensor.shards import shape_and_dtype

_REFUSALS: Final = (RuntimeError, ValueError, AssertionError, TypeError, IndexError)
"""The errors that torch raises if it cannot propagate a layout."""
_WRITES: Final = re.compile(
    "__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|.*[^_]_"
)
"""Names of functions that write to their first argument."""
_ATTENTION: Final = ("scaled_dot_product_attention", "multi_head_attention_forward")
_NEEDS_WHOLE: Final = "in-place operations that require placement changes are not supported"
"""Part of torch's message for an in-place operation that would have to gather its target."""
_NORMS: Final = ("linalg_vector_norm", "norm")

Function: TypeAlias = Callable[..., Any]
RandomDraws: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """A torch function and its arguments, with DTensors of ours among their leaves."""

    function: Function
    args: Sequence[object]
    kwargs: Mapping[str, object]
    leaves: Sequence[Any]
    structure: TreeSpec

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", str(self.function))

    @property
    def shown(self) -> str:
        """The function's name in errors."""
        return self.name.strip("_")

    @property
    def tensors(self) -> list[TensorLike]:
        """The DTensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorLike)]

    @property
    def writes(self) -> bool:
        """Whether the function writes to its first argument."""
        return _WRITES.fullmatch(self.name) is not None

    @property
    def sets_part(self) -> bool:
        """Whether the function sets a part of its first argument, as ``t[1] = 9`` does."""
        return self.function is torch.Tensor.__setitem__ and isinstance(self.args[0], TensorLike)

    @property
    def written(self) -> list[TensorLike]:
        """The DTensors that the function writes to: its first argument and ``out=``."""
        first = tree_leaves(self.args[:1] if self.writes else ())
        return [*(leaf for leaf in first if isinstance(leaf, TensorLike)), *self.out]

    @property
    def out(self) -> list[TensorLike]:
        """The DTensors given as ``out=``."""
        given = tree_leaves(self.kwargs.get("out"))
        return [leaf for leaf in given if isinstance(leaf, TensorLike)]


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """A DTensor that a function returned."""

    layout: Layout
    tensor: TorchDTensor
    given: TensorLike | None
    """The argument that was returned; None for a new tensor."""
    is_copied_part: bool = False
    """See `TensorLike`."""


@dataclass(slots=True)
class Earlier:
    """The experience with a function on certain layouts."""

    is_right: bool = False
    """Whether torch was correct without help, so that it need not be watched."""
    is_plain: bool = False
    """Whether it also returned one tensor in new memory, which can be taken as it is."""


def earlier_calls(
    function: Function,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    layouts: Sequence[Layout],
    *,
    tracked: bool,
) -> Earlier:
    """Return the mutable record of calls with which torch does the same, given their layouts."""
    options = [*kwargs, *map(_key, kwargs.values())]
    return _record(function, tracked, *map(_key, args), *options, *layouts)


@lru_cache(maxsize=4096)
def _record(*_call: object) -> Earlier:
    return Earlier()


class _InTorch:
    """A torch function and the leaves of its arguments, with torch's DTensors among them."""

    def __init__(self, call: Call, tensors: Mapping[int, TorchDTensor]) -> None:
        first = call.tensors[0]
        self._call, self.mesh, self.shown = call, first.layout.mesh, call.shown
        self.leaves = [tensors.get(id(leaf), leaf) for leaf in call.leaves]
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, TorchDTensor)]
        self._devices = first.communicator.addressable

    def result(self, tensors: Iterable[torch.Tensor]) -> Any:  # noqa: ANN401
        """Call the function with other tensors in place of the DTensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TorchDTensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self._call.structure)
        return self._call.function(*args, **kwargs)

    def layouts(self) -> list[Layout]:
        """Return the layout of every DTensor."""
        return [layout_of(tensor, self.mesh) for tensor in self.tensors]

    def specs(self) -> str:
        """Return the specs of all DTensors as text."""
        return specs_text(str(layout.labelled_spec) for layout in self.layouts())

    def in_whole(self) -> Any:  # noqa: ANN401
        """Call the function with the global tensors in place of the DTensors."""
        return self.result(tensor.full_tensor().detach() for tensor in self.tensors)

    def is_possible(self, layouts: Sequence[Layout]) -> bool:
        """Return whether the function works on meta tensors of these layouts.

        False as well if the function reads values.
        """
        tried = []
        for given, layout in zip(self.tensors, layouts, strict=True):
            # Views of shards may have other shapes on other ranks, so those of this rank are used.
            shapes = map(layout.local_shape, self._devices or self.mesh.ids[:1])
            empty = [torch.empty(shape, dtype=given.dtype, device="meta") for shape in shapes]
            local = like_parts(shard_memory(given), empty)
            tried.append(torch_dtensor(local, layout, given.device_mesh))
        try:
            with torch.no_grad():
                self.result(tried)
        except (*_REFUSALS, KeyError):
            return False
        return True

    def refusal(self, error: Exception) -> LayoutError | None:
        """Return the error for a call that torch refused; None if layouts are not the reason."""
        given = self.layouts()
        replicated = [layout.with_spec(ShardingSpec(layout.spec.dims)) for layout in given]
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if not self.is_possible(replicated):
            # torch raises this error for operators without a rule.
            if not isinstance(error, NotImplementedError):
                return None
            return LayoutError(
                f"{self._call.shown}: torch {torch.__version__} has no rule for it on DTensors, on "
                f"any layout ({reason}); do it on to_global()"
            )
        if self.is_possible(given):
            return None
        return LayoutError(
            f"{self._call.shown} is not possible on {self.specs()}: {reason}; redistribute first"
        )

    def made_new(self, made: object, result: object) -> bool:
        """Return whether torch made one tensor in new memory, which was taken as it is."""
        return (
            isinstance(result, Result)
            and result.tensor is made
            and all(pending.op in ("sum", "avg") for pending in result.layout.spec.partials)
            and not any(is_alias(result.tensor, tensor) for tensor in self.tensors)
            and not any(layout_facts(layout).is_uneven_over_axes for layout in self.layouts())
        )

    def checked(self, result: Result) -> Result:
        """Return the result; raises `LayoutError` if a shard's shape contradicts its layout."""
        for device, part in zip(self._devices, parts_of(result.tensor._local_tensor), strict=False):
            shape = tuple(part.shape)
            if shape != shape_and_dtype(result.layout, device)[0]:
                raise LayoutError(
                    f"{self._call.shown}: torch {torch.__version__} made a shard of shape {shape} "
                    f"on rank {device} of a tensor of layout {result.layout}; redistribute first, "
                    "or do it on to_global()"
                )
        return result


def run_call(
    call: Call,
    tensors: Mapping[int, TorchDTensor],
    *,
    tracked: bool,
    frozen: bool = False,
    drawing: RandomDraws | None = None,
) -> Any:  # noqa: ANN401
    """Call the function; return its result, with a `Result` for each DTensor.

    Parameters
    ----------
    call
        The function and its arguments.
    tensors
        torch's DTensor for each of ours, and for plain tensors with a gradient, by ``id``.
    tracked
        Whether gradients are tracked.
    frozen
        Whether writing to arguments is an error.
    drawing
        The context in which devices draw random numbers, if the function draws any.
    """
    in_torch = _InTorch(call, tensors)
    copies = [tensors[id(tensor)] for tensor in call.tensors if tensor.is_copied_part]
    written = [tensors[id(tensor)] for tensor in call.written]
    layouts = in_torch.layouts()
    given = arguments_for(call.shown, in_torch.leaves, layouts, written)
    if tracked:
        _check_gradient(call)
    # To the function, redistributed arguments are copies.
    replaced = [
        new for new, tensor in zip(given, in_torch.tensors, strict=True) if new is not tensor
    ]
    strided = any(map(is_strided, in_torch.tensors))
    earlier = earlier_calls(call.function, call.args, call.kwargs, layouts, tracked=tracked)
    watch = None
    if strided or copies or frozen or not earlier.is_right:
        watch = Watch(call.shown, [*copies, *replaced], frozen=in_torch.tensors if frozen else ())
    try:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())  # of plain tensors that torch makes
            stack.enter_context(_counted(written))
            if call.name in _ATTENTION and given[0].device_mesh.device_type == "cpu":
                # DTensor has no rule for the fused CPU kernel, but has rules for matrix products.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if drawing is not None:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
                stack.enter_context(drawing())
            if watch is not None:
                stack.enter_context(watch)
            result = in_torch.result(given)
            if watch is not None:
                watch.check_written_to(tensors[id(leaf)] for leaf in call.out)
        earlier.is_right = watch is None or not watch.mended
        if tracked and written:
            _keep_layout_of_gradient(written)
    except (ShardSpecError, *_REFUSALS) as error:
        lost = watch is not None and watch.lost
        if call.sets_part and (lost or _NEEDS_WHOLE in str(error)) and not copies:
            _set_in_whole(in_torch)
            return None
        if isinstance(error, ShardSpecError) or is_branch_of_rank(error):
            raise
        refusal = in_torch.refusal(error)
        if refusal is not None:
            raise refusal from None
        if not isinstance(error, AssertionError) or in_torch.is_possible(layouts):
            raise
        # The numbers differ between simulated ranks; the global tensors decide below.
        result = 0

    numbers = any(isinstance(leaf, int | float | complex) for leaf in tree_leaves(result))
    if numbers and not in_torch.is_possible(in_torch.layouts()):
        # The function reads values; torch would read this rank's shard or addend.
        return in_torch.in_whole()
    owners = {id(tensors[id(tensor)]): tensor for tensor in reversed(call.tensors)}

    def described(leaf: object) -> object:
        if not isinstance(leaf, TorchDTensor):
            return leaf
        if id(leaf) in owners:
            return in_torch.checked(Result(layout_of(leaf, in_torch.mesh), leaf, owners[id(leaf)]))
        try:
            spoken = in_our_words(leaf)
            layout = layout_of(spoken, in_torch.mesh)
        except (RuntimeError, IndexError) as error:
            raise LayoutError(
                f"{call.shown}: torch {torch.__version__} cannot finish the sum that it leaves "
                f"pending on {in_torch.specs()} ({error}); redistribute first"
            ) from None
        is_copied_part = (
            (watch is not None and watch.is_copy(leaf))
            or any(is_copy_of(leaf, tensor) for tensor in in_torch.tensors)
            or any(is_alias(leaf, copy) for copy in (*copies, *replaced))
            or (spoken is not leaf and any(is_alias(leaf, t) for t in in_torch.tensors))
        )
        return in_torch.checked(Result(layout, spoken, None, is_copied_part))

    returned = tree_map(described, result)
    helped = strided or copies or replaced or drawing or call.name in _ATTENTION
    earlier.is_plain = earlier.is_right and not helped and in_torch.made_new(result, returned)
    return returned


def _check_gradient(call: Call) -> None:
    """Raise `LayoutError` if the gradient of this call on DTensors would be wrong.

    torch distributes the gradient of a largest element shard by shard; if several axes split one
    dim, ranks may deadlock.
    """
    name, args, kwargs = call.shown, call.args, call.kwargs
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


def _key(value: object) -> object:
    """Return the part of an argument that, besides its layout, determines the operations.

    Of floats it is the type, and the sign and whether they are infinite: norms of these orders need
    a largest element, count elements, or add them up.
    """
    if isinstance(value, torch.Tensor | TensorLike):
        return type(value), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(_key, value)
    if isinstance(value, slice):
        return slice, *map(_key, (value.start, value.stop, value.step))
    if isinstance(value, float):
        return float, (value > 0) - (value < 0), isinf(value)
    has_value = value.__hash__ is not None and not isinstance(value, complex)
    # The type as well: True equals 1, but selects otherwise.
    return type(value), value if has_value else None


def _set_in_whole(in_torch: _InTorch) -> None:
    """Set a part of a tensor on the gathered tensor, then copy it back to the shards.

    For parts that do not share the memory of the shards.
    """
    tensor = in_torch.tensors[0]
    with implicit_replication():
        placements = [Replicate()] * tensor.device_mesh.ndim
        whole, *others = (each.redistribute(placements=placements) for each in in_torch.tensors)
        with Watch(in_torch.shown, ()):
            in_torch.result([whole, *others])
        _keep_layout_of_gradient([whole])
        tensor.copy_(whole)


@contextmanager
def _counted(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let autograd notice writes to tensors, which torch does not count for lists."""
    before = [0 if tensor.is_inference() else tensor._version for tensor in written]
    yield
    for tensor, version in zip(written, before, strict=True):
        if not tensor.is_inference() and tensor._version == version:
            torch.autograd.graph.increment_version(tensor)


def _keep_layout_of_gradient(written: Sequence[TorchDTensor]) -> None:
    """Let the gradients of partially written tensors arrive in the layout of these tensors.

    Autograd extracts the written part with the same views or indices, which fit only that layout.
    """
    for tensor in written:
        base = tensor if tensor._base is None else tensor._base
        assert isinstance(base, TorchDTensor)
        if type(base.grad_fn).__name__ in ("CopySlices", "IndexPutBackward0"):
            to = [Replicate() if p.is_partial() else p for p in base.placements]
            # torch leaves register_hook untyped.
            base.register_hook(partial(TorchDTensor.redistribute, placements=to))  # type: ignore[no-untyped-call]
