"""What the files of many ranks hold; those that differ only in who wrote them are run once.

Ranks that hold equal parts of a model save pickles that differ in a few bytes, where the mesh of
the first DTensor notes its rank. So of all but the first only that much is run, and the rest is
compared.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from shardspec.checkpoint.source_files import SourceFile, prefetch_depth, prefetch_map
from shardspec.checkpoint.torch_files.pickle_tails import QUICK_BYTES, TracedPickle
from shardspec.checkpoint.torch_files.pickle_values import Halfway, Record, Trace
from shardspec.checkpoint.torch_files.torch_dtensors import (
    DTensorReader,
    MeshMaker,
    TorchDTensor,
    device_mesh,
)
from shardspec.checkpoint.torch_files.torch_lines import AlikeLines, TorchLines
from shardspec.checkpoint.torch_files.torch_state import (
    ARGUMENT_NAMES,
    TorchContents,
    contents_of,
    local_of,
)
from shardspec.checkpoint.torch_files.torch_values import (
    TorchStorage,
    TorchTensor,
    check_record,
    read_torch_pickle,
    run_torch_head,
)
from shardspec.checkpoint.torch_files.torch_zip import TorchZip, read_torch_zip
from shardspec.mesh import DeviceMesh

__all__ = ["RankState", "RankStates"]

_MOST_KNOWN: Final = 32
"""Pickles that others are compared with: there is one for each device of a machine, which they
name, and for each slice of a mesh."""

_MOST_KNOWN_BYTES: Final = 64 << 20
"""Of these pickles; those of 10,000 tensors have 3 MB."""
_MOST_KEPT_OF_ONE: Final = 4 << 20
"""Bytes kept of a file in a store, as there are several at once."""
_AHEAD: Final = 3
"""Files of this machine that are read while one is made sense of. A disk is as fast as it can be
when it is asked for some things at once."""
_MOST_MESHES: Final = 64
"""Meshes that are kept: the same few are in every file."""

_Written: TypeAlias = tuple[DeviceMesh, int | None]
"""A mesh, and who saved it, where it says so."""


class RankState(NamedTuple):
    """What the file of one rank holds."""

    path: Path
    rank: int
    """As the name of the file says."""
    contents: TorchContents
    """One object for all files that say the same; meshes in it note the first of these ranks."""
    found: TorchZip
    """Where in the file it lies."""


class _Known:
    """A file that was read, for others that are like it."""

    def __init__(
        self, path: Path, rank: int, pickle: TracedPickle, contents: TorchContents
    ) -> None:
        self.path = path
        self.rank = rank
        self.pickle = pickle
        self.contents = contents
        self._head: tuple[int, _Head | None] = -1, None

    def head(self, end: int, make_mesh: MeshMaker) -> "_Head | None":
        """Return what its pickle comes to up to a place."""
        if self._head[0] != end:
            with SourceFile(self.path) as file:
                reader = DTensorReader(file, read_torch_zip(file), self.rank, make_mesh=make_mesh)
                self._head = end, _head(self.pickle.start, end, reader, self.rank)
        return self._head[1]


class _Head(NamedTuple):
    """What a pickle comes to up to some place."""

    halfway: Halfway
    rank: int
    meshes: dict[Record, _Written]


def _head(data: bytes, end: int, reader: DTensorReader, rank: int) -> _Head | None:
    halfway = run_torch_head(data, end, reader.names(ARGUMENT_NAMES))
    return None if halfway is None else _Head(halfway, rank, reader.meshes)


class _Looked(NamedTuple):
    """A file, open, and what is read of it."""

    file: SourceFile
    rank: int
    found: TorchZip
    data: bytes
    """Its pickle."""


class RankStates:
    """Reads the files of ranks."""

    def __init__(self) -> None:
        self._lines = AlikeLines()
        self._known: list[_Known] = []
        self._make_mesh: MeshMaker = lru_cache(_MOST_MESHES)(device_mesh)
        self._fitting: dict[int, tuple[TorchContents, list[TorchLines]]] = {}
        """By the id of contents, directories that have all their records."""

    def read(self, files: Iterable[tuple[Path, int]]) -> Iterator[RankState]:
        """Yield what describes the state in files of `torch.save`; not their data.

        What is read next is read while what has been read is made sense of.

        Parameters
        ----------
        files
            Each, and its rank.

        Raises
        ------
        CheckpointError
            If it is damaged, holds no dict, names what does not belong in a checkpoint, or has two
            entries of one flat name.
        """
        files = list(files)
        ahead = prefetch_depth(files[0][0], here=_AHEAD) if files else 0
        with prefetch_map(files, self._look, ahead, _close) as looks:
            for looked in looks:
                with looked.file:
                    yield self._state(looked)

    def _look(self, of_rank: tuple[Path, int]) -> _Looked:
        path, rank = of_rank
        with ExitStack() as stack:
            file = stack.enter_context(SourceFile(path))
            if file.remote is not None:
                file.remote.keep(_MOST_KEPT_OF_ONE)
            found = read_torch_zip(file, alike=self._lines)
            looked = _Looked(file, rank, found, found.pickle(file))
            stack.pop_all()
        return looked

    def _state(self, looked: _Looked) -> RankState:
        file, rank, found, data = looked
        contents = self._alike(data, file, found, rank)
        if contents is None:
            contents = self._read(data, file, found, rank)
        self._check(contents, found)
        return RankState(file.path, rank, contents, found)

    def _read(self, data: bytes, file: SourceFile, found: TorchZip, rank: int) -> TorchContents:
        trace = Trace() if len(self._known) < _MOST_KNOWN else None
        reader = DTensorReader(file, found, rank, trace, self._make_mesh)
        value = read_torch_pickle(data, found.what, reader.names(ARGUMENT_NAMES), trace)
        contents = contents_of(value, file.path)
        if trace is not None:
            pickle = TracedPickle(data, trace, reader.settled)
            kept = sum(known.pickle.num_bytes for known in self._known)
            if 0 < pickle.num_bytes <= _MOST_KNOWN_BYTES - kept:
                self._known.append(_Known(file.path, rank, pickle, contents))
        return contents

    def _alike(
        self, data: bytes, file: SourceFile, found: TorchZip, rank: int
    ) -> TorchContents | None:
        """Return the contents of a file that this one is like."""
        heads: dict[int, _Head | None] = {}
        # What is run in vain, and then again, takes at most half as long as the whole.
        left = max(len(data) // 2, QUICK_BYTES)
        for place, known in enumerate(self._known):
            ends = known.pickle.common_tail(data)
            one = None if ends is None else known.head(ends[0], self._make_mesh)
            if ends is None or one is None:
                continue
            end = ends[1]
            if end not in heads and end <= left:
                left -= end
                reader = DTensorReader(file, found, rank, make_mesh=self._make_mesh)
                heads[end] = _head(data, end, reader, rank)
            other = heads.get(end)
            if other is not None and known.pickle.goes_on_alike(
                one.halfway, other.halfway, _Same(one, other)
            ):
                # The next file is most like this one.
                self._known.insert(0, self._known.pop(place))
                return known.contents
        return None

    def _check(self, contents: TorchContents, found: TorchZip) -> None:
        """Compare what the pickle says of all tensors with the directory, if it is a new pair."""
        _, fitting = self._fitting.setdefault(id(contents), (contents, []))
        if not any(lines is found.lines for lines in fitting):
            for tensor in contents.tensors.values():
                check_record(local_of(tensor), found)
            fitting.append(found.lines)


def _close(looked: _Looked) -> None:
    looked.file.close()


class _Same:
    """Says whether values of two files mean the same, but for who wrote them."""

    def __init__(self, one: _Head, other: _Head) -> None:
        self._one = one
        self._other = other

    def __call__(self, a: object, b: object) -> bool | None:
        if isinstance(a, Record) and isinstance(b, Record):
            mesh, other = self._one.meshes.get(a), self._other.meshes.get(b)
            if mesh is None or other is None:
                return None if mesh is other else False
            # Nothing else is read of a mesh once it was made, but for its name.
            named = a.name == b.name and not a.args and not b.args
            return named and mesh[0] == other[0] and self._own(mesh[1], other[1])
        if isinstance(a, TorchDTensor) and isinstance(b, TorchDTensor):
            return replace(a, rank=b.rank) == b and self._own(a.rank, b.rank)
        if isinstance(a, TorchTensor | TorchStorage):
            return a == b
        return None

    def _own(self, one: int | None, other: int | None) -> bool:
        """Return whether each is noted as written by the rank that its file's name says."""
        return (one, other) in ((None, None), (self._one.rank, self._other.rank))
