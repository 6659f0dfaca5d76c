"""How addends of a tensor are combined."""

from typing import Literal

__all__ = ["ReduceOp"]

ReduceOp = Literal["sum", "avg", "min", "max", "prod"]
