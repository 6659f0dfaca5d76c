"""Tensors that are looked up when they are wanted, as their places are not known before."""

from collections.abc import Callable
from threading import Lock
from typing import Final

from shardspec.checkpoint.reading.source import StoredTensor

__all__ = ["OnDemand"]

_MOST_BOXES: Final = 1 << 15
"""Boxes of tensors that are kept; each takes some 400 bytes."""


class OnDemand:
    """Looks tensors up, and keeps those that were wanted last; for any number of threads.

    Parameters
    ----------
    look_up
        Returns a tensor by its name.

    Examples
    --------
    >>> from shardspec.checkpoint.formats.listed import whole_tensor
    >>> from pathlib import Path
    >>> tensor = OnDemand(lambda name: whole_tensor(name, (2,), "int8", Path("x"), 0))
    >>> tensor("w") is tensor("w")
    True
    """

    def __init__(self, look_up: Callable[[str], StoredTensor]) -> None:
        self._look_up = look_up
        self._lock = Lock()
        self._known: dict[str, StoredTensor] = {}
        """The one that was wanted last is the last."""
        self._num_boxes = 0
        """Of what is known."""
        self._under_way: dict[str, Lock] = {}

    def __call__(self, name: str) -> StoredTensor:
        """Return a tensor; raises what looking it up does."""
        known = self._find(name)
        if known is not None:
            return known
        with self._lock:
            lock = self._under_way.setdefault(name, Lock())
        # Of threads that want the same one, one looks.
        with lock:
            known = self._find(name)
            if known is None:
                known = self._look_up(name)
                self._keep(name, known)
        return known

    def _find(self, name: str) -> StoredTensor | None:
        with self._lock:
            known = self._known.pop(name, None)
            if known is not None:
                self._known[name] = known
            return known

    def _keep(self, name: str, tensor: StoredTensor) -> None:
        with self._lock:
            self._known[name] = tensor
            self._num_boxes += len(tensor.boxes)
            while self._num_boxes > _MOST_BOXES and len(self._known) > 1:
                oldest = next(iter(self._known))
                self._num_boxes -= len(self._known.pop(oldest).boxes)
