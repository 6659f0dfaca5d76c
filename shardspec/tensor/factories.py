"""Provides `empty`, `zeros`, `arange`, `rand`, and others, which make each device's shard in place.

A random number depends only on the seed and on its row-major position in the global tensor. Block
*k* of 4096 positions uses the 64-bit words that the counters *1024 k* to *1024 k + 1023* make in
Philox 4x64 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
2, 3", SC 2011), keyed by the seed; `numpy.random.Philox` has the same words in every version. A
uniform number is a word's leading bits; two normal numbers come from two words by the method of Box
and Muller (1958).
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, prod, tau
from typing import Any, Final, Required, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch

from shardspec.boxes import Box, box_shape
from shardspec.comm.communicator import Communicator
from shardspec.dtypes import dtype_name
from shardspec.errors import DTypeError, LayoutError
from shardspec.layout.layout import SpecLike, chosen_spec
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.tensor.compiling import outside_graphs
from shardspec.tensor.dtensor import DTensor
from shardspec.tensor.shards import check_copies, communicator_for, new_layout

_BITS: Final = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a uniform random number: the precision of the dtype, so that none is rounded up to 1."""
BLOCK: Final = 4096
_AT_ONCE: Final = 64 * BLOCK
"""Numbers that are made at a time; besides these only the box itself is in memory."""

Words: TypeAlias = npt.NDArray[np.uint64]
Numbers: TypeAlias = npt.NDArray[np.float64]
_Size: TypeAlias = int | Sequence[int]


class Options(TypedDict, total=False):
    """Keywords of all functions of this module, the same on every rank of the mesh.

    `sharding_spec` and `placements` mean the same and are as for `DTensor`; by default the tensor
    is replicated. `dtype` and `device` are by default those of torch's function of the same name;
    the device ``"meta"`` makes no data.
    """

    device_mesh: Required[DeviceMesh]
    sharding_spec: SpecLike | None
    placements: SpecLike | None
    dtype: torch.dtype | None
    device: torch.device | str | None
    requires_grad: bool
    communicator: Communicator | None


@outside_graphs
def _made(
    name: str,
    size: Sequence[_Size],
    fill: Callable[[Box, torch.Tensor], object],
    options: Options,
    default: torch.dtype | None = None,
    given: torch.Tensor | None = None,
) -> DTensor:
    """Return a new DTensor: `fill` writes each shard of this process, given its box.

    `given` must be the same on all ranks. `name` is that of the public function, for errors.
    """
    communicator = _communicator(name, options)
    device_mesh, device = options["device_mesh"], options.get("device")
    # The layout checks what the sizes are.
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    spec = chosen_spec(options.get("sharding_spec"), options.get("placements"))
    spec = ShardingSpec(len(shape)) if spec is None else spec
    dtype = options.get("dtype") or default or torch.get_default_dtype()
    layout = new_layout(device_mesh, spec, shape, dtype)
    if given is not None:
        what = "what the tensor is made from"
        check_copies(communicator, dict.fromkeys(communicator.addressable, given), what)
    shards = {}
    for rank in communicator.addressable:
        box = layout.box(rank)
        shards[rank] = torch.empty(box_shape(box), dtype=dtype, device=device)
        fill(box, shards[rank])
        shards[rank].requires_grad_(options.get("requires_grad", False))
    return DTensor.from_shards(shards, layout, communicator)


def _communicator(name: str, options: Options) -> Communicator:
    """Return the communicator for a new tensor's mesh; `name` is the called function's."""
    for unknown in options.keys() - Options.__annotations__.keys():
        keywords = ", ".join(Options.__annotations__)
        raise TypeError(f"{name}() has no keyword {unknown!r}; it takes {keywords}")
    return communicator_for(options.get("communicator"), options.get("device_mesh"))


def empty(*size: _Size, **options: Unpack[Options]) -> DTensor:
    """Return a tensor of any values; every rank calls it.

    Parameters
    ----------
    size
        Sizes of the global tensor: one after the other, or as one sequence.
    **options
        See `Options`; ``device_mesh`` is needed.

    Raises
    ------
    LayoutError
        If a size is not a whole number, the spec does not fit, or has a pending reduction.
    AxisError
        If the mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> empty(7, 3, device_mesh=mesh, sharding_spec="[S0,R]").to_local(1).shape
    torch.Size([3, 3])
    """
    return _made("empty", size, lambda *_: None, options)


def full(size: _Size, fill_value: complex, **options: Unpack[Options]) -> DTensor:
    """Return a tensor of one value, whose dtype is the default; see `empty`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> full((3,), 7, device_mesh=mesh, sharding_spec="[S0]").shards
    {0: tensor([7, 7]), 1: tensor([7])}
    """
    value = torch.full((), fill_value)
    return _made(
        "full", (size,), lambda _, shard: shard.fill_(fill_value), options, value.dtype, value
    )


def zeros(*size: _Size, **options: Unpack[Options]) -> DTensor:
    """Return a tensor of zeros; see `empty`.

    Examples
    --------
    >>> zeros(2, 3, device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[R,S0]")
    DTensor([R,S0] of [2, 3] float32 on 2; values:
    tensor([[0., 0., 0.],
            [0., 0., 0.]]))
    """
    return _made("zeros", size, lambda _, shard: shard.zero_(), options)


def ones(*size: _Size, **options: Unpack[Options]) -> DTensor:
    """Return a tensor of ones; see `empty`.

    Examples
    --------
    >>> ones((3,), device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[S0]").to_global()
    tensor([1., 1., 1.])
    """
    return _made("ones", size, lambda _, shard: shard.fill_(1), options)


