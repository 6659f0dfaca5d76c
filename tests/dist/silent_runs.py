"""What torch's DTensor gets wrong without a word, done right or refused, as a rank does it."""

from functools import partial
from itertools import permutations, product
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from shardspec import DeviceMesh, DTensor
from shardspec.errors import LayoutError

__all__ = ["silent"]

# The stubs of torch take nothing but its own tensors.
Cut: Any = DTensor
LINE = (torch.arange(5.0) * 0.7).cos().double()
TABLE = torch.arange(1.0, 16.0).reshape(5, 3).double()


def same(result: Any, whole: Any) -> None:
    for ours, theirs in zip(tree_leaves(result), tree_leaves(whole), strict=True):
        torch.testing.assert_close(ours.to_global(), theirs)


def pending(whole: torch.Tensor, rank: int, mesh: DeviceMesh) -> Any:
    """Return a sum pending over the first axis, whose addends differ."""
    addend = whole * (0.75 if mesh.coordinates(rank)[0] else 0.25)
    spec = f"[{','.join('R' * whole.dim())}|P0]"
    return DTensor.from_local(addend, mesh, spec, global_shape=whole.shape)


def means(mesh: DeviceMesh, every: int) -> None:
    """A mean is that of all elements, however many are on a device; so is its gradient."""
    signs = torch.tensor([1.0, -1, 1, -1, 1]).double()
    losses: list[Any] = [
        lambda a: F.l1_loss(a, 2 * a.detach()),
        lambda a: F.huber_loss(a, a.detach() * 3, delta=0.5),
        lambda a: F.binary_cross_entropy_with_logits(a, a.detach().sigmoid()),
        lambda a: F.binary_cross_entropy(a.sigmoid(), a.detach().sigmoid()),
        lambda a: F.poisson_nll_loss(a, a.detach().abs()),
        lambda a: F.kl_div(a, a.detach().abs(), reduction="mean"),
        nn.SmoothL1Loss(),
        nn.SoftMarginLoss(),
    ]
    for loss, spec in list(product(losses, ("[S0]", "[S1]", "[S01]")))[::every]:
        ours, whole = Cut(LINE.clone().requires_grad_(), mesh, spec), LINE.clone()
        whole.requires_grad_()
        more = (Cut(signs, mesh, spec), signs) if loss in losses[6:] else ()
        result, wanted = loss(ours, *more[:1]), loss(whole, *more[1:])
        same(result, wanted)
        result.backward()
        wanted.backward()
        same(ours.grad, whole.grad)


def writes_to_parts(mesh: DeviceMesh, every: int) -> list[str]:
    """What is set in a tensor is in it; other writes to gathered parts are refused."""
    refusals = []

    def refused(call: Any, *args: Any) -> None:
        with pytest.raises(LayoutError) as caught:
            call(*args)
        refusals.append(str(caught.value))

    def ones(spec: str) -> tuple[Any, torch.Tensor]:
        return Cut(torch.ones(5, 3), mesh, spec), torch.ones(5, 3)

    specs = ("[S0,R]", "[R,S0]", "[S01,R]", "[S0,S1]", "[S10,R]", "[R,R]")
    parts: Any = ((0, 1), slice(1, 4), (slice(None), -1), (slice(0, 5, 2), slice(1, None)))
    for spec, part in list(product(specs, parts))[::every]:
        ours, whole = ones(spec)
        place = ours.to_local().data_ptr()
        for _ in range(2):  # what was once found out is remembered
            ours[part] = 9.0 if part == (0, 1) else ours[part] * 2
            whole[part] = 9.0 if part == (0, 1) else whole[part] * 2
            same(ours, whole)
        assert ours.to_local().data_ptr() == place
    takes: list[Any] = [
        lambda t: t[:2],
        lambda t: t[0],
        lambda t: t.narrow(0, 1, 2),
        lambda t: t.split(2)[1],
        lambda t: t[1:][1:].view(-1),
    ]
    writes: list[Any] = [
        lambda t: t.mul_(5),
        lambda t: t.zero_(),
        nn.init.zeros_,
        lambda t: F.relu(t, inplace=True),
        lambda t: torch.add(t.clone(), 1, out=t),
    ]
    ways = product(takes, writes, ("[S0,R]", "[R,S0]", "[R,R]"))
    for take, write, spec in list(ways)[::every]:
        ours, whole = ones(spec)
        if spec != "[R,R]":
            refused(lambda: write(take(ours)))  # noqa: B023
        else:
            write(take(ours))
            write(take(whole))
        same(ours, whole)
    ours, whole = ones("[R,S0]")
    refused(ours.flatten().mul_, 3)
    for each, index in (
        (ours, Cut(torch.tensor([0, 1]), mesh, "[R]")),
        (whole, torch.tensor([0, 1])),
    ):
        each.index_add_(1, index, each[:, :2])
    same(ours, whole)
    # A copy is nobody's part.
    ours, whole = ones("[S0,R]")
    same(ours[:2].clone().zero_(), whole[:2] * 0)
    for spec in ("[S0,R]", "[R,S1]", "[R,R]"):
        same(nn.init.eye_(ones(spec)[0]), nn.init.eye_(ones(spec)[1]))
    return refusals


