"""Finishing a pending reduction with numpy alone, a block at a time.

Sums of short floats are kept in float32 and rounded once at the end.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import StoredReduction
from shardspec.checkpoint.moving.numbers import narrow, numbers
from shardspec.checkpoint.moving.regions import Bytes
from shardspec.comm.reduce_op import ReduceOp

__all__ = ["Reduction"]

_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


class Reduction:
    """Combines the addends of one block after the other.

    Parameters
    ----------
    dtype
        torch's name of the element type; one for which `Layout` allows the reduction.
    pending
        The reductions; several are all of one operation, or sums and means.

    Examples
    --------
    >>> total = Reduction("int8", (StoredReduction("max", 2),))
    >>> total.add(np.array([1, 5], np.uint8))
    >>> total.add(np.array([3, 2], np.uint8))
    >>> out = np.zeros(2, np.uint8)
    >>> total.finish(out)
    >>> out.tolist()
    [3, 5]
    """

    def __init__(self, dtype: str, pending: Sequence[StoredReduction]) -> None:
        self._dtype = dtype
        self._combine = _UFUNCS[pending[0].op]
        self._divisor = prod(p.addends for p in pending if p.op == "avg")
        self._total: NDArray[Any] | None = None

    def add(self, raw: Bytes) -> None:
        """Take in the next addend of the block, as its bytes; they are free for reuse then."""
        addend = _widen(raw, self._dtype)
        if self._total is None:
            self._total = addend.copy()
            return
        # Overflow and NaN are results like others here, as they are in torch.
        with np.errstate(all="ignore"):
            self._combine(self._total, addend, out=self._total)

    def finish(self, out: Bytes) -> None:
        """Write the bytes of the result, and start anew."""
        assert self._total is not None, "a reduction has at least one addend"
        total, self._total = self._total, None
        with np.errstate(all="ignore"):
            if self._divisor != 1:
                total /= self._divisor
            out[:] = narrow(total, self._dtype)


def _widen(raw: Bytes, dtype: str) -> NDArray[Any]:
    """Return the numbers that bytes hold, in the type in which they are combined."""
    values = numbers(raw, dtype)
    return values.astype(np.float32) if dtype == "float16" else values
