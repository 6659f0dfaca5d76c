"""The options that say what a checkpoint does not say about itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from shardspec.checkpoint.open import open_checkpoint
from shardspec.checkpoint.source import CheckpointSource

__all__ = ["open_source", "source_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def source_options(command: _Command) -> _Command:
    """Add the options that `open_source` takes."""
    options = (
        click.option(
            "--ranks",
            type=click.IntRange(1),
            metavar="N",
            help="How many ranks wrote CKPT, for forms that do not say it.",
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


def open_source(checkpoint: Path, ranks: int | None, source_rules: Path | None) -> CheckpointSource:
    """Open a checkpoint with what the user has added.

    Raises
    ------
    CheckpointError
        As `open_checkpoint`.
    """
    return open_checkpoint(checkpoint, ranks=ranks, rules=source_rules)