def one_row_on_a_rank(line: DeviceMesh) -> None:
    """What has one row on some ranks, and several in all, is no dim of size 1 there."""
    wide = TABLE.reshape(5, 1, 3)  # 2, 2, 1 and no rows
    for spec in ("[S0,R,R]", "[R,R,S0]"):
        same(torch.squeeze_copy(Cut(wide.clone(), line, spec)), wide.squeeze())
        same(Cut(wide.clone(), line, spec).squeeze(), wide.squeeze())
    same(Cut(TABLE.clone(), line, "[S0,R]").squeeze_(), TABLE)
    for spec in ("[R,S0,R]", "[R,R,S0]"):
        out = Cut(torch.zeros(2, 5, 3).double(), line, spec)
        torch.expand_copy(Cut(TABLE.clone(), line, "[S0,R]"), (2, 5, 3), out=out)
        same(out, TABLE.expand(2, 5, 3))
    same(torch.expand_copy(Cut(TABLE.clone(), line, "[S0,R]"), (2, 5, 3)), TABLE.expand(2, 5, 3))


KEYS: list[Any] = [
    *(1, slice(1, 4), (slice(None), -1), slice(0, 5, 2), [0, 3], (..., 0), (None, 2)),
    *(lambda t: t > 7, lambda t: t[:, 0] > 7, lambda t: t.argmax(0)),
]


def numbers_in_parts(mesh: DeviceMesh, every: int) -> None:
    """Parts of any kind are set to a number, which torch has no rule for, and masks are whole."""
    numbers = (9.0, torch.tensor(4.0).double(), Cut(torch.tensor(7.0).double(), mesh, "[]"))
    specs = ("[S0,R]", "[R,S0]", "[S01,R]", "[S1,S0]", "[R,R]")
    for spec, (place, key) in list(product(specs, enumerate(KEYS)))[::every]:
        ours, whole = Cut(TABLE.clone(), mesh, spec), TABLE.clone()
        number = numbers[place % 3]
        ours[key(ours) if callable(key) else key] = number
        number = number.to_global() if isinstance(number, DTensor) else number
        whole[key(whole) if callable(key) else key] = number
        same(ours, whole)
    for spec in specs:
        ours, whole = Cut(TABLE.clone(), mesh, spec), TABLE.clone()
        with pytest.raises(
            IndexError, match="index 9 is out of bounds for dimension 0 with size 5"
        ):
            ours[9] = 1
        same(ours.fill_(numbers[2]), torch.full_like(whole, 7))
    ours = Cut(TABLE.clone(), mesh, "[R,S0]")
    ours.index_put_((ours > 7,), torch.tensor(1.0).double())
    same(ours, TABLE.where(TABLE <= 7, 1))


