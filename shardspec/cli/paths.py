"""Paths of checkpoints on the command line: of this machine, or URLs of object stores."""

import os
from pathlib import Path

import click

from shardspec.checkpoint.storage.remote import as_path

__all__ = ["CheckpointPath"]


class CheckpointPath(click.Path):
    """A path, or a URL such as ``s3://bucket/model``."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,  # noqa: ARG002  # named by click
        ctx: click.Context | None,  # noqa: ARG002  # named by click
    ) -> Path:
        """Return what the word names."""
        return as_path(value if isinstance(value, Path) else os.fspath(value))
