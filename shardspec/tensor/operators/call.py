"""A function of torch called on torch's DTensors: watched, mended, or refused with a remedy.

What torch computes wrongly was found by comparing torch 2.13 with one process, over the samples of
its own tests. It is given other arguments, watched, or refused; what decides is layouts, so that
all ranks do alike. All of it is the same in a job and where one is simulated.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from typing import Any, Final, TypeAlias

import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten

from shardspec.errors import LayoutError, ShardSpecError
from shardspec.interop.torch_dtensor import in_our_words, is_strided, layout_of, torch_dtensor
from shardspec.interop.torch_parts import has_all_ranks, like_parts, parts_of, shard_memory
from shardspec.layout.layout import Layout
from shardspec.layout.spec import ShardingSpec
from shardspec.tensor.operators.conditions import arguments_for
from shardspec.tensor.operators.tensor import TensorLike
from shardspec.tensor.operators.watch import Watch, is_alias, is_copy_of, specs_text, was_right

_REFUSALS: Final = (RuntimeError, ValueError, AssertionError, TypeError, IndexError)
"""What torch raises where it cannot propagate a layout."""
_WRITES: Final = re.compile(
    "__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__|.*[^_]_"
)
"""Names of functions that write to their first argument."""
_ATTENTION: Final = ("scaled_dot_product_attention", "multi_head_attention_forward")
_NEEDS_WHOLE: Final = "in-place operations that require placement changes are not supported"
"""What torch says of an operation that writes, where it would have to gather what is written to."""
_NORMS: Final = ("linalg_vector_norm", "norm")

Function: TypeAlias = Callable[..., Any]
RandomDraws: TypeAlias = Callable[[], AbstractContextManager[None]]


def name_of(function: Function) -> str:
    """Return the name of a function of torch."""
    return getattr(function, "__name__", str(function))


@dataclass(frozen=True, slots=True)
class Call:
    """A function of torch and its arguments, DTensors of ours among their leaves."""

    function: Function
    args: Sequence[object]
    kwargs: Mapping[str, object]
    leaves: Sequence[Any]
    structure: TreeSpec

    @property
    def name(self) -> str:
        """The function's."""
        return name_of(self.function)

    @property
    def shown(self) -> str:
        """The function's name in errors."""
        return self.name.strip("_")

    @property
    def tensors(self) -> list[TensorLike]:
        """The DTensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorLike)]

    @property
    def writes(self) -> bool:
        """Whether it writes to its first argument."""
        return _WRITES.fullmatch(self.name) is not None

    @property
    def sets_part(self) -> bool:
        """Whether it sets a part of its first argument, as ``t[1] = 9`` does."""
        return self.function is torch.Tensor.__setitem__ and isinstance(self.args[0], TensorLike)

    @property
    def written(self) -> list[TensorLike]:
        """The DTensors that it writes to, by its name and ``out=``."""
        first = tree_leaves(self.args[:1] if self.writes else ())
        return [*(leaf for leaf in first if isinstance(leaf, TensorLike)), *self.out]

    @property
    def out(self) -> list[TensorLike]:
        """The DTensors given as ``out=``."""
        given = tree_leaves(self.kwargs.get("out"))
        return [leaf for leaf in given if isinstance(leaf, TensorLike)]


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """A DTensor that a function has returned."""

    layout: Layout
    tensor: TorchDTensor
    given: TensorLike | None
    """The argument that it is."""
    is_copied_part: bool = False
    """As `TensorLike` has it."""
    is_plain: bool = False
    """Whether torch made it of such layouts without help, in memory of its own."""


class _InTorch:
    """A function of torch and the leaves of its arguments, some of them torch's DTensors."""

    def __init__(self, call: Call, tensors: Mapping[int, TorchDTensor]) -> None:
        first = call.tensors[0]
        self._call, self.mesh, self.shown = call, first.layout.mesh, call.shown
        self.leaves = [tensors.get(id(leaf), leaf) for leaf in call.leaves]
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, TorchDTensor)]
        here = first.communicator.addressable
        self._devices = self.mesh.ids if has_all_ranks(shard_memory(self.tensors[0])) else here

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
        """Return the specs of all as text."""
        return specs_text(str(layout.labelled_spec) for layout in self.layouts())

    def in_whole(self) -> Any:  # noqa: ANN401
        """Call the function with the whole tensors."""
        return self.result(tensor.full_tensor().detach() for tensor in self.tensors)

    def is_possible(self, layouts: Sequence[Layout]) -> bool:
        """Try it on meta tensors of these layouts; it fails too if it reads values."""
        tried = []
        for given, layout in zip(self.tensors, layouts, strict=True):
            # With the shapes of this rank: views of shards may be of other shapes on other ranks.
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
        """Return the error for what torch has refused; None where layouts are not the reason."""
        given = self.layouts()
        replicated = [layout.with_spec(ShardingSpec(layout.spec.dims)) for layout in given]
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if not self.is_possible(replicated):
            # torch raises this one where it has no rule for an operator.
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

    def checked(self, result: Result) -> Result:
        """Refuse a result whose shard on this rank is not of the shape that its layout says."""
        for device, part in zip(self._devices, parts_of(result.tensor._local_tensor), strict=False):
            shape = tuple(part.shape)
            if shape != _local_shape(result.layout, device):
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
    """Call the function; return what it does, with a `Result` for each DTensor.

    Parameters
    ----------
    call
        The function and its arguments.
    tensors
        What there is in torch for each of ours, by ``id``, and for plain ones with a gradient.
    tracked
        Whether gradients are tracked.
    frozen
        Whether nothing may be written to.
    drawing
        Lets the devices draw random numbers, where it draws some.
    """
    here = _InTorch(call, tensors)
    copies = [tensors[id(tensor)] for tensor in call.tensors if tensor.is_copied_part]
    written = [tensors[id(tensor)] for tensor in call.written]
    layouts = here.layouts()
    given = arguments_for(call.shown, here.leaves, layouts, written)
    if tracked:
        _check_gradient(call)
    # What was redistributed for the function is a copy to it.
    replaced = [new for new, tensor in zip(given, here.tensors, strict=True) if new is not tensor]
    strided = any(map(is_strided, here.tensors))
    earlier = was_right(call.function, tracked, *call.kwargs, *map(_key, here.leaves), *layouts)
    watch = None
    if strided or copies or frozen or not earlier.found:
        watch = Watch(call.shown, [*copies, *replaced], frozen=here.tensors if frozen else ())
    try:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())  # of plain tensors that torch makes
            stack.enter_context(_counted(written))
            if call.name in _ATTENTION and given[0].device_mesh.device_type == "cpu":
                # The fused kernel for the CPU has no rule, but its matrix products have.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if drawing is not None:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
                stack.enter_context(drawing())
            if watch is not None:
                stack.enter_context(watch)
            result = here.result(given)
            if watch is not None:
                watch.check_written_to(tensors[id(leaf)] for leaf in call.out)
        earlier.found = watch is None or not watch.mended
        if tracked and written:
            _keep_layout_of_gradient(written)
    except (ShardSpecError, *_REFUSALS) as error:
        lost = watch is not None and watch.lost
        if call.sets_part and (lost or _NEEDS_WHOLE in str(error)) and not copies:
            _set_in_whole(here)
            return None
        if isinstance(error, ShardSpecError) or is_limit_of_simulation(error):
            raise
        found = here.refusal(error)
        if found is not None:
            raise found from None
        if not isinstance(error, AssertionError) or here.is_possible(layouts):
            raise
        # Numbers that differ between simulated ranks.
        result = 0

    numbers = any(isinstance(leaf, int | float | complex) for leaf in tree_leaves(result))
    if numbers and not here.is_possible(here.layouts()):
        # It reads values. torch would read this rank's shard, or its addend.
        return here.in_whole()
    owners = {id(tensors[id(tensor)]): tensor for tensor in reversed(call.tensors)}

    def described(leaf: object) -> object:
        if not isinstance(leaf, TorchDTensor):
            return leaf
        if id(leaf) in owners:
            return here.checked(Result(layout_of(leaf, here.mesh), leaf, owners[id(leaf)]))
        try:
            spoken = in_our_words(leaf)
            layout = layout_of(spoken, here.mesh)
        except (RuntimeError, IndexError) as error:
            raise LayoutError(
                f"{call.shown}: torch {torch.__version__} cannot finish the sum that it leaves "
                f"pending on {here.specs()} ({error}); redistribute first"
            ) from None
        is_copied_part = (
            (watch is not None and watch.is_copy(leaf))
            or any(is_copy_of(leaf, tensor) for tensor in here.tensors)
            or any(is_alias(leaf, copy) for copy in (*copies, *replaced))
            or (spoken is not leaf and any(is_alias(leaf, t) for t in here.tensors))
        )
        is_plain = (
            earlier.found
            and spoken is leaf
            and not (strided or copies or replaced or call.name in _ATTENTION)
            and all(pending.op in ("sum", "avg") for pending in layout.spec.partials)
            and not any(is_alias(leaf, tensor) for tensor in here.tensors)
        )
        return here.checked(Result(layout, spoken, None, is_copied_part, is_plain))

    return tree_map(described, result)


