"""Sizes, times and tables as text, and text that is safe to print."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain, product, repeat
from shutil import get_terminal_size
from typing import Final, TypeAlias

_LEAST_NAME: Final = 24
"""Columns of a name that is not shortened further while there are columns to omit."""
_LEAST_WRAPPED: Final = 20
"""Columns of a text that is not wrapped further while there are columns to omit."""
_LEAST_WIDTH: Final = 8
"""Columns that a shortened name keeps in any case."""

_DIGITS: Final = re.compile(r"(\d+)", re.ASCII)


def bytes_text(num_bytes: float) -> str:
    """Return a size in the binary unit that suits it: ``1.5 KiB``."""
    return _with_unit(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate_text(bytes_per_second: float) -> str:
    """Return a rate in decimal units, as links and disks are measured: ``1.25 GB/s``."""
    return f"{_with_unit(bytes_per_second, 1000, ('B', 'kB', 'MB', 'GB'))}/s"


def _with_unit(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units:
        if number < step or unit == units[-1]:
            break
        number /= step
    return f"{number:.4g} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that suits it: ``25 µs``, ``12.3 ms``, ``75 s``."""
    if seconds == 0 or seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e6:.4g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def counted(number: int, word: str, plural: str | None = None) -> str:
    """Return a number with what it counts: ``1 tensor``, ``2 boxes``."""
    return f"{number} {word if number == 1 else plural or f'{word}s'}"


def printable(text: str, keep: str = "") -> str:
    """Return a text that is safe to print on a terminal; characters in `keep` are unchanged.

    Control characters, characters that change the direction of writing, lone surrogates and the
    like become escapes; names of files and tensors may contain any of them.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def shown(value: object, most: int = 80) -> str:
    """Return the repr of a value for an error, cut where it is long.

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
    """Return the names of some ranks, shortened if there are many.

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
    """Return an aligned text table that fits the terminal; all rows must be as long as the header.

    Columns from `numbers_from` on are aligned to the right, those from `text_from` on to the left.
    The other options are those of `table_lines`.
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
    """Return an HTML table for notebooks; rows start with a name, shades of cells are 0 to 1."""

    def cells(row: Sequence[str], shaded: Iterable[float]) -> str:
        # Half transparent: it can be read on dark and light pages.
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

    Columns in `numbers` are aligned to the right. Columns that are empty below the header are
    omitted unless `empty_columns` is set. In a table wider than `fits`, columns of `optional` are
    omitted in turn, and then columns of texts are shortened in the middle, first the `flexible`
    one, which with `wraps` is continued below instead.
    """
    # rich would take a minute for 100,000 rows.
    widths = [0] * len(header)
    for row in rows():
        widths = [max(width, _width(cell)) for width, cell in zip(widths, row, strict=True)]
    kept = [at for at, width in enumerate(widths) if width or empty_columns]
    for cells in (header, footer or header):
        widths = [max(width, _width(cell)) for width, cell in zip(widths, cells, strict=True)]

    def excess(narrower: int = 0) -> int:
        """Return by how much the table is too wide, some columns narrower."""
        total = sum(widths[at] + 3 for at in kept) - 3 - narrower
        return 0 if fits is None else max(0, total - fits)

    least = _LEAST_WRAPPED if wraps else _LEAST_NAME
    for at in optional:
        if at in kept and excess(max(0, widths[flexible] - least)):
            kept.remove(at)
    texts = (flexible, *(at for at in kept if at not in numbers))
    for at, most in (*product(texts, [least]), *product(texts, [_LEAST_WIDTH])):
        widths[at] = max(min(widths[at], most), widths[at] - excess())

    def lines(row: Sequence[str]) -> Iterator[str]:
        parts = wrapped(row[flexible], widths[flexible]) if wraps else [row[flexible]]
        for number, part in enumerate(parts):
            row = [*("" if number else cell for cell in row)]
            row[flexible] = part
            texts = ((at, shortened(row[at], widths[at])) for at in kept)
            cells = ((at, text, " " * (widths[at] - _width(text))) for at, text in texts)
            yield "   ".join(
                pad + cell if at in numbers else cell + pad for at, cell, pad in cells
            ).rstrip()

    rule = "─" * (sum(widths[at] for at in kept) + 3 * (len(kept) - 1))
    yield from lines(header)
    yield rule
    yield from chain.from_iterable(map(lines, rows()))
    if footer is not None:
        yield rule
        yield from lines(footer)


def terminal_width() -> int:
    """Return the columns of the terminal; 80 where there is none."""
    return get_terminal_size().columns


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return a text in lines of at most `width` columns, cut at blanks; later ones are indented.

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
    """Return a text in at most `most` lines of a terminal, wrapped at blanks where that is enough.

    >>> fitted("mesh '2xq' is no mesh; give sizes as in 2x4", 20, 3).splitlines()
    ["mesh '2xq' is no", 'mesh; give sizes as', 'in 2x4']
    >>> fitted("mesh '2xq' is no mesh; give sizes as in 2x4", 20, 2).splitlines()
    ["mesh '2xq' is no", 'm…ve sizes as in 2x4']
    """
    for size in range(most * width, 0, -1):
        lines = wrapped(shortened(text, size), width)
        if sum(-(-_width(line) // width) for line in lines) <= most:
            break
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """Return a text in printable form, cut in the middle where it is wider than `width` columns.

    >>> shortened("model.layers.17.mlp.up_proj.weight", 20)
    'model.laye…oj.weight'
    """
    text = printable(text)
    keeps = width - 1
    while keeps > 0 and _width(text) > width:
        cut = f"{text[: keeps - keeps // 2]}…{text[len(text) - keeps // 2 :]}"
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
    """An argument of a public function, as a part of a message: ``exclude=``, ``ranks=4``.

    The command line prints the option of it instead.
    """

    name: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.name}={'' if self.value is None else self.value}"


TextPart: TypeAlias = str | Argument
"""A part of the message of an error."""


def natural_order(names: Iterable[str]) -> list[str]:
    """Sort names with their numbers as numbers.

    >>> natural_order(["layers.10.w", "layers.2.w", "embed"])
    ['embed', 'layers.2.w', 'layers.10.w']
    """

    def key(name: str) -> tuple[list[str | tuple[int, str]], str]:
        parts = _DIGITS.split(name)
        digits = (part.lstrip("0") for part in parts)
        # Python reads no number of more than 4,300 digits.
        return [(len(n), n) if at % 2 else parts[at] for at, n in enumerate(digits)], name

    return sorted(names, key=key)
