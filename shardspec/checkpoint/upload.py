"""Writing files into an object store: each appears when it is complete, old ones stay until then.

A store takes a large file in parts and makes them a file in one indivisible step. fsspec does that
at the end of a transaction, or drops the parts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from shardspec.checkpoint.digests import crc32
from shardspec.checkpoint.directories import exists
from shardspec.checkpoint.executor import (
    CopiedTensor,
    Copy,
    Execution,
    plan_files,
    run_in_threads,
    tensor_text,
    wanted_stretches,
)
from shardspec.checkpoint.output_files import Pieces, check_again, digest_of_file
from shardspec.checkpoint.read_boxes import Buffers
from shardspec.checkpoint.source_files import AHEAD_BYTES, OpenFiles, SourceFile
from shardspec.checkpoint.store import RemotePath, store_errors
from shardspec.checkpoint.targets import Put, RawBytes, Target, Write
from shardspec.errors import CheckpointError

__all__ = ["RemoteStaging", "upload"]

_PART_BYTES: Final = 8 << 20
_MOST_PARTS: Final = 9_000
"""S3 takes 10,000 parts; a file of more than 72 GB comes in larger ones."""
_BESIDE_SUFFIX: Final = ".shardspec-tmp"
"""How names end that were not moved yet; a killed run leaves them."""


@contextmanager
def upload(
    path: RemotePath, num_bytes: int, *, overwrite: bool
) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Write a file in a store from its start to its end, by what is yielded.

    It appears at the end of the block, unless anything is raised. `num_bytes` is its size as far as
    it is known. Raises an `OutputExistsError` in the end if there is such a file and `overwrite` is
    not set.
    """
    from fsspec.transaction import Transaction

    store = path.store
    part = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))
    part += -part % (1 << 20)
    # One of its own: stores that threads share have one for all files.
    transaction = Transaction(store)
    if not store.async_impl:
        # Some of these look for a transaction only.
        transaction.start()
    ended = False
    try:
        with _told(path):
            mode = "wb" if overwrite else "xb"
            file = store.open(str(path), mode, block_size=part, autocommit=False)
        transaction.files.append(file)

        def write(data: bytes | memoryview) -> None:
            with _told(path):
                file.write(data)

        try:
            yield write
        finally:
            with _told(path):
                # Sends what is left; in a transaction the file is not there yet.
                file.close()
        ended = True
        with _told(path):
            transaction.complete(commit=True)
    except BaseException:
        if not ended:
            transaction.complete(commit=False)
        raise
    finally:
        store.invalidate_cache(str(path.parent))


