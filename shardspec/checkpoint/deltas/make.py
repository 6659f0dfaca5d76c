"""Writes the changes between two checkpoints, in the delta format of slime and ModelExpress.

A delta is a directory with an index and a safetensors file. The index has the old and the new
version. The file has a zstd frame per changed tensor: the XOR of old and new bytes, or positions
and values of the bytes that differ. The file's metadata has checksums of the new tensors. The index
also has digests of the base and of the new state, which other tools ignore.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardspec.checkpoint.catalog import Catalog, Target, whole_box
from shardspec.checkpoint.compare.coverage import check_tiling
from shardspec.checkpoint.compare.digest import named_state
from shardspec.checkpoint.convert.copy import Buffers, Progress, read_whole
from shardspec.checkpoint.convert.output import WriteReport, check_destination, merge
from shardspec.checkpoint.convert.select import mapped, require_finished
from shardspec.checkpoint.deltas.apply import DELTA_INDEX, with_deltas
from shardspec.checkpoint.deltas.frames import Hash, extra, new_hash
from shardspec.checkpoint.formats import default_format
from shardspec.checkpoint.open import as_catalog
from shardspec.checkpoint.state.memory import state_catalog
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import Staging, StoragePath, WriteAt
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.errors import CheckpointError
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.resharding.name_map import Names
from shardspec.text import first_of, shown

Encoding: TypeAlias = Literal["xor", "overwrite"]
Checksum: TypeAlias = Literal["xxh3-128", "adler32"]

_FILE_NAME: Final = "model-00000-of-00001.safetensors"
_MOST_VERSION: Final = 999_999
_LEVEL: Final = 1
_WINDOW_LOG: Final = 17
"""Exponent of the window of 128 KiB, which fits the CPU's cache of writers and readers."""
_MOST_POSITIONS: Final = 1 << 32
"""Maximum bytes of a tensor, since positions in it have 32 bits."""


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """Facts about a written delta."""

    path: PurePath
    tensors: int
    """Number of tensors in the checkpoint."""
    changed: int
    """Number of tensors with changes."""
    num_bytes: int
    """Bytes of all tensors."""
    changed_bytes: int
    """Number of bytes that differ."""
    written_bytes: int
    """Bytes of the frames."""
    digest: str
    """Digest of the new state."""

    def to_json(self) -> dict[str, object]:
        """Return the report as a dict of plain values, ready for JSON."""
        return {**asdict(self), "path": str(self.path)}


