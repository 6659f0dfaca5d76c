"""Reads and writes directories of `torch.distributed.checkpoint` (DCP).

The file ``.metadata``, a pickle, lists the chunks of every tensor and the ``*.distcp`` file of
each. A chunk is a small zip with the bytes of the tensor. Files do not name their
rank, and the metadata has no digests. A swapped file is detected by the lengths, shapes and dtypes
of its chunks. **Swapped or copied files whose chunks agree in these cannot be detected.**

Megatron-core's ``torch_dist`` is such a directory. Before version 0.13 its distributed optimizer
stores tensors **flat**: a tensor is split into blocks, and each data parallel rank has a range of
the elements of a block. Source: metadata.py,
planner.py, filesystem.py, default_planner.py of torch/distributed/checkpoint; strategies/torch.py
and resharding.py of megatron/core/dist_checkpointing.
"""

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Final, NamedTuple

from shardspec.boxes import box_shape
from shardspec.checkpoint import catalog
from shardspec.checkpoint.catalog import FileBox, Outline, StoredBox, StoredObject, Target, box_text
from shardspec.checkpoint.convert.sidecars import WITHOUT_SIDECARS, model_sidecars
from shardspec.checkpoint.formats import Format, OpenOptions, Wanted
from shardspec.checkpoint.storage.checksums import crc32_of, crc_text
from shardspec.checkpoint.storage.path import SourceFile, StoragePath, file_inside
from shardspec.checkpoint.storage.reading import prefetch_map
from shardspec.checkpoint.storage.strict_json import parse_json
from shardspec.checkpoint.torch_files import unpickler, values
from shardspec.checkpoint.torch_files.dcp_metadata import (
    METADATA_NAME,
    StoredChunk,
    is_text,
    outline_of,
    read_metadata,
)
from shardspec.checkpoint.torch_files.dcp_target import dcp_target
from shardspec.checkpoint.torch_files.dtensors import read_torch
from shardspec.checkpoint.torch_files.states import (
    StateTensor,
    flat_contents,
    plain_value,
    whole_tensor,
)
from shardspec.checkpoint.torch_files.unpickler import Record
from shardspec.checkpoint.torch_files.values import tensor_place
from shardspec.checkpoint.torch_files.zip_reader import read_torch_zip
from shardspec.dtypes import dtype_name, item_bytes
from shardspec.errors import CheckpointError, DTypeError
from shardspec.resharding.state import KeyPath

_OF_A_RANK: Final = re.compile(r"__(\d{1,9})_\d+\.distcp")
_OWN_METADATA: Final = re.compile(r"__\d+\.metadata")
"""Metadata of one rank, written with use_collectives=False."""
_OBJECT_OF_MEGATRON: Final = re.compile(r"/shard_[0-9.]+_[0-9.]+\Z")
"""End of the names of Megatron-core's objects, such as ``/shard_0.1_4.2``."""
_MEGATRON: Final = frozenset(("common.pt", "metadata.json"))
"""Non-weight files of Megatron-core; it writes both."""
_LIGHTNING: Final = "meta.pt"
_MAX_METADATA_BYTES: Final = 1 << 20
"""Bytes read of Megatron-core's ``metadata.json``."""
_OF_OPTIMIZER: Final = re.compile(r"optimizer\.state\.(exp_avg|exp_avg_sq|param|fp32_param)\.")


