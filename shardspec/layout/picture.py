"""Draws the boxes of a tensor with their devices, as text, SVG and HTML."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import groupby, product
from typing import Final, TypeAlias
from xml.etree.ElementTree import Element, SubElement, tostring

from shardspec.boxes import Box
from shardspec.errors import LayoutError

Paint: TypeAlias = Callable[[int, str], str]
"""Maps the number of a box and a piece of its text to the text to print, such as a colored one."""

_Interval: TypeAlias = tuple[int, int]

MAX_CELLS: Final = 4096
"""The most boxes of a picture; more would be illegible and slow."""

_PIXELS: Final = 26
"""Pixels per element in an SVG drawn to scale."""
_LINE: Final = 18
_MARGIN: Final = 12
_LETTER: Final = 7
"""Approximate width of a letter of the font."""


def style_sheet(kind: str, light: Mapping[str, str], dark: Mapping[str, str]) -> str:
    """Return the style sheet of drawings of one class, with extra rules for light and dark screens.

    Every rule names the class, because in a notebook a style sheet affects the whole page.

    >>> sheet = style_sheet("graph", {" .edge": "stroke:#000"}, {})
    >>> sheet[:23], ".graph .edge{stroke:#000}" in sheet
    ('.graph{background:#fff}', True)
    """

    def rules(more: Mapping[str, str]) -> str:
        return "".join(f".{kind}{chosen}{{{says}}}" for chosen, says in more.items())

    font = "font:12px ui-monospace,Menlo,Consolas,monospace"
    on_light = {"": "background:#fff", " text": f"{font};fill:#1f2328", " .side": "fill:#59636e"}
    on_dark = {"": "background:#0d1117", " text": "fill:#e6edf3", " .side": "fill:#9198a1"}
    always = rules({**on_light, " .title": "font-weight:600", **light})
    return f"{always}@media(prefers-color-scheme:dark){{{rules({**on_dark, **dark})}}}"


_ARROW: Final = "fill:none;stroke:#59636e;stroke-width:1.5"
_STYLE: Final = style_sheet(
    "shardspec-layout",
    {" .cell": "stroke:#1f2328;stroke-width:1", " .arrow": _ARROW},
    # Boxes are pale on light and dark screens.
    {" .ids": "fill:#1f2328", " .arrow": "stroke:#9198a1"},
)


def draw(parent: Element, tag: str, text: str | None = None, /, **attributes: object) -> Element:
    """Add an element to an SVG; numbers are rounded to a tenth, `_` in a name becomes `-`.

    >>> line = draw(Element("svg"), "line", class_="edge", stroke_width=1.26)
    >>> tostring(line)
    b'<line class="edge" stroke-width="1.3" />'
    """
    element = SubElement(parent, tag)
    element.text = text
    for key, value in attributes.items():
        if value is not None:
            written = f"{round(value, 1):g}" if isinstance(value, float) else str(value)
            element.set(key.rstrip("_").replace("_", "-"), written)
    return element


def svg_page(root: Element, width: float, height: float, style: str) -> str:
    """Return a drawing as text, given its size in pixels and its style."""
    sheet = Element("style")
    sheet.text = style
    root.insert(0, sheet)
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.set("width", f"{width:g}")
    root.set("height", f"{height:g}")
    return tostring(root, encoding="unicode")


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing of the boxes of a layout or checkpoint, each with the ids of its holders.

    A tensor of one dim is a single row. A tensor of more than two dims is drawn as several grids of
    its last two dims, one for each block of the other dims.
    """

    title: str
    cells: Mapping[Box, Sequence[int]]
    """Box to the ids of its holders; the boxes form a grid."""
    notes: Sequence[str] = ()
    """Lines of text below the drawing."""

    def text(self, paint: Paint = lambda _, text: text) -> str:
        """Return the drawing as text; dims of up to 8 elements are drawn to scale.

        >>> print(Picture("three parts", {((0, 9),): [0, 2], ((9, 12),): [1]}).text())
        three parts
          0:9   9:12
        ┌─────┬─────┐
        │ 0,2 │  1  │
        └─────┴─────┘
        """
        lines = [self.title]
        for outer, boxes in self._blocks():
            lines += [_block_title(outer)] if outer else []
            lines += self._grid(
                [(number, ids_text(self.cells[box])) for number, box in boxes], paint
            )
        return "\n".join([*lines, *self.notes])

    def _grid(self, cells: Sequence[tuple[int, str]], paint: Paint) -> Iterator[str]:
        """Yield the lines of one block from the numbers and texts of its boxes, row by row."""
        _, rows, columns = self._sides()
        above, beside = list(map(_side_text, columns)), list(map(_side_text, rows)) or [""]
        margin, per_row = max(map(len, beside)) + bool(rows), max(len(columns), 1)
        lines = [cells[at : at + per_row] for at in range(0, len(cells), per_row)]
        needed = [max(len(text) for _, text in column) + 3 for column in zip(*lines, strict=True)]
        if above:
            needed = [max(n, len(label) + 1) for n, label in zip(needed, above, strict=True)]
        widths = [length - 1 for length in _lengths(columns, needed, 4, 8)]
        heights = [length - 1 for length in _lengths(rows, [2] * len(beside), 2, 8)]
        if above:
            labels = (label.center(w) for label, w in zip(above, widths, strict=True))
            yield f"{'':{margin}} {' '.join(labels)}".rstrip()

        def rule(left: str, between: str, right: str) -> str:
            return f"{'':{margin}}{left}{between.join('─' * width for width in widths)}{right}"

        corners = "┌┬┐"
        for label, line, height in zip(beside, lines, heights, strict=True):
            yield rule(*corners)
            corners = "├┼┤"
            for at in range(height):
                middle = at == height // 2
                body = "│".join(
                    paint(number, (text if middle else "").center(width))
                    for (number, text), width in zip(line, widths, strict=True)
                )
                yield f"{label if middle else '':{margin}}│{body}│"
        yield rule(*"└┴┘")

    def svg(self) -> str:
        """Return the drawing as one SVG element; raises `LayoutError` above `MAX_CELLS` boxes."""
        root, width, height = self._element()
        return svg_page(root, width, height, _STYLE)

    def _element(self) -> tuple[Element, float, float]:
        """Return the drawing, its width and its height."""
        if len(self.cells) > MAX_CELLS:
            raise LayoutError(
                f"{self.title}: {len(self.cells)} boxes are more than the {MAX_CELLS} that can be "
                "drawn; draw it on a smaller mesh"
            )
        root = Element(
            "svg", {"class": "shardspec-layout", "role": "img", "aria-label": self.title}
        )

        def write(
            x: float, y: float, text: str, kind: str | None = None, anchor: str = "middle"
        ) -> None:
            draw(root, "text", text, class_=kind, x=x, y=y, text_anchor=anchor)

        texts = {box: ids_text(ids) for box, ids in self.cells.items()}
        _, rows, columns = self._sides()
        letters = max(map(len, [*texts.values(), *map(_side_text, columns)]), default=0)
        widths = _lengths(columns, [(letters + 2) * _LETTER] * max(len(columns), 1), _PIXELS, 12)
        heights = _lengths(rows, [_PIXELS] * max(len(rows), 1), _PIXELS, 12)
        left = _MARGIN + _LETTER * (1 + max((len(_side_text(row)) for row in rows), default=-1))
        y = _MARGIN + _LINE
        write(_MARGIN, y - 4, self.title, "title", "start")
        for outer, boxes in self._blocks():
            if outer:
                y += _LINE + 6
                write(_MARGIN, y, _block_title(outer), "side", "start")
            y += _LINE
            for at, column in enumerate(columns):
                write(left + sum(widths[:at]) + widths[at] / 2, y, _side_text(column), "side")
            y += 6
            places = iter(boxes)
            for row, down in enumerate(heights):
                if rows:
                    write(left - _LETTER, y + down / 2 + 4, _side_text(rows[row]), "side", "end")
                x = left
                for across, (number, box) in zip(widths, places, strict=False):
                    where = f"[{', '.join(map(_side_text, box))}] on {texts[box]}"
                    color = "#{:02x}{:02x}{:02x}".format(*box_rgb(number))
                    sides = {"x": x, "y": y, "width": across, "height": down}
                    draw(draw(root, "rect", class_="cell", **sides, fill=color), "title", where)
                    write(x + across / 2, y + down / 2 + 4, texts[box], "ids")
                    x += across
                y += down
        for note in self.notes:
            y += _LINE
            write(_MARGIN, y, note, "side", "start")
        letters = max(map(len, [self.title, *self.notes]))
        width = max(left + sum(widths) + _MARGIN, 2 * _MARGIN + letters * _LETTER)
        return root, width, y + _MARGIN

    def html(self) -> str:
        """Return a standalone page with the drawing; raises what `svg` raises."""
        return html_page(self.title, self.svg())

    def _sides(self) -> tuple[list[list[_Interval]], list[_Interval], list[_Interval]]:
        """Return the intervals of the dims before the last two, of rows, and of columns."""
        dims = len(next(iter(self.cells), ()))
        sides = [sorted({box[dim] for box in self.cells}) for dim in range(dims)]
        return sides[:-2], sides[-2] if dims > 1 else [], sides[-1] if sides else []

    def _blocks(self) -> Iterator[tuple[Box, list[tuple[int, Box]]]]:
        """Yield (box of the outer dims, numbered boxes row by row) of each grid."""
        outer_sides, *inner = self._sides()
        numbers = {box: number for number, box in enumerate(sorted(self.cells))}
        for outer in product(*outer_sides) if numbers else ():
            boxes = [(*outer, *box) for box in product(*(side for side in inner if side))]
            yield outer, [(numbers[box], box) for box in boxes]


