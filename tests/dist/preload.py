"""What ranks import, once for all: the server that they are forked from imports this."""

import gc
from importlib import import_module

for name in (
    "click.testing",
    "hypothesis",
    "networkx",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    # The first operation on torch's DTensors imports it, which takes longest of all.
    "torch._dynamo",
    "shardspec.checkpoint.convert.output",
    "shardspec.checkpoint.job.save",
    "shardspec.comm.process_group",
    "shardspec.layout.converter",
    "shardspec.tensor.dtensor",
    "shardspec.tensor.operators.apply",
):
    import_module(name)

# What is here now stays in memory that the ranks share: no collection writes to it.
gc.collect()
gc.freeze()
