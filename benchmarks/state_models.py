"""The models that `benchmarks.state` converts: names, shapes and specs of their tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardspec import DeviceMesh, Layout

__all__ = ["ROWS", "Row", "Shapes", "deepseek", "specs_of"]

Shapes: TypeAlias = dict[str, tuple[int, ...]]
Specs: TypeAlias = dict[str, str]


def dense(width: int, words: int, layers: int = 28) -> Shapes:
    """Return the tensors of a dense model: 7 a layer, and the embedding."""
    shapes: Shapes = {"words": (words, width)}
    for layer in range(layers):
        at = f"layers.{layer}"
        shapes |= {f"{at}.{name}": (width, width) for name in ("q", "k", "v", "o")}
        shapes |= {f"{at}.up": (4 * width, width), f"{at}.down": (width, 4 * width)}
        shapes |= {f"{at}.norm": (width,)}
    return shapes


def experts(width: int, layers: int = 24, count: int = 8) -> Shapes:
    """Return the tensors of a mixture of experts, those of a layer stacked."""
    shapes: Shapes = {"words": (8192, width)}
    for layer in range(layers):
        at = f"layers.{layer}"
        shapes |= {f"{at}.{name}": (width, width) for name in ("q", "k", "v", "o")}
        shapes |= {f"{at}.experts.up": (count, 2 * width, width)}
        shapes |= {f"{at}.experts.down": (count, width, 2 * width)}
        shapes |= {f"{at}.norm": (width,)}
    return shapes


def _kind(name: str) -> str:
    return name.removeprefix("layers.").split(".", 1)[-1]


def specs_of(shapes: Shapes, columns: str, rows: str, vectors: str, **others: str) -> Specs:
    """Return a spec by the kind of tensor: cut by columns, by rows, or a vector."""
    specs = {}
    for name, shape in shapes.items():
        kind = _kind(name)
        usual = rows if kind in ("o", "down") else columns
        key = kind.replace(".", "_")
        specs[name] = others.get(key, vectors if len(shape) == 1 else usual)
    return specs


@dataclass(frozen=True, slots=True)
class Row:
    """One conversion of a model."""

    name: str
    world: int
    shapes: Shapes
    source: tuple[DeviceMesh, Specs]
    target: tuple[DeviceMesh, Specs]

    def layouts(self, end: tuple[DeviceMesh, Specs]) -> dict[str, Layout]:
        """Return the layouts at one end."""
        mesh, specs = end
        return {
            name: Layout(mesh, specs[name], shape, "float32") for name, shape in self.shapes.items()
        }


def _rows() -> tuple[Row, ...]:
    large, small, mixture = dense(288, 13312), dense(56, 4096), experts(192)
    fsdp = ("[S0,R]", "[S0,R]", "[S0]")
    both = ("[S10,R]", "[S0,S1]", "[S0]")
    tensor = ("[S0,R]", "[R,S0]", "[R]")
    line, grid, eight = (DeviceMesh(range(n), s) for n, s in ((4, (4,)), (4, (2, 2)), (8, (8,))))
    mixed = specs_of(
        mixture, "[S1,R]", "[R,S1]", "[R]", experts_up="[S0,S1,R]", experts_down="[S0,R,S1]"
    )
    served = specs_of(
        mixture, "[S0,R]", "[R,S0]", "[R]", experts_up="[R,S0,R]", experts_down="[R,R,S0]"
    )

    def row(name: str, shapes: Shapes, mesh: DeviceMesh, cut: Sequence[str], *to: int) -> Row:
        target_mesh = DeviceMesh(to, (len(to),))
        ends = (mesh, specs_of(shapes, *cut)), (target_mesh, specs_of(shapes, *tensor))
        return Row(name, 1 + max(*mesh.ids, *to), shapes, *ends)

    return (
        row("FSDP 4 → TP 4, ids permuted", large, line, fsdp, 2, 0, 3, 1),
        row("FSDP×TP 2×2 → TP 2 on ids 1, 3", large, grid, both, 1, 3),
        row("FSDP×TP 2×2 → TP 4 on ids 4 to 7", large, grid, both, 4, 5, 6, 7),
        row("FSDP 8 → TP 2 on ids 5, 1", large, eight, fsdp, 5, 1),
        row("FSDP 4 → TP 4, small model", small, line, fsdp, 2, 0, 3, 1),
        Row(
            "experts, EP×TP 2×2 → TP×DP 2×2",
            4,
            mixture,
            (grid, mixed),
            (DeviceMesh([3, 1, 0, 2], (2, 2)), served),
        ),
    )


ROWS: Final = _rows()


def deepseek(layers: int = 61, count: int = 256) -> Shapes:
    """Return shapes like those of DeepSeek-V3: three matrices for each expert of a layer."""
    wide, low = 7168, 2048
    shapes: Shapes = {"words": (129280, wide), "head": (129280, wide)}
    for layer in range(layers):
        at = f"layers.{layer}"
        shapes |= {f"{at}.norm.{i}": (wide,) for i in range(2)}
        shapes |= {f"{at}.q_a": (1536, wide), f"{at}.q_b": (24576, 1536)}
        shapes |= {f"{at}.kv_a": (576, wide), f"{at}.kv_b": (32768, 512), f"{at}.o": (wide, 16384)}
        for expert in range(count + 64):
            shapes |= {f"{at}.experts.{expert}.{name}": (low, wide) for name in ("gate", "up")}
            shapes |= {f"{at}.experts.{expert}.down": (wide, low)}
    return shapes
