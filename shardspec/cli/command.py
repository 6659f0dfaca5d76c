"""Extends click's commands: help under headings, common options, remedies for removed options."""

import inspect
import os
import resource
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial, reduce, wraps
from typing import Any, Final, Literal, TypeAlias, get_args

import click

from shardspec.cli.output import QUIET, VERBOSE
from shardspec.errors import ShardSpecError
from shardspec.text import bytes_text, printable, seconds_text

Run: TypeAlias = Callable[..., None]
"""The function of a command, which takes arguments and options by name."""
Decorator: TypeAlias = Callable[[Run], Run]

Heading: TypeAlias = Literal["Input", "Names", "Output", "Precision", "Running"]
"""A heading of the help of a command."""


@dataclass(frozen=True)
class Option:
    """An option of the command line; a decorator adds it to each command that takes it."""

    name: str
    """The keyword argument of the command; by default the option is ``--name``."""
    heading: Heading
    help: str
    more: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `click.Option`."""
    words: tuple[str, ...] = ()
    """The option as users type it, if that is not ``--name``."""

    def __call__(self, run: Run) -> Run:
        """Add the option to the function of a command."""
        words = self.words or (f"--{self.name.replace('_', '-')}",)
        more = {"help": self.help, **self.more}
        return click.option(*words, self.name, cls=_Option, heading=self.heading, **more)(run)

    def but(self, help: str = "", **changes: Any) -> "Option":  # noqa: ANN401
        """Return a copy of the option with other help or other arguments of `click.Option`."""
        return replace(self, help=help or self.help, more={**self.more, **changes})

    def under(self, heading: Heading) -> "Option":
        """Return a copy of the option under another heading of the help."""
        return replace(self, heading=heading)


def flag(name: str, heading: Heading, help: str, *words: str, **more: Any) -> Option:  # noqa: ANN401
    """Return an option without a value; ``--no-NAME`` makes the argument False."""
    return Option(name, heading, help, {"is_flag": True, **more}, words)


def unless(name: str, heading: Heading, help: str) -> Option:
    """Return the option ``--no-NAME``, which makes the argument of this name False."""
    return flag(name, heading, help, f"--no-{name}", flag_value=False, default=True)


class _Option(click.Option):
    """An option of click with a heading; for a removed value it raises an error with a remedy."""

    def __init__(self, *words: Any, heading: Heading, **more: Any) -> None:  # noqa: ANN401
        super().__init__(*words, **more)
        self.heading = heading

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:  # noqa: ANN401
        """Return the parsed value; raises an error with a remedy for a removed value."""
        if isinstance(value, str) and not os.path.exists(value):
            refuse_removed(ctx, f"{self.opts[-1]} {value}")
        return super().type_cast_value(ctx, value)


def refuse_removed(ctx: click.Context, words: str) -> None:
    """Raise `click.UsageError` with the remedy if a command, option or value was removed."""
    place = " ".join([*ctx.command_path.split()[1:], words])
    for pattern, remedy in REMOVED.items():
        if ("--" in pattern) == words.startswith("-") and fnmatchcase(place, pattern):
            gone = words if words.startswith("-") else place
            raise click.UsageError(f"{gone} was removed; {remedy}", ctx)


class CommandGroup(click.Group):
    """A group of commands; for a removed command it raises an error with a remedy."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name, if there is one."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            refuse_removed(ctx, cmd_name)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of the commands, each with the first sentence of its help."""
        rows = [(name, self.commands[name].get_short_help_str(1000)) for name in self.commands]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _keep(key: str, ctx: click.Context, _: click.Parameter, value: object) -> None:
    if value:
        ctx.meta[key] = True


_kept: Final = partial(click.Option, is_flag=True, expose_value=False)
COMMON: Final = (
    _kept(
        ["-q", "--quiet", "quiet"],
        callback=partial(_keep, QUIET),
        help="Print only errors; the exit code gives the answer.",
    ),
    _kept(
        ["-v", "--verbose", "verbose"],
        callback=partial(_keep, VERBOSE),
        help="Print time, memory and the traceback of an error to stderr.",
    ),
)
"""Options of all commands, before or after the command's name; 'shardspec -h' explains them."""


