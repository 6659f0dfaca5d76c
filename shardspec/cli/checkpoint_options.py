"""Options of the commands that read checkpoints."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from shardspec.cli.options import FILE, Declared, Kind, flag, option
from shardspec.errors import CheckpointError, InputFileError
from shardspec.input_files import read_input_file

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog
    from shardspec.resharding.name_map import NameMap

_MOST_BYTES: Final = 64 << 20  # of a file of shapes or sizes


def _as_path(text: str) -> Path:
    from shardspec.checkpoint.store import as_path

    if not text:
        raise ValueError("an empty text is not a path; '.' is the working directory")
    return as_path(text)


CHECKPOINT: Final = Kind("CKPT", _as_path)  # a path, or a URL such as ``s3://bucket/model``
OTHER: Final = Kind("OTHER", _as_path)


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a user says about a checkpoint whose format does not say it."""

    ranks: int | None = option(
        "N",
        "How many ranks wrote the checkpoint, for formats that do not say it.",
        type=click.IntRange(1),
    )
    source_rules: Path | None = option(
        FILE,
        "TOML file that says how the ranks shard tensors, for formats that do not say it and names "
        "that the library does not know.",
    )

    def open(self, *paths: Path | None, quiet: bool = False) -> "list[Catalog]":
        """Open checkpoints; what is remarkable about them goes to stderr."""
        from shardspec.checkpoint.open import open_checkpoints

        named = [path for path in paths if path is not None]
        found = open_checkpoints(named, ranks=self.ranks, source_rules=self.source_rules)
        for catalog in () if quiet else found:
            for note in catalog.notes:
                click.echo(f"note: {catalog.directory}: {note}", err=True)
        return found


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions:
    """Which tensors are meant, and what they are called."""

    include: tuple[str, ...] = option(
        "PATTERN",
        "Only tensors whose name matches (as in a shell); may be given several times.",
        multiple=True,
    )
    exclude: tuple[str, ...] = option(
        "PATTERN", "No tensors whose name matches; may be given several times.", multiple=True
    )
    rename: tuple[tuple[str, str], ...] = option(
        "REGEX NEW",
        "Replace the first match of REGEX in every name by NEW; may be given several times.",
        multiple=True,
        type=(Kind("REGEX", _expression), str),
    )

    def arguments(self) -> dict[str, Any]:
        """Return them as `merge` takes them."""
        return {**vars(self), "include": self.include or None}


@dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """How to shard tensors."""

    rules: Path | None = option(FILE, "TOML file with name patterns and specs.")
    rule: tuple[tuple[str, str], ...] = option(
        "PATTERN SPEC", "One more rule; may be given several times.", multiple=True, nargs=2
    )

    def read(self) -> dict[str, str]:
        """Return pattern to spec."""
        return {**({} if self.rules is None else read_rules(self.rules)), **dict(self.rule)}


def read_rules(path: Path) -> dict[str, str]:
    """Read rules from a TOML file: one line a pattern, ``"*.weight" = "[S0,R]"``."""
    from shardspec.checkpoint.formats.tensor_parallel import read_toml

    rules = {}
    for pattern, spec in read_toml(path).items():
        if not isinstance(spec, str):
            raise CheckpointError(
                f"{path}: the rule of {pattern!r} is {spec!r}, not a spec in quotes; a pattern "
                "with dots or stars has to be in quotes too"
            )
        rules[pattern] = spec
    return rules


def sizes_option() -> Declared:
    """Declare the option for the sizes that a map may name."""
    path = click.Path(path_type=Path, exists=True, dir_okay=False)
    text = (
        "The model's config.json, whose numbers the map may name; the one beside CKPT counts too."
    )
    return option("JSON", text, type=path)


def drop_option() -> Declared:
    """Declare the option for tensors that a map need not use."""
    text = (
        "Leave tensors of CKPT behind whose name matches, although the map has no use for them; "
        "may be given several times."
    )
    return option("PATTERN", text, multiple=True)


@dataclass(frozen=True, kw_only=True)
class MapOptions:
    """The map that a checkpoint's tensors go through."""

    map: str | None = option("MAP", "A name map: a TOML file, or one that comes along.")
    sizes: Path | None = sizes_option()
    reverse_map: bool = flag("Take the map the other way round.")
    drop: tuple[str, ...] = drop_option()

    def read(self) -> "tuple[NameMap, ...]":
        """Return the maps to be taken one after the other."""
        if self.map is not None:
            return read_maps(self.map, self.sizes, reverse=self.reverse_map)
        if self.sizes is not None or self.reverse_map or self.drop:
            raise click.UsageError(
                "--sizes, --reverse-map and --drop are of a map; give it by --map"
            )
        return ()


def read_maps(name: str, sizes: Path | None, *, reverse: bool) -> "tuple[NameMap, ...]":
    """Return maps given by name or file, with the sizes of a model's config."""
    from shardspec.checkpoint.store import path_exists
    from shardspec.resharding.name_map import NameMap
    from shardspec.resharding.shipped import map_chain

    config = {} if sizes is None else read_json(sizes)
    if Path(name).suffix or path_exists(Path(name)):
        found = NameMap.load(name).with_sizes(config)
        return (found.reversed() if reverse else found,)
    return map_chain(name, config, reverse=reverse)


def read_json(path: Path) -> dict[str, object]:
    """Return the object that a JSON file holds; `InputFileError` if it holds none."""
    data = read_input_file(path, _MOST_BYTES)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InputFileError(f"{path}: holds no JSON object")
    return found