def html_page(title: str, body: str) -> str:
    """Return a self-contained page, dark if the reader prefers dark screens."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def notebook_html(drawing: Callable[[], str], text: str, devices: int) -> str:
    """Return HTML for notebooks: a drawing, or text if there are too many devices or boxes.

    >>> notebook_html(lambda: "<svg/>", "a < b", 4), notebook_html(lambda: "<svg/>", "a < b", 9999)
    ('<svg/>', '<pre>a &lt; b</pre>')
    """
    with suppress(LayoutError):
        if devices <= MAX_CELLS:
            return drawing()
    return f"<pre>{escape(text)}</pre>"


def row_svg(pictures: Sequence[Picture], between: Sequence[str] = (), per_row: int = 0) -> str:
    """Return pictures side by side as one SVG element; raises what `Picture.svg` raises.

    `between` has the text of each arrow between two pictures; if empty, there are no arrows. If
    `per_row` is above 0, a new row begins after `per_row` pictures.
    """
    parts = [picture._element() for picture in pictures]
    root = Element("svg", {"class": "shardspec-layout", "role": "img"})
    root.set("aria-label", ", then ".join(picture.title for picture in pictures))
    x = y = right = down = 0.0
    for at, (part, width, height) in enumerate(parts):
        if at and per_row and at % per_row == 0:
            x, y, down = 0.0, y + down, 0.0
        elif at and between:
            # A straight arrow below its text.
            text = between[at - 1]
            length = max(len(text) * _LETTER, 3 * _LINE)
            middle = y + height / 2
            draw(root, "text", text, x=x + length / 2, y=middle - 6, text_anchor="middle")
            arrow = f"M{x:g} {middle:g}h{length - 6:g}m-6 -5l6 5l-6 5"
            draw(root, "path", class_="arrow", d=arrow)
            x += length
        for key, value in {"x": x, "y": y, "width": width, "height": height}.items():
            part.set(key, f"{value:g}")
        root.append(part)
        x += width
        right, down = max(right, x), max(down, height)
    return svg_page(root, right, y + down, _STYLE)


def box_rgb(number: int) -> tuple[int, int, int]:
    """Return the color of a box by its number; neighbors differ, and black text is legible.

    >>> box_rgb(0), box_rgb(1)
    ((172, 209, 246), (246, 172, 188))
    """
    # Multiples of the golden angle are distinct hues for any number of boxes.
    hue = (210 + number * 137.508) % 360 / 360
    red, green, blue = (round(255 * part) for part in hls_to_rgb(hue, 0.82, 0.8))
    return red, green, blue


def ids_text(ids: Sequence[int]) -> str:
    """Return ids in ascending order as text, with ranges for three or more consecutive ids.

    >>> ids_text([7, 1, 2, 3, 8])
    '1-3,7,8'
    """
    # Within a range, the difference of id and index is constant.
    by_run = groupby(enumerate(sorted(ids)), lambda place_and_id: place_and_id[1] - place_and_id[0])
    runs = [[id_ for _, id_ in run] for _, run in by_run]
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


def _block_title(outer: Box) -> str:
    """Return the title of one grid of a tensor of more than two dims."""
    return f"[{', '.join(map(_side_text, outer))}, :, :]"


def _side_text(side: _Interval) -> str:
    return f"{side[0]}:{side[1]}"


def _lengths(
    sides: Sequence[_Interval], needed: Sequence[int], element: int, to_scale: int
) -> list[int]:
    """Return the drawn lengths of a dim's intervals, at least `needed`; equal in long dims."""
    if not sides or sides[-1][1] > to_scale:
        return [max(needed)] * len(needed)
    sizes = [hi - lo for lo, hi in sides]
    element = max(element, *(-(-n // size) for n, size in zip(needed, sizes, strict=True)))
    return [element * size for size in sizes]
