"""Tensors that are looked up when they are wanted, as their places are not known before."""

from array import array
from collections.abc import Callable
from threading import Lock
from typing import Final

from shardspec.checkpoint.reading.source import Digest, HeldBox, Outline, StoredBox, StoredTensor

__all__ = ["OnDemand"]

_MOST_BOXES: Final = 1 << 17
"""Boxes of tensors that are kept as they are; each takes some 400 bytes, and some 30 if packed."""
_NO_DIGEST: Final = 2**64 - 1


class OnDemand:
    """Looks tensors up once, each when it is wanted first; for any number of threads.

    Those that were wanted last are kept as they are. Of the others, the places are: whoever fills
    many files from all tensors wants every one of them many times.

    Parameters
    ----------
    look_up
        Returns a tensor by its name.
    outline
        Returns its outline, boxes in the same order.

    Examples
    --------
    >>> from shardspec.checkpoint.formats.listed import whole_tensor
    >>> from pathlib import Path
    >>> whole = lambda name: whole_tensor(name, (2,), "int8", Path("x"), 0)
    >>> tensor = OnDemand(whole, whole)
    >>> tensor("w") is tensor("w")
    True
    """

    def __init__(
        self,
        look_up: Callable[[str], StoredTensor],
        outline: Callable[[str], Outline[HeldBox]],
        most_boxes: int = _MOST_BOXES,
    ) -> None:
        self._look_up = look_up
        self._outline = outline
        self._most_boxes = most_boxes
        self._lock = Lock()
        self._known: dict[str, StoredTensor] = {}
        """The one that was wanted last is the last."""
        self._num_boxes = 0
        """Of what is known."""
        self._packed: dict[str, _Packed] = {}
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
                packed = self._packed.get(name)
                known = self._look_up(name) if packed is None else packed.of(self._outline(name))
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
            while self._num_boxes > self._most_boxes and len(self._known) > 1:
                oldest = next(iter(self._known))
                gone = self._known.pop(oldest)
                self._num_boxes -= len(gone.boxes)
                if oldest not in self._packed:
                    self._packed[oldest] = _Packed(gone)


class _Packed:
    """Where the boxes of a tensor lie, as columns."""

    __slots__ = ("_crcs", "_lengths", "_offsets", "_starts", "_strides")

    def __init__(self, tensor: StoredTensor) -> None:
        boxes = tensor.boxes
        digests = [box.digest or Digest(0, 0, _NO_DIGEST) for box in boxes]
        self._offsets = array("Q", [box.offset for box in boxes])
        self._crcs = array("I", [digest.crc32 for digest in digests])
        self._starts = array("Q", [digest.start for digest in digests])
        self._lengths = array("Q", [digest.num_bytes for digest in digests])
        self._strides = {at: box.strides for at, box in enumerate(boxes) if box.strides is not None}

    def of(self, outline: Outline[HeldBox]) -> StoredTensor:
        """Return the tensor, given its outline."""
        boxes = []
        columns = zip(
            outline.boxes, self._offsets, self._crcs, self._starts, self._lengths, strict=True
        )
        for at, (held, offset, crc, start, length) in enumerate(columns):
            digest = None if length == _NO_DIGEST else Digest(crc, start, length)
            where = held.box, held.addend, held.rank, held.path, offset
            boxes.append(StoredBox(*where, digest, self._strides.get(at)))
        name, shape, dtype = outline.name, outline.shape, outline.dtype
        return StoredTensor(name, shape, dtype, outline.spec, outline.pending, tuple(boxes))
