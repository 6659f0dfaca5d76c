"""Which devices hold which part of a tensor, drawn as text, SVG and HTML.

A picture is made of boxes and of who holds them, so that it can be of a layout or of a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from html import escape
from itertools import product
from typing import Final, TypeAlias

from shardspec.boxes import Box
from shardspec.errors import LayoutError

__all__ = ["MAX_CELLS", "Paint", "Picture", "box_color", "box_rgb", "ids_text"]

Paint: TypeAlias = Callable[[int, str], str]
"""Number of a box and a piece of text to that piece as it is to be printed."""

_Interval: TypeAlias = tuple[int, int]

MAX_CELLS: Final = 4096
"""A picture of more boxes can neither be read nor drawn in good time."""

_TO_SCALE: Final = 8
"""Up to this size a dim is drawn to scale in text."""
_ELEMENT_LINES: Final = 2
"""Lines an element takes in a drawing to scale, the border below it included."""
_ELEMENT_WIDTH: Final = 4
"""The least columns it takes, the border beside it included: about as wide as high."""

_PIXELS: Final = 26
"""Of an element in an SVG drawn to scale."""
_TO_SCALE_IN_SVG: Final = 12
_LINE: Final = 18
_MARGIN: Final = 12
_LETTER: Final = 7
"""Width of a letter of the font, about."""
_STYLE: Final = (
    ".shardspec-layout{background:#fff}"
    ".shardspec-layout text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}"
    ".shardspec-layout .side{fill:#59636e}.shardspec-layout .title{font-weight:600}"
    ".shardspec-layout rect.cell{stroke:#1f2328;stroke-width:1}"
)
"""Holds for these drawings alone: in a notebook a style is in force on the whole page."""


def _plain(_box: int, text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes that make up a grid, each with the ids of those that hold it.

    Every cell is one box: its rows stand to the left, its columns above, and in it the physical ids
    of all devices that hold it. A tensor of one dim is one row; one of more than two dims is drawn
    as one grid of its last two dims for each block of the others.
    """

    title: str
    cells: Mapping[Box, Sequence[int]]
    """Box to ids. With the intervals that any of them has along each dim, every combination is a
    box."""
    notes: Sequence[str] = ()
    """What the cells cannot say."""

    def text(self, paint: Paint = _plain) -> str:
        """Draw it as text; the cells of a dim of up to 8 elements are drawn to scale.

        Parameters
        ----------
        paint
            Given the number of a box and a piece of its cell, returns the piece as it is to be
            printed, in colour for example.

        Examples
        --------
        >>> print(Picture("three parts", {((0, 9),): [0, 2], ((9, 12),): [1]}).text())
        three parts
          0:9   9:12
        ┌─────┬─────┐
        │ 0,2 │  1  │
        └─────┴─────┘
        """
        lines = [self.title]
        _, rows, columns = self._sides()
        grid = _Grid(rows, columns, paint)
        for outer, boxes in self._blocks():
            if outer:
                lines.append(_block_title(outer))
            lines.append(grid.text([(number, ids_text(self.cells[box])) for number, box in boxes]))
        return "\n".join([*lines, *self.notes])

    def svg(self) -> str:
        """Draw it as one SVG element, in colour.

        Raises
        ------
        LayoutError
            If there are more than `MAX_CELLS` boxes.

        Examples
        --------
        >>> drawn = Picture("two parts", {((0, 2),): [0], ((2, 4),): [1]}).svg()
        >>> drawn.count('class="cell"'), drawn.startswith("<svg ")
        (2, True)
        """
        if len(self.cells) > MAX_CELLS:
            raise LayoutError(
                f"{self.title}: {len(self.cells)} boxes are more than the {MAX_CELLS} that can be "
                "drawn; draw it on a smaller mesh"
            )
        texts = {box: ids_text(ids) for box, ids in self.cells.items()}
        _, rows, columns = self._sides()
        letters = max(map(len, [*texts.values(), *map(_side_text, columns)]), default=0)
        widths = _lengths(columns, (letters + 2) * _LETTER)
        heights = _lengths(rows, _PIXELS)
        left = _MARGIN + _LETTER * (1 + max((len(_side_text(row)) for row in rows), default=-1))
        width = left + sum(widths) + _MARGIN
        y = _MARGIN + _LINE
        parts = [_svg_text(_MARGIN, y - 4, self.title, "title", "start")]
        for outer, boxes in self._blocks():
            if outer:
                y += _LINE + 6
                parts.append(_svg_text(_MARGIN, y, _block_title(outer), "side", "start"))
            y += _LINE
            x = left
            for column, across in zip(columns, widths, strict=bool(columns)):
                parts.append(_svg_text(x + across / 2, y, _side_text(column), "side"))
                x += across
            y += 6
            places = iter(boxes)
            for row, down in enumerate(heights):
                if rows:
                    text = _side_text(rows[row])
                    parts.append(_svg_text(left - _LETTER, y + down / 2 + 4, text, "side", "end"))
                x = left
                for across, (number, box) in zip(widths, places, strict=False):
                    where = f"[{', '.join(map(_side_text, box))}]"
                    parts.append(
                        f'<rect class="cell" x="{x}" y="{y}" width="{across}" height="{down}" '
                        f'fill="{box_color(number)}"><title>{where} on {texts[box]}</title></rect>'
                    )
                    parts.append(_svg_text(x + across / 2, y + down / 2 + 4, texts[box]))
                    x += across
                y += down
        for note in self.notes:
            y += _LINE
            parts.append(_svg_text(_MARGIN, y, note, "side", "start"))
        letters = max(map(len, [self.title, *self.notes]))
        width = max(width, 2 * _MARGIN + letters * _LETTER)
        size = f'width="{width}" height="{y + _MARGIN}" viewBox="0 0 {width} {y + _MARGIN}"'
        body = "\n".join(parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="shardspec-layout" {size} role="img" '
            f'aria-label="{escape(self.title)}">\n<style>{_STYLE}</style>\n{body}\n</svg>'
        )

    def html(self) -> str:
        """Return a page of its own with the drawing; raises as `svg` does."""
        head = f'<meta charset="utf-8"><title>{escape(self.title)}</title>'
        return (
            "<!DOCTYPE html>\n"
            f'<html lang="en"><head>{head}</head>\n'
            f"<body>\n{self.svg()}\n</body></html>\n"
        )

    def _sides(self) -> tuple[list[list[_Interval]], list[_Interval], list[_Interval]]:
        """Return the intervals along the dims before the last two, and of rows and columns."""
        dims = len(next(iter(self.cells), ()))
        sides = [sorted({box[dim] for box in self.cells}) for dim in range(dims)]
        return sides[:-2], sides[-2] if dims > 1 else [], sides[-1] if sides else []

    def _blocks(self) -> Iterator[tuple[Box, list[tuple[int, Box]]]]:
        """Yield for each grid what it shows, and its boxes row by row, numbered."""
        if not self.cells:
            return
        outer_sides, *inner = self._sides()
        numbers = {box: number for number, box in enumerate(sorted(self.cells))}
        for outer in product(*outer_sides):
            boxes = [(*outer, *box) for box in product(*(side for side in inner if side))]
            yield outer, [(numbers[box], box) for box in boxes]


