"""Random calls of every command: each ends with what was asked, or with one line of an error."""

import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Final

from click import Context
from click.testing import CliRunner

from shardspec.cli.main import cli
from tests.faults.forks import DONE, Fork
from tests.faults.harness import Case
from tests.faults.samples import plain

__all__ = ["calls"]

_MOST_SECONDS: Final = 10
"""Of the processor, for one call."""
_ALL: Final = 3000
_SOME: Final = 30

_IMPORTED: Final = (
    *("networkx", "numpy", "rich.console", "rich.progress", "rich.table"),
    *(
        "shardspec.checkpoint.convert.output",
        "shardspec.checkpoint.compare.inspect",
        "shardspec.checkpoint.compare.verify",
    ),
    *("shardspec.explorer", "shardspec.families.maps", "shardspec.interop.notations"),
    *("shardspec.layout.converter", "shardspec.layout.transitions", "shardspec.layout.picture"),
)

_ODD: Final = (
    "",
    "0",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1e999",
    "9" * 40,
    "9" * 5000,
    "x",
    ",",
    "=",
    "[",
    "\x1b[31m\u202e",
    "\udcff",
    "٣",
    "é" * 300,
    "a\nb",
    "../..",
    "/dev/null",
    "/proc/self/mem",
    "s3://",
    "-",
)


class _Random(Random):
    """What is drawn for one call mostly fits together: so many mesh axes and dims."""

    axes = 1
    dims = 1

    def begin(self) -> None:
        """Draw what holds for one call."""
        self.axes = self.choice((1, 1, 2, 2, 2, 3, 3, 4, 6, 10))
        self.dims = self.choice((0, 1, 2, 2, 2, 3, 4, 8, 64))


def _axes(random: _Random) -> str:
    count = random.axes if random.random() < 0.9 else random.choice((1, 2, 12, 40))
    if random.random() < 0.3:
        names = (f"{random.choice('abcdxyz')}{axis}" for axis in range(count))
        return ",".join(f"{name}={_size(random)}" for name in names)
    return "x".join(_size(random) for _ in range(count))


def _size(random: _Random) -> str:
    return str(random.choice((1, 1, 2, 2, 2, 3, 4, 7, 8, 64, 1024)))


def _shape(random: _Random) -> str:
    count = random.dims if random.random() < 0.9 else random.choice((0, 1, 2, 70))
    sizes: tuple[int, ...] = (0, 1, 1, 2, 2, 3, 7, 8, 64, 1000, 4096, 2**40, 2**63 - 1)
    if count > 4 or random.random() < 0.8:
        sizes = sizes[1:-2] if count < 5 else (1, 1, 2, 3)
    return "x".join(str(random.choice(sizes)) for _ in range(count))


def _spec(random: _Random) -> str:
    if random.random() < 0.85:
        return _right_spec(random)

    def axes() -> str:
        bare = "".join(random.choice("0123") for _ in range(random.choice((1, 1, 2, 3, 9))))
        return random.choice((bare, f"({random.choice(('a0', '10', '0,1', '9' * 5000))})"))

    dims = ("R", "R", "S" + axes())
    text = ",".join(random.choice(dims) for _ in range(random.choice((0, 1, 2, 2, 2, 3, 4, 8, 70))))
    if random.random() < 0.2:
        text += "|P" + random.choice(("", "avg", "max", "prod", "no")) + axes()
    return f"[{text}]" if random.random() < 0.95 else text


def _parts(random: _Random) -> str:
    if random.random() < 0.9:
        return ""
    parts = (
        "{4,2,2}",
        "{2,2/2}",
        "*2",
        "*128",
        "{1,1}*3",
        "{0}",
        "*0",
        "{" + "9" * 5000 + "}",
        "{",
    )
    return random.choice(parts)


def _right_spec(random: _Random) -> str:
    axes = list(range(random.axes))
    random.shuffle(axes)
    dims: list[list[int]] = [[] for _ in range(random.dims)]
    pending = [axis for axis in axes if random.random() < 0.1]
    for axis in axes:
        if dims and axis not in pending and random.random() < 0.7:
            random.choice(dims[:9]).append(axis)
    text = ",".join(f"S{''.join(map(str, cut))}{_parts(random)}" if cut else "R" for cut in dims)
    return f"[{text}|P{''.join(map(str, pending))}]" if pending else f"[{text}]"


