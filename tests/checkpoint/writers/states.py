"""A state dict of every kind of tensor, and how to compare two."""

import torch

from shardspec import DeviceMesh, DTensor, save_sharded

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "complex64", "int64", "int32", "int16", "int8", "uint64",
    "uint32", "uint16", "uint8", "bool",
)  # fmt: skip


def state():
    """Tensors of every dtype with arbitrary bits, of unequal sizes, empty and without dims."""
    generator = torch.Generator().manual_seed(7)
    tensors = {"step": torch.tensor(7), "empty": torch.zeros(0, 4), "flag": torch.tensor(True)}
    for place, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        shape = (5 + place % 3, 11)
        count = shape[0] * shape[1] * dtype.itemsize
        bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        if dtype == torch.bool:
            bits %= 2
        tensors[f"of.{name}"] = bits.view(dtype).view(shape)
    return tensors


def save(path, tensors, mesh=None, spec="S01"):
    """Save tensors with their first dims cut."""
    mesh = mesh or DeviceMesh(range(6), (2, 3))
    cut = {
        name: DTensor(value, mesh, f"[{','.join([spec] + ['R'] * (value.dim() - 1))}]")
        if value.dim()
        else value
        for name, value in tensors.items()
    }
    save_sharded(cut, path)
    return path


def check_same(found, wanted):
    """Names, dtypes, shapes and bits are equal."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert bits(found[name]).equal(bits(value)), name


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)