def arange(
    start: float, end: float | None = None, step: float = 1, **options: Unpack[Options]
) -> DTensor:
    """Return the numbers from `start`, or 0, up to but not including `end`; see `empty`.

    Raises `LayoutError` if `step` is 0 or leads away from `end`.

    Examples
    --------
    >>> arange(5, device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[S0]").shards
    {0: tensor([0, 1, 2]), 1: tensor([3, 4])}
    """
    start, end = (0, start) if end is None else (start, end)
    if step == 0 or (end - start) / step < 0:
        raise LayoutError(f"arange from {start} to {end} by steps of {step} never ends; turn step")
    integral = all(isinstance(number, int) for number in (start, end, step))
    length = -((start - end) // step) if integral else ceil((end - start) / step)

    def fill(box: Box, shard: torch.Tensor) -> None:
        places = torch.arange(*box[0], device=shard.device)
        shard.copy_(start + places * step if integral else start + places.double() * step)

    default = torch.int64 if integral else None
    bounds = torch.tensor([start, step])
    return _made("arange", (int(length),), fill, options, default, bounds)


def rand(
    *size: _Size, generator: torch.Generator | None = None, **options: Unpack[Options]
) -> DTensor:
    """Return uniform random numbers from 0 up to but not including 1; every rank calls it.

    The global tensor does not depend on the mesh and the spec: a number depends on the seed, its
    position and the dtype, as `shardspec.tensor.factories` describes.

    The first rank of the mesh draws the seed from `generator`, on the CPU, or from torch's own.
    Raises `DTypeError` unless the dtype is a real floating one of at least 16 bits; see also
    `empty`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(6), (2, 3))
    >>> _ = torch.manual_seed(4)
    >>> rows = rand(5, 7, device_mesh=mesh, sharding_spec="[S10,R]").to_global()
    >>> _ = torch.manual_seed(4)
    >>> bool((rand(5, 7, device_mesh=mesh, sharding_spec="[R,S0]").to_global() == rows).all())
    True
    """
    return _random("rand", size, uniform, generator, options)


def randn(
    *size: _Size, generator: torch.Generator | None = None, **options: Unpack[Options]
) -> DTensor:
    """Return normal random numbers of mean 0 and variance 1; see `rand`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> randn(7, 5, device_mesh=mesh, sharding_spec="[R,S0]", device="meta").to_local(1)
    tensor(..., device='meta', size=(7, 2))
    """
    return _random("randn", size, lambda _: normal, generator, options)


@outside_graphs
def _random(
    name: str,
    size: Sequence[_Size],
    numbers_of: Callable[[int], Callable[[Words], Numbers]],
    generator: torch.Generator | None,
    options: Options,
) -> DTensor:
    communicator = _communicator(name, options)
    with communicator.telling():
        dtype = dtype_name(options.get("dtype") or torch.get_default_dtype())
        if dtype not in _BITS:
            raise DTypeError(
                f"random numbers cannot be made in {dtype}; take one of {', '.join(_BITS)}, then "
                "convert"
            )
        tensor = _made(name, size, lambda *_: None, options)
        if torch.device(options.get("device") or "cpu").type == "meta":
            return tensor
        drawn = int(torch.randint(2**63 - 1, (), generator=generator))
        # Ranks may have drawn from generators in other states.
        seeds = communicator.gather(dict.fromkeys(communicator.addressable, drawn))
    seed = seeds.get(tensor.device_mesh.ids[0], drawn)
    shape = tuple(tensor.shape) or (1,)  # a scalar is a vector of one number
    for rank, shard in tensor.shards.items():
        box, out = tensor.layout.box(rank) or ((0, 1),), shard.detach().view(shard.shape or (1,))
        for index, part in box_of(shape, box, seed, numbers_of(_BITS[dtype])):
            out[index].copy_(torch.from_numpy(part))
    return tensor


def uniform(bits: int) -> Callable[[Words], Numbers]:
    """Return a function from random 64-bit words to numbers in [0, 1), of `bits` bits each."""
    return lambda words: (words >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits


def normal(words: Words) -> Numbers:
    """Return normal random numbers (mean 0, variance 1) made of random 64-bit words."""
    unit = uniform(53)(words)
    radius = np.sqrt(-2 * np.log1p(-unit[0::2]))
    angle = tau * unit[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def box_of(
    shape: tuple[int, ...], box: Box, seed: int, made_of: Callable[[Words], Numbers], start: int = 0
) -> Iterator[tuple[tuple[slice, ...], Numbers]]:
    """Yield the random numbers of a box of a tensor: (index within the box, numbers) pairs.

    They are the seed's from `start` on; `made_of` is `normal`, or what `uniform` returns.
    """
    if not prod(box_shape(box)):
        return
    (lo, hi), inner = box[0], prod(shape[1:])
    rows = max(1, _AT_ONCE // inner)
    for first in range(lo, hi, rows):
        last = min(first + rows, hi)
        rows_in_box, at = slice(first - lo, last - lo), start + first * inner
        if inner > _AT_ONCE:
            # One row at a time, each divided further.
            for index, part in box_of(shape[1:], box[1:], seed, made_of, at):
                yield (rows_in_box, *index), part[None]
        else:
            made = _stretch(at, start + last * inner, seed, made_of)
            columns = tuple(slice(*side) for side in box[1:])
            yield (rows_in_box,), made.reshape(last - first, *shape[1:])[:, *columns]


def _stretch(lo: int, hi: int, seed: int, made_of: Callable[[Words], Numbers]) -> Numbers:
    first, last = lo // BLOCK, -(-hi // BLOCK)
    # A counter yields four words; numpy's generator counts up before it makes the first.
    source = np.random.Philox(key=seed, counter=first * BLOCK // 4)
    return made_of(source.random_raw((last - first) * BLOCK))[
        lo - first * BLOCK : hi - first * BLOCK
    ]