def is_limit_of_simulation(error: Exception) -> bool:
    """Whether ranks would go different ways, which torch asserts that simulated ones do not."""
    return isinstance(error, AssertionError) and not any(isinstance(a, str) for a in error.args)


def _check_gradient(call: Call) -> None:
    """Raise `LayoutError` if the gradient of this call on DTensors would be wrong.

    That of a largest element is distributed shard by shard; where several axes split one dim, ranks
    may wait for each other.
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


def _key(leaf: object) -> object:
    """Return what of an argument decides which operations a function does, besides layouts."""
    if isinstance(leaf, slice):
        return leaf.start, leaf.stop, leaf.step
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    return type(leaf) if isinstance(leaf, float | complex) or leaf.__hash__ is None else leaf


def _set_in_whole(here: _InTorch) -> None:
    """Set a part of a tensor whose shards the part does not share: in the whole, then in all."""
    tensor = here.tensors[0]
    with implicit_replication():
        placements = [Replicate()] * tensor.device_mesh.ndim
        whole, *others = (each.redistribute(placements=placements) for each in here.tensors)
        with Watch(here.shown, ()):
            here.result([whole, *others])
        _keep_layout_of_gradient([whole])
        tensor.copy_(whole)


@contextmanager
def _counted(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let autograd see that tensors were written to; of lists torch does not count it."""
    before = [0 if tensor.is_inference() else tensor._version for tensor in written]
    yield
    for tensor, version in zip(written, before, strict=True):
        if not tensor.is_inference() and tensor._version == version:
            torch.autograd.graph.increment_version(tensor)


def _keep_layout_of_gradient(written: Sequence[TorchDTensor]) -> None:
    """Let the gradient of what was written to in part arrive in its layout.

    Autograd takes the part from it by the same views or indices, which are not of the shards of any
    layout.
    """
    for tensor in written:
        base = tensor if tensor._base is None else tensor._base
        assert isinstance(base, TorchDTensor)
        if type(base.grad_fn).__name__ in ("CopySlices", "IndexPutBackward0"):
            to = [Replicate() if p.is_partial() else p for p in base.placements]
            # torch leaves register_hook untyped.
            base.register_hook(partial(TorchDTensor.redistribute, placements=to))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=4096)
def _local_shape(layout: Layout, device: int) -> tuple[int, ...]:
    return layout.local_shape(device)