class _DcpCatalog(catalog.Catalog):
    """A DCP directory; nested names are joined by dots, as in torch.

    A pickled entry may contain tensors: these are listed too, but not by `as_stored`.
    """

    def __init__(
        self,
        directory: StoragePath,
        tensors: Mapping[str, Outline[StoredChunk]],
        files: Sequence[StoragePath],
        inside: "_Inside",
        facts: catalog.CheckpointFacts,
        as_stored: "_DcpCatalog | None" = None,
    ) -> None:
        names = tensors.keys() | inside.tensors.keys()
        listed = (directory / METADATA_NAME, *files)
        super().__init__(FORMAT.called, directory, names, listed, None, inside.values, facts)
        self._outlines, self._inside, self._as_stored = tensors, inside, as_stored

    def as_stored(self) -> catalog.Catalog:
        """Return a view that lists pickled entries, not the tensors inside them."""
        stored = self._as_stored
        if stored is None:
            return self
        return stored.with_facts(replace(stored.facts, snapshot=self.facts.snapshot))

    def outline(self, name: str) -> Outline[FileBox]:
        """Return shape, dtype and boxes of a tensor from ``.metadata``; opens no chunk."""
        if (pickled := self._inside.tensors.get(name)) is not None:
            return pickled
        return self._outlines[name]

    def origin(self, name: str) -> Hashable:
        """Return the file positions of a tensor's chunks; equal for tied tensors."""
        if name in self._inside.tensors:
            return super().origin(name)
        boxes = self._outlines[name].boxes
        return frozenset((chunk.path, chunk.place.offset, chunk.box) for chunk in boxes)

    def _look_up(self, name: str) -> catalog.StoredTensor:
        """Return a tensor with file offsets; reads the zip header of each chunk, and checks it."""
        if (pickled := self._inside.tensors.get(name)) is not None:
            return pickled
        outline = self._outlines[name]
        read = partial(_read_chunk, outline)
        with prefetch_map(outline.boxes, read, self.directory.files_ahead()) as boxes:
            return catalog.StoredTensor(name, outline.shape, outline.dtype, None, (), tuple(boxes))


def _read_chunk(outline: Outline[StoredChunk], chunk: StoredChunk) -> StoredBox:
    label = f"{chunk.path}: tensor {outline.name!r}, box {box_text(chunk.box)}"
    with chunk.path.open() as file:
        archive = read_torch_zip(file, chunk.place.offset, chunk.place.num_bytes, label)
        value = read_torch(archive, archive.pickle(file))
        actual, expected = f"a {type(value).__name__}", f"{list(chunk.stored)} of {outline.dtype}"
        if isinstance(value, values.TorchTensor) and value.placed is None:
            actual = f"{list(value.shape)} of {value.dtype}"
        if not isinstance(value, values.TorchTensor) or actual != expected:
            raise CheckpointError(
                f"{label}: is {actual} there, but {METADATA_NAME} says {expected}; the file is "
                "from another save, restore the right one"
            )
        place = tensor_place(value, file, archive)
    if place.strides is not None and chunk.stored != box_shape(chunk.box):
        raise CheckpointError(f"{label}: a range of a flat tensor has strides; the file is damaged")
    at = place.offset + chunk.start * item_bytes(outline.dtype)
    return StoredBox(chunk.box, (), chunk.rank, chunk.path, at, place.digest, place.strides)


class _Inside(NamedTuple):
    """The tensors and values in pickled entries, by dotted names as ``optim.state.0.exp_avg``."""

    tensors: Mapping[str, catalog.StoredTensor]
    values: Mapping[str, object]
    paths: Mapping[str, KeyPath]
    of_entry: Mapping[str, Sequence[catalog.StoredTensor]]
    """Tensors in each entry."""


def _look_inside(
    entries: Mapping[str, StoredObject],
    keys: Mapping[str, KeyPath],
    outside: Collection[str],
    ranks: Mapping[StoragePath, int],
) -> _Inside:
    """Unpickle the entries that are not tensors; return their contents by dotted names."""
    tensors: dict[str, catalog.StoredTensor] = {}
    extras: dict[str, object] = {}
    paths: dict[str, KeyPath] = {}
    of_entry: dict[str, list[catalog.StoredTensor]] = {}
    groups = outside, tensors, extras
    for name, place in entries.items():
        at = keys.get(name, (name,))
        with place.path.open() as file:
            archive = read_torch_zip(file, *place[1:], f"{place.path}: entry {name!r}")
            try:
                value = read_torch(archive, archive.pickle(file))
                if _OBJECT_OF_MEGATRON.search(name):
                    # Only Megatron uses these, by name.
                    plain = plain_value(value, archive)
                    if not catalog.is_plain_entry(plain):
                        plain = catalog.OpaqueValue("an object of Megatron", _digest(file, place))
                    extras[name] = plain
                    continue
                contents = flat_contents(value, at, place.path)
                for inner in (*contents.tensors, *contents.extras):
                    if any(inner in names for names in groups) or (
                        inner != name and inner in entries
                    ):
                        raise unpickler.PickleError(f"{inner!r} is another entry, or in one")
            except unpickler.PickleError as error:
                # It can be copied, but may have any contents.
                text = f"a pickle that is not read: {error}"
                extras[name] = catalog.OpaqueValue(text, _digest(file, place), tensors=True)
                continue
            for inner, tensor in contents.tensors.items():
                if tensor.shape == tensor.global_shape:
                    unsharded = StateTensor(tensor, tensor_place(tensor, file, archive))
                    tensors[inner] = whole_tensor(inner, place.path, unsharded, ranks[place.path])
                    of_entry.setdefault(name, []).append(tensors[inner])
                else:
                    text = f"a part of a tensor of shape {list(tensor.global_shape)}"
                    extras[inner] = catalog.OpaqueValue(text, _digest(file, place), tensors=True)
            for inner, part in contents.extras.items():
                plain = plain_value(part, archive)
                if isinstance(plain, catalog.OpaqueValue) and plain.digest is None:
                    plain = replace(plain, digest=_digest(file, place))
                extras[inner] = plain
            paths |= contents.paths
    return _Inside(tensors, extras, paths, of_entry)


