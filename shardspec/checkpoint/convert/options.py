"""Options that `merge` and `reshard` share, and their report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from shardspec.checkpoint.boxes.copy import Progress
from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.formats import Way
from shardspec.checkpoint.select.choice import Choice, Patterns, Selection
from shardspec.checkpoint.storage.checksums import crc_text
from shardspec.layout.layout import Layout
from shardspec.layout.rules import Rules
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.resharding.digests import Digests
from shardspec.resharding.name_map import Names

if TYPE_CHECKING:
    from shardspec.checkpoint.boxes.numeric import CastLosses


class WriteKeywords(Selection, total=False):
    """Arguments that `merge` and `reshard` hand on; see `merge`."""

    quantize: str | None
    scale_rule: str | None
    quantize_include: Patterns | None
    drop_values: bool
    threads: int
    metadata: bool
    strict_cast: bool
    verify: bool
    dry_run: bool
    sidecars: bool
    progress: Progress | None
    digests: PurePath | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(Choice):
    """Which tensors are written, how, and as what; see `merge` and `reshard`."""

    way: Way
    format: str | None = None
    """By its name."""
    max_shard_bytes: int | None = None
    in_directory: bool = False
    """Whether the output is named as a directory."""
    names: Names | None = None
    device_mesh: DeviceMesh | None = None
    rules: Rules | None = None
    like: PurePath | str | Catalog | Mapping[str, Layout] | None = None
    quantize: str | None = None
    scale_rule: str | None = None
    quantize_include: Patterns | None = None
    drop_values: bool = False
    threads: int = 1
    metadata: bool = True
    strict_cast: bool = False
    overwrite: bool = False
    verify: bool = True
    dry_run: bool = False
    sidecars: bool = True
    progress: Progress | None = None
    digests: PurePath | str | None = None


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was written, or what would be."""

    path: PurePath
    """The output, as the user named it."""
    format: str
    """Its format, as `merge` and `reshard` name it."""
    read: str
    """What the source is."""
    reads: Mapping[str, int]
    """The files that tensors are read from, and the bytes of their boxes, each read once."""
    tensors: int
    writes: Mapping[str, int]
    """The files of the output, or the output itself if it is one, and their sizes."""
    left_out: tuple[str, ...]
    """Entries of the source that are not tensors and that the output lacks; the metadata of
    safetensors files is ``"__metadata__"``."""
    sidecars: tuple[str, ...]
    """Names of the files beside the weights of the source that were copied along."""
    weight_files: int
    """How many files of the output hold tensors: without an index and what was copied along."""
    not_copied: tuple[str, ...] = ()
    """Names of what lies there too and was not copied; a directory ends in a slash."""
    filled: tuple[str, ...] = ()
    """Names of the tensors that were taken from the checkpoint to fill from."""
    seconds: float = 0.0
    crc32: int | None = None
    """CRC-32 of all files in their order; None if it was not computed."""
    cast_losses: "CastLosses | None" = None
    """What a cast to another dtype did not keep; None if nothing was cast."""
    written: bool = False
    """False after a dry run."""
    digests: Digests | None = None
    """Those of the output's tensors, if they were wanted."""
    sharding: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """After a dry run of `reshard`: tensor to the rule for it, empty where no rule matches, and its
    spec."""

    @property
    def read_files(self) -> int:
        """How many files tensors are read from."""
        return len(self.reads)

    @property
    def read_bytes(self) -> int:
        """Bytes of all boxes that are read, each once."""
        return sum(self.reads.values())

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files; that of the output itself if it is one."""
        return tuple(self.writes)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(self.writes.values())

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "path": str(self.path),
            "format": self.format,
            "read": self.read,
            "read_files": self.read_files,
            "read_bytes": self.read_bytes,
            "reads": dict(self.reads),
            "writes": dict(self.writes),
            "tensors": self.tensors,
            "files": list(self.files),
            "weight_files": self.weight_files,
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "crc32": None if self.crc32 is None else crc_text(self.crc32),
            "cast": None if self.cast_losses is None else self.cast_losses.to_json(),
            "left_out": list(self.left_out),
            "sidecars": list(self.sidecars),
            "not_copied": list(self.not_copied),
            "filled": list(self.filled),
            "written": self.written,
            "digest": None if self.digests is None else self.digests.value,
            "sharding": {
                name: {"rule": rule or None, "spec": spec}
                for name, (rule, spec) in self.sharding.items()
            },
        }
