"""The command `shardspec profile`."""

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardspec.cli.arguments import MeshShape, parse_bytes, parsed
from shardspec.cli.options import file_output, mesh_option, overwrite_option, plain_mesh
from shardspec.cli.output import path_text, say, write_file
from shardspec.errors import OutputExistsError, ProfileError
from shardspec.mesh import DeviceMesh
from shardspec.text import shown

if TYPE_CHECKING:
    from shardspec.profiling.profile import Profile

__all__ = ["command"]


@click.command(
    "profile",
    epilog="""\b
Examples:
  torchrun --nproc_per_node 8 -m shardspec profile --mesh 2x4 -o cluster.json
  torchrun ... -m shardspec profile --mesh dp=4,tp=8 -o cluster.json --max-bytes 256MiB
  shardspec plan "[S0,R]" "[R,S01]" --profile cluster.json --shape 4096x4096
""",
)
@mesh_option
@file_output("Where to write the profile.", required=True)
@file_output("Draw it as SVG too.", option="--plot")
@click.option("--min-bytes", callback=parsed(parse_bytes), default="4KiB", show_default=True)
@click.option("--max-bytes", callback=parsed(parse_bytes), default="16MiB", show_default=True)
@click.option(
    "--repeats", type=click.IntRange(1, 10_000), default=5, show_default=True, help="At the least."
)
@overwrite_option()
def command(
    mesh: MeshShape,
    output: Path,
    plot: Path | None,
    min_bytes: int,
    max_bytes: int,
    repeats: int,
    overwrite: bool,
) -> None:
    """Measure the links of a cluster: how long steps take on the processes of this job.

    Run it under torchrun, one process a device. It times every kind of collective along each axis
    of the mesh and along every group of axes, over sizes that grow fourfold, and fits two lines to
    each, one of low latency and one of high rate. What has no such curve is priced by a latency and
    a rate per axis, of links of every group's own or of one bus that all devices share.
    """
    world, rank = _environment("WORLD_SIZE"), _environment("RANK")
    devices = plain_mesh(mesh)
    if world != devices.size:
        start = f"torchrun --nproc_per_node {devices.size} -m shardspec profile --mesh {devices}"
        found = f"this job has {world} processes" if world else "this is no job"
        raise click.UsageError(
            f"mesh {devices} has {devices.size} devices, but {found}; start it as in '{start} -o "
            f"{path_text(output)}', or over several hosts"
        )
    if not 4 <= min_bytes < max_bytes:
        raise click.UsageError("--min-bytes must be at least 4, and --max-bytes more than it")
    if rank == 0:
        for path in (output, *((plot,) if plot else ())):
            _check_place(path, overwrite)
    profile = _measure(devices, _sizes(min_bytes, max_bytes), repeats, show=rank == 0)
    if rank:
        return
    from shardspec.profiling.chart import chart_svg, chart_text

    profile.save(output, overwrite=overwrite)
    if plot is not None:
        write_file(plot, chart_svg(profile), overwrite=overwrite)
    say(f"{profile.table()}\n\n{chart_text(profile)}\n")
    say(f"known error: {profile.known_error}")
    say(f"{path_text(output)}: the links of mesh {devices}, {profile.link_model} model")


def _environment(name: str) -> int:
    """Return a number that torchrun has set, 0 outside of a job."""
    text = os.environ.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise click.UsageError(f"{name}={shown(text)} is no number; start it with torchrun")
    return int(text)


def _sizes(least: int, most: int) -> list[int]:
    """Return sizes that grow fourfold, both ends included."""
    sizes = [least]
    while sizes[-1] * 4 < most:
        sizes.append(sizes[-1] * 4)
    return [*sizes, most]


def _check_place(path: Path, overwrite: bool) -> None:
    """Refuse before measuring what could not be written afterwards."""
    if not path.resolve().parent.is_dir():
        raise ProfileError(f"{path}: its directory does not exist; make it first")
    if path.exists() and (path.is_dir() or not overwrite):
        raise OutputExistsError(f"{path}: exists; choose another name, or use --overwrite")


def _measure(mesh: DeviceMesh, sizes: list[int], repeats: int, *, show: bool) -> "Profile":
    import torch
    import torch.distributed as dist

    from shardspec.comm.process_group import ProcessGroupCommunicator
    from shardspec.profiling.measure import measure
    from shardspec.profiling.profile import make_profile

    communicator = ProcessGroupCommunicator.create(mesh)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with click.progressbar(length=1000, label="measuring", file=sys.stderr, hidden=not show) as bar:

        def advance(done: int, total: int) -> None:
            bar.update(1000 * done // total - bar.pos)

        times = measure(communicator, sizes, repeats, device=device, progress=advance)
    facts = {
        "backend": str(dist.get_backend()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "host": platform.node(),
        "ranks": str(mesh.size),
        "repeats": str(repeats),
        "torch": str(torch.__version__),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    dist.barrier()
    dist.destroy_process_group()
    return make_profile(mesh.shape, mesh.axis_names, times, facts)
