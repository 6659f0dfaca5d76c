"""Sizes, times and tables as text, and text that is safe to print."""

from collections.abc import Sequence

__all__ = [
    "bytes_text",
    "counted",
    "printable",
    "rate_text",
    "seconds_text",
    "shown",
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
    # By rich, 100,000 rows take a minute.
    cells = [header, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, footer or header, strict=True)]
    numbers = range(numbers_from, len(header) if text_from is None else text_from)

    def line(row: Sequence[str]) -> str:
        padded = (
            " " * (width - _width(cell)) + cell
            if column in numbers
            else cell + " " * (width - _width(cell))
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "   ".join(padded).rstrip()

    rule = "─" * (sum(widths) + 3 * (len(widths) - 1))
    lines = [line(header), rule, *map(line, cells[1:])]
    return "\n".join(lines if footer is None else [*lines, rule, line(footer)])


def _width(cell: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if cell.isascii():
        return len(cell)
    from rich.cells import cell_len

    return cell_len(cell)
