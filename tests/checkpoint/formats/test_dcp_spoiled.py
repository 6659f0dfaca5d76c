"""Directories of torch.distributed.checkpoint that are unfinished, cut, changed, or lie."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardspec import merge
from shardspec.checkpoint.compare.inspect import inspect_checkpoint
from shardspec.checkpoint.formats import written_names
from shardspec.errors import CheckpointError
from tests.checkpoint.formats.conftest import Small
from tests.checkpoint.formats.reading import assert_same, read_whole, refused


def test_the_small_one_is_good(small):
    assert_same(read_whole(small.path), small.tensors)
    small.write(small.metadata())
    assert_same(read_whole(small.path), small.tensors)


def test_saves_that_did_not_finish_are_refused(small):
    os.remove(small.path / ".metadata")
    assert refused(small.path) == (
        f"{small.path}: has no .metadata, which is written last; the save did not finish"
    )
    (small.path / "__0.metadata").write_bytes(b"")
    assert refused(small.path) == (
        f"{small.path}: has no .metadata, each rank has one of its own; save with "
        "use_collectives=True"
    )


# --- the metadata cut, changed, and lying


def read_or_none(path):
    """Return every tensor, or None if one clear line refuses them."""
    try:
        return read_whole(path)
    except CheckpointError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1
    return None


NO_PLACE = (
    ".metadata: storage_data has an entry without a name, file, offset or length; it is damaged"
)


def lie(change):
    """Return a case: what a change of torch's own metadata makes of it."""
    return pytest.param(change, id=change.__name__)


def of(metadata, name):
    return metadata.state_dict_metadata[name]


def index_of(metadata, name):
    (found,) = [index for index in metadata.storage_data if index.fqn == name]
    return found


def moved(metadata, name, **changes):
    index = index_of(metadata, name)
    metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)


def chunk_outside(metadata):
    of(metadata, "m.a").size = torch.Size((2, 2))
    return ".metadata: 'm.a': its chunk [0:2, 0:3] is outside of shape [2, 2]; the"


def chunk_of_other_dims(metadata):
    of(metadata, "m.a").size = torch.Size((6,))
    return ".metadata: 'm.a': a chunk at [0, 0] of shape [2, 3] is in a tensor with 1"


def hole(metadata):
    of(metadata, "m.a").size = torch.Size((3, 3))
    return "tensor 'm.a' of shape [3, 3]: no file contains box [2:3, 0:3]; restore"


def chunk_twice(metadata):
    chunks = of(metadata, "m.a").chunks
    chunks.append(replace(chunks[0], sizes=torch.Size((1, 3))))
    return "box [0:1, 0:3]: is [2, 3] of bfloat16 there, but .metadata says [1, 3] of bfloat16"


def no_chunks(metadata):
    of(metadata, "m.a").chunks.clear()
    return "tensor 'm.a' of shape [2, 3]: no file contains box [0:2, 0:3]; restore"


def chunk_without_place(metadata):
    del metadata.storage_data[index_of(metadata, "m.a")]
    return ".metadata: 'm.a': no file contains its chunk [0:2, 0:3]; the metadata is inconsistent"


def other_without_place(metadata):
    del metadata.storage_data[index_of(metadata, "step")]
    return ".metadata: 'step': no file contains this entry; the metadata is inconsistent"


def negative_offset(metadata):
    moved(metadata, "m.a", offset=-1)
    return NO_PLACE


def huge_offset(metadata):
    moved(metadata, "m.a", offset=2**62)
    return "/__0_0.distcp: has "


def past_the_end(metadata):
    last = max(metadata.storage_data.values(), key=lambda info: info.offset)
    last.length += 1
    return "; it was cut short, restore the right one"


def before_the_end(metadata):
    last = max(metadata.storage_data.values(), key=lambda info: info.offset)
    last.length -= 1
    return "/__0_0.distcp: has "


def shared_bytes(metadata):
    moved(metadata, "m.a", offset=metadata.storage_data[index_of(metadata, "m.b")].offset + 3)
    return ".metadata: two entries in __0_0.distcp share byte "


def shorter(metadata):
    moved(metadata, "m.a", length=metadata.storage_data[index_of(metadata, "m.a")].length - 1)
    return "tensor 'm.a', box [0:2, 0:3]: is not a whole zip of torch.save"


def swapped_items(metadata):
    a, c = index_of(metadata, "m.a"), index_of(metadata, "m.c")
    data = metadata.storage_data
    data[a], data[c] = data[c], data[a]
    return "tensor 'm.a', box [0:2, 0:3]: is [4, 3] of float32 there, but .metadata says [2, 3] of"


def tensor_for_object(metadata):
    a, step = index_of(metadata, "m.a"), index_of(metadata, "step")
    data = metadata.storage_data
    data[a], data[step] = data[step], data[a]
    return "tensor 'm.a', box [0:2, 0:3]: is a int there, but .metadata says [2, 3] of bfloat16"


def other_dtype(metadata):
    of(metadata, "m.a").properties.dtype = torch.float16
    return "is [2, 3] of bfloat16 there, but .metadata says [2, 3] of float16"


def compressed(metadata):
    moved(metadata, "m.a", transform_descriptors=["zstd", "x" * 999])
    return ".metadata: entry 'm.a' was transformed when it was written (['zstd', 'xxx"


def parent_folder(metadata):
    moved(metadata, "m.a", relative_path="../__0_0.distcp")
    return ".metadata: file name '../__0_0.distcp' is not a plain name"


