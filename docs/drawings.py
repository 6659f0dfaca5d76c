"""The drawings of the README and of docs/, made from layouts: ``python docs/drawings.py``.

They lie in docs/images, since a README is shown where nothing can be run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from shardspec import DeviceMesh, Layout, LayoutConverter
from shardspec.layout.picture import row_svg

IMAGES: Final = Path(__file__).parent / "images"
MESH: Final = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
SHAPE: Final = (4, 8)


def layout() -> str:
    """Return one tensor on a mesh of two axes."""
    return Layout(MESH, "[S(dp),S(tp)]", SHAPE, "float32").drawing().svg()


def conversion() -> str:
    """Return a conversion by one all-to-all, before and after."""
    line = DeviceMesh(range(4), axis_names=("tp",))
    source = Layout(line, "[S(tp),R]", (4096, 8192), "bf16")
    return LayoutConverter().plan(source, "[R,S(tp)]").svg()


def specs(texts: Sequence[str], per_row: int) -> str:
    """Return the same tensor under several specs."""
    layouts = [Layout(MESH, text, SHAPE, "float32") for text in texts]
    pictures = [replace(one.drawing(), title=str(one.labelled_spec)) for one in layouts]
    return row_svg(pictures, per_row=per_row)


DRAWINGS: Final[Mapping[str, Callable[[], str]]] = {
    "layout.svg": layout,
    "conversion.svg": conversion,
    "one-axis.svg": lambda: specs(["[R,R]", "[S(dp),R]", "[R,S(tp)]"], 3),
    "two-axes.svg": lambda: specs(["[S(dp),S(tp)]", "[S(dp,tp),R]", "[S(tp,dp),R]"], 3),
    "pending.svg": lambda: specs(["[S(dp),R|P(tp)]", "[S(dp),R]"], 2),
}
"""File name to what draws it."""


def main() -> None:
    """Write all drawings."""
    for name, drawn in DRAWINGS.items():
        (IMAGES / name).write_text(f"{drawn()}\n", "utf-8")


if __name__ == "__main__":
    main()
