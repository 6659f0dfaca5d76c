"""Writing a file into an object store from its start to its end; it appears when it is complete.

A store takes a large file in parts and makes them a file in one indivisible step. fsspec does that
at the end of a transaction, or drops the parts.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from shardspec.checkpoint.commit import exists
from shardspec.checkpoint.store import RemotePath, store_errors

__all__ = ["Upload"]

_PART_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 9_000
"""S3 takes 10,000 parts; a file of more than 72 GB comes in larger ones."""


class Upload:
    """A new file in a store, written in a `with` block, from its start to its end.

    Parameters
    ----------
    path
        Its name.
    num_bytes
        Its size.
    overwrite
        Whether a file of that name is replaced.

    Raises
    ------
    OutputExistsError
        At the end of the block, if there is such a file and `overwrite` is not set.
    CheckpointError
        If the store refuses. Nothing has the name then, or what had it before.
    """

    def __init__(self, path: RemotePath, num_bytes: int, *, overwrite: bool) -> None:
        self._path = path
        self._store = path.store
        self._mode = "wb" if overwrite else "xb"
        self._part = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))
        self._part += -self._part % (1 << 20)
        self.written = 0
        """Bytes that were written so far."""

    def __enter__(self) -> Self:
        from fsspec.transaction import Transaction

        # One of its own: stores that threads share have one for all files.
        self._transaction = Transaction(self._store)
        if not self._store.async_impl:
            # Some of these look for a transaction only.
            self._transaction.start()
        try:
            self._file = self._told(self._open)
        except BaseException:
            self._transaction.complete(commit=False)
            raise
        self._transaction.files.append(self._file)
        return self

    def _open(self) -> Any:  # noqa: ANN401  # fsspec is not typed
        return self._store.open(
            str(self._path), self._mode, block_size=self._part, autocommit=False
        )

    def write(self, data: bytes | memoryview) -> None:
        """Write on."""
        self._told(lambda: self._file.write(data))
        self.written += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        def end() -> None:
            try:
                # Sends what is left; in a transaction the file is not there yet.
                self._file.close()
            except BaseException:
                self._transaction.complete(commit=False)
                raise
            self._transaction.complete(commit=error is None)
            self._store.invalidate_cache(str(self._path.parent))

        self._told(end)

    def _told(self, act: Callable[[], Any]) -> Any:  # noqa: ANN401  # what fsspec gives
        """Do something; make one line of what the store raises."""
        with store_errors(self._path, "written"):
            try:
                return act()
            except FileExistsError:
                raise exists(self._path) from None