class Command(click.Command):
    """A command whose help groups options under headings and ends with examples."""

    def __init__(self, name: str | None, *, help: str, **more: Any) -> None:  # noqa: ANN401
        text, _, examples = inspect.cleandoc(help).partition("\n\nExamples:\n")
        paragraphs = f"Examples:\n{examples}".split("\n\n")
        epilog = "\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs)
        super().__init__(name, help=text, epilog=epilog, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, including ``-q`` and ``-v``."""
        parser = self.make_parser(ctx)
        try:
            given, _, _ = parser.parse_args(list(args))
        except click.NoSuchOption as error:
            refuse_removed(ctx, error.option_name)
            raise
        for option in COMMON:
            option.process_value(ctx, given.get(option.name or ""))
        return super().parse_args(ctx, args)

    def make_parser(self, ctx: click.Context) -> Any:  # noqa: ANN401
        """Return the parser of the command's own options and of those of all commands."""
        parser = super().make_parser(ctx)
        for option in COMMON:
            option.add_to_parser(parser, ctx)
        return parser

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option ``--help``; its text refers to the options of all commands."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.help = "Show this message and exit; 'shardspec -h' has -q and -v too."
        return option

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        rows: dict[Heading, list[tuple[str, str]]] = {title: [] for title in get_args(Heading)}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                rows[option.heading if isinstance(option, _Option) else "Running"].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=min(30, formatter.width // 2 - 2))

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; with ``--verbose``, time, memory and tracebacks go to stderr."""
        if not ctx.meta.get(VERBOSE):
            return super().invoke(ctx)
        start = time.monotonic()
        try:
            return super().invoke(ctx)
        except ShardSpecError:
            click.echo(printable(traceback.format_exc(), keep="\n"), err=True, nl=False)
            raise
        finally:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seconds_taken = seconds_text(time.monotonic() - start)
            click.echo(f"took {seconds_taken}, {bytes_text(peak)} of memory at most", err=True)


def grouped(name: str, made_of: Callable[..., object], *options: Decorator) -> Decorator:
    """Return a decorator that adds options and passes them to the command as one argument.

    The command gets the result of `made_of`, whose parameters have the names of the options.
    """
    parameters = inspect.signature(made_of).parameters

    def decorate(run: Run) -> Run:
        @wraps(run)
        def call(**given: Any) -> None:  # noqa: ANN401
            values = {parameter: given.pop(parameter) for parameter in parameters}
            run(**given, **{name: made_of(**values)})

        return stacked(*options)(call)

    return decorate


def stacked(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options in this order."""
    return lambda run: reduce(lambda decorated, option: option(decorated), reversed(options), run)


def refuse_if(wrong: bool, text: str) -> None:
    """Raise `click.UsageError` with this text if `wrong` is true."""
    if wrong:
        raise click.UsageError(text)


REMOVED: Final[Mapping[str, str]] = {
    "apply": "use 'shardspec delta apply BASE DELTA... -o OUT'",
    "check-map": "use 'shardspec merge CKPT -o OUT --map FILE --dry-run'",
    "convert": "use shardspec.interop.notations in Python",
    "delta *": "use 'shardspec delta make BASE NEW -o OUT', which writes to a disk",
    "graph": "use LayoutConverter.to_dot in Python",
    "presets": "use 'shardspec links list'",
    "verify --against": "use 'shardspec diff A B'",
    "plan-state --html": "use --transfers DIR",
    "profile --plot": "use the table that it prints",
    "merge --no-metadata": "call merge(..., metadata=False) in Python",
    "reshard --to deepspeed-universal": "use ds_to_universal.py of DeepSpeed",
    "delta make --fill-from": "use 'shardspec merge --fill-from' first",
    "delta make --drop-rows": "use 'shardspec merge --drop-rows' first",
    "digest --fill-from": "use 'shardspec merge --fill-from --digests'",
    "digest --drop-rows": "use 'shardspec merge --drop-rows --digests'",
    "plan-state --fill-from": "use 'shardspec merge --fill-from' first",
    "plan-state --drop-rows": "use 'shardspec merge --drop-rows' first",
    "verify --fill-from": "use 'shardspec merge --fill-from', then verify its output",
    "verify --drop-rows": "use 'shardspec merge --drop-rows', then verify its output",
    "* --alpha": "use --links SECONDS:SECONDS_PER_BYTE, as in 1e-5:4e-11",
    "* --beta": "use --links SECONDS:SECONDS_PER_BYTE, as in 1e-5:4e-11",
    "* --profile": "use --links cluster.toml",
    "* --map *-to-hf": "use --model DIR --names hf",
    "* --map *-to-megatron": "use --model DIR --names megatron",
    "* --map *-to-torch_dist": "use --model DIR --names megatron --to dcp",
    "* --map *-to-fused": "use --model DIR --names fused",
    "* --reverse-map": "use --model DIR, with --names of the other side",
    "* --scale-rule": "scales are 448 · (1 / amax), as transformers has them",
    "* --sizes": "use --model config.json",
}
"""Pattern of a removed command or option -> its remedy."""
