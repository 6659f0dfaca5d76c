"""Time and memory of an average of three checkpoints and of a merged adapter, beside `cat`.

Run ``python -m benchmarks.combined [FOLDER [MIB [ROUNDS]]]``. Each way is measured in turn with
`cat` of the same files; shown are the medians of the ratios of wall-clock and of CPU time, and the
most memory of a process. The weights are bfloat16, in one matrix or in matrices of 32 MiB.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.checkpoint_timing import cat_command, python, run

WIDE = 4096
RANK = 16


@contextmanager
def models(folder: Path, mebibytes: int, matrices: int) -> Iterator[list[Path]]:
    """Write three checkpoints and an adapter of the first; return their directories."""
    place = Path(tempfile.mkdtemp(dir=folder))
    rows = mebibytes * 2**20 // (matrices * 2 * WIDE)
    places = [place / name for name in ("a", "b", "c", "adapter")]
    for number, at in enumerate(places[:3]):
        at.mkdir()
        random = np.random.default_rng(number)
        header = {
            f"{name}.weight": {
                "dtype": "BF16",
                "shape": [rows, WIDE],
                "data_offsets": [name * rows * WIDE * 2, (name + 1) * rows * WIDE * 2],
            }
            for name in range(matrices)
        }
        text = json.dumps(header).encode()
        with (at / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in range(mebibytes // 8):
                numbers = random.standard_normal(2**22, dtype=np.float32)
                file.write((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    random = np.random.default_rng(3)
    tensors = {}
    for name in range(matrices):
        for kind, shape in (("A", (RANK, WIDE)), ("B", (rows, RANK))):
            values = random.standard_normal(shape, dtype=np.float32)
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = values
    places[3].mkdir()
    save_file(tensors, places[3] / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32}
    (places[3] / "adapter_config.json").write_text(json.dumps(config))
    try:
        yield places
    finally:
        shutil.rmtree(place)


def main(folder: Path, mebibytes: int, rounds: int) -> None:
    """Print the ratios and the memory of each way."""
    print(f"{mebibytes} MiB of bf16, times `cat` of what is read: wall-clock, CPU; peak")
    for matrices in (1, max(1, mebibytes // 32)):
        with models(folder, mebibytes, matrices) as (a, b, c, adapter):
            out = a.parent / "out.safetensors"
            ways: dict[str, tuple[list[Path], list[object]]] = {
                "average of three": ([a, b, c], ["--weights", "0.2,0.3,0.5"]),
                "adapter of rank 16": ([a], ["--lora", adapter]),
            }
            for name, (sources, options) in ways.items():
                command = python("shardspec", "merge", *sources, *options, "-o", out)
                files = [source / "model.safetensors" for source in sources]
                ratios, cpu, peak = [], [], 0.0
                for _ in range(rounds):
                    out.unlink(missing_ok=True)
                    copied = run(cat_command(files, out))
                    out.unlink()
                    merged = run(command)
                    ratios.append(merged.seconds / copied.seconds)
                    cpu.append(merged.cpu_seconds / copied.cpu_seconds)
                    peak = max(peak, merged.peak_mib)
                text = f"{median(ratios):5.2f} {median(cpu):5.2f}  {peak:.0f} MiB"
                print(f"{name}, {matrices} matrices".ljust(36), text)


if __name__ == "__main__":
    given = sys.argv[1:]
    at = Path(given[0] if given else tempfile.gettempdir())
    main(at, int(given[1]) if len(given) > 1 else 1024, int(given[2]) if len(given) > 2 else 5)
