"""Options of the commands that read and write checkpoints, and what they stand for."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from shardspec.cli.options import Command, json_option, overwrite_option, together

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog

__all__ = [
    "CheckpointPath",
    "WritingOptions",
    "choosing_options",
    "open_both",
    "output_option",
    "rules_option",
    "source_options",
    "writing_options",
]


class CheckpointPath(click.Path):
    """A path, or a URL such as ``s3://bucket/model``."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Path:
        """Return what the word names."""
        from shardspec.checkpoint.store import as_path

        if not value:
            self.fail("an empty text is no path; '.' is the working directory.", param, ctx)
        return as_path(value if isinstance(value, Path) else os.fspath(value))


def rules_option(option: str, name: str, what: str) -> Callable[[Command], Command]:
    """Return an option for a file of rules."""
    return click.option(option, name, type=click.Path(path_type=Path), metavar="FILE", help=what)


source_options = together(
    click.option(
        "--ranks",
        type=click.IntRange(1),
        metavar="N",
        help="How many ranks wrote the checkpoint, for formats that do not say it.",
    ),
    rules_option(
        "--source-rules",
        "source_rules",
        "TOML file that says how the ranks cut tensors, for formats that do not say it and names "
        "that the library does not know.",
    ),
)


def open_both(
    one: Path, other: Path | None, ranks: int | None, source_rules: Path | None
) -> "tuple[Catalog, Catalog | None]":
    """Open a checkpoint, and another one if it is given, with what the user says about them.

    Raises
    ------
    CheckpointError
        As `open_checkpoints`.
    """
    from shardspec.checkpoint.open import open_checkpoints

    paths = [one] if other is None else [one, other]
    found = open_checkpoints(paths, ranks=ranks, rules=source_rules)
    context = click.get_current_context(silent=True)
    quiet = context is not None and context.params.get("quiet")
    for catalog in found:
        for note in () if quiet else catalog.notes:
            click.echo(f"note: {catalog.directory}: {note}", err=True)
    return found[0], None if other is None else found[1]


def _if_any(
    _: click.Context, __: click.Parameter, patterns: tuple[str, ...]
) -> tuple[str, ...] | None:
    return patterns or None


def _expressions(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise click.BadParameter(
                f"{pattern!r} is no regular expression: {error}.", ctx, param
            ) from None
    return pairs


choosing_options = together(
    click.option(
        "--include",
        multiple=True,
        callback=_if_any,
        metavar="PATTERN",
        help="Only tensors whose name matches (as in a shell); may be given several times.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="No tensors whose name matches; may be given several times.",
    ),
    click.option(
        "--rename",
        multiple=True,
        nargs=2,
        callback=_expressions,
        metavar="REGEX NEW",
        help="Replace the first match of REGEX in every name by NEW; may be given several times.",
    ),
)


class WritingOptions(TypedDict):
    """What `writing_options` adds for `merge` and `reshard`."""

    dtype: str | None
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    rename: tuple[tuple[str, str], ...]
    threads: int
    strict_cast: bool
    overwrite: bool
    verify: bool
    reread: bool
    dry_run: bool
    sidecars: bool


writing_options = together(
    click.option(
        "--dtype", metavar="DTYPE", help="Cast floating point tensors to this dtype, as bf16."
    ),
    choosing_options,
    click.option(
        "--threads",
        type=click.IntRange(1),
        default=1,
        metavar="N",
        help="Write N files at once.",
    ),
    click.option(
        "--strict-cast",
        is_flag=True,
        help="Refuse a cast that turns numbers into infinity, 0 or NaN; else they are counted.",
    ),
    overwrite_option(),
    click.option(
        "--no-verify",
        "verify",
        flag_value=False,
        default=True,
        help="Do not compare bytes with the digests that were saved, nor read OUT again.",
    ),
    click.option(
        "--no-reread",
        "reread",
        flag_value=False,
        default=True,
        help="Compare bytes with the digests that were saved, but do not read OUT again.",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Check what describes CKPT, say what would be done, and stop.",
    ),
    click.option(
        "--no-sidecars",
        "sidecars",
        flag_value=False,
        default=True,
        help="Leave behind what lies beside the weights, such as config.json and a tokenizer.",
    ),
    json_option("Print what was written as JSON."),
    click.option("--quiet", is_flag=True, help="Print nothing but errors."),
)


def output_option(what: str) -> Callable[[Command], Command]:
    """Return the option that names the checkpoint to write, a path or a URL."""
    return click.option("-o", "--output", required=True, metavar="OUT", help=what)
