"""Defines the options of all commands that read checkpoints, such as ``--include``."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

import click

from shardspec.cli.command import Option, grouped, refuse_if
from shardspec.cli.options import EXISTING_PATH, FILE_PATH, Kind
from shardspec.cli.output import say
from shardspec.errors import CheckpointError, InputFileError, LayoutError
from shardspec.input_files import read_json_object
from shardspec.text import shown

if TYPE_CHECKING:
    from shardspec.checkpoint.catalog import Catalog
    from shardspec.checkpoint.convert.model_names import ModelNames
    from shardspec.families.family import NamesOf
    from shardspec.layout.layout import Layout
    from shardspec.mesh.device_mesh import DeviceMesh
    from shardspec.resharding.name_map import NameMap

_EMBEDDING: Final = "embedding.word_embeddings.weight"


def _as_path(text: str) -> PurePath:
    from shardspec.checkpoint.storage import storage_path

    if not text:
        raise ValueError("an empty text is not a path; '.' is the working directory")
    return storage_path(text)


CHECKPOINT: Final = Kind("CKPT", _as_path, "file")  # a path, or a URL such as ``s3://bucket/model``
OUTPUT: Final = Kind("FILE", _as_path, "file")
OTHER: Final = Kind("OTHER", _as_path, "file")
checkpoint_argument: Final = click.argument("checkpoint", type=CHECKPOINT, metavar="CKPT")
checkpoints_argument: Final = click.argument(
    "checkpoints", type=CHECKPOINT, metavar="CKPT...", nargs=-1, required=True
)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options that tell what the format of a checkpoint does not record, such as --ranks."""

    ranks: int | None
    source_rules: Path | None

    def open(self, *paths: PurePath | None) -> "list[Catalog]":
        """Open checkpoints, and print their notes to stderr."""
        from shardspec.checkpoint.open import open_checkpoints

        named = [path for path in paths if path is not None]
        catalogs = open_checkpoints(named, ranks=self.ranks, source_rules=self.source_rules)
        for catalog in catalogs:
            for note in catalog.facts.notes:
                say(f"note: {catalog.directory}: {note}", err=True)
        return catalogs


source_options: Final = grouped(
    "source",
    SourceOptions,
    Option(
        "ranks",
        "Input",
        "How many ranks wrote the checkpoint, for formats that do not record it.",
        {"metavar": "N", "type": click.IntRange(1)},
    ),
    Option(
        "source_rules",
        "Input",
        "TOML file of how the ranks shard tensors, for formats that do not record it and names "
        "that the library does not know.",
        {"type": FILE_PATH},
    ),
)


