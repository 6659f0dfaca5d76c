"""The command `shardspec check-map`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypedDict, TypeVar

import click

from shardspec.cli.output import say
from shardspec.errors import InputFileError
from shardspec.input_files import read_input_file
from shardspec.resharding.check import MapReport, check_map
from shardspec.resharding.maps import NameMap
from shardspec.resharding.shipped import map_chain
from shardspec.text import counted, shown

__all__ = ["MapOptions", "command", "map_options", "maps_of"]

_MOST_BYTES: Final = 64 << 20
"""Of a file of shapes or sizes."""

_SIZES: Final = click.option(
    "--sizes",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="JSON",
    help="A model's config.json: its whole numbers are sizes that the map may name.",
)


@click.command(
    "check-map",
    epilog="""\b
Examples:
  shardspec check-map map.toml --source ckpt --target shapes.json
  shardspec check-map llama-hf-to-megatron --sizes config.json --source ckpt

\b
MAP is a TOML file, or the name of a map that comes with shardspec, as llama-hf-to-megatron or, by
way of hf, llama-megatron-to-fused. A file of shapes has names and lists of sizes:
{"embed.weight": [32000, 4096]}. Without --target, the names and shapes that the map implies are
checked, and printed with --json.
""",
)
@click.argument("map_", metavar="MAP")
@click.option("--source", required=True, metavar="CKPT", help="A checkpoint, or a file of shapes.")
@click.option("--target", metavar="CKPT", help="The same, of what is to be written.")
@_SIZES
@click.option("--reverse", is_flag=True, help="Check the map the other way round.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    map_: str, source: str, target: str | None, sizes: Path | None, reverse: bool, as_json: bool
) -> None:
    """Prove that a map writes every element of a target exactly once.

    Exit code 3 says that it does not; the first holes and overlaps are printed.
    """
    *firsts, last = maps_of({"map_": map_, "sizes": sizes, "reverse_map": reverse})
    before = _shapes(source)
    for one in firsts:
        between = one.target_shapes(before)
        _refuse_holes(check_map(one, before, between))
        before = between
    after = last.target_shapes(before) if target is None else _shapes(target)
    report = check_map(last, before, after)
    if as_json:
        say(json.dumps(_record(report, after)))
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


class MapOptions(TypedDict):
    """What the options of `map_options` give."""

    map_: str | None
    sizes: Path | None
    reverse_map: bool


_Command = TypeVar("_Command", bound=Callable[..., Any])


def map_options(command: _Command) -> _Command:
    """Add the options that name a map of a checkpoint's tensors."""
    for option in (
        click.option("--reverse-map", is_flag=True, help="Take the map the other way round."),
        _SIZES,
        click.option(
            "--map", "map_", metavar="MAP", help="A name map: a TOML file, or one that comes along."
        ),
    ):
        command = option(command)
    return command


def maps_of(options: MapOptions) -> tuple[NameMap, ...]:
    """Return the maps that `map_options` name, to be taken one after the other."""
    map_, sizes, reverse = options["map_"], options["sizes"], options["reverse_map"]
    if map_ is None:
        if sizes is not None or reverse:
            raise click.UsageError("--sizes and --reverse-map are of a map; give it by --map")
        return ()
    return _read_maps(map_, sizes, reverse=reverse)


def _read_maps(map_: str, sizes: Path | None, *, reverse: bool) -> tuple[NameMap, ...]:
    """Return maps given by name or file, with the sizes that a model's config says."""
    from shardspec.checkpoint.store import path_exists

    config = {} if sizes is None else _json(sizes)
    known = {k: v for k, v in config.items() if type(v) is int}
    if Path(map_).suffix or path_exists(Path(map_)):
        found = NameMap.load(map_).with_sizes(known)
        return (found.reversed() if reverse else found,)
    return map_chain(map_, known, reverse=reverse)


def _record(report: MapReport, target: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {
        "total": not report.problems,
        "equations": len(report.equations),
        "problems": list(report.problems),
        "unused": list(report.unused),
        "target": {name: list(shape) for name, shape in target.items()},
    }


def _shapes(place: str) -> dict[str, tuple[int, ...]]:
    from shardspec.checkpoint.store import path_exists

    if place.endswith(".json") and path_exists(Path(place)):
        found = {}
        for name, sizes in _json(Path(place)).items():
            if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
                raise InputFileError(f"{place}: {shown(name)} has {shown(sizes)}, no list of sizes")
            found[name] = tuple(sizes)
        return found
    from shardspec.checkpoint.open import open_checkpoint

    catalog = open_checkpoint(Path(place))
    return {name: catalog.outline(name).shape for name in catalog.names}


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(read_input_file(path, _MOST_BYTES))
    except InputFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InputFileError(f"{path}: holds no JSON object")
    return found