def delta(
    base: PurePath | str | Catalog | Mapping[str, Any],
    new: PurePath | str | Catalog | Mapping[str, Any],
    output: PurePath | str,
    *,
    version: int,
    base_version: int | None = None,
    names: Names | None = None,
    encoding: Encoding = "xor",
    checksum: Checksum = "xxh3-128",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> DeltaReport:
    """Write the changes between two checkpoints with equal names, dtypes and shapes.

    Parameters
    ----------
    base, new
        Checkpoints of any format and sharding, or state dicts with all shards in this process. Keep
        a copy of the last published state, to compare with.
    output
        The directory to write, such as ``weight_v000001``.
    version, base_version
        Numbers of the new state and of the base; `base_version` is ``version - 1`` by default.
    names
        Renames the tensors of `new` as in the base; see `merge`.
    encoding
        ``"xor"``, or ``"overwrite"``: positions and values, which may be applied twice.
    checksum
        ``"xxh3-128"``, or ``"adler32"``, which ModelExpress reads.
    overwrite
        Replace an existing delta.
    progress
        Called with the bytes compared so far, and in all.

    Raises
    ------
    CheckpointError
        If names, dtypes or shapes differ, a checkpoint is damaged, or the encoding ``"overwrite"``
        would be larger than the tensor. Nothing is written then.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import apply_delta, digest, save_sharded
    >>> from pathlib import Path
    >>> place = Path(tempfile.mkdtemp())
    >>> w = torch.arange(1000.0)
    >>> save_sharded({"w": w, "b": w}, place / "base")
    >>> save_sharded({"w": w, "b": w * (w != 3)}, place / "new")
    >>> report = delta(place / "base", place / "new", place / "weight_v000001", version=1)
    >>> report.changed, report.written_bytes < 100
    (1, True)
    >>> _ = apply_delta(place / "base", [place / "weight_v000001"], place / "applied.safetensors")
    >>> digest(place / "applied.safetensors") == digest(place / "new")
    True
    """
    path, before = storage_path(output), version - 1 if base_version is None else base_version
    for number in (version, before):
        if type(number) is not int or not 0 <= number <= _MOST_VERSION:
            raise CheckpointError(
                f"{number!r} is not a version; give a number from 0 to {_MOST_VERSION}"
            )
    if version == before:
        raise CheckpointError(f"version and base_version are both {version}; give two numbers")
    if encoding not in ("xor", "overwrite"):
        raise CheckpointError(f"there is no encoding {encoding!r}; choose xor or overwrite")
    if path.whole_files:
        raise CheckpointError(
            f"{path}: a delta cannot be written to an object store; write it to a disk, and copy it"
        )
    new_hash(checksum, path)
    extra("zstandard")
    old, now = (
        state_catalog(side) if isinstance(side, Mapping) else as_catalog(side)
        for side in (base, new)
    )
    now = named_state(now, names) if isinstance(new, Mapping) else mapped(now, names)
    _check_alike(old, now)
    for catalog in (old, now):
        destination = check_destination(path, catalog, Target((), True, ()), overwrite)
    with OpenFiles() as files:
        writer = _Writer(path, old, now, files, encoding, checksum, progress)
        written = (_FILE_NAME, DELTA_INDEX) if writer.changed else (DELTA_INDEX,)
        replaced = frozenset((DELTA_INDEX, _FILE_NAME))
        output_files = Staging(
            dict.fromkeys(written, 0), True, overwrite, DELTA_INDEX, replaced, destination.identity
        )
        with destination.path.stage(output_files) as staged:
            if writer.changed:
                with staged.file(_FILE_NAME) as write:
                    writer.write(write)
            about = {
                "version": f"{version:06d}",
                "base_version": f"{before:06d}",
                "delta_encoding": encoding,
                "compression_format": "zstd",
                "checksum_format": checksum,
                "base_digest": Digests(writer.digests[0]).value,
                "digest": Digests(writer.digests[1]).value,
                "tensor_digests": {name: writer.digests[1][name].value for name in writer.changed},
            }
            weight_map = dict.fromkeys(writer.changed, _FILE_NAME)
            index = {"metadata": about, "weight_map": weight_map}
            old.check_unchanged()
            now.check_unchanged()
            with staged.file(DELTA_INDEX) as write:
                write(0, json.dumps(index).encode())
        return writer.report()


def apply_delta(
    base: PurePath | str | Catalog,
    deltas: Sequence[PurePath | str],
    output: PurePath | str,
    *,
    threads: int = 1,
    overwrite: bool = False,
    digests: PurePath | str | None = None,
    progress: Progress | None = None,
) -> WriteReport:
    """Write a checkpoint with a chain of deltas applied; each byte is read and written once.

    Parameters
    ----------
    base
        The checkpoint of the first delta's base version, in any format and sharding.
    deltas
        Directories written by `delta`, slime or ModelExpress, in order.
    output
        A safetensors file, or a directory of safetensors files.
    threads, overwrite, digests, progress
        As for `merge`.

    Raises
    ------
    CheckpointError
        If the deltas do not form a chain on this base, or a file is damaged. No output appears.

    Examples
    --------
    >>> import tempfile, torch
    >>> from shardspec import digest, save_sharded
    >>> from pathlib import Path
    >>> place = Path(tempfile.mkdtemp())
    >>> for version in range(3):
    ...     save_sharded({"w": torch.arange(100.0) + version}, place / f"v{version}")
    >>> first = delta(place / "v0", place / "v1", place / "weight_v000001", version=1)
    >>> second = delta(place / "v1", place / "v2", place / "weight_v000002", version=2)
    >>> report = apply_delta(place / "v0", [first.path, second.path], place / "out")
    >>> digest(place / "out") == digest(place / "v2")
    True
    """
    one_file = storage_path(output).suffix.lower() in default_format("merged").extensions
    return merge(
        with_deltas(as_catalog(base), deltas),
        output,
        format=default_format("merged", directory=not one_file).name,
        threads=threads,
        overwrite=overwrite,
        digests=digests,
        progress=progress,
    )


def _check_alike(old: Catalog, now: Catalog) -> None:
    """Check that two checkpoints have equal names, dtypes and shapes, and nothing pending."""
    remedy = "publish a full checkpoint"
    for side, other in ((old, now), (now, old)):
        if missing := sorted(set(side.names) - set(other.names)):
            raise CheckpointError(
                f"{other.directory}: lacks {first_of([*map(shown, missing)])}, which "
                f"{side.directory} has; {remedy}"
            )
    for name in old.names:
        a, b = old.outline(name), now.outline(name)
        for outline in (a, b):
            require_finished(outline)
            check_tiling(outline)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise CheckpointError(
                f"tensor {name!r} is {list(a.shape)} {a.dtype} in {old.directory} and "
                f"{list(b.shape)} {b.dtype} in {now.directory}; {remedy}"
            )


class _Writer:
    """Compares two checkpoints, and writes the file of a delta."""

    def __init__(
        self,
        path: StoragePath,
        old: Catalog,
        now: Catalog,
        files: OpenFiles,
        encoding: Encoding,
        checksum: Checksum,
        progress: Progress | None,
    ) -> None:
        self.path, self.files = path, files
        self.sides, self.buffers = (old, now), (Buffers(), Buffers())
        self.encoding, self.checksum, self.progress = encoding, checksum, progress
        self.digests: tuple[dict[str, TensorDigest], dict[str, TensorDigest]] = ({}, {})
        self.changed_bytes = self.end = self.done = 0
        self.total = sum(old.outline(name).num_bytes for name in old.names)
        self.changed = [name for name in old.names if not self._same(name)]

    def report(self) -> DeltaReport:
        """Return the facts about the delta that was written."""
        return DeltaReport(
            self.path.public(),
            len(self.sides[0].names),
            len(self.changed),
            self.total,
            self.changed_bytes,
            self.end,
            Digests(self.digests[1]).value,
        )

    def write(self, write: WriteAt) -> None:
        """Write the frames of changed tensors, then the header in the space left before them."""
        room = 64 + sum(2 * len(json.dumps(name)) + 160 for name in self.changed)
        room += -room % 8
        entries, checksums = {}, {}
        zstandard = extra("zstandard")
        how = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG)
        for name in self.changed:
            size, content = self._encoded(name)
            packer = zstandard.ZstdCompressor(compression_params=how).compressobj(size=size)
            begin, checksum = self.end, new_hash(self.checksum, self.path)
            for data in self._packed(packer, content(checksum)):
                write(8 + room + self.end, data)
                self.end += len(data)
            shape = [self.end - begin]
            entries[name] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, self.end]}
            checksums[name] = checksum.hexdigest()
        text = json.dumps({"__metadata__": checksums, **entries}).encode()
        assert len(text) <= room, "names and numbers fit"
        write(0, struct.pack("<Q", room) + text.ljust(room))

    @staticmethod
    def _packed(packer: Any, content: Iterator[NDArray[np.uint8]]) -> Iterator[bytes]:  # noqa: ANN401
        for block in content:
            yield packer.compress(block)
        yield packer.flush()

    def _blocks(self, name: str) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield (old, new) blocks of a tensor's bytes; the next block reuses their memory."""
        readers = [
            read_whole(side.tensor(name), self.files, buffers)
            for side, buffers in zip(self.sides, self.buffers, strict=True)
        ]
        for old, now in zip(*readers, strict=True):
            yield np.frombuffer(old, np.uint8), np.frombuffer(now, np.uint8)

    def _same(self, name: str) -> bool:
        """Return True if a tensor is equal in both checkpoints; then record its digest."""
        outline, at = self.sides[0].outline(name), 0
        value = TensorDigest(outline.dtype, outline.shape)
        for old, now in self._blocks(name):
            if not np.array_equal(old, now):
                return False
            value = value.with_bytes(old, whole_box(outline.shape), at)
            at += len(old)
        for digests in self.digests:
            digests[name] = value
        self._advance(outline.num_bytes)
        return True

    def _digested(self, name: str) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield (old, new) blocks of a changed tensor, and digest both on the way."""
        outline, at = self.sides[0].outline(name), 0
        values = [TensorDigest(outline.dtype, outline.shape) for _ in self.sides]
        for pair in self._blocks(name):
            for side, block in enumerate(pair):
                values[side] = values[side].with_bytes(block, whole_box(outline.shape), at)
            yield pair
            at += len(pair[0])
            self._advance(len(pair[0]))
        for digests, value in zip(self.digests, values, strict=True):
            digests[name] = value

    def _encoded(self, name: str) -> tuple[int, Callable[[Hash], Iterator[NDArray[np.uint8]]]]:
        """Return a frame's size in bytes, and a function that yields and checksums the bytes."""
        num_bytes = self.sides[0].outline(name).num_bytes

        def xor(checksum: Hash) -> Iterator[NDArray[np.uint8]]:
            for old, now in self._digested(name):
                checksum.update(now)
                differences = np.bitwise_xor(old, now, out=old)
                self.changed_bytes += int(np.count_nonzero(differences))
                yield differences

        if self.encoding == "xor":
            return num_bytes, xor
        if num_bytes > _MOST_POSITIONS:
            raise CheckpointError(
                f"tensor {name!r} has {num_bytes} bytes, whose positions do not fit 32 bits; "
                "choose the encoding xor"
            )
        # The content begins with the number of positions.
        count = sum(int(np.count_nonzero(old != now)) for old, now in self._digested(name))
        if (size := 4 + 5 * count) > num_bytes:
            raise CheckpointError(
                f"tensor {name!r}: {count} of its {num_bytes} bytes changed, so positions and "
                "values would be larger than the tensor; choose the encoding xor, or publish a "
                "full checkpoint"
            )
        self.changed_bytes += count

        def positions(checksum: Hash) -> Iterator[NDArray[np.uint8]]:
            yield np.array([count], "<u4").view(np.uint8)
            at = 0
            for old, now in self._blocks(name):
                checksum.update(now)
                yield (np.flatnonzero(old != now) + at).astype("<u4").view(np.uint8)
                at += len(now)
            for old, now in self._blocks(name):
                yield now[old != now]

        return size, positions

    def _advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.progress is not None:
            self.progress(self.done, self.total)