@dataclass(frozen=True, slots=True)
class SumOptions:
    """Options for sums: the checkpoints that are added, and the weight of each."""

    weights: tuple[float, ...] | None
    plus: PurePath | None
    minus: PurePath | None
    scale: float
    take_first: tuple[str, ...]
    lora: PurePath | None

    def places(self, checkpoints: tuple[PurePath, ...]) -> tuple[PurePath, ...]:
        """Return the checkpoints to sum, in order."""
        more = tuple(path for path in (self.plus, self.minus) if path is not None)
        refuse_if(
            bool(more) and (self.weights is not None or len(checkpoints) > 1),
            "--plus and --minus change one CKPT; for a sum of several give --weights alone",
        )
        refuse_if(not more and self.scale != 1, "--scale needs --plus or --minus; omit it")
        return (*checkpoints, *more)

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `merge`."""
        weights = self.weights
        if self.plus is not None or self.minus is not None:
            scales = (self.plus, self.scale), (self.minus, -self.scale)
            weights = (1.0, *(scale for path, scale in scales if path is not None))
        return {"weights": weights, "take_first": self.take_first, "lora": self.lora}


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(f"{shown(text)} are not numbers; give them as in 0.2,0.3,0.5") from None


sum_options: Final = grouped(
    "sums",
    SumOptions,
    Option(
        "weights",
        "Input",
        "Sum several CKPT: w1 of the first + w2 of the second + ..., as in 0.2,0.3,0.5.",
        {"metavar": "W,W", "type": Kind("WEIGHTS", _weights)},
    ),
    Option("plus", "Input", "Add this checkpoint to CKPT, times --scale.", {"type": OTHER}),
    Option("minus", "Input", "Subtract this checkpoint from CKPT, times --scale.", {"type": OTHER}),
    Option(
        "scale",
        "Input",
        "Factor of --plus and --minus.",
        {"type": float, "default": 1.0, "show_default": True},
    ),
    Option(
        "take_first",
        "Input",
        "Take tensors whose names match from the first CKPT, as counters that differ; may be given "
        "several times.",
        {"metavar": "PATTERN", "multiple": True},
    ),
    Option(
        "lora",
        "Input",
        "Merge this adapter of PEFT into CKPT: LoRA, rsLoRA or DoRA.",
        {"metavar": "ADAPTER", "type": OTHER},
    ),
)


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _choice(
    include: tuple[str, ...], exclude: tuple[str, ...], rename: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    """Return the patterns and renames of a command, as keyword arguments of `merge`."""
    return {"include": include or None, "exclude": exclude, "rename": rename}


_SEVERAL: Final = {"metavar": "PATTERN", "multiple": True}

choice_options: Final = grouped(
    "choice",
    _choice,
    Option(
        "include",
        "Input",
        "Only tensors whose name matches (as in a shell); may be given several times.",
        _SEVERAL,
    ),
    Option(
        "exclude",
        "Input",
        "No tensors whose name matches; may be given several times.",
        _SEVERAL,
    ),
    Option(
        "rename",
        "Names",
        "Replace the first match of REGEX in every name by NEW; may be given several times.",
        {"metavar": "REGEX NEW", "multiple": True, "type": (Kind("REGEX", _expression), str)},
    ),
)


def _rules(rules: tuple[Path, ...], rule: tuple[tuple[str, str], ...]) -> dict[str, str] | None:
    """Return pattern -> spec, in the order in which rules apply; None without any rules."""
    if len(rules) > 1:
        raise click.UsageError(
            "--rules is given twice; put the rules in one file, or add some by --rule"
        )
    pairs = [pair for path in rules for pair in read_rules(path).items()] + list(rule)
    for pattern, count in Counter(pattern for pattern, _ in pairs).items():
        refuse_if(
            count > 1,
            f"the pattern {shown(pattern)} has {count} rules, but only one applies; "
            "omit the others",
        )
    return dict(pairs) or None


rule_options: Final = grouped(
    "rules",
    _rules,
    Option(
        "rules",
        "Output",
        "TOML file with name patterns and specs.",
        {"type": FILE_PATH, "multiple": True},
    ),
    Option(
        "rule",
        "Output",
        "One more rule, after those of the file; may be given several times. The last rule that "
        "matches a tensor counts.",
        {"metavar": "PATTERN SPEC", "multiple": True, "nargs": 2},
    ),
)


def read_rules(path: Path) -> dict[str, str]:
    """Return the rules in a TOML file, whose lines are like ``"*.weight" = "[S0,R]"``.

    Raises `CheckpointError` if it cannot be read, or a rule is not a spec in quotes.
    """
    from shardspec.checkpoint.formats.cut_rules import read_toml

    rules = {}
    for pattern, spec in read_toml(path).items():
        if not isinstance(spec, str):
            raise CheckpointError(
                f"{path}: the rule of {pattern!r} is {spec!r}, not a spec in quotes; a pattern "
                "with dots or stars has to be in quotes too"
            )
        rules[pattern] = spec
    return rules


@dataclass(frozen=True, slots=True)
class MapOptions:
    """Options of the map or model that renames and reshapes the tensors of a checkpoint."""

    map: Path | None
    drop: tuple[str, ...]
    model: Path | None
    names: "NamesOf | None"
    fill_from: PurePath | None = None
    drop_rows: bool = False

    def __post_init__(self) -> None:
        """Raise `click.UsageError` if options contradict each other."""
        alone = self.names is not None or self.fill_from is not None or self.drop_rows
        refuse_if(
            alone and (self.model is None or self.map is not None),
            "--names, --fill-from and --drop-rows are for a model; give --model, without --map",
        )
        refuse_if(
            self.model is None and self.map is None and bool(self.drop),
            "--drop is for a map or a model; give --map or --model, or use --exclude",
        )

    def config(self, checkpoint: PurePath) -> Path:
        """Return the path of the model's config."""
        assert self.model is not None, "the caller asks"
        beside = self.model == Path() and not (self.model / "config.json").is_file()
        return Path(str(checkpoint)) if beside else self.model

    def read(self, checkpoint: PurePath, *, stacked: bool = False) -> "ModelNames | NameMap | None":
        """Return the new names of tensors, by --map or by --model; None if neither was given.

        A map may use sizes of the model's config. With `stacked`, names of Megatron-core have no
        layer numbers, as in its checkpoints, where one tensor has all layers.
        """
        if self.map is not None:
            from shardspec.resharding.name_map import NameMap

            config = {} if self.model is None else read_json_object(_config_file(self.model))
            return NameMap.load(self.map).with_sizes(config)
        if self.model is None:
            return None
        from shardspec.checkpoint.convert.model_names import model_names

        names: NamesOf = self.names or "hf"
        names = "torch_dist" if stacked and names == "megatron" else names
        return model_names(
            self.config(checkpoint), names, fill_from=self.fill_from, drop_rows=self.drop_rows
        )


