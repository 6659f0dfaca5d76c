"""What lies in a checkpoint besides tensors, as values that can be shown and written as JSON."""

from itertools import islice
from typing import Final

from shardspec.checkpoint.pickles import Global, Record
from shardspec.checkpoint.torch_dtensors import TorchDTensor
from shardspec.checkpoint.torch_values import TorchTensor

__all__ = ["plain_value"]

_MOST_PARTS: Final = 10_000
_MOST_DEPTH: Final = 32
_MOST_TEXT: Final = 10_000


def plain_value(value: object) -> object:
    """Return a value as numbers, texts, lists and dicts; what is anything else is described.

    Parameters
    ----------
    value
        Out of a pickle that was read; it may hold itself, or one part a great many times.

    Examples
    --------
    >>> plain_value({"lr": (0.1, None), 0: Global("torch.float32"), "b": b"xyz"})
    {'lr': [0.1, None], '0': 'torch.float32', 'b': '3 bytes'}
    """
    return _Plain().of(value, 0)


class _Plain:
    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def of(self, value: object, depth: int) -> object:
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            return "…"
        match value:
            case None | bool() | int() | float():
                return value
            case str():
                return value if len(value) <= _MOST_TEXT else f"text of {len(value)} characters"
            case bytes():
                return f"{len(value)} bytes"
            case list() | tuple():
                return [self.of(item, depth + 1) for item in islice(value, self._left + 1)]
            case dict():
                some = islice(value.items(), self._left + 1)
                return {_key(key): self.of(item, depth + 1) for key, item in some}
            case Global():
                return value.name
            case TorchTensor() | TorchDTensor():
                return f"tensor of shape {list(value.shape)}"
            case Record():
                return f"<{value.name}>"
        return str(value) if isinstance(value, complex) else f"a {type(value).__name__}"


def _key(key: object) -> str:
    match key:
        case str():
            return key
        case Global():
            return key.name
        case Record():
            return f"<{key.name}>"
    return str(key)