@contextmanager
def _told(path: RemotePath) -> Iterator[None]:
    """Make one line of what a store raises when it is written to."""
    with store_errors(path, "written"):
        try:
            yield
        except FileExistsError:
            raise exists(path) from None


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
    overwrite: bool
    token: str
    """A word of this run, for names that nobody else has."""
    there: frozenset[str]
    """Names of all files that are there."""
    replaced: frozenset[str] = frozenset()
    """Names of files that go; what has the name of a new file is replaced too."""
    made: list[RemotePath] = field(default_factory=list)
    """What was uploaded so far; removed on failure."""

    def _final(self, name: str) -> RemotePath:
        return self.path / name if self.directory else self.path

    def place(self, name: str, *, beside: bool = False) -> RemotePath:
        """Return the name to upload a file under; `beside` keeps it from counting at once."""
        final = self._final(name)
        if not beside and name not in self.there:
            return final
        return final.with_name(f".{final.name}.{self.token}{_BESIDE_SUFFIX}")

    def finish(self, job: Execution) -> list[tuple[str, int, int]]:
        """Return name, bytes and CRC-32 of the files that all processes have uploaded."""
        crcs = job.findings.files
        return [(file.name, file.num_bytes, crcs[file.name]) for file in job.target.files]

    def publish(
        self, target: Target, write_last: Callable[[Put], None]
    ) -> list[tuple[str, int, int]]:
        """Have the files written that list the others, and move all to where they belong.

        What killed runs have left is removed too. Returns name, bytes and CRC-32 of the lists.
        """
        files = [file.name for file in target.files]
        moved = [name for name in files if name in self.there]
        last: list[tuple[str, int, int]] = []

        def put(name: str, fill: Callable[[Write], object]) -> None:
            place = self.place(name, beside=bool(moved))
            with upload(place, 0, overwrite=self.overwrite) as write:
                pieces = Pieces(write)
                fill(pieces.write)
                pieces.flush()
            self.made.append(place)
            _check_uploaded(place, [(0, pieces.num_bytes, pieces.crc32, name)], self.path)
            last.append((name, pieces.num_bytes, pieces.crc32))

        write_last(put)
        lists = [name for name, _, _ in last]
        new = {*files, *lists}
        left = {name for name in self.there if name.endswith(_BESIDE_SUFFIX)}
        old = self.replaced & self.there | left
        if self.directory and moved:
            # Old and new ones side by side could be taken for one checkpoint.
            self._remove(n for n in self.there if n in new or (n in old and _is_list(n)))
            self.made.extend(map(self._final, moved))
        for name in moved:
            self.place(name).replace(self._final(name))
        for name in lists:
            if moved or name in self.there:
                self.place(name, beside=True).replace(self._final(name))
        if self.directory:
            self._remove(old - new)
        return last

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, first those that say what the others are."""
        for name in sorted(names, key=lambda name: (not _is_list(name), name)):
            self._final(name).unlink(missing_ok=True)

    def discard(self, names: Iterable[str] = ()) -> None:
        """Remove what was uploaded, here and under these names, as far as the store lets us."""
        for file in [*self.made, *map(self.place, names)]:
            with suppress(CheckpointError):
                file.unlink(missing_ok=True)

    def fill(self, job: Execution) -> None:
        """Upload the files of this process and read them again; note their CRC-32."""
        mine = plan_files(job.target, job.member.rank, job.member.size)
        counts = _extents_by_tensor(job.target, mine)
        every = _extents_by_tensor(job.target, range(len(job.target.files)))
        tensors = {
            name: CopiedTensor(name, count, complete=count == every[name])
            for name, count in counts.items()
        }
        threads = max(1, min(job.options.threads, len(mine)))

        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                crc = self._upload(job, number, tensors, AHEAD_BYTES // threads)
                job.put_file(job.target.files[number].name, crc)

        run_in_threads(work, mine, threads, job.failed)

    def _upload(
        self, job: Execution, number: int, tensors: Mapping[str, CopiedTensor], ahead: int
    ) -> int:
        """Write one file from its start to its end, and return its CRC-32."""
        file = job.target.files[number]
        place, crcs = self.place(file.name), job.crcs[number]
        copies = [
            Copy(number, n, extent.box, extent.offset, extent.num_bytes)
            for n, extent in enumerate(file.extents)
        ]
        parts: list[RawBytes | Copy] = sorted([*file.raw, *copies], key=lambda part: part.offset)
        names = [extent.tensor.source for extent in file.extents]
        trailer: list[RawBytes] = []
        buffers = Buffers()
        at = 0
        with (
            upload(place, file.num_bytes, overwrite=self.overwrite) as write,
            OpenFiles() as files,
        ):
            wanted = ((names[copy.extent], copy) for copy in copies)
            files.will_read(job.source.directory, wanted_stretches(job, wanted), ahead)
            for part in parts:
                write(bytes(part.offset - at))
                if isinstance(part, RawBytes):
                    write(part.data)
                    at = part.offset + len(part.data)
                    continue
                for _, data, _ in tensors[names[part.extent]].filled(job, part, files, buffers):
                    write(data)
                at = part.offset + part.num_bytes
                follows = file.trailer and file.trailer(crcs[: part.extent + 1], part.extent)
                for raw in follows or ():
                    write(bytes(raw.offset - at) + raw.data)
                    at = raw.offset + len(raw.data)
                    trailer.append(raw)
            assert at == file.num_bytes, "parts are as long as planned"
        self.made.append(place)
        job.advance(file.other_bytes)
        checked = [
            (one.offset, len(one.data), crc32(one.data), "a header")
            for one in chain(file.raw, trailer)
        ]
        if job.reread:
            checked += [
                (extent.offset, extent.num_bytes, crc, tensor_text(extent))
                for extent, crc in zip(file.extents, crcs, strict=True)
            ]
        _check_uploaded(place, checked, job.path)
        return digest_of_file(file, trailer, crcs) if job.digested else 0


def _extents_by_tensor(target: Target, files: Iterable[int]) -> Counter[str]:
    return Counter(
        extent.tensor.source for number in files for extent in target.files[number].extents
    )


def _check_uploaded(place: Path, parts: Sequence[tuple[int, int, int, str]], path: Path) -> None:
    with SourceFile(place) as written:
        check_again(written.read_into, sorted(parts), path)
