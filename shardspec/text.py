"""Formats sizes, times and tables as text, and makes text safe to print.

>>> bytes_text(1536), rate_text(1.25e9), seconds_text(25e-6), counted(2, "box", "boxes")
('1.5 KiB', '1.25 GB/s', '25 µs', '2 boxes')
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, product, repeat
from math import ceil
from shutil import get_terminal_size
from typing import Final, TypeAlias

_NAME_WIDTH: Final = 30
"""Width to which names are shortened before optional columns are omitted."""
_WRAPPED_WIDTH: Final = 20
"""Width to which texts are wrapped before optional columns are omitted."""
_MIN_WIDTH: Final = 8
"""Width below which no text is shortened."""
_FRONTS: Final = (0.5, 0.25, 0.0)
"""Parts of a shortened text that may be its beginning."""
_SAMPLED: Final = 1000
"""Rows that decide which part of their names is shown."""

_DIGITS: Final = re.compile(r"\d+", re.ASCII)


def bytes_text(num_bytes: float) -> str:
    """Return a size with a binary unit: ``1.5 KiB``."""
    return _with_unit(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate_text(bytes_per_second: float) -> str:
    """Return a rate with a decimal unit, as usual for links and disks: ``1.25 GB/s``."""
    return f"{_with_unit(bytes_per_second, 1000, ('B', 'kB', 'MB', 'GB'))}/s"


def _with_unit(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units:
        if number < step or unit == units[-1]:
            break
        number /= step
    return f"{number:.4g} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a duration with its unit: ``25 µs``, ``12.3 ms``, ``75 s``."""
    if seconds == 0 or seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e6:.4g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def counted(number: int, word: str, plural: str | None = None) -> str:
    """Return a number and its noun: ``1 tensor``, ``2 boxes``."""
    return f"{number} {word if number == 1 else plural or f'{word}s'}"


def printable(text: str, keep: str = "") -> str:
    r"""Return a text that is safe to print: unprintable characters, unless in `keep`, are escaped.

    >>> print(printable("clear screen: " + chr(27) + "[2J"))
    clear screen: \x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def shown(value: object, most: int = 80) -> str:
    """Return the repr of a value for an error, cut to `most` characters.

    >>> shown("layers.0.w"), shown("w" * 1000, 10)
    ("'layers.0.w'", "'wwwwww...")
    """
    if isinstance(value, str):
        value = value[:most]
    try:
        text = repr(value)
    except ValueError:  # of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_of(texts: Sequence[str], most: int = 1) -> str:
    """Return the first `most` texts, and the number of further ones.

    >>> first_of(["a", "b", "c"]), first_of(["a", "b"], 2)
    ('a and 2 more', 'a, b')
    """
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text, ascending and without repeats; at most eight of them.

    >>> ranks_text([3, 1, 3]), ranks_text([4]), ranks_text(range(20))
    ('ranks 1, 3', 'rank 4', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    names = [*map(str, sorted(set(ranks)))]
    return f"rank{'' if len(names) == 1 else 's'} {first_of(names, 8)}"


def table_text(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    footer: Sequence[str] | None = None,
    numbers_from: int = 1,
    text_from: int | None = None,
    optional: Sequence[int] = (),
    flexible: int = 0,
    wraps: bool = False,
) -> str:
    """Return a text table that fits the terminal; options as for `table_lines`.

    Columns from `numbers_from` to `text_from` are aligned to the right, others to the left.

    >>> print(table_text(["name", "bytes"], [["w", "16"]]))
    name   bytes
    ────────────
    w         16
    """
    numbers = range(numbers_from, len(header) if text_from is None else text_from)
    lines = table_lines(
        header,
        lambda: rows,
        footer=footer,
        numbers=numbers,
        fits=terminal_width(),
        optional=optional,
        flexible=flexible,
        wraps=wraps,
    )
    return "\n".join(lines)


def html_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    shades: Iterable[Sequence[float]] | None = None,
) -> str:
    """Return an HTML table for notebooks; the first cell of a row is its name.

    `shades` has a list per row, with a darkness from 0 to 1 for each cell but the first.

    >>> html_table("sizes", ["name"], [["w"]])
    '<table><caption>sizes</caption><tr><th>name</th></tr><tr><th>w</th></tr></table>'
    """

    def cells(row: Sequence[str], shaded: Iterable[float]) -> str:
        # Half transparent, to be readable on dark and light pages.
        styles = (f' style="background:rgba(31,111,235,{shade / 2:.2f})"' for shade in shaded)
        pairs = zip(row[1:], chain(styles, repeat("")), strict=False)
        return "".join(f"<td{style}>{escape(cell)}</td>" for cell, style in pairs)

    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{cells(row, shaded)}</tr>"
        for row, shaded in zip(rows, shades or repeat(()), strict=False)
    )
    return f"<table><caption>{escape(title)}</caption><tr>{head}</tr>{body}</table>"


def table_lines(
    header: Sequence[str],
    rows: Callable[[], Iterable[Sequence[str]]],
    *,
    footer: Sequence[str] | None = None,
    numbers: Container[int] = (),
    empty_columns: bool = True,
    fits: int | None = None,
    optional: Sequence[int] = (),
    flexible: int = 0,
    wraps: bool = False,
) -> Iterator[str]:
    """Yield the lines of a table that may be long; `rows` is called twice.

    Columns in `numbers` are aligned to the right. Without `empty_columns`, columns that are empty
    below the header are omitted. A table wider than `fits` omits columns of `optional`, in this
    order, until it fits. Then texts are shortened, first those of column `flexible`, where most of
    them stay different; with `wraps`, that column continues on further lines instead.

    >>> list(table_lines(["name", "bytes"], lambda: [["w", "16"]], numbers=[1]))
    ['name   bytes', '────────────', 'w         16']
    """
    # rich would take a minute for 100,000 rows.
    widths = [0] * len(header)
    sample: list[str] = []
    for row in rows():
        widths = [max(width, _width(cell)) for width, cell in zip(widths, row, strict=True)]
        if len(sample) < _SAMPLED:
            sample.append(row[flexible])
    columns = [column for column, width in enumerate(widths) if width or empty_columns]
    for cells in (header, footer or header):
        widths = [max(width, _width(cell)) for width, cell in zip(widths, cells, strict=True)]

    def excess(narrower: int = 0) -> int:
        """Return the excess width of the table if its columns were `narrower` in total."""
        total = sum(widths[column] + 3 for column in columns) - 3 - narrower
        return 0 if fits is None else max(0, total - fits)

    target_width = _WRAPPED_WIDTH if wraps else _NAME_WIDTH
    for column in optional:
        if column in columns and excess(max(0, widths[flexible] - target_width)):
            columns.remove(column)
    texts = (flexible, *(column for column in columns if column not in numbers))
    for column, most in (*product(texts, [target_width]), *product(texts, [_MIN_WIDTH])):
        widths[column] = max(min(widths[column], most), widths[column] - excess())
    # Names of tensors often differ at the end only.
    fronts = dict.fromkeys(columns, _FRONTS[0])
    fronts[flexible] = max(
        _FRONTS, key=lambda front: len({shortened(t, widths[flexible], front) for t in sample})
    )

    def lines(row: Sequence[str]) -> Iterator[str]:
        parts = wrapped(row[flexible], widths[flexible]) if wraps else [row[flexible]]
        for number, part in enumerate(parts):
            row = [*(("" for _ in row) if number else row)]
            row[flexible] = part
            cells = []
            for column in columns:
                text, width = row[column], widths[column]
                if len(text) > width or not (text.isascii() and text.isprintable()):
                    text = shortened(text, width, fronts[column])
                    width += len(text) - _width(text)
                cells.append(text.rjust(width) if column in numbers else text.ljust(width))
            yield "   ".join(cells).rstrip()

    rule = "─" * (sum(widths[column] for column in columns) + 3 * (len(columns) - 1))
    yield from lines(header)
    yield rule
    yield from chain.from_iterable(map(lines, rows()))
    if footer is not None:
        yield rule
        yield from lines(footer)


def terminal_width() -> int:
    """Return the columns of the terminal; 80 without a terminal."""
    return get_terminal_size().columns


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of a text cut at blanks to at most `width` columns; later ones are indented.

    >>> wrapped("per device; ring model; no links", 20, "  ")
    ['per device; ring', '  model; no links']
    """
    lines: list[str] = []
    for word in text.split(" "):
        if lines and _width(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent if lines else ''}{word}")
    return lines


