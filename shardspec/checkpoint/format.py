"""What a format is: how it is recognised, read and written, the same members for all of them.

`formats/registry.py` lists the formats that come along, and finds those of other packages.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, Literal, NamedTuple, TypeAlias

from shardspec.checkpoint.catalog import Catalog
from shardspec.checkpoint.runs import Newest
from shardspec.checkpoint.sidecars import model_sidecars
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.checkpoint.targets import Carried, OutputTensor, Target
from shardspec.layout.layout import Layout
from shardspec.mesh.device_mesh import DeviceMesh

Way: TypeAlias = Literal["merged", "sharded"]
"""How an output is written: whole tensors, by `merge`, or shards of a mesh, by `reshard`."""


class OpenOptions(NamedTuple):
    """What a caller says of a checkpoint whose format does not say it."""

    ranks: int | None = None
    """How many ranks have written it."""
    source_rules: Mapping[str, object] | PurePath | str | None = None
    """How they have sharded tensors: pattern of names to spec, or a TOML file of such."""


DEFAULT: Final = OpenOptions()


class FileStart(NamedTuple):
    """How a file begins."""

    name: str
    head: bytes
    """Its first 16 bytes."""
    num_bytes: int

    @property
    def is_zip(self) -> bool:
        """Whether it is a zip, and not a safetensors file with a header of just such a length."""
        return self.head.startswith(b"PK\3\4") and self.head[8:9] != b"{"


class Wanted(NamedTuple):
    """What an output is to hold."""

    name: str
    """Of the output: the last part of its path."""
    way: Way
    tensors: Sequence[OutputTensor]
    """Sorted by their names in the output."""
    carried: Carried
    """Entries that are not tensors."""
    mesh: DeviceMesh
    """The devices to shard for; one device where tensors are written whole."""
    layouts: Mapping[str, Layout]
    """How each tensor is sharded over them, by its name in the output; nothing pending."""
    save: str
    """Names this save: 16 hexadecimal digits, another text for each."""
    metadata: bool = True
    """Whether the metadata of safetensors files goes along."""
    sidecars: bool = True
    """Whether the files beside the weights do."""
    max_shard_bytes: int | None = None
    """Most bytes of tensors in a file, where the format takes a limit."""


def never(_: object) -> bool:
    """Return False."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to write checkpoints: a module of `formats` has one under the name `FORMAT`.

    The first three members are needed to read it, `lay_out` and `writes` to write it.

    Examples
    --------
    >>> from shardspec.checkpoint.formats.registry import formats
    >>> [format.name for format in formats() if format.recognises(["model.safetensors"])]
    ['huggingface']
    """

    name: str
    """As `merge(format=)` and the command line name it."""
    recognises: Callable[[Collection[str]], bool]
    """Returns whether a directory with these names is of this format."""
    open: Callable[[StoragePath, OpenOptions], Catalog]
    """Reads what describes a checkpoint at a directory or file, and not its data."""
    lay_out: Callable[[Catalog, Wanted], Target] | None = None
    """Returns the files of an output, and which boxes they hold; None if it is only read."""
    writes: tuple[Way, ...] = ()
    """How `lay_out` can be asked to write."""
    title: str = ""
    """As text calls it, and the catalogs that `open` returns; by default its name."""
    extensions: tuple[str, ...] = ()
    """How the names of files end that are checkpoints by themselves. If it has any, whole tensors
    are written into one such file, else into a directory."""
    owns: Callable[[str], bool] = never
    """Returns whether a relative name in a directory of this format is of a file of its own, beside
    those that its catalog lists: such files are replaced when the checkpoint is."""
    sidecars: Callable[[StoragePath, Collection[str]], set[str]] = model_sidecars
    """Returns which files of a directory belong to the checkpoint in it beside the weights, given
    their names; they are copied into outputs that are directories."""
    keeps: Literal["tensors", "notes", "values", "objects"] = "values"
    """What it has beside tensors: nothing; what a run notes of itself; entries of the state dict
    that are plain values; or all entries, which are then copied as they are stored."""
    limits_files: bool = False
    """Whether `lay_out` takes `Wanted.max_shard_bytes`."""
    stacks_layers: bool = False
    """Whether Megatron-core saves in it, with a tensor for each weight of all layers."""
    whole_run: str = ""
    """What text calls an output that is made of all that a run has saved, for any number of ranks,
    so that nothing is chosen, named or sharded; empty if it is not."""
    instead: str = ""
    """If it is only read: what to write in place of it."""
    reads_file: Callable[[FileStart], bool] = never
    """Returns whether a file is a checkpoint by itself, or names the others of one."""
    names_others: Callable[[str], bool] = never
    """Returns whether the other files of a checkpoint lie beside a file of this name."""
    part_of: Callable[[StoragePath], StoragePath | None] | None = None
    """Returns the directory of the checkpoint that a file is a part of. By default that is the
    directory of any file whose name is recognised, if `reads_file` is not given."""
    newest: Callable[[StoragePath, Sequence[str]], Newest | None] | None = None
    """Returns the checkpoint that counts in a directory with these names, if it is of a run."""
    nested: bool = False
    """Whether files lie in directories below."""
    takes: tuple[str, ...] = ()
    """The `OpenOptions` that `open` heeds; others are refused."""
    known_by: str = ""
    """Example of a file in its directories, for errors."""

    @property
    def called(self) -> str:
        """What text calls it."""
        return self.title or self.name

    @property
    def one_file(self) -> bool:
        """Whether whole tensors are written into one file."""
        return bool(self.extensions)

    def directory_of(self, path: StoragePath) -> StoragePath | None:
        """Return the directory that a file stands for; None if it stands for itself."""
        if self.part_of is not None:
            return self.part_of(path)
        is_part = self.reads_file is never and self.recognises((path.name,))
        return path.parent if is_part else None
