"""Publish only changed weights: a trainer writes deltas, another process applies them.

python examples/delta_sync.py [--width 256]

Trains a small model in bf16 with small steps, as in reinforcement learning: most weights do not
change in a step. After each step the trainer saves the weights, and writes their difference from
the weights published last. Another process applies all deltas so far to its own copy of the first
checkpoint, and prints the digest of the result.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from shardspec import delta, digest, merge, save_sharded

STEPS = 3
RECEIVER = """
import sys, time
from shardspec import apply_delta, digest

base, out, *deltas = sys.argv[1:]
start = time.perf_counter()
apply_delta(base, deltas, out, overwrite=True)
print(f"{time.perf_counter() - start:.6f} {digest(out).value}")
"""

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
width = parser.parse_args().width
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
place = Path(tempfile.mkdtemp())
save_sharded(model.state_dict(), place / "v0")
merge(place / "v0", place / "base.safetensors")

deltas: list[Path] = []
for version in range(1, STEPS + 1):
    x = torch.randn(32, width).bfloat16()
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    new, old = place / f"v{version}", place / f"v{version - 1}"
    start = time.perf_counter()
    save_sharded(model.state_dict(), new)
    whole_s = time.perf_counter() - start
    start = time.perf_counter()
    report = delta(old, new, place / f"weight_v{version:06d}", version=version)
    delta_s = time.perf_counter() - start
    deltas.append(place / f"weight_v{version:06d}")

    arguments = [place / "base.safetensors", place / "received.safetensors", *deltas]
    done = subprocess.run(
        [sys.executable, "-c", RECEIVER, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    apply_s, received = done.stdout.split()
    assert received == digest(model.state_dict()).value == report.digest, "the same weights"
    print(
        f"version {version}: whole {report.num_bytes} bytes in {whole_s * 1e3:.0f} ms; "
        f"delta {report.written_bytes} bytes ({report.written_bytes / report.num_bytes:.1%}) in "
        f"{delta_s * 1e3:.0f} ms, applied in {float(apply_s) * 1e3:.0f} ms; digest {received}"
    )
shutil.rmtree(place)
