"""shardspec: which box of a tensor each device holds, and the cheapest way to change it.

The public names are imported lazily, so that planning and merging never pay for importing torch.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardspec.checkpoint.compare.digest import digest as digest
    from shardspec.checkpoint.convert.merge import merge as merge
    from shardspec.checkpoint.convert.merge import reshard as reshard
    from shardspec.checkpoint.deltas.make import apply_delta as apply_delta
    from shardspec.checkpoint.deltas.make import delta as delta
    from shardspec.checkpoint.job.background import PendingSave as PendingSave
    from shardspec.checkpoint.job.load import load_sharded as load_sharded
    from shardspec.checkpoint.job.plan import plan_reshard as plan_reshard
    from shardspec.checkpoint.job.save import save_sharded as save_sharded
    from shardspec.checkpoint.select.model_names import model_names as model_names
    from shardspec.comm.communicator import SimulatedCommunicator as SimulatedCommunicator
    from shardspec.comm.cost import CostModel as CostModel
    from shardspec.comm.curves import Link as Link
    from shardspec.comm.process_group import ProcessGroupCommunicator as ProcessGroupCommunicator
    from shardspec.comm.process_group import init_device_mesh as init_device_mesh
    from shardspec.errors import ShardSpecError as ShardSpecError
    from shardspec.families.layouts import model_layouts as model_layouts
    from shardspec.layout.converter import LayoutConverter as LayoutConverter
    from shardspec.layout.layout import Layout as Layout
    from shardspec.layout.plan import ConversionPlan as ConversionPlan
    from shardspec.layout.rules import match_rules as match_rules
    from shardspec.layout.spec import DimSpec as DimSpec
    from shardspec.layout.spec import ShardingSpec as ShardingSpec
    from shardspec.mesh.device_mesh import DeviceMesh as DeviceMesh
    from shardspec.parallel.distribute import distribute_module as distribute_module
    from shardspec.resharding.digests import Digests as Digests
    from shardspec.resharding.digests import TensorDigest as TensorDigest
    from shardspec.resharding.maps import check_map as check_map
    from shardspec.resharding.name_map import NameMap as NameMap
    from shardspec.resharding.plan import ReshardPlan as ReshardPlan
    from shardspec.resharding.plan import reshard_state as reshard_state
    from shardspec.resharding.receipts import Receipt as Receipt
    from shardspec.resharding.trace import trace_map as trace_map
    from shardspec.tensor.dtensor import DTensor as DTensor
    from shardspec.tensor.dtensor import distribute_tensor as distribute_tensor
    from shardspec.tensor.factories import arange as arange
    from shardspec.tensor.factories import empty as empty
    from shardspec.tensor.factories import full as full
    from shardspec.tensor.factories import ones as ones
    from shardspec.tensor.factories import rand as rand
    from shardspec.tensor.factories import randn as randn
    from shardspec.tensor.factories import zeros as zeros
    from shardspec.tensor.redistribute import redistribute as redistribute
    from shardspec.tracing import trace as trace

_NAMES: Final = {
    "checkpoint.job.background": ("PendingSave",),
    "checkpoint.convert.merge": ("merge", "reshard"),
    "checkpoint.deltas.make": ("apply_delta", "delta"),
    "checkpoint.compare.digest": ("digest",),
    "checkpoint.job.load": ("load_sharded",),
    "checkpoint.select.model_names": ("model_names",),
    "checkpoint.job.plan": ("plan_reshard",),
    "checkpoint.job.save": ("save_sharded",),
    "comm.communicator": ("SimulatedCommunicator",),
    "comm.cost": ("CostModel",),
    "comm.curves": ("Link",),
    "comm.process_group": ("ProcessGroupCommunicator", "init_device_mesh"),
    "errors": ("ShardSpecError",),
    "layout.converter": ("LayoutConverter",),
    "layout.layout": ("Layout",),
    "layout.plan": ("ConversionPlan",),
    "layout.rules": ("match_rules",),
    "layout.spec": ("DimSpec", "ShardingSpec"),
    "mesh.device_mesh": ("DeviceMesh",),
    "parallel.distribute": ("distribute_module",),
    "resharding.digests": ("Digests", "TensorDigest"),
    "resharding.maps": ("check_map",),
    "resharding.name_map": ("NameMap",),
    "resharding.plan": ("ReshardPlan", "reshard_state"),
    "families.layouts": ("model_layouts",),
    "resharding.receipts": ("Receipt",),
    "resharding.trace": ("trace_map",),
    "tensor.dtensor": ("DTensor", "distribute_tensor"),
    "tensor.factories": ("arange", "empty", "full", "ones", "rand", "randn", "zeros"),
    "tensor.redistribute": ("redistribute",),
    "tracing": ("trace",),
}
"""By the module that they come from."""

_HOME: Final = {name: f"shardspec.{home}" for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


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
    # help() and pydoc look up each of these, so names that need torch are left out without it.
    has_torch = "torch" in sys.modules or find_spec("torch") is not None
    return [name for name in __all__ if has_torch or _can_be_imported(name)]


def _can_be_imported(name: str) -> bool:
    try:
        import_module(_HOME[name])
    except ModuleNotFoundError:
        return False
    return True
