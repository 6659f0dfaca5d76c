"""Lists the torch functions that give right results on shards, and the layouts that they need.

The lists were found by comparing each function with one process on the samples of torch's own
tests. A function that is on no list is computed on gathered tensors.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

from shardspec.layout.layout import Layout


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPERATORS: Final = (
    "add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift|divmod|eq|ne|lt|le|gt|ge"
)
"""Names of Python's binary operators."""
_OTHERS: Final = "neg|pos|abs|invert|getitem|setitem"

POINTWISE: Final = _words(
    """add sub mul truediv floordiv mod pow and or xor lshift rshift eq ne lt le gt ge abs absolute
    acos acosh addcdiv addcmul alpha_dropout angle arccos arccosh arcsin arcsinh arctan arctan2
    arctanh asin asinh atan atan2 atanh bernoulli bfloat16 bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor bool cauchy ceil celu clamp clamp_max
    clamp_min clip clone conj_physical copy cos cosh data deg2rad detach digamma div divide
    double dropout elu empty_like erf erfc erfinv exp exp2 expm1 exponential fill float
    float_power floor floor_divide fmax fmin fmod frac full_like gcd gelu geometric greater
    greater_equal half hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma
    igammac int invert isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp
    leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_normal logaddexp logaddexp2
    logical_and logical_not logical_or logical_xor logit logsigmoid long masked_fill maximum
    minimum mish multiply mvlgamma nan_to_num native_dropout neg negative normal
    not_equal ones_like polar polygamma pos positive rad2deg rand_like randint_like randn_like
    random reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn short sigmoid sign
    signbit silu sin sinc sinh softplus softshrink softsign special_bessel_j0 special_entr
    special_erf special_erfcx special_exp2 special_i0e special_i1 special_i1e special_log_ndtr
    special_logit special_ndtr special_ndtri special_psi special_xlog1py special_zeta sqrt
    square sub subtract tan tanh tanhshrink threshold to true_divide trunc type_as uniform where
    xlogy zero zeros_like"""
)
"""Functions computed element by element: right on any layout without a pending reduction."""
ALONG: Final = frozenset({"softmax", "log_softmax"})
"""Functions that are right on each shard if the dim, the second argument, is not sharded."""
LINEAR_VIEWS: Final = _words(
    """T clone contiguous expand flatten mT moveaxis movedim permute reshape swapaxes swapdims t
    transpose unflatten unsqueeze view"""
)
"""Functions that leave a pending sum pending."""
CUTTING: Final = _words(
    """cat chunk expand flatten flip gather getitem index_select narrow reshape select split
    squeeze stack tril triu unbind unflatten view"""
)
"""Functions that index, split or merge dims: no dim may be sharded by two axes."""
EVEN: Final = (
    LINEAR_VIEWS
    | CUTTING
    | _words(
        """addmm baddbmm bmm dot einsum layer_norm linear logsumexp matmul mean mm mse_loss mv
        rms_norm scaled_dot_product_attention softmax sum var"""
    )
)
"""Functions for which torch's rule is right if all shards are equally long."""
VIEWS: Final = (LINEAR_VIEWS | CUTTING) - _words("cat clone flip gather index_select stack")
"""Functions whose results may share the memory of an argument."""
OF_SHAPE: Final = _words(
    """__len__ base dim dim_order element_size is_complex is_contiguous is_floating_point is_signed
    is_view itemsize nbytes ndim ndimension nelement numel size storage_offset stride"""
)
"""Members that depend only on shape and dtype."""
OF_DEVICE: Final = _words(
    """device get_device is_conj is_cpu is_cuda is_inference is_meta is_neg is_quantized is_sparse
    is_xpu"""
)
"""Members that are read from a shard."""
OF_MEMORY: Final = _words(
    """__set__ as_strided data_ptr resize resize_as set share_memory storage typed_storage
    untyped_storage"""
)
"""Members that need the memory of one tensor, which a sharded tensor does not have."""
RANDOM: Final = re.compile(
    "((native|alpha|feature|feature_alpha)_)?dropout_?|dropout[123]d|(rand|randn|randint)_like|"
    "(bernoulli|rrelu)_?|(normal|uniform|exponential|random|cauchy|log_normal|geometric)_|"
    "multinomial|poisson|gumbel_softmax"
)
"""Functions that draw random numbers, besides attention with dropout."""
_WRITES: Final = re.compile(f"__setitem__|__i({_OPERATORS})__|.*[^_]_")


