"""Time and memory of dequantizing and quantizing, beside `cat` of the 16-bit numbers.

Run ``python -m benchmarks.low_precision [MIB [THREADS]]``. Each way is measured five times, in turn
with `cat` of the file of 16-bit numbers; shown are medians of the ratios, and the most memory that
a process of its own takes. By default there are as many threads as the command takes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shardspec import merge

KINDS = ("fp8-128x128", "mxfp8", "mxfp4")
WIDE = 4096
RUNS = 5


def main(mebibytes: int, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        numbers = made(place, mebibytes)
        for kind in KINDS:
            merge(place / "plain", f"{place}/{kind}/", quantize=kind)
        experts(place, mebibytes)
        ways: dict[str, tuple[str, dict[str, str]]] = {}
        for kind in KINDS:
            ways[f"quantize {kind}"] = ("plain", {"quantize": kind})
        for kind in (*KINDS, "gpt-oss"):
            ways[f"dequantize {kind}"] = (kind, {"dtype": "bf16"})
        print(f"{mebibytes} MiB of bf16, times `cat`; {threads} threads; peak of a process")
        for name, (source, how) in ways.items():
            times = ratio(place, numbers, source, how, threads)
            most = peak(place, source, how, threads)
            print(f"{name:24} {times:5.2f}  {most} MiB")


def made(place: Path, mebibytes: int) -> Path:
    """Write a model of some matrices in bfloat16; return its file."""
    random = np.random.default_rng(0)
    rows = mebibytes * 2**20 // (4 * 2 * WIDE)
    tensors = {}
    for number in range(4):
        weights = random.standard_normal((rows, WIDE), dtype=np.float32)
        tensors[f"{number}.up_proj.weight"] = (weights.view(np.uint32) >> 16).astype(np.uint16)
    (place / "plain").mkdir()
    (place / "plain" / "config.json").write_text("{}")
    file = place / "plain" / "model.safetensors"
    save_file(tensors, file)
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    header = re.sub(b'"U16"', b'"BF16"', data[8:end])
    header += b" " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    return file


def experts(place: Path, mebibytes: int) -> None:
    """Write experts of gpt-oss, whose rows are columns of what is made of them."""
    random = np.random.default_rng(1)
    side = 2880
    count = max(1, mebibytes * 2**20 // (4 * 2 * side * side))
    shape = (count, side, side // 32, 16)
    tensors = {}
    for layer in range(4):
        name = f"layers.{layer}.mlp.experts.down_proj"
        tensors[f"{name}_blocks"] = random.integers(0, 256, shape, dtype=np.uint8)
        tensors[f"{name}_scales"] = random.integers(100, 130, shape[:-1], dtype=np.uint8)
    (place / "gpt-oss").mkdir()
    save_file(tensors, place / "gpt-oss" / "model.safetensors")
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (place / "gpt-oss" / "config.json").write_text(json.dumps(config))


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def ratio(place: Path, numbers: Path, source: str, how: dict[str, Any], threads: int) -> float:
    """Return the median of the time beside that of `cat`."""

    def write() -> None:
        out = place / "out.safetensors"
        merge(place / source, out, overwrite=True, verify=False, threads=threads, **how)

    def cat() -> None:
        subprocess.run(f"cat {numbers} > {place}/copy && sync {place}/copy", shell=True, check=True)

    write()
    return median(timed(write) / timed(cat) for _ in range(RUNS))


def peak(place: Path, source: str, how: dict[str, Any], threads: int) -> int:
    """Return the most memory that a process of its own takes, in MiB."""
    arguments = [word for name, value in how.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "shardspec", "merge", str(place / source), "--overwrite"]
    command += ["-o", str(place / "out.safetensors"), "--threads", str(threads), *arguments]
    code = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=-3); "
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, check=True)
    return int(done.stdout)


if __name__ == "__main__":
    usual = 256, min(4, len(os.sched_getaffinity(0)))
    given = [int(word) for word in sys.argv[1:]]
    main(*(*given, *usual[len(given) :]))
