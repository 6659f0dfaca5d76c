"""Writing files into an object store: each appears when it is complete, old ones stay until then.

A store takes a large file in parts and makes them a file in one indivisible step. fsspec does that
at the end of a transaction, or drops the parts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final, Self

from shardspec.checkpoint.copy_plan import BLOCK_BYTES, Copy, TensorCopies, plan_files
from shardspec.checkpoint.digests import crc32, crc32_combine
from shardspec.checkpoint.directories import exists
from shardspec.checkpoint.executor import (
    CopiedTensor,
    Execution,
    run_in_threads,
    tensor_text,
    wanted_stretches,
)
from shardspec.checkpoint.output_files import Pieces, different, digest_of_file
from shardspec.checkpoint.read_boxes import Buffers
from shardspec.checkpoint.source_files import OpenFiles, SourceFile
from shardspec.checkpoint.store import RemotePath, store_errors
from shardspec.checkpoint.store_ranges import AHEAD_BYTES
from shardspec.checkpoint.targets import Put, RawBytes, Target, Write
from shardspec.errors import CheckpointError

__all__ = ["BESIDE_SUFFIX", "RemoteStaging", "Upload", "copy_to_store"]

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
        Its size, as far as it is known: large ones come in larger parts.
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


BESIDE_SUFFIX: Final = ".shardspec-tmp"
"""How names end that were not moved yet; a killed run leaves them."""


def _is_list(name: str) -> bool:
    """Return whether a file says what the others are: without it, none counts."""
    return name.endswith((".json", ".metadata"))


@dataclass(frozen=True, slots=True)
class RemoteStaging:
    """Where the files of an output go in a store, until all of them have been read again.

    A file of a new name is uploaded under it. One whose name is taken is uploaded beside the old
    one, and then copied over it by the store itself, in one step.
    """

    path: RemotePath
    directory: bool
    there: frozenset[str]
    """Names of all files that are there."""
    old: frozenset[str]
    """Names of those that go; what has the name of a new file is replaced too."""
    overwrite: bool
    token: str
    """A word of this run, for names that nobody else has."""
    made: list[RemotePath] = field(default_factory=list)
    """What is there so far; removed on failure."""

    @classmethod
    def begun(
        cls,
        path: RemotePath,
        token: str,
        *,
        directory: bool,
        overwrite: bool,
        replaced: frozenset[str],
    ) -> "RemoteStaging":
        """Ask the store what is there."""
        there: set[str] = set()
        if overwrite and directory:
            with suppress(FileNotFoundError):
                there = set(path.entries())
        elif overwrite and path.is_file():
            there = {path.name}
        left = {name for name in there if name.endswith(BESIDE_SUFFIX)}
        old = frozenset(replaced & there | left)
        return cls(path, directory, frozenset(there), old, overwrite, token)

    def final(self, name: str) -> RemotePath:
        """Return the final name of a file."""
        return self.path / name if self.directory else self.path

    def place(self, name: str, *, beside: bool = False) -> RemotePath:
        """Return the name to upload a file under; `beside` keeps it from counting at once."""
        final = self.final(name)
        if not beside and name not in self.there:
            return final
        return final.with_name(f".{final.name}.{self.token}{BESIDE_SUFFIX}")

    def publish(
        self, files: Sequence[str], write_last: Callable[[Put], None]
    ) -> list[tuple[str, int, int]]:
        """Move what lies beside to where it belongs, and remove what is left of the old.

        Parameters
        ----------
        files
            All files but those that say what the others are; they were uploaded.
        write_last
            Writes those; they are uploaded now.

        Returns
        -------
        list
            Name, bytes and CRC-32 of those.
        """
        moved = [name for name in files if name in self.there]
        last: dict[str, tuple[str, int, int]] = {}

        def put(name: str, fill: Callable[[Write], object]) -> None:
            place = self.place(name, beside=bool(moved))
            with Upload(place, 0, overwrite=self.overwrite) as upload:
                pieces = Pieces(upload.write)
                fill(pieces.write)
                pieces.flush()
            self.made.append(place)
            _check_again(place, [(0, pieces.num_bytes, pieces.crc32, name)], self.path)
            last[name] = name, pieces.num_bytes, pieces.crc32

        write_last(put)
        if self.directory and moved:
            # Old and new ones side by side could be taken for one checkpoint.
            self._remove(
                name
                for name in self.there
                if name in {*files, *last} or (name in self.old and _is_list(name))
            )
            self.made.extend(map(self.final, moved))
        for name in moved:
            self.place(name).replace(self.final(name))
        for name in last:
            if moved or name in self.there:
                self.place(name, beside=True).replace(self.final(name))
        if self.directory:
            self._remove(self.old - {*files, *last})
        return list(last.values())

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, first those that say what the others are."""
        for name in sorted(names, key=lambda name: (not _is_list(name), name)):
            self.final(name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was uploaded, as far as the store lets us: an error is on its way already."""
        for file in self.made:
            with suppress(CheckpointError):
                file.unlink(missing_ok=True)


def copy_to_store(job: Execution, staging: RemoteStaging, threads: int) -> dict[str, int]:
    """Write the files of this process into a store and read them again; return their CRC-32."""
    mine = plan_files(job.target, job.rank, job.size)
    counts = _extents_by_tensor(job.target, mine)
    every = (
        counts if job.size == 1 else _extents_by_tensor(job.target, range(len(job.target.files)))
    )
    tensors = {
        name: CopiedTensor(name, count, complete=count == every[name])
        for name, count in counts.items()
    }
    found: dict[str, int] = {}
    todo = SimpleQueue[int]()
    for number in mine:
        todo.put(number)
    at_once = max(1, min(threads, len(mine)))

    def work() -> None:
        with suppress(Empty):
            while not job.failed.is_set():
                number = todo.get_nowait()
                name = job.target.files[number].name
                found[name] = _upload(job, staging, number, tensors, AHEAD_BYTES // at_once)

    run_in_threads([work] * at_once, job.failed)
    return found


def _extents_by_tensor(target: Target, files: Iterable[int]) -> Counter[str]:
    return Counter(
        extent.tensor.source for number in files for extent in target.files[number].extents
    )


def _upload(
    job: Execution,
    staging: RemoteStaging,
    number: int,
    tensors: Mapping[str, CopiedTensor],
    ahead: int,
) -> int:
    """Write one file, and return its CRC-32."""
    file = job.target.files[number]
    place, crcs = staging.place(file.name), job.crcs[number]
    copies = [
        Copy(number, n, extent.box, extent.offset, extent.num_bytes)
        for n, extent in enumerate(file.extents)
    ]
    parts: list[RawBytes | Copy] = sorted([*file.raw, *copies], key=lambda part: part.offset)
    trailer: list[RawBytes] = []
    buffers = Buffers()
    with Upload(place, file.num_bytes, overwrite=staging.overwrite) as upload, OpenFiles() as files:

        def put(raw: RawBytes) -> None:
            upload.write(bytes(raw.offset - upload.written))
            upload.write(raw.data)

        plan = (
            TensorCopies(file.extents[copy.extent].tensor.source, [copy], complete=False)
            for copy in copies
        )
        files.will_read(job.source.directory, wanted_stretches(job, plan), ahead)
        for part in parts:
            if isinstance(part, RawBytes):
                put(part)
                continue
            upload.write(bytes(part.offset - upload.written))
            crc = 0
            tensor = tensors[file.extents[part.extent].tensor.source]
            for _, data, known in tensor.filled(job, part, files, buffers):
                crc = int(crc32_combine(crc, known, len(data)))
                upload.write(data)
                job.advance(len(data))
            job.put_crc(part, crc)
            for one in (
                () if file.trailer is None else file.trailer(crcs[: part.extent + 1], part.extent)
            ):
                put(one)
                trailer.append(one)
        assert upload.written == file.num_bytes, "parts are as long as planned"
    staging.made.append(place)
    job.advance(file.other_bytes)
    raw = (
        (one.offset, len(one.data), crc32(one.data), "a header") for one in chain(file.raw, trailer)
    )
    extents = (
        (extent.offset, extent.num_bytes, crc, tensor_text(extent))
        for extent, crc in zip(file.extents, crcs, strict=True)
    )
    _check_again(place, chain(raw, extents if job.reread else ()), job.path)
    return digest_of_file(file, trailer, crcs) if job.digested else 0


def _check_again(place: Path, parts: Iterable[tuple[int, int, int, str]], path: Path) -> None:
    """Compare parts of a file, given by position, bytes, CRC-32 and name, with what is there."""
    room = memoryview(bytearray(BLOCK_BYTES))
    with SourceFile(place) as written:
        for offset, num_bytes, crc, name in sorted(parts):
            value = 0
            for at in range(0, num_bytes, BLOCK_BYTES):
                part = room[: min(BLOCK_BYTES, num_bytes - at)]
                written.read_into(part, offset + at)
                value = crc32(part, value)
            if value != crc:
                raise different(path, name, value, crc)
