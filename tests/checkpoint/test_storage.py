"""Storages are known by their members alone: one module each, and nobody asks which one it is."""

import ast
import errno
import os

import pytest

from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.local import LocalPath
from shardspec.checkpoint.storage.object_store import ObjectPath
from shardspec.checkpoint.storage.path import StoragePath
from shardspec.errors import CheckpointError
from tests.sources import FILES, ROOT, nodes_of

STORAGE = ROOT / "checkpoint" / "storage"


def using(matches):
    """Return the modules of which some node matches, by their names in the package."""
    return {str(path.relative_to(ROOT)) for path in FILES if any(map(matches, nodes_of(path)))}


def names_in(node):
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} | {
        inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)
    }


STORAGES = {at.__name__ for at in (StoragePath, LocalPath, ObjectPath)}


def asks_for_a_storage(node):
    asked = {"isinstance", "issubclass", "type"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in asked:
        return bool(STORAGES & names_in(node))
    return isinstance(node, ast.MatchClass) and bool(STORAGES & names_in(node.cls))


def imports_fsspec(node):
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "fsspec"
    return isinstance(node, ast.Import) and any(
        name.name.split(".")[0] == "fsspec" for name in node.names
    )


def test_nobody_asks_which_storage_a_path_is_of():
    assert using(asks_for_a_storage) == {"checkpoint/storage/__init__.py"}


def test_only_object_stores_know_fsspec():
    assert using(imports_fsspec) == {"checkpoint/storage/object_store.py"}


def test_a_storage_is_imported_by_the_modules_that_choose_it():
    one = {f"shardspec.checkpoint.storage.{name}" for name in ("object_store", "local")}

    def imports_one(node):
        return isinstance(node, ast.ImportFrom) and node.module in one

    assert using(imports_one) == {"checkpoint/storage/__init__.py"}


@pytest.fixture(params=["local", "memory://models"])
def home(request, tmp_path):
    """A directory that is not there yet."""
    if request.param == "local":
        return storage_path(tmp_path / "home")
    place = storage_path(f"{request.param}/{tmp_path.name}")
    return place / "home"


def test_files_are_written_listed_read_and_removed_alike_in_every_storage(home):
    assert (home.exists(), home.taken(), home.is_dir(), home.look()) == (False, False, False, None)
    with pytest.raises(FileNotFoundError):
        home.list()
    home.make_directory()
    for name, data in (("b", b"01234"), ("a", b"")):
        (home / name).write(len(data), [data[:2], memoryview(data)[2:]], overwrite=False)
    assert list(home.names()) == sorted(home.names_below()) == ["a", "b"]
    entries = home.list()
    assert {name: (at.kind, at.num_bytes) for name, at in entries.items()} == {
        "a": ("file", 0),
        "b": ("file", 5),
    }
    before = (home / "b").look()
    assert before[:2] == entries["b"][:2]
    assert entries["a"].identity != entries["b"].identity
    with pytest.raises(NotADirectoryError):
        (home / "b").list()
    with (home / "b").open() as file:
        assert (file.path, file.num_bytes, file.read(1, 3)) == (home / "b", 5, b"123")
    (home / "b").write(5, [b"56789"], overwrite=True)
    assert (home / "b").look().identity != before.identity
    assert home.list()["b"].identity != entries["b"].identity
    for _ in range(2):
        (home / "b").unlink()
    assert list(home.names()) == ["a"]


def test_paths_are_joined_and_compared_in_their_storage(home):
    file = home / "sub" / "x.bin"
    assert (file.name, file.suffix, file.parent.parent) == ("x.bin", ".bin", home)
    assert type(file) is type(file.parent) is type(home)
    assert str(file) == f"{home}/sub/x.bin"
    assert storage_path(str(file)) == file
    assert home in file.parents


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_directory_that_cannot_be_listed_is_an_error_of_ours(tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    place = storage_path(tmp_path)
    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(os, "scandir", fail)
    for look in (place.names, place.list, lambda: [*place.names_below()]):
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            look()
