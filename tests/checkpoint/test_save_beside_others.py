"""Saving where other users may write: what they plant is neither followed nor taken over."""

import os
import stat
import tempfile
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from shardspec import load_sharded, save_sharded
from shardspec.errors import CheckpointError


def plant_links(ckpt, private, stop):
    """As another user: put links to a file of the first one where it is about to write."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    while not stop.is_set():
        for name in os.listdir(ckpt):
            if name.startswith((".shardspec", "shard-")) and not os.path.islink(ckpt / name):
                with suppress(OSError):
                    os.unlink(ckpt / name)
                    os.symlink(private, ckpt / name)


def test_another_user_cannot_have_a_save_write_elsewhere(tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o005 != 0o005:
            tmp_path = Path(tempfile.mkdtemp())
            tmp_path.chmod(0o755)
            break
    private, ckpt = tmp_path / "private", tmp_path / "ckpt"
    private.write_text("secret")
    private.chmod(0o600)
    ckpt.mkdir()
    ckpt.chmod(0o777)
    context = get_context("fork")
    stop = context.Event()
    other = context.Process(target=plant_links, args=(ckpt, private, stop))
    other.start()
    refused = 0
    for round_ in range(400):
        if refused and round_ >= 40:
            break
        try:
            save_sharded({"a": torch.ones(300_000)}, ckpt, overwrite=True)
        except CheckpointError:
            refused += 1
    stop.set()
    other.join()
    assert other.exitcode == 0
    assert private.read_text() == "secret"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    # It was in time for some of them.
    assert refused


def test_an_info_of_another_user_gives_no_owner_and_no_mode(tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "sharding_info.json").write_text("planted")
    (tmp_path / "sharding_info.json").chmod(0o666)
    if os.geteuid() == 0:
        os.chown(tmp_path / "sharding_info.json", 65534, 65534)
        save_sharded({"a": torch.ones(3)}, tmp_path, overwrite=True)
        found = {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
        assert found == {(0, 0o644)}


def test_nothing_is_written_through_links_that_others_plant(tmp_path):
    """As where a group may write: all names but the info's are new, and that is replaced."""
    private = tmp_path / "private"
    private.write_text("secret")
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    (ckpt / "sharding_info.json").symlink_to(private)
    planted: list[str] = []
    real = os.open

    def plant(path, flags, mode=0o777, *, dir_fd=None):
        if Path(path).name.startswith(".shardspec-save-") and len(planted) < 20:
            planted.append(str(path))
            Path(path).symlink_to(private)
        return real(path, flags, mode, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", plant)
        with pytest.raises(CheckpointError, match="cannot be written: File exists"):
            save_sharded({"a": torch.ones(3)}, ckpt, overwrite=True)
    save_sharded({"a": torch.ones(3)}, ckpt, overwrite=True)
    assert planted
    assert private.read_text() == "secret"
    assert not (ckpt / "sharding_info.json").is_symlink()
    assert load_sharded(ckpt)["a"].to_global().tolist() == [1.0] * 3
