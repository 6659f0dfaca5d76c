"""shardspec: which box of a tensor each device holds, and the cheapest way to change it.

The public names are handed on lazily, so that planning and merging never pay for importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardspec.checkpoint.convert import merge, reshard
    from shardspec.checkpoint.load import load_sharded
    from shardspec.checkpoint.save import save_sharded
    from shardspec.comm.cost import CostModel, Link
    from shardspec.comm.process_group import ProcessGroupCommunicator
    from shardspec.comm.simulated import SimulatedCommunicator
    from shardspec.comm.torch_mesh import init_device_mesh
    from shardspec.dtensor import DTensor, distribute_tensor
    from shardspec.errors import ShardSpecError
    from shardspec.factories import arange, empty, full, ones, rand, randn, zeros
    from shardspec.layout.converter import LayoutConverter
    from shardspec.layout.layout import Layout
    from shardspec.layout.plan import ConversionPlan
    from shardspec.layout.rules import match_rules
    from shardspec.layout.spec import DimSpec, ShardingSpec
    from shardspec.mesh import DeviceMesh
    from shardspec.parallel.distribute import distribute_module
    from shardspec.resharding.check import check_map
    from shardspec.resharding.maps import NameMap
    from shardspec.resharding.plan import ReshardPlan, plan_reshard, reshard_state
    from shardspec.resharding.shipped import load_map, map_chain, shipped_maps
    from shardspec.resharding.trace import trace_map
    from shardspec.torch_dtensors import redistribute
    from shardspec.tracing import trace

_HOME: Final = {
    "ConversionPlan": "shardspec.layout.plan",
    "CostModel": "shardspec.comm.cost",
    "DTensor": "shardspec.dtensor",
    "DeviceMesh": "shardspec.mesh",
    "DimSpec": "shardspec.layout.spec",
    "Layout": "shardspec.layout.layout",
    "LayoutConverter": "shardspec.layout.converter",
    "Link": "shardspec.comm.cost",
    "NameMap": "shardspec.resharding.maps",
    "ProcessGroupCommunicator": "shardspec.comm.process_group",
    "ReshardPlan": "shardspec.resharding.plan",
    "ShardSpecError": "shardspec.errors",
    "ShardingSpec": "shardspec.layout.spec",
    "SimulatedCommunicator": "shardspec.comm.simulated",
    "arange": "shardspec.factories",
    "check_map": "shardspec.resharding.check",
    "distribute_module": "shardspec.parallel.distribute",
    "distribute_tensor": "shardspec.dtensor",
    "empty": "shardspec.factories",
    "full": "shardspec.factories",
    "init_device_mesh": "shardspec.comm.torch_mesh",
    "load_map": "shardspec.resharding.shipped",
    "map_chain": "shardspec.resharding.shipped",
    "load_sharded": "shardspec.checkpoint.load",
    "match_rules": "shardspec.layout.rules",
    "merge": "shardspec.checkpoint.convert",
    "ones": "shardspec.factories",
    "plan_reshard": "shardspec.resharding.plan",
    "rand": "shardspec.factories",
    "randn": "shardspec.factories",
    "redistribute": "shardspec.torch_dtensors",
    "reshard": "shardspec.checkpoint.convert",
    "reshard_state": "shardspec.resharding.plan",
    "save_sharded": "shardspec.checkpoint.save",
    "shipped_maps": "shardspec.resharding.shipped",
    "trace": "shardspec.tracing",
    "trace_map": "shardspec.resharding.trace",
    "zeros": "shardspec.factories",
}

__all__ = [
    "ConversionPlan",
    "CostModel",
    "DTensor",
    "DeviceMesh",
    "DimSpec",
    "Layout",
    "LayoutConverter",
    "Link",
    "NameMap",
    "ProcessGroupCommunicator",
    "ReshardPlan",
    "ShardSpecError",
    "ShardingSpec",
    "SimulatedCommunicator",
    "arange",
    "check_map",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "load_map",
    "load_sharded",
    "map_chain",
    "match_rules",
    "merge",
    "ones",
    "plan_reshard",
    "rand",
    "randn",
    "redistribute",
    "reshard",
    "reshard_state",
    "save_sharded",
    "shipped_maps",
    "trace",
    "trace_map",
    "zeros",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name not in _HOME:
        raise AttributeError(f"module 'shardspec' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"shardspec.{name} needs torch: pip install 'torch>=2.10'", name="torch"
        ) from None


def __dir__() -> list[str]:
    return sorted(__all__)
