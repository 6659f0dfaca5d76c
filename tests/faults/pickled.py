"""Pickles that would run code, and files that are small outside and large inside."""

import pickletools
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from tests.faults.checks import command, one_line, refused, tree
from tests.faults.harness import Case

__all__ = ["bombs", "code"]

_MARK: Final = "ran"
_GLOBALS: Final = (
    "os system",
    "posix system",
    "nt system",
    "os popen",
    "os execv",
    "subprocess Popen",
    "subprocess check_output",
    "subprocess getoutput",
    "builtins eval",
    "builtins exec",
    "builtins __import__",
    "builtins getattr",
    "builtins compile",
    "builtins open",
    "builtins globals",
    "__builtin__ eval",
    "runpy run_path",
    "runpy _run_code",
    "pickle loads",
    "_pickle loads",
    "marshal loads",
    "types FunctionType",
    "functools partial",
    "functools reduce",
    "operator attrgetter",
    "operator methodcaller",
    "ctypes CDLL",
    "webbrowser open",
    "pty spawn",
    "shutil rmtree",
    "importlib import_module",
    "code InteractiveInterpreter",
    "timeit timeit",
    "cProfile run",
    "pdb run",
    "torch load",
    "torch.hub load",
    "torch.jit load",
    "torch._utils _rebuild_tensor_v3 os",
    "torch.storage._load_from_bytes os.system",
    "collections OrderedDict.__init__.__globals__",
    "torch.serialization os.system",
    "numpy load",
    "numpy.core.multiarray _reconstruct.__globals__",
    "torch.distributed.checkpoint.metadata Metadata.__init__.__globals__",
    "__main__ payload",
)
"""Module and name of what would run: with these alone, files were made that take a machine over."""


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _global(name: str) -> bytes:
    module, _, rest = name.partition(" ")
    return f"c{module}\n{rest}\n".encode()


def _stack_global(name: str) -> bytes:
    module, _, rest = name.partition(" ")
    return _text(module) + _text(rest) + b"\x93"


def _called(name: str, argument: str, how: int) -> bytes:
    """Return what leaves on the stack the result of a call, by one of the ways there are."""
    module, _, rest = name.partition(" ")
    one = _text(argument)
    match how % 6:
        case 0:
            return _global(name) + one + b"\x85R"
        case 1:
            return _stack_global(name) + one + b"\x85R"
        case 2:
            return b"(" + one + f"i{module}\n{rest}\n".encode()
        case 3:
            return b"(" + _global(name) + one + b"o"
        case 4:
            return _global(name) + one + b"\x85\x81"
        case _:
            return _global(name) + one + b"\x85}\x92"


def _set_state(name: str, argument: str) -> bytes:
    """Return a dict whose state is set by what the name gives."""
    return b"ccollections\nOrderedDict\n)R" + _called(name, argument, 0) + b"b"


