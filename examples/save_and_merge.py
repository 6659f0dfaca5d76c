"""Save the shards of a model, merge them into one file, load them onto another mesh.

Eight devices are simulated in this process; under torchrun each rank would run the same lines.

    python examples/save_and_merge.py
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from shardspec import (
    DeviceMesh,
    distribute_tensor,
    load_sharded,
    match_rules,
    merge,
    save_sharded,
)

weights = {
    "embedding.weight": torch.randn(1001, 16),  # 1001 rows do not divide by 8
    "up.weight": torch.randn(64, 16),
    "up.bias": torch.randn(64),
    "down.weight": torch.randn(16, 64).to(torch.bfloat16),
    "step": torch.tensor(7),
}

# Name pattern to spec. Other tensors are replicated.
mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
rules = {"*.bias": "[S(tp)]", "down.weight": "[R,S(tp)]", "[eu]*.weight": "[S(tp,dp),R]"}
specs = match_rules(rules, {name: weight.dim() for name, weight in weights.items()})
state = {
    name: distribute_tensor(weight, mesh, specs[name]) if name in specs else weight
    for name, weight in weights.items()
}

with tempfile.TemporaryDirectory() as directory:
    checkpoint = Path(directory) / "checkpoint"
    save_sharded(state, checkpoint)
    shards = len(list(checkpoint.glob("*.safetensors")))
    print(
        f"saved:  {shards} files of shards, and what is in them in",
        *sorted(file.name for file in checkpoint.glob("*.json")),
    )

    # On the command line: `shardspec merge checkpoint -o model.safetensors`, on any machine.
    report = merge(checkpoint, Path(directory) / "model.safetensors")
    merged = load_file(report.path)
    print(f"merged: {report.tensors} tensors, {report.num_bytes} bytes")
    print("equal: ", all(torch.equal(merged[name], weights[name]) for name in weights))

    # The same checkpoint on three devices, sharded in another way.
    three = DeviceMesh(range(3), (3,), axis_names=("tp",))
    loaded = load_sharded(checkpoint, three, {"*.weight": "[S(tp),R]"})
    for name, tensor in loaded.items():
        held = tuple(tensor.to_local(2).shape)
        print(f"loaded: {name} as {tensor.sharding_spec}, {held} on device 2")
    print("equal: ", all(torch.equal(loaded[name].to_global(), weights[name]) for name in weights))