def _ids(random: _Random) -> str:
    ids = list(range(random.choice((1, 2, 4, 8, 64, 5000))))
    random.shuffle(ids)
    return ",".join(map(str, ids))


def _numbers(random: _Random) -> str:
    count = random.choice((1, 1, 2, 3))
    return ",".join(random.choice(("0", "1e-6", "3", "1e300", "-1", "x")) for _ in range(count))


def _small(random: _Random) -> str:
    return random.choice(("0", "1", "2", "3", "7", "100", "1000", "64MiB", "1.5kB", "9" * 25))


def _any_of(*values: str) -> Callable[[_Random], str]:
    return lambda random: random.choice(values)


_LINKS = _any_of(
    "unit",
    "h100-nvswitch",
    "tpu-v5e,unit",
    "ib-ndr-per-gpu,h100-nvswitch",
    "none",
    "1:1,1e-5:0",
    "1:",
    "PLACE/none.json",
)
_DTYPE = _any_of("bf16", "F32", "int8", "bool", "complex64", "fp8", "object", "9" * 300)
_PATTERN = _any_of("*", "w*", "nothing", "[", "(", "(a+)+$", "\\1", "?" * 200)

_Values = dict[str, Callable[[_Random], str] | None]
_TENSOR: Final[_Values] = {"--shape": _shape, "--dtype": _DTYPE}
_CLUSTER: Final[_Values] = {
    "--mesh": _axes,
    "--ids": _ids,
    "--links": _LINKS,
    "--link-model": _any_of("ring", "shared-bus", "star"),
}
_OUT: Final = _any_of(
    *(f"PLACE{name}" for name in ("", "/out", "/out.pt", "/o.svg", "/o.gguf", "/o/"))
)
_SOURCE: Final[_Values] = {
    "--ranks": _small,
    "--source-rules": _any_of("PLACE/none", "PLACE/a.safetensors", "PLACE/rules.toml"),
    "--json": None,
}
_CHOICE: Final[_Values] = {"--include": _PATTERN, "--exclude": _PATTERN}
_WRITE: Final[_Values] = {
    **_CHOICE,
    **_SOURCE,
    "--dtype": _DTYPE,
    "--threads": _any_of("1", "2", "0"),
    "--overwrite": None,
    "--no-verify": None,
    "--dry-run": None,
    "--quiet": None,
}
_CKPT: Final = _any_of("PLACE/a.safetensors", "PLACE/b.safetensors", "PLACE", "PLACE/none", "/dev")

_RULES: Final = _any_of(
    "PLACE/none", "PLACE/rules.toml", "PLACE/good.toml", "PLACE/good.toml", "PLACE/a.safetensors"
)
_MAP: Final = _any_of("PLACE/map.toml", "PLACE/map.toml", "PLACE/rules.toml", "PLACE", "none")

_COMMANDS: Final[dict[str, tuple[list[Callable[[_Random], str]], _Values, _Values]]] = {
    # Arguments, options that are mostly given, and those that now and then are.
    "show": ([_spec], {"--mesh": _axes, "--shape": _shape}, {"--ids": _ids, "-o": _OUT}),
    "cost": (
        [_spec, _spec],
        {"--mesh": _axes, "--shape": _shape},
        {
            **_CLUSTER,
            **_TENSOR,
            "--csv": None,
            "--json": None,
            "--pairs": _any_of("/dev/zero", "PLACE/rules.toml", "PLACE", "PLACE/none"),
        },
    ),
    "plan": (
        [_spec, _spec],
        {"--mesh": _axes, "--shape": _shape},
        {
            **_CLUSTER,
            **_TENSOR,
            "--target-mesh": _axes,
            "--target-ids": _ids,
            "--max-bytes": _small,
            "--alternatives": _small,
            "--explain": None,
            "--json": None,
        },
    ),
    "explore": ([], {"--mesh": _size, "--shape": _size, "-o": _OUT}, {"--links": _LINKS}),
    "links": ([_any_of("list", "none")], {}, {"--json": None}),
    "plan-state": (
        [_CKPT],
        {"--mesh": _axes, "--rules": _RULES},
        {**_CLUSTER, **_SOURCE, "--map": _MAP, "--dtype": _DTYPE},
    ),
    "profile": ([], {"--mesh": _axes, "-o": _OUT}, {"--min-bytes": _small, "--repeats": _small}),
    "inspect": (
        [_CKPT],
        {},
        {
            **_SOURCE,
            "--tensor": _PATTERN,
            "--index": _numbers,
            "--picture": None,
            "--only": _any_of("uneven", "replicated", "none"),
        },
    ),
    "verify": ([_CKPT], {}, {**_SOURCE, **_CHOICE, "--digests": _MAP, "--all": None}),
    "diff": ([_CKPT, _CKPT], {}, {**_SOURCE, **_CHOICE, "--atol": _numbers, "--rtol": _numbers}),
    "merge": (
        [_CKPT],
        {"-o": _OUT},
        {**_WRITE, "--to": _any_of("dcp", "torch", "huggingface", "x"), "--max-shard-size": _small},
    ),
    "reshard": (
        [_CKPT],
        {"-o": _OUT, "--mesh": _size},
        {
            **_WRITE,
            "--rules": _RULES,
            "--like": _CKPT,
            "--to": _any_of("dcp", "shardspec", "x"),
        },
    ),
}


