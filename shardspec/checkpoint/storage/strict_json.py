"""Parses JSON from untrusted files with bounded memory; errors name the file, key and value."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, Final, Never, TypeVar, cast

from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.errors import CheckpointError
from shardspec.input_files import MAX_JSON_BYTES
from shardspec.text import shown

_Kind = TypeVar("_Kind")

ROOM_BYTES: Final = 448 << 20
"""Maximum memory of a text and its values; enough for a header of 400,000 tensors."""
_COSTS: Final = {b"[": 80, b"{": 72, b":": 120, b",": 40, b'"': 24}
"""Approximate bytes of memory for the value after each of these characters."""
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def is_size(value: object) -> bool:
    """Return True for a whole number from 0 to 2**63 - 1.

    >>> is_size(3), is_size(-1), is_size(True)
    (True, False, False)
    """
    return type(value) is int and 0 <= value < 1 << 63


_KINDS: Final[dict[type, tuple[str, Callable[[Any], bool]]]] = {
    object: ("a value", lambda _: True),
    dict: ("an object", lambda value: isinstance(value, dict)),
    list: ("a list", lambda value: isinstance(value, list)),
    str: ("a string", lambda value: isinstance(value, str)),
    int: ("a whole number from 0 to 2**63 - 1", is_size),
    tuple: (
        "a list of whole numbers from 0 to 2**63 - 1",
        lambda value: isinstance(value, list) and all(map(is_size, value)),
    ),
}
"""Type of a JSON value -> its description in errors, and a check."""


def values_bytes(data: bytes) -> int:
    """Return an estimate of the memory of the values in a JSON text.

    >>> values_bytes(b"[1, 2]")
    120
    """
    return sum(each * data.count(char) for char, each in _COSTS.items())


def parse_json(
    data: bytes,
    file: PurePath,
    title: str,
    estimate: Callable[[bytes], int] = values_bytes,
    shrink: Callable[[dict[str, Any]], object] = lambda value: value,
) -> object:
    """Return the value of a JSON text; raises CheckpointError for repeated keys.

    `title` names the text in errors. `shrink` is called with each object, and its result replaces
    the object. `estimate` returns the memory that the values of a text would take.

    >>> parse_json(b'{"a": [1]}', PurePath("config.json"), "config")
    {'a': [1]}
    """

    def fail(problem: str) -> Never:
        why = f"{file}: the {title} {problem}; the file is damaged, restore it"
        raise CheckpointError(why) from None

    def without_repeats(pairs: list[tuple[str, object]]) -> object:
        value = dict(pairs)
        if len(value) != len(pairs):
            ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
            fail(f"has the key {shown(repeated)} twice")
        return shrink(value)

    width = 1 if data.isascii() else 4
    _check_room(file, title, len(data), len(data) * (1 + 2 * width) + estimate(data))
    try:
        value: object = json.loads(
            data.decode(),
            object_pairs_hook=without_repeats,
            parse_constant=lambda text: fail(f"contains {text}, which is not JSON"),
        )
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        fail(f"is not UTF-8 (byte {error.start} is {data[error.start]:#04x})")
    except UnicodeEncodeError:
        fail("contains text with lone surrogates")
    except json.JSONDecodeError as error:
        fail(f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos}")
    except RecursionError:
        fail("nests too deep")
    except ValueError:  # Python's limit on the digits of a number
        fail("contains a number of thousands of digits")
    return value


def _check_room(file: PurePath, title: str, num_bytes: int, needed_bytes: int) -> None:
    if needed_bytes > ROOM_BYTES:
        raise CheckpointError(
            f"{file}: the {title} has {num_bytes} bytes, whose values would take more than "
            f"{ROOM_BYTES >> 20} MiB of memory; save in fewer tensors, or restore the file"
        )


def checked(value: object, kind: type[_Kind], file: PurePath, key: str) -> _Kind:
    """Return a JSON value if it has the type `kind`; errors name its `key`.

    Types are dict, list, str, int (a size), tuple (a list of sizes, returned as a tuple) and object
    (any value).

    >>> checked([2, 3], tuple, PurePath("a.json"), "shape")
    (2, 3)
    """
    text, fits = _KINDS[kind]
    if not fits(value):
        raise CheckpointError(f"{file}: {key} should be {text} but is {shown(value, 60)}")
    return cast(_Kind, tuple(cast(list[int], value)) if kind is tuple else value)


def field(
    parent: Mapping[str, object], name: str, kind: type[_Kind], file: PurePath, at: str
) -> _Kind:
    """Return a member of a JSON object, checked by `checked`; errors name the object by `at`.

    >>> field({"size": 4}, "size", int, PurePath("a.json"), "header")
    4
    """
    key = f"{at}.{name}" if at else name
    if name not in parent:
        raise CheckpointError(f"{file}: {key} is missing")
    return checked(parent[name], kind, file, key)


def fields(value: object, kinds: Mapping[str, type], file: PurePath, at: str) -> list[Any]:
    """Return the members of a JSON object in the order of `kinds`, each checked by its type.

    >>> fields({"name": "w", "size": 4}, {"size": int, "name": str}, PurePath("a.json"), "header")
    [4, 'w']
    """
    parent = checked(value, dict, file, at)
    return [field(parent, name, kind, file, at) for name, kind in kinds.items()]


def read_json(
    path: StoragePath,
    title: str,
    estimate: Callable[[bytes], int] = values_bytes,
    shrink: Callable[[dict[str, Any]], object] = lambda value: value,
) -> dict[str, Any]:
    """Return the JSON object in a file; see `parse_json`."""
    with path.open() as file:
        # Each byte takes at least three in memory; too large a file is refused unread.
        _check_room(path, title, file.num_bytes, 3 * file.num_bytes)
        data = file.read(0, file.num_bytes)
    value = parse_json(data, path, title, estimate, shrink)
    return checked(value, dict, path, f"the {title}")


def json_beside(directory: StoragePath, name: str) -> object:
    """Return the content of a JSON file in a directory; None if there is no readable one."""
    if not (directory / name).is_file():
        return None
    with file_inside(directory, name, directory).open() as file:
        data = file.read(0, min(file.num_bytes, MAX_JSON_BYTES))
    with suppress(ValueError, RecursionError):
        return json.loads(data)
    return None
