"""A reshard plan drawn: who sends how much to whom, and how even that is."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final
from xml.etree.ElementTree import Element

from shardspec.errors import LayoutError
from shardspec.layout.picture import draw, html_page, style_sheet, svg_page
from shardspec.resharding.copies import StateCopies
from shardspec.text import bytes_text, counted

MAX_ENDS: Final = 256
"""Senders, or receivers, whose rows and columns can still be seen."""

_CELL: Final = 22
_MIN_CELL: Final = 5
_WIDTH: Final = 560
"""Of a matrix with many columns."""
_BAR: Final = 160
_LETTER: Final = 7
_LINE: Final = 18
_MARGIN: Final = 12
_STYLE: Final = style_sheet(
    "shardspec-plan",
    {
        " .empty": "fill:#f3f4f6",
        " .bytes": "fill:#0969da",
        " .bar": "fill:#54aeff",
        " .even": "stroke:#cf222e;stroke-width:1.5",
    },
    {" .empty": "fill:#21262d", " .bytes": "fill:#58a6ff", " .bar": "fill:#1f6feb"},
)


def plan_svg(plan: StateCopies, names: Mapping[int, str] | None = None) -> str:
    """Draw a plan as one SVG element.

    A matrix has a row for every sender and a column for every receiver, darker where more bytes go;
    what stays on a device is not sent. Bars beside it are the bytes of each, with a line at the
    even share. `names` has the files of a checkpoint by their numbers in the plan. Raises
    `LayoutError` for more than 256 senders or receivers.
    """
    senders = [device for device in plan.devices if plan.sent[device]]
    receivers = [device for device in plan.devices if plan.received[device]]
    for role, ends in (("sender", senders), ("receiver", receivers)):
        if len(ends) > MAX_ENDS:
            raise LayoutError(
                f"the plan has {counted(len(ends), role)}, and up to {MAX_ENDS} can be drawn; "
                "print it as text"
            )
    title = f"{counted(len(plan.moves), 'tensor')}, {bytes_text(sum(plan.sent.values()))} sent"
    root = Element("svg", {"class": "shardspec-plan", "role": "img", "aria-label": title})
    labels = {end: (names or {}).get(end, str(end)) for end in (*senders, *receivers)}
    short = {end: label if len(label) <= 24 else f"…{label[-23:]}" for end, label in labels.items()}
    cell = max(_MIN_CELL, min(_CELL, _WIDTH // max(len(senders), len(receivers), 1)))
    margin_left = _MARGIN + _LETTER * (1 + max((len(short[end]) for end in senders), default=0))
    top = 3 * _LINE + _MARGIN
    across, down = cell * len(receivers), cell * len(senders)
    draw(root, "text", title, class_="title", x=_MARGIN, y=_LINE)
    draw(root, "text", "from ↓ to →", class_="side", x=_MARGIN, y=2 * _LINE)
    most = max(plan.traffic.values(), default=1)
    each = max(1, -(-_LINE // cell))  # of labels that would overlap, every n-th is written
    for row, sender in enumerate(senders):
        y = top + row * cell
        if row % each == 0:
            at = {"x": margin_left - _LETTER, "y": y + cell / 2 + 4, "text_anchor": "end"}
            draw(root, "text", short[sender], class_="side", **at)
        for column, receiver in enumerate(receivers):
            num_bytes = plan.traffic.get((sender, receiver), 0)
            box = {"x": margin_left + column * cell, "y": y, "width": cell - 1, "height": cell - 1}
            if not num_bytes:
                draw(root, "rect", class_="empty", **box)
                continue
            shade = 0.15 + 0.85 * num_bytes / most
            square = draw(root, "rect", class_="bytes", **box, fill_opacity=f"{shade:.2f}")
            text = f"{labels[sender]} → {labels[receiver]}: {bytes_text(num_bytes)}"
            draw(square, "title", text)
    widest = max((len(short[end]) for end in receivers), default=1)
    each = max(1, -(-(widest + 1) * _LETTER // cell))
    for column, receiver in enumerate(receivers):
        if column % each == 0:
            x = margin_left + column * cell + cell / 2
            draw(root, "text", short[receiver], class_="side", x=x, y=top - 6, text_anchor="middle")
    beside = margin_left + across + 2 * _MARGIN
    _bars(root, plan.sent, senders, (beside, top), cell, across=True)
    _bars(
        root, plan.received, receivers, (margin_left, top + down + 2 * _MARGIN), cell, across=False
    )
    height = top + down + 2 * _MARGIN + _BAR + 2 * _LINE
    return svg_page(root, beside + 50 * _LETTER, height, _STYLE)


def _bars(
    root: Element,
    moved: Mapping[int, int],
    ends: Sequence[int],
    corner: tuple[float, float],
    cell: int,
    *,
    across: bool,
) -> None:
    """Draw the bytes of every sender to the right, or of every receiver downwards."""
    x, y = corner
    most = max((moved[end] for end in ends), default=1)
    even = sum(moved[end] for end in ends) / max(len(ends), 1)
    for at, end in enumerate(ends):
        length = _BAR * moved[end] / most
        place = {"x": x, "y": y + at * cell, "width": length, "height": cell - 2}
        if not across:
            place = {"x": x + at * cell, "y": y, "width": cell - 2, "height": length}
        bar = draw(root, "rect", class_="bar", **place)
        draw(bar, "title", bytes_text(moved[end]))
    share, span = _BAR * even / most, len(ends) * cell
    verb = "sends" if across else "receives"
    text = f"{verb} {bytes_text(most)} at most, even share {bytes_text(even)}"
    if across:
        draw(root, "line", class_="even", x1=x + share, x2=x + share, y1=y - 3, y2=y + span + 3)
        draw(root, "text", text, class_="side", x=x, y=y - 6)
    else:
        draw(root, "line", class_="even", y1=y + share, y2=y + share, x1=x - 3, x2=x + span + 3)
        draw(root, "text", text, class_="side", x=x, y=y + _BAR + _LINE)


def plan_html(plan: StateCopies, names: Mapping[int, str] | None = None) -> str:
    """Return a page of its own with the drawing and the plan as text; raises as `plan_svg`."""
    drawing, text = plan_svg(plan, names), plan.text(names or {})
    title, _, _ = text.partition("\n")
    return html_page(f"shardspec: {title}", f"{drawing}\n<pre>{escape(text)}</pre>")