def _rewritten(path: Path, out: Path, pickle: bytes, *, deflate: bool = False) -> None:
    """Write a torch file again with another pickle in it."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for record in old.infolist():
            data = old.read(record)
            if record.filename.endswith("/data.pkl"):
                data = pickle
            new.writestr(record.filename, data, zipfile.ZIP_DEFLATED if deflate else None)


def _run(source: Path, folder: Path, how: int) -> None:
    mark = folder / _MARK
    before = tree(folder)
    # Objects beside tensors are left out; here are no others, and so there is no output.
    left_out = source.suffix == ".pt" and how % 6 in (0, 1, 4)
    says = "has no tensor" if left_out else "nothing of it was run"
    refused(["merge", source, "-o", folder / "out"], folder, says)
    for what in ("inspect", "verify"):
        code, _, err = command([what, source])
        if left_out:
            assert (code, err) == (0, "")
        else:
            assert code in (2, 3)
            one_line(err)
    assert not mark.exists(), "code was run"
    assert tree(folder) == before


def code(place: Path, whole: bool) -> Iterator[Case]:
    """Put every call, by every opcode that calls, into a torch file and into `.metadata`."""
    ways = range(6) if whole else (0,)
    numbers = iter(range(10**6))
    for turn, name in enumerate(_GLOBALS):
        for way in ways if whole or turn % 5 == 0 else ():
            how = way if whole else turn
            folder = place / f"code{next(numbers)}"
            folder.mkdir()
            shown = _called(name, f"touch {folder / _MARK}", how)
            other = _set_state(name, f"touch {folder / _MARK}")
            for label, body in (("called", shown), ("as state", other)):
                pickle = b"\x80\x04" + b"}" + _text("w") + body + b"s."
                if label == "as state" and how:
                    continue
                where = folder / label
                where.mkdir()
                source = where / "model.pt"
                _rewritten(place / "whole.pt", source, pickle)
                yield Case(
                    f"{name} {label}, way {how}, in a torch file",
                    partial(_run, source, where, how),
                )
                source.unlink()
                shutil.copytree(place / "dcp", where / "dcp")
                (where / "dcp" / ".metadata").write_bytes(pickle)
                yield Case(
                    f"{name} {label}, way {how}, .metadata",
                    partial(_run, where / "dcp", where, how),
                )
                shutil.rmtree(folder / label)
            shutil.rmtree(folder)


def _huge_pickles(many: int) -> Iterator[tuple[str, bytes]]:
    """Yield pickles that ask for more than they are."""
    yield "long text", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x."
    yield "long bytes", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x."
    yield "long bytearray", b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b"x."
    yield "long frame", b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"."
    yield "long number", b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01."
    yield "far memo", b"\x80\x04N" + b"r" + struct.pack("<I", (1 << 32) - 1) + b"."
    yield (
        "laughs",
        b"\x80\x04]" + b"".join(b"q%c" % n + b"]" + b"h%c" % n * 9 for n in range(99)) + b".",
    )
    yield "lists", b"\x80\x04" + b"]" * 2 * many + b"a" * (2 * many - 1) + b"."
    yield "dicts", b"\x80\x04" + b"}N" * many + b"}" + b"s" * many + b"."
    yield "tuples", b"\x80\x04N" + b"\x85" * 3 * many + b"."
    yield "copies", b"\x80\x04N" + b"2" * 9 * many + b"."
    yield "marks", b"\x80\x04" + b"(" * 9 * many + b"."
    yield "doubled tuples", b"\x80\x04N" + b"2\x86" * 3 * many + b"."
    yield "sets", b"\x80\x04" + b"\x8f" * 3 * many + b"."
    yield "many texts", b"\x80\x04" + b"\x8c\x01a\x94" * 2 * many + b"."


def _with(place: Path, change: Callable[[bytes], bytes]) -> bytes:
    """Return the pickle of the sample, changed."""
    with zipfile.ZipFile(place / "whole.pt") as old:
        (name,) = (n for n in old.namelist() if n.endswith("/data.pkl"))
        return change(old.read(name))


def _zeros(path: Path, sample: Path, record: str, size: int) -> None:
    """Write a torch file in which one record is zeros that are packed a thousandfold."""
    with zipfile.ZipFile(sample) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            if not info.filename.endswith(record):
                new.writestr(info.filename, old.read(info))
                continue
            packed = zipfile.ZipInfo(info.filename)
            packed.compress_type = zipfile.ZIP_DEFLATED
            with new.open(packed, "w", force_zip64=True) as out:
                for _ in range(size >> 20):
                    out.write(bytes(1 << 20))


def _sparse(path: Path, sample: Path, size: int) -> None:
    """Write a torch file whose pickle is a hole of the disk, stored as it is."""
    with zipfile.ZipFile(sample) as old:
        names = [name for name in old.namelist() if name.endswith("/data.pkl")]
    with zipfile.ZipFile(path, "w") as new:
        new.writestr(names[0], b"\x80\x02" + bytes(1000))
    data = path.read_bytes()
    with path.open("wb") as file:
        start = 30 + len(names[0])
        file.write(data[:18] + struct.pack("<II", size, size) + data[26 : start + 1002])
        file.seek(start + size)
        tail = bytearray(data[start + 1002 :])
        tail[20:28] = struct.pack("<II", size, size)
        end = tail.rindex(b"PK\5\6")
        tail[end + 16 : end + 20] = struct.pack("<I", start + size)
        file.write(tail)


def _overlapping(path: Path, sample: Path) -> None:
    """Write a torch file in which many records are the same bytes."""
    data = bytearray(sample.read_bytes())
    end = data.rindex(b"PK\5\6")
    count, size, start = (
        struct.unpack("<H", data[end + 10 : end + 12])[0],
        *struct.unpack("<II", data[end + 12 : end + 20]),
    )
    directory = bytes(data[start : start + size])
    copies = 2000
    tail = bytearray(data[end:])
    tail[8:12] = struct.pack("<HH", count * copies & 0xFFFF, count * copies & 0xFFFF)
    tail[12:16] = struct.pack("<I", size * copies)
    path.write_bytes(bytes(data[:start]) + directory * copies + bytes(tail))


def bombs(place: Path, whole: bool) -> Iterator[Case]:
    """Ask for much: packed zeros, holes, records on one another, pickles that grow, vast shapes."""
    sample = place / "whole.pt"
    folder = place / "bombs"
    folder.mkdir()
    source = folder / "model.pt"

    def case(label: str) -> Case:
        return Case(label, partial(refused, ["merge", source, "-o", folder / "out"], folder))

    for record in ("/data.pkl", "/data/0", "/version", "/byteorder") if whole else ("/data/0",):
        _zeros(source, sample, record, 1 << 30 if record == "/data.pkl" else 1 << 22)
        yield case(f"packed zeros as {record}")
    for size in (300 << 20, (1 << 32) - 1000):
        _sparse(source, sample, size)
        yield case(f"a hole of {size >> 20} MiB as pickle")
    _overlapping(source, sample)
    yield case("records on one another")
    for label, pickle in _huge_pickles(500_000 if whole else 50_000):
        _rewritten(sample, source, pickle)
        yield case(f"pickle: {label}")
        _rewritten(sample, source, pickle, deflate=True)
        yield case(f"packed pickle: {label}")
    for label, pickle in _huge_pickles(500_000) if whole else ():
        shutil.copytree(place / "dcp", folder / "dcp")
        (folder / "dcp" / ".metadata").write_bytes(pickle)
        yield Case(
            f".metadata: {label}",
            partial(refused, ["merge", folder / "dcp", "-o", folder / "out"], folder),
        )
        shutil.rmtree(folder / "dcp")
    for label, number in (("sizes", 8), ("sizes", 7), ("sizes", 5)):
        for large in (1 << 40, 1 << 62, (1 << 63) - 1):
            pickle = _with(place, partial(_enlarged, number, large))
            _rewritten(sample, source, pickle)
            yield case(f"{label}: {large} for {number}")


def _enlarged(number: int, large: int, pickle: bytes) -> bytes:
    """Put a large number wherever the pickle has a small one."""
    out = b""
    found = [(opcode, argument, at or 0) for opcode, argument, at in pickletools.genops(pickle)]
    ends = [*(at for _, _, at in found[1:]), len(pickle)]
    for (opcode, argument, at), end in zip(found, ends, strict=True):
        if opcode.name in ("BININT1", "BININT", "BININT2") and argument == number:
            out += b"\x8a\x08" + struct.pack("<q", large)
        else:
            out += pickle[at:end]
    return out
