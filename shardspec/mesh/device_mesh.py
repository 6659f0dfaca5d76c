"""Defines the device mesh: device ids arranged in a grid.

An *axis* is always a mesh axis and a *dim* always a tensor dimension. A mesh is a plain value
without process groups, so planning needs no job, no GPU and no rank.
"""

import os
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Unpack, get_args

from shardspec.errors import AxisError, MeshError, NotTorchMeshError
from shardspec.mesh.device_ids import (
    Ids,
    TorchArguments,
    checked_links,
    checked_names,
    grid_of,
    id_list,
    whole_number,
)
from shardspec.text import counted, html_table, shown

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

Axis = int | str
LinkModel = Literal["ring", "shared-bus"]

_MAX_SHOWN: Final = 1024
"""Maximum size of a mesh that notebooks show as a table."""
_PASS_TORCHS: Final = "this is a shardspec mesh; pass mesh.to_torch() to torch functions"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class DeviceMesh:
    """Device ids arranged in a grid.

    ``DeviceMesh("cuda", [[0, 1], [2, 3]])``, as in torch, equals ``DeviceMesh([[0, 1], [2, 3]])``.
    The former also starts the job if torchrun started the program; every rank then constructs it.

    Parameters
    ----------
    physical_mesh_id
        The physical ids: the global rank numbers. Distinct, non-negative, in any order. A torch
        tensor, a numpy array or any (nested) sequence.
    mesh_shape
        Devices along each axis, the outermost axis first. Defaults to the shape of
        `logical_mesh_id`, or of `physical_mesh_id`.
    logical_mesh_id
        The same ids as nested lists, as an alternative to `mesh_shape`.
    mesh_alpha, mesh_beta
        Per axis: latency in seconds per message, and transfer time in seconds per byte (the inverse
        of the bandwidth). Give both or neither.
    axis_names
        Per axis: a name, usable wherever an axis number is.
    link_model
        ``"ring"``: every axis has dedicated links. ``"shared-bus"``: all devices share one bus, as
        processes on one host do, so prices count the bytes of all devices together.
    links
        Links of the cluster, instead of `mesh_alpha` and `mesh_beta`: a preset, a file that
        ``shardspec links import`` wrote, a sequence of one per axis, or a
        `shardspec.comm.cluster.Cluster`. Files are read at the first price.
    init_process_group
        Also make the `torch.distributed` groups of this mesh. Every rank of the mesh must then
        construct it. See `shardspec.comm.process_group.ProcessGroupCommunicator`.

    Other Parameters
    ----------------
    device_type
        The device type of tensors in a job, ``"cpu"`` or ``"cuda"``, for torch's mesh. It may
        precede the ids. Equality of meshes ignores it.
    mesh, mesh_dim_names
        torch's names for `physical_mesh_id` and `axis_names`.
    backend_override
        Refused: give it to torch's mesh, and use `from_torch`.

    Raises
    ------
    MeshError
        If ids repeat, are negative or do not fill the shape, or if names or links do not match it.

    Examples
    --------
    >>> mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
    >>> mesh.coordinates(6), mesh.id_at((1, 2)), mesh.axis("tp"), mesh.axis_labels()
    ((1, 2), 6, 1, ['dp', 'tp'])
    >>> mesh.group(6, ["dp"]), mesh.group(0, ["dp", "tp"]), mesh.group(0, ["tp", "dp"])
    ((2, 6), (0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 1, 5, 2, 6, 3, 7))
    >>> mesh.groups(["tp"]), mesh.submesh({"dp": 1}).ids
    (((0, 1, 2, 3), (4, 5, 6, 7)), (4, 5, 6, 7))
    >>> mesh == DeviceMesh(range(8), logical_mesh_id=[[0, 1, 2, 3], [4, 5, 6, 7]],
    ...                    axis_names=("dp", "tp"))
    True
    >>> mesh == DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("dp", "tp"))
    True
    """

    ids: tuple[int, ...]
    """Physical ids in row-major order of their coordinates."""
    shape: tuple[int, ...]
    """Devices along each axis; every entry is at least 1."""
    axis_names: tuple[str, ...] | None
    mesh_alpha: tuple[float, ...] | None
    mesh_beta: tuple[float, ...] | None
    link_model: LinkModel
    links: Hashable
    _position: Mapping[int, int] = field(compare=False, repr=False)
    _hash: int = field(compare=False, repr=False)

    def __init__(
        self,
        physical_mesh_id: Ids | None = None,
        mesh_shape: Ids | None = None,
        logical_mesh_id: Ids | None = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
        *,
        axis_names: Sequence[str] | None = None,
        link_model: LinkModel = "ring",
        links: Hashable | Sequence[str] = None,
        init_process_group: bool = False,
        **arguments: Unpack[TorchArguments],
    ) -> None:
        ids, shape, device_type = grid_of(physical_mesh_id, mesh_shape, logical_mesh_id, arguments)
        mesh_dim_names = arguments.get("mesh_dim_names")
        if link_model not in get_args(LinkModel):
            raise MeshError(f"link_model {shown(link_model)}: use one of {get_args(LinkModel)}")
        if axis_names is not None and mesh_dim_names is not None:
            raise MeshError("axis_names and mesh_dim_names are the same; give one of the two")
        names = checked_names(mesh_dim_names if axis_names is None else axis_names, shape)
        alpha = checked_links("mesh_alpha", mesh_alpha, shape)
        beta = checked_links("mesh_beta", mesh_beta, shape)
        if (alpha is None) != (beta is None):
            raise MeshError("give both mesh_alpha and mesh_beta, or neither")
        links = tuple(links) if isinstance(links, list) else links
        if isinstance(links, tuple) and len(links) > len(shape):
            raise MeshError(
                f"{len(links)} links for {counted(len(shape), 'axis', 'axes')}; give one per axis"
            )
        if links is not None and alpha is not None:
            raise MeshError("give links, or mesh_alpha and mesh_beta, not both")
        identity = (ids, shape, names, alpha, beta, link_model, links)
        values = (*identity, {id_: place for place, id_ in enumerate(ids)}, hash(identity))
        for name, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name, value)
        # Like torch's, a mesh with a device type starts a job that torchrun has launched.
        if init_process_group or (device_type is not None and is_in_job()):
            from shardspec.mesh.job import start

            start(self, device_type)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Rebuilt instead of restored, because hashes of strings differ between processes.
        names, model = self.axis_names, self.link_model
        rebuild = partial(DeviceMesh, axis_names=names, link_model=model, links=self.links)
        return rebuild, (self.ids, self.shape, None, self.mesh_alpha, self.mesh_beta)

    def __repr__(self) -> str:
        ids = f"range({len(self.ids)})" if self.ids == tuple(range(len(self.ids))) else None
        usual = {"axis_names": None, "mesh_alpha": None, "mesh_beta": None, "link_model": "ring"}
        usual |= {"links": None}
        options = [
            f", {name}={value!r}"
            for name, default in usual.items()
            if (value := getattr(self, name)) != default
        ]
        return f"DeviceMesh({ids or id_list(self.ids)}, {self.shape}{''.join(options)})"

    def _repr_html_(self) -> str:
        """Show the ids as a table in notebooks, with the last axis across."""
        if self.size() > _MAX_SHOWN:
            return f"<code>{escape(repr(self))}</code>"
        names = self.axis_names or [""] * self.ndim
        *outer, last = (
            [f"{name} {place}".lstrip() for place in range(size)]
            for name, size in zip(names, self.shape, strict=True)
        )
        ids = iter(self.ids)
        rows = [[", ".join(row), *(str(next(ids)) for _ in last)] for row in product(*outer)]
        return html_table(f"mesh {self}", ["", *last], rows)

    def __str__(self) -> str:
        if self.axis_names is None:
            return "x".join(map(str, self.shape))
        return ",".join(f"{a}={n}" for a, n in zip(self.axis_names, self.shape, strict=True))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The axis names, under torch's name for them."""
        return self.axis_names

    @property
    def mesh(self) -> "torch.Tensor":
        """The ids as a tensor of the mesh's shape."""
        import torch

        return torch.tensor(self.ids, dtype=torch.int).reshape(self.shape)

    def size(self, mesh_dim: Axis | None = None) -> int:
        """Return the number of devices, of the mesh or along an axis.

        >>> mesh = DeviceMesh(range(8), (2, 4), axis_names=("dp", "tp"))
        >>> mesh.size(), mesh.size(0), mesh.size("tp")
        (8, 2, 4)
        """
        return len(self.ids) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    @property
    def device_type(self) -> str:
        """Device type of the mesh in the running job; "cpu" by default."""
        if "torch" not in sys.modules:
            return "cpu"
        from shardspec.mesh.job import device_type_of

        return device_type_of(self)

    if not TYPE_CHECKING:  # otherwise type checkers would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            # torch's functions read private attributes of a mesh.
            if name[0] == "_" and name[:2] != "__":
                raise NotTorchMeshError(_PASS_TORCHS)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def axis(self, axis: Axis) -> int:
        """Return the number of an axis; raises `AxisError` for an unknown number or name."""
        if isinstance(axis, str):
            if self.axis_names is None or axis not in self.axis_names:
                names = ", ".join(self.axis_names) if self.axis_names else "none, only numbers"
                raise AxisError(f"mesh {self} has no axis named {shown(axis)}; its names: {names}")
            return self.axis_names.index(axis)
        number = whole_number(axis)
        if number is None or not 0 <= number < self.ndim:
            raise AxisError(
                f"axis {shown(axis)} is out of range: mesh {self} has "
                f"{counted(self.ndim, 'axis', 'axes')}, numbered from 0"
            )
        return number

    def axis_labels(self, axes: Iterable[int] | None = None) -> list[str]:
        """Return the names of axes, by default of all, or their numbers as text without names."""
        labels = self.axis_names or [str(axis) for axis in range(self.ndim)]
        return list(labels) if axes is None else [labels[axis] for axis in axes]

    def __contains__(self, physical_id: object) -> bool:
        return physical_id in self._position

    def coordinates(self, physical_id: int) -> tuple[int, ...]:
        """Return the index of a device along each axis; raises `MeshError` if the mesh lacks it."""
        if physical_id not in self:
            raise MeshError(f"device {physical_id} is not in the mesh of ids {id_list(self.ids)}")
        # A table of coordinates would take 100 MiB for a million devices.
        position = self._position[physical_id]
        coordinates = []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinates.append(index)
        return tuple(reversed(coordinates))

    def id_at(self, coordinates: Sequence[int]) -> int:
        """Return the device at some coordinates; raises `MeshError` outside the mesh."""
        if len(coordinates) != self.ndim or not all(
            0 <= c < n for c, n in zip(coordinates, self.shape, strict=True)
        ):
            raise MeshError(f"coordinates {tuple(coordinates)} are outside mesh {self}")
        position = 0
        for index, size in zip(coordinates, self.shape, strict=True):
            position = position * size + index
        return self.ids[position]

    def group(self, physical_id: int, axes: Iterable[Axis]) -> tuple[int, ...]:
        """Return a device's group along `axes`: devices with equal coordinates on all other axes.

        They are in row-major order of `axes`.
        """
        numbers = self._distinct(axes)
        coordinates = enumerate(self.coordinates(physical_id))
        first = self.id_at([0 if axis in numbers else index for axis, index in coordinates])
        start = self._position[first]
        return tuple(self.ids[start + offset] for offset in self._offsets(numbers))

    def groups(self, axes: Iterable[Axis]) -> tuple[tuple[int, ...], ...]:
        """Return all groups along `axes`; each device is in exactly one."""
        numbers = self._distinct(axes)
        offsets = self._offsets(numbers)
        starts = self._offsets(axis for axis in range(self.ndim) if axis not in numbers)
        return tuple(tuple(self.ids[start + offset] for offset in offsets) for start in starts)

    def _offsets(self, axes: Iterable[int]) -> list[int]:
        """Return the places in `ids` with index 0 on all other axes, in row-major order of `axes`.

        For axis 0 of a 2x3 mesh these are 0 and 3.
        """
        offsets = [0]
        for axis in axes:
            step = prod(self.shape[axis + 1 :])
            offsets = [offset + i * step for offset in offsets for i in range(self.shape[axis])]
        return offsets

    def submesh(self, fixed: Mapping[Axis, int]) -> "DeviceMesh":
        """Return the mesh along the other axes, at the index of each axis in `fixed`."""
        at = dict(zip(self._distinct(fixed), fixed.values(), strict=True))
        for axis, index in at.items():
            if whole_number(index) is None or not 0 <= index < self.shape[axis]:
                raise MeshError(f"index {shown(index)} is outside axis {axis} of mesh {self}")
        free_axes = [a for a in range(self.ndim) if a not in at]
        if not free_axes:
            raise MeshError(f"fixing every axis of mesh {self} leaves no mesh; keep one axis")
        first = self.id_at([at.get(axis, 0) for axis in range(self.ndim)])
        return self._slice_with(first, free_axes)

    def _slice_with(self, physical_id: int, axes: Sequence[int]) -> "DeviceMesh":
        """Return the slice along `axes`, in this order, that contains a device."""
        options: dict[str, Any] = {
            name: None if (values := getattr(self, name)) is None else [values[a] for a in axes]
            for name in ("mesh_alpha", "mesh_beta", "axis_names")
        }
        shape = [self.shape[axis] for axis in axes]
        links = tuple(self.links[a] for a in axes) if isinstance(self.links, tuple) else self.links
        options |= {"link_model": self.link_model, "links": links}
        return DeviceMesh(self.group(physical_id, axes), shape, **options)

    @classmethod
    def from_torch(cls, torch_mesh: "TorchMesh") -> "DeviceMesh":
        """Return the equivalent of a torch mesh; for one made by `to_torch`, the original mesh.

        The result uses torch's groups. If the torch mesh has all ranks of the job, every rank calls
        this at the same point of the program. Raises `MeshError` for a mesh of another job.
        """
        from shardspec.mesh.job import from_torch

        mesh: DeviceMesh = from_torch(torch_mesh, cls)
        return mesh

    @classmethod
    def from_group(
        cls,
        group: "dist.ProcessGroup | list[dist.ProcessGroup]",
        device_type: str,
        mesh: "torch.Tensor | npt.ArrayLike | None" = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> "DeviceMesh":
        """Return the mesh of process groups, one per axis, by torch's method of this name.

        Several groups need `mesh`, the ids, and `mesh_dim_names`. The same ranks as for
        `from_torch` call this. Raises `MeshError` if groups and ids do not fit.
        """
        from torch.distributed.device_mesh import DeviceMesh as TorchMesh

        try:
            made = TorchMesh.from_group(group, device_type, mesh, mesh_dim_names=mesh_dim_names)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # of torch
            raise MeshError(
                f"from_group: {str(error).splitlines()[0]}; give groups, and for several the ids "
                "and names"
            ) from None
        return cls.from_torch(made)

    def to_torch(self, device_type: str | None = None) -> "TorchMesh":
        """Return the equivalent torch mesh, the same each time; every rank of the job calls this.

        The device type defaults to that of this mesh in this job, or of a mesh that contains it,
        or to ``"cpu"``. A slice of a larger mesh becomes a slice of torch's mesh, so that modules
        can be sharded over several slices. Axes without names become ``axis_0``, ``axis_1``, ...
        """
        from shardspec.mesh.job import to_torch

        return to_torch(self, device_type)

    def __getitem__(self, axis_names: str | Sequence[str]) -> "DeviceMesh":
        """Return the mesh along named axes, in this order, that contains the calling rank.

        See `submesh` for slices that need no rank.
        """
        names = (axis_names,) if isinstance(axis_names, str) else axis_names
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise AxisError(f"mesh[{axis_names!r}]: slice a mesh by axis names, as in mesh['tp']")
        axes = [self.axis(name) for name in names]
        from shardspec.mesh.job import rank_in

        use = f"mesh[{', '.join(map(repr, names))}] is the slice of the calling rank"
        return self._slice_with(rank_in(self, use), axes)

    def flatten(self, mesh_dim_name: str | None = None) -> "DeviceMesh":
        """Return a mesh of the same devices along one axis, with the slowest link of all axes.

        The axis is named `mesh_dim_name`, by default the names of all axes joined by ``_``.

        >>> DeviceMesh([[0, 2], [1, 3]], axis_names=("dp", "cp")).flatten()
        DeviceMesh((0, 2, 1, 3), (4,), axis_names=('dp_cp',))
        """
        if mesh_dim_name is None and self.axis_names is not None:
            mesh_dim_name = "_".join(self.axis_names)
        slowest: dict[str, Any] = {
            name: None if (values := getattr(self, name)) is None else [max(values)]
            for name in ("mesh_alpha", "mesh_beta")
        }
        names = None if mesh_dim_name is None else [mesh_dim_name]
        links = None if isinstance(self.links, tuple) else self.links
        return DeviceMesh(
            self.ids, axis_names=names, link_model=self.link_model, links=links, **slowest
        )

    def get_group(self, mesh_dim: Axis | None = None) -> "dist.ProcessGroup":
        """Return the calling rank's group along an axis, by default the only one."""
        number = self._only_axis(mesh_dim, "get_group")
        from shardspec.mesh.job import group_along

        return group_along(self, number)

    def get_all_groups(self) -> "list[dist.ProcessGroup]":
        """Return the calling rank's group along every axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def get_rank(self) -> int:
        """Return the calling rank's number in the job; the mesh need not contain it."""
        from shardspec.mesh.job import own_rank

        return own_rank()

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """Return the calling rank's index along an axis, by default the only one."""
        number = self._only_axis(mesh_dim, "get_local_rank")
        return self.coordinates(self.get_rank())[number]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the coordinates of the calling rank; None if it is not in this mesh."""
        rank = self.get_rank()
        return self.coordinates(rank) if rank in self else None

    def _only_axis(self, axis: Axis | None, method: str) -> int:
        """Return the number of an axis, by default the only one; raises `AxisError`."""
        if axis is None and self.ndim > 1:
            raise AxisError(
                f"mesh {self} has {self.ndim} axes; name one, as in "
                f"{method}({self.axis_labels()[0]!r})"
            )
        return self.axis(0 if axis is None else axis)

    def _distinct(self, axes: Iterable[Axis]) -> tuple[int, ...]:
        if not isinstance(axes, Iterable) or isinstance(axes, str):
            raise AxisError(f"axes {shown(axes)}: give a list of axes, as in [{shown(axes)}]")
        numbers = tuple(self.axis(axis) for axis in axes)
        if len(set(numbers)) != len(numbers):
            raise AxisError(f"axes {numbers} name one axis twice; name each once")
        return numbers


def is_in_job() -> bool:
    """Return True if this process belongs to a torch job, even before the job is initialized."""
    distributed = sys.modules.get("torch.distributed")
    running = distributed is not None and distributed.is_initialized()
    return running or {"RANK", "WORLD_SIZE"} <= os.environ.keys()