def gradients_of_writes(mesh: DeviceMesh) -> None:
    """Gradients go through what was set, though they arrive in another layout."""
    for spec in ("[S0,R]", "[R,S1]", "[R,R]"):
        grads = []
        for made in (lambda t: t.clone().requires_grad_(), lambda t: t):
            base, part = made(TABLE), made(TABLE[:2])
            if made(TABLE) is TABLE:
                base = Cut(TABLE.clone().requires_grad_(), mesh, spec)
                part = Cut(TABLE[:2].clone().requires_grad_(), mesh, "[R,R]")
            changed = base * 1
            changed[1:3] = part * 3
            changed[changed > 20] = 2
            changed[:, 1] = part[0, 0]
            factor = Cut(TABLE, mesh, "[S0,R]") if isinstance(base, DTensor) else TABLE
            loss = (changed * changed * factor).sum()
            loss = loss.to_global() if isinstance(base, DTensor) else loss
            loss.backward()
            grads.append([base.grad, part.grad])
        same(grads[1], grads[0])


def beside_pending_sums(rank: int, mesh: DeviceMesh, every: int) -> None:
    """Numbers and tensors without dims are added once, in whichever order they come."""
    number = iter(range(2, 60))
    kinds: list[Any] = [
        lambda n: n,
        lambda n: torch.tensor(n),
        lambda n: Cut(torch.tensor(n), mesh, "[]"),
    ]
    calls: list[Any] = [
        lambda t, n: t + n,
        lambda t, n: n - t,
        lambda t, n: torch.sub(t, n, alpha=2),
        lambda t, n: t * n + n,
        lambda t, n: (t + 0).remainder(n),
    ]
    for call, *both in list(product(calls, kinds, kinds))[::every]:
        whole = torch.arange(float(next(number, 7) + 1)).double()
        for kind in both:
            n = kind(3)
            plain = n.to_global() if isinstance(n, DTensor) else n
            same(call(pending(whole, rank, mesh), n), call(whole, plain))
    total = pending(LINE, rank, mesh)
    total += torch.tensor(10)
    same(total, LINE + 10)
    same(total + 10, LINE + 20)
    same(pending(LINE, rank, mesh).fill_(3.0), torch.full((5,), 3.0).double())
    same(pending(LINE, rank, mesh).fill_(4.0), torch.full((5,), 4.0).double())
    for inplace in (
        F.hardsigmoid,
        F.mish,
        F.relu,
        F.silu,
        partial(F.threshold, threshold=0.1, value=2.0),
    ):
        ours, whole = pending(LINE, rank, mesh), LINE.clone()
        result = inplace(ours, inplace=True)
        assert result is ours
        same(ours, inplace(whole, inplace=True))
    eye, target = torch.eye(2), torch.tensor([1.0, -1.0])
    given = [Cut(eye, mesh, "[R,S0]"), Cut(eye, mesh, "[R,S0]"), Cut(target, mesh, "[R]")]
    cosine: Any = F.cosine_embedding_loss
    same(cosine(*given), cosine(eye, eye, target))


def extrema_of_few(mesh: DeviceMesh, every: int) -> None:
    """An extremum is that of what there is, where a device has nothing."""
    calls: list[Any] = [
        lambda t: t.max(),
        lambda t: t.min(),
        lambda t: t.amax(0),
        lambda t: torch.amin(t, (0,)),
        lambda t: t.aminmax(),
        lambda t: t.argmax(),
        lambda t: t.argmin(0),
        lambda t: t.max(0),
        lambda t: t.norm(float("inf")),
        lambda t: torch.linalg.norm(t, float("-inf")),
        lambda t: torch.linalg.vector_norm(t, -2),
    ]
    for length, call in list(product((1, 3, 5), calls))[::every]:
        for _ in range(2):
            same(call(Cut(LINE[:length], mesh, "[S0]")), call(LINE[:length]))


def norms_after_others(mesh: DeviceMesh) -> None:
    """A norm is right, whatever was the order of the norm before it."""
    for number, (first, second) in enumerate(permutations((2.0, 0.0, inf, -1.0), 2)):
        whole = torch.arange(-3.0, 4.0 + number)  # of a length without earlier calls
        for order in (first, first, second):
            norm = torch.linalg.vector_norm(Cut(whole, mesh, "[S0]"), order)
            same(norm, torch.linalg.vector_norm(whole, order))