@dataclass(frozen=True, slots=True)
class Named:
    """A torch function by its names: ``add_`` writes in place, and computes the same as ``add``."""

    name: str
    """torch's name of the function."""
    shown: str
    """The name without underscores, for errors."""
    plain: str
    """The name of the function that computes the same from operands in order, out of place."""
    writes: bool
    """True if the function writes to its first argument."""


@lru_cache(maxsize=4096)
def named(function: Callable[..., Any]) -> Named:
    """Return torch's name of a function, and what it tells, such as that ``add_`` writes."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    operator = re.fullmatch(f"__[ri]?({_OPERATORS})__|__({_OTHERS})__", name)
    plain = name if name.startswith("__") else name.strip("_")
    plain = operator[1] or operator[2] if operator else plain
    return Named(name, name.strip("_"), plain, _WRITES.fullmatch(name) is not None)


@dataclass(frozen=True, slots=True)
class LayoutFacts:
    """Properties of a layout that decide if a function can run on shards."""

    pending: frozenset[str]
    """The kinds of pending reductions."""
    is_whole: bool
    """True if each device has all elements."""
    is_even: bool
    """True if all shards have one nonempty shape, and axes ascend along each dim."""
    is_cut_once: bool
    """True if no dim is sharded by two axes."""
    in_torch: bool
    """True if torch's DTensor can express the layout."""


@lru_cache(maxsize=4096)
def facts_of_layout(layout: Layout) -> LayoutFacts:
    """Return the properties that decide if a function can run on shards of this layout."""
    mesh, spec = layout.mesh, layout.spec
    cuts = [[int(axis) for axis in cut.axes] for cut in spec.dim_specs]
    counts = [prod(mesh.shape[axis] for axis in cut) for cut in cuts]
    divides = all(n % count == 0 for n, count in zip(layout.global_shape, counts, strict=True))
    ascending = all(
        list(group) == sorted(group) for axis in range(mesh.ndim) for group in mesh.groups([axis])
    )
    return LayoutFacts(
        frozenset(p.op for p in spec.partials),
        not spec.axes,
        divides and prod(layout.global_shape) > 0 and all(cut == sorted(cut) for cut in cuts),
        all(len(cut) < 2 for cut in cuts),
        ascending and spec.is_plain,
    )


@lru_cache(maxsize=4096)
def are_alike(layouts: tuple[Layout, ...]) -> bool:
    """Return True if tensors have equal shapes and specs, so that their shards correspond."""
    return len({(layout.spec, layout.global_shape) for layout in layouts}) == 1


@lru_cache(maxsize=4096)
def torch_is_right(plain: str, layouts: tuple[Layout, ...]) -> bool:
    """Return True if torch computes function `plain` correctly on shards of these layouts."""
    facts = [facts_of_layout(layout) for layout in layouts]
    pending = frozenset[str]().union(*(each.pending for each in facts))
    if not all(each.in_torch for each in facts) or (
        pending and not (plain in LINEAR_VIEWS and len(pending) == 1 and pending <= {"sum", "avg"})
    ):
        return False
    if plain == "linear" and len(layouts[0].global_shape) == 1:
        return False  # torch gives the result of a vector a dim too many
    if plain in POINTWISE and not pending:
        return all(each.is_cut_once or each.is_even for each in facts)
    return plain in EVEN and all(
        each.is_even and (each.is_cut_once or plain not in CUTTING) for each in facts
    )
