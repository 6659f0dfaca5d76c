"""Operations that cut tensors are tried with: a function, and the shapes of what it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One operation; integer arguments are indices below `below`."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    integers: tuple[int, ...] = ()
    below: int = 5
    gradient: bool = True
    layouts: tuple[tuple[str, ...], ...] = ()
    """Layouts to try, where not any will do."""


def _of(name: str, function: Callable[..., Any], *shapes: Shape, **more: Any) -> Operation:
    return Operation(name, function, shapes, **more)


ODD, EVEN = (7, 5), (8, 6)
# torch looks for the cheapest way among many where a cut dim is flattened, which takes it seconds.
BATCHES = (("[S0,R,R]", "[R,S1]"), ("[S0,R,S1]", "[S1,R]"), ("[R,R,S0]", "[S0,R|P1]"))
HEADS = (("[S0,R,R,R]",) * 3, ("[S1,R,R,R]", "[S1,R,R,R]", "[R,R,R,R]"))

ELEMENTWISE = [
    _of("exp", torch.exp, ODD),
    _of("log", lambda a: (a.abs() + 1).log(), ODD),
    _of("sin", torch.sin, ODD),
    _of("tanh", lambda a: a.tanh(), ODD),
    _of("sigmoid", torch.sigmoid, ODD),
    _of("relu", F.relu, ODD),
    _of("gelu", F.gelu, ODD),
    _of("silu", F.silu, ODD),
    _of("softplus", F.softplus, ODD),
    _of("leaky_relu", lambda a: F.leaky_relu(a, 0.2), ODD),
    _of("sqrt", lambda a: (a * a + 1).sqrt(), ODD),
    _of("pow", lambda a: a**3, ODD),
    _of("clamp", lambda a: a.clamp(-0.5, 0.5), ODD),
    _of("rsub", lambda a: 1.5 - a, ODD),
    _of("neg and abs", lambda a: -abs(a), ODD),
    _of("add", lambda a, b: a + b, ODD, ODD),
    _of("sub by alpha", lambda a, b: torch.sub(a, b, alpha=2), ODD, ODD),
    _of("mul", lambda a, b: a * b, ODD, ODD),
    _of("div", lambda a, b: a / (b * b + 1), ODD, ODD),
    _of("maximum", torch.maximum, ODD, ODD),
    _of("where", lambda a, b: torch.where(a > b, a, 2 * b), ODD, ODD),
    _of("lerp", lambda a, b: torch.lerp(a, b, 0.3), ODD, ODD),
    _of("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), ODD, ODD, ODD),
    _of("broadcast", lambda a, b: a * b, ODD, (5,)),
    _of("compare", lambda a, b: (a > b) & (a != 0), ODD, ODD, gradient=False),
    _of("to another dtype", lambda a: a.to(torch.float64) * 2, ODD),
    _of("zeros_like", lambda a: torch.zeros_like(a) + 1, ODD, gradient=False),
]
PRODUCTS = [
    _of("mm", torch.mm, (7, 5), (5, 3)),
    _of("matmul", lambda a, b: a @ b, (2, 4, 6), (6, 5), layouts=BATCHES),
    _of("bmm", torch.bmm, (4, 3, 6), (4, 6, 5)),
    _of("addmm", torch.addmm, (3,), (7, 5), (5, 3)),
    _of("linear", F.linear, (7, 6), (4, 6)),
    _of("linear with bias", F.linear, (7, 6), (4, 6), (4,)),
    _of("linear of a vector", F.linear, (6,), (4, 6)),
    _of("linear of batches", F.linear, (2, 4, 6), (4, 6), layouts=BATCHES),
    _of(
        "einsum",
        lambda a, b: torch.einsum("bij,jk->bik", a, b),
        (2, 4, 6),
        (6, 4),
        layouts=BATCHES[:2],
    ),
    _of("mv", torch.mv, (8, 6), (6,)),
    _of("dot", torch.dot, (8,), (8,)),
]
REDUCTIONS = [
    _of("sum", lambda a: a.sum(), ODD),
    _of("sum of a dim", lambda a: a.sum(0), ODD),
    _of("sum kept", lambda a: a.sum(1, keepdim=True), ODD),
    _of("mean", lambda a: a.mean(), EVEN),
    _of("mean of a dim", lambda a: a.mean(-1), EVEN),
    _of("amax", lambda a: a.amax(0), ODD),
    _of("amin", lambda a: a.amin(1), ODD),
    _of("max with indices", lambda a: torch.max(a, 1), ODD),
    _of("argmax", lambda a: a.argmax(1), ODD, gradient=False),
    _of("var", lambda a: a.var(0), EVEN),
    _of("logsumexp", lambda a: a.logsumexp(1), ODD),
    _of("norm", lambda a: a.norm(), EVEN),
    _of("vector norm", lambda a: torch.linalg.vector_norm(a, dim=1), EVEN),
    _of("cumsum", lambda a: a.cumsum(0), EVEN),
    _of("any", lambda a: (a > 1).any(), ODD, gradient=False),
    _of("topk", lambda a: a.topk(2, 1), EVEN),
    _of("sort", lambda a: a.sort(1), EVEN),
]
NORMALISATIONS = [
    _of("softmax", lambda a: a.softmax(-1), ODD),
    _of("log_softmax", lambda a: F.log_softmax(a, 0), ODD),
    _of("layer_norm", lambda a, w, b: F.layer_norm(a, (6,), w, b), EVEN, (6,), (6,)),
    _of(
        "rms_norm",
        lambda a, w: F.rms_norm(a, (6,), w),
        EVEN,
        (6,),
        layouts=(("[S0,R]", "[R]"), ("[S01,R]", "[S0]"), ("[R,S1]", "[R]")),
    ),
    _of("normalize", lambda a: F.normalize(a, dim=1), EVEN),
    _of("cross_entropy", lambda a, i: F.cross_entropy(a, i), (8, 5), (8,), integers=(1,)),
    _of("mean square", lambda a, b: ((a - b) ** 2).mean(), EVEN, EVEN),
    _of("mse_loss", F.mse_loss, ODD, ODD),
    _of("smooth_l1_loss", lambda a, b: F.smooth_l1_loss(a, b, beta=0.5), ODD, ODD),
]
LOOK_UPS = [
    _of("embedding", F.embedding, (4, 3), (5, 6), integers=(0,)),
    _of("gather", lambda a, i: a.gather(1, i), (8, 5), (8, 2), integers=(1,)),
    _of("index_select", lambda a, i: a.index_select(0, i), (5, 6), (4,), integers=(1,)),
    _of("indexing", lambda a, i: a[i], (5, 6), (4,), integers=(1,)),
]
VIEWS = [
    _of("view", lambda a: a.view(2, 4, 6), EVEN),
    _of("reshape", lambda a: a.reshape(48), EVEN),
    _of("flatten", lambda a: a.flatten(1), (4, 2, 6)),
    _of("unflatten", lambda a: a.unflatten(1, (2, 3)), EVEN),
    _of("transpose", lambda a: a.transpose(0, 1), ODD),
    _of("permute", lambda a: a.permute(2, 0, 1), (4, 2, 6)),
    _of("T", lambda a: a.T, ODD),
    _of("unsqueeze", lambda a: a.unsqueeze(1), ODD),
    _of("squeeze", lambda a: a.squeeze(1), (7, 1, 5)),
    _of("expand", lambda a: a.expand(3, 7, 5), ODD),
    _of("slice", lambda a: a[1:5, 2:], EVEN),
    _of("select", lambda a: a[2], EVEN),
    _of("narrow", lambda a: a.narrow(0, 2, 4), EVEN),
    _of("split", lambda a: a.split(3, 1), EVEN),
    _of("chunk", lambda a: torch.chunk(a, 2, 0), EVEN),
    _of("unbind", lambda a: list(a), (3, 4)),
    _of("cat", lambda a, b: torch.cat([a, b], 1), ODD, (7, 2)),
    _of("stack", lambda a, b: torch.stack([a, b]), ODD, ODD),
    _of("flip", lambda a: a.flip(0), ODD),
    _of("roll", lambda a: a.roll(2, 0), ODD),
    _of("tril", lambda a: a.tril(), EVEN),
    _of("repeat", lambda a: a.repeat(2, 1), EVEN),
    _of("clone", lambda a: a.clone().contiguous(), ODD),
]


def _in_place(a: Any, b: Any) -> Any:
    c = a.clone()
    c += b
    c.mul_(2)
    c.sub_(b, alpha=3)
    return c


def _copy(a: Any, b: Any) -> Any:
    c = torch.empty_like(a)
    assert c.copy_(b) is c
    return c + a


IN_PLACE = [
    _of("in place", _in_place, ODD, ODD),
    _of("relu in place", lambda a: F.relu(a * 2, inplace=True), ODD),
    _of("clamp in place", lambda a: (a * 1).clamp_(min=0), ODD),
    _of("copy in place", _copy, ODD, ODD),
    _of("zero in place", lambda a: a.clone().zero_() + a, ODD),
    _of(
        "masked fill",
        lambda a, b: (a * 1).masked_fill_(b > 0, 0.5),
        ODD,
        ODD,
    ),
    _of(
        "add out",
        lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
        ODD,
        ODD,
        gradient=False,
    ),
    _of("exp out", lambda a: torch.exp(a, out=torch.zeros_like(a)), ODD, gradient=False),
]
ATTENTION = [
    _of("attention", F.scaled_dot_product_attention, *[(2, 4, 6, 3)] * 3, layouts=HEADS),
    _of(
        "causal attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *[(2, 4, 6, 3)] * 3,
        layouts=HEADS,
    ),
]
TABLE = [
    *ELEMENTWISE,
    *PRODUCTS,
    *REDUCTIONS,
    *NORMALISATIONS,
    *LOOK_UPS,
    *VIEWS,
    *IN_PLACE,
    *ATTENTION,
]