def on_flattened_axes(mesh: DeviceMesh) -> None:
    """Uneven shards over two axes are gathered as they lie, forwards and on the way back."""
    mesh.to_torch()["dp", "tp"]._flatten("both")
    t = Cut(TABLE.clone().requires_grad_(), mesh, "[S01,R]")
    whole = TABLE.clone().requires_grad_()
    same(t @ t.T, whole @ whole.T)
    same(t.softmax(0), whole.softmax(0))
    same(t[4], whole[4])
    (t.cumsum(0) * t.softmax(0)).to_global().sum().backward()
    (whole.cumsum(0) * whole.softmax(0)).sum().backward()
    same(t.grad, whole.grad)


def by_keyword(rank: int, mesh: DeviceMesh) -> None:
    """Tensors by keyword count as those by place do."""
    square = TABLE[:3] + torch.eye(3).double()
    for tolerance in (0.0, 0.9):
        rtol = torch.tensor(tolerance).double()
        for spec in ("[S0,R]", "[R,S01]", "[R,R]"):
            given = Cut(square, mesh, spec)
            same(
                torch.linalg.pinv(given, rtol=pending(rtol, rank, mesh)),
                torch.linalg.pinv(square, rtol=rtol),
            )
            out = Cut(torch.zeros(3, 3).double(), mesh, "[R,R]")
            torch.linalg.pinv(given, rtol=pending(rtol, rank, mesh), out=out)
            same(out, torch.linalg.pinv(square, rtol=rtol))


def results_given(rank: int, mesh: DeviceMesh) -> list[str]:
    """What is given as ``out=`` is written to; a write through a view of a sum is refused."""
    square, refusals = TABLE[:3] + torch.eye(3).double(), []
    rank_of: Any = torch.linalg.matrix_rank
    for given in (square, torch.stack([square, torch.ones(3, 3).double()])):
        for cut in ("R", "S0"):
            tensor = Cut(given, mesh, f"[{cut}{',R' * (given.dim() - 1)}]")
            more: list[Any] = [{}, {"tol": 0.1}, {"rtol": torch.tensor(0.1).double()}]
            for options in more:
                out = Cut(torch.full(given.shape[:-2], 7), mesh, f"[{'R' * (given.dim() - 2)}]")
                rank_of(tensor, out=out, **options)
                same(out, rank_of(given, **options))
    for number in (torch.tensor(1.0).double(), Cut(torch.tensor(1.0).double(), mesh, "[]")):
        for take in ("expand_as", "reshape_as"):
            total = pending(torch.tensor(2.0), rank, mesh)
            with pytest.raises(LayoutError) as caught:
                getattr(total, take)(number).mul_(3)
            refusals.append(str(caught.value))
            same(total, torch.tensor(2.0))
    return refusals


def after_earlier_calls(mesh: DeviceMesh) -> None:
    """Dtypes follow autocast and the default dtype, whatever they were in earlier calls."""
    tensor, numbers = Cut(TABLE.float(), mesh, "[S0,R]"), Cut(torch.arange(5), mesh, "[S0]")
    for _ in range(2):
        assert (tensor @ tensor.T).dtype == (numbers / 2).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        product = tensor @ tensor.T
    torch.set_default_dtype(torch.float64)
    half = numbers / 2
    torch.set_default_dtype(torch.float32)
    assert (product.dtype, half.dtype) == (torch.bfloat16, torch.float64)
    same(half, torch.arange(5).double() / 2)
    assert product.to_global().dtype == torch.bfloat16


def silent(rank: int, mesh: DeviceMesh, every: int) -> list[str]:
    """Assert all of it, or every so-manieth case, on a mesh of 2x2; return the refusals."""
    line = DeviceMesh(range(4), (4,))
    means(mesh, every)
    refusals = writes_to_parts(mesh, every) + results_given(rank, mesh)
    numbers_in_parts(mesh, every)
    one_row_on_a_rank(line)
    by_keyword(rank, mesh)
    gradients_of_writes(mesh)
    beside_pending_sums(rank, mesh, every)
    extrema_of_few(line, every)
    extrema_of_few(mesh, every)
    norms_after_others(line)
    on_flattened_axes(mesh)
    after_earlier_calls(mesh)
    return refusals
