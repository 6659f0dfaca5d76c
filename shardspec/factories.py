"""Tensors made where they are to be: each device makes its own box and nothing else.

Random numbers depend on their place in the global tensor only. That is taken row by row in blocks
of 4096 numbers. Block *k* comes from the 4096 words of 64 bits that the counters *1024 k* to
*1024 k + 1023* make in Philox 4x64 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), keyed by the seed, as in `numpy.random.Philox`, whose words
are the same in every version. A uniform number is a word's leading bits; two normal numbers come
from two words by the method of Box and Muller (1958).
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, prod, tau
from typing import Final, Required, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch

from shardspec.boxes import Box, box_shape
from shardspec.comm.communicator import Communicator
from shardspec.comm.process_group import communicator_of
from shardspec.dtensor import DTensor
from shardspec.dtypes import dtype_name
from shardspec.errors import DTypeError, LayoutError
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.shards import check_copies

_BITS: Final = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a uniform random number: as many as the dtype has, so that none is rounded up to 1."""
BLOCK: Final = 4096
_AT_ONCE: Final = 64 * BLOCK
"""Numbers that are made at a time; what is made needs no more memory than the box and these."""

Words: TypeAlias = npt.NDArray[np.uint64]
Numbers: TypeAlias = npt.NDArray[np.float64]


class Options(TypedDict, total=False):
    """Keywords that all functions here take; every rank of the mesh gives the same."""

    device_mesh: Required[DeviceMesh]
    """Where the tensor is to be."""
    sharding_spec: SpecLike | None
    """How it is sharded; replicated on every device without one."""
    dtype: torch.dtype | None
    """Of the shards; by default that of torch's function of the same name."""
    device: torch.device | str | None
    """Of the shards, as for torch's function; ``"meta"`` makes no data."""
    requires_grad: bool
    """Whether the shards are leaves that collect gradients."""
    communicator: Communicator | None
    """As for `DTensor`."""


