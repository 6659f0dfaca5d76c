"""Exports a plan as an array of byte copies, so that another library can move the bytes.

A row tells a program to copy `count` runs of `run_bytes` bytes from an offset in the sender's shard
to an offset in the receiver's. `docs/transfers.md` has all fields, and a program that runs rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardspec.boxes import Box, box_shape
from shardspec.comm.senders import Copy
from shardspec.dtypes import item_bytes
from shardspec.errors import LayoutError
from shardspec.layout.layout import Layout
from shardspec.mesh.device_ids import id_list, whole_numbers
from shardspec.resharding.stages import StateCopies, StoredLayout, TensorMove, region_of
from shardspec.resharding.views import identity_view
from shardspec.text import shown

ROW: Final = np.dtype(
    [
        ("stage", "<u4"),
        ("tensor", "<u4"),
        ("sender", "<u4"),
        ("receiver", "<u4"),
        ("source_offset", "<u8"),
        ("target_offset", "<u8"),
        ("run_bytes", "<u8"),
        ("count", "<u8"),
        ("source_step", "<i8"),
        ("target_step", "<i8"),
    ]
)
"""The dtype of a row: 64 bytes without padding."""

End: TypeAlias = Literal["receiver", "sender", "both"]
"""Selects the rows that a device receives, those that it sends, or both."""
Rows: TypeAlias = npt.NDArray[np.void]
"""An array of `ROW`."""
Strides: TypeAlias = Mapping[int, Sequence[int]] | Sequence[int]
"""Bytes from one element to the next, per dim of a shard; or device -> these bytes."""
Declared: TypeAlias = Mapping[str, Mapping[str, Strides]]
"""Strides of some tensors, as in ``{"source": {"w": (4, 32)}, "target": {}}``; all other tensors
are row-major."""


class FileRegion(NamedTuple):
    """Position and strides of a box of a tensor in a file of a checkpoint."""

    file: int
    """Number of the file in the plan."""
    box: Box
    offset: int
    """Offset of the first element in the file, in bytes."""
    strides: tuple[int, ...]
    """Bytes from one element to the next, per dim."""


class _Part(NamedTuple):
    """Offset and strides of a box, in bytes from the start of a shard or file."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def transfer_rows(
    plan: StateCopies,
    device: int,
    end: End = "receiver",
    *,
    strides: Declared | None = None,
    files: Mapping[str, Sequence[FileRegion]] | None = None,
) -> Rows:
    """Return the rows that a device receives or sends; see `ReshardPlan.transfers`.

    For a plan from a checkpoint, `files` has the file regions of each source tensor by name.
    """
    _check(plan, device, end)
    places = _Places(plan, strides or {}, files or {})
    tables = [np.empty(0, ROW)]
    for stage, copy in _copies(plan, device, end):
        move = plan.moves[copy.places[0]]
        for (ours, theirs), indices in places.of(copy, stage):
            parts = _strided(ours, theirs, item_bytes(move.target.dtype))
            table = np.repeat(parts[None], len(indices), 0)
            table["stage"], table["sender"], table["receiver"] = stage, copy.sender, copy.receiver
            table["tensor"] = np.asarray(indices)[:, None]
            tables.append(table.ravel())
    return np.concatenate(tables)


def _check(plan: StateCopies, device: int, end: str) -> None:
    if end not in ("receiver", "sender", "both"):
        raise LayoutError(f"end={end!r}: give 'receiver', 'sender' or 'both'")
    if whole_numbers([device]) is None or device not in plan.devices:
        raise LayoutError(
            f"device {shown(device)} is not in the plan, whose devices are {id_list(plan.devices)}"
        )
    if plan.devices[-1] >= 2**32:
        raise LayoutError(f"device id {plan.devices[-1]} is too large for rows; use less than 2^32")
    for move in plan.moves:
        if move.source.dtype != move.target.dtype:
            raise LayoutError(
                f"{move.target_name!r} is cast from {move.source.dtype} to {move.target.dtype}, "
                "but transfers copy bytes; plan without the cast, and cast what has arrived"
            )


def _copies(plan: StateCopies, device: int, end: str) -> Iterator[tuple[int, Copy]]:
    """Yield (stage, copy) in which the device is `end`: "sender", "receiver" or "both"."""
    yield from ((0, copy) for copy in plan.own_copies if copy.receiver == device)
    for number, stage in enumerate(plan.stages):
        for (sender, receiver), copies in sorted(stage.streams(device).items()):
            if end == "both" or device == {"sender": sender, "receiver": receiver}[end]:
                yield from ((number, copy) for copy in copies)


