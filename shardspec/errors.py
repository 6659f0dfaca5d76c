"""Every exception shardspec raises on purpose.

Catch `ShardSpecError` to catch them all. Each child also inherits the built-in that a reader
would expect, so ``except ValueError`` keeps working. Messages name the values and the remedy.
"""

from typing import Final

from shardspec.text import Part, printable

_SHOWN: Final = 160
"""Characters of a spec that an error shows."""


class ShardSpecError(Exception):
    """Root of every error that shardspec raises on purpose.

    Attributes
    ----------
    parts
        The message in parts: its text, and the arguments that it names.

    Examples
    --------
    >>> from shardspec import ShardingSpec
    >>> try:
    ...     ShardingSpec.parse("[S0,S0]")
    ... except ShardSpecError as error:
    ...     print(type(error).__name__, isinstance(error, ValueError))
    AxisError True
    """

    def __init__(self, *parts: Part) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts


class SpecSyntaxError(ShardSpecError, ValueError):
    """The text of a sharding spec does not follow the grammar.

    Attributes
    ----------
    text
        The whole text that was parsed.
    position
        Index of the offending character in `text`; ``len(text)`` when the text ends too early.
    """

    def __init__(self, problem: str, text: str, position: int) -> None:
        super().__init__(f"{problem}\n{_with_caret(text, position)}")
        self.problem = problem
        self.text = text
        self.position = position

    def __reduce__(self) -> tuple[type["SpecSyntaxError"], tuple[str, str, int]]:
        return type(self), (self.problem, self.text, self.position)


def _with_caret(text: str, position: int) -> str:
    """Return the text, or what is around a place in a long one, with a caret below that place."""
    before, after = text[:position], text[position:]
    if len(text) > _SHOWN:
        before = before if len(before) <= _SHOWN // 2 else f"...{before[-_SHOWN // 2 :]}"
        after = after if len(after) <= _SHOWN // 2 else f"{after[: _SHOWN // 2]}..."
    # What is printed may be longer than the text: a name in it may hold anything.
    before = printable(before)
    return f"  {before}{printable(after)}\n  {' ' * len(before)}^"


class AxisError(ShardSpecError, ValueError):
    """A mesh axis or a tensor dim is used twice, out of range, or unknown by name."""


class MeshError(ShardSpecError, ValueError):
    """Device ids, mesh shape, axis names or links do not describe a mesh."""


class DTypeError(ShardSpecError, TypeError):
    """A dtype is unknown, or an operation does not exist for it."""


class LayoutError(ShardSpecError, ValueError):
    """A layout, a tensor and a conversion do not fit together."""


class LossyConversionError(ShardSpecError, ValueError):
    """Another library has no word for a part of a layout; nothing is approximated."""


class CommunicatorError(ShardSpecError, RuntimeError):
    """The process group is missing, or does not reach the devices that are asked for."""


class CheckpointError(ShardSpecError, ValueError):
    """A checkpoint on disk is missing, incomplete, damaged or contradicts itself."""


class InputFileError(ShardSpecError, ValueError):
    """A file of arguments is missing or cannot be read."""


class ProfileError(ShardSpecError, ValueError):
    """A measured profile is missing, damaged, or does not fit what it is used for."""


class OutputExistsError(CheckpointError, FileExistsError):
    """The place to write to is taken, and overwriting it was not asked for."""
