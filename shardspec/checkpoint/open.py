"""From a path to a checkpoint that can be read, whatever wrote it.

A format is one module of `shardspec.checkpoint.formats` and one line in `_FORMATS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardspec.checkpoint.files import reason
from shardspec.checkpoint.formats import native, single_file
from shardspec.checkpoint.info import INFO_NAME
from shardspec.checkpoint.source import CheckpointSource
from shardspec.errors import CheckpointError

__all__ = ["FORMATS", "Format", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write checkpoints that can be read here."""

    name: str
    """What the user calls it."""
    finds: Callable[[frozenset[str]], bool]
    """Whether a directory with entries of these names is one."""
    opens: Callable[[Path], CheckpointSource]
    """Reads what describes it; not its data."""


FORMATS: Final = (Format(native.FORMAT, lambda names: INFO_NAME in names, native.open_native),)
"""Asked in this order."""


def open_checkpoint(path: Path | str) -> CheckpointSource:
    """Open a checkpoint; what describes it is read and checked, its data is not.

    Parameters
    ----------
    path
        A directory in any of the forms of `FORMATS`, or one safetensors file.

    Raises
    ------
    CheckpointError
        If it is missing, holds no finished save, or contradicts itself.
    """
    place = Path(path)
    try:
        names = frozenset(path.name for path in place.iterdir())
    except NotADirectoryError:
        return single_file.SingleFile(place)
    except FileNotFoundError:
        raise CheckpointError(f"{place}: there is no such checkpoint; check the path") from None
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {reason(error)}") from None
    if not names:
        raise CheckpointError(f"{place}: is empty, there is no checkpoint in it")
    for form in FORMATS:
        if form.finds(names):
            return form.opens(place)
    raise CheckpointError(
        f"{place}: has no {INFO_NAME}, which is written last; the save did not finish, or "
        f"this is no checkpoint of a form that is known ({', '.join(f.name for f in FORMATS)})"
    )
