"""What deltas say of themselves, and a checkpoint with a chain of them on it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Final, NamedTuple

from shardspec.checkpoint.catalog import AnyOutline, Catalog, Patch, StoredTensor
from shardspec.checkpoint.checksums import new_hash
from shardspec.checkpoint.formats.safetensors import read_header
from shardspec.checkpoint.patches import check_frame
from shardspec.checkpoint.storage.from_text import storage_path
from shardspec.checkpoint.storage.path import StoragePath, file_inside
from shardspec.checkpoint.storage.reading import OpenFiles
from shardspec.checkpoint.storage.strict_json import checked, read_json
from shardspec.errors import CheckpointError
from shardspec.resharding.digests import Digests, TensorDigest
from shardspec.text import shown

DELTA_INDEX: Final = "model.safetensors.index.json"
_MOST_BYTES: Final = 1 << 28
_NUMBER: Final = re.compile(r"[0-9]{1,18}")


class _Delta(NamedTuple):
    """A directory that holds a delta."""

    place: StoragePath
    version: str
    base_version: str
    digest: str | None
    """Of what it makes, and below of what it is for; deltas of others do not say."""
    base_digest: str | None
    patches: Mapping[str, Patch]


def read_delta(place: StoragePath) -> _Delta:
    """Read what a delta says of itself; CheckpointError if that does not hold."""
    index = file_inside(place, DELTA_INDEX, place)
    stated = read_json(index, "index", _MOST_BYTES)
    about = checked(stated.get("metadata"), dict, index, "metadata")
    encoding = about.get("delta_encoding")
    if encoding is None:
        raise CheckpointError(f"{place}: is a full checkpoint, not a delta; name it as the base")
    for key, given, known in (
        ("delta_encoding", encoding, ("xor", "overwrite")),
        ("compression_format", about.get("compression_format"), ("zstd",)),
    ):
        if given not in known:
            raise CheckpointError(
                f"{index}: has {key} {shown(given)}, but {' and '.join(known)} is read"
            )
    version, base = (_version(about.get(key), index) for key in ("version", "base_version"))
    checksum = checked(about.get("checksum_format"), str, index, "checksum_format")
    digits = len(new_hash(checksum, index).hexdigest())
    homes = checked(stated.get("weight_map"), dict, index, "weight_map")
    found: dict[str, Patch] = {}
    there = {name for name in place.names() if name.endswith(".safetensors")}
    if there != set(homes.values()) or not all(isinstance(home, str) for home in homes.values()):
        differ = sorted(there ^ {str(home) for home in homes.values()})
        raise CheckpointError(
            f"{index}: its weight_map and the files beside it do not agree on {shown(differ[0])}; "
            "each file is a plain name ending in .safetensors, and no other lies there"
        )
    for home in sorted(there):
        with file_inside(place, home, index).open() as file:
            header = read_header(file)
        names = {name for name, at in homes.items() if at == home}
        if differ := sorted(names ^ {entry.name for entry in header.entries}):
            raise CheckpointError(
                f"{index}: its weight_map and {home} do not agree on tensor {shown(differ[0])}; "
                "publish it again"
            )
        for entry in header.entries:
            value = header.metadata.get(entry.name, "")
            if (entry.dtype, entry.shape) != ("uint8", (entry.num_bytes,)):
                raise CheckpointError(
                    f"{file.path}: {shown(entry.name)} is {list(entry.shape)} {entry.dtype}, but "
                    "frames are bytes; this is not a delta"
                )
            if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
                raise CheckpointError(
                    f"{file.path}: {shown(entry.name)} has no {checksum} of {digits} digits in the "
                    "metadata; publish it again"
                )
            found[entry.name] = Patch(
                file.path, entry.offset, entry.num_bytes, encoding, checksum, value
            )
    own, of_base = (about.get(key) for key in ("digest", "base_digest"))
    return _Delta(
        place,
        version,
        base,
        own if isinstance(own, str) else None,
        of_base if isinstance(of_base, str) else None,
        found,
    )


def _version(stated: object, index: StoragePath) -> str:
    """Return a version; numbers are the same however many zeros lead them."""
    if not isinstance(stated, str | int) or isinstance(stated, bool):
        raise CheckpointError(f"{index}: has no version and base_version; publish it again")
    return str(int(stated)) if _NUMBER.fullmatch(str(stated)) else str(stated)


def with_deltas(base: Catalog, deltas: Sequence[PurePath | str]) -> Catalog:
    """Return a checkpoint with a chain of deltas on it; all is checked that needs no data.

    Raises CheckpointError if the deltas are no chain, or are for another checkpoint.
    """
    if isinstance(deltas, str | PurePath):
        raise CheckpointError(f"deltas={str(deltas)!r} is one path; give a list of them, in order")
    chain = [read_delta(storage_path(place)) for place in deltas]
    if not chain:
        return base
    seen = {chain[0].base_version: "the base"}
    for before, one in zip((None, *chain), chain, strict=False):
        if before is not None:
            if one.base_version != before.version:
                raise CheckpointError(
                    f"{one.place}: makes version {one.version} of {one.base_version}, but "
                    f"{before.place} before it makes {before.version}; name all deltas in order"
                )
            if None not in (one.base_digest, before.digest) and one.base_digest != before.digest:
                raise CheckpointError(
                    f"{one.place}: was made of a checkpoint with digest {one.base_digest}, but "
                    f"{before.place} makes one with {before.digest}; they are of different runs"
                )
        if one.version in seen:
            raise CheckpointError(
                f"{one.place}: makes version {one.version}, which {seen[one.version]} is already; "
                "name each delta once"
            )
        seen[one.version] = str(one.place)
    patches: dict[str, tuple[Patch, ...]] = {}
    with OpenFiles() as files:
        for one in chain:
            for name, patch in one.patches.items():
                if name not in base.names:
                    raise CheckpointError(
                        f"{one.place}: has tensor {shown(name)}, which {base.directory} lacks; it "
                        "is for another checkpoint, or one under other names"
                    )
                outline = base.outline(name)
                if outline.pending:
                    raise CheckpointError(
                        f"tensor {name!r} of {base.directory} has a reduction pending, so that no "
                        "delta can be for it; merge the checkpoint first"
                    )
                check_frame(name, patch, outline.num_bytes, files.file(patch.path))
                patches[name] = (*patches.get(name, ()), patch)
    return DeltaCatalog(base, patches, chain)


class DeltaCatalog(Catalog):
    """A checkpoint with deltas on it."""

    def __init__(
        self, base: Catalog, patches: Mapping[str, tuple[Patch, ...]], chain: Sequence[_Delta]
    ) -> None:
        super().__init__(
            base.format, base.directory, base.names, base.files, base.mesh, base.extras
        )
        self.snapshot, self.below, self.beside = base.snapshot, base.below, base.beside
        self.file_metadata, self.notes, self.paths = base.file_metadata, base.notes, base.paths
        self._base, self._patches, self._chain = base, patches, chain
        self.wants_digests = chain[-1].digest is not None

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor, with what deltas change."""
        found = self._base.tensor(name)
        return replace(found, patches=self._patches[name]) if name in self._patches else found

    def outline(self, name: str) -> AnyOutline:
        """Return what is known of a tensor."""
        return self._base.outline(name)

    def origin(self, name: str) -> tuple[object, ...]:
        """Return what is equal for tensors of the same bytes and deltas."""
        return self._base.origin(name), self._patches.get(name)

    def copies_agree(self, name: str) -> bool:
        """Say whether digests show that all replicas are equal."""
        return self._base.copies_agree(name)

    def check_unchanged(self) -> None:
        """Check that the files of the base are still those that were opened."""
        self._base.check_unchanged()

    def check_written(self, digests: Mapping[str, TensorDigest]) -> None:
        """Compare what was made with what the last delta says, where all of it was."""
        last = self._chain[-1]
        every = {}
        for name in self.names:
            outline = self.outline(name)
            every[name] = digests.get(name, TensorDigest(outline.dtype, outline.shape))
        if last.digest is not None and (value := Digests(every).value) != last.digest:
            raise CheckpointError(
                f"{self.directory}: with the deltas on it has digest {value}, but {last.place} "
                f"makes {last.digest}; name the checkpoint of version {self._chain[0].base_version}"
            )
