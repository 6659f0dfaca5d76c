"""A drawing of the transition graph as SVG, by networkx's own layout and without Graphviz.

Every column of specs has its own place along the width. Steps to the right and to the left are
drawn apart, steps within a column bow out of it, and a step that skips columns passes between their
specs. A path is marked by numbers, which a list below explains, so that no label lies on another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias
from xml.sax.saxutils import escape

import networkx as nx

from shardspec.layout.drawing import COLOURS, Drawing, DrawnEdge, kind_of

__all__ = ["svg_text"]

_Point: TypeAlias = tuple[float, float]
_Curve: TypeAlias = tuple[_Point, _Point, _Point, _Point]

_CHAR: Final = 7.3
"""Width of a letter of 12 pixels."""
_HEIGHT: Final = 24
_ROW: Final = 46
_GAP: Final = 230
"""Between two columns."""
_BOW: Final = 125
"""How far a step within a column may bow out of it."""
_LEFT: Final = 30
_RIGHT: Final = _BOW + 25
_HEAD: Final = 104
"""Room for the title and the legend."""
_APART: Final = 5
"""Half the distance between steps to the right and to the left."""
_FONT: Final = "DejaVu Sans Mono, Menlo, Consolas, monospace"


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the nodes are, in pixels."""

    at: dict[str, _Point]
    column: dict[str, int]
    x: Sequence[float]
    """The middle of each column."""
    rows: Sequence[Sequence[float]]
    """Of each column the heights of its nodes, from the top."""
    half: float
    """Half the width of a node."""


def svg_text(drawing: Drawing) -> str:
    """Return a drawing as SVG.

    Examples
    --------
    >>> from shardspec import DeviceMesh
    >>> from shardspec.layout.drawing import draw_transitions
    >>> svg_text(draw_transitions(DeviceMesh(range(4), (2, 2)), 2)).count("<rect class='node'")
    11
    """
    places = _places(drawing)
    marked = {(edge.before, edge.after) for edge in drawing.path}
    faint = [edge for edge in drawing.edges if (edge.before, edge.after) not in marked]
    lines = [60 + _CHAR * len(_listed(edge)) for edge in drawing.path]
    title = 40 + _CHAR * 1.2 * len(drawing.title)
    width = max(max(places.x) + places.half + _RIGHT, title, _legend_width(drawing), *lines, 0)
    bottom = max(y for rows in places.rows for y in rows) + _ROW
    height = bottom + 22 * len(lines) + (18 if lines else 0)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' "
        f"width='{width:.0f}' height='{height:.0f}' font-family='{_FONT}' font-size='12'>",
        f"<rect width='{width:.0f}' height='{height:.0f}' fill='white'/>",
        _markers(drawing),
        _text(20, 30, drawing.title, " font-size='14' font-weight='bold'"),
        *_legend(drawing),
        f"<g fill='none' opacity='{0.13 if drawing.path else 0.6}'>",
        *(_edge(edge, places, 1.1) for edge in faint),
        "</g>",
        "<g fill='none'>",
        *(_edge(edge, places, 2.8) for edge in drawing.path),
        "</g>",
        *(_box(drawing, places, label) for label in places.at),
        *(_number(edge, *_badge(edge, places)) for edge in drawing.path),
    ]
    for place, edge in enumerate(drawing.path):
        y = bottom + 8 + 22 * place
        parts += [_number(edge, 30, y), _text(46, y + 4, _listed(edge))]
    return "\n".join([*parts, "</svg>", ""])


def _places(drawing: Drawing) -> _Places:
    """Put networkx's multipartite layout on a grid of pixels."""
    columns = drawing.columns
    column = {label: place for place, labels in enumerate(columns) for label in labels}
    graph = nx.DiGraph()
    graph.add_nodes_from((node, {"layer": layer}) for node, layer in enumerate(column.values()))
    units = [(float(x), float(y)) for x, y in nx.multipartite_layout(graph, "layer").values()]
    from_left = sorted({x for x, _ in units})
    unit = from_left[1] - from_left[0] if len(from_left) > 1 else 1.0
    top = min(y for _, y in units)
    half = max(map(len, column)) * _CHAR / 2 + 9
    x = [_LEFT + half + place * (2 * half + _GAP) for place in range(len(columns))]
    # Which node of a column comes first is ours to say: networkx keeps them as sets.
    rows = [
        sorted(_HEAD + (y - top) / unit * _ROW for at, y in units if at == across)
        for across in from_left
    ]
    at = {
        label: (x[place], y)
        for place, labels in enumerate(columns)
        for label, y in zip(labels, rows[place], strict=True)
    }
    return _Places(at, column, x, rows, half)


