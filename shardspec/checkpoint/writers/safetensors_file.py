"""One safetensors file with whole tensors."""

from collections.abc import Mapping, Sequence
from typing import Final

from shardspec.checkpoint.reading.safetensors_file import TensorSlot, encode_header
from shardspec.checkpoint.writing.targets import OutputFile, Piece, Slot, Target, Wanted

__all__ = ["METADATA", "one_file", "safetensors_target"]

METADATA: Final = {"format": "pt"}
"""What transformers and others want to find in a file."""


def one_file(
    name: str, tensors: Sequence[Wanted], metadata: Mapping[str, str] = METADATA
) -> OutputFile:
    """Return a safetensors file that holds whole tensors.

    Raises
    ------
    CheckpointError
        If a name cannot stand in a header, or the header exceeds the format's limit.

    Examples
    --------
    >>> file = one_file("a.safetensors", [Wanted("w", "w", (2, 3), "float32")])
    >>> file.num_bytes, [(slot.offset, slot.num_bytes) for slot in file.slots]
    (120, [(96, 24)])
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    head, header = encode_header(
        (TensorSlot(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors), metadata
    )
    slots = (
        Slot(by_name[entry.name], tuple((0, size) for size in entry.shape), entry.offset)
        for entry in header.entries
    )
    return OutputFile(name, header.file_bytes, (Piece(0, head),), tuple(slots))


def safetensors_target(name: str, tensors: Sequence[Wanted]) -> Target:
    """Return the output that is one safetensors file; see `one_file`."""
    return Target((one_file(name, tensors),), directory=False)
