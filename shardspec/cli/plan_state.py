"""The command `shardspec plan-state`."""

import json
from pathlib import Path
from typing import Unpack

import click

from shardspec.checkpoint.load import stored_layouts
from shardspec.checkpoint.mapped import mapped
from shardspec.checkpoint.reshard import read_rules
from shardspec.cli.arguments import parse_bytes, parsed
from shardspec.cli.check_map import map_options, maps_of
from shardspec.cli.checkpoint_options import CheckpointPath, open_both, rules_option, source_options
from shardspec.cli.options import ClusterOptions, build_cluster, cluster_options, json_option
from shardspec.cli.output import say
from shardspec.mesh import DeviceMesh
from shardspec.resharding.plan import plan_reshard

__all__ = ["command"]


@click.command(
    "plan-state",
    epilog="""\b
Examples:
  shardspec plan-state ckpt --mesh 8 --rules rules.toml
  shardspec plan-state ckpt --mesh dp=2,tp=4 --rule '*.weight' '[S(tp),R]' --json
  shardspec plan-state ckpt --mesh 8 --map llama-hf-to-fused --sizes config.json
""",
)
@click.argument("checkpoint", type=CheckpointPath(), metavar="CKPT")
@cluster_options
@rules_option("--rules", "rules_file", "TOML file with name patterns and specs.")
@click.option(
    "--rule",
    "rule_pairs",
    multiple=True,
    nargs=2,
    metavar="PATTERN SPEC",
    help="One more rule; may be given several times.",
)
@map_options
@click.option("--dtype", metavar="NAME", help="What floating-point tensors become.")
@click.option(
    "--max-bytes",
    callback=parsed(parse_bytes),
    metavar="SIZE",
    help="Bytes in buckets of each device.",
)
@source_options
@json_option("Print the plan as JSON.")
def command(
    checkpoint: Path,
    rules_file: Path | None,
    rule_pairs: tuple[tuple[str, str], ...],
    map_: str | None,
    sizes: Path | None,
    reverse_map: bool,
    dtype: str | None,
    max_bytes: int | None,
    ranks: int | None,
    source_rules: Path | None,
    as_json: bool,
    **cluster: Unpack[ClusterOptions],
) -> None:
    """Plan on paper how the devices of a mesh get a model from the checkpoint CKPT.

    Says which device reads how much from which files. No tensor is read.
    """
    devices, model = build_cluster(**cluster)
    mesh = devices
    if cluster["links"] is not None or cluster["profile"] is not None:
        mesh = DeviceMesh(
            devices.ids,
            devices.shape,
            axis_names=devices.axis_names,
            mesh_alpha=[link.latency_s + link.start_s for link in model.links],
            mesh_beta=[link.seconds_per_byte for link in model.links],
        )
    rules = {} if rules_file is None else read_rules(rules_file)
    catalog, _ = open_both(checkpoint, None, ranks, source_rules)
    maps = maps_of({"map_": map_, "sizes": sizes, "reverse_map": reverse_map})
    source, files = stored_layouts(mapped(catalog, maps[:-1]), max(mesh.ids) + 1)
    plan = plan_reshard(
        source,
        (mesh, {**rules, **dict(rule_pairs)}),
        names=maps[-1] if maps else None,
        dtype=dtype,
        max_bytes=max_bytes,
    )
    if as_json:
        named = {str(number): name for number, name in files.items()}
        say(json.dumps({**plan.as_dict(), "files": named}))
        return
    say(plan.text(files))
