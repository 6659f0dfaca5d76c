"""The commands about models as wholes, on paper: `shardspec check-map` and `plan-state`."""

import json
from pathlib import Path

from shardspec.cli.arguments import BYTES
from shardspec.cli.checkpoint_options import (
    CHECKPOINT,
    MapOptions,
    RuleOptions,
    SourceOptions,
    read_json,
    read_maps,
    sizes_option,
)
from shardspec.cli.options import ClusterOptions, argument, command, flag, json_flag, option
from shardspec.cli.output import say
from shardspec.errors import InputFileError
from shardspec.mesh import DeviceMesh
from shardspec.resharding.maps import MapReport, check_map
from shardspec.text import counted, shown


@command
def check_map_command(
    *,
    map: str = argument("MAP"),
    source: str = option("CKPT", "A checkpoint, or a file of shapes.", required=True),
    target: str | None = option("CKPT", "The same, of what is to be written."),
    sizes: Path | None = sizes_option(),
    reverse: bool = flag("Check the map the other way round."),
    as_json: bool = json_flag(),
) -> None:
    """Prove that a map writes every element of a target exactly once.

    Exit code 3 says that it does not; the first holes and overlaps are printed.

    Examples:
      shardspec check-map map.toml --source ckpt --target shapes.json
      shardspec check-map llama-hf-to-megatron --sizes config.json --source ckpt

    MAP is a TOML file, or the name of a map that comes with shardspec, as llama-hf-to-megatron or,
    by way of hf, llama-megatron-to-fused. A file of shapes has names and lists of sizes:
    {"embed.weight": [32000, 4096]}. Without --target, the names and shapes that the map implies are
    checked, and printed with --json.
    """
    *firsts, last = read_maps(map, sizes, reverse=reverse)
    before = _shapes(source)
    for one in firsts:
        between = one.target_shapes(before)
        _refuse_holes(check_map(one, before, between))
        before = between
    after = last.target_shapes(before) if target is None else _shapes(target)
    report = check_map(last, before, after)
    if as_json:
        record = {
            "total": not report.problems,
            "equations": len(report.equations),
            "problems": list(report.problems),
            "unused": list(report.unused),
            "target": {name: list(shape) for name, shape in after.items()},
        }
        say(json.dumps(record))
    else:
        say(f"{counted(len(report.equations), 'equation')} to {counted(len(after), 'tensor')}")
        for name in report.unused:
            say(f"not used, at least in part: {shown(name)}")
    _refuse_holes(report)
    if not as_json:
        say("every element of the target is written exactly once")


def _refuse_holes(report: MapReport) -> None:
    if report.problems:
        rest = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise InputFileError(f"the map is not total: {report.problems[0]}{rest}")


def _shapes(place: str) -> dict[str, tuple[int, ...]]:
    from shardspec.checkpoint.open import open_checkpoint
    from shardspec.checkpoint.store import path_exists

    if not (place.endswith(".json") and path_exists(Path(place))):
        catalog = open_checkpoint(Path(place))
        return {name: catalog.outline(name).shape for name in catalog.names}
    found = {}
    for name, sizes in read_json(Path(place)).items():
        if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
            raise InputFileError(f"{place}: {shown(name)} has {shown(sizes)}, no list of sizes")
        found[name] = tuple(sizes)
    return found


@command
def plan_state_command(
    *,
    checkpoint: Path = argument(CHECKPOINT),
    cluster: ClusterOptions,
    rules: RuleOptions,
    maps: MapOptions,
    dtype: str | None = option("NAME", "What floating-point tensors become."),
    max_bytes: int | None = option(BYTES, "Bytes in buckets of each device."),
    source: SourceOptions,
    as_json: bool = json_flag("Print the plan as JSON."),
) -> None:
    """Plan on paper how the devices of a mesh get a model from the checkpoint CKPT.

    Says which device reads how much from which files. No tensor is read.

    Examples:
      shardspec plan-state ckpt --mesh 8 --rules rules.toml
      shardspec plan-state ckpt --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),R]' --json
      shardspec plan-state ckpt --mesh 8 --map llama-hf-to-fused --sizes config.json
    """
    from shardspec.checkpoint.load import stored_layouts
    from shardspec.checkpoint.mapped import mapped
    from shardspec.resharding.plan import plan_reshard

    mesh, model = cluster.build()
    if cluster.links is not None or cluster.profile is not None:
        mesh = DeviceMesh(
            mesh.ids,
            mesh.shape,
            axis_names=mesh.axis_names,
            mesh_alpha=[link.latency_s + link.start_s for link in model.links],
            mesh_beta=[link.seconds_per_byte for link in model.links],
        )
    (catalog,) = source.open(checkpoint)
    chain = maps.read()
    stored, files = stored_layouts(mapped(catalog, chain[:-1]), max(mesh.ids) + 1)
    plan = plan_reshard(
        stored,
        (mesh, rules.read()),
        names=chain[-1] if chain else None,
        dtype=dtype,
        max_bytes=max_bytes,
    )
    if as_json:
        named = {str(number): name for number, name in files.items()}
        say(json.dumps({**plan.as_dict(), "files": named}))
    else:
        say(plan.text(files))
