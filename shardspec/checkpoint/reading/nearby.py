"""What may have been meant by a path at which no checkpoint is."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from shardspec.checkpoint.storage.remote import RemotePath

__all__ = ["nearby"]

_DEPTH: Final = 2
_MOST_DIRECTORIES: Final = 256
"""Directories that are looked into: a wrong path may be that of a whole disk."""
_SHOWN: Final = 3
_NUMBERED: Final = re.compile(r"-[0-9]+-of-[0-9]+\.")
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


def nearby(
    place: Path, names: Iterable[str], form_of: Callable[[frozenset[str]], str | None]
) -> str | None:
    """Say which checkpoints lie in a directory that is none, or which files could be ones.

    Parameters
    ----------
    place, names
        The directory, and what lies in it.
    form_of
        Says, of a directory with these names, what it is.

    Returns
    -------
    str or None
        The second half of an error; None if there is nothing to say.

    Examples
    --------
    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> for step in (9, 10):
    ...     _ = (run / f"step-{step}").mkdir(), (run / f"step-{step}" / "m").touch()
    >>> print(nearby(run, ["step-9", "step-10"], lambda names: "m form" if "m" in names else None))
    there are some in it: step-9 (m form), step-10 (m form); name one of them
    """
    found = _inside(place, form_of)
    if len(found) == 1:
        return f"there is one in it: name {place / found[0][0]} ({found[0][1]})"
    if found:
        shown = ", ".join(f"{name} ({form})" for name, form in found[:_SHOWN])
        return f"there are some in it: {shown}{_more(found)}; name one of them"
    files = sorted((n for n in names if n.endswith(_TORCH_SUFFIXES)), key=_by_numbers)
    numbered = [name for name in files if _NUMBERED.search(name)]
    if numbered:
        return (
            f"there are parts of one in it, such as {numbered[0]}, without the index that lists "
            "them; restore it"
        )
    if files:
        shown = ", ".join(files[:_SHOWN])
        return f"there are files of torch in it: {shown}{_more(files)}; name one of them"
    return None


def _more(found: list[str] | list[tuple[str, str]]) -> str:
    return f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""


def _inside(place: Path, form_of: Callable[[frozenset[str]], str | None]) -> list[tuple[str, str]]:
    """Return the nearest checkpoints below a directory: their paths from there, and forms."""
    if isinstance(place, RemotePath):
        # Every look would be a request.
        return []
    level = [place]
    for _ in range(_DEPTH):
        level = list(islice(_directories(level), _MOST_DIRECTORIES))
        found = [
            (str(directory.relative_to(place)), form)
            for directory in level
            if (form := form_of(frozenset(_names(directory)))) is not None
        ]
        if found:
            return found
    return []


def _directories(level: Iterable[Path]) -> Iterator[Path]:
    for directory in level:
        for name in sorted(_names(directory), key=_by_numbers):
            inner = directory / name
            # What starts with a dot may be a save that was killed.
            if not name.startswith(".") and inner.is_dir():
                yield inner


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except OSError:
        return []


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key by which step-9 comes before step-10."""
    return [
        (int(part), "") if part.isdecimal() and part.isascii() else (-1, part)
        for part in re.split(r"([0-9]{1,18})", name)
    ]
