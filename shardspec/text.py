"""Sizes, times and tables as text, and text that is safe to print."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence

__all__ = [
    "bytes_text",
    "counted",
    "printable",
    "rate_text",
    "seconds_text",
    "shown",
    "table_lines",
    "table_text",
]


def bytes_text(num_bytes: float) -> str:
    """Return a size in the binary unit that suits it.

    Examples
    --------
    >>> bytes_text(0), bytes_text(1536), bytes_text(33554432)
    ('0 B', '1.5 KiB', '32 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.4g} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """Return a rate in decimal units, as links and disks are measured.

    Examples
    --------
    >>> rate_text(0), rate_text(15_720_000), rate_text(1.25e9)
    ('0 B/s', '15.72 MB/s', '1.25 GB/s')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if bytes_per_second < 1000 or unit == "GB":
            break
        bytes_per_second /= 1000
    return f"{bytes_per_second:.4g} {unit}/s"


def counted(number: int, word: str, plural: str | None = None) -> str:
    """Return a number with what it counts.

    Examples
    --------
    >>> counted(1, "tensor"), counted(0, "tensor"), counted(2, "box", "boxes")
    ('1 tensor', '0 tensors', '2 boxes')
    """
    return f"{number} {word if number == 1 else plural or f'{word}s'}"


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that suits it.

    Examples
    --------
    >>> seconds_text(0), seconds_text(2.5e-5), seconds_text(0.0123), seconds_text(75)
    ('0 s', '25 µs', '12.3 ms', '75 s')
    """
    if seconds == 0 or seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{seconds * 1e6:.4g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def printable(text: str, keep: str = "") -> str:
    r"""Return a text that cannot upset a terminal.

    Control characters, those that turn the direction of writing, lone surrogates and the like are
    written as escapes; names of files and tensors may hold any of them.

    Parameters
    ----------
    text
        Any text.
    keep
        Characters that stay as they are, such as a line break.

    Examples
    --------
    >>> print(printable("a\x1b[31m\n\u202eb", keep="\n"))
    a\x1b[31m
    \u202eb
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def shown(value: object, most: int = 80) -> str:
    """Return the repr of a value for an error, cut where it is long.

    Examples
    --------
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


def table_text(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    footer: Sequence[str] | None = None,
    numbers_from: int = 1,
    text_from: int | None = None,
) -> str:
    """Return a plain table whose columns line up.

    Parameters
    ----------
    header, rows, footer
        Cells as text; all rows are as long as the header.
    numbers_from
        First column that is aligned to the right.
    text_from
        First column after it that is aligned to the left again, if any is.

    Examples
    --------
    >>> print(table_text(["what", "bytes"], [["a", "12"], ["bb", "3"]]))
    what   bytes
    ────────────
    a         12
    bb         3
    """
    numbers = range(numbers_from, len(header) if text_from is None else text_from)
    return "\n".join(table_lines(header, lambda: rows, footer=footer, numbers=numbers))


def table_lines(
    header: Sequence[str],
    rows: Callable[[], Iterable[Sequence[str]]],
    *,
    footer: Sequence[str] | None = None,
    numbers: Container[int] = (),
    empty_columns: bool = True,
) -> Iterator[str]:
    """Yield the lines of a table that may be long; its rows are gone through twice.

    Parameters
    ----------
    header, footer
        Cells as text.
    rows
        Returns the rows from the first on, each as long as the header.
    numbers
        Columns that are aligned to the right.
    empty_columns
        Whether columns are kept in which nothing stands below the header.

    Examples
    --------
    >>> print(*table_lines(["a", "b"], lambda: [["x", ""], ["yy", ""]], empty_columns=False))
    a ── x yy
    """
    # By rich, 100,000 rows take a minute.
    widths = [0] * len(header)
    for row in rows():
        widths = [max(width, _width(cell)) for width, cell in zip(widths, row, strict=True)]
    kept = [at for at, width in enumerate(widths) if width or empty_columns]
    for one in (header, footer or header):
        widths = [max(width, _width(cell)) for width, cell in zip(widths, one, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = ((at, printable(row[at]), " " * (widths[at] - _width(row[at]))) for at in kept)
        return "   ".join(
            pad + cell if at in numbers else cell + pad for at, cell, pad in cells
        ).rstrip()

    rule = "─" * (sum(widths[at] for at in kept) + 3 * (len(kept) - 1))
    yield line(header)
    yield rule
    yield from map(line, rows())
    if footer is not None:
        yield rule
        yield line(footer)


def _width(cell: str) -> int:
    """Return how many columns of a terminal a text takes once it is printable."""
    if cell.isascii() and cell.isprintable():
        return len(cell)
    from rich.cells import cell_len

    return cell_len(printable(cell))
