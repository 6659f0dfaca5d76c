"""Merging checkpoints of every format, beside `cat` of the same bytes and what people use today.

python -m benchmarks.checkpoint --at /dev/shm/bench --disk /tmp/bench

Writes each format with torch's own parallelism and writers, merges it as a command in a process of
its own, in turns with `cat` and with the tools that read the format, and deletes it again. Every
verified file is to have the CRC-32 of the first format's.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.checkpoint_holes import FORMATS as HOLES
from benchmarks.checkpoint_shapes import Model, model_of
from benchmarks.checkpoint_table import MOST_MIB, Row, head_lines, row_lines
from benchmarks.checkpoint_timing import (
    Run,
    Series,
    cat_command,
    cats_command,
    empty,
    evict,
    python,
    run,
    shuffled,
    small,
    touch,
    warm,
)

__all__ = ["main"]

FORMATS: Final = {
    "shardspec": "shardspec's own",
    "dcp": "torch DCP",
    "ranks": "a .pt of each rank",
    "dcp-hf": "DCP's Hugging Face format",
    "index": "safetensors with an index",
}
PEERS: Final = {
    "dcp": ("torch-save", "merge-weights", "load-write"),
    "ranks": ("load-cat",),
    "dcp-hf": ("consolidate", "consolidate-2"),
}
"""Tools by the format that they read; `checkpoint_peers` has them."""
YARDSTICKS: Final = ("two cats at once", "two bare loops, checked")
PARTS: Final = ("formats", "peers", "tp8", "cuts", "disk", "planning", "memory")
SIZES: Final = ((1, False), (2, True), (4, False), (16, False))
"""GiB, and whether with tensors of more than 1 GiB, for the peaks of memory."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all measurements have in common."""

    at: Path
    model: Model
    rounds: int
    digests: dict[str, str] = field(default_factory=dict)
    """CRC-32 of what was merged from each format."""

    def make(self, form: str, cut: str, model: Model | None = None) -> Path:
        """Write a checkpoint and return where."""
        place = self.at / f"{form}-{cut}"
        empty(place)
        sizes = model or self.model
        options = ("--cut", cut, "--hidden", sizes.hidden, "--vocab", sizes.vocab)
        run(python("benchmarks.checkpoint_make", form, place, *options))
        return place

    def turns(self, source: Path, commands: dict[str, list[str]]) -> tuple[Series, ...]:
        """Run `cat` and the commands in turns; all write ``out``."""
        out, files = self.at / "out", data_files(source)
        num_bytes = sum(path.stat().st_size for path in files)
        warm(files)
        every = {"cat": cat_command(files, out), **commands}
        found: dict[str, list[Run]] = {name: [] for name in every}
        for _ in range(self.rounds):
            for name, command in shuffled(every):
                empty(out)
                touch(self.at, 5 * num_bytes // 4)
                found[name].append(run(command))
        empty(out)
        return tuple(Series(runs) for runs in found.values())

    def merge(self, source: Path, *options: object) -> list[str]:
        """Return the command that merges a checkpoint into ``out``."""
        words = ("merge", source, "-o", self.at / "out", "--json", *told(source), *options)
        return python("shardspec", *words)

    def same(self, form: str, merged: Series) -> None:
        """Compare what was merged from a format with what was merged from the others.

        Raises
        ------
        RuntimeError
            If they differ.
        """
        for done in merged.runs:
            self.digests[form] = json.loads(done.said)["crc32"]
            if len(set(self.digests.values())) > 1:
                raise RuntimeError(f"formats give different files: {self.digests}")


def told(source: Path) -> tuple[object, ...]:
    """Return the options that a format needs because it does not say how many ranks there were."""
    hf = source.name.startswith("dcp-hf")
    return (
        ("--ranks", sum(path.name.startswith("shard-") for path in data_files(source)))
        if hf
        else ()
    )


def data_files(source: Path) -> list[Path]:
    """Return the files of a checkpoint that hold tensors."""
    found = (".safetensors", ".distcp", ".pt")
    return sorted(path for path in source.rglob("*") if path.suffix in found)


def measure_form(bench: _Bench, form: str, cut: str, *, ours: bool, peers: bool) -> list[Row]:
    """Measure one format: ways of merging it, `inspect`, and the tools that read it.

    Two `cat`s at once show what two cores can do with the memory that they share, and two bare
    loops what is the least that checking adds.
    """
    source = bench.make(form, cut)
    # Four files of one size, nearly.
    limit = bench.model.num_bytes * 51 // 200
    title = f"{FORMATS[form]}{'' if cut == 'fsdp+tp' else ', ' + cut}"
    commands: dict[str, list[str]] = {}
    aims: dict[str, float | None] = {}
    if ours:
        commands["merge"] = bench.merge(source)
        commands["merge --no-verify"] = bench.merge(source, "--no-verify")
        two = ("--threads", 2, "--max-shard-size", limit)
        commands["merge, 2 threads, 4 files"] = bench.merge(source, *two)
        commands["the same, --no-verify"] = bench.merge(source, *two, "--no-verify")
        aims = dict(zip(commands, (1.3, 1.2, 0.8, 0.8), strict=True))
        files, out = data_files(source), bench.at / "out"
        cats, loops = YARDSTICKS
        commands[cats] = cats_command(files, out)
        commands[loops] = python("benchmarks.checkpoint_loops", out, *files)
        commands["inspect"] = python("shardspec", "inspect", source, *told(source))
    if peers:
        for peer in PEERS.get(form, ()):
            if cut == "fsdp+tp" or peer == "consolidate":
                place = bench.at / "out"
                commands[peer] = python("benchmarks.checkpoint_peers", peer, source, place)
    cat, *series = bench.turns(source, commands)
    empty(source)
    if ours and cut == "fsdp+tp":
        bench.same(form, series[0])
    return [
        Row(
            title, name, cat, found, aims.get(name), name not in (*PEERS.get(form, ()), *YARDSTICKS)
        )
        for name, found in zip(commands, series, strict=True)
    ]


def measure_cuts(bench: _Bench) -> list[Row]:
    """Measure matrices cut by columns beside the same cut by rows."""
    rows = []
    for cut in ("rows", "columns"):
        source = bench.make("shardspec", cut)
        commands = {
            "merge": bench.merge(source),
            "merge --no-verify": bench.merge(source, "--no-verify"),
        }
        cat, *series = bench.turns(source, commands)
        empty(source)
        for name, found in zip(commands, series, strict=True):
            rows.append(Row(f"by {cut}", name, cat, found, None, True))
    return rows


def measure_disk(bench: _Bench, disk: Path) -> list[Row]:
    """Measure with the source out of the page cache, and both outputs flushed to the disk.

    Disks of virtual machines are fast until a credit is used up, so the first turn of all is not
    counted, medians are what counts, and every turn has an order of its own.
    """
    there = _Bench(disk, bench.model, bench.rounds)
    source = there.make("dcp-hf", "fsdp+tp")
    files, out = data_files(source), disk / "out"
    commands = {
        "cat": cat_command(files, out, synced=True),
        "merge": there.merge(source),
        "merge --no-verify": there.merge(source, "--no-verify"),
        "consolidate": [
            "sh",
            "-c",
            '"$@" && sync "$0"/*',
            str(out),
            *python("benchmarks.checkpoint_peers", "consolidate", source, out),
        ],
    }
    found: dict[str, list[Run]] = {name: [] for name in commands}
    for turn in range(1 + there.rounds):
        for name, command in shuffled(commands):
            empty(out)
            os.sync()
            touch(bench.at, sum(path.stat().st_size for path in files))
            evict(files)
            done = run(command)
            if turn:
                found[name].append(done)
    empty(out)
    empty(source)
    cat, *series = (Series(runs) for runs in found.values())
    aims = (1.05, 1.05, None)
    return [
        Row("on a disk, cold", name, cat, at, aim, aim is not None, by_median=True)
        for name, at, aim in zip(list(commands)[1:], series, aims, strict=True)
    ]


def measure_planning(bench: _Bench, tensors: int, mesh: str) -> list[str]:
    """Measure everything that comes before the first byte is written, for a large checkpoint."""
    lines = []
    for form in HOLES:
        place = bench.at / f"{form}-large"
        options = ("--tensors", tensors, "--mesh", mesh, "--form", form)
        run(python("benchmarks.checkpoint_holes", place, *options))
        words = {
            "merge --dry-run": bench.merge(place, "--dry-run"),
            "inspect": python("shardspec", "inspect", place, *told(place)),
        }
        for name, command in words.items():
            found = sorted((run(command) for _ in range(bench.rounds)), key=lambda at: at.seconds)
            seconds = f"{found[0].seconds:.1f} to {found[-1].seconds:.1f} s"
            lines.append(
                f"{name}, {FORMATS[form]}, {tensors:,} tensors on {mesh} ranks: {seconds}, "
                f"{found[0].peak_mib:,.0f} MiB (aims: 10 s and 1,024 MiB)"
            )
        empty(place)
    return lines


def measure_memory(at: Path, sizes: Sequence[tuple[float, bool]]) -> list[str]:
    """Measure the peak of merging checkpoints of several sizes, whose data are holes."""
    lines = []
    for gib, big in sizes:
        bench = _Bench(at, model_of(gib, big=big), 1)
        place = at / "holes"
        options = ("--hidden", bench.model.hidden, "--vocab", bench.model.vocab, "--mesh", "2x2")
        run(python("benchmarks.checkpoint_holes", place, *options))
        found = run(bench.merge(place))
        empty(at / "out")
        empty(place)
        size, largest = bench.model.num_bytes / 2**30, bench.model.largest / 2**30
        lines.append(
            f"merge, {size:.2f} GiB with a tensor of {largest:.2f} GiB: {found.peak_mib:.1f} MiB "
            f"(aim: {MOST_MIB} MiB)"
        )
    return lines


def main() -> None:
    """Measure what is asked for, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", type=Path, help="folder to work in; a tmpfs leaves the disk out")
    parser.add_argument("--disk", type=Path, help="folder on a disk, for the cold case")
    parser.add_argument("--gib", type=float, default=2, help="1, 2, 4, 16: any size")
    parser.add_argument("--big", action="store_true", help="with tensors of more than 1 GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--parts", default=",".join(PARTS), help="which of these to measure")
    parser.add_argument("--planned", default="10000:16x8x8", help="tensors and mesh of planning")
    parser.add_argument("--most-gib", type=float, default=16, help="largest for peaks of memory")
    chosen = parser.parse_args()
    parts: Sequence[str] = chosen.parts.split(",")
    if chosen.at is not None:
        chosen.at.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=chosen.at) as temporary, small():
        bench = _Bench(Path(temporary), model_of(chosen.gib, big=chosen.big), chosen.rounds)
        # The first start compiles what it imports.
        run(python("shardspec", "merge", "-h"))
        if "peers" in parts:
            run(python("benchmarks.checkpoint_peers", "-h"))
        size = bench.model.num_bytes / 2**30
        say([f"{size:.2f} GiB in {len(bench.model.shapes)} tensors", "", *head_lines()])
        for form in chosen.formats.split(","):
            ours, peers = "formats" in parts, "peers" in parts
            if ours or (peers and form in PEERS):
                say(row_lines(measure_form(bench, form, "fsdp+tp", ours=ours, peers=peers)))
            if "tp8" in parts and form == "dcp-hf":
                say(row_lines(measure_form(bench, form, "tp8", ours=True, peers=True)))
        if "cuts" in parts:
            say(row_lines(measure_cuts(bench)))
        if "disk" in parts and chosen.disk is not None:
            chosen.disk.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=chosen.disk) as disk:
                say(row_lines(measure_disk(bench, Path(disk))))
        if "planning" in parts:
            tensors, mesh = chosen.planned.split(":")
            say(["", *measure_planning(bench, int(tensors), mesh)])
        if "memory" in parts:
            place = Path(chosen.disk or bench.at)
            with tempfile.TemporaryDirectory(dir=place) as disk:
                sizes = [(gib, big) for gib, big in SIZES if gib <= chosen.most_gib]
                say(["", *measure_memory(Path(disk), sizes)])
        say([f"load {os.getloadavg()[0]:.1f} in the end"])


def say(lines: Sequence[str]) -> None:
    """Print lines now: the whole takes minutes."""
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