def _digest(file: SourceFile, place: StoredObject) -> str:
    """Return a digest of the pickled bytes of an entry, to compare it with another checkpoint's."""
    crc = crc32_of(file, place.offset, place.num_bytes)
    return f"{place.num_bytes} bytes of CRC-32 {crc_text(crc)}"


@unpickler.no_collection()
def _open(directory: StoragePath, _: OpenOptions) -> catalog.Catalog:
    """Read the metadata, and check that the listed files exist and are long enough."""
    path = file_inside(directory, METADATA_NAME, directory)
    if not path.exists():
        why = "which is written last; the save did not finish"
        if any(map(_OWN_METADATA.fullmatch, directory.names())):
            why = "each rank has one of its own; save with use_collectives=True"
        raise CheckpointError(f"{directory}: has no {METADATA_NAME}, {why}")
    entries, places, flat, keys = read_metadata(path)
    by_file: dict[StoragePath, list[StoredObject]] = {}
    for place in places.values():
        by_file.setdefault(place.path, []).append(place)
    files = sorted(by_file, key=attrgetter("name"))
    matches = map(_OF_A_RANK.fullmatch, (file.name for file in files))
    ranks = {
        file: int(match[1]) if match else number
        for number, (file, match) in enumerate(zip(files, matches, strict=True))
    }
    tensors: dict[str, Outline[StoredChunk]] = {}
    objects: dict[str, StoredObject] = {}
    repeated = False
    for name, entry in entries.items():
        try:
            match entry:
                case Record(name="TensorStorageMetadata") if is_text(name):
                    tensors[name], twice = outline_of(name, entry, places, ranks, flat.get(name))
                    repeated |= twice
                case Record(name="BytesStorageMetadata") if is_text(name):
                    if (name, None) not in places:
                        raise ValueError("no file contains this entry")
                    objects[name] = places[name, None]
                case _:
                    raise ValueError("an entry has no name, or is neither a tensor nor bytes")
        except (TypeError, ValueError) as error:
            # The text of a TypeError is Python's, and not about the file.
            problem = "it is not as torch writes it" if isinstance(error, TypeError) else error
            raise CheckpointError(
                f"{path}: {name!r:.200}: {problem}; the metadata is inconsistent, save again"
            ) from None
    for name, tensor in tensors.items():
        match = _OF_OPTIMIZER.match(name)
        model = tensors.get(name[match.end() :]) if match else None
        if model and tensor.shape != model.shape and prod(tensor.shape) == prod(model.shape):
            raise CheckpointError(
                f"{path}: tensor {name!r} is {list(tensor.shape)}, but the model's is "
                f"{list(model.shape)}, and mcore_data does not record how it was flattened; "
                "convert it with Megatron's own tools to fully_reshardable"
            )
    for file in files:
        # Older versions could store replicas too; only one place is listed.
        _check_file(file, by_file[file], exact=not repeated)
    unread = {name: _unread(tensor) for name, tensor in tensors.items() if not _is_read(tensor)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in unread}
    inside = _look_inside(objects, keys, {*tensors, *unread}, ranks)
    inside = inside._replace(values={**inside.values, **unread})
    paths = {name: keys[name] for name in (*tensors, *objects) if name in keys}
    facts = catalog.CheckpointFacts(objects=objects, pickled=inside.of_entry, paths=paths)
    outside = _Inside({}, {**objects, **unread}, {}, {})
    as_stored = _DcpCatalog(directory, tensors, files, outside, facts)
    paths = {**{name: keys[name] for name in tensors if name in keys}, **inside.paths}
    facts = catalog.CheckpointFacts(paths=paths)
    return _DcpCatalog(directory, tensors, files, inside, facts, as_stored)


