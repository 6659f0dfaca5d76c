"""A layout drawn as SVG and HTML: the cells of `shardspec.layout.picture`, in colour."""

from collections.abc import Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import product
from typing import TYPE_CHECKING, Final

from shardspec.boxes import Box
from shardspec.errors import LayoutError
from shardspec.layout.picture import block_title, cells_of, ids_text, notes, title

if TYPE_CHECKING:
    from shardspec.layout.layout import Layout

__all__ = ["MAX_CELLS", "box_color", "box_rgb", "layout_html", "layout_svg"]

MAX_CELLS: Final = 4096
"""A picture of more boxes can neither be read nor drawn in good time."""

_SCALE: Final = 26
"""Pixels of an element in a drawing to scale."""
_TO_SCALE: Final = 12
"""Up to this size a dim is drawn to scale; longer ones have cells of one size."""
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


def layout_svg(layout: "Layout") -> str:
    """Draw which devices hold which part of a tensor, as one SVG element.

    Raises
    ------
    LayoutError
        If there are more than `MAX_CELLS` boxes.

    Examples
    --------
    >>> from shardspec import DeviceMesh, Layout
    >>> drawn = layout_svg(Layout(DeviceMesh(range(4), (2, 2)), "[S01,R]", (4, 4), "f32"))
    >>> drawn.count('class="cell"'), drawn.startswith("<svg ")
    (4, True)
    """
    cells = cells_of(layout)
    if len(cells) > MAX_CELLS:
        raise LayoutError(
            f"{layout} has {len(cells)} boxes, more than the {MAX_CELLS} that can be drawn; draw "
            "it on a smaller mesh"
        )
    texts = {box: ids_text(devices) for box, devices in cells.items()}
    numbers = {box: number for number, box in enumerate(sorted(cells))}
    sides = [sorted({box[dim] for box in cells}) for dim in range(len(layout.global_shape))]
    rows = sides[-2] if len(sides) > 1 and cells else []
    columns = sides[-1] if sides and cells else []
    letters = max((len(text) for text in texts.values()), default=0)
    above = max((len(f"{lo}:{hi}") for lo, hi in columns), default=0)
    widths = _lengths(columns, (max(letters, above) + 2) * _LETTER)
    heights = _lengths(rows, _SCALE)
    left = _MARGIN + max((len(f"{lo}:{hi}") for lo, hi in rows), default=-1) * _LETTER + _LETTER
    parts: list[str] = []
    y = _MARGIN + _LINE
    width = max(left + sum(widths) + _MARGIN, 2 * _MARGIN + len(title(layout)) * _LETTER)
    parts.append(_text(_MARGIN, y - 4, title(layout), "title", "start"))
    for outer in product(*sides[:-2]) if cells else ():
        if outer:
            y += _LINE + 6
            parts.append(_text(_MARGIN, y, block_title(outer), "side", "start"))
        y += _LINE
        x = left
        for (lo, hi), across in zip(columns, widths, strict=bool(columns)):
            parts.append(_text(x + across / 2, y, f"{lo}:{hi}", "side"))
            x += across
        y += 6
        for row, down in enumerate(heights):
            x = left
            if rows:
                lo, hi = rows[row]
                parts.append(_text(left - _LETTER, y + down / 2 + 4, f"{lo}:{hi}", "side", "end"))
            for column, across in enumerate(widths):
                box: Box = (*outer, *rows[row : row + 1], *columns[column : column + 1])
                where = "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]"
                parts.append(
                    f'<rect class="cell" x="{x}" y="{y}" width="{across}" height="{down}" '
                    f'fill="{box_color(numbers[box])}">'
                    f"<title>{where} on {texts[box]}</title></rect>"
                )
                parts.append(_text(x + across / 2, y + down / 2 + 4, texts[box]))
                x += across
            y += down
    for note in notes(layout):
        y += _LINE
        parts.append(_text(_MARGIN, y, note, "side", "start"))
        width = max(width, 2 * _MARGIN + len(note) * _LETTER)
    size = f'width="{width}" height="{y + _MARGIN}" viewBox="0 0 {width} {y + _MARGIN}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="shardspec-layout" {size} role="img" '
        f'aria-label="{escape(title(layout))}">\n<style>{_STYLE}</style>\n{body}\n</svg>'
    )


def layout_html(layout: "Layout") -> str:
    """Return a page of its own with the drawing; raises as `layout_svg` does.

    Examples
    --------
    >>> from shardspec import DeviceMesh, Layout
    >>> page = layout_html(Layout(DeviceMesh(range(2), (2,)), "[S0]", (4,), "f32"))
    >>> page.splitlines()[0], "</html>" in page
    ('<!DOCTYPE html>', True)
    """
    head = f'<meta charset="utf-8"><title>{escape(title(layout))}</title>'
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head>{head}</head>\n'
        f"<body>\n{layout_svg(layout)}\n</body></html>\n"
    )


def _lengths(intervals: Sequence[tuple[int, int]], least: int) -> list[int]:
    """Return the pixels of every interval of a dim: to scale where it is short."""
    if not intervals:
        return [least]
    sizes = [hi - lo for lo, hi in intervals]
    if intervals[-1][1] > _TO_SCALE:
        return [least] * len(sizes)
    element = max(_SCALE, *(-(-least // size) for size in sizes))
    return [element * size for size in sizes]


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
