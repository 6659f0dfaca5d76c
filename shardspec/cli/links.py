"""The commands `shardspec links` and `shardspec profile`, about the speed of a cluster's links."""

import os
import platform
import sys
from pathlib import Path

import click

from shardspec.checkpoint.storage import storage_path
from shardspec.checkpoint.storage.path import check_new_file
from shardspec.cli import options as opts
from shardspec.cli.command import Command, CommandGroup, Option
from shardspec.cli.options import BYTES, FILE_PATH, MeshShape
from shardspec.cli.output import path_text, say, say_json, write_file
from shardspec.comm.cluster_file import LinkPreset
from shardspec.comm.cost import accuracy_text
from shardspec.comm.curves import Link
from shardspec.comm.presets import link_preset, preset_names
from shardspec.mesh.device_mesh import DeviceMesh
from shardspec.text import shown, table_text, terminal_width, wrapped


@click.group(cls=CommandGroup)
def links_command() -> None:
    """List the links that --links knows, or import measured ones."""


@links_command.command("list", cls=Command)
@opts.as_json.but("Print everything as JSON.")
def list_links(as_json: bool) -> None:
    """Show the presets of --links, the sources of their numbers, and what they are valid for.

    Rates are in 10^9 bytes a second, in one direction, per device.

    Examples:
      shardspec links list
      shardspec links list --json
    """
    presets = list(map(link_preset, preset_names()))
    if as_json:
        say_json({"presets": [preset.as_dict() for preset in presets]})
        return
    texts = ["scope", "basis", "confidence"]
    header = ["preset", *texts, "devices", "latency", "rate"]
    rows = [
        [
            preset.name,
            *(getattr(preset, name) for name in texts),
            f"up to {preset.per_node}" if preset.per_node else "any",
            f"{(preset.link.start_s + preset.link.latency_s) * 1e6:.4g} µs",
            f"{1e-9 / preset.link.seconds_per_byte:.4g} GB/s",
        ]
        for preset in presets
    ]
    say(f"{table_text(header, rows, numbers_from=4, optional=(2, 1, 3))}\n")
    for preset in presets:
        say(preset.name)
        say(_note("for", preset.valid_for))
        if preset.link.error:
            say(_note("off", accuracy_text([preset.link])))
        say(_note("from", f"{preset.source}; read {preset.read_on}"))
    about = (
        "Latency and rate are those of one message. Where collectives were measured, fitted curves "
        "price them, and plans print the errors of these. This project measured none of them."
    )
    say("\n".join(["", *wrapped(about, min(100, terminal_width()))]))


@links_command.command("import", cls=Command)
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=FILE_PATH)
@opts.output.but("Where to write the file of links.")
@Option("nodes", "Input", "Hosts of the runs, if logs do not tell.", {"type": click.IntRange(1)})
@opts.between.but("The link between hosts, if no log has it.")
@opts.overwrite
def import_links(
    logs: tuple[Path, ...], output: Path, nodes: int | None, between: str | None, overwrite: bool
) -> None:
    """Fit the links of a cluster to logs of nccl-tests, and write a file that --links takes.

    Logs are the output of all_gather_perf, reduce_scatter_perf, all_reduce_perf, alltoall_perf and
    sendrecv_perf with headers. Out-of-place times are used.

    Examples:
      shardspec links import all_gather.log alltoall.log -o cluster.toml
      shardspec links import *.log -o cluster.toml --between ib-ndr-per-gpu
      shardspec plan "[S0,R]" "[R,S0]" --mesh 8 --shape 4096x4096 --links cluster.toml
    """
    from shardspec.profiling.fit import links_of_logs, read_log

    _check_output(output, overwrite=overwrite)
    if between is not None:
        link_preset(between)
    read = [read_log(path, nodes) for path in logs]
    _write_links(output, links_of_logs(read, output.stem, between), overwrite=overwrite)


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.suffix != ".toml":
        raise click.UsageError(f"{path_text(output)}: give a file that ends in .toml")
    check_new_file(storage_path(output), overwrite=overwrite)


