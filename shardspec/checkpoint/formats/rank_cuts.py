"""How tensors are cut over ranks, by what the file of every rank says.

All ranks have to agree on that, and every one holds just the part that it gives them. Both are
looked at once for tensors that are cut alike, and for ranks whose files say the same.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from shardspec.boxes import box_shape
from shardspec.checkpoint.catalog import ReplicaKey, StoredReduction, replica_key, stored_reductions
from shardspec.checkpoint.torch_files.rank_states import RankState
from shardspec.checkpoint.torch_files.torch_dtensors import ShardOrder, TorchDTensor, dtensor_spec
from shardspec.checkpoint.torch_files.torch_state import TorchContents
from shardspec.checkpoint.torch_files.torch_values import TorchTensor
from shardspec.errors import CheckpointError, ShardSpecError
from shardspec.layout.layout import Layout
from shardspec.layout.placements import Placement
from shardspec.layout.spec import ShardingSpec
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

__all__ = ["Cut", "Cuts", "Kind", "RankGroup", "grouped"]

_Placed: TypeAlias = tuple[
    DeviceMesh, tuple[Placement, ...], ShardOrder | None, tuple[int, ...], str
]
"""What the layout of a DTensor follows from."""


class Kind(NamedTuple):
    """What all ranks have to agree on about a tensor."""

    shape: tuple[int, ...]
    dtype: str
    spec: ShardingSpec | None
    """None if it is a plain tensor."""
    mesh_shape: tuple[int, ...]
    pending: tuple[StoredReduction, ...]

    def __str__(self) -> str:
        how = "plain" if self.spec is None else f"{self.spec} on {list(self.mesh_shape)} devices"
        return f"{self.dtype} of shape {list(self.shape)}, {how}"


class Cut:
    """How a tensor is cut, and what ranks hold of it; one for all that are cut alike.

    Parameters
    ----------
    kind
        What ranks agree on.
    layout
        None if it is a plain tensor.
    """

    __slots__ = ("_parts", "kind", "layout")

    def __init__(self, kind: Kind, layout: Layout | None) -> None:
        self.kind = kind
        self.layout = layout
        self._parts: dict[int, tuple[ReplicaKey, tuple[int, ...]]] = {}

    @property
    def mesh(self) -> DeviceMesh | None:
        """Where it lies; None if it is a plain tensor."""
        return None if self.layout is None else self.layout.mesh

    def part(self, rank: int) -> tuple[ReplicaKey, tuple[int, ...]]:
        """Return what a rank holds, and its shape."""
        found = self._parts.get(rank)
        if found is None:
            if self.layout is None:
                part: ReplicaKey = tuple((0, size) for size in self.kind.shape), ()
            else:
                part = replica_key(self.layout, rank)
            found = self._parts[rank] = part, box_shape(part[0])
        return found


class RankGroup(NamedTuple):
    """Ranks that hold the same."""

    contents: TorchContents
    states: list[RankState]


def grouped(states: Sequence[RankState]) -> list[RankGroup]:
    """Return ranks by what they hold, in the order of the first of each."""
    groups: dict[int, RankGroup] = {}
    for state in states:
        groups.setdefault(id(state.contents), RankGroup(state.contents, [])).states.append(state)
    return list(groups.values())


class Cuts:
    """How tensors are cut, made and compared with what ranks hold once for those that are alike."""

    def __init__(self) -> None:
        self._plain: dict[tuple[tuple[int, ...], str], Cut] = {}
        self._placed: dict[_Placed, Cut] = {}
        self._right: set[tuple[Cut, tuple[int, ...], int]] = set()
        """Cuts that give all ranks of a group a part of a shape."""

    def of(self, name: str, group: RankGroup) -> Cut:
        """Return how a tensor is cut, as ranks that hold the same say.

        Raises
        ------
        CheckpointError
            If they could not have saved that.
        """
        tensor, first = group.contents.tensors[name], group.states[0]
        if isinstance(tensor, TorchTensor):
            plain = tensor.shape, tensor.dtype
            if plain not in self._plain:
                self._plain[plain] = Cut(Kind(*plain, None, (), ()), None)
            return self._plain[plain]
        if tensor.rank not in (None, first.rank):
            raise _elsewhere(first, name, f"rank {tensor.rank}")
        mesh, shape, dtype = tensor.mesh, tensor.shape, tensor.local.dtype
        key = mesh, tensor.placements, tensor.shard_order, shape, dtype
        cut = self._placed.get(key)
        if cut is None:
            try:
                layout = Layout(mesh, dtensor_spec(tensor), shape, dtype)
                kind = Kind(shape, dtype, layout.spec, mesh.shape, stored_reductions(layout))
            except ShardSpecError as error:
                raise CheckpointError(f"{first.path}: tensor {name!r}: {error}") from None
            cut = self._placed[key] = Cut(kind, layout)
        of = cut, tensor.local.shape, id(group.contents)
        if of not in self._right:
            for state in group.states:
                _check_part(state, name, tensor, cut)
            self._right.add(of)
        return cut


def _check_part(state: RankState, name: str, tensor: TorchDTensor, cut: Cut) -> None:
    """Make sure that a rank could have saved what its file holds of a tensor."""
    if state.rank not in tensor.mesh:
        raise _elsewhere(state, name, f"ranks {shown(list(tensor.mesh.ids))}")
    _, shape = cut.part(state.rank)
    if shape != tensor.local.shape:
        raise CheckpointError(
            f"{state.path}: rank {state.rank} holds a part of shape {list(tensor.local.shape)} of "
            f"tensor {name!r}, but of shape {list(tensor.shape)} under {cut.kind.spec} on "
            f"{list(cut.kind.mesh_shape)} devices it has {list(shape)}; the file contradicts itself"
        )


def _elsewhere(state: RankState, name: str, wrote: str) -> CheckpointError:
    return CheckpointError(
        f"{state.path}: tensor {name!r} was saved by {wrote}, not by rank {state.rank} as the name "
        "of the file says; the file belongs elsewhere, restore its name"
    )
