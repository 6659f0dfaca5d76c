"""Tensors made where they are to be: each device makes its own box and nothing else."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

import torch

from shardspec.boxes import Box
from shardspec.comm.communicator import Communicator
from shardspec.comm.process_group import communicator_of
from shardspec.dtensor import DTensor
from shardspec.dtypes import dtype_name
from shardspec.errors import DTypeError, LayoutError
from shardspec.layout.layout import Layout, SpecLike
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.random_boxes import Numbers, Words, box_of, normal, uniform

__all__ = ["arange", "empty", "full", "ones", "rand", "randn", "zeros"]

_BITS: Final = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of a uniform random number: as many as the dtype has, so that none is rounded up to 1."""


def empty(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    communicator: Communicator | None = None,
) -> DTensor:
    """Return a tensor of any values; every rank calls it.

    Parameters
    ----------
    size
        Sizes of the whole tensor: one after the other, or as one sequence.
    device_mesh, sharding_spec
        Where, and how to cut; without a spec it is whole on every device.
    dtype, device
        Of the shards, as for torch's function of that name; ``"meta"`` makes no data.
    requires_grad
        Whether the shards are leaves that collect gradients.
    communicator
        As for `DTensor`.

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
    layout = _layout(size, device_mesh, sharding_spec, dtype)

    def make(box: Box) -> torch.Tensor:
        return _empty(layout, box, device)

    return _made(layout, make, requires_grad, communicator)


def full(
    size: int | Sequence[int],
    fill_value: complex,
    *,
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    communicator: Communicator | None = None,
) -> DTensor:
    """Return a tensor of one value, whose dtype is that of the value by default; see `empty`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> full((3,), 7, device_mesh=mesh, sharding_spec="[S0]").shards
    {0: tensor([7, 7]), 1: tensor([7])}
    """
    dtype = torch.full((), fill_value).dtype if dtype is None else dtype
    layout = _layout((size,), device_mesh, sharding_spec, dtype)

    def make(box: Box) -> torch.Tensor:
        return _empty(layout, box, device).fill_(fill_value)

    return _made(layout, make, requires_grad, communicator)


def zeros(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    communicator: Communicator | None = None,
) -> DTensor:
    """Return a tensor of zeros; see `empty`.

    Examples
    --------
    >>> zeros(2, 3, device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[R,S0]")
    DTensor([R,S0] of [2, 3] float32 on 2; holds the shards of devices 0, 1)
    """
    return full(
        _one_size(size),
        0,
        device_mesh=device_mesh,
        sharding_spec=sharding_spec,
        dtype=dtype or torch.get_default_dtype(),
        device=device,
        requires_grad=requires_grad,
        communicator=communicator,
    )


def ones(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    communicator: Communicator | None = None,
) -> DTensor:
    """Return a tensor of ones; see `empty`.

    Examples
    --------
    >>> ones((3,), device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[S0]").to_global()
    tensor([1., 1., 1.])
    """
    return full(
        _one_size(size),
        1,
        device_mesh=device_mesh,
        sharding_spec=sharding_spec,
        dtype=dtype or torch.get_default_dtype(),
        device=device,
        requires_grad=requires_grad,
        communicator=communicator,
    )


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    communicator: Communicator | None = None,
) -> DTensor:
    """Return the numbers from `start`, or 0, up to but not including `end`; see `empty`.

    Raises
    ------
    LayoutError
        As for `empty`, or if `step` is 0 or leads away from `end`.

    Examples
    --------
    >>> arange(5, device_mesh=DeviceMesh(range(2), (2,)), sharding_spec="[S0]").shards
    {0: tensor([0, 1, 2]), 1: tensor([3, 4])}
    """
    start, end = (0, start) if end is None else (start, end)
    if step == 0 or (end - start) / step < 0:
        raise LayoutError(f"arange from {start} to {end} by steps of {step} never ends; turn step")
    whole = all(isinstance(number, int) for number in (start, end, step))
    length = -((start - end) // step) if whole else ceil((end - start) / step)
    dtype = dtype or (torch.int64 if whole else torch.get_default_dtype())
    layout = _layout((int(length),), device_mesh, sharding_spec, dtype)

    def make(box: Box) -> torch.Tensor:
        result = _empty(layout, box, device)
        places = torch.arange(*box[0], device=result.device)
        return result.copy_(start + places * step if whole else start + places.double() * step)

    return _made(layout, make, requires_grad, communicator)


def rand(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    communicator: Communicator | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Return uniform random numbers from 0 up to but not including 1; every rank calls it.

    They are one global tensor, whatever the mesh and the spec: a number depends on the seed, on
    its place and on the dtype. The seed is drawn from `generator`, or from torch's own, on the
    first rank of the mesh. How numbers come about stands in `shardspec.random_boxes`.

    Parameters
    ----------
    size, device_mesh, sharding_spec, dtype, device, requires_grad, communicator
        As for `empty`; the dtype is a real floating one of at least 16 bits.
    generator
        On the CPU.

    Raises
    ------
    DTypeError
        If the dtype is another one.
    LayoutError, AxisError
        As for `empty`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(6), (2, 3))
    >>> _ = torch.manual_seed(4)
    >>> rows = rand(5, 7, device_mesh=mesh, sharding_spec="[S10,R]").to_global()
    >>> _ = torch.manual_seed(4)
    >>> bool((rand(5, 7, device_mesh=mesh, sharding_spec="[R,S0]").to_global() == rows).all())
    True
    """
    layout = _layout(size, device_mesh, sharding_spec, dtype)
    numbers = uniform(_BITS.get(layout.dtype, 0))
    return _random(layout, numbers, device, requires_grad, communicator, generator)


def randn(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    sharding_spec: SpecLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool = False,
    communicator: Communicator | None = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Return normal random numbers of mean 0 and variance 1; see `rand`.

    Examples
    --------
    >>> mesh = DeviceMesh(range(2), (2,))
    >>> randn(7, 5, device_mesh=mesh, sharding_spec="[R,S0]", device="meta").to_local(1)
    tensor(..., device='meta', size=(7, 2))
    """
    layout = _layout(size, device_mesh, sharding_spec, dtype)
    return _random(layout, normal, device, requires_grad, communicator, generator)


def _one_size(size: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """Return sizes that were given one after the other, or as one sequence."""
    if len(size) == 1 and isinstance(size[0], Sequence):
        return tuple(size[0])
    for number in size:
        if not isinstance(number, int):
            raise LayoutError(f"size {size}: give whole numbers, or one sequence of them")
    return tuple(number for number in size if isinstance(number, int))


def _layout(
    size: Sequence[int | Sequence[int]],
    mesh: DeviceMesh,
    spec: SpecLike | None,
    dtype: torch.dtype | None,
) -> Layout:
    shape = _one_size(size)
    chosen = ShardingSpec(len(shape)) if spec is None else spec
    layout = Layout(mesh, chosen, shape, dtype or torch.get_default_dtype())
    if layout.spec.partials:
        raise LayoutError(
            f"a new tensor cannot be cut as {layout.spec}: a pending reduction has one addend per "
            "device; give each device's addend to DTensor.from_local"
        )
    return layout


def _empty(layout: Layout, box: Box, device: torch.device | str | None) -> torch.Tensor:
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return torch.empty([hi - lo for lo, hi in box], dtype=dtype, device=device)


def _made(
    layout: Layout,
    make: Callable[[Box], torch.Tensor],
    requires_grad: bool,
    communicator: Communicator | None,
) -> DTensor:
    chosen = communicator_of(layout.mesh) if communicator is None else communicator
    shards = {
        device: make(layout.box(device)).requires_grad_(requires_grad)
        for device in chosen.addressable
    }
    return DTensor.from_shards(shards, layout, chosen)


def _random(
    layout: Layout,
    numbers: Callable[[Words], Numbers],
    device: torch.device | str | None,
    requires_grad: bool,
    communicator: Communicator | None,
    generator: torch.Generator | None,
) -> DTensor:
    if layout.dtype not in _BITS:
        raise DTypeError(
            f"random numbers of {dtype_name(layout.dtype)}: make them of one of "
            f"{', '.join(_BITS)}, and convert them"
        )
    chosen = communicator_of(layout.mesh) if communicator is None else communicator
    if device is not None and torch.device(device).type == "meta":
        return _made(layout, lambda box: _empty(layout, box, device), requires_grad, chosen)
    drawn = int(torch.randint(2**63 - 1, (), generator=generator))
    # Ranks may have drawn from generators in other states.
    seeds = chosen.gather(dict.fromkeys(chosen.addressable, drawn))
    seed = seeds.get(layout.mesh.ids[0], drawn)

    def make(box: Box) -> torch.Tensor:
        result = _empty(layout, box, device)
        for index, part in box_of(layout.global_shape, box, seed, numbers):
            result[index].copy_(torch.from_numpy(part))
        return result

    return _made(layout, make, requires_grad, chosen)
