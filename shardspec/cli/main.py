"""The command `shardspec`; it turns errors into one line on stderr and an exit code.

Exit codes: 0 success, 1 checkpoints differ or stdout cannot be written, 2 wrong usage (an option,
a spec, a mesh), 3 a checkpoint, an input file or an output that cannot be used, 130 interrupted,
143 terminated.
"""

import gc
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Final, Never

import click

from shardspec.cli.command import COMMON, CommandGroup
from shardspec.cli.output import styled
from shardspec.errors import (
    CheckpointError,
    InputFileError,
    ProfileError,
    ShardSpecError,
)
from shardspec.text import TextPart, fitted, shortened, terminal_width

_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "plan": ("plan", "Plan the cheapest conversion between two specs, on paper."),
    "cost": ("plan", "Price conversions between many pairs of specs."),
    "show": ("show", "Show which devices hold which part of a tensor."),
    "explore": ("show", "Write a page in which to watch conversions."),
    "links": ("links", "List the links that --links knows, or import measured ones."),
    "profile": ("links", "Measure the links of a cluster, under torchrun."),
    "inspect": ("inspect", "Show mesh, tensors, specs and sizes of a checkpoint."),
    "verify": ("compare", "Check that a checkpoint is complete and as it was saved."),
    "diff": ("compare", "Compare two checkpoints tensor by tensor."),
    "digest": ("compare", "Digest tensors, however they are sharded and stored."),
    "merge": ("write", "Write the global tensors of a checkpoint into files."),
    "reshard": ("write", "Write a checkpoint as another mesh would have saved it."),
    "delta": ("delta", "Write what changed between checkpoints, and apply it."),
    "plan-state": ("plan", "Plan how a mesh gets a model from a checkpoint."),
}
"""Command -> its module and its line of help, so that the help imports no module."""

_TASKS: Final[Mapping[str, str]] = {
    "plan": "Plan and price conversions",
    "inspect": "Look into checkpoints",
    "merge": "Write checkpoints",
}
"""The first command of each section of the help, and the section's title."""

_OPTIONS: Final[Mapping[str, str]] = {
    "device_mesh": "--mesh",
    "max_shard_bytes": "--max-shard-size",
    "names": "--map",
}
"""Options whose names differ from those of the library's arguments."""
_MAX_CHARACTERS: Final = 2000  # in an error, which may quote an argument
_MAX_LINES: Final = 3  # of an error on a terminal
_HELP_COLUMNS: Final = 100
"""Most columns of a help text."""
_NO_OUTPUT: Final = 1
_USAGE: Final = 2
_BAD_INPUT: Final = 3
_BY_SIGNAL: Final = 128
"""Exit code of a command ended by a signal, minus the signal's number, as in shells."""


class _LazyGroup(CommandGroup):
    """Imports the module of a command only when the command is called, to start fast."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"shardspec.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by task."""
        width = max(map(len, _COMMANDS))
        rows = [(name.ljust(width), text) for name, (_, text) in _COMMANDS.items()]
        starts = [list(_COMMANDS).index(name) for name in _TASKS]
        for title, start, end in zip(_TASKS.values(), starts, [*starts[1:], None], strict=True):
            with formatter.section(title):
                formatter.write_dl(rows[start:end])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; an interrupt is reported like an error."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            if sys.stderr.isatty():
                click.echo(err=True)  # the terminal has shown ^C in this line
            number = error.args[0] if error.args else signal.SIGINT
            raise click.exceptions.Exit(_fail("interrupted", _BY_SIGNAL + number)) from None

    def main(  # type: ignore[override]  # click overloads this by a literal; here it never returns
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        **extra: Any,  # noqa: ANN401  # passed to click unchanged
    ) -> Never:
        """Run a command, print every expected error as one line on stderr, and exit."""
        # click's own width is 50 or more, also where the terminal is narrower.
        width = {"terminal_width": min(terminal_width(), _HELP_COLUMNS) - 2}
        try:
            code = super().main(args, prog_name, **{**width, **extra, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = _USAGE
        except click.UsageError as error:
            hint = f"; see '{error.ctx.command_path} -h'" if error.ctx else ""
            code = _fail(f"{error.format_message().rstrip('.')}{hint}", _USAGE)
        except click.ClickException as error:
            code = _fail(error.format_message(), error.exit_code)
        except click.Abort:
            code = _fail("interrupted", _BY_SIGNAL + signal.SIGINT)
        except ShardSpecError as error:
            bad_input = isinstance(error, CheckpointError | InputFileError | ProfileError)
            text = "".join(map(option_text, error.parts))
            code = _fail(text, _BAD_INPUT if bad_input else _USAGE)
        except OSError as error:
            # Errors of files are caught where these are used, so this one is of stdout.
            code = _fail(f"cannot write to stdout: {error.strerror}", _NO_OUTPUT)
        sys.exit(code or 0)


def option_text(part: TextPart) -> str:
    """Return a part of an error message as text; an `Argument` becomes a command-line option."""
    if isinstance(part, str):
        return part
    option = part.name.replace("_", "-")
    option = _OPTIONS.get(part.name, f"--no-{option}" if part.value is False else f"--{option}")
    return option if isinstance(part.value, bool | None) else f"{option} {part.value}"


def _fail(message: str, code: int) -> int:
    """Print an error with control characters escaped, and return its exit code.

    The error is one line; on a terminal it is wrapped to at most three lines. Under torchrun the
    line also goes to a file, which torchrun prints at its end.
    """
    text = shortened(message, _MAX_CHARACTERS)
    shown_text = f"Error: {text}"
    if sys.stderr.isatty():
        shown_text = fitted(f"Error: {text}", terminal_width(), _MAX_LINES)
    click.echo(styled("Error:", fg="red") + shown_text.removeprefix("Error:"), err=True)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        # torchrun shows the first of all processes, and interrupts the others in the same second.
        seconds = int(time.time()) + (code >= _BY_SIGNAL)
        content = json.dumps({"message": f"Error: {text}", "timestamp": seconds})
        with suppress(OSError):
            Path(report).write_text(content, encoding="utf-8")
    return code


@click.command(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="'shardspec COMMAND -h' shows what a command takes, with examples.",
)
@click.version_option(package_name="shardspec", message="%(prog)s %(version)s")
def cli() -> None:
    """Sharding specs for tensors: plan conversions, look into sharded checkpoints, merge them."""


cli.params += COMMON


def main() -> None:
    """Run the command line; the entry point of the package."""
    # What a command reads is in use until its end. Collecting cycles often would take as long as
    # reading the metadata of a large checkpoint.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    # Handled as an interrupt, so that temporary files are removed.
    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _interrupt_again
    # Clients of stores log what they then raise; only the error is printed.
    logging.getLogger().addHandler(logging.NullHandler())
    # A terminal that cannot encode '→' shows '?'.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    cli(prog_name="shardspec")


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Raise an interrupt again that came during a callback, where Python ignores exceptions."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, signal.raise_signal, [signal.SIGTERM]).start()
    else:
        sys.__unraisablehook__(ignored)
