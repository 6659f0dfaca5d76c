"""JSON from files that are not trusted: nothing is guessed, and errors name file, key and value."""

import json
from pathlib import Path
from typing import Never

from shardspec.errors import CheckpointError

__all__ = ["as_list", "as_object", "as_size", "as_sizes", "as_text", "member", "parse_json"]


class _BadJSONError(ValueError):
    """What is wrong with the text, for `parse_json` to say where."""


def parse_json(data: bytes, file: Path, what: str) -> object:
    """Return the value that bytes hold as strict JSON.

    Parameters
    ----------
    data
        The bytes.
    file, what
        For errors: where they come from, and what they should be (``"header"``).

    Raises
    ------
    CheckpointError
        If they are not UTF-8 or not JSON, repeat a key, hold NaN or an infinity, or nest too deep.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_repeats, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 (byte {error.start} is {data[error.start]:#04x})"
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg} at character {error.pos}"
    except _BadJSONError as error:
        problem = str(error)
    except RecursionError:
        problem = "nests too deep"
    except ValueError:
        # The one other thing that the parser raises: its limit on the digits of a number.
        problem = "holds a number of thousands of digits"
    raise CheckpointError(f"{file}: the {what} {problem}; the file is damaged, restore it")


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadJSONError(f"has the key {key!r} twice")
            seen.add(key)
    return found


def _no_constant(text: str) -> Never:
    raise _BadJSONError(f"holds {text}, which is not JSON")


def _fail(value: object, file: Path, key: str, expected: str) -> Never:
    shown = repr(value)
    if len(shown) > 60:
        shown = f"{shown[:57]}..."
    raise CheckpointError(f"{file}: {key} should be {expected} but is {shown}")


def member(parent: dict[str, object], name: str, file: Path, key: str) -> object:
    """Return one value of an object; `key` is the full name of the value for errors."""
    if name not in parent:
        raise CheckpointError(f"{file}: {key} is missing")
    return parent[name]


def as_object(value: object, file: Path, key: str) -> dict[str, object]:
    """Return a JSON object whose keys can be written as UTF-8."""
    if not isinstance(value, dict):
        _fail(value, file, key, "an object")
    for name in value:
        _check_text(name, file, key)
    return value


def as_list(value: object, file: Path, key: str) -> list[object]:
    """Return a JSON list."""
    return value if isinstance(value, list) else _fail(value, file, key, "a list")


def as_text(value: object, file: Path, key: str) -> str:
    """Return a JSON string that can be written as UTF-8."""
    if not isinstance(value, str):
        _fail(value, file, key, "a string")
    _check_text(value, file, key)
    return value


def as_size(value: object, file: Path, key: str) -> int:
    """Return a whole number from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        _fail(value, file, key, "a whole number from 0 to 2**63 - 1")
    return value


def as_sizes(value: object, file: Path, key: str) -> tuple[int, ...]:
    """Return a list of whole numbers from 0 to 2**63 - 1 as a tuple."""
    if type(value) is not list:
        _fail(value, file, key, "a list of whole numbers")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:
            _fail(value, file, key, "a list of whole numbers from 0 to 2**63 - 1")
    return tuple(value)


def _check_text(text: str, file: Path, key: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        _fail(text, file, key, "text without lone surrogates")
