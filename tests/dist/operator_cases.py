"""Cases of the sweep of operators: torch's OpInfo samples, how they are sharded, what is called."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo
from torch.utils._pytree import tree_leaves, tree_map

from shardspec import DeviceMesh, DTensor, Layout

__all__ = ["Case", "cases", "samples_of", "spec_of_tensor", "variants"]

MOST_ELEMENTS: Final = 64
SCHEMES: Final = ("first dim", "last dim", "two dims", "first tensor", "pending", "all pending")
"""Which tensors are sharded, on which dim; or have an addend on each device."""
UNCOMPARABLE: Final = (
    *("bernoulli", "cauchy", "dropout", "empty", "exponential", "geometric", "multinomial"),
    *("normal", "poisson", "rand", "uniform", "rrelu", "lowrank", "fractional_max_pool", "eig"),
    *("dot_product_attention", "multi_head_attention", "qr", "svd", "lobpcg", "sparse", "lu"),
    *("jiterator", "resize", "ormqr", "householder", "ldl"),
)
"""Parts of names of operators whose result is random, not defined, or not the only right one."""
# The stubs of torch take nothing but its own tensors.
zeros_like: Any = torch.zeros_like
_MOST_SAMPLES: Final = 24


@dataclass(frozen=True)
class Case:
    """One sample of one operator under one scheme."""

    op: int
    sample: int
    scheme: str
    condition: str

    @property
    def name(self) -> str:
        info = op_db[self.op]
        return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


def _dtype_of(info: Any) -> torch.dtype | None:
    return next((d for d in (torch.float64, torch.int64) if d in info.dtypes), None)


def _tensors(sample: Any) -> list[torch.Tensor]:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def samples_of(op: int) -> list[Any]:
    info = op_db[op]
    dtype = _dtype_of(info)
    if dtype is None or any(part in info.name for part in UNCOMPARABLE):
        return []
    torch.manual_seed(op)
    found: list[Any] = []
    try:
        for sample in islice(info.sample_inputs("cpu", dtype, requires_grad=False), _MOST_SAMPLES):
            tensors = _tensors(sample)
            if tensors and all(
                t.numel() <= MOST_ELEMENTS and t.layout == torch.strided for t in tensors
            ):
                found.append(sample)
    except Exception:  # a sample that cannot be made is none
        return found
    return found


def spec_of_tensor(tensor: torch.Tensor, place: int, scheme: str, mesh: DeviceMesh) -> str:
    dims, axes = ["R"] * tensor.dim(), "".join(map(str, range(mesh.ndim)))
    pending = ""
    if scheme == "pending" or scheme == "all pending":
        if (place == 0 or scheme == "all pending") and tensor.is_floating_point():
            pending = "|P0"
            if dims and mesh.ndim > 1:
                dims[-1] = "S1"
    elif scheme == "two dims":
        if len(dims) > 1 and mesh.ndim > 1:
            dims[0], dims[-1] = "S0", "S1"
    elif dims and (place == 0 or scheme != "first tensor"):
        dims[-1 if scheme == "last dim" else 0] = f"S{axes}"
    return f"[{','.join(dims)}{pending}]"


def _condition(tensors: Sequence[torch.Tensor], scheme: str, mesh: DeviceMesh) -> str | None:
    specs = [spec_of_tensor(tensor, place, scheme, mesh) for place, tensor in enumerate(tensors)]
    if "pending" in scheme:
        return scheme if any("P" in spec for spec in specs) else None
    conditions = set()
    for tensor, spec in zip(tensors, specs, strict=True):
        layout = Layout(mesh, spec, tensor.shape, "float32")
        if layout.spec.axes:
            shapes = {layout.local_shape(device) for device in mesh.ids}
            lacks = tensor.numel() and any(0 in shape for shape in shapes)
            conditions.add("empty" if lacks else "uneven" if len(shapes) > 1 else "even")
    return next((name for name in ("empty", "uneven", "even") if name in conditions), None)


def cases(
    mesh: DeviceMesh, most: int, names: Sequence[str] = (), share: tuple[int, int] = (0, 1)
) -> Iterator[Case]:
    """Yield at most ``most`` cases for each operator, scheme and condition.

    With ``share=(k, n)`` only those of the operators k, k + n, k + 2 n and so on.
    """
    # What is computed element by element is much alike, and comes last.
    alike = (UnaryUfuncInfo, BinaryUfuncInfo)
    chosen = range(share[0], len(op_db), share[1])
    for op in sorted(chosen, key=lambda place: isinstance(op_db[place], alike)):
        info = op_db[op]
        if names and info.name not in names:
            continue
        counts: Counter[tuple[str, str]] = Counter()
        for number, sample in enumerate(samples_of(op)):
            for scheme in SCHEMES:
                condition = _condition(_tensors(sample), scheme, mesh)
                if condition is None or counts[scheme, condition] >= most:
                    continue
                if scheme == "all pending" and len(_tensors(sample)) == 1:
                    continue
                counts[scheme, condition] += 1
                yield Case(op, number, scheme, condition)


def variants(
    info: Any, sample: Any, make: Callable[[torch.Tensor, int], Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the variants of a case: calls that return tensors. `make` makes a tensor of a leaf."""

    def made(gradient: bool = False) -> Any:
        place = iter(range(100))

        def leaf(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return copy.copy(x)
            x = x.detach().clone()
            if gradient and x.is_floating_point():
                x.requires_grad_()
            return make(x, next(place))

        return tree_map(leaf, (sample.input, tuple(sample.args), dict(sample.kwargs)))

    def value() -> Any:
        given, args, kwargs = made()
        return info.op(given, *args, **kwargs)

    yield "value", value

    def gradient() -> Any:
        given, args, kwargs = made(gradient=True)
        result = info.op(given, *args, **kwargs)
        losses = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor | DTensor) and leaf.requires_grad:
                whole = leaf.to_global() if isinstance(leaf, DTensor) else leaf
                if whole.is_floating_point():
                    weights = torch.arange(1, whole.numel() + 1, dtype=torch.float64).cos()
                    losses.append((whole * weights.reshape(whole.shape)).sum())
        torch.stack(losses).sum().backward()
        leaves = [x for x in tree_leaves((given, args, kwargs)) if hasattr(x, "requires_grad")]
        return [x.grad if x.grad is not None else None for x in leaves if x.requires_grad]

    if info.supports_autograd:
        yield "gradient", gradient
    if info.inplace_variant is not None:

        def in_place() -> Any:
            given, args, kwargs = made()
            name = getattr(info.inplace_variant, "__name__", "")
            method = getattr(given, name) if hasattr(torch.Tensor, name) else None
            call = method or partial(info.inplace_variant, given)
            result = call(*args, **kwargs)
            return [given, result]

        yield "in place", in_place
    if info.supports_out:

        def out() -> Any:
            given, args, kwargs = made()
            results = info.op(given, *args, **kwargs)
            into = tree_map(
                lambda x: zeros_like(x) if isinstance(x, torch.Tensor | DTensor) else x,
                results,
            )
            returned = info.op(given, *args, **kwargs, out=into)
            return [into, returned]

        yield "out=", out

    def through_view() -> Any:
        given, args, kwargs = made()
        base = given[0] if isinstance(given, list | tuple) else given
        result = info.op(given, *args, **kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor | DTensor)]
        results[0].mul_(3)
        return [base, results[0]]

    yield "through view", through_view