def _curves(edge: DrawnEdge, places: _Places) -> list[_Curve]:
    """Return the way of an edge: one curve, or one up to each column that it skips and beyond."""
    (x, y), (end_x, end_y) = places.at[edge.before], places.at[edge.after]
    here, there = places.column[edge.before], places.column[edge.after]
    if here == there:
        # Down on the right, up on the left.
        side = 1 if end_y > y else -1
        start, end = (x + side * places.half, y), (end_x + side * places.half, end_y)
        # A curve reaches three quarters of the way to where it is drawn.
        pulled = start[0] + side * min(26 + 0.32 * abs(end_y - y), _BOW) * 4 / 3
        return [(start, (pulled, y), (pulled, end_y), end)]
    side = 1 if there > here else -1
    stops = [(x + side * places.half, y - side * _APART)]
    for column in range(here + side, there, side):
        middle = places.x[column]
        share = (middle - x) / (end_x - x)
        free = _free(places.rows[column], y + share * (end_y - y)) - side * _APART / 2
        stops += [(middle - side * places.half, free), (middle + side * places.half, free)]
    stops.append((end_x - side * places.half, end_y - side * _APART))
    curves = []
    for start, end in pairwise(stops):
        half_way = (start[0] + end[0]) / 2
        curves.append((start, (half_way, start[1]), (half_way, end[1]), end))
    return curves


def _free(rows: Sequence[float], y: float) -> float:
    """Return the height nearest to `y` at which no node of a column is."""
    free = [rows[0] - _ROW / 2, *(row + _ROW / 2 for row in rows)]
    return min(free, key=lambda height: abs(height - y))


def _badge(edge: DrawnEdge, places: _Places) -> _Point:
    """Return where the number of an edge stands: on its first curve, where no node is.

    A little before the middle, where steps that cross each other are apart.
    """
    t = 0.5 if places.column[edge.before] == places.column[edge.after] else 0.36
    shares = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
    points = _curves(edge, places)[0]
    x, y = (sum(s * p[i] for s, p in zip(shares, points, strict=True)) for i in (0, 1))
    return x, y


def _edge(edge: DrawnEdge, places: _Places, width: float) -> str:
    curves = _curves(edge, places)
    kind = kind_of(edge.step)
    path = f"M{_pair(curves[0][0])} " + " ".join(
        f"C{_pair(b)} {_pair(c)} {_pair(d)}" for _, b, c, d in curves
    )
    return (
        f"<path d='{path}' stroke='{COLOURS[kind]}' stroke-width='{width}'"
        f"{_dashes(edge.routed)} marker-end='url(#{kind})'>"
        f"<title>{escape(_listed(edge))}</title></path>"
    )


def _dashes(routed: bool) -> str:
    return " stroke-dasharray='8 5'" if routed else ""


def _pair(point: _Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"


def _markers(drawing: Drawing) -> str:
    heads = (
        f"<marker id='{kind}' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' "
        f"markerHeight='8' markerUnits='userSpaceOnUse' orient='auto'>"
        f"<path d='M0,0.5 L8,4 L0,7.5 z' fill='{COLOURS[kind]}'/></marker>"
        for kind in drawing.kinds
    )
    return f"<defs>{''.join(heads)}</defs>"


def _box(drawing: Drawing, places: _Places, label: str) -> str:
    x, y = places.at[label]
    end = label in (drawing.ends or ())
    marked = end or label in drawing.on_path
    ink = "#111" if marked or drawing.ends is None else "#888"
    return (
        f"<rect class='node' x='{x - places.half:.1f}' y='{y - _HEIGHT / 2:.1f}' "
        f"width='{2 * places.half:.1f}' height='{_HEIGHT}' rx='6' "
        f"fill='{'#fff3bf' if marked else 'white'}' stroke='{ink}' "
        f"stroke-width='{2.4 if end else 1.2}'/>"
    ) + _text(x, y + 4, label, f" text-anchor='middle' fill='{ink}'")


def _number(edge: DrawnEdge, x: float, y: float) -> str:
    return (
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='10' fill='{COLOURS[kind_of(edge.step)]}' "
        f"stroke='white' stroke-width='2'/>"
    ) + _text(x, y + 4, str(edge.number), " text-anchor='middle' fill='white' font-weight='bold'")


def _listed(edge: DrawnEdge) -> str:
    return f"{edge.before} → {edge.after}: {edge.text}"


def _legend(drawing: Drawing) -> list[str]:
    parts, x = [], 20.0
    for kind in drawing.kinds:
        routed = any(edge.routed and kind_of(edge.step) == kind for edge in drawing.path)
        parts.append(
            f"<path d='M{x:.1f},52 h34' stroke='{COLOURS[kind]}' stroke-width='2.4'"
            f"{_dashes(routed)} marker-end='url(#{kind})'/>"
        )
        parts.append(_text(x + 42, 56, kind))
        x += 66 + _CHAR * len(kind)
    return parts


def _legend_width(drawing: Drawing) -> float:
    return 20 + sum(66 + _CHAR * len(kind) for kind in drawing.kinds)


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}'{style}>{escape(text)}</text>"
