"""What a merge or a reshard has done, or would do."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardspec.checkpoint.digests import crc_text

if TYPE_CHECKING:
    from shardspec.checkpoint.numeric import CastLosses

__all__ = ["WriteReport"]


@dataclass(frozen=True, slots=True)
class WriteReport:
    """What was written, or what would be."""

    path: Path
    """The output, as the user named it."""
    format: str
    """Its format, as `merge` and `reshard` name it."""
    read: str
    """What the source is."""
    read_files: int
    """How many files bytes of tensors come from."""
    read_bytes: int
    """Bytes of all boxes that are read, each once."""
    tensors: int
    files: tuple[str, ...]
    """Names of the files; that of the output itself if it is one."""
    num_bytes: int
    """Size of all files."""
    seconds: float
    crc32: int | None
    """CRC-32 of all files in their order; None if it was not taken."""
    cast_losses: "CastLosses | None"
    """What a cast to another dtype did not keep; None if nothing was cast."""
    left_out: tuple[str, ...]
    """Entries of the source that are no tensors, and that the output does not hold; the metadata of
    safetensors files is ``"__metadata__"``."""
    sidecars: tuple[str, ...]
    """Names of the files that lay beside the weights of the source and went along."""
    written: bool
    """False if nothing was written because that was asked for."""

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {
            "path": str(self.path),
            "format": self.format,
            # Its former name.
            "form": self.format,
            "read": self.read,
            "read_files": self.read_files,
            "read_bytes": self.read_bytes,
            "tensors": self.tensors,
            "files": list(self.files),
            "bytes": self.num_bytes,
            "seconds": self.seconds,
            "crc32": None if self.crc32 is None else crc_text(self.crc32),
            "cast": None if self.cast_losses is None else self.cast_losses.to_json(),
            "left_out": list(self.left_out),
            "sidecars": list(self.sidecars),
            "written": self.written,
        }
