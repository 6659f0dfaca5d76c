"""Opening checkpoints, with options for what they do not say about themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.open import open_checkpoint, open_checkpoints

__all__ = ["open_both", "open_source", "source_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def source_options(command: _Command) -> _Command:
    """Add the options that `open_source` takes."""
    options = (
        click.option(
            "--ranks",
            type=click.IntRange(1),
            metavar="N",
            help="How many ranks wrote the checkpoint, for forms that do not say it.",
        ),
        click.option(
            "--source-rules",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="TOML file that says how the ranks cut tensors, for forms that do not say it and "
            "names that the library does not know.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def open_source(checkpoint: Path, ranks: int | None, source_rules: Path | None) -> Catalog:
    """Open a checkpoint with what the user has added.

    Raises
    ------
    CheckpointError
        As `open_checkpoint`.
    """
    return open_checkpoint(checkpoint, ranks=ranks, rules=source_rules)


def open_both(
    one: Path, other: Path | None, ranks: int | None, source_rules: Path | None
) -> tuple[Catalog, Catalog | None]:
    """Open a checkpoint, and one to hold beside it if there is one; both by `open_checkpoints`.

    Raises
    ------
    CheckpointError
        As `open_checkpoints`.
    """
    paths = [one] if other is None else [one, other]
    found = open_checkpoints(paths, ranks=ranks, rules=source_rules)
    return found[0], None if other is None else found[1]
