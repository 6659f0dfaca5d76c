"""The command `shardspec profile`."""

import os
import platform
import sys
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardspec.checkpoint.writing.output import write_atomically
from shardspec.cli.arguments import MeshShape, mesh_option, parse_bytes, parsed
from shardspec.errors import OutputExistsError, ProfileError
from shardspec.mesh import DeviceMesh

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
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where to write the profile.",
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it as SVG too.")
@click.option("--min-bytes", callback=parsed(parse_bytes), default="4KiB", show_default=True)
@click.option("--max-bytes", callback=parsed(parse_bytes), default="16MiB", show_default=True)
@click.option(
    "--repeats", type=click.IntRange(1, 10_000), default=5, show_default=True, help="At the least."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def command(
    mesh: MeshShape,
    output: Path,
    plot: Path | None,
    min_bytes: int,
    max_bytes: int,
    repeats: int,
    force: bool,
) -> None:
    """Measure the links of a cluster: how long steps take on the processes of this job.

    Run it under torchrun, one process a device. It times every kind of collective along each axis
    of the mesh and along all of them, over sizes that grow eightfold, fits a latency and a rate to
    each axis, and chooses between links of every group's own and one bus that all devices share.
    """
    shape, names = mesh
    world = int(os.environ.get("WORLD_SIZE", "0"))
    rank = int(os.environ.get("RANK", "0"))
    devices = DeviceMesh(range(prod(shape)), shape, axis_names=names)
    if world != devices.size:
        start = f"torchrun --nproc_per_node {devices.size} -m shardspec profile --mesh {devices}"
        found = f"this job has {world} processes" if world else "this is no job"
        raise click.UsageError(
            f"mesh {devices} has {devices.size} devices, but {found}; start it as in '{start} -o "
            f"{output}', or over several hosts"
        )
    if not 4 <= min_bytes < max_bytes:
        raise click.UsageError("--min-bytes must be at least 4, and --max-bytes more than it")
    if rank == 0:
        for path in (output, *((plot,) if plot else ())):
            _check_place(path, force)
    profile = _measure(devices, _sizes(min_bytes, max_bytes), repeats, show=rank == 0)
    if rank:
        return
    from shardspec.profiling.chart import chart_svg, chart_text

    profile.save(output, overwrite=force)
    if plot is not None:
        _write(plot, chart_svg(profile).encode(), force)
    click.echo(f"{profile.table()}\n\n{chart_text(profile)}\n")
    click.echo(f"known error: {profile.known_error}")
    click.echo(f"{output}: the links of mesh {devices}, {profile.link_model} model")


def _sizes(least: int, most: int) -> list[int]:
    """Return sizes that grow eightfold, both ends included."""
    sizes = [least]
    while sizes[-1] * 8 < most:
        sizes.append(sizes[-1] * 8)
    return [*sizes, most]


def _check_place(path: Path, force: bool) -> None:
    """Refuse before measuring what could not be written afterwards."""
    if not path.resolve().parent.is_dir():
        raise ProfileError(f"{path}: its directory does not exist; make it first")
    if path.exists() and (path.is_dir() or not force):
        raise OutputExistsError(f"{path}: exists; choose another name, or use --force")


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


def _write(path: Path, content: bytes, force: bool) -> None:
    def fill(fd: int) -> None:
        os.pwrite(fd, content, 0)

    write_atomically(path, len(content), fill, overwrite=force)
