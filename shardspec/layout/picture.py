"""A layout drawn as text: which devices hold which part of the tensor."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Final, TypeAlias

from shardspec.boxes import Box, box_size

if TYPE_CHECKING:
    from shardspec.layout.layout import Layout

__all__ = [
    "Paint",
    "block_title",
    "cells_of",
    "cells_text",
    "ids_text",
    "notes",
    "picture",
    "title",
]

_Interval: TypeAlias = tuple[int, int]
Paint: TypeAlias = Callable[[int, str], str]
"""Number of a box and a piece of text to that piece as it is to be printed."""

_TO_SCALE: Final = 8
"""Up to this size a dim is drawn to scale."""
_ELEMENT_LINES: Final = 2
"""Lines an element takes in a drawing to scale, the border below it included."""
_ELEMENT_WIDTH: Final = 4
"""The least columns it takes, the border beside it included: about as wide as high."""


def _plain(_box: int, text: str) -> str:
    return text


def picture(layout: "Layout", paint: Paint = _plain) -> str:
    """Draw which devices hold which part of a tensor.

    Every cell is one box: its rows stand to the left, its columns above, and in it the physical ids
    of all devices that hold it. The cells of a dim of up to 8 elements are drawn to scale. A tensor
    of one dim is one row; one of more than two dims is drawn as one grid of its last two dims for
    each block of the others.

    Parameters
    ----------
    layout
        What to draw.
    paint
        Given the number of a box and a piece of its cell, returns the piece as it is to be printed,
        in colour for example.

    Examples
    --------
    >>> from shardspec import DeviceMesh, Layout
    >>> print(picture(Layout(DeviceMesh(range(4), (2, 2)), "[S0,R]", (4, 4), "f32")))
    [S0,R] of [4, 4] float32 on 2x2
               0:4
        ┌───────────────┐
        │               │
    0:2 │      0,1      │
        │               │
        ├───────────────┤
        │               │
    2:4 │      2,3      │
        │               │
        └───────────────┘
    """
    return "\n".join([title(layout), *cells_text(cells_of(layout), paint), *notes(layout)])


def cells_text(cells: Mapping[Box, Sequence[int]], paint: Paint = _plain) -> list[str]:
    """Draw boxes that make up a grid, each with the ids of those that hold it.

    Parameters
    ----------
    cells
        Box to ids. With the intervals that any of them has along each dim, every combination is
        a box.
    paint
        As for `picture`.

    Returns
    -------
    list of str
        A grid for each block of the dims before the last two, each after its title.

    Examples
    --------
    >>> print(cells_text({((0, 9),): [0, 2], ((9, 12),): [1]})[0])
      0:9   9:12
    ┌─────┬─────┐
    │ 0,2 │  1  │
    └─────┴─────┘
    """
    if not cells:
        return []
    parts = []
    numbers = {box: number for number, box in enumerate(sorted(cells))}
    dims = len(next(iter(cells)))
    sides = [sorted({box[dim] for box in cells}) for dim in range(dims)]
    grid = _Grid(sides[-2] if dims > 1 else [], sides[-1] if sides else [], paint)
    for outer in product(*sides[:-2]):
        if outer:
            parts.append(block_title(outer))
        boxes = [outer + box for box in product(*sides[-2:])]
        parts.append(grid.text([(numbers[box], ids_text(cells[box])) for box in boxes]))
    return parts


def cells_of(layout: "Layout") -> dict[Box, list[int]]:
    """Return every box that is not empty, with the devices that hold it."""
    holders: dict[Box, list[int]] = {}
    for device, box in layout.boxes().items():
        if box_size(box):
            holders.setdefault(box, []).append(device)
    return holders


def title(layout: "Layout") -> str:
    """Say what is drawn, with axes by name where the mesh has names.

    Examples
    --------
    >>> from shardspec import DeviceMesh, Layout
    >>> mesh = DeviceMesh(range(4), (2, 2), axis_names=("dp", "tp"))
    >>> title(Layout(mesh, "[S10,R]", (4, 4), "f32"))
    '[S(tp,dp),R] of [4, 4] float32 on dp=2,tp=2'
    """
    shape = list(layout.global_shape)
    return f"{layout.labelled_spec} of {shape} {layout.dtype} on {layout.mesh}"


def block_title(outer: Box) -> str:
    """Name the block of a tensor of more than two dims that one grid shows."""
    return f"[{', '.join(f'{lo}:{hi}' for lo, hi in outer)}, :, :]"


def notes(layout: "Layout") -> list[str]:
    """Say what the cells cannot: who holds nothing, and what is pending."""
    idle = [device for device, box in layout.boxes().items() if not box_size(box)]
    lines = [f"nothing is held by {ids_text(idle)}"] if idle else []
    for partial in layout.spec.partials:
        assert isinstance(partial.axis, int), "layouts hold axes by number"
        axis = layout.mesh.axis_label(partial.axis)
        lines.append(f"pending over axis {axis}: the {partial.op} of what its devices hold")
    return lines


def ids_text(ids: Sequence[int]) -> str:
    """List ids in ascending order, three or more in a row as the first and the last.

    Examples
    --------
    >>> ids_text([4, 0, 1]), ids_text([7, 2, 3, 1])
    ('0,1,4', '1-3,7')
    """
    runs: list[list[int]] = []
    for id_ in sorted(ids):
        if runs and id_ == runs[-1][-1] + 1:
            runs[-1].append(id_)
        else:
            runs.append([id_])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


class _Grid:
    """Cells side by side, with the intervals of their rows and columns where the tensor has any."""

    def __init__(
        self, rows: Sequence[_Interval], columns: Sequence[_Interval], paint: Paint
    ) -> None:
        self._paint = paint
        self._rows = rows
        self._columns = columns
        self._above = [f"{lo}:{hi}" for lo, hi in columns]
        self._beside = [f"{lo}:{hi}" for lo, hi in rows] or [""]
        self._margin = max(map(len, self._beside)) + bool(rows)

    def text(self, cells: Sequence[tuple[int, str]]) -> str:
        """Draw the cells, given row by row: the number of the box, and what stands in it."""
        per_row = max(len(self._columns), 1)
        lines = [cells[at : at + per_row] for at in range(0, len(cells), per_row)]
        widths = self._widths(
            [max(len(text) for _, text in column) for column in zip(*lines, strict=True)]
        )
        drawn = []
        if self._above:
            labels = (label.center(w) for label, w in zip(self._above, widths, strict=True))
            drawn.append(f"{'':{self._margin}} {' '.join(labels)}".rstrip())
        corners = "┌┬┐"
        for label, line, height in zip(self._beside, lines, self._heights(), strict=True):
            drawn.append(self._rule(corners, widths))
            for at in range(height):
                middle = at == height // 2
                body = "│".join(
                    self._paint(number, (text if middle else "").center(width))
                    for (number, text), width in zip(line, widths, strict=True)
                )
                drawn.append(f"{label if middle else '':{self._margin}}│{body}│")
            corners = "├┼┤"
        drawn.append(self._rule("└┴┘", widths))
        return "\n".join(drawn)

    def _rule(self, corners: str, widths: Sequence[int]) -> str:
        line = corners[1].join("─" * width for width in widths)
        return f"{'':{self._margin}}{corners[0]}{line}{corners[2]}"

    def _widths(self, letters: Sequence[int]) -> list[int]:
        """Return the inner width of each column, given the letters that its cells need."""
        needed = [count + 2 for count in letters]
        if not self._columns:
            return needed
        needed = [max(n, len(above)) for n, above in zip(needed, self._above, strict=True)]
        if self._columns[-1][1] > _TO_SCALE:
            return [max(needed)] * len(needed)
        sizes = [hi - lo for lo, hi in self._columns]
        an_element = max(-(-(n + 1) // size) for n, size in zip(needed, sizes, strict=True))
        return [max(an_element, _ELEMENT_WIDTH) * size - 1 for size in sizes]

    def _heights(self) -> list[int]:
        """Return the inner height of each row."""
        if not self._rows or self._rows[-1][1] > _TO_SCALE:
            return [1] * len(self._beside)
        return [_ELEMENT_LINES * (hi - lo) - 1 for lo, hi in self._rows]
