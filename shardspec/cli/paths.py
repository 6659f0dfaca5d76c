"""Paths of checkpoints on the command line: of this machine, or URLs of object stores."""

import os
from pathlib import Path

import click

from shardspec.checkpoint.store import as_path

__all__ = ["CheckpointPath"]


class CheckpointPath(click.Path):
    """A path, or a URL such as ``s3://bucket/model``."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """Return what the word names."""
        if not value:
            self.fail("an empty text is no path; '.' is the working directory.", param, ctx)
        return as_path(value if isinstance(value, Path) else os.fspath(value))
