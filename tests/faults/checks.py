"""What is asked of every case: one line of an error, nothing under the final name, nothing left."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import safetensors.numpy

from shardspec import ShardSpecError
from shardspec.cli.main import cli

__all__ = ["command", "one_line", "raised", "refused", "same", "tree"]


def tree(place: Path) -> dict[str, tuple[int, ...]]:
    """Return everything below a folder: names, and sizes and times of files."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(place.rglob("*")):
        at = path.lstat()
        found[str(path.relative_to(place))] = (at.st_mode, at.st_size, at.st_mtime_ns, at.st_ino)
    return found


def names(place: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in place.iterdir())


def command(args: Sequence[object]) -> tuple[int, str, str]:
    """Run a command line in this process; return exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int), code
    return code, out.getvalue(), err.getvalue()


def one_line(message: str) -> str:
    """Check that a message is one clear line, and return it."""
    assert message.endswith("\n"), repr(message)
    assert message.count("\n") == 1, f"several lines: {message!r}"
    assert message.startswith("Error: "), repr(message)
    assert "Traceback" not in message
    assert 20 < len(message) < 2000, repr(message)
    return message


def refused(args: Sequence[object], place: Path, says: str = "") -> str:
    """Check that a command ends with one line of an error and changes nothing below a folder."""
    before = tree(place)
    code, out, err = command(args)
    assert code in (2, 3), (code, out, err)
    message = one_line(err)
    assert says in message, message
    assert out == "", out
    assert tree(place) == before, set(tree(place).items()) ^ set(before.items())
    return message


def raised(act: Callable[[], object]) -> str | None:
    """Do something; return the one line of our error, or None if there was none."""
    try:
        act()
    except ShardSpecError as error:
        return one_line(f"Error: {error}\n")
    return None


def same(path: Path, expected: Mapping[str, np.ndarray]) -> None:
    """Check that a safetensors file holds exactly these arrays, bit for bit."""
    found = safetensors.numpy.load_file(path)
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
