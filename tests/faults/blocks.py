"""Cuts through quantized tensors, judged by what each scheme says of single numbers.

For every number of a weight a scheme says where its code lies, and which scales and zero points it
is made with. Codes that have one of these in common belong together, unless it is one for a whole
tensor or row; a cut is right if no device gets a part of what belongs together. Codes of schemes
that shardspec does not read are right only as a whole.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, product
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from shardspec import DeviceMesh, plan_reshard, reshard
from tests.faults.checks import raised
from tests.faults.harness import Case

__all__ = ["blocks"]

Index = tuple[int, ...]
_BYTES: Final = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "F32": 4, "I32": 4, "U32": 4}


@dataclass(frozen=True)
class Scheme:
    """A way to quantize; `e`, `i`, `j` are expert, row and column of the weight."""

    name: str
    codes: str
    tensors: dict[str, tuple[str, Index]]
    shape: Index
    """Of the weight: experts, rows, columns."""
    lies: Callable[[int, int, int], Index]
    """Where the code of a number lies."""
    shares: Callable[[int, int, int], Sequence[object]]
    """The scales and zero points of a number, but for those of whole rows."""
    config: dict[str, object] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether shardspec reads it."""
        return self.name.startswith(("FP8", "MXFP4")) or self.tensors[self.codes][0] == "F8_E4M3"

    def together(self) -> np.ndarray:
        """Return for each code the least of those that belong together with it."""
        stored = self.tensors[self.codes][1]
        parent = np.arange(prod(stored))

        def root(at: int) -> int:
            while parent[at] != at:
                at = parent[at]
            return at

        first: dict[object, int] = {}
        for number in product(*map(range, self.shape)):
            at = int(np.ravel_multi_index(self.lies(*number), stored))
            for shared in self.shares(*number):
                one, other = sorted((root(first.setdefault(shared, at)), root(at)))
                parent[other] = one
        return np.array([root(at) for at in range(len(parent))]).reshape(stored)


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _fp8(rows: int, cols: int, experts: int = 0) -> Scheme:
    name = "experts.gate_up_proj" if experts else "a.weight"
    lead = (experts,) if experts else ()
    return Scheme(
        f"FP8 in blocks of 4x8{' of experts' if experts else ''}",
        name,
        {
            name: ("F8_E4M3", (*lead, rows, cols)),
            f"{name}_scale_inv": ("F32", (*lead, _up(rows, 4), _up(cols, 8))),
        },
        (max(1, experts), rows, cols),
        lambda e, i, j: (e, i, j) if experts else (i, j),
        lambda e, i, j: [(e, i // 4, j // 8)],
        {"quant_method": "fp8", "weight_block_size": [4, 8]},
    )


def _gptq(rows: int, cols: int, group: int) -> Scheme:
    return Scheme(
        "GPTQ",
        "a.qweight",
        {
            "a.qweight": ("I32", (cols // 8, rows)),
            "a.scales": ("F16", (_up(cols, group), rows)),
            "a.qzeros": ("I32", (_up(cols, group), rows // 8)),
            "a.g_idx": ("I32", (cols,)),
        },
        (1, rows, cols),
        lambda _, i, j: (j // 8, i),
        lambda _, i, j: [("s", j // group, i), ("z", j // group, i // 8)],
        {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False},
    )


def _awq(rows: int, cols: int, group: int) -> Scheme:
    return Scheme(
        "AWQ",
        "a.qweight",
        {
            "a.qweight": ("I32", (cols, rows // 8)),
            "a.scales": ("F16", (_up(cols, group), rows)),
            "a.qzeros": ("I32", (_up(cols, group), rows // 8)),
        },
        (1, rows, cols),
        lambda _, i, j: (j, i // 8),
        lambda _, i, j: [("s", j // group, i), ("z", j // group, i // 8)],
        {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"},
    )


def _weights(strategy: str, group: int | None = None, **more: object) -> dict[str, object]:
    weights = {"num_bits": 4, "strategy": strategy, "group_size": group, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def _packed(rows: int, cols: int, group: int, *, zeros: bool) -> Scheme:
    tensors = {
        "a.weight_packed": ("I32", (rows, cols // 8)),
        "a.weight_scale": ("F16", (rows, _up(cols, group))),
        "a.weight_shape": ("I32", (2,)),
    }
    if zeros:
        tensors["a.weight_zero_point"] = ("I32", (rows // 8, _up(cols, group)))
    return Scheme(
        f"compressed-tensors in groups{' with zero points' if zeros else ''}",
        "a.weight_packed",
        tensors,
        (1, rows, cols),
        lambda _, i, j: (i, j // 8),
        lambda _, i, j: [("s", i, j // group)] + ([("z", i // 8, j // group)] if zeros else []),
        _weights("group", group),
    )


def _alone(rows: int, cols: int, kind: str) -> Scheme:
    """Return schemes with one scale for a tensor or a row, which are cut anywhere."""
    floats = _weights("tensor", num_bits=8, type="float")
    kinds: dict[str, tuple[str, dict[str, tuple[str, Index]], dict[str, object]]] = {
        "channel": ("I8", {"a.weight_scale": ("F32", (rows, 1))}, _weights("channel")),
        "tensor": ("F8_E4M3", {"a.weight_scale": ("F32", (1,))}, floats),
        "scalar": (
            "F8_E4M3",
            {"a.weight_scale": ("F32", ()), "a.input_scale": ("F32", ())},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        "SCB": ("I8", {"a.SCB": ("F32", (rows,))}, {"quant_method": "bitsandbytes"}),
        "fbgemm": (
            "F8_E4M3",
            {"a.weight_scale": ("F32", (rows, 1))},
            {"quant_method": "fbgemm_fp8"},
        ),
    }
    codes, scale, config = kinds[kind]
    return Scheme(
        f"one scale for a tensor or row: {kind}",
        "a.weight",
        {"a.weight": (codes, (rows, cols)), **scale},
        (1, rows, cols),
        lambda _, i, j: (i, j),
        lambda *_: [],
        config,
    )


def _mlx(rows: int, cols: int, group: int) -> Scheme:
    grid = ("F16", (rows, cols // group))
    return Scheme(
        "MLX",
        "a.weight",
        {"a.weight": ("U32", (rows, cols // 8)), "a.scales": grid, "a.biases": grid},
        (1, rows, cols),
        lambda _, i, j: (i, j // 8),
        lambda _, i, j: [(i, j // group)],
        {"group_size": group, "bits": 4, "b": {"group_size": 2 * group, "bits": 8}},
    )


def _mxfp4(rows: int, cols: int) -> Scheme:
    return Scheme(
        "MXFP4 of experts",
        "x.down_proj_blocks",
        {
            "x.down_proj_blocks": ("U8", (2, rows, cols // 32, 16)),
            "x.down_proj_scales": ("U8", (2, rows, cols // 32)),
        },
        (2, rows, cols),
        lambda e, i, j: (e, i, j // 32, j % 32 // 2),
        lambda e, i, j: [(e, i, j // 32)],
        {"quant_method": "mxfp4"},
    )


def _nvfp4(rows: int, cols: int) -> Scheme:
    return Scheme(
        "NVFP4",
        "a.weight",
        {
            "a.weight": ("U8", (rows, cols // 2)),
            "a.weight_scale": ("F8_E4M3", (rows, cols // 16)),
            "a.weight_scale_2": ("F32", ()),
        },
        (1, rows, cols),
        lambda _, i, j: (i, j // 2),
        lambda _, i, j: [(i, j // 16)],
        {"quant_algo": "NVFP4", "group_size": 16},
    )


def _nf4(rows: int, cols: int) -> Scheme:
    count = rows * cols
    return Scheme(
        "bitsandbytes NF4",
        "a.weight",
        {
            "a.weight": ("U8", (count // 2, 1)),
            "a.weight.absmax": ("F32", (_up(count, 64),)),
            "a.weight.quant_map": ("F32", (16,)),
        },
        (1, rows, cols),
        lambda _, i, j: ((i * cols + j) // 2, 0),
        lambda _, i, j: [(i * cols + j) // 64],
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    )


def _optimizer(rows: int, cols: int) -> Scheme:
    return Scheme(
        "the state of an optimizer of 8 bits",
        "a.state1",
        {
            "a.state1": ("U8", (rows, cols)),
            "a.absmax1": ("F32", (_up(rows * cols, 256),)),
            "a.qmap1": ("F32", (256,)),
        },
        (1, rows, cols),
        lambda _, i, j: (i, j),
        lambda _, i, j: [(i * cols + j) // 256],
    )


def _torchao(rows: int, cols: int, group: int) -> Scheme:
    data = {"block_size": [1, group], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    described = {"_type": "Int8Tensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}
    return Scheme(
        f"torchao in {'rows' if group == cols else 'groups'}",
        "a._weight_qdata",
        {
            "a._weight_qdata": ("I8", (rows, cols)),
            "a._weight_scale": ("F32", (rows, cols // group)),
        },
        (1, rows, cols),
        lambda _, i, j: (i, j),
        lambda _, i, j: [] if group == cols else [(i, j // group)],
        metadata={"a.weight": json.dumps(described), "tensor_names": '["a.weight"]'},
    )


def _schemes() -> Iterator[Scheme]:
    yield from (_fp8(*shape) for shape in ((16, 32), (18, 20), (3, 40), (8, 24, 4)))
    yield from (_gptq(16, 128, 32), _gptq(24, 80, 32), _gptq(16, 64, 64))
    yield from (_awq(16, 128, 32), _awq(24, 80, 32))
    yield from (_packed(16, 128, 32, zeros=False), _packed(24, 80, 32, zeros=True))
    yield from (_alone(6, 10, kind) for kind in ("channel", "tensor", "scalar", "SCB", "fbgemm"))
    yield from (_mlx(6, 192, 32), _mlx(5, 256, 64))
    yield from (_mxfp4(6, 96), _nvfp4(6, 64), _nvfp4(5, 80))
    yield from (_nf4(8, 96), _nf4(5, 90), _optimizer(8, 128), _optimizer(6, 90))
    yield from (_torchao(6, 96, 32), _torchao(6, 96, 96))


def _cuts(size: int) -> Iterator[tuple[str, list[list[int]], int]]:
    """Yield ways to cut a dim: as text, the indices of every device, and how many there are."""
    for devices in (2, 3, 4):
        for block in (1, 2, 4, 8, 16, 32):
            if block <= size:
                cut = _chunks(range(size), devices, block)
                yield f"S0*{block}" if block > 1 else "S0", cut, devices
        for share in (4, 8, 12, 16):
            if share * 2 < size:
                ends = (0, share * 2, size - share, size)
                pieces = [range(a, b) for a, b in pairwise(sorted(set(ends)))]
                some = [_chunks(piece, devices, 1) for piece in pieces]
                text = ",".join(str(len(piece)) for piece in pieces)
                held = [[*chain(*parts)] for parts in zip(*some, strict=True)]
                yield f"S0{{{text}}}", held, devices


def _chunks(indices: range, devices: int, block: int) -> list[list[int]]:
    """Return what each device gets: as many blocks, rounded up, then fewer, then none."""
    most = _up(_up(len(indices), block), devices) * block
    return [list(indices[n * most : (n + 1) * most]) for n in range(devices)]


def _write(place: Path, scheme: Scheme, where: str) -> Path:
    """Write a checkpoint whose config lies in one of several places; return what is named."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    header: dict[str, object] = {"__metadata__": {"format": "pt", **scheme.metadata}}
    end = 0
    for name, (dtype, shape) in scheme.tensors.items():
        size = prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file = place / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    config: dict[str, object] = {"model_type": "x"}
    if where == "nested":
        config["text_config"] = {"quantization_config": scheme.config}
    elif where == "quantization":
        config["quantization"] = scheme.config
    elif where != "nowhere":
        config["quantization_config"] = scheme.config
    (place / "config.json").write_text(json.dumps(config))
    return file if where == "file" else place


def blocks(place: Path, whole: bool) -> Iterator[Case]:
    """Yield cuts of every dim of every scheme, or every 37th of them."""
    cases = []
    for number, scheme in enumerate(_schemes()):
        together = scheme.together()
        counts = np.bincount(together.ravel(), minlength=together.size)
        for where in ("top", "nested", "quantization", "file", "nowhere"):
            home = place / f"{number}-{where}"
            for dim, size in enumerate(together.shape):
                # Unstated, one scale along a dim is one for a whole row.
                if where == "nowhere" and (together == together.take([0], dim)).all():
                    continue
                for text, held, devices in _cuts(size):
                    spec = ["R"] * together.ndim
                    spec[dim] = text
                    parts = [np.take(together, indices, dim).ravel() for indices in held]
                    right = all(
                        (np.bincount(part, minlength=together.size) == counts)[part].all()
                        for part in parts
                    )
                    if not scheme.known:
                        right = all(len(part) in (0, together.size) for part in parts)
                    act = partial(_act, home, scheme, where, f"[{','.join(spec)}]", devices, right)
                    cases.append(Case(f"{scheme.name}, config {where}, {spec} on {devices}", act))
    yield from cases[:: 1 if whole else 37]


def _act(home: Path, scheme: Scheme, where: str, spec: str, devices: int, right: bool) -> None:
    source = home / "model.safetensors" if where == "file" else home
    if not home.is_dir():
        _write(home, scheme, where)
    mesh, rules = DeviceMesh(range(devices), (devices,)), {scheme.codes: spec}
    out = home / "out"
    wrong = raised(lambda: reshard(source, out, device_mesh=mesh, rules=rules, dry_run=True))
    planned = raised(lambda: plan_reshard(source, (mesh, rules)))
    assert (wrong is None) == (planned is None), (wrong, planned)
    if wrong is not None:
        assert "inside" in wrong, wrong
        assert re.search("shard|split|replicate", wrong.rpartition(";")[2]), wrong
    # Where nothing states the sizes, a cut that may be wrong is refused.
    if where != "nowhere" or not right:
        assert (wrong is None) == right, (right, wrong)
