"""Checkpoints written by hand from the words of docs/format.md, with safetensors' own library.

Nothing of shardspec's writing is used, so reading is checked against the format and not against
its twin. Everything can be bent before it is written.
"""

import json
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any

import numpy as np
import safetensors.numpy

from shardspec import DeviceMesh, Layout, ShardingSpec
from shardspec.boxes import box_size, slices_within

CODES = {"int64": "I64", "int32": "I32", "float32": "F32", "float64": "F64", "uint8": "U8"}


@dataclass
class Handmade:
    """The files of a checkpoint before they are written."""

    info: dict[str, Any]
    shards: dict[str, dict[str, Any]]  # file name -> {tensor: array}
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)  # file name -> {key: text}

    def file(self, rank):
        """The entry of a rank in the info."""
        return next(file for file in self.info["files"] if file["rank"] == rank)

    def write(self, directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, arrays in self.shards.items():
            data = safetensors.numpy.save(arrays, self.metadata.get(name))
            directory.joinpath(name).write_bytes(data)
            for file in self.info["files"]:
                if file["name"] == name:
                    file.setdefault("bytes", len(data))
        directory.joinpath("sharding_info.json").write_text(json.dumps(self.info))
        return directory


def handmade(tensors, mesh_shape=(2, 3), ids=None, axis_names=None, *, replicas=False):
    """Cut arrays by specs: name -> (spec, array), or (spec, {addend: array}) for a pending one.

    With `replicas`, every rank stores what it holds; else the first holder in the mesh's order.
    """
    mesh = DeviceMesh(range(int(np.prod(mesh_shape))) if ids is None else ids, mesh_shape)
    info: dict[str, Any] = {
        "format": "shardspec",
        "version": 1,
        "save": "feed",
        "mesh": {"ids": list(mesh.ids), "shape": list(mesh.shape), "axis_names": axis_names},
        "tensors": {},
        "files": [],
    }
    made = Handmade(info, {})
    stored = set()
    for rank in mesh.ids:
        arrays: dict[str, Any] = {}
        boxes: dict[str, Any] = {}
        for name, (spec, value) in tensors.items():
            some = next(iter(value.values())) if isinstance(value, dict) else value
            layout = Layout(mesh, spec, some.shape, some.dtype)
            info["tensors"][name] = {
                "shape": list(some.shape),
                "dtype": CODES[some.dtype.name],
                "spec": str(layout.spec),
            }
            box = layout.box(rank)
            at = mesh.coordinates(rank)
            addend = tuple(at[mesh.axis(partial.axis)] for partial in layout.spec.partials)
            if not box_size(box) or (not replicas and (name, box, addend) in stored):
                continue
            stored.add((name, box, addend))
            array = value[addend] if isinstance(value, dict) else value
            whole = tuple((0, size) for size in some.shape)
            arrays[name] = np.ascontiguousarray(array[slices_within(box, whole)])
            arrays[name] = arrays[name].reshape([hi - lo for lo, hi in box])
            boxes[name] = {"box": [[lo, hi] for lo, hi in box]}
            if addend:
                boxes[name]["addend"] = list(addend)
        if boxes:
            file = f"rank{rank}.safetensors"
            info["files"].append({"name": file, "rank": rank, "boxes": boxes})
            made.shards[file] = arrays
            made.metadata[file] = {
                "format": "pt",
                "shardspec.save": "feed",
                "shardspec.rank": str(rank),
            }
    return made


def sample():
    """Two tensors on 2x3 devices; `w` has 8x7 int32, `b` 7 float32."""
    return {
        "w": ("[S0,S1]", np.arange(56, dtype=np.int32).reshape(8, 7)),
        "b": ("[S1]", np.arange(7, dtype=np.float32)),
    }


def all_specs(dims, axes):
    """Every spec without partials: every way to put some axes, in order, on the dims."""
    for count in range(axes + 1):
        for chosen in permutations(range(axes), count):
            for at in product(range(dims), repeat=count):
                if list(at) == sorted(at):
                    cuts: dict[int, list[int | str]] = {
                        d: [a for a, e in zip(chosen, at, strict=True) if e == d] for d in at
                    }
                    yield ShardingSpec(dims, cuts)