def _arguments(random: _Random, command: str, place: Path) -> list[str]:
    words, mostly, seldom = _COMMANDS[command]
    args = [word(random) for word in words]
    for chance, options in ((0.95, mostly), (0.08, seldom)):
        for name, value in options.items():
            if random.random() < chance:
                args += [name] if value is None else [name, value(random)]
    if random.random() < 0.15 and args:
        args[random.randrange(len(args))] = random.choice(_ODD)
    if random.random() < 0.05:
        args.append(random.choice(_ODD))
    return [command, *(arg.replace("PLACE", str(place)) for arg in args)]


def calls(place: Path, whole: bool) -> Iterator[Case]:
    """Yield calls, the same at every run; outputs are replaced or refused as they ask for it."""
    plain(place / "a.safetensors", seed=1)
    plain(place / "b.safetensors", seed=2)
    place.joinpath("rules.toml").write_text(f'"*" = "[S({"9" * 5000})]"\n"\\u001b" = 1\n')
    place.joinpath("good.toml").write_text('"*" = "[S0]"')
    place.joinpath("map.toml").write_text(
        '[[map]]\nsource = ["w{i}", "(a b) c"]\ntarget = ["v.{i}", "(b a) c"]\n'
    )
    # What commands import lies in memory before they are forked.
    for name in cli.list_commands(Context(cli)):
        cli.get_command(Context(cli), name)
    for name in _IMPORTED:
        import_module(name)
    random = _Random(20)
    each = list(_COMMANDS)
    often = [*each, "plan", "plan", "cost", "cost"]
    for number in range(_ALL if whole else _SOME):
        random.begin()
        # Of the sample each twice.
        command = random.choice(often) if whole else each[number % len(each)]
        args = _arguments(random, command, place)
        yield Case(
            f"call {number}: {' '.join(args)[:400]!r}", partial(_in_its_own_process, args, place)
        )


def _in_its_own_process(args: list[str], place: Path) -> None:
    """Call a command as a shell does, so that nothing of other calls is in memory."""
    story = Fork(partial(_call, args, place)).end()
    assert story == DONE, story


def _call(args: list[str], place: Path) -> None:
    started = time.process_time()
    with chdir(place):
        done = CliRunner().invoke(cli, args, prog_name="shardspec", input="[R] [R]\n")
    assert time.process_time() - started < _MOST_SECONDS, "takes too long"
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    usual = (0, 1, 2, 3) if args[0] == "diff" else (0, 2, 3)
    assert done.exit_code in usual, f"exit code {done.exit_code}: {done.stderr}"
    said = done.stdout + done.stderr
    assert all(char.isprintable() or char == "\n" for char in said), ascii(said[:1000])
    if done.exit_code == 0:
        return
    lines = done.stderr.splitlines()
    # What compares prints what it finds, and no error.
    found = args[0] in ("diff", "verify") and not lines and done.stdout
    assert found or len(lines) == 1, done.stderr[:1000]
    assert found or lines[0].startswith("Error: "), lines[0][:1000]
    assert max(map(len, lines), default=0) < 2100, "a line of thousands of characters"
