"""The tensors of many ranks, and how each form cuts them; without torch."""

from math import prod
from typing import Final, TypeAlias

import numpy as np

__all__ = [
    "ARRAYS",
    "CUTS",
    "MEGATRON",
    "MESHES",
    "MODEL",
    "SHORT",
    "Stored",
    "megatron_file",
    "megatron_parts",
    "mesh_name",
    "parts_of",
]

Stored: TypeAlias = tuple[str, list[int], list[int], int]
"""A box in a file: tensor, first index and size per dim, and how many bytes it takes there."""

MESHES: Final = ((2,), (3,), (4,), (2, 2), (2, 3), (4, 2), (2, 2, 2))
SHORT: Final = ((2, 2),)
"""Those of the sample."""

ARRAYS: Final[dict[str, np.ndarray]] = {
    "alike": np.arange(3, dtype=np.int64),
    "even": np.arange(72, dtype=np.int32).reshape(12, 6),
    "half": np.arange(24, dtype=np.int64).reshape(8, 3),
    "uneven": np.arange(35, dtype=np.float32).reshape(5, 7),
}
"""Every value once in each tensor, so that a part in a wrong place shows."""

CUTS: Final[dict[int, dict[str, tuple[int | None, ...]]]] = {
    1: {"alike": (None,), "even": (0,), "half": (0,), "uneven": (0,)},
    2: {"alike": (None, None), "even": (0, 1), "half": (0, None), "uneven": (0, 0)},
    3: {"alike": (None,) * 3, "even": (0, 0, 1), "half": (0, None, None), "uneven": (0, 0, 0)},
}
"""Which dim of a tensor each axis of a mesh cuts, by how many axes there are."""

MEGATRON: Final = {
    (2,): (2, 1),
    (3,): (3, 1),
    (4,): (1, 4),
    (2, 2): (2, 2),
    (2, 3): (2, 3),
    (4, 2): (4, 2),
}
"""Tensor parallel ranks and pipeline stages."""
_LAYERS: Final = {1: (4,), 2: (2, 2), 3: (2, 1, 1), 4: (1, 1, 1, 1)}


def _model() -> dict[str, np.ndarray]:
    shapes = {"embedding.word_embeddings.weight": (12, 3), "decoder.final_layernorm.weight": (3,)}
    for layer in range(4):
        shapes[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = (3, 12)
        shapes[f"decoder.layers.{layer}.pre_mlp_layernorm.weight"] = (3,)
    shapes["output_layer.weight"] = (12, 3)
    model: dict[str, np.ndarray] = {}
    start = 0
    for name, shape in shapes.items():
        model[name] = np.arange(start, start + prod(shape), dtype=np.float32).reshape(shape)
        start += prod(shape)
    return model


MODEL: Final = _model()
"""What Megatron's files hold in all."""


def mesh_name(shape: tuple[int, ...]) -> str:
    """Return the name of a mesh in file names."""
    return "x".join(map(str, shape))


def parts_of(count: int, suffix: str) -> dict[str, dict[str, np.ndarray]]:
    """Return what each of the files of a checkpoint of whole tensors holds."""
    stem = "pytorch_model" if suffix == "bin" else "model"
    return {
        f"{stem}-{n + 1:05d}-of-{count:05d}.{suffix}": {
            f"w{n}": np.arange(n, n + 6, dtype=np.float32).reshape(2, 3),
            f"b{n}": np.arange(n + 1, dtype=np.int32),
        }
        for n in range(count)
    }


def megatron_file(rank: int, stage: int, stages: int) -> str:
    """Return the name of a file of Megatron's."""
    more = f"_{stage:03d}" if stages > 1 else ""
    return f"mp_rank_{rank:02d}{more}/model_optim_rng.pt"


def megatron_parts(stage: int, rank: int, stages: int, ranks: int) -> dict[str, np.ndarray]:
    """Return what a tensor parallel rank of a stage holds, by its names there."""
    before = sum(_LAYERS[stages][:stage])
    held: dict[str, np.ndarray] = {}
    for name, array in MODEL.items():
        start, layers, rest = name.partition(".layers.")
        if layers:
            number, _, rest = rest.partition(".")
            if not 0 <= int(number) - before < _LAYERS[stages][stage]:
                continue
            name = f"{start}.layers.{int(number) - before}.{rest}"
        elif stage != (0 if name.startswith("embedding") else stages - 1):
            continue
        dim = 1 if "fc2" in name else 0
        cut = "layernorm" not in name
        held[name] = np.split(array, ranks, dim)[rank].copy() if cut else array
    return held