def box_color(number: int) -> str:
    """Return the colour of a box by its number: neighbours differ, and black can be read on it.

    Examples
    --------
    >>> box_color(0), box_color(1)
    ('#acd1f6', '#f6acbc')
    """
    return "#{:02x}{:02x}{:02x}".format(*box_rgb(number))


def box_rgb(number: int) -> tuple[int, int, int]:
    """Return the colour of a box as red, green and blue from 0 to 255."""
    # The golden angle: however many boxes there are, hues stay apart.
    hue = (210 + number * 137.508) % 360 / 360
    red, green, blue = (round(255 * part) for part in hls_to_rgb(hue, 0.82, 0.8))
    return red, green, blue


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


def _block_title(outer: Box) -> str:
    """Name the block of a tensor of more than two dims that one grid shows."""
    return f"[{', '.join(map(_side_text, outer))}, :, :]"


def _side_text(side: _Interval) -> str:
    return f"{side[0]}:{side[1]}"


class _Grid:
    """Cells side by side, with the intervals of their rows and columns where the tensor has any."""

    def __init__(
        self, rows: Sequence[_Interval], columns: Sequence[_Interval], paint: Paint
    ) -> None:
        self._paint = paint
        self._rows = rows
        self._columns = columns
        self._above = list(map(_side_text, columns))
        self._beside = list(map(_side_text, rows)) or [""]
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


def _lengths(intervals: Sequence[tuple[int, int]], least: int) -> list[int]:
    """Return the pixels of every interval of a dim: to scale where it is short."""
    if not intervals:
        return [least]
    sizes = [hi - lo for lo, hi in intervals]
    if intervals[-1][1] > _TO_SCALE_IN_SVG:
        return [least] * len(sizes)
    element = max(_PIXELS, *(-(-least // size) for size in sizes))
    return [element * size for size in sizes]


def _svg_text(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