def fitted(text: str, width: int, most: int) -> str:
    """Return a text in at most `most` lines of a terminal: wrapped, or if too long, shortened.

    >>> fitted("mesh '2xq' is no mesh; give sizes as in 2x4", 20, 3).splitlines()
    ["mesh '2xq' is no", 'mesh; give sizes as', 'in 2x4']
    >>> fitted("mesh '2xq' is no mesh; give sizes as in 2x4", 20, 2).splitlines()
    ["mesh '2xq' is no", 'm…ve sizes as in 2x4']
    >>> fitted("axis '" + "x" * 90 + "' is no axis of mesh 2x4", 50, 2).splitlines()
    ["axis 'xxxxxxxxxxxxxxxxxxxx…xxxxxxxxxxxxxxxxxxx' is", 'no axis of mesh 2x4']
    """
    words = printable(text).split(" ")
    sizes = range(width, _WRAPPED_WIDTH, -4)
    by_word = ([shortened(word, size) for word in words] for size in sizes)
    in_all = ([shortened(text, size)] for size in range(most * width, 0, -1))
    for parts in chain([words], by_word, in_all):
        lines = wrapped(" ".join(parts), width)
        if sum(-(-_width(line) // width) for line in lines) <= most:
            break
    return "\n".join(lines)


def shortened(text: str, width: int, front: float = 0.5) -> str:
    """Return a printable text of at most `width` columns; a part `front` of them is its beginning.

    >>> shortened("model.layers.17.mlp.up_proj.weight", 20)
    'model.laye…oj.weight'
    >>> shortened("model.layers.17.mlp.up_proj.weight", 20, 0)
    '….mlp.up_proj.weight'
    """
    text = printable(text)
    keeps = width - 1
    while keeps > 0 and _width(text) > width:
        first = ceil(keeps * front)
        cut = f"{text[:first]}…{text[len(text) - keeps + first :]}"
        if _width(cut) <= width:
            return cut
        keeps -= 1
    return text


def _width(cell: str) -> int:
    """Return the number of terminal columns of a text in printable form."""
    if cell.isascii() and cell.isprintable():
        return len(cell)
    from rich.cells import cell_len

    return cell_len(printable(cell))


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument in an error text: shown as ``ranks=4``, or by a command as its option."""

    name: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.name}={'' if self.value is None else self.value}"


TextPart: TypeAlias = str | Argument
"""A part of an error's message."""


def natural_order(names: Iterable[str]) -> list[str]:
    """Return names sorted with their numbers as numbers.

    >>> natural_order(["layers.10.w", "layers.2.w", "embed"])
    ['embed', 'layers.2.w', 'layers.10.w']
    """

    def by_length(digits: re.Match[str]) -> str:
        number = digits[0].lstrip("0")
        return f"\0{len(number):09}{number}"  # Python reads no number of more than 4,300 digits

    return sorted(names, key=lambda name: (_DIGITS.sub(by_length, name), name))