class _Places:
    """Finds the byte offset of a box in a shard or a file; shards may have declared strides."""

    def __init__(
        self, plan: StateCopies, declared: Declared, files: Mapping[str, Sequence[FileRegion]]
    ) -> None:
        self._moves, self._files = plan.moves, files
        self._declared = {side: declared.get(side, {}) for side in ("source", "target")}
        if plan.files and self._declared["source"]:
            raise LayoutError("strides= is for shards; the strides of files are known")
        if unknown := declared.keys() - self._declared.keys():
            raise LayoutError(
                f"strides= has {shown(sorted(unknown)[0])}; give 'source' and 'target', and in "
                "each strides by the name of the tensor"
            )
        for side in self._declared:
            names = {_name(move, side) for move in plan.moves}
            if others := self._declared[side].keys() - names:
                raise LayoutError(
                    f"strides= declares {shown(sorted(others)[0])}, but the plan's {side} lacks it"
                )

    def of(self, copy: Copy, stage: int) -> Iterator[tuple[tuple[_Part, _Part], Sequence[int]]]:
        """Yield ((sender's part, receiver's part), indices of the tensors with these offsets)."""
        sides = ("target" if stage else "source", copy.sender), ("target", copy.receiver)
        if not any(self._declared.values()) and not self._files:
            move = self._moves[copy.places[0]]
            yield self._parts(move, copy.box, sides), copy.places
            return
        parts = {n: self._parts(self._moves[n], copy.box, sides) for n in copy.places}
        for both, indices in groupby(copy.places, key=parts.__getitem__):
            yield both, list(indices)

    def _parts(
        self, move: TensorMove, box: Box, sides: tuple[tuple[str, int], tuple[str, int]]
    ) -> tuple[_Part, _Part]:
        ours, theirs = (self._part(move, box, side, owner) for side, owner in sides)
        return ours, theirs

    def _part(self, move: TensorMove, box: Box, side: str, owner: int) -> _Part:
        layout = move.source if side == "source" else move.target
        if isinstance(layout, StoredLayout):
            return self._in_file(move, box, owner)
        strides = self._declared[side].get(_name(move, side))
        steps = (
            row_major_steps(layout, owner)
            if strides is None
            else _checked(strides, f"{side} {_name(move, side)!r}", layout, owner)
        )
        return _Part(*region_of(layout, move.view, box, steps, owner, of_source=side == "source"))

    def _in_file(self, move: TensorMove, box: Box, file: int) -> _Part:
        view = move.view or identity_view(move.source.global_shape)
        corner = [lo for lo, _ in box]
        # Boxes of files do not overlap: the one that has the corner has all of the box.
        for region in self._files[move.source_name]:
            if region.file != file:
                continue
            with suppress(IndexError):  # the corner is in another one
                sides = [[side] for side in region.box]
                steps, at = view.source.in_memory(region.strides, sides, corner)
                return _Part(box_shape(box), steps, region.offset + at)
        raise AssertionError(f"file {file} has no {move.source_name!r} at {corner}")


def _name(move: TensorMove, side: str) -> str:
    return move.source_name if side == "source" else move.target_name


@lru_cache(maxsize=4096)
def row_major_steps(layout: Layout, device: int) -> tuple[int, ...]:
    """Return the strides in bytes of a device's shard, if it is row-major and contiguous.

    >>> from shardspec import DeviceMesh
    >>> row_major_steps(Layout(DeviceMesh(range(2)), "[R,S0]", (4, 6), "float32"), 0)
    (12, 4)
    """
    steps, step = list[int](), item_bytes(layout.dtype)
    for size in reversed(layout.local_shape(device)):
        steps.insert(0, step)
        step *= max(size, 1)
    return tuple(steps)


def _checked(strides: Strides, label: str, layout: Layout, device: int) -> tuple[int, ...]:
    """Return the strides declared for a device's shard; LayoutError if elements would overlap."""
    declared = strides.get(device) if isinstance(strides, Mapping) else strides
    if declared is None:
        raise LayoutError(
            f"the strides of {label} are not declared for device {device}; declare them for every "
            "device that has it"
        )
    steps, shape = whole_numbers(declared), layout.local_shape(device)
    if steps is None or len(steps) != len(shape):
        raise LayoutError(
            f"the strides of {label} are {shown(declared)}; give bytes for each of its "
            f"{len(shape)} dims"
        )
    reach = item_bytes(layout.dtype)
    for step, size in sorted(zip(steps, shape, strict=True)):
        if size > 1 and step < reach:
            raise LayoutError(
                f"the strides {steps} of {label} let elements of {shape} on device {device} "
                "overlap; give bytes from one element to the next"
            )
        reach += step * (size - 1) if size else 0
    return steps


def _strided(ours: _Part, theirs: _Part, width: int) -> Rows:
    """Return the rows that copy one box from `ours` to `theirs`; elements have `width` bytes.

    A run is contiguous in both. A row repeats its run along the longest other dim, and each index
    of the remaining dims has its own row.
    """
    dims = [(1, width, width)]
    sides = zip(ours.shape, ours.strides, theirs.strides, strict=True)
    for size, a, b in sorted((d for d in sides if d[0] > 1), key=lambda d: (d[2], d[1])):
        count, x, y = dims[-1]
        if (a, b) == (count * x, count * y):
            dims[-1] = (count * size, x, y)
        else:
            dims.append((size, a, b))
    (run, _, _), *outer = dims
    counted = max(outer, key=lambda dim: dim[0], default=(1, 0, 0))
    starts = np.zeros((1, 2), np.int64)
    for dim in outer:
        if dim is not counted:
            steps = np.arange(dim[0])[:, None] * np.array(dim[1:])
            starts = (starts[:, None] + steps).reshape(-1, 2)
    rows = np.zeros(len(starts), ROW)
    rows["source_offset"] = starts[:, 0] + ours.offset
    rows["target_offset"] = starts[:, 1] + theirs.offset
    rows["run_bytes"] = run * width
    rows["count"], rows["source_step"], rows["target_step"] = counted
    return rows