def _write_links(output: Path, preset: LinkPreset, *, overwrite: bool) -> None:
    """Write a file of links, and print its curves and their errors."""
    from shardspec.profiling.fit import fit_rows

    write_file(output, preset.text(), overwrite=overwrite)
    header = ["collective", "devices", "hosts", "sizes", "low latency", "high rate"]
    say(table_text(header, fit_rows(preset), optional=(3, 2)))
    links = [link for link in (preset.inside, preset.between) if isinstance(link, Link)]
    accuracy = f"accuracy: {accuracy_text(links) or 'not known; measure more sizes'}"
    say("\n".join(wrapped(accuracy, terminal_width(), "  ")))
    hosts = f"of hosts of {preset.per_node} devices" if preset.per_node else "inside one host"
    say(f"{path_text(output)}: links {hosts}")


def _note(title: str, text: str) -> str:
    return "\n".join(wrapped(f"  {title:4}  {text}", min(100, terminal_width()), " " * 8))


@click.command(cls=Command)
@opts.mesh.but(required=True)
@opts.output.but("Where to write the file of links.")
@Option(
    "min_bytes",
    "Running",
    "The smallest size to measure.",
    {"type": BYTES, "default": "4KiB", "show_default": True},
)
@opts.max_bytes.but("The largest size to measure.", default="16MiB", show_default=True)
@Option(
    "repeats",
    "Running",
    "Minimum repetitions per measurement.",
    {"type": click.IntRange(1, 10_000), "default": 5, "show_default": True},
)
@opts.overwrite
def profile_command(
    mesh: MeshShape,
    output: Path,
    min_bytes: int,
    max_bytes: int,
    repeats: int,
    overwrite: bool,
) -> None:
    """Measure the links of a cluster: how long steps take on the processes of this job.

    Run it under torchrun, one process per device. It times every kind of collective along each axis
    of the mesh and along every group of axes, for sizes that grow fourfold, and fits two lines to
    each, one of low latency and one of high rate. The output is a file of links, as from 'shardspec
    links import', for every mesh shape on the cluster; torchrun tells which ranks share a host.

    Examples:
      torchrun --nproc_per_node 8 -m shardspec profile --mesh 2x4 -o cluster.toml
      torchrun ... -m shardspec profile --mesh dp=4,tp=8 -o cluster.toml --max-bytes 256MiB
      shardspec plan "[S0,R]" "[R,S01]" --mesh 2x4 --shape 4096x4096 --links cluster.toml
    """
    world, rank = _environment("WORLD_SIZE"), _environment("RANK")
    devices = opts.plain_mesh(mesh)
    if world != devices.size():
        start = f"torchrun --nproc_per_node {devices.size()} -m shardspec profile --mesh {devices}"
        problem = f"this job has {world} processes" if world else "this is not a job"
        raise click.UsageError(
            f"mesh {devices} has {devices.size()} devices, but {problem}; start it as in '{start} "
            f"-o {path_text(output)}', or over several hosts"
        )
    if not 4 <= min_bytes < max_bytes:
        raise click.UsageError("--min-bytes must be at least 4, and --max-bytes more than it")
    if rank == 0:
        _check_output(output, overwrite=overwrite)
    sizes = [min_bytes]
    while sizes[-1] * 4 < max_bytes:
        sizes.append(sizes[-1] * 4)
    preset = _measure(devices, [*sizes, max_bytes], repeats, output.stem, show=rank == 0)
    if rank == 0:
        _write_links(output, preset, overwrite=overwrite)


def _environment(name: str) -> int:
    """Return the number in an environment variable of torchrun; 0 outside a job."""
    text = os.environ.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise click.UsageError(f"{name}={shown(text)} is not a number; start it with torchrun")
    return int(text)


def _measure(
    mesh: DeviceMesh, sizes: list[int], repeats: int, name: str, *, show: bool
) -> LinkPreset:
    import torch
    import torch.distributed as dist

    from shardspec.comm.process_group import ProcessGroupCommunicator
    from shardspec.mesh.job import start
    from shardspec.profiling.fit import fitted_links
    from shardspec.profiling.measure import measure

    start(mesh)
    communicator = ProcessGroupCommunicator.of(mesh)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    local = _environment("LOCAL_WORLD_SIZE")
    per_node = local if 0 < local < mesh.size() else None
    with click.progressbar(length=1000, label="measuring", file=sys.stderr, hidden=not show) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(1000 * done // total - bar.pos)

        runs = measure(
            communicator, sizes, repeats, device=device, per_node=per_node, progress=advance
        )
    chip = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    source = f"shardspec profile on mesh {mesh}, {dist.get_backend()}, {chip}, {torch.__version__}"
    dist.barrier()
    dist.destroy_process_group()
    return fitted_links(name, runs, source=source)
