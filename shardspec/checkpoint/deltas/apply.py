"""Reads a checkpoint with deltas applied: version 0 plus deltas 0→1 and 1→2 gives version 2."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePath
from threading import Lock
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import Catalog, StoredBox, StoredTensor, whole_box
from shardspec.checkpoint.convert.copy import Buffers, read_whole
from shardspec.checkpoint.deltas.frames import (
    Patch,
    Patching,
    check_fits,
    content_bytes,
    new_hash,
)
from shardspec.checkpoint.formats.safetensors import read_header
from shardspec.checkpoint.quantization.derived import ComputedCatalog, bytes_in_files
from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.checkpoint.storage.strict_json import checked, read_json
from shardspec.errors import CheckpointError
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.text import shown

DELTA_INDEX: Final = "model.safetensors.index.json"
_NUMBER: Final = re.compile(r"[0-9]{1,18}")


class _Delta(NamedTuple):
    """One delta, read from the index in its directory."""

    place: StoragePath
    version: str
    base_version: str
    digest: str | None
    """Digest of the new state; None, as is `base_digest`, in deltas of other tools."""
    base_digest: str | None
    patches: Mapping[str, Patch]


def read_delta(place: StoragePath) -> _Delta:
    """Return the delta in a directory; raises CheckpointError if it is inconsistent."""
    index = file_inside(place, DELTA_INDEX, place)
    content = read_json(index, "index")
    about = checked(content.get("metadata"), dict, index, "metadata")
    encoding = about.get("delta_encoding")
    if encoding is None:
        raise CheckpointError(f"{place}: is a full checkpoint, not a delta; give it as the base")
    for key, read in (("delta_encoding", ("xor", "overwrite")), ("compression_format", ("zstd",))):
        if about.get(key) not in read:
            raise CheckpointError(
                f"{index}: has {key} {shown(about.get(key))}, not {' or '.join(read)}"
            )
    version, base = (_version(about.get(key), index) for key in ("version", "base_version"))
    checksum = checked(about.get("checksum_format"), str, index, "checksum_format")
    digits = len(new_hash(checksum, index).hexdigest())
    file_of = checked(content.get("weight_map"), dict, index, "weight_map")
    values = checked(about.get("tensor_digests", {}), dict, index, "tensor_digests")
    patches: dict[str, Patch] = {}
    files = {name for name in place.names() if name.endswith(".safetensors")}
    if differ := sorted(files ^ set(map(str, file_of.values()))):
        raise CheckpointError(
            f"{index}: its weight_map and the files beside it do not agree on {shown(differ[0])}; "
            "publish it again, with no other .safetensors files there"
        )
    for file_name in sorted(files):
        with file_inside(place, file_name, index).open() as file:
            header = read_header(file)
            names = {name for name, at in file_of.items() if at == file_name}
            if differ := sorted(names ^ {entry.name for entry in header.entries}):
                raise CheckpointError(
                    f"{index}: its weight_map and {file_name} do not agree on tensor "
                    f"{shown(differ[0])}; publish it again"
                )
            for entry in header.entries:
                value = header.metadata.get(entry.name, "")
                if (entry.dtype, entry.shape) != ("uint8", (entry.num_bytes,)):
                    raise CheckpointError(
                        f"{file.path}: {shown(entry.name)} is {list(entry.shape)} {entry.dtype}, "
                        "but frames are bytes; this is not a delta"
                    )
                if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
                    raise CheckpointError(
                        f"{file.path}: {shown(entry.name)} has no {checksum} of {digits} digits in "
                        "the metadata; publish it again"
                    )
                patches[entry.name] = Patch(
                    file.path,
                    entry.offset,
                    entry.num_bytes,
                    content_bytes(entry.name, entry.offset, entry.num_bytes, file),
                    encoding,
                    checksum,
                    value,
                    _text(values.get(entry.name)),
                )
    digest, base_digest = (_text(about.get(key)) for key in ("digest", "base_digest"))
    return _Delta(place, version, base, digest, base_digest, patches)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _version(value: object, index: StoragePath) -> str:
    """Return a version as text: "000007" and 7 are "7"."""
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise CheckpointError(f"{index}: has no version and base_version; make the delta again")
    return str(int(value)) if _NUMBER.fullmatch(str(value)) else str(value)


def with_deltas(base: Catalog, deltas: Sequence[PurePath | str]) -> Catalog:
    """Return a checkpoint with a chain of deltas applied; checksums are compared during reading.

    Raises CheckpointError if the deltas do not form a chain, or are for another checkpoint.
    """
    if isinstance(deltas, str | PurePath):
        raise CheckpointError(f"deltas={str(deltas)!r} is one path; give a list of paths in order")
    chain = [read_delta(storage_path(place)) for place in deltas]
    if not chain:
        return base
    for before, after in pairwise(chain):
        if after.base_version != before.version:
            raise CheckpointError(
                f"{after.place}: goes from version {after.base_version} to {after.version}, but "
                f"{before.place} before it to version {before.version}; list all in order"
            )
        if None not in (after.base_digest, before.digest) and after.base_digest != before.digest:
            raise CheckpointError(
                f"{after.place}: starts from a checkpoint with digest {after.base_digest}, but "
                f"{before.place} ends at {before.digest}; they are of different runs"
            )
    made_by = {chain[0].base_version: "the base"}
    for change in chain:
        if change.version in made_by:
            raise CheckpointError(
                f"{change.place}: ends at version {change.version}, as {made_by[change.version]} "
                "does; list each delta once"
            )
        made_by[change.version] = str(change.place)
    patches: dict[str, tuple[Patch, ...]] = {}
    for change in chain:
        for name, patch in change.patches.items():
            if name not in base.names:
                raise CheckpointError(
                    f"{change.place}: has tensor {shown(name)}, which {base.directory} lacks; it "
                    "is for another checkpoint, or one under other names"
                )
            outline = base.outline(name)
            if outline.pending:
                raise CheckpointError(
                    f"tensor {name!r} of {base.directory} has a reduction pending, so deltas "
                    "cannot change it; merge the checkpoint first"
                )
            check_fits(name, patch, outline.num_bytes)
            patches[name] = (*patches.get(name, ()), patch)
    return DeltaCatalog(base, patches, chain)


class DeltaCatalog(ComputedCatalog):
    """A checkpoint with deltas applied."""

    def __init__(
        self, base: Catalog, patches: Mapping[str, tuple[Patch, ...]], chain: Sequence[_Delta]
    ) -> None:
        super().__init__(base, (), patches)
        self._patches, self._chain = patches, chain
        self._stated: dict[str, TensorDigest] = {}
        for name, (*_, last) in patches.items():
            # Only a checksum of 128 bits proves that the tensor has the recorded digest.
            if last.digest is not None and last.checksum_format == "xxh3-128":
                at = base.outline(name)
                try:
                    digest = TensorDigest.of_value(last.digest, at.shape, at.dtype)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{last.path.parent}: tensor {shown(name)}: {error}; publish it again"
                    ) from None
                self._stated[name] = digest
        if chain[-1].digest is not None:
            self.wants_digests = frozenset(self.names) - self._stated.keys()

    def _look_up(self, name: str) -> StoredTensor:
        """Return a tensor whose bytes are computed by applying deltas."""
        base, patches = self.base.tensor(name), self._patches[name]
        if not base.boxes:
            return base
        first = base.boxes[0]
        box = StoredBox(
            whole_box(base.shape), (), first.rank, first.path, 0, computed=_Stream(base, patches)
        )
        return replace(base, spec=None, boxes=(box,))

    def origin(self, name: str) -> tuple[object, ...]:
        """Return a key that is equal for tensors with the same stored bytes and deltas."""
        return self.base.origin(name), self._patches.get(name)

    def check_written(self, digests: Mapping[str, TensorDigest]) -> None:
        """Compare the digest of all written tensors with the digest in the last delta.

        Changed tensors whose checksum matched count with the digest that their delta has.
        """
        last = self._chain[-1]
        if last.digest is None:
            return
        every = {**digests, **self._stated}
        for name in set(self.names) - every.keys():  # empty tensors are not written
            outline = self.outline(name)
            every[name] = TensorDigest(outline.dtype, outline.shape)
        if (value := Digests(every).value) != last.digest:
            raise CheckpointError(
                f"{self.directory}: with deltas, the digest is {value}, but {last.place} has "
                f"{last.digest}; name the checkpoint of version {self._chain[0].base_version}"
            )


class _Stream:
    """Reads a tensor's bytes with deltas applied, in order; an earlier byte restarts from 0."""

    def __init__(self, tensor: StoredTensor, patches: Sequence[Patch]) -> None:
        self._tensor, self._patches, self._lock = tensor, patches, Lock()
        self._blocks: Iterator[memoryview] = iter(())
        self._rest, self._at = memoryview(b""), tensor.num_bytes

    @property
    def reads(self) -> Mapping[StoragePath, int]:
        """File -> number of bytes that are read from it."""
        sizes = bytes_in_files([self._tensor])
        for patch in self._patches:
            sizes[patch.path] = sizes.get(patch.path, 0) + patch.num_bytes
        return sizes

    def fill(
        self, start: int, steps: Sequence[tuple[int, int, int]], room: memoryview, at: int
    ) -> None:
        """Copy a part of the tensor into a block of memory; see `Computed.fill`."""
        (count, step, step_in), *inner = steps
        if inner:
            for number in range(count):
                self.fill(start + number * step, inner, room, at + number * step_in)
            return
        with self._lock:
            if start < self._at:
                self._blocks, self._rest, self._at = self._applied(), memoryview(b""), 0
            self._take(start - self._at, None)
            self._take(count, room[at : at + count])
            if self._at == self._tensor.num_bytes:
                next(self._blocks, None)  # compares checksums

    def _take(self, count: int, room: memoryview | None) -> None:
        """Read the next `count` bytes into `room`; skip them if `room` is None."""
        done = 0
        while done < count:
            self._rest = self._rest or next(self._blocks)
            piece, self._rest = self._rest[: count - done], self._rest[count - done :]
            if room is not None:
                room[done : done + len(piece)] = piece
            done += len(piece)
        self._at += count

    def _applied(self) -> Iterator[memoryview]:
        """Yield all bytes of the tensor in order, then compare the checksum."""
        with OpenFiles() as files:
            patching, at = Patching(self._tensor, self._patches, files), 0
            for block in read_whole(self._tensor, files, Buffers()):
                patching.apply(block, at)
                at += len(block)
                yield block
            patching.finish()
