"""Quantised tensors have a scale for each block of elements; a cut through a block is refused.

torchao says in the metadata of its safetensors files where blocks lie (``block_size``). For fp8
weights ``config.json`` says it (``quantization_config.weight_block_size``): each such weight ``W``
has a ``W_scale_inv``. GPTQ and AWQ have a row of ``W.scales`` for so many rows of ``W.qweight``;
bitsandbytes has a number of ``W.absmax`` for so many bytes of a 4-bit ``W``, a power of two.
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Final, TypeAlias

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.source_files import SourceFile
from shardspec.checkpoint.store import file_inside
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout

_Blocks: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]
_MOST_CONFIG_BYTES: Final = 2**20


def check_blocks(source: Catalog, layouts: Mapping[str, Layout]) -> None:
    """Refuse layouts, by name in a checkpoint, that cut a tensor inside a block."""
    blocks = dict((*_torchao(source), *_fp8(source), *_packed(source)))
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


def _torchao(source: Catalog) -> _Blocks:
    for key, text in source.file_metadata.values.items():
        block = _sizes(_at(text, "_data", "block_size"))
        if block and _at(text, "_tensor_data_names"):
            home, _, weight = key.rpartition(".")
            yield f"{home}._{weight}_qdata".lstrip("."), block


def _fp8(source: Catalog) -> _Blocks:
    known = set(source.names)
    scaled = [name for name in source.names if f"{name}_scale_inv" in known]
    if scaled and (source.directory / "config.json").is_file():
        with SourceFile(file_inside(source.directory, "config.json", source.directory)) as file:
            text = file.read(0, min(file.num_bytes, _MOST_CONFIG_BYTES))
        block = _sizes(_at(text, "quantization_config", "weight_block_size"))
        yield from ((name, block) for name in scaled if block)


def _packed(source: Catalog) -> _Blocks:
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


def _at(text: str | bytes, *keys: str) -> object:
    """Return what stands at some place in JSON; None where that says nothing of the kind."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for key in keys:
        said = said.get(key) if isinstance(said, dict) else None
    return said


def _sizes(said: object) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(type(size) is int and size > 0 for size in said):
        return ()
    return tuple(said)