class _Target:
    """What is to be made."""

    def __init__(
        self,
        size: Sequence[int | Sequence[int]],
        default: torch.dtype | None = None,
        *,
        device_mesh: DeviceMesh,
        sharding_spec: SpecLike | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        given = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        shape = [number for number in given if isinstance(number, int)]
        if len(shape) != len(given):
            raise LayoutError(f"size {size}: give whole numbers, or one sequence of them")
        spec = ShardingSpec(len(shape)) if sharding_spec is None else sharding_spec
        dtype = dtype or default or torch.get_default_dtype()
        self.layout = Layout(device_mesh, spec, shape, dtype)
        if self.layout.spec.partials:
            raise LayoutError(
                f"a new tensor cannot be sharded as {self.layout.spec}: a pending reduction has "
                "one addend per device; give each device's addend to DTensor.from_local"
            )
        self.communicator = communicator_of(device_mesh) if communicator is None else communicator
        self.device = None if device is None else torch.device(device)
        self._requires_grad = requires_grad

    def made(self, fill: Callable[[Box, torch.Tensor], object]) -> DTensor:
        """Return the tensor, each shard filled by a function of its box."""
        shards = {}
        for device in self.communicator.addressable:
            box, dtype = self.layout.box(device), getattr(torch, self.layout.dtype)
            shards[device] = torch.empty(box_shape(box), dtype=dtype, device=self.device)
            fill(box, shards[device])
            shards[device].requires_grad_(self._requires_grad)
        return DTensor.from_shards(shards, self.layout, self.communicator)

    def check_same(self, value: torch.Tensor, name: str) -> None:
        """Compare between ranks, where ``SHARDSPEC_CHECK=1``, what is given on each."""
        check_copies(self.communicator, dict.fromkeys(self.communicator.addressable, value), name)


def empty(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
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
        If a size is no whole number, the spec does not fit, or a reduction is pending in it.
    AxisError
        If the mesh lacks an axis of the spec.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> empty(7, 3, device_mesh=mesh, sharding_spec="[S0,R]").to_local(1).shape
    torch.Size([3, 3])
    """
    return _Target(size, **options).made(lambda *_: None)


def full(size: int | Sequence[int], fill_value: complex, **options: Unpack[Options]) -> DTensor:
    """Return a tensor of one value, whose dtype is that of the value by default; see `empty`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> full((3,), 7, device_mesh=mesh, sharding_spec="[S0]").shards
    {0: tensor([7, 7]), 1: tensor([7])}
    """
    value = torch.full((), fill_value)
    target = _Target((size,), value.dtype, **options)
    target.check_same(value, "fill_value")
    return target.made(lambda _, shard: shard.fill_(fill_value))


def zeros(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
    """Return a tensor of zeros; see `empty`.

    Examples
    --------
    >>> zeros(2, 3, device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[R,S0]")
    DTensor([R,S0] of [2, 3] float32 on 2; holds the shards of devices 0, 1)
    """
    return _Target(size, **options).made(lambda _, shard: shard.zero_())


def ones(*size: int | Sequence[int], **options: Unpack[Options]) -> DTensor:
    """Return a tensor of ones; see `empty`.

    Examples
    --------
    >>> ones((3,), device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[S0]").to_global()
    tensor([1., 1., 1.])
    """
    return _Target(size, **options).made(lambda _, shard: shard.fill_(1))


def arange(
    start: float, end: float | None = None, step: float = 1, **options: Unpack[Options]
) -> DTensor:
    """Return the numbers from `start`, or 0, up to but not including `end`; see `empty`.

    A `LayoutError` says that `step` is 0 or leads away from `end`.

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
    target = _Target((int(length),), torch.int64 if integral else None, **options)
    target.check_same(torch.tensor([start, step]), "start and step")

    def fill(box: Box, shard: torch.Tensor) -> None:
        places = torch.arange(*box[0], device=shard.device)
        shard.copy_(start + places * step if integral else start + places.double() * step)

    return target.made(fill)


def rand(
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> DTensor:
    """Return uniform random numbers from 0 up to but not including 1; every rank calls it.

    They are one global tensor, whatever the mesh and the spec: a number depends on the seed, on
    its place and on the dtype. The seed is drawn from `generator`, or from torch's own, on the
    first rank of the mesh. `shardspec.factories` says how numbers are made.

    Parameters
    ----------
    size
        As for `empty`.
    generator
        On the CPU.
    **options
        See `Options`; a dtype that is no real floating one of at least 16 bits is a `DTypeError`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(6), (2, 3))
    >>> _ = torch.manual_seed(4)
    >>> rows = rand(5, 7, device_mesh=mesh, sharding_spec="[S10,R]").to_global()
    >>> _ = torch.manual_seed(4)
    >>> bool((rand(5, 7, device_mesh=mesh, sharding_spec="[R,S0]").to_global() == rows).all())
    True
    """
    target = _Target(size, **options)
    return _random(target, uniform(_BITS.get(target.layout.dtype, 0)), generator)


def randn(
    *size: int | Sequence[int],
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> DTensor:
    """Return normal random numbers of mean 0 and variance 1; see `rand`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> randn(7, 5, device_mesh=mesh, sharding_spec="[R,S0]", device="meta").to_local(1)
    tensor(..., device='meta', size=(7, 2))
    """
    return _random(_Target(size, **options), normal, generator)


def _random(
    target: _Target, numbers: Callable[[Words], Numbers], generator: torch.Generator | None
) -> DTensor:
    layout, communicator = target.layout, target.communicator
    if layout.dtype not in _BITS:
        raise DTypeError(
            f"random numbers of {dtype_name(layout.dtype)}: make them of one of "
            f"{', '.join(_BITS)}, and convert them"
        )
    if target.device is not None and target.device.type == "meta":
        return target.made(lambda *_: None)
    drawn = int(torch.randint(2**63 - 1, (), generator=generator))
    # Ranks may have drawn from generators in other states.
    seeds = communicator.gather(dict.fromkeys(communicator.addressable, drawn))
    seed = seeds.get(layout.mesh.ids[0], drawn)

    def fill(box: Box, shard: torch.Tensor) -> None:
        for index, part in box_of(layout.global_shape, box, seed, numbers):
            shard[index].copy_(torch.from_numpy(part))

    return target.made(fill)


def uniform(bits: int) -> Callable[[Words], Numbers]:
    """Return what makes numbers from 0 up to but not including 1, multiples of ``2**-bits``."""

    def numbers(words: Words) -> Numbers:
        return (words >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits

    return numbers


def normal(words: Words) -> Numbers:
    """Make numbers of mean 0 and variance 1."""
    unit = uniform(53)(words)
    radius = np.sqrt(-2 * np.log1p(-unit[0::2]))
    angle = tau * unit[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def box_of(
    shape: tuple[int, ...], box: Box, seed: int, made_of: Callable[[Words], Numbers]
) -> Iterator[tuple[tuple[slice, ...], Numbers]]:
    """Yield the parts of a box of a tensor, each with its index in the box, one after the other.

    The seed is from 0 up to ``2**64``; `made_of` is `normal`, or what `uniform` returns.
    """
    if not prod(box_shape(box)):
        return
    yield from _parts(shape, box, 0, (), lambda lo, hi: _stretch(lo, hi, seed, made_of))


def _parts(
    shape: tuple[int, ...],
    box: Box,
    start: int,
    index: tuple[slice, ...],
    stretch: Callable[[int, int], Numbers],
) -> Iterator[tuple[tuple[slice, ...], Numbers]]:
    """Yield the parts of a box in a tensor whose first number is number `start` of all."""
    if not shape:
        yield index, stretch(start, start + 1).reshape(())
        return
    (lo, hi), inner = box[0], prod(shape[1:])
    rows = max(1, _AT_ONCE // inner)
    for first in range(lo, hi, rows):
        last = min(first + rows, hi)
        here = (*index, slice(first - lo, last - lo))
        if inner > _AT_ONCE:
            # One row at a time, each cut further.
            yield from _parts(shape[1:], box[1:], start + first * inner, here, stretch)
            continue
        rows_here = stretch(start + first * inner, start + last * inner)
        columns = tuple(slice(*side) for side in box[1:])
        yield here, rows_here.reshape(last - first, *shape[1:])[:, *columns]


def _stretch(lo: int, hi: int, seed: int, made_of: Callable[[Words], Numbers]) -> Numbers:
    first, last = lo // BLOCK, -(-hi // BLOCK)
    # Four words to a counter; numpy's generator counts up before it makes the first.
    words = np.random.Philox(key=seed, counter=first * BLOCK // 4).random_raw(
        (last - first) * BLOCK
    )
    return made_of(words)[lo - first * BLOCK : hi - first * BLOCK]