def _config_file(model: Path) -> Path:
    return model / "config.json" if model.is_dir() else model


model_option: Final = Option(
    "model",
    "Names",
    "The model's directory, or its config.json: which tensors the model has and how each is "
    "named follow from it, and its config and tokenizer are copied.",
    {"metavar": "DIR", "type": EXISTING_PATH},
)


def _names_of_others(
    map: Path | None, drop: tuple[str, ...], model: Path | None, names: "NamesOf | None"
) -> MapOptions:
    """Return the map options of commands that neither fill in tensors nor drop rows."""
    return MapOptions(map, drop, model, names)


_NAMES: Final = (
    Option(
        "map",
        "Names",
        "A name map of your own, a TOML file. Sizes that it names are those of the config.json "
        "beside CKPT, or of --model.",
        {"type": FILE_PATH},
    ),
    Option(
        "drop",
        "Names",
        "Skip tensors of CKPT whose names match, although the map or the model does not use "
        "them; may be given several times.",
        _SEVERAL,
    ),
    model_option,
    Option(
        "names",
        "Names",
        "Whose names the tensors get: those of transformers' files (default), of Megatron-core, "
        "or of engines that serve fused matrices.",
        {"type": click.Choice(("hf", "megatron", "fused"))},
    ),
)
compared_map_options: Final = grouped("maps", _names_of_others, *_NAMES)
map_options: Final = grouped(
    "maps",
    MapOptions,
    *_NAMES,
    Option(
        "fill_from",
        "Names",
        "The original checkpoint: tensors of the model that CKPT lacks are taken from it.",
        {"metavar": "ORIGIN", "type": OTHER},
    ),
    Option(
        "drop_rows",
        "Names",
        "Drop rows of a padded vocabulary even if they are neither zero nor equal.",
        {"is_flag": True},
    ),
)


layout_option: Final = Option(
    "layout",
    "Output",
    "How a trainer or an engine shards the model of --model, in place of rules: hf-tp:N, fsdp:N, "
    "megatron:tp=2,ep=4,etp=1,pp=2 or vllm:tp=8,ep=8.",
    {"metavar": "LAYOUT"},
)


def check_layout(maps: MapOptions, rules: dict[str, str] | None) -> None:
    """Raise `click.UsageError` if other options contradict ``--layout``."""
    refuse_if(
        maps.model is None or bool(rules) or maps.names is not None or maps.map is not None,
        "--layout says how the model of --model is named and sharded; give --model, and omit "
        "--names, --map, --rules and --rule",
    )


def under_layout(
    layout: str, maps: MapOptions, source: "Catalog", mesh: "DeviceMesh | None"
) -> "tuple[ModelNames, dict[str, Layout]]":
    """Return the names that a layout gives to the model's tensors, and the layout of each."""
    from shardspec.checkpoint.convert.model_names import model_names
    from shardspec.families.layouts import model_layouts, padded_config, parse_layout

    embedding = (name for name in source.names if name.endswith(_EMBEDDING))
    rows = next((source.outline(name).shape[0] for name in embedding), None)
    try:
        parsed = parse_layout(layout)
        named = model_names(
            maps.config(source.home),
            parsed.place,
            fill_from=maps.fill_from,
            drop_rows=maps.drop_rows,
        )
        config = padded_config(named.config, parsed, rows)
        layouts = model_layouts(config, layout, device_mesh=mesh)
    except LayoutError as error:
        raise InputFileError(*error.parts) from None
    return replace(named, config=config), layouts
