"""How `merge` and `reshard` write: what both take in the same words."""

from dataclasses import dataclass
from pathlib import PurePath

from shardspec.checkpoint.choice import Choice, Patterns, Selection
from shardspec.checkpoint.read_boxes import Progress
from shardspec.comm.communicator import Communicator


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
    communicator: Communicator | None
    digests: PurePath | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(Choice):
    """Which tensors are written, and how; see `merge`."""

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
    communicator: Communicator | None = None
    digests: PurePath | str | None = None
