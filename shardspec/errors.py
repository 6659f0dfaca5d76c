"""Defines the exceptions that shardspec raises on purpose.

`ShardSpecError` catches them all. Each child also inherits a matching built-in exception, so
``except ValueError`` works too. Messages name the values and the remedy.
"""

from typing import Final

from shardspec.text import TextPart

_SHOWN: Final = 160
"""Maximum number of characters of a spec in an error."""


class ShardSpecError(Exception):
    """Root of every error that shardspec raises on purpose.

    Attributes
    ----------
    parts
        The message as texts and the `Argument` values between them.

    Examples
    --------
    >>> from shardspec import ShardingSpec
    >>> try:
    ...     ShardingSpec.parse("[S0,S0]")
    ... except ShardSpecError as error:
    ...     print(type(error).__name__, isinstance(error, ValueError))
    AxisError True
    """

    def __init__(self, *parts: TextPart) -> None:
        super().__init__("".join(map(str, parts)))
        self.parts = parts


class SpecSyntaxError(ShardSpecError, ValueError):
    """The text of a sharding spec does not follow the grammar.

    Attributes
    ----------
    text
        The full text that was parsed.
    position
        Index of the offending character in `text`; ``len(text)`` when the text ends too early.
    """

    def __init__(self, problem: str, text: str, position: int) -> None:
        place = f"character {position + 1}" if position < len(text) else "at the end"
        super().__init__(f"{problem} ({place} of {_excerpt(text, position)})")
        self.problem = problem
        self.text = text
        self.position = position

    def __reduce__(self) -> tuple[type["SpecSyntaxError"], tuple[str, str, int]]:
        return type(self), (self.problem, self.text, self.position)


def _excerpt(text: str, position: int) -> str:
    """Return the text for display, shortened to the surroundings of `position` if it is long."""
    if len(text) <= _SHOWN:
        return repr(text)
    start = max(position - _SHOWN // 2, 0)
    after = text[start : position + _SHOWN // 2]
    return f"{'...' * (start > 0)}{after!r}{'...' * (position + _SHOWN // 2 < len(text))}"


class AxisError(ShardSpecError, ValueError):
    """A mesh axis or a tensor dim is used twice, is out of range, or has an unknown name."""


class MeshError(ShardSpecError, ValueError):
    """Device ids, mesh shape, axis names or links do not describe a mesh."""


class NotTorchMeshError(MeshError, AttributeError):
    """A torch function got a shardspec mesh instead of the result of `to_torch()`."""


class DTypeError(ShardSpecError, TypeError):
    """A dtype is unknown, or an operation does not exist for it."""


class LayoutError(ShardSpecError, ValueError):
    """A layout, a tensor and a conversion do not fit together."""


class LossyConversionError(ShardSpecError, ValueError):
    """The notation of another library cannot express a layout; nothing is approximated."""


class CommunicatorError(ShardSpecError, RuntimeError):
    """The process group is missing or lacks requested devices, or a peer has failed."""


class CheckpointError(ShardSpecError, ValueError):
    """A checkpoint on disk is missing, incomplete, damaged or inconsistent."""


class InputFileError(ShardSpecError, ValueError):
    """An input file, such as rules or a config, is missing or cannot be read."""


class ProfileError(ShardSpecError, ValueError):
    """A measured profile is missing, damaged, or does not fit its use."""


class QuantizedError(CheckpointError, DTypeError):
    """The scales or parameters of a quantized checkpoint are missing, or do not fit its codes."""


class OutputExistsError(CheckpointError, FileExistsError):
    """The output exists already, and overwriting was not requested."""
