"""The table of faults."""

from typing import Final

from tests.faults import lies, truncated
from tests.faults.harness import Row

__all__ = ["ROWS"]

ROWS: Final = (
    Row("headers", "header, info or index cut at every byte", truncated.headers),
    Row("payloads", "payload cut", truncated.payloads),
    Row("lies", "header lies", lies.lies),
)
