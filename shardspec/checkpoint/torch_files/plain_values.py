"""What lies in a checkpoint besides tensors, as plain values; what is no such is described."""

from collections.abc import Iterable
from itertools import islice
from typing import Final, TypeVar

from shardspec.checkpoint.catalog import OpaqueValue
from shardspec.checkpoint.torch_files.pickles import Global, Record
from shardspec.checkpoint.torch_files.torch_dtensors import TorchDTensor
from shardspec.checkpoint.torch_files.torch_values import TorchTensor

__all__ = ["plain_value"]

_T = TypeVar("_T")
_MOST_PARTS: Final = 100_000
_MOST_DEPTH: Final = 100


def plain_value(value: object) -> object:
    """Return a value of a pickle as None, numbers, texts, lists, tuples and dicts.

    Parameters
    ----------
    value
        What was read of a pickle; it may hold itself, or one part a great many times.

    Returns
    -------
    object
        The value, with an `OpaqueValue` in place of every part of another kind, or for all
        of it where it has very many parts.

    Examples
    --------
    >>> plain_value({"lr": (0.1, None), 0: Global("torch.float32")})
    {'lr': (0.1, None), 0: OpaqueValue(text='torch.float32')}
    """
    try:
        return _Plain().of(value, 0)
    except _TooManyError:
        return OpaqueValue(f"a {type(value).__name__} of many or deeply nested parts")


class _TooManyError(Exception):
    pass


class _Plain:
    """Copies a value, counting its parts."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def of(self, value: object, depth: int) -> object:
        if depth > _MOST_DEPTH:
            raise _TooManyError
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return [self.of(item, depth + 1) for item in self._counted(value)]
            case tuple():
                return tuple(self.of(item, depth + 1) for item in self._counted(value))
            case dict():
                return {
                    self.of(key, depth + 1): self.of(item, depth + 1)
                    for key, item in self._counted(value.items())
                }
            case bytes():
                return OpaqueValue(f"{len(value)} bytes")
            case Global():
                return OpaqueValue(value.name)
            case TorchTensor() | TorchDTensor():
                return OpaqueValue(f"tensor of shape {list(value.shape)}")
            case Record():
                return OpaqueValue(f"<{value.name}>")
        return OpaqueValue(str(value) if isinstance(value, complex) else type(value).__name__)

    def _counted(self, items: Iterable[_T]) -> list[_T]:
        some = list(islice(items, self._left + 1))
        self._left -= len(some)
        if self._left < 0:
            raise _TooManyError
        return some