def _is_read(outline: Outline[StoredChunk]) -> bool:
    try:
        dtype_name(outline.dtype)
    except DTypeError:
        return False
    return True


def _unread(outline: Outline[StoredChunk]) -> catalog.OpaqueValue:
    """Return a placeholder for a tensor whose dtype is not supported, such as a quantized one."""
    chunks = sorted((chunk.place for chunk in outline.boxes), key=attrgetter("path", "offset"))
    digests = [str(outline.shape)]
    for place in chunks:
        with place.path.open() as file:
            digests.append(_digest(file, place))
    text = f"a tensor of {outline.dtype}, which is not supported; cast it before saving"
    return catalog.OpaqueValue(text, ", ".join(digests), tensors=True)


def _check_file(path: StoragePath, places: Sequence[StoredObject], *, exact: bool) -> None:
    if not path.exists():
        raise CheckpointError(
            f"{path}: is missing, but {METADATA_NAME} lists {len(places)} entries in it; restore "
            "it or save again"
        )
    with path.open() as file:
        num_bytes = file.num_bytes
    ranges = sorted((place.offset, place.offset + place.num_bytes) for place in places)
    for (_, end), (start, _) in pairwise(ranges):
        if start < end:
            raise CheckpointError(
                f"{path.parent / METADATA_NAME}: two entries in {path.name} share byte {start}; "
                "the metadata is inconsistent, save again"
            )
    end = ranges[-1][1]
    if end > num_bytes or (exact and end < num_bytes):
        why = "was cut short" if end > num_bytes else "is of another rank or another save"
        raise CheckpointError(
            f"{path}: has {num_bytes} bytes, but {METADATA_NAME} lists entries up to byte {end}; "
            f"it {why}, restore the right one"
        )


def _recognizes(names: Collection[str]) -> bool:
    parts = (_OF_A_RANK, _OWN_METADATA)
    return METADATA_NAME in names or any(own.fullmatch(name) for own in parts for name in names)


def _sidecars(directory: StoragePath, names: Collection[str]) -> set[str]:
    """Return the names to copy into outputs: config, tokenizer, ``common.pt`` of Megatron..."""
    run = {_LIGHTNING, *(_MEGATRON if set(names) >= _MEGATRON else ())}
    return model_sidecars(directory, names) | run.intersection(names)


def _lay_out(source: catalog.Catalog, output: Wanted) -> Target:
    if output.sidecars and source.home == source.directory:
        _check_megatron(source, frozenset(source.directory.names()))
    carried = output.carried
    return dcp_target(output.mesh, output.tensors, output.layouts, carried.values, carried.paths)


def _check_megatron(source: catalog.Catalog, names: frozenset[str]) -> None:
    """Refuse a source whose Megatron files are incomplete: Megatron could not load the output."""
    directory = source.directory
    megatron = any(map(_OBJECT_OF_MEGATRON.search, source.facts.objects))
    description: object = None
    if "metadata.json" in names:
        path = file_inside(directory, "metadata.json", directory)
        with path.open() as file:
            data = file.read(0, min(file.num_bytes, _MAX_METADATA_BYTES))
        # Other tools have files of this name too.
        if megatron or b'"sharded_backend"' in data:
            description = parse_json(data, path, "description")
    if description is None and not megatron:
        return
    backend = description.get("sharded_backend") if isinstance(description, dict) else None
    problem = f"metadata.json says sharded_backend {backend!r}, and not 'torch_dist'"
    if missing := min(_MEGATRON - names, default=""):
        problem = f"{missing} is missing"
    if missing or backend != "torch_dist":
        raise CheckpointError(
            f"{directory}: {problem}, and Megatron-core would not load what is written; restore "
            "it, or write the tensors alone with ",
            WITHOUT_SIDECARS,
        )
    with file_inside(directory, "common.pt", directory).open() as file:
        read_torch_zip(file)


FORMAT: Final = Format(
    name="dcp",
    title="torch distributed checkpoint",
    recognizes=_recognizes,
    open=_open,
    lay_out=_lay_out,
    writes=("merged", "sharded"),
    owns=lambda name: _recognizes((name,)),
    sidecars=_sidecars,
    keeps="objects",
    stacks_layers=True,
    known_by=METADATA_NAME,
)