def absolute_path(metadata):
    moved(metadata, "m.a", relative_path="/etc/passwd")
    return ".metadata: file name '/etc/passwd' is not a plain name"


def nul_in_a_name(metadata):
    moved(metadata, "m.a", relative_path="a\0b")
    return "is not a plain name"


def long_file_name(metadata):
    moved(metadata, "m.a", relative_path="a" * 5000)
    return ": is missing, but .metadata lists 1 entries"


def half_a_character(metadata):
    moved(metadata, "m.a", relative_path="\ud800")
    return NO_PLACE


def half_a_character_as_name(metadata):
    metadata.state_dict_metadata["\ud800"] = of(metadata, "step")
    return r".metadata: '\ud800': an entry has no name, or is neither a tensor"


def number_as_name(metadata):
    metadata.state_dict_metadata[3] = of(metadata, "step")
    return ".metadata: 3: an entry has no name, or is neither a tensor"


def own_class(metadata):
    metadata.planner_data = Small(Path(), {})
    return f".metadata: the metadata names {Small.__module__}.Small, which does not"


def own_function(metadata):
    metadata.storage_meta = os.getcwd
    return ".metadata: the metadata names posix.getcwd, which does not belong in a checkpoint"


def no_list(metadata):
    metadata.storage_data = None
    return ".metadata: lacks its list of entries or of files; it is damaged"


def negative_size(metadata):
    metadata.state_dict_metadata["m.a"].size = [-2, 3]
    return ".metadata: 'm.a': sizes are not whole numbers from 0"


def grow(metadata, sizes):
    """Have a tensor, and its one chunk, be of another shape."""
    entry = of(metadata, "m.a")
    entry.size = torch.Size(sizes)
    entry.chunks[0] = replace(
        entry.chunks[0], offsets=torch.Size([0] * len(sizes)), sizes=torch.Size(sizes)
    )
    info = metadata.storage_data.pop(index_of(metadata, "m.a"))
    metadata.storage_data[MetadataIndex("m.a", torch.Size([0] * len(sizes)), 0)] = info
    return info.length


def larger_than_its_bytes(metadata):
    length = grow(metadata, (2**40, 2**40))
    return f"its chunk [0:{2**40}, 0:{2**40}] is listed with {length} bytes, which is too few"


def far_larger_than_its_bytes(metadata):
    length = grow(metadata, (2**62,) * 60)
    return f" is listed with {length} bytes, which is too few; the metadata is inconsistent"


LIES = (
    *(larger_than_its_bytes, far_larger_than_its_bytes),
    *(chunk_outside, chunk_of_other_dims, hole, chunk_twice, no_chunks, chunk_without_place),
    *(other_without_place, negative_offset, huge_offset, past_the_end, before_the_end),
    *(shared_bytes, shorter),
    *(swapped_items, tensor_for_object, other_dtype, compressed, parent_folder, absolute_path),
    *(nul_in_a_name, long_file_name, half_a_character, half_a_character_as_name, number_as_name),
    *(own_class, own_function, no_list, negative_size),
)


@pytest.mark.parametrize("change", [lie(change) for change in LIES])
def test_lies_of_the_metadata(small, change):
    metadata = small.metadata()
    due = change(metadata)
    small.write(metadata)
    assert due in refused(small.path)


def test_offsets_that_hold_themselves_many_times_over(small):
    metadata = small.metadata()
    laughs: tuple[object, ...] = ()
    for _ in range(200):
        laughs = (laughs, laughs)
    object.__setattr__(next(iter(metadata.storage_data)), "offset", laughs)
    small.write(metadata)
    assert "an entry without a name, file, offset or length" in refused(small.path)


@pytest.mark.parametrize("sizes", [(10**6,), (2**40, 2**40), (2**62,) * 60])
def test_plans_do_not_believe_in_sizes(small, tmp_path, sizes):
    """They look into no chunk; but a chunk is no larger than the bytes that are listed for it."""
    metadata = small.metadata()
    length = grow(metadata, sizes)
    small.write(metadata)
    plan = partial(merge, small.path, tmp_path / "out", dry_run=True)
    acts: list[Callable[[], object]] = [
        partial(plan, format=form) for form in written_names("merged")
    ]
    acts.append(partial(inspect_checkpoint, small.path))
    for act in acts:
        with pytest.raises(CheckpointError, match=f"is listed with {length} bytes, which is too"):
            act()


def test_what_is_no_metadata(small):
    things: list[object] = [7, [], {"state_dict_metadata": {}}, torch.Size((1,)), Metadata]
    for thing in things:
        small.write(thing)
        message = refused(small.path)
        assert (
            message == f"{small.path}/.metadata: is not metadata of a torch distributed checkpoint"
        )


def test_a_file_with_more_than_is_listed(small):
    """It is another one's, unless torch was told to leave replicas in the files."""
    path = small.path / "__0_0.distcp"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(7))
    assert refused(small.path) == (
        f"{path}: has {size + 7} bytes, but .metadata lists entries up to byte {size}; it is of "
        "another rank or another save, restore the right one"
    )
    metadata = small.metadata()
    chunks = of(metadata, "m.a").chunks
    chunks.append(replace(chunks[0]))
    small.write(metadata)
    assert_same(read_whole(small.path), small.tensors)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_files_that_are_none(small, tmp_path, kind):
    path = small.path / "__0_0.distcp"
    path.rename(tmp_path / "moved")
    if kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    message = refused(small.path)
    assert "outside the checkpoint" in message if kind == "link" else "not a regular" in message
