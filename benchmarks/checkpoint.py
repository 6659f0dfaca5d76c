"""Merging shardspec's own form against `cat` of the same bytes: time, and peak memory.

python -m benchmarks.checkpoint --at /dev/shm/bench --size 2100
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

FORMS: Final = {
    "rows": ["[S01,R]"],
    "columns": ["[R,S01]"],
    "mixed": ["[S01,R]", "[S0,S1]", "[S1,S0]"],
}

_CHILD: Final = """
import json, re, sys, time
from shardspec.checkpoint.merge import merge
started = time.perf_counter()
merge(sys.argv[1], sys.argv[2], force=True, verify=sys.argv[3] == "verify")
seconds = time.perf_counter() - started
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
print(json.dumps([seconds, int(peak[1]) / 1024]))
"""


def make(at: Path, mebibytes: int) -> None:
    """Write each form once: bfloat16 matrices of 32 MiB on 2x2 devices."""
    import torch

    from shardspec import DeviceMesh, DTensor, save_sharded

    mesh = DeviceMesh(range(4), (2, 2))
    for form, specs in FORMS.items():
        if (at / form / "sharding_info.json").exists():
            continue
        state = {
            f"layer{i}": DTensor(
                torch.randn(4096, 4096).to(torch.bfloat16), mesh, specs[i % len(specs)]
            )
            for i in range(max(1, mebibytes // 32))
        }
        save_sharded(state, at / form)


def cat(form: Path, out: Path) -> float:
    """Return the seconds that `cat` takes for the files of a form."""
    files = sorted(map(str, form.glob("*.safetensors")))
    started = time.perf_counter()
    with out.open("wb") as file:
        subprocess.run(["cat", *files], stdout=file, check=True)
    return time.perf_counter() - started


def ours(form: Path, out: Path, how: str) -> tuple[float, float]:
    """Return the seconds of a merge, without the start of Python, and its peak MiB."""
    # A process starts with its parent's peak of memory; that of the shell between them is small.
    line = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", _CHILD]
    done = subprocess.run([*line, str(form), str(out), how], capture_output=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return float(seconds), float(peak)


def main() -> None:
    """Measure in turns, and print medians of the ratios of each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, help="folder to work in; a tmpfs leaves the disk out")
    parser.add_argument("--size", type=int, default=2100, help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        at = chosen.at or Path(temporary)
        at.mkdir(parents=True, exist_ok=True)
        make(at, chosen.size)
        out = at / "out"
        print("form     how        time/cat (lowest-highest)  peak MiB  cat s")
        for form in FORMS:
            cat(at / form, out)
            ratios: dict[str, list[float]] = {"verify": [], "no-verify": []}
            peaks = dict.fromkeys(ratios, 0.0)
            cats = []
            for _ in range(chosen.rounds):
                out.unlink()
                cats.append(cat(at / form, out))
                for how in ratios:
                    out.unlink()
                    seconds, peak = ours(at / form, out, how)
                    ratios[how].append(seconds / cats[-1])
                    peaks[how] = max(peaks[how], peak)
            for how, found in ratios.items():
                print(
                    f"{form:8} {how:10} {statistics.median(found):.2f} "
                    f"({min(found):.2f}-{max(found):.2f})  {peaks[how]:8.1f}  "
                    f"{statistics.median(cats):.3f}"
                )
        out.unlink()


if __name__ == "__main__":
    main()
