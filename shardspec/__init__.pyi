"""Public names and the modules that define them; `__init__.py` reads this list."""

from torch.distributed.tensor.placement_types import Partial as Partial
from torch.distributed.tensor.placement_types import Replicate as Replicate
from torch.distributed.tensor.placement_types import Shard as Shard

from shardspec.checkpoint.compare.digest import digest as digest
from shardspec.checkpoint.convert.model_names import model_names as model_names
from shardspec.checkpoint.convert.output import merge as merge
from shardspec.checkpoint.convert.output import reshard as reshard
from shardspec.checkpoint.deltas.make import apply_delta as apply_delta
from shardspec.checkpoint.deltas.make import delta as delta
from shardspec.checkpoint.job.load import load_sharded as load_sharded
from shardspec.checkpoint.job.plan import plan_reshard as plan_reshard
from shardspec.checkpoint.job.save import save_sharded as save_sharded
from shardspec.comm.cost import CostModel as CostModel
from shardspec.errors import ShardSpecError as ShardSpecError
from shardspec.families.layouts import model_layouts as model_layouts
from shardspec.layout.converter import LayoutConverter as LayoutConverter
from shardspec.layout.layout import Layout as Layout
from shardspec.layout.rules import match_rules as match_rules
from shardspec.layout.spec import ShardingSpec as ShardingSpec
from shardspec.mesh.device_mesh import DeviceMesh as DeviceMesh
from shardspec.mesh.initialization import init_device_mesh as init_device_mesh
from shardspec.parallel import distribute_module as distribute_module
from shardspec.resharding.digests import Digests as Digests
from shardspec.resharding.name_map import NameMap as NameMap
from shardspec.resharding.plan import ReshardPlan as ReshardPlan
from shardspec.resharding.plan import reshard_state as reshard_state
from shardspec.resharding.total import check_map as check_map
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

_HOME: dict[str, str]
__all__: list[str]
__version__: str
