"""Quantised tensors have a scale for each block of elements; a cut through a block is refused.

torchao says in the metadata of its safetensors files where blocks lie (``block_size``). For fp8
weights ``config.json`` says it (``quantization_config.weight_block_size``): each such weight ``W``
has a ``W_scale_inv``. GPTQ and AWQ have a row of ``W.scales`` for so many rows of ``W.qweight``;
bitsandbytes has a number of ``W.absmax`` for so many bytes of a 4-bit ``W``, a power of two.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from math import prod
from typing import Final

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import file_inside
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout

__all__ = ["check_blocks"]

_MOST_CONFIG_BYTES: Final = 2**20


def check_blocks(source: Catalog, layouts: Mapping[str, Layout]) -> None:
    """Check that no tensor is cut inside a block.

    Parameters
    ----------
    source
        The checkpoint.
    layouts
        Name in it to how the tensor is to be cut.

    Raises
    ------
    LayoutError
        If one is.
    """
    torchao = _torchao(source.file_metadata.values)
    blocks = dict(chain(torchao, _fp8(source), _packed(source)))
    for name in sorted(blocks.keys() & layouts.keys()):
        layout = layouts[name]
        if len(blocks[name]) != len(layout.global_shape):
            continue
        for device in layout.mesh.ids:
            sides = zip(layout.box(device), blocks[name], layout.global_shape, strict=True)
            for dim, ((lo, hi), block, size) in enumerate(sides):
                if lo < hi and (lo % block or (hi % block and hi != size)):
                    raise LayoutError(
                        f"tensor {name!r}: spec {layout.spec} cuts dim {dim} at {lo}:{hi}, inside "
                        f"a block of {block} elements that share a scale; cut another dim, or over "
                        "fewer devices"
                    )


def _torchao(metadata: Mapping[str, str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key, text in metadata.items():
        said = _object(text)
        data = said.get("_data")
        block = _sizes(data.get("block_size") if isinstance(data, dict) else None)
        if block and said.get("_tensor_data_names"):
            home, _, weight = key.rpartition(".")
            yield f"{home}._{weight}_qdata".lstrip("."), block


def _fp8(source: Catalog) -> Iterator[tuple[str, tuple[int, ...]]]:
    known = set(source.names)
    scaled = [name for name in source.names if f"{name}_scale_inv" in known]
    if not scaled or not (source.directory / "config.json").is_file():
        return
    with SourceFile(file_inside(source.directory, "config.json", source.directory)) as file:
        text = file.read(0, min(file.num_bytes, _MOST_CONFIG_BYTES))
    said = _object(text).get("quantization_config")
    block = _sizes(said.get("weight_block_size") if isinstance(said, dict) else None)
    if block:
        yield from ((name, block) for name in scaled)


def _packed(source: Catalog) -> Iterator[tuple[str, tuple[int, ...]]]:
    known = set(source.names)
    for name in source.names:
        home, _, last = name.rpartition(".")
        if last == "qweight" and f"{home}.scales" in known:
            rows, groups = (source.outline(f"{home}.{of}").shape[0] for of in (last, "scales"))
            if groups and rows % groups == 0:
                yield name, (rows // groups, 1)
        elif f"{name}.absmax" in known:
            num_bytes, count = (prod(source.outline(of).shape) for of in (name, f"{name}.absmax"))
            powers = (1 << power for power in range(num_bytes.bit_length() + 1))
            block = next((size for size in powers if -(-num_bytes // size) == count), None)
            if block is not None:
                yield name, (block, 1)


def _object(text: str | bytes) -> dict[str, object]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _sizes(said: object) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(type(size) is int and size > 0 for size in said):
        return ()
    return tuple(said)
