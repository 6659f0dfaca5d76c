"""What is interrupted: every way to write an output; and which version of it is there then."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardspec import DeviceMesh, merge, reshard
from shardspec.checkpoint.compare.diff import diff_checkpoints
from shardspec.checkpoint.compare.verify import verify_checkpoint
from tests.faults.checks import raised
from tests.faults.samples import SPECS, plain

if TYPE_CHECKING:
    from shardspec.tensor.dtensor import DTensor

__all__ = ["ALL", "SAVE", "Operation", "Stage", "warm"]

_MESH: Final = DeviceMesh(range(6), (2, 3))


@dataclass(frozen=True)
class Operation:
    """A way to write an output from one of the files of a stage."""

    name: str
    act: Callable[[Path, Path, bool], object]
    """Given input, output, and whether the output may be replaced."""
    in_place: bool = False
    """Whether it writes into a directory under its final name, where the info makes it count."""


class Stage:
    """A folder with inputs of several versions, and one output beside nothing else.

    Parameters
    ----------
    place
        A folder.
    versions
        How many inputs there are; they differ in every tensor.
    scale
        How many times as large the largest tensor is.
    """

    def __init__(self, place: Path, versions: int = 2, *, scale: int = 1) -> None:
        self.inputs = [
            plain(place / f"{n}.safetensors", seed=n, scale=scale) for n in range(versions)
        ]
        self.folder = place / "stage"
        self.folder.mkdir()
        self.out = self.folder / "out"

    def clear(self) -> None:
        """Remove the output and all that was left."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def version(self, operation: Operation) -> int | None:
        """Return which input the output holds, to the last bit; None if there is no output."""
        if not os.path.lexists(self.out):
            return None
        if operation.in_place and not (self.out / "sharding_info.json").exists():
            assert raised(lambda: verify_checkpoint(self.out)) is not None
            return None
        assert not verify_checkpoint(self.out).flaws
        for number, path in enumerate(self.inputs):
            if not list(diff_checkpoints(self.out, path)):
                return number
        raise AssertionError("the output is none of the versions")

    def names(self) -> list[str]:
        """Return what lies in the folder of the output, hidden or not, and below."""
        inside = self.folder.rglob("*")
        return sorted(str(path.relative_to(self.folder)) for path in inside)

    def clean(self) -> None:
        """Check that nothing but the output is there, and in it nothing but its files."""
        names = self.names()
        for name in names:
            assert name.split("/")[0] == "out", f"{name} is left"
            assert "tmp" not in name, f"{name} is left"
        if "out/sharding_info.json" in names:
            text = (self.out / "sharding_info.json").read_text()
            for path in self.out.iterdir():
                listed = path.name == "sharding_info.json" or path.name in text
                assert listed, f"{path.name} is left"


def _merge(source: Path, out: Path, overwrite: bool) -> object:
    return merge(source, out, format="safetensors", overwrite=overwrite)


def _unverified(source: Path, out: Path, overwrite: bool) -> object:
    return merge(source, out, format="safetensors", overwrite=overwrite, verify=False)


def _huggingface(source: Path, out: Path, overwrite: bool) -> object:
    return merge(source, out, max_shard_bytes=150, overwrite=overwrite)


def _dcp(source: Path, out: Path, overwrite: bool) -> object:
    return merge(source, out, format="dcp", overwrite=overwrite)


def _torch(source: Path, out: Path, overwrite: bool) -> object:
    return merge(source, out, format="torch", overwrite=overwrite)


def _reshard(source: Path, out: Path, overwrite: bool) -> object:
    return reshard(source, out, device_mesh=_MESH, rules=SPECS, overwrite=overwrite)


def _loaded(source: Path) -> "dict[str, DTensor]":
    from shardspec.checkpoint.job.load import load_sharded

    return load_sharded(source, _MESH, SPECS)


def _save(source: Path, out: Path, overwrite: bool) -> None:
    from shardspec.checkpoint.job.save import save_sharded

    save_sharded(_loaded(source), out, overwrite=overwrite)


def warm(place: Path) -> None:
    """Save once: what torch loads on first use is not for every forked process to load."""
    import torch

    torch.set_num_threads(1)
    folder = place / "warm"
    folder.mkdir()
    _save(plain(folder / "0.safetensors"), folder / "out", False)


ALL: Final = (
    Operation("merge", _merge),
    Operation("merge --no-verify", _unverified),
    Operation("merge --max-shard-size", _huggingface),
    Operation("merge --to dcp", _dcp),
    Operation("merge --to torch", _torch),
    Operation("reshard", _reshard),
)
SAVE: Final = Operation("save_sharded", _save, in_place=True)
