"""Names that lead elsewhere, and places that cannot be read or written."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from shardspec import DeviceMesh, merge, reshard
from tests.faults.checks import command, one_line, raised, refused, same, tree
from tests.faults.harness import Case
from tests.faults.samples import arrays, index, made, own, plain, split

__all__ = ["paths"]

_RANK: Final = "rank4.safetensors"
_INFO: Final = "sharding_info.json"
_Spoil = Callable[[Path], object]
_NAMES: Final = (
    "",
    ".",
    "..",
    "../rank4.safetensors",
    "../../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "./rank4.safetensors",
    "a/b.safetensors",
    "../own/rank4.safetensors",
    "a\\b",
    "..\\x",
    "\0",
    "rank4.safetensors\0",
    "x" * 300,
    "rank4.safetensors/",
    "rank4.safetensors ",
    "~/x",
    "file:rank4.safetensors",
    "*",
)
"""File names that no checkpoint has."""


def _elsewhere(path: Path) -> None:
    """Replace a file by a link to it outside the checkpoint."""
    outside = path.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _socket(path: Path) -> None:
    path.unlink()
    here = os.getcwd()
    # The name of a socket is short.
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


_KINDS: Final[tuple[_Spoil, ...]] = (
    _elsewhere,
    _circle,
    _dangling,
    _fifo,
    _directory,
    _socket,
    _device,
)


def _named(name: str, place: Path) -> None:
    """Merge a checkpoint of our form whose info names a file so."""
    sample = made()
    sample.write(place / "own")
    sample.file(4)["name"] = name
    (place / "own" / _INFO).write_text(json.dumps(sample.info))
    message = refused(["merge", place / "own", "-o", place / "out"], place)
    assert "root:" not in message


def _indexed(name: str, place: Path) -> None:
    """Merge sharded files whose index names one so."""
    path = index(split(place / "split"))
    table = json.loads(path.read_text("utf-8"))
    table["weight_map"]["step"] = name
    path.write_text(json.dumps(table))
    refused(["merge", place / "split", "-o", place / "out"], place)


def _spoiled(source: Path, name: str, spoil: _Spoil) -> None:
    spoil(source / name if name else source)
    refused(["merge", source, "-o", source.parent / "out"], source.parent)


def _output(place: Path, args: list[Any]) -> None:
    refused(args, place)


def _nul(act: Callable[..., object], source: Path, out: Path) -> None:
    """Try what no command line can say."""
    more = {"device_mesh": DeviceMesh((0, 1), (2,))} if act is reshard else {}
    assert raised(lambda: act(source, out, **more)) is not None


def _harmless(place: Path, args: list[Any], source: Path) -> None:
    """Check that a command writes beside its input and harms nothing, or is refused."""
    before = tree(place)
    code, _, err = command([*args, "--quiet"])
    if code:
        assert code in (2, 3)
        one_line(err)
        assert tree(place) == before
        return
    after = tree(place)
    assert all(at[3] == after[name][3] for name, at in before.items() if name in after)
    code, _, err = command(["merge", source, "-o", place / "again", "--quiet"])
    assert code == 0, f"the input is harmed: {err}"
    same(place / "again", arrays())


def paths(place: Path, whole: bool) -> Iterator[Case]:
    """Try every name and kind of file where the library reads, and where it writes."""
    every = list(_cases(place))
    yield from every if whole else every[::6]


def _cases(place: Path) -> Iterator[Case]:
    numbers = count()

    def fresh() -> Path:
        folder = place / str(next(numbers))
        folder.mkdir()
        return folder

    for name in _NAMES:
        yield Case(f"info names {name[:30]!r}", partial(_named, name, fresh()))
        yield Case(f"index names {name[:30]!r}", partial(_indexed, name, fresh()))
    for spoil in _KINDS:
        kind = spoil.__name__[1:]
        for file in (_RANK, _INFO):
            source = own(fresh() / "own")
            yield Case(f"{file}: {kind}", partial(_spoiled, source, file, spoil))
        source = split(fresh() / "split")
        yield Case(f"index: {kind}", partial(_spoiled, source, index(source).name, spoil))
        if spoil is not _elsewhere:
            source = plain(fresh() / "single.safetensors")
            yield Case(f"single file: {kind}", partial(_spoiled, source, "", spoil))
        for form, files in (("dcp", (".metadata", "__0_0.distcp")), ("whole.pt", ("",))):
            for file in files:
                if file or spoil is not _elsewhere:
                    copy = _copied(place / form, fresh() / form)
                    yield Case(f"{form} {file}: {kind}", partial(_spoiled, copy, file, spoil))
    for stated in (b"../0_0.distc", b"/etc/passwd.", b"a/b_0.distcp", b"__\0_0.distcp"[:12]):
        copy = _copied(place / "dcp", fresh() / "dcp")
        path = copy / ".metadata"
        data = path.read_bytes()
        assert b"__0_0.distcp" in data
        path.write_bytes(data.replace(b"__0_0.distcp", stated))
        yield Case(f".metadata names {stated!r}", partial(_spoiled, copy, "", lambda _: None))
    yield from _outputs(fresh)


def _copied(path: Path, to: Path) -> Path:
    if path.is_dir():
        shutil.copytree(path, to)
    else:
        shutil.copy(path, to)
    return to


def _outputs(fresh: Callable[[], Path]) -> Iterator[Case]:
    """Write over the input in every disguise, and where nothing can be written."""
    disguises: tuple[tuple[str, Callable[[Path], Path]], ...] = (
        ("the file itself", lambda file: file),
        ("by a detour", lambda file: file.parent / "x" / ".." / file.name),
        ("by a link", lambda file: _linked(file, file.parent.parent / "link")),
        ("by a hard link", lambda file: _hard(file, file.parent.parent / "link")),
        ("by a linked folder", lambda f: _linked(f.parent, f.parent.parent / "link") / f.name),
    )
    for label, disguise in disguises:
        for overwrite in (["--overwrite"], []):
            folder = fresh()
            (folder / "in" / "x").mkdir(parents=True)
            file = plain(folder / "in" / "single.safetensors")
            args = ["merge", file, "-o", disguise(file), *overwrite]
            yield Case(f"output = input, {label} {overwrite}", partial(_output, folder, args))
        folder = fresh()
        file = own(folder / "own") / _RANK
        (folder / "own" / "x").mkdir()
        args = ["merge", file.parent, "-o", disguise(file), "--overwrite"]
        yield Case(f"output = file of a rank, {label}", partial(_output, folder, args))
    for name in (_INFO, ".", "", "..", "/"):
        folder = fresh()
        source = own(folder / "own")
        args = ["merge", source, "-o", source / name, "--overwrite"]
        yield Case(f"output = input / {name!r}", partial(_output, folder, args))
        args = ["reshard", source, "-o", source / name, "--mesh", "2", "--overwrite"]
        yield Case(f"resharded output = input / {name!r}", partial(_output, folder, args))
    for name in ("no/out", "file/out", "x" * 300, "loop", "loop/out", "dir", "fifo", "sock"):
        for what in (["merge"], ["reshard", "--mesh", "2"], ["merge", "--max-shard-size", "1MB"]):
            folder = fresh()
            source = plain(folder / "single.safetensors")
            (folder / "file").write_text("x")
            (folder / "loop").symlink_to("loop")
            (folder / "dir").mkdir()
            (folder / "dir" / "notes.txt").write_text("mine")
            os.mkfifo(folder / "fifo")
            (folder / "sock").write_text("x")
            _socket(folder / "sock")
            args = [what[0], source, "-o", folder / name, *what[1:], "--overwrite"]
            yield Case(f"{what}: output {name[:9]!r}", partial(_output, folder, args))
    for where in ("input", "output", "both"):
        for act in (merge, reshard):
            folder = fresh()
            source = plain(folder / "single.safetensors")
            source = folder / "a\0b" if where != "output" else source
            out = folder / "a\0b" if where != "input" else folder / "out"
            yield Case(f"{act.__name__}: NUL in {where}", partial(_nul, act, source, out))
    for device in ("/dev/null", "/dev/full", "/proc/out", "/proc/self/mem", "/sys/out"):
        folder = fresh()
        args = ["merge", plain(folder / "single.safetensors"), "-o", device, "--overwrite"]
        yield Case(f"output {device}", partial(_output, folder, args))
    for like in ("no", "file", "fifo", "dir"):
        for option in ("--rules", "--like"):
            folder = fresh()
            source = plain(folder / "single.safetensors")
            (folder / "file").write_bytes(b"\0")
            (folder / "dir").mkdir()
            os.mkfifo(folder / "fifo")
            more = ["--mesh", "2"] if option == "--rules" else []
            args = ["reshard", source, "-o", folder / "out", option, folder / like, *more]
            yield Case(f"{option} {like}", partial(_output, folder, args))
    for label, make in (("own", own), ("split", split), ("plain", _folder)):
        for name in ("new.safetensors", "new"):
            for what in (["merge"], ["reshard", "--mesh", "2"]):
                folder = fresh()
                source = make(folder / "in")
                args = [what[0], source, "-o", source / name, *what[1:]]
                yield Case(
                    f"{what[0]} {label} into itself as {name}",
                    partial(_harmless, folder, args, source),
                )


def _folder(path: Path) -> Path:
    path.mkdir()
    plain(path / "model.safetensors")
    return path


def _linked(file: Path, link: Path) -> Path:
    link.symlink_to(file)
    return link


def _hard(file: Path, link: Path) -> Path:
    link.hardlink_to(file)
    return link
